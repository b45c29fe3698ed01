//! The task that delivers events.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::interval;

use super::ServerError;
use crate::clock::Clock;
use crate::events::Delivery;
use crate::limiter::Limiter;
use crate::shutdown;

/// How often it is seen whether bans are over.
const INTERVAL: Duration = Duration::from_millis(100);

/// Delivers events until it is told to end, and then what is still waiting.
pub(super) async fn run(
    mut delivery: Delivery,
    limiter: Arc<Limiter>,
    clock: Arc<Clock>,
    closed: watch::Receiver<bool>,
) -> Result<(), ServerError> {
    let mut ticks = interval(INTERVAL);
    let mut end = pin!(shutdown::closed(closed));
    loop {
        tokio::select! {
            () = &mut end => break,
            () = delivery.wait() => {}
            _ = ticks.tick() => {}
        }
        delivery.deliver(limiter.store(), clock.now());
    }
    while delivery.deliver(limiter.store(), clock.now()) > 0 {}
    Ok(())
}
