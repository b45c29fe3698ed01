//! The task that writes snapshots.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};
use tracing::warn;

use super::ServerError;
use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::shutdown;
use crate::store::snapshot::SnapshotFile;

/// What a snapshot is made of, and where it goes.
#[derive(Clone)]
pub(super) struct Snapshots {
    pub(super) file: Arc<SnapshotFile>,
    /// How often.
    pub(super) period: Duration,
    pub(super) limiter: Arc<Limiter>,
    pub(super) clock: Arc<Clock>,
}

impl Snapshots {
    /// Writes one in each period, until told to end. What goes wrong is said once, and once more when it is well again.
    pub(super) async fn run(self, closed: watch::Receiver<bool>) -> Result<(), ServerError> {
        let mut ticks = interval(self.period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick is at once.
        ticks.tick().await;
        let mut end = pin!(shutdown::closed(closed));
        let mut is_failing = false;
        loop {
            tokio::select! {
                () = &mut end => return Ok(()),
                _ = ticks.tick() => {}
            }
            is_failing = !self.write(is_failing).await;
        }
    }

    /// Writes one; whether that worked.
    pub(super) async fn write(&self, was_failing: bool) -> bool {
        let path = self.file.path().display().to_string();
        let snapshots = self.clone();
        let written = spawn_blocking(move || {
            let now = snapshots.clock.now();
            snapshots.limiter.write_snapshot(&snapshots.file, now)
        })
        .await
        .expect("writing does not panic");
        match &written {
            Err(error) if !was_failing => warn!(%error, "cannot write the snapshot {path}: {error}"),
            Ok(()) if was_failing => warn!("the snapshot {path} is written again"),
            _ => {}
        }
        written.is_ok()
    }
}
