//! The task that has the store forget what has run out, and says when the store is full.

use std::mem;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval};
use tracing::{debug, warn};

use super::ServerError;
use crate::clock::Clock;
use crate::limiter::Limiter;
use crate::shutdown;
use crate::store::memory::{FullPolicy, Pressure};

/// How often counters that have run out are looked for.
const INTERVAL: Duration = Duration::from_secs(1);

/// After how many calm intervals a shortage of memory is over.
const CALM: u32 = 60;

/// Has the store forget what has run out, until it is told to end.
pub(super) async fn run(
    limiter: Arc<Limiter>,
    clock: Arc<Clock>,
    closed: watch::Receiver<bool>,
) -> Result<(), ServerError> {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut end = pin!(shutdown::closed(closed));
    let mut last_tick = clock.now();
    let mut shortage = Shortage::default();
    loop {
        tokio::select! {
            () = &mut end => return Ok(()),
            _ = ticks.tick() => {}
        }
        // A call that took its time at the last tick has made its decision by now.
        let (sweeper, then) = (Arc::clone(&limiter), mem::replace(&mut last_tick, clock.now()));
        // A sweep of millions of counters takes long; calls are not to wait behind it.
        let forgotten = spawn_blocking(move || sweeper.store().sweep(then))
            .await
            .expect("a sweep does not panic");
        if forgotten > 0 {
            debug!(forgotten, "forgot {forgotten} counters whose window has passed");
        }
        let room = limiter.store().capacity();
        match shortage.note(limiter.store().pressure()) {
            Some(News::Began) => warn!(
                counters = room,
                "the memory for counters is full: there is room for {room}; {}; raise the memory budget",
                match limiter.store().policy() {
                    FullPolicy::Evict => "those that give least away are forgotten early",
                    FullPolicy::Deny => "calls of new keys are refused",
                    FullPolicy::Allow => "calls of new keys pass without being counted",
                }
            ),
            Some(News::Ended(Pressure { evicted, turned_away })) => warn!(
                evicted,
                turned_away,
                "no counter was forgotten early for a minute; before, {evicted} were, and {turned_away} hits of new keys found no room"
            ),
            None => {}
        }
    }
}

/// One line in the log when memory gets short, and one when it is over.
#[derive(Debug, Default)]
struct Shortage {
    last: Pressure,
    /// What there was before it began, and for how many intervals it has been calm since; `None` outside of one.
    running: Option<(Pressure, u32)>,
}

#[derive(Debug, PartialEq, Eq)]
enum News {
    Began,
    Ended(Pressure),
}

impl Shortage {
    fn note(&mut self, pressure: Pressure) -> Option<News> {
        let before = mem::replace(&mut self.last, pressure);
        match &mut self.running {
            None if pressure != before => {
                self.running = Some((before, 0));
                Some(News::Began)
            }
            None => None,
            Some((_, calm)) if pressure != before => {
                *calm = 0;
                None
            }
            Some((start, calm)) => {
                *calm += 1;
                if *calm < CALM {
                    return None;
                }
                let ended = News::Ended(Pressure {
                    evicted: pressure.evicted - start.evicted,
                    turned_away: pressure.turned_away - start.turned_away,
                });
                self.running = None;
                Some(ended)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_is_told_once_until_it_has_been_calm_for_a_minute() {
        let mut shortage = Shortage::default();
        let mut note = |evicted| {
            shortage.note(Pressure {
                evicted,
                turned_away: 0,
            })
        };
        assert_eq!(note(0), None);
        assert_eq!(note(5), Some(News::Began));
        assert_eq!(note(9), None);
        assert!((1..CALM).all(|_| note(9).is_none()));
        assert_eq!(note(10), None);
        assert!((1..CALM).all(|_| note(10).is_none()));
        let ended = Pressure {
            evicted: 10,
            turned_away: 0,
        };
        assert_eq!(note(10), Some(News::Ended(ended)));
        assert_eq!(note(11), Some(News::Began));
    }
}
