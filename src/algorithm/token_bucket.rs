//! Token bucket: `burst_size` tokens at most, `requests_per_unit` of them back per window, continuously.
//!
//! Kept as the generic cell rate algorithm (GCRA, ITU-T I.371) in its virtual scheduling form: the state is the
//! theoretical arrival time, at which the bucket is full again. It is exact: a token takes `window / requests_per_unit`
//! nanoseconds, and the time carries the fraction.
//!
//! The theoretical arrival time is never taken to lie before now, so that a bucket that was left alone holds
//! `burst_size` tokens and not more. A call that asks for more than that never passes. Refused calls are charged only if
//! the limit says so: then the bucket goes into debt, which is paid back before the next call passes.

use std::time::Duration;

use super::{Outcome, State};
use crate::clock::Timestamp;
use crate::descriptor::Hits;
use crate::rate_limit::RateLimit;

/// The words: when the bucket is full, in monotonic nanoseconds, and a fraction of a nanosecond in `requests_per_unit`ths.
///
/// What is missing in the bucket is measured in units of which one token has as many as the window has nanoseconds, and of
/// which `requests_per_unit` flow back per nanosecond: so nothing is ever rounded.
pub(super) fn hit(
    limit: &RateLimit,
    burst_size: u32,
    state: &mut State,
    hits: Hits,
    now: Timestamp,
) -> Outcome {
    let time = now.monotonic_nanoseconds();
    let rate = u128::from(limit.requests_per_unit.max(1));
    let token = u128::from(limit.window.nanoseconds());
    let capacity = u128::from(burst_size) * token;

    let missing = missing(state, rate, time);
    let asked = match hits {
        // At most 2^64 tokens of 2^64 units: 2^128 is not reached.
        Hits::Charge(count) => missing.saturating_add(u128::from(count) * token),
        Hits::Refund(count) => missing.saturating_sub(u128::from(count) * token),
    };
    let over_limit = asked > capacity;
    let charged = !over_limit || limit.charge_refused || matches!(hits, Hits::Refund(_));
    let left = if charged { asked } else { missing };
    *state = full_at(time, left, rate);

    let wait = if over_limit {
        until_passes(missing, left, hits, token, capacity)
    } else {
        left
    };
    Outcome {
        over_limit,
        before: tokens(missing, token),
        after: tokens(left, token),
        remaining: if over_limit {
            0
        } else {
            u32::try_from((capacity - asked) / token).unwrap_or(u32::MAX)
        },
        until_reset: Duration::from_nanos(saturated(wait.div_ceil(rate))),
        ban: None,
    }
}

/// The units that the bucket lacks at `time`.
fn missing(state: &State, rate: u128, time: u64) -> u128 {
    let [full_at, fraction] = state.0;
    match full_at.checked_sub(time) {
        None => 0,
        // A fraction of another rate, from before a reload, is less than a nanosecond in any case.
        Some(ahead) => u128::from(ahead) * rate + u128::from(fraction).min(rate - 1),
    }
}

/// The state of a bucket that lacks `missing` units at `time`.
fn full_at(time: u64, missing: u128, rate: u128) -> State {
    let ahead = saturated(missing / rate);
    State([time.saturating_add(ahead), saturated(missing % rate)])
}

/// How many units must flow back until the same call passes; of a call that never does, until the bucket is full.
fn until_passes(missing: u128, left: u128, hits: Hits, token: u128, capacity: u128) -> u128 {
    let cost = match hits {
        Hits::Charge(count) => u128::from(count) * token,
        Hits::Refund(_) => 0,
    };
    if cost > capacity {
        left.max(missing)
    } else {
        left + cost - capacity
    }
}

/// Tokens, the begun ones included.
fn tokens(units: u128, token: u128) -> u64 {
    saturated(units.div_ceil(token))
}

fn saturated(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::hit;
    use super::*;
    use crate::clock::ManualClock;
    use crate::rate_limit::{Algorithm, Window};

    fn bucket(requests_per_unit: u32, milliseconds: u64, burst_size: u32) -> RateLimit {
        RateLimit {
            algorithm: Algorithm::TokenBucket { burst_size },
            charge_refused: false,
            ..RateLimit::per_window(Window::of_milliseconds(milliseconds).unwrap(), requests_per_unit)
        }
    }

    #[test]
    fn a_bucket_of_seven_with_a_token_per_half_second() {
        let limit = bucket(1, 500, 7);
        let clock = ManualClock::default();
        let mut state = State::default();
        let mut ask = |milliseconds| {
            clock.set(Duration::from_millis(milliseconds));
            let outcome = hit(&limit, &mut state, Hits::Charge(1), clock.now());
            (
                !outcome.over_limit,
                outcome.remaining,
                outcome.until_reset.as_millis(),
            )
        };
        let first: Vec<_> = (0..7).map(|_| ask(0)).collect();
        assert_eq!(first[0], (true, 6, 500));
        assert_eq!(first[6], (true, 0, 3_500));
        assert_eq!(ask(0), (false, 0, 500));
        assert_eq!(ask(499), (false, 0, 1));
        assert_eq!(ask(500), (true, 0, 3_500));
        assert_eq!(ask(501), (false, 0, 499));
    }

    #[test]
    fn a_bucket_left_alone_is_full_and_not_fuller() {
        let limit = bucket(10, 1_000, 3);
        let clock = ManualClock::default();
        let mut state = State::default();
        hit(&limit, &mut state, Hits::Charge(3), clock.now());
        clock.advance(Duration::from_secs(3_600));
        let passed = (0..10)
            .filter(|_| !hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit)
            .count();
        assert_eq!(passed, 3);
    }

    #[test]
    fn a_call_for_more_than_the_capacity_never_passes_and_costs_nothing() {
        let limit = bucket(10, 1_000, 3);
        let clock = ManualClock::default();
        let mut state = State::default();
        assert!(hit(&limit, &mut state, Hits::Charge(4), clock.now()).over_limit);
        assert_eq!(hit(&limit, &mut state, Hits::Charge(3), clock.now()).remaining, 0);
        clock.advance(Duration::from_secs(3_600));
        assert!(hit(&limit, &mut state, Hits::Charge(4), clock.now()).over_limit);
    }

    #[test]
    fn debt_is_paid_back_before_the_next_call_passes() {
        let limit = RateLimit {
            charge_refused: true,
            ..bucket(10, 1_000, 10)
        };
        let clock = ManualClock::default();
        let mut state = State::default();
        assert!(hit(&limit, &mut state, Hits::Charge(25), clock.now()).over_limit);
        let look = hit(&limit, &mut state, Hits::Charge(0), clock.now());
        assert!(look.over_limit);
        assert_eq!(look.until_reset, Duration::from_millis(1_500));
        clock.advance(Duration::from_millis(1_500));
        assert!(!hit(&limit, &mut state, Hits::Charge(0), clock.now()).over_limit);
        clock.advance(Duration::from_millis(100));
        assert!(!hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
        assert!(hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
    }

    #[test]
    fn nothing_overflows() {
        for (rate, milliseconds, burst) in [
            (u32::MAX, u64::MAX, u32::MAX),
            (1, 1, 1),
            (0, 5, 0),
            (u32::MAX, 1, 1),
        ] {
            for charge_refused in [false, true] {
                let limit = RateLimit {
                    charge_refused,
                    ..bucket(rate, milliseconds, burst)
                };
                let mut state = State::default();
                let last = Timestamp {
                    since_epoch: Duration::MAX,
                    monotonic: Duration::MAX,
                };
                for now in [ManualClock::default().now(), last] {
                    hit(&limit, &mut state, Hits::Charge(u64::MAX), now);
                    hit(&limit, &mut state, Hits::Charge(u64::MAX), now);
                    hit(&limit, &mut state, Hits::Refund(u64::MAX), now);
                    assert!(hit(&limit, &mut state, Hits::Charge(0), now).remaining <= burst);
                }
            }
        }
    }

    proptest! {
        /// In any stretch of time no more passes than a full bucket and what flows in meanwhile.
        #[test]
        fn never_more_than_the_burst_and_what_flows_back(
            rate in 1u32..1_000, milliseconds in 1u64..10_000, burst in 1u32..50,
            calls in prop::collection::vec((0u64..5_000_000_000, 0u64..20), 1..100),
        ) {
            let limit = bucket(rate, milliseconds, burst);
            let clock = ManualClock::default();
            let mut state = State::default();
            let mut passed: Vec<(Duration, u64)> = Vec::new();
            for (after, hits) in calls {
                clock.advance(Duration::from_nanos(after));
                if !hit(&limit, &mut state, Hits::Charge(hits), clock.now()).over_limit {
                    passed.push((clock.now().monotonic, hits));
                }
            }
            for (i, (from, _)) in passed.iter().enumerate() {
                let mut total = 0;
                for (to, hits) in &passed[i..] {
                    total += u128::from(*hits);
                    let nanoseconds = (*to - *from).as_nanos();
                    // total - burst <= nanoseconds * rate / window, without rounding
                    let flowed = nanoseconds * u128::from(rate);
                    let window = u128::from(milliseconds) * 1_000_000;
                    prop_assert!(total.saturating_sub(u128::from(burst)) * window <= flowed);
                }
            }
        }

        /// A refused call passes at the promised instant, and not a nanosecond earlier.
        #[test]
        fn admitted_again_exactly_when_promised(
            rate in 1u32..10_000, milliseconds in 1u64..100_000,
            (burst, used, cost) in (1u32..50).prop_flat_map(|burst| {
                let most = u64::from(burst);
                (Just(burst), 0..=most, 1..=most)
            }),
        ) {
            let limit = bucket(rate, milliseconds, burst);
            let clock = ManualClock::default();
            let mut state = State::default();
            hit(&limit, &mut state, Hits::Charge(used), clock.now());
            let outcome = hit(&limit, &mut state, Hits::Charge(cost), clock.now());
            prop_assume!(outcome.over_limit);
            clock.advance(outcome.until_reset - Duration::from_nanos(1));
            let mut early = state;
            prop_assert!(hit(&limit, &mut early, Hits::Charge(cost), clock.now()).over_limit);
            clock.advance(Duration::from_nanos(1));
            prop_assert!(!hit(&limit, &mut state, Hits::Charge(cost), clock.now()).over_limit);
        }

        /// The order of charges at one instant does not change what is left, as long as all of them pass.
        #[test]
        fn the_order_of_charges_is_irrelevant(mut charges in prop::collection::vec(0u64..5, 0..10)) {
            let limit = bucket(7, 1_000, 50);
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

        /// A refund never makes the bucket fuller than full.
        #[test]
        fn a_refund_never_exceeds_what_was_taken(taken in 0u64..20, given_back in any::<u64>()) {
            let limit = bucket(7, 1_000, 10);
            let now = ManualClock::default().now();
            let mut state = State::default();
            let taken = hit(&limit, &mut state, Hits::Charge(taken), now).after;
            let outcome = hit(&limit, &mut state, Hits::Refund(given_back), now);
            prop_assert_eq!(outcome.after, taken.saturating_sub(given_back));
            prop_assert_eq!(u64::from(outcome.remaining), 10 - outcome.after);
        }
    }
}
