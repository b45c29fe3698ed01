//! Bans: a key that is refused too often is refused whatever its counter says, for a time.
//!
//! The rule of `@fastify/rate-limit`: of the refusals in one window the first `after` are ordinary ones, the next one bans
//! the key. The ban lasts as long as the window, so that it grows with a window that each refused hit renews; or, which is
//! our own, for a time of its own that the end of the window does not lift. Limits without windows of their own, the
//! sliding window and the bucket, count refusals in windows that start with the first of them.

use std::time::Duration;

use super::{BanOutcome, State};
use crate::clock::{Timestamp, nanoseconds};
use crate::rate_limit::{Algorithm, Ban, BanDuration, RateLimit};

/// What is known of the refusals of a key. The words of the state: the end of this knowledge in monotonic nanoseconds;
/// and the refusals, with the highest bit for a ban.
#[derive(Debug, Clone, Copy)]
struct Refusals {
    /// The end of the ban or, before it, of the window in which refusals are counted.
    end: u64,
    count: u64,
    is_banned: bool,
}

const BANNED: u64 = 1 << 63;

impl Refusals {
    /// What is still known at `time`.
    fn at(state: &State, time: u64) -> Option<Self> {
        let [end, count] = state.0;
        (end > time).then_some(Refusals {
            end,
            count: count & !BANNED,
            is_banned: count & BANNED != 0,
        })
    }

    fn state(&self) -> State {
        let banned = if self.is_banned { BANNED } else { 0 };
        State([self.end, self.count.min(BANNED - 1) | banned])
    }
}

/// The ban that the key is under at `now`.
pub(crate) fn of(state: &State, now: Timestamp) -> Option<BanOutcome> {
    let time = now.monotonic_nanoseconds();
    Refusals::at(state, time)
        .filter(|refusals| refusals.is_banned)
        .map(|refusals| BanOutcome {
            remaining: Duration::from_nanos(refusals.end - time),
            started: false,
        })
}

/// Notes that a call was refused by `limit`, whose own answer was that it resets after `until_reset`. Returns the ban that
/// the key is under from now on.
pub(crate) fn note_refusal(
    ban: &Ban,
    limit: &RateLimit,
    state: &mut State,
    until_reset: Duration,
    now: Timestamp,
) -> Option<BanOutcome> {
    let time = now.monotonic_nanoseconds();
    let known = Refusals::at(state, time);
    let window_end = match (&limit.algorithm, known) {
        // This very hit may have renewed it.
        (_, Some(known)) if !limit.renews_window() => known.end,
        (Algorithm::FixedWindow(_), _) => time.saturating_add(nanoseconds(until_reset)),
        _ => time.saturating_add(limit.window.nanoseconds()),
    };
    let known = known.unwrap_or(Refusals {
        end: window_end,
        count: 0,
        is_banned: false,
    });
    let count = known.count.saturating_add(1);
    let is_banned = known.is_banned || count > u64::from(ban.after);
    let end = match ban.lasts {
        BanDuration::For(_) if known.is_banned => known.end,
        BanDuration::For(duration) if is_banned => time.saturating_add(nanoseconds(duration)),
        BanDuration::For(_) | BanDuration::Window => known.end.max(window_end),
    };
    *state = Refusals {
        end,
        count,
        is_banned,
    }
    .state();
    of(state, now).map(|outcome| BanOutcome {
        started: !known.is_banned,
        ..outcome
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::ManualClock;
    use crate::rate_limit::{OnExceeded, Unit, WindowStart};

    #[test]
    fn the_refusal_after_the_ordinary_ones_bans_the_key() {
        #[track_caller]
        fn test(after: u32, expected: [bool; 4]) {
            let ban = Ban {
                after,
                lasts: BanDuration::Window,
            };
            let limit = RateLimit::per(Unit::Minute, 1);
            let now = ManualClock::default().now();
            let mut state = State::default();
            let banned = expected
                .map(|_| note_refusal(&ban, &limit, &mut state, Duration::from_secs(30), now).is_some());
            assert_eq!(banned, expected, "after {after}");
            assert_eq!(of(&state, now).is_some(), expected[3]);
        }
        test(0, [true, true, true, true]);
        test(1, [false, true, true, true]);
        test(3, [false, false, false, true]);
        test(9, [false, false, false, false]);
    }

    #[test]
    fn a_ban_with_a_time_of_its_own_starts_once_and_outlasts_the_window() {
        let ban = Ban {
            after: 0,
            lasts: BanDuration::For(Duration::from_secs(600)),
        };
        let limit = RateLimit::per(Unit::Second, 1);
        let clock = ManualClock::default();
        let mut state = State::default();
        let mut refuse =
            || note_refusal(&ban, &limit, &mut state, Duration::from_secs(1), clock.now()).unwrap();
        assert_eq!(
            refuse(),
            BanOutcome {
                remaining: Duration::from_secs(600),
                started: true
            }
        );
        clock.advance(Duration::from_secs(599));
        assert_eq!(
            refuse(),
            BanOutcome {
                remaining: Duration::from_secs(1),
                started: false
            }
        );
        clock.advance(Duration::from_secs(1));
        assert!(refuse().started);
    }

    #[test]
    fn a_ban_of_a_window_ends_with_it_and_grows_only_when_it_is_renewed() {
        #[track_caller]
        fn test(on_exceeded: OnExceeded, lasts: u64) {
            let ban = Ban {
                after: 0,
                lasts: BanDuration::Window,
            };
            let limit = RateLimit {
                algorithm: Algorithm::FixedWindow(WindowStart::FirstHit(on_exceeded)),
                ..RateLimit::per(Unit::Minute, 1)
            };
            let clock = ManualClock::default();
            let mut state = State::default();
            note_refusal(&ban, &limit, &mut state, Duration::from_secs(10), clock.now());
            clock.advance(Duration::from_secs(9));
            let banned = note_refusal(&ban, &limit, &mut state, Duration::from_secs(10), clock.now());
            assert_eq!(banned.unwrap().remaining, Duration::from_secs(lasts));
            clock.advance(Duration::from_secs(lasts));
            assert_eq!(of(&state, clock.now()), None);
        }
        test(OnExceeded::Keep, 1);
        test(OnExceeded::RenewWindow, 10);
    }

    #[test]
    fn without_windows_refusals_are_counted_from_the_first() {
        let ban = Ban {
            after: 1,
            lasts: BanDuration::Window,
        };
        let limit = RateLimit {
            algorithm: Algorithm::TokenBucket { burst_size: 1 },
            ..RateLimit::per(Unit::Minute, 1)
        };
        let clock = ManualClock::default();
        let mut state = State::default();
        let soon = Duration::from_millis(1);
        assert_eq!(note_refusal(&ban, &limit, &mut state, soon, clock.now()), None);
        clock.advance(Duration::from_secs(59));
        let banned = note_refusal(&ban, &limit, &mut state, soon, clock.now()).unwrap();
        assert_eq!(banned.remaining, Duration::from_secs(1));
        clock.advance(Duration::from_secs(1));
        assert_eq!(note_refusal(&ban, &limit, &mut state, soon, clock.now()), None);
    }
}
