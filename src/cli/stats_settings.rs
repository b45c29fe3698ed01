//! The settings of metrics that are shown to Prometheus or sent to statsd.

use std::env;
use std::time::Duration;

use clap::Args;
use regex::Regex;
use tracing::{error, warn};

use super::server_settings::tcp;
use super::values;
use crate::config::{PrometheusConfig, Protocol, StatsdConfig};
use crate::metrics::mapping::Mapping;
use crate::metrics::prometheus::Names;
use crate::metrics::statsd::{Format, Lines, Mogrifier};

/// Where metrics go.
#[derive(Debug, Args)]
#[command(next_help_heading = "Metrics and events")]
pub(super) struct StatsSettings {
    /// Send metrics nowhere, whatever else is set; the HTTP port shows them all the same
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    disable_stats: bool,
    /// Send metrics to statsd [default: true, unless they go elsewhere]
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean,
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    use_statsd: Option<bool>,
    /// Send metrics to dogstatsd, over UDP
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    use_dog_statsd: bool,
    /// Where statsd or dogstatsd is
    #[arg(long, env, value_name = "ADDRESS", default_value = "localhost")]
    statsd_host: String,
    /// Its port
    #[arg(long, env, value_name = "PORT", value_parser = values::port, default_value = "8125")]
    statsd_port: u16,
    /// How statsd is reached: tcp or udp
    #[arg(long, env, value_name = "PROTOCOL", value_parser = values::protocol, default_value = "tcp")]
    statsd_protocol: Protocol,
    /// How often it is told what has been added
    #[arg(long, env, value_name = "DURATION", value_parser = values::period, default_value = "10s")]
    stats_flush_interval: Duration,
    /// Tags of all metrics: name:value, with commas between them
    #[arg(long, env, value_name = "TAGS", value_parser = values::pairs, default_value = "", hide_default_value = true)]
    extra_tags: values::Pairs,
    /// Names N of rules that make tags of parts of names for dogstatsd, with commas between them; each is in the variables
    /// `DOG_STATSD_MOGRIFIER_N_PATTERN`, `_NAME` and `_TAGS`
    #[arg(
        long,
        env,
        value_name = "NAMES",
        default_value = "",
        hide_default_value = true
    )]
    use_dog_statsd_mogrifiers: String,
    /// Show metrics on a port of their own as well
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    use_prometheus: bool,
    /// Address of that port
    #[arg(long, env, value_name = "ADDRESS:PORT", value_parser = values::address_and_port, default_value = ":9090")]
    prometheus_addr: (String, u16),
    /// Path of the page on that port
    #[arg(long, env, value_name = "PATH", value_parser = values::url_path, default_value = "/metrics")]
    prometheus_path: String,
    /// What names become on the page for Prometheus: a mapping file of `statsd_exporter`
    #[arg(long, env, value_name = "PATH", default_value = "", hide_default_value = true, value_parser = values::path)]
    prometheus_mapper_yaml: values::MaybePath,
    /// Show response times in milliseconds, though their name says seconds, where no mapping file says otherwise
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    prometheus_response_time_as_milliseconds: bool,
}

impl StatsSettings {
    pub(super) fn prometheus(&self) -> Option<PrometheusConfig> {
        if self.use_prometheus && self.disable_stats {
            warn!("USE_PROMETHEUS opens no port, since DISABLE_STATS is on");
        }
        let (host, port) = &self.prometheus_addr;
        (self.use_prometheus && !self.disable_stats).then(|| PrometheusConfig {
            listen: tcp(host, *port),
            path: self.prometheus_path.clone(),
        })
    }

    /// How metrics are called for Prometheus. A mapping file that cannot be used is told of, and left out: it is not worth
    /// an outage.
    pub(super) fn prometheus_names(&self) -> Names {
        let mapping = self.prometheus_mapper_yaml.0.as_ref().and_then(|path| {
            Mapping::read(path)
                .inspect_err(|fault| {
                    let path = path.display();
                    error!(
                        "PROMETHEUS_MAPPER_YAML is left out, metrics keep their usual names: {path}: {fault}"
                    );
                })
                .ok()
        });
        Names {
            mapping,
            milliseconds: self.prometheus_response_time_as_milliseconds,
        }
    }

    /// What is on all metrics, by name; without tags that have no value.
    pub(super) fn tags(&self) -> Vec<(String, String)> {
        let mut tags = self.extra_tags.0.clone();
        tags.retain(|(_, value)| !value.is_empty());
        tags.sort();
        tags
    }

    /// What is sent to statsd. That is the default of envoyproxy/ratelimit, but only where nothing else was asked for.
    pub(super) fn statsd(&self) -> Result<Option<StatsdConfig>, String> {
        if self.disable_stats {
            return Ok(None);
        }
        let asked_for: Vec<&str> = [
            ("USE_STATSD", self.use_statsd == Some(true)),
            ("USE_DOG_STATSD", self.use_dog_statsd),
            ("USE_PROMETHEUS", self.use_prometheus),
        ]
        .into_iter()
        .filter_map(|(variable, is_on)| is_on.then_some(variable))
        .collect();
        let format = match asked_for[..] {
            [_, _, ..] => {
                let both = asked_for.join(" and ");
                return Err(format!("{both} are on; turn on one of them"));
            }
            ["USE_DOG_STATSD"] => Format::DogStatsd(self.mogrifiers()?),
            ["USE_PROMETHEUS"] => return Ok(None),
            _ if self.use_statsd == Some(false) => return Ok(None),
            _ => Format::Statsd,
        };
        Ok(Some(StatsdConfig {
            host: self.statsd_host.clone(),
            port: self.statsd_port,
            protocol: match format {
                Format::Statsd => self.statsd_protocol,
                Format::DogStatsd(_) => Protocol::Udp,
            },
            flush_interval: self.stats_flush_interval,
            lines: Lines {
                format,
                tags: self.tags(),
            },
            is_asked_for: !asked_for.is_empty(),
        }))
    }

    fn mogrifiers(&self) -> Result<Vec<Mogrifier>, String> {
        let names = self.use_dog_statsd_mogrifiers.split(',').map(str::trim);
        names.filter(|name| !name.is_empty()).map(mogrifier).collect()
    }
}

/// Reads the variables of one mogrifier.
fn mogrifier(of: &str) -> Result<Mogrifier, String> {
    let variable = |part: &str| format!("DOG_STATSD_MOGRIFIER_{}_{part}", of.to_uppercase());
    let needed = |part: &str| {
        let name = variable(part);
        let set = env::var(&name).ok().filter(|value| !value.is_empty());
        set.ok_or_else(|| format!("USE_DOG_STATSD_MOGRIFIERS names {of}, but {name} is not set"))
    };
    let pattern = Regex::new(&needed("PATTERN")?)
        .map_err(|fault| format!("{} is no regular expression: {fault}", variable("PATTERN")))?;
    let tags = env::var(variable("TAGS")).unwrap_or_default();
    let tags = values::pairs(&tags).map_err(|advice| format!("{}: {advice}", variable("TAGS")))?;
    if tags
        .0
        .iter()
        .any(|(tag, value)| tag.is_empty() || value.is_empty())
    {
        return Err(format!(
            "{}: every tag needs a name and a value",
            variable("TAGS")
        ));
    }
    Ok(Mogrifier {
        pattern,
        name: needed("NAME")?,
        tags: tags.0,
    })
}
