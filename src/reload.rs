//! Puts rules in force: at the start, and again when their files have changed. Bad rules never replace good ones.

use std::sync::Arc;

use tracing::{error, warn};

use crate::clock::Clock;
use crate::config::file::Loaded;
use crate::config::{LoadError, RulesConfig};
use crate::file_watch::FileWatch;
use crate::health::Health;
use crate::limiter::Limiter;
use crate::metrics::Metrics;

/// Where rules are put in force.
#[derive(Debug, Clone)]
pub struct InForce {
    /// Decides by the rules.
    pub limiter: Arc<Limiter>,
    /// Counts the loads, and keeps the statistics of the rules.
    pub metrics: Arc<Metrics>,
    /// Is told whether there are rules.
    pub health: Health,
    /// Says when rules are loaded.
    pub clock: Arc<Clock>,
}

/// Loads rules from files, and again when these change.
#[derive(Debug)]
pub struct Reloader {
    rules: RulesConfig,
    watch: FileWatch,
    /// The files could not be read at the last look, which was told.
    is_unreadable: bool,
}

// === impl InForce ===

impl InForce {
    /// Puts loaded rules in force, counts that and tells how many there are.
    pub fn put(&self, loaded: Loaded) {
        let Loaded { mut matcher, .. } = loaded;
        let (has_domains, rules) = (matcher.domains().next().is_some(), matcher.rules());
        let version = matcher.version().to_owned();
        self.metrics.adopt(&mut matcher);
        self.limiter.set_matcher(matcher);
        self.health.set_rules(has_domains);
        // Who sees the count grow sees what came of it.
        self.metrics.note_config_load(true, self.clock.now());
        if rules == 0 {
            warn!("there are no limits in the rules: everything passes");
        } else {
            warn!(rules, version, "loaded {rules} rules");
        }
    }

    /// Counts and tells that rules cannot be used, with a line for each fault.
    pub fn refuse(&self, fault: &LoadError) {
        self.metrics.note_config_load(false, self.clock.now());
        let kept = match &*self.limiter.matcher() {
            Some(_) => "the last good ones stay in force",
            None => "there are none in force, so calls fail",
        };
        for line in fault.to_string().lines() {
            error!("cannot load the rules, {kept}: {line}");
        }
    }
}

// === impl Reloader ===

impl Reloader {
    /// Watches the files of `rules`, to be loaded after this.
    pub fn new(rules: RulesConfig) -> Self {
        let watch = FileWatch::new(rules.paths());
        Reloader {
            rules,
            watch,
            is_unreadable: false,
        }
    }

    /// Reads the rules.
    pub fn load(&self) -> Result<Loaded, LoadError> {
        self.rules.load()
    }

    /// Whether the files are still as they were before they were read last. If not, that may be a mixture.
    pub fn is_current(&self) -> bool {
        self.rules.reads_stdin() || self.watch.is_unchanged(self.rules.paths())
    }

    /// Looks at the files, and puts what is in them in force if they have changed. Blocks while it reads.
    pub fn look(&mut self, in_force: &InForce) {
        // The standard input can be read once only.
        if self.rules.reads_stdin() || !self.watch.is_news(self.rules.paths()) {
            return;
        }
        let loaded = self.load();
        if !self.is_current() {
            warn!("the rule files changed while they were read: they will be read again");
            return;
        }
        match loaded {
            Ok(loaded) => {
                for warning in loaded.diagnostics.warnings() {
                    warn!("{warning}");
                }
                in_force.put(loaded);
                self.is_unreadable = false;
            }
            // What cannot be read may be readable soon, without a change that could be seen.
            Err(fault @ LoadError::Source(_)) => {
                if !self.is_unreadable {
                    in_force.refuse(&fault);
                }
                self.is_unreadable = true;
                self.watch.try_again();
            }
            Err(fault) => {
                in_force.refuse(&fault);
                self.is_unreadable = false;
            }
        }
    }
}
