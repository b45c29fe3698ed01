//! The arithmetic of limiting: pure functions of a limit, a counter's state, the hits and the time.
//!
//! One file per algorithm, each of which says what its [`State`] means. A state of zeros is an unused counter in all of
//! them. Nothing here knows of keys, stores or requests.

pub mod ban;
pub mod fixed_window;
pub mod sliding_window;
pub mod token_bucket;

use std::time::Duration;

use crate::clock::{Timestamp, seconds_rounded_up};
use crate::descriptor::Hits;
use crate::rate_limit::{Algorithm, RateLimit, WindowStart};

/// What a counter remembers: two words, which each algorithm reads in its own way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct State(pub(crate) [u64; 2]);

/// Which algorithm a state belongs to. Kept with the counter's key, so that a counter can be judged without its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Fixed windows of the clock or the calendar.
    ClockWindow = 0,
    /// Fixed windows from a key's first hit.
    FirstHitWindow = 1,
    /// A sliding window.
    SlidingWindow = 2,
    /// A token bucket.
    TokenBucket = 3,
    /// The refusals of a key, and its ban.
    Ban = 4,
}

impl Kind {
    const ALL: [Kind; 5] = [
        Kind::ClockWindow,
        Kind::FirstHitWindow,
        Kind::SlidingWindow,
        Kind::TokenBucket,
        Kind::Ban,
    ];

    /// The kind of a limit's counter.
    pub fn of(limit: &RateLimit) -> Self {
        match &limit.algorithm {
            Algorithm::FixedWindow(WindowStart::Clock | WindowStart::Calendar(_)) => Kind::ClockWindow,
            Algorithm::FixedWindow(WindowStart::FirstHit(_)) => Kind::FirstHitWindow,
            Algorithm::SlidingWindow => Kind::SlidingWindow,
            Algorithm::TokenBucket { .. } => Kind::TokenBucket,
        }
    }

    /// The kind with this number. Numbers that stand for none belong to keys that were never made.
    pub(crate) fn from_number(number: u64) -> Self {
        Kind::ALL
            .into_iter()
            .find(|kind| *kind as u64 == number)
            .unwrap_or(Kind::ClockWindow)
    }

    /// When a counter in this state is as good as new, in monotonic nanoseconds; of a window of the clock, if that is not
    /// set meanwhile.
    pub(crate) fn forgettable_at(self, state: &State) -> u64 {
        match self {
            Kind::ClockWindow => fixed_window::ClockState::from(*state).closes_nanoseconds(),
            _ => state.0[0],
        }
    }

    /// Whether forgetting a counter of this kind in this state changes no answer. `now` may be a little old.
    pub fn is_forgettable(self, state: &State, now: Timestamp) -> bool {
        match self {
            Kind::ClockWindow => fixed_window::ClockState::from(*state).is_forgettable(now),
            // The first word of all others is when they are as good as new, on the monotonic clock.
            _ => state.0[0] <= now.monotonic_nanoseconds(),
        }
    }
}

/// How much would be given away if a counter were forgotten.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Worth {
    /// Next to nothing is used of its limit.
    Least = 0,
    /// More than an eighth is used.
    Little = 1,
    /// Half of it or more is used.
    Much = 2,
    /// All of it is used, or the key is banned.
    Most = 3,
}

impl Worth {
    /// What a counter of `limit` is worth after this outcome.
    pub(crate) fn of(outcome: &Outcome, limit: &RateLimit) -> Self {
        let (used, capacity) = (outcome.after, u64::from(limit.capacity()));
        match capacity {
            // A limit that admits nothing needs no counter to refuse.
            0 => Worth::Least,
            _ if used >= capacity => Worth::Most,
            _ if used * 2 >= capacity => Worth::Much,
            _ if used * 8 > capacity => Worth::Little,
            _ => Worth::Least,
        }
    }
}

/// What became of one descriptor's hits on one limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the call is over the limit.
    pub over_limit: bool,
    /// What was counted before the call.
    pub before: u64,
    /// What is counted after it.
    pub after: u64,
    /// How many hits are left; 0 when over the limit.
    pub remaining: u32,
    /// Refused: until the call could pass. Passed: until the window ends or, where there is none, the limit is whole
    /// again.
    pub until_reset: Duration,
    /// The ban that the key is under, if it is.
    pub ban: Option<BanOutcome>,
}

/// A key is banned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BanOutcome {
    /// How long the ban still lasts.
    pub remaining: Duration,
    /// It started with this call.
    pub started: bool,
}

impl Outcome {
    /// [`Outcome::until_reset`] in whole seconds, rounded up; at least 1 for a refusal.
    pub fn seconds_until_reset(&self) -> u64 {
        seconds_rounded_up(self.until_reset).max(u64::from(self.over_limit))
    }
}

/// Counts `hits` on `state`, by the algorithm of `limit`, its burst and ban left aside.
pub fn hit(limit: &RateLimit, state: &mut State, hits: Hits, now: Timestamp) -> Outcome {
    match &limit.algorithm {
        Algorithm::FixedWindow(start) => fixed_window::hit(limit, start, state, hits, now),
        Algorithm::SlidingWindow => sliding_window::hit(limit, state, hits, now),
        Algorithm::TokenBucket { burst_size } => token_bucket::hit(limit, *burst_size, state, hits, now),
    }
}

/// A counter moved by `hits`; saturates.
fn moved(counter: u64, hits: Hits) -> u64 {
    match hits {
        Hits::Charge(count) => counter.saturating_add(count),
        Hits::Refund(count) => counter.saturating_sub(count),
    }
}
