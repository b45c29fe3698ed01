//! The task that looks whether files have changed: rules, and certificates.

use std::pin::pin;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};

use super::ServerError;
use crate::reload::{InForce, Reloader};
use crate::shutdown;
use crate::tls::TlsWatch;

/// What is looked at.
pub(super) struct Looks {
    /// How often. A change is taken up at the second look that sees it.
    pub(super) interval: Duration,
    pub(super) rules: Option<Reloader>,
    pub(super) in_force: InForce,
    pub(super) certificates: Vec<TlsWatch>,
}

impl Looks {
    /// Looks until everything is to close.
    pub(super) async fn run(mut self, closed: watch::Receiver<bool>) -> Result<(), ServerError> {
        let mut ticks = interval(self.interval);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut closed = pin!(shutdown::closed(closed));
        loop {
            tokio::select! {
                () = &mut closed => return Ok(()),
                _ = ticks.tick() => {}
            }
            // Large rules take a while to read; calls are not to wait for that.
            let look = spawn_blocking(move || {
                self.look();
                self
            });
            self = look.await.expect("a look does not panic");
        }
    }

    fn look(&mut self) {
        if let Some(rules) = &mut self.rules {
            rules.look(&self.in_force);
        }
        for certificates in &mut self.certificates {
            certificates.look();
        }
    }
}
