//! Which edges were told, so that each is told once in a window.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use super::EventKind;
use crate::clock::nanoseconds;
use crate::key::{CounterKey, PlaceHasher};
use crate::limiter::Observation;
use crate::rate_limit::Algorithm;

/// The keys are spread over so many locks.
const SHARDS: usize = 16;

/// How many keys are remembered under one lock, which makes 2 MB under all of them. Edges of more keys than that in one window are
/// not told.
const MOST_REMEMBERED: usize = 3_584;

/// How long nothing is looked for that could be forgotten after it was looked for in vain, in nanoseconds.
const PURGE_INTERVAL: u64 = 1_000_000_000;

/// The keys whose edges were told.
#[derive(Debug, Default)]
pub(super) struct Announced {
    /// By the counter's place. Held for one look-up, or one pass over all keys of the shard.
    shards: [Mutex<Shard>; SHARDS],
}

#[derive(Debug, Default)]
struct Shard {
    told: HashMap<CounterKey, Told, PlaceHasher>,
    /// Not before this time is it worth looking for what can be forgotten.
    next_purge: u64,
}

/// Until when an edge is not told again, in monotonic nanoseconds.
#[derive(Debug, Default)]
struct Told {
    near_limit: u64,
    over_limit: u64,
}

/// What to do about an edge.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum News {
    /// Tell it.
    First,
    /// It was told in this window.
    Known,
    /// It cannot be remembered, so it is not told either.
    Lost,
}

impl Announced {
    /// Notes that the counter has come to an edge, to stay quiet about it until its window is over.
    pub(super) fn note(&self, observation: &Observation<'_>, kind: EventKind) -> News {
        let key = observation.hit.key;
        let now = observation.now.monotonic_nanoseconds();
        let until = now.saturating_add(window_left(observation));
        let shard = &self.shards[(key.place() >> 32) as usize % SHARDS];
        let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
        if !shard.told.contains_key(&key) && !shard.make_room(now) {
            return News::Lost;
        }
        let told = shard.told.entry(key).or_default();
        let quiet_until = match kind {
            EventKind::NearLimit => &mut told.near_limit,
            _ => &mut told.over_limit,
        };
        if *quiet_until > now {
            return News::Known;
        }
        *quiet_until = until;
        News::First
    }
}

impl Shard {
    fn make_room(&mut self, now: u64) -> bool {
        if self.told.len() >= MOST_REMEMBERED && self.next_purge <= now {
            self.told
                .retain(|_, told| told.near_limit.max(told.over_limit) > now);
            self.next_purge = now.saturating_add(PURGE_INTERVAL);
        }
        self.told.len() < MOST_REMEMBERED
    }
}

/// How long the window still lasts, in nanoseconds. Where there are no windows, a whole one.
fn window_left(observation: &Observation<'_>) -> u64 {
    let limit = observation.hit.limit;
    match limit.algorithm {
        Algorithm::FixedWindow(_) if limit.burst.is_none() => nanoseconds(observation.outcome.until_reset),
        _ => limit.window.nanoseconds(),
    }
}
