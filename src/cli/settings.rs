//! The settings: one flag each, with the environment variable it falls back to. A flag wins over its variable.
//!
//! Variables without a prefix are those of envoyproxy/ratelimit and mean what they mean there.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use tracing::level_filters::LevelFilter;

use super::{control_group, values};
use crate::config::{RulesConfig, RulesSource, RuntimeDirectory};
use crate::events::{Delivery, EventsConfig, Sink};
use crate::limiter::{LimiterConfig, ResponseHeaderNames};
use crate::metrics::Metrics;
use crate::rate_limit::Charge;
use crate::store::memory::{FullPolicy, MemoryConfig};
use crate::telemetry::{self, LogFormat, LogGuard};
use crate::top::Top;

/// Where envoyproxy/ratelimit looks for rules if it is not told.
const DEFAULT_RUNTIME_ROOT: &str = "/srv/runtime_data/current";

/// How rule files are read.
#[derive(Debug, Args)]
#[command(next_help_heading = "Rules")]
pub(super) struct RuleFileSettings {
    /// Let several files add descriptors to one domain
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    merge_domain_config: bool,
    /// Leave out files and directories whose name starts with a dot
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    runtime_ignoredotfiles: bool,
}

impl RuleFileSettings {
    pub(super) fn to_config(&self, source: RulesSource) -> RulesConfig {
        RulesConfig {
            source,
            merge_domains: self.merge_domain_config,
            ignore_dotfiles: self.runtime_ignoredotfiles,
        }
    }
}

/// Where the rules of a server are.
#[derive(Debug, Args)]
#[command(next_help_heading = "Rules")]
pub(super) struct RuleSettings {
    /// The rules: a file, or a directory of files (repeatable). Without it, the RUNTIME variables say where the rules are;
    /// without them, an example is served
    #[arg(long = "config", env = "TOLLGATE_CONFIG", value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Root of envoyproxy/ratelimit's directory layout [default: `/srv/runtime_data/current`]
    #[arg(long, env, value_name = "DIR")]
    runtime_root: Option<PathBuf>,
    /// Directory below the root
    #[arg(long, env, value_name = "DIR")]
    runtime_subdirectory: Option<PathBuf>,
    /// Directory below that one, which holds the rules
    #[arg(long, env, value_name = "DIR", default_value = "config")]
    runtime_appdirectory: String,
    /// The rules may also be in files and directories beside the last directory that are called like it, with a dot and
    /// more
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "true",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    runtime_watch_root: bool,
    /// Start without rules if there are none that can be used, and take them up when they have changed
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    force_start_without_initial_config: bool,
    #[command(flatten)]
    files: RuleFileSettings,
}

impl RuleSettings {
    /// Whether the server may start before there are rules.
    pub(super) fn may_start_without(&self) -> bool {
        self.force_start_without_initial_config
    }

    pub(super) fn merge_domains(&self) -> bool {
        self.files.merge_domain_config
    }

    /// Whether the server is not to start without rules. In the layout of envoyproxy/ratelimit it starts, as that does.
    pub(super) fn must_load(&self, rules: &RulesConfig) -> bool {
        !self.force_start_without_initial_config && !matches!(rules.source, RulesSource::Runtime(_))
    }

    pub(super) fn to_config(&self) -> RulesConfig {
        self.files.to_config(self.source())
    }

    fn source(&self) -> RulesSource {
        if !self.paths.is_empty() {
            return RulesSource::Paths(self.paths.clone());
        }
        let asked_for = self.runtime_root.is_some() || self.runtime_subdirectory.is_some();
        if !asked_for && !Path::new(DEFAULT_RUNTIME_ROOT).exists() {
            return RulesSource::Example;
        }
        RulesSource::Runtime(RuntimeDirectory {
            root: self
                .runtime_root
                .clone()
                .unwrap_or_else(|| DEFAULT_RUNTIME_ROOT.into()),
            subdirectory: self.runtime_subdirectory.clone().unwrap_or_default(),
            appdirectory: self.runtime_appdirectory.clone(),
            watch_root: self.runtime_watch_root,
        })
    }
}

/// How decisions are made.
#[derive(Debug, Args)]
#[command(next_help_heading = "Decisions")]
pub(super) struct DecisionSettings {
    /// Refuse nothing; statuses and statistics still tell what would have been refused
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    shadow_mode: bool,
    /// Treat every limit as a quota: refuse a request only if all its limits are over
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    quota_mode: bool,
    /// The share of a limit above which hits count as near it
    #[arg(long, env, value_name = "RATIO", value_parser = values::ratio, default_value = "0.8")]
    near_limit_ratio: f32,
    /// When a descriptor is over its limit, do not charge the others of the same request (domains can say `charge:` instead)
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    stop_cache_key_increment_when_overlimit: bool,
    /// Send headers with limit, remaining hits and seconds until reset to the client
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    limit_response_headers_enabled: bool,
    /// Name of the header with the limit
    #[arg(long, env, value_name = "NAME", value_parser = values::header_name, default_value = "RateLimit-Limit")]
    limit_limit_header: String,
    /// Name of the header with the remaining hits
    #[arg(long, env, value_name = "NAME", value_parser = values::header_name, default_value = "RateLimit-Remaining")]
    limit_remaining_header: String,
    /// Name of the header with the seconds until reset
    #[arg(long, env, value_name = "NAME", value_parser = values::header_name, default_value = "RateLimit-Reset")]
    limit_reset_header: String,
    /// Put the request and the metadata of its rules into the answer's dynamic metadata
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    response_dynamic_metadata: bool,
    /// Send a header of this name to refused clients that are banned, with the seconds that the ban still lasts
    #[arg(long, env = "TOLLGATE_BAN_HEADER", value_name = "NAME", value_parser = values::header_name)]
    ban_header: Option<String>,
}

impl DecisionSettings {
    pub(super) fn to_config(&self) -> LimiterConfig {
        LimiterConfig {
            shadow_mode: self.shadow_mode,
            quota_mode: self.quota_mode,
            near_limit_ratio: self.near_limit_ratio,
            charge: if self.stop_cache_key_increment_when_overlimit {
                Charge::StopWhenOverLimit
            } else {
                Charge::Each
            },
            response_headers: self.limit_response_headers_enabled.then(|| ResponseHeaderNames {
                limit: self.limit_limit_header.clone(),
                remaining: self.limit_remaining_header.clone(),
                reset: self.limit_reset_header.clone(),
            }),
            dynamic_metadata: self.response_dynamic_metadata,
            ban_header: self.ban_header.clone(),
            memory: MemoryConfig::default(),
        }
    }
}

/// How much memory the counters may take.
#[derive(Debug, Args)]
#[command(next_help_heading = "Memory")]
pub(super) struct MemorySettings {
    /// How much memory the counters may take [default: half of the control group's limit, else 1GiB]
    #[arg(long, env = "TOLLGATE_MEMORY_BUDGET", value_name = "SIZE", value_parser = values::budget)]
    memory_budget: Option<u64>,
    /// What to do with a new key when there is no room: evict forgets what gives least away, deny refuses the call, allow
    /// lets it pass without counting it
    #[arg(long, env = "TOLLGATE_MEMORY_POLICY", value_name = "POLICY", value_parser = values::full_policy,
          default_value = "evict")]
    memory_policy: FullPolicy,
}

/// Half of what the control group may use, else 1 GiB.
fn default_budget() -> u64 {
    control_group::memory_limit().map_or(1 << 30, |limit| (limit / 2).max(values::LEAST_BUDGET))
}

impl MemorySettings {
    pub(super) fn to_config(&self) -> MemoryConfig {
        MemoryConfig {
            budget: Some(self.memory_budget.unwrap_or_else(default_budget)),
            policy: self.memory_policy,
        }
    }
}

/// Who wants to know what is limited.
#[derive(Debug, Args)]
#[command(next_help_heading = "Metrics and events")]
pub(super) struct ObserverSettings {
    /// Tell once per key and window when a key comes near its limit, goes over it, is banned and is free again: to any of log,
    /// counter and ring, with commas between them. The ring is what /events shows
    #[arg(long = "events", env = "TOLLGATE_EVENTS", value_name = "SINKS",
          value_parser = values::sinks, default_value = "", hide_default_value = true)]
    sinks: BTreeSet<Sink>,
    /// Show on /top so many keys of each domain that are refused most; 0 shows none
    #[arg(long, env = "TOLLGATE_TOP", value_name = "KEYS", value_parser = values::top, default_value = "0")]
    top: usize,
    /// How many keys that hold values of requests have metrics of their own; those of further ones are counted together
    #[arg(
        long,
        env = "TOLLGATE_METRIC_KEYS",
        value_name = "KEYS",
        default_value = "10000"
    )]
    metric_keys: usize,
}

impl ObserverSettings {
    pub(super) fn metrics(&self) -> Arc<Metrics> {
        Arc::new(Metrics::new(self.metric_keys))
    }

    pub(super) fn events(&self, near_limit_ratio: f32) -> Option<Delivery> {
        Delivery::new(EventsConfig {
            sinks: self.sinks.clone(),
            near_limit_ratio,
        })
    }

    pub(super) fn top(&self) -> Option<Arc<Top>> {
        Top::new(self.top)
    }
}

/// What is logged, and how.
#[derive(Debug, Args)]
#[command(next_help_heading = "Logs")]
pub(super) struct LogSettings {
    /// error, warn, info, debug or trace
    #[arg(long, env, value_name = "LEVEL", value_parser = values::log_level, default_value = "warn")]
    log_level: LevelFilter,
    /// json, or text
    #[arg(long, env, value_name = "FORMAT", value_parser = values::log_format, default_value = "text")]
    log_format: LogFormat,
}

impl LogSettings {
    pub(super) fn init(&self) -> LogGuard {
        telemetry::init(self.log_level, self.log_format)
    }
}
