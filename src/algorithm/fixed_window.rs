//! Fixed windows: a counter that starts at zero in each.
//!
//! - By the clock: window *n* of length *L* covers the Unix time from *nL* to *(n+1)L*. The counting of
//!   envoyproxy/ratelimit, to the digit.
//! - By the calendar: the days, weeks, months or years of a time zone; a day may have 23 or 25 hours.
//! - From the first hit: the counting of `@fastify/rate-limit` and `rate-limiter-flexible`, on the monotonic clock. The instant
//!   at which a window ends belongs to the next one.
//!
//! Unless the limit says otherwise a hit always counts, also one that is refused; a call is over the limit if the counter
//! is above it afterwards. Around the edge of two windows twice the limit can pass: that is what a fixed window promises.

use std::time::Duration;

use jiff::civil::{Time, Weekday};
use jiff::{Timestamp as Instant, ToSpan as _};

use super::{Outcome, State, moved};
use crate::clock::{Timestamp, milliseconds_rounded_up};
use crate::descriptor::Hits;
use crate::rate_limit::{Calendar, OnExceeded, RateLimit, Unit, WindowStart};

/// Counts `hits` on `state`, whose windows start at `start`.
pub(super) fn hit(
    limit: &RateLimit,
    start: &WindowStart,
    state: &mut State,
    hits: Hits,
    now: Timestamp,
) -> Outcome {
    match start {
        WindowStart::Clock | WindowStart::Calendar(_) => hit_clock(limit, start, state, hits, now),
        WindowStart::FirstHit(on_exceeded) => hit_first_hit(limit, *on_exceeded, state, hits, now),
    }
}

/// Counts on a counter, and says where that leaves it.
fn count(limit: &RateLimit, counter: &mut u64, hits: Hits, until_reset: Duration) -> Outcome {
    let before = *counter;
    let asked = moved(before, hits);
    let allowed = u64::from(limit.requests_per_unit);
    let over_limit = asked > allowed;
    if !over_limit || limit.charge_refused || matches!(hits, Hits::Refund(_)) {
        *counter = asked;
    }
    Outcome {
        over_limit,
        before,
        after: *counter,
        remaining: if over_limit {
            0
        } else {
            u32::try_from(allowed - asked).unwrap_or(u32::MAX)
        },
        until_reset,
        ban: None,
    }
}

// === windows of the clock and the calendar ===

/// A counter in its newest window: 44 bits of hits and 44 of the window's end in Unix milliseconds (until the year 2527),
/// 40 of the monotonic milliseconds at which the window ends if the wall clock is not set meanwhile (34 years). Each
/// saturates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ClockState {
    hits: u64,
    window_end: u64,
    closes: u64,
}

const HITS_BITS: u32 = 44;
const WINDOW_END_BITS: u32 = 44;
const CLOSES_BITS: u32 = 40;

/// The largest number of so many bits.
const fn most(bits: u32) -> u64 {
    (1 << bits) - 1
}

impl From<State> for ClockState {
    fn from(state: State) -> Self {
        let bits = u128::from(state.0[0]) << 64 | u128::from(state.0[1]);
        let field = |shift: u32, width: u32| (bits >> shift) as u64 & most(width);
        ClockState {
            hits: field(0, HITS_BITS),
            window_end: field(HITS_BITS, WINDOW_END_BITS),
            closes: field(HITS_BITS + WINDOW_END_BITS, CLOSES_BITS),
        }
    }
}

impl From<ClockState> for State {
    fn from(state: ClockState) -> Self {
        let field = |value: u64, shift: u32, width: u32| u128::from(value.min(most(width))) << shift;
        let bits = field(state.hits, 0, HITS_BITS)
            | field(state.window_end, HITS_BITS, WINDOW_END_BITS)
            | field(state.closes, HITS_BITS + WINDOW_END_BITS, CLOSES_BITS);
        State([(bits >> 64) as u64, bits as u64])
    }
}

impl ClockState {
    /// An unused counter in the window of `now`.
    fn open(limit: &RateLimit, start: &WindowStart, now: Timestamp) -> Self {
        let window_end = match start {
            WindowStart::Calendar(calendar) => calendar_end(calendar, now.unix_milliseconds()),
            _ => clock_end(limit, now.unix_milliseconds()),
        };
        let left = window_end.saturating_sub(now.unix_milliseconds());
        let closes = milliseconds_rounded_up(now.monotonic).saturating_add(left);
        ClockState {
            hits: 0,
            window_end,
            closes,
        }
    }

    /// Starts the next window if this one is over.
    ///
    /// A counter outlives a wall clock that is set back. As long as that stands before the window's start, the key goes on in
    /// windows of the same length by the monotonic clock: a used window is not opened again, and a window from the future
    /// does not hold its key.
    fn roll(&mut self, limit: &RateLimit, start: &WindowStart, now: Timestamp) {
        if now.unix_milliseconds() >= self.window_end {
            *self = ClockState::open(limit, start, now);
        } else if self.has_closed(now) && self.is_ahead(limit, start, now) {
            let closes = milliseconds_rounded_up(now.monotonic).saturating_add(limit.window.milliseconds());
            *self = ClockState {
                hits: 0,
                closes,
                ..*self
            };
        }
    }

    /// Whether the wall clock stands before the start of the window.
    fn is_ahead(&self, limit: &RateLimit, start: &WindowStart, now: Timestamp) -> bool {
        let wall = now.unix_milliseconds();
        match start {
            WindowStart::Calendar(calendar) => calendar_end(calendar, wall) < self.window_end,
            _ => wall < self.window_end.saturating_sub(limit.window.milliseconds()),
        }
    }

    /// Until the window ends.
    fn until_end(&self, limit: &RateLimit, start: &WindowStart, now: Timestamp) -> Duration {
        let by_wall = Duration::from_millis(self.window_end).saturating_sub(now.since_epoch);
        let by_monotonic = Duration::from_millis(self.closes).saturating_sub(now.monotonic);
        // They differ only after the wall clock was set.
        if by_monotonic < by_wall && self.is_ahead(limit, start, now) {
            by_monotonic
        } else {
            by_wall
        }
    }

    pub(super) fn closes_nanoseconds(&self) -> u64 {
        self.closes.saturating_mul(1_000_000)
    }

    fn has_closed(&self, now: Timestamp) -> bool {
        now.monotonic_nanoseconds() / 1_000_000 >= self.closes
    }

    /// Both clocks must have passed the end: `now` may be a little old, and the counter newer than it on a wall clock that was
    /// set back meanwhile.
    pub(super) fn is_forgettable(&self, now: Timestamp) -> bool {
        now.unix_milliseconds() >= self.window_end && self.has_closed(now)
    }
}

fn hit_clock(
    limit: &RateLimit,
    start: &WindowStart,
    state: &mut State,
    hits: Hits,
    now: Timestamp,
) -> Outcome {
    let mut counter = ClockState::from(*state);
    counter.roll(limit, start, now);
    let until_reset = counter.until_end(limit, start, now);
    let outcome = count(limit, &mut counter.hits, hits, until_reset);
    *state = if counter.hits > 0 {
        counter.into()
    } else {
        State::default()
    };
    outcome
}

/// Unix milliseconds at which the clock's window of `wall` ends.
fn clock_end(limit: &RateLimit, wall: u64) -> u64 {
    let length = limit.window.milliseconds();
    (wall / length + 1)
        .saturating_mul(length)
        .min(most(WINDOW_END_BITS))
}

/// Unix milliseconds at which the calendar's window of `wall` ends. Where the calendar ends, so do the windows: its last
/// one never does.
fn calendar_end(calendar: &Calendar, wall: u64) -> u64 {
    next_boundary(calendar, wall)
        .and_then(|end| u64::try_from(end).ok())
        .unwrap_or(most(WINDOW_END_BITS))
}

fn next_boundary(calendar: &Calendar, wall: u64) -> Option<i64> {
    let now = Instant::from_millisecond(i64::try_from(wall).ok()?).ok()?;
    let date = calendar.zone.to_datetime(now).date();
    let next = match calendar.unit {
        Unit::Week => date.nth_weekday(1, Weekday::Monday),
        Unit::Month => date.first_of_month().checked_add(1.month()),
        Unit::Year => date.first_of_year().checked_add(1.year()),
        _ => date.tomorrow(),
    };
    // Midnight, or the first instant after it where a change of the clock leaves midnight out.
    let midnight = next.ok()?.to_datetime(Time::midnight());
    Some(calendar.zone.to_timestamp(midnight).ok()?.as_millisecond())
}

// === windows from the first hit ===

/// The words: when the window ends, in monotonic nanoseconds, and the hits in it.
fn hit_first_hit(
    limit: &RateLimit,
    on_exceeded: OnExceeded,
    state: &mut State,
    hits: Hits,
    now: Timestamp,
) -> Outcome {
    let time = now.monotonic_nanoseconds();
    let [mut closes, mut counter] = state.0;
    if closes <= time {
        (closes, counter) = (time.saturating_add(limit.window.nanoseconds()), 0);
    }
    let mut outcome = count(limit, &mut counter, hits, Duration::ZERO);
    if outcome.over_limit && matches!(hits, Hits::Charge(1..)) {
        closes = match on_exceeded {
            OnExceeded::Keep => closes,
            OnExceeded::RenewWindow => time.saturating_add(limit.window.nanoseconds()),
            OnExceeded::Backoff {
                factor,
                max_milliseconds,
            } => {
                let beyond = counter.saturating_sub(u64::from(limit.requests_per_unit));
                let waits = backoff(limit.window.milliseconds(), factor, beyond, max_milliseconds);
                time.saturating_add(waits.saturating_mul(1_000_000))
            }
        };
    }
    outcome.until_reset = Duration::from_nanos(closes - time);
    // A window is opened by hits, not by looks.
    *state = if counter > 0 {
        State([closes, counter])
    } else {
        State::default()
    };
    outcome
}

/// `window * factor^(beyond-1)` milliseconds, at most `max`. For the first hit beyond the limit that is the window.
fn backoff(window: u64, factor: f64, beyond: u64, max: u64) -> u64 {
    // A float-to-integer cast saturates.
    let exponent = i32::try_from(beyond.saturating_sub(1)).unwrap_or(i32::MAX);
    ((window as f64 * factor.powi(exponent)) as u64).min(max)
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use jiff::tz::TimeZone;
    use proptest::prelude::*;

    use super::super::{Kind, hit};
    use super::*;
    use crate::clock::ManualClock;
    use crate::rate_limit::{Algorithm, Window};

    const T: u64 = 1_700_000_000;

    fn at(seconds: u64) -> Timestamp {
        ManualClock::new(Duration::from_secs(seconds)).now()
    }

    fn minute(requests_per_unit: u32) -> RateLimit {
        RateLimit::per(Unit::Minute, requests_per_unit)
    }

    fn first_hit(milliseconds: u64, requests_per_unit: u32, on_exceeded: OnExceeded) -> RateLimit {
        RateLimit {
            algorithm: Algorithm::FixedWindow(WindowStart::FirstHit(on_exceeded)),
            ..RateLimit::per_window(Window::of_milliseconds(milliseconds).unwrap(), requests_per_unit)
        }
    }

    fn in_zone(unit: Unit, zone: &str, requests_per_unit: u32) -> RateLimit {
        let zone = TimeZone::get(zone).unwrap();
        RateLimit {
            algorithm: Algorithm::FixedWindow(WindowStart::Calendar(Box::new(Calendar { unit, zone }))),
            ..RateLimit::per(unit, requests_per_unit)
        }
    }

    #[test]
    fn the_hit_after_the_limit_is_over_and_still_counts() {
        let (limit, mut state) = (minute(2), State::default());
        assert_eq!(hit(&limit, &mut state, Hits::Charge(1), at(T)).remaining, 1);
        assert_eq!(hit(&limit, &mut state, Hits::Charge(1), at(T)).remaining, 0);
        let third = hit(&limit, &mut state, Hits::Charge(1), at(T));
        assert!(third.over_limit);
        assert_eq!(
            (third.before, third.after, third.seconds_until_reset()),
            (2, 3, 40)
        );
    }

    #[test]
    fn a_refused_call_that_is_not_charged_leaves_room_for_a_smaller_one() {
        let limit = RateLimit {
            charge_refused: false,
            ..minute(5)
        };
        let mut state = State::default();
        assert!(hit(&limit, &mut state, Hits::Charge(6), at(T)).over_limit);
        assert_eq!(hit(&limit, &mut state, Hits::Charge(5), at(T)).remaining, 0);
        assert_eq!(hit(&limit, &mut state, Hits::Charge(9), at(T)).after, 5);
    }

    #[test]
    fn a_look_at_the_limit_is_not_over() {
        let (limit, mut state) = (minute(3), State::default());
        hit(&limit, &mut state, Hits::Charge(3), at(T));
        assert!(!hit(&limit, &mut state, Hits::Charge(0), at(T)).over_limit);
        hit(&limit, &mut state, Hits::Charge(1), at(T));
        assert!(hit(&limit, &mut state, Hits::Charge(0), at(T)).over_limit);
    }

    #[test]
    fn nothing_overflows() {
        for limit in [
            minute(u32::MAX),
            RateLimit::per_window(Window::of_units(Unit::Year, NonZeroU32::MAX), 7),
            first_hit(
                u64::MAX,
                3,
                OnExceeded::Backoff {
                    factor: 1e300,
                    max_milliseconds: u64::MAX,
                },
            ),
            in_zone(Unit::Month, "Europe/Berlin", 3),
        ] {
            let mut state = State::default();
            assert!(hit(&limit, &mut state, Hits::Charge(u64::MAX), at(T)).over_limit);
            assert!(hit(&limit, &mut state, Hits::Charge(u64::MAX), at(T)).over_limit);
            let whole = hit(&limit, &mut state, Hits::Refund(u64::MAX), at(T));
            assert_eq!(whole.remaining, limit.requests_per_unit);
            let last = Timestamp {
                since_epoch: Duration::MAX,
                monotonic: Duration::MAX,
            };
            hit(&limit, &mut state, Hits::Charge(1), last);
            hit(&limit, &mut state, Hits::Charge(1), at(0));
        }
    }

    #[test]
    fn a_clock_set_back_does_not_open_a_used_window_again() {
        for limit in [minute(3), in_zone(Unit::Day, "UTC", 3)] {
            let clock = ManualClock::new(Duration::from_secs(T + 90));
            let mut state = State::default();
            hit(&limit, &mut state, Hits::Charge(3), clock.now());
            for wall in [T + 60, T + 10, T + 90] {
                clock.set(Duration::from_secs(wall));
                let outcome = hit(&limit, &mut state, Hits::Charge(1), clock.now());
                assert!(outcome.over_limit, "at {wall}");
                assert!(outcome.seconds_until_reset() >= 1);
            }
        }
    }

    #[test]
    fn a_window_from_the_future_does_not_hold_its_key() {
        for limit in [minute(1), in_zone(Unit::Day, "Asia/Tokyo", 1)] {
            let clock = ManualClock::new(Duration::from_secs(T + 86_400 * 365));
            let mut state = State::default();
            assert!(hit(&limit, &mut state, Hits::Charge(2), clock.now()).over_limit);
            clock.set(Duration::from_secs(T));
            let held = hit(&limit, &mut state, Hits::Charge(1), clock.now());
            assert!(held.over_limit);
            clock.advance(held.until_reset - Duration::from_millis(1));
            assert!(hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
            clock.advance(Duration::from_millis(1));
            assert!(!hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
            assert!(hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
        }
    }

    #[test]
    fn a_clock_set_back_by_several_windows_opens_none_of_them_again() {
        let limit = minute(1);
        let clock = ManualClock::new(Duration::from_secs(T));
        let mut state = State::default();
        let mut passed = 0;
        for second in 0..600 {
            if second == 300 {
                clock.set(Duration::from_secs(T + 60));
            }
            passed += u32::from(!hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
            clock.advance(Duration::from_secs(1));
        }
        // Ten minutes touch eleven windows.
        assert!(passed <= 11, "{passed} passed");
    }

    #[test]
    fn a_counter_is_not_forgotten_by_a_look_from_before_it() {
        let limit = minute(1);
        let clock = ManualClock::new(Duration::from_secs(T));
        let before = clock.now();
        clock.set(Duration::from_secs(T - 3_600));
        let mut state = State::default();
        hit(&limit, &mut state, Hits::Charge(1), clock.now());
        assert!(!Kind::ClockWindow.is_forgettable(&state, before));
        clock.advance(Duration::from_secs(60));
        assert!(Kind::ClockWindow.is_forgettable(&state, clock.now()));
    }

    #[test]
    fn calendar_windows_end_where_the_calendar_says() {
        #[track_caller]
        fn test(unit: Unit, zone: &str, now: &str, end: &str) {
            let instant = |text: &str| text.parse::<Instant>().unwrap().as_second();
            let limit = in_zone(unit, zone, 1);
            let now = u64::try_from(instant(now)).unwrap();
            let outcome = hit(&limit, &mut State::default(), Hits::Charge(1), at(now));
            let expected = u64::try_from(instant(end)).unwrap() - now;
            assert_eq!(outcome.seconds_until_reset(), expected, "{unit:?} {zone} {now}");
        }
        test(
            Unit::Day,
            "Europe/Berlin",
            "2026-03-29T00:30:00Z",
            "2026-03-29T22:00:00Z",
        );
        test(
            Unit::Day,
            "Europe/Berlin",
            "2026-03-28T23:00:00Z",
            "2026-03-29T22:00:00Z",
        );
        test(
            Unit::Day,
            "Europe/Berlin",
            "2026-10-24T22:00:00Z",
            "2026-10-25T23:00:00Z",
        );
        test(
            Unit::Day,
            "America/New_York",
            "2026-07-01T12:00:00Z",
            "2026-07-02T04:00:00Z",
        );
        test(
            Unit::Week,
            "Asia/Tokyo",
            "2026-11-29T14:59:59Z",
            "2026-11-29T15:00:00Z",
        );
        test(
            Unit::Week,
            "Asia/Tokyo",
            "2026-11-29T15:00:00Z",
            "2026-12-06T15:00:00Z",
        );
        test(Unit::Month, "UTC", "2024-02-29T23:59:59Z", "2024-03-01T00:00:00Z");
        test(
            Unit::Year,
            "Pacific/Auckland",
            "2026-12-31T10:59:59Z",
            "2026-12-31T11:00:00Z",
        );
        // Midnight does not exist on this day: clocks went from 23:59:59 to 01:00.
        test(
            Unit::Day,
            "America/Sao_Paulo",
            "2018-11-03T12:00:00Z",
            "2018-11-04T03:00:00Z",
        );
    }

    #[test]
    fn a_window_from_the_first_hit_ends_at_its_length() {
        let limit = first_hit(1_000, 2, OnExceeded::Keep);
        let clock = ManualClock::new(Duration::from_millis(T * 1_000 + 345));
        let mut state = State::default();
        let mut ask = |milliseconds| {
            clock.set(Duration::from_millis(T * 1_000 + 345 + milliseconds));
            let outcome = hit(&limit, &mut state, Hits::Charge(1), clock.now());
            (
                !outcome.over_limit,
                outcome.remaining,
                outcome.until_reset.as_millis(),
            )
        };
        assert_eq!(ask(0), (true, 1, 1_000));
        assert_eq!(ask(100), (true, 0, 900));
        assert_eq!(ask(999), (false, 0, 1));
        assert_eq!(ask(1_000), (true, 1, 1_000));
        assert_eq!(ask(2_500), (true, 1, 1_000));
    }

    #[test]
    fn a_renewed_window_waits_for_a_silent_one() {
        let limit = first_hit(1_000, 2, OnExceeded::RenewWindow);
        let clock = ManualClock::default();
        let mut state = State::default();
        let mut ask = |milliseconds| {
            clock.set(Duration::from_millis(milliseconds));
            !hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit
        };
        let answers = [0, 900, 950, 1_000, 1_999, 2_998, 3_998].map(&mut ask);
        assert_eq!(answers, [true, true, false, false, false, false, true]);
    }

    #[test]
    fn backoff_is_what_it_says() {
        let limit = first_hit(
            1_000,
            0,
            OnExceeded::Backoff {
                factor: 2.0,
                max_milliseconds: 10_000,
            },
        );
        let clock = ManualClock::default();
        let mut state = State::default();
        let waits: Vec<u64> = (0..6)
            .map(|_| hit(&limit, &mut state, Hits::Charge(1), clock.now()).seconds_until_reset())
            .collect();
        assert_eq!(waits, [1, 2, 4, 8, 10, 10]);
        clock.advance(Duration::from_millis(9_999));
        assert_eq!(hit(&limit, &mut state, Hits::Charge(0), clock.now()).after, 6);
        clock.advance(Duration::from_millis(1));
        assert_eq!(
            hit(&limit, &mut state, Hits::Charge(1), clock.now()).seconds_until_reset(),
            1
        );
    }

    fn unit() -> impl Strategy<Value = Unit> {
        prop::sample::select(Unit::ALL.to_vec())
    }

    /// Limits of every kind of fixed window with this many requests.
    fn any_limit(requests_per_unit: u32) -> impl Strategy<Value = RateLimit> {
        prop_oneof![
            unit().prop_map(move |unit| RateLimit::per(unit, requests_per_unit)),
            (1u64..10_000_000).prop_map(move |length| first_hit(length, requests_per_unit, OnExceeded::Keep)),
            (1u64..10_000_000).prop_map(move |length| RateLimit::per_window(
                Window::of_milliseconds(length).unwrap(),
                requests_per_unit
            )),
            prop::sample::select(vec![Unit::Day, Unit::Week, Unit::Month, Unit::Year])
                .prop_map(move |unit| in_zone(unit, "America/New_York", requests_per_unit)),
        ]
    }

    proptest! {
        /// Single hits: exactly the limit passes in every window that is asked more often than that.
        #[test]
        fn exactly_the_limit_passes_in_a_window(
            (limit, allowed) in (0u32..50).prop_flat_map(|allowed| (any_limit(allowed), Just(allowed))),
            start in 0u64..4_000_000_000, calls in 0u32..100,
        ) {
            let mut state = State::default();
            let passed = (0..calls)
                .filter(|_| !hit(&limit, &mut state, Hits::Charge(1), at(start)).over_limit)
                .count();
            prop_assert_eq!(passed, calls.min(allowed) as usize);
        }

        /// A key that is over its limit is admitted again at the promised instant, and not a nanosecond earlier.
        #[test]
        fn admitted_again_exactly_when_promised(limit in any_limit(1), start in 0u64..4_000_000_000_000_000_000) {
            let clock = ManualClock::new(Duration::from_nanos(start));
            let mut state = State::default();
            let over = hit(&limit, &mut state, Hits::Charge(2), clock.now());
            prop_assert!(over.over_limit);
            prop_assert!(over.until_reset > Duration::ZERO);
            clock.advance(over.until_reset - Duration::from_nanos(1));
            prop_assert!(hit(&limit, &mut state, Hits::Charge(0), clock.now()).over_limit);
            clock.advance(Duration::from_nanos(1));
            prop_assert!(!hit(&limit, &mut state, Hits::Charge(1), clock.now()).over_limit);
        }

        /// The order of charges within a window does not change where they end.
        #[test]
        fn the_order_of_charges_is_irrelevant(
            limit in any_limit(500), charges in prop::collection::vec(0u64..1_000, 0..20),
            by in any::<prop::sample::Index>(),
        ) {
            let total = |charges: &[u64]| {
                let mut state = State::default();
                for charge in charges {
                    hit(&limit, &mut state, Hits::Charge(*charge), at(T));
                }
                hit(&limit, &mut state, Hits::Charge(0), at(T))
            };
            let mut rotated = charges.clone();
            if !rotated.is_empty() {
                rotated.rotate_left(by.index(charges.len()));
            }
            prop_assert_eq!(total(&charges), total(&rotated));
        }

        /// A refund never leaves more than the whole limit.
        #[test]
        fn a_refund_never_exceeds_what_was_taken(
            limit in any_limit(10), taken in any::<u64>(), given_back in any::<u64>(),
        ) {
            let mut state = State::default();
            let taken = hit(&limit, &mut state, Hits::Charge(taken), at(T)).after;
            let outcome = hit(&limit, &mut state, Hits::Refund(given_back), at(T));
            prop_assert!(outcome.remaining <= 10);
            prop_assert!(outcome.after <= taken);
        }

        #[test]
        fn a_packed_state_is_what_was_packed(
            hits in 0..=most(HITS_BITS), window_end in 0..=most(WINDOW_END_BITS), closes in 0..=most(CLOSES_BITS),
        ) {
            let state = ClockState { hits, window_end, closes };
            prop_assert_eq!(ClockState::from(State::from(state)), state);
        }
    }
}
