//! Fixed windows aligned to the epoch: the counting of envoyproxy/ratelimit, to the digit.
//!
//! Window *n* of length *L* covers the seconds from *nL* to *(n+1)L* of Unix time. A hit always counts, also one that
//! is refused; a call is over the limit if the counter is above it afterwards. So twice the limit can pass around a
//! window's edge: that is what a fixed window promises.

use std::time::Duration;

use crate::algorithm::Outcome;
use crate::clock::Timestamp;
use crate::descriptor::Hits;
use crate::rate_limit::RateLimit;

/// The counter of one key in its newest window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct State {
    /// Unix seconds at which the window ends.
    window_end: u64,
    /// Monotonic time at which the window ends if the wall clock is not set meanwhile.
    closes: Duration,
    /// Hits counted in the window; saturates.
    hits: u64,
}

impl State {
    /// An unused counter in the window of `now`.
    pub fn open(limit: &RateLimit, now: Timestamp) -> State {
        let window_end = window_end(limit, now);
        let left = Duration::from_secs(window_end).saturating_sub(now.since_epoch);
        State {
            window_end,
            closes: now.monotonic.saturating_add(left),
            hits: 0,
        }
    }

    /// Whether the window is over, so that the next hit starts a new one.
    ///
    /// A counter outlives a wall clock that is set back: its window is over when the wall clock has passed its end, or
    /// stands before its start and the monotonic clock has passed its end. So a used window is not opened twice, and a
    /// window from the future does not hold its key for ever.
    pub fn is_over(&self, window_seconds: u64, now: Timestamp) -> bool {
        let start = self.window_end.saturating_sub(window_seconds);
        now.unix_seconds() >= self.window_end || (now.unix_seconds() < start && now.monotonic >= self.closes)
    }

    /// Whether forgetting the counter changes no answer. Stricter than [`State::is_over`]: `now` may be a little old, and
    /// the counter newer than it on a wall clock that was set back meanwhile.
    pub fn is_forgettable(&self, window_seconds: u64, now: Timestamp) -> bool {
        self.is_over(window_seconds, now) && now.monotonic >= self.closes
    }
}

/// Counts `hits` on `state` and says where that leaves the key.
pub fn hit(limit: &RateLimit, state: &mut State, hits: Hits, now: Timestamp) -> Outcome {
    if state.is_over(limit.window_seconds(), now) {
        *state = State::open(limit, now);
    }
    let before = state.hits;
    state.hits = match hits {
        Hits::Charge(count) => before.saturating_add(count),
        Hits::Refund(count) => before.saturating_sub(count),
    };
    let allowed = u64::from(limit.requests_per_unit);
    Outcome {
        over_limit: state.hits > allowed,
        before,
        after: state.hits,
        remaining: u32::try_from(allowed.saturating_sub(state.hits)).unwrap_or(u32::MAX),
        // A window that started in the future, seen from a wall clock that was set back, shows its full length.
        seconds_until_reset: state
            .window_end
            .saturating_sub(now.unix_seconds())
            .clamp(1, limit.window_seconds()),
    }
}

/// Unix seconds at which the window of `now` ends.
fn window_end(limit: &RateLimit, now: Timestamp) -> u64 {
    let length = limit.window_seconds();
    (now.unix_seconds() / length + 1).saturating_mul(length)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock::ManualClock;
    use crate::rate_limit::Unit;

    const T: u64 = 1_700_000_000;

    fn at(seconds: u64) -> Timestamp {
        ManualClock::new(Duration::from_secs(seconds)).now()
    }

    fn minute(requests_per_unit: u32) -> RateLimit {
        RateLimit::per(Unit::Minute, requests_per_unit)
    }

    #[test]
    fn the_hit_after_the_limit_is_over_and_still_counts() {
        let limit = minute(2);
        let mut state = State::open(&limit, at(T));
        assert_eq!(hit(&limit, &mut state, Hits::Charge(1), at(T)).remaining, 1);
        assert_eq!(hit(&limit, &mut state, Hits::Charge(1), at(T)).remaining, 0);
        let third = hit(&limit, &mut state, Hits::Charge(1), at(T));
        assert!(third.over_limit);
        assert_eq!((third.before, third.after, third.seconds_until_reset), (2, 3, 40));
    }

    #[test]
    fn a_look_at_the_limit_is_not_over() {
        let limit = minute(3);
        let mut state = State::open(&limit, at(T));
        hit(&limit, &mut state, Hits::Charge(3), at(T));
        assert!(!hit(&limit, &mut state, Hits::Charge(0), at(T)).over_limit);
        hit(&limit, &mut state, Hits::Charge(1), at(T));
        assert!(hit(&limit, &mut state, Hits::Charge(0), at(T)).over_limit);
    }

    #[test]
    fn nothing_overflows() {
        let limit = minute(u32::MAX);
        let mut state = State::open(&limit, at(T));
        let outcome = hit(&limit, &mut state, Hits::Charge(u64::MAX), at(T));
        assert!(outcome.over_limit);
        assert_eq!(
            hit(&limit, &mut state, Hits::Charge(u64::MAX), at(T)).after,
            u64::MAX
        );
        assert_eq!(
            hit(&limit, &mut state, Hits::Refund(u64::MAX), at(T)).remaining,
            u32::MAX
        );
        let last = Timestamp {
            since_epoch: Duration::MAX,
            monotonic: Duration::MAX,
        };
        hit(&limit, &mut state, Hits::Charge(1), last);
    }

    #[test]
    fn a_clock_set_back_does_not_open_a_used_window_again() {
        let limit = minute(3);
        let clock = ManualClock::new(Duration::from_secs(T + 90));
        let mut state = State::open(&limit, clock.now());
        hit(&limit, &mut state, Hits::Charge(3), clock.now());
        for wall in [T + 60, T + 10, T + 90] {
            clock.set(Duration::from_secs(wall));
            let outcome = hit(&limit, &mut state, Hits::Charge(1), clock.now());
            assert!(outcome.over_limit, "at {wall}");
            assert!((1..=60).contains(&outcome.seconds_until_reset));
        }
        clock.set(Duration::from_secs(T + 100));
        assert!(!hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
    }

    #[test]
    fn a_window_from_the_future_does_not_hold_its_key() {
        let limit = minute(1);
        let clock = ManualClock::new(Duration::from_secs(T + 86_400 * 365));
        let mut state = State::open(&limit, clock.now());
        assert!(hit(&limit, &mut state, Hits::Charge(2), clock.now()).over_limit);
        clock.set(Duration::from_secs(T));
        assert!(hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
        clock.advance(Duration::from_secs(60));
        assert!(!hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
    }

    #[test]
    fn a_counter_is_not_forgotten_by_a_look_from_before_it() {
        let limit = minute(1);
        let clock = ManualClock::new(Duration::from_secs(T));
        let before = clock.now();
        clock.set(Duration::from_secs(T - 3_600));
        let state = State::open(&limit, clock.now());
        assert!(!state.is_forgettable(60, before));
        clock.advance(Duration::from_secs(60));
        assert!(state.is_forgettable(60, clock.now()));
    }

    fn unit() -> impl Strategy<Value = Unit> {
        prop::sample::select(Unit::ALL.to_vec())
    }

    proptest! {
        /// Single hits: exactly the limit passes in every window that is asked more often than that.
        #[test]
        fn exactly_the_limit_passes_in_a_window(
            unit in unit(), allowed in 0u32..50, start in 0u64..4_000_000_000, calls in 0u32..100,
        ) {
            let limit = RateLimit::per(unit, allowed);
            let mut state = State::open(&limit, at(start));
            let passed = (0..calls)
                .filter(|_| !hit(&limit, &mut state, Hits::Charge(1), at(start)).over_limit)
                .count();
            prop_assert_eq!(passed, calls.min(allowed) as usize);
        }

        /// A key that is over its limit is admitted again at the promised second, and not a second earlier.
        #[test]
        fn admitted_again_exactly_when_promised(unit in unit(), start in 0u64..4_000_000_000) {
            let limit = RateLimit::per(unit, 1);
            let clock = ManualClock::new(Duration::from_secs(start));
            let mut state = State::open(&limit, clock.now());
            let over = hit(&limit, &mut state, Hits::Charge(2), clock.now());
            prop_assert!(over.over_limit);
            prop_assert!((1..=unit.seconds()).contains(&over.seconds_until_reset));
            clock.advance(Duration::from_secs(over.seconds_until_reset) - Duration::from_nanos(1));
            prop_assert!(hit(&limit, &mut state, Hits::Charge(0), clock.now()).over_limit);
            clock.advance(Duration::from_nanos(1));
            prop_assert!(!hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
        }

        /// The order of charges within a window does not change where they end.
        #[test]
        fn the_order_of_charges_is_irrelevant(
            charges in prop::collection::vec(0u64..1_000, 0..20), swap in any::<prop::sample::Index>(),
        ) {
            let limit = minute(500);
            let total = |charges: &[u64]| {
                let mut state = State::open(&limit, at(T));
                for charge in charges {
                    hit(&limit, &mut state, Hits::Charge(*charge), at(T));
                }
                hit(&limit, &mut state, Hits::Charge(0), at(T))
            };
            let mut rotated = charges.clone();
            if !rotated.is_empty() {
                let by = swap.index(rotated.len());
                rotated.rotate_left(by);
            }
            prop_assert_eq!(total(&charges), total(&rotated));
        }

        /// A refund never leaves more than the whole limit.
        #[test]
        fn a_refund_never_exceeds_what_was_taken(taken in any::<u64>(), given_back in any::<u64>()) {
            let limit = minute(10);
            let mut state = State::open(&limit, at(T));
            hit(&limit, &mut state, Hits::Charge(taken), at(T));
            let outcome = hit(&limit, &mut state, Hits::Refund(given_back), at(T));
            prop_assert_eq!(outcome.after, taken.saturating_sub(given_back));
            prop_assert!(outcome.remaining <= 10);
        }
    }
}
