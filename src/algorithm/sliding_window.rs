//! Sliding window: the hits of the last window length, estimated from two counters.
//!
//! Time is cut into windows of the limit's length, on the monotonic clock. The hits of the window before the current one
//! count in proportion to how much of it is still in view, as if they had been spread evenly over it. This is the sliding
//! window counter that Cloudflare described in 2017; it needs two numbers where a log of all hits would be exact.
//! See <https://blog.cloudflare.com/counting-things-a-lot-of-different-things/>.
//!
//! Refused calls are charged only if the limit says so.

use std::time::Duration;

use super::{Outcome, State};
use crate::clock::Timestamp;
use crate::descriptor::Hits;
use crate::rate_limit::RateLimit;

/// The hits in the current window and in the one before.
#[derive(Debug, Clone, Copy)]
struct Counters {
    /// Length of the windows in nanoseconds.
    length: u64,
    /// When the current window ends, in monotonic nanoseconds.
    end: u64,
    /// Hits in the window before the current one; saturates.
    previous: u32,
    /// Hits in the current window; saturates.
    current: u32,
}

impl Counters {
    /// The counters as they stand at `time`.
    ///
    /// The words of the state: when the hits of its window are out of view, one window length after its end; and the hits
    /// of the window before (upper half) and of its window (lower half).
    fn at(state: &State, length: u64, time: u64) -> Self {
        let [out_of_view, hits] = state.0;
        let end = out_of_view.saturating_sub(length);
        let (previous, current) = ((hits >> 32) as u32, hits as u32);
        if time < end {
            return Counters {
                length,
                end,
                previous,
                current,
            };
        }
        let previous = if time < out_of_view { current } else { 0 };
        let end = (time / length).saturating_add(1).saturating_mul(length);
        Counters {
            length,
            end,
            previous,
            current: 0,
        }
    }

    fn state(&self) -> State {
        if self.previous == 0 && self.current == 0 {
            return State::default();
        }
        let hits = u64::from(self.previous) << 32 | u64::from(self.current);
        State([self.end.saturating_add(self.length), hits])
    }

    /// The hits in view at `time`, times the window's length.
    fn in_view(&self, time: u64) -> u128 {
        u128::from(self.previous) * u128::from(self.end - time)
            + u128::from(self.current) * u128::from(self.length)
    }

    fn count(&mut self, hits: Hits) {
        let least = |count: u64| u32::try_from(count).unwrap_or(u32::MAX);
        match hits {
            Hits::Charge(count) => self.current = self.current.saturating_add(least(count)),
            Hits::Refund(count) => {
                let older = count.saturating_sub(u64::from(self.current));
                self.current = self.current.saturating_sub(least(count));
                self.previous = self.previous.saturating_sub(least(older));
            }
        }
    }

    /// Nanoseconds from `time` until nothing is in view any more.
    fn until_empty(&self, time: u64) -> u64 {
        match (self.current, self.previous) {
            (0, 0) => 0,
            (0, _) => self.end - time,
            _ => self.end.saturating_add(self.length) - time,
        }
    }

    /// Nanoseconds from `time` until at most `room` is in view, in the measure of [`Counters::in_view`].
    fn until_in_view(&self, room: u128, time: u64) -> u64 {
        let current = u128::from(self.current) * u128::from(self.length);
        let (hits, end) = if current <= room {
            // The window before is moving out of view.
            (self.previous, self.end)
        } else {
            // It is gone by then, and the current one is moving out of view.
            (self.current, self.end.saturating_add(self.length))
        };
        let room = if current <= room { room - current } else { room };
        let in_time = room.checked_div(u128::from(hits)).unwrap_or(u128::MAX);
        let in_time = u64::try_from(in_time).unwrap_or(u64::MAX);
        end.saturating_sub(in_time).saturating_sub(time)
    }
}

pub(super) fn hit(limit: &RateLimit, state: &mut State, hits: Hits, now: Timestamp) -> Outcome {
    let time = now.monotonic_nanoseconds();
    let length = limit.window.nanoseconds();
    let measure = |hits: u64| u128::from(hits).saturating_mul(u128::from(length));
    let capacity = measure(limit.requests_per_unit.into());

    let mut counters = Counters::at(state, length, time);
    let used = counters.in_view(time);
    let cost = match hits {
        Hits::Charge(count) => measure(count),
        Hits::Refund(_) => 0,
    };
    let refund = matches!(hits, Hits::Refund(_));
    if refund {
        counters.count(hits);
    }
    let over_limit = counters.in_view(time).saturating_add(cost) > capacity;
    if !refund && (!over_limit || limit.charge_refused) {
        counters.count(hits);
    }
    *state = counters.state();

    let after = counters.in_view(time);
    let until_reset = match capacity.checked_sub(cost) {
        Some(room) if over_limit => counters.until_in_view(room, time),
        _ => counters.until_empty(time),
    };
    Outcome {
        over_limit,
        before: rounded_up(used, length),
        after: rounded_up(after, length),
        remaining: if over_limit {
            0
        } else {
            u32::try_from(capacity.saturating_sub(after) / u128::from(length)).unwrap_or(u32::MAX)
        },
        until_reset: Duration::from_nanos(until_reset),
        ban: None,
    }
}

fn rounded_up(measure: u128, length: u64) -> u64 {
    u64::try_from(measure.div_ceil(u128::from(length))).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::hit;
    use super::*;
    use crate::clock::ManualClock;
    use crate::rate_limit::{Algorithm, Window};

    fn sliding(requests_per_unit: u32, milliseconds: u64) -> RateLimit {
        RateLimit {
            algorithm: Algorithm::SlidingWindow,
            charge_refused: false,
            ..RateLimit::per_window(Window::of_milliseconds(milliseconds).unwrap(), requests_per_unit)
        }
    }

    #[test]
    fn the_window_before_counts_for_what_is_in_view() {
        let limit = sliding(10, 1_000);
        let clock = ManualClock::default();
        let mut state = State::default();
        let mut ask = |milliseconds, hits| {
            clock.set(Duration::from_millis(milliseconds));
            let outcome = hit(&limit, &mut state, Hits::Charge(hits), clock.now());
            (!outcome.over_limit, outcome.remaining)
        };
        assert_eq!(ask(900, 10), (true, 0));
        assert_eq!(ask(999, 1), (false, 0));
        assert_eq!(ask(1_000, 1), (false, 0));
        assert_eq!(ask(1_100, 1), (true, 0));
        assert_eq!(ask(1_100, 1), (false, 0));
        assert_eq!(ask(1_500, 4), (true, 0));
        assert_eq!(ask(2_000, 5), (true, 0));
        assert_eq!(ask(4_000, 10), (true, 0));
    }

    #[test]
    fn no_burst_of_twice_the_limit_around_an_edge() {
        let limit = sliding(100, 60_000);
        let clock = ManualClock::new(Duration::from_millis(59_000));
        let mut state = State::default();
        let mut passed = 0;
        for _ in 0..40 {
            for _ in 0..50 {
                passed += u32::from(!hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
            }
            clock.advance(Duration::from_millis(50));
        }
        assert!(passed <= 102, "{passed} passed within two seconds");
    }

    #[test]
    fn nothing_overflows() {
        for (rate, milliseconds) in [(u32::MAX, u64::MAX), (0, 1), (1, 3_153_600_000_000)] {
            for charge_refused in [false, true] {
                let limit = RateLimit {
                    charge_refused,
                    ..sliding(rate, milliseconds)
                };
                let mut state = State::default();
                let last = Timestamp {
                    since_epoch: Duration::MAX,
                    monotonic: Duration::MAX,
                };
                for now in [ManualClock::default().now(), last, ManualClock::default().now()] {
                    hit(&limit, &mut state, Hits::Charge(u64::MAX), now);
                    hit(&limit, &mut state, Hits::Charge(1), now);
                    hit(&limit, &mut state, Hits::Refund(u64::MAX), now);
                    assert_eq!(hit(&limit, &mut state, Hits::Charge(0), now).after, 0);
                }
            }
        }
    }

    proptest! {
        /// Whenever a call passes, what is estimated to be in view is at most the limit.
        #[test]
        fn never_more_than_the_limit_in_view(
            rate in 0u32..50, milliseconds in 1u64..10_000,
            calls in prop::collection::vec((0u64..3_000_000_000, 0u64..20), 1..100),
        ) {
            let limit = sliding(rate, milliseconds);
            let clock = ManualClock::default();
            let mut state = State::default();
            for (after, hits) in calls {
                clock.advance(Duration::from_nanos(after));
                let outcome = hit(&limit, &mut state, Hits::Charge(hits), clock.now());
                prop_assert!(outcome.after <= u64::from(rate));
                prop_assert!(outcome.over_limit || outcome.before + hits <= u64::from(rate) + 1);
            }
        }

        /// A refused call passes at the promised instant, and not a nanosecond earlier.
        #[test]
        fn admitted_again_exactly_when_promised(
            rate in 1u32..50, milliseconds in 1u64..100_000, start in 0u64..1_000_000_000_000,
            calls in prop::collection::vec((0u64..100_000_000_000, 0u64..20), 1..20), cost in 1u64..50,
        ) {
            let limit = sliding(rate, milliseconds);
            let clock = ManualClock::new(Duration::from_nanos(start));
            let mut state = State::default();
            for (after, hits) in calls {
                clock.advance(Duration::from_nanos(after % (milliseconds * 1_500_000)));
                hit(&limit, &mut state, Hits::Charge(hits), clock.now());
            }
            let outcome = hit(&limit, &mut state, Hits::Charge(cost), clock.now());
            prop_assume!(outcome.over_limit && cost <= u64::from(rate));
            clock.advance(outcome.until_reset - Duration::from_nanos(1));
            let mut early = state;
            prop_assert!(hit(&limit, &mut early, Hits::Charge(cost), clock.now()).over_limit);
            clock.advance(Duration::from_nanos(1));
            prop_assert!(!hit(&limit, &mut state, Hits::Charge(cost), clock.now()).over_limit);
        }

        /// The order of charges that all pass does not matter, nor does it which of equal ones comes first.
        #[test]
        fn the_order_of_charges_is_irrelevant(mut charges in prop::collection::vec(0u64..5, 0..10)) {
            let limit = sliding(50, 1_000);
            let total = |charges: &[u64]| {
                let mut state = State::default();
                for charge in charges {
                    hit(&limit, &mut state, Hits::Charge(*charge), ManualClock::default().now());
                }
                state
            };
            let forward = total(&charges);
            charges.reverse();
            prop_assert_eq!(forward, total(&charges));
        }

        /// A refund never leaves more than the whole limit.
        #[test]
        fn a_refund_never_exceeds_what_was_taken(taken in 0u64..20, given_back in any::<u64>()) {
            let limit = sliding(10, 1_000);
            let now = ManualClock::default().now();
            let mut state = State::default();
            let taken = hit(&limit, &mut state, Hits::Charge(taken), now).after;
            let outcome = hit(&limit, &mut state, Hits::Refund(given_back), now);
            prop_assert_eq!(outcome.after, taken.saturating_sub(given_back));
            prop_assert_eq!(u64::from(outcome.remaining), 10 - outcome.after);
        }
    }
}
