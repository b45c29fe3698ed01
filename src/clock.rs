//! The time: what a decision knows of it, and the one reader of the machine's clocks.
//!
//! A [`Clock`] is read once per decision; everything below takes the [`Timestamp`] as an argument.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// An instant on two clocks at once.
///
/// Windows follow the wall clock, which can be set; how long something has lasted is told by the monotonic clock,
/// which cannot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timestamp {
    /// Time since 1970-01-01 UTC. Before that: zero.
    pub since_epoch: Duration,
    /// Time since an arbitrary start; never decreases within a process.
    pub monotonic: Duration,
}

impl Timestamp {
    /// Whole seconds since 1970-01-01 UTC.
    pub fn unix_seconds(&self) -> u64 {
        self.since_epoch.as_secs()
    }

    /// Whole milliseconds since 1970-01-01 UTC; saturates.
    pub fn unix_milliseconds(&self) -> u64 {
        u64::try_from(self.since_epoch.as_millis()).unwrap_or(u64::MAX)
    }

    /// The wall time in UTC, as RFC 3339 has it.
    pub fn rfc3339(&self) -> String {
        jiff::Timestamp::UNIX_EPOCH
            .checked_add(self.since_epoch)
            .unwrap_or(jiff::Timestamp::MAX)
            .to_string()
    }

    /// The wall time when the monotonic clock shows `monotonic`, as far as this instant tells; not before it.
    pub(crate) fn wall_time_at(&self, monotonic: Duration) -> SystemTime {
        SystemTime::UNIX_EPOCH + self.since_epoch + monotonic.saturating_sub(self.monotonic)
    }

    /// Nanoseconds on the monotonic clock; saturates after 584 years.
    pub fn monotonic_nanoseconds(&self) -> u64 {
        nanoseconds(self.monotonic)
    }
}

/// Where the time comes from.
#[derive(Debug)]
pub enum Clock {
    /// The machine's clocks.
    System(SystemClock),
    /// A clock that stands still until it is set.
    Manual(ManualClock),
}

impl Clock {
    /// The machine's clocks; monotonic time starts now.
    pub fn system() -> Self {
        Clock::system_after(Duration::ZERO)
    }

    /// The machine's clocks; monotonic time goes on after `monotonic`, as if it had been running before.
    pub fn system_after(monotonic: Duration) -> Self {
        Clock::System(SystemClock::after(monotonic))
    }

    /// The time now.
    pub fn now(&self) -> Timestamp {
        match self {
            Clock::System(clock) => clock.now(),
            Clock::Manual(clock) => clock.now(),
        }
    }

    /// The monotonic time now, for who needs no other.
    pub fn monotonic(&self) -> Duration {
        match self {
            Clock::System(clock) => clock.monotonic(),
            Clock::Manual(clock) => clock.now().monotonic,
        }
    }
}

/// The machine's wall clock and monotonic clock.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
    /// The monotonic time at the start.
    before: Duration,
}

impl SystemClock {
    #[expect(clippy::disallowed_methods, reason = "this is the one reader of the clocks")]
    fn after(before: Duration) -> Self {
        SystemClock {
            before,
            start: Instant::now(),
        }
    }

    #[expect(clippy::disallowed_methods, reason = "this is the one reader of the clocks")]
    fn now(&self) -> Timestamp {
        Timestamp {
            since_epoch: SystemTime::now()
                .duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or(Duration::ZERO),
            monotonic: self.monotonic(),
        }
    }

    fn monotonic(&self) -> Duration {
        self.before.saturating_add(self.start.elapsed())
    }
}

/// A clock for tests and replays. Its wall time may be set backwards; its monotonic time only grows, by each step
/// forward of the wall time.
#[derive(Debug, Default)]
pub struct ManualClock {
    /// Nanoseconds since the epoch.
    wall: AtomicU64,
    /// Nanoseconds.
    monotonic: AtomicU64,
}

impl ManualClock {
    /// A clock that shows `since_epoch`; its monotonic time starts at zero.
    pub fn new(since_epoch: Duration) -> Self {
        ManualClock {
            wall: nanoseconds(since_epoch).into(),
            monotonic: 0.into(),
        }
    }

    /// Sets the wall time. Meant for one caller at a time.
    pub fn set(&self, since_epoch: Duration) {
        let now = nanoseconds(since_epoch);
        let before = self.wall.swap(now, Ordering::Relaxed);
        self.monotonic
            .fetch_add(now.saturating_sub(before), Ordering::Relaxed);
    }

    /// Moves both clocks forward.
    pub fn advance(&self, by: Duration) {
        self.set(self.now().since_epoch + by);
    }

    /// The time it shows.
    pub fn now(&self) -> Timestamp {
        Timestamp {
            since_epoch: Duration::from_nanos(self.wall.load(Ordering::Relaxed)),
            monotonic: Duration::from_nanos(self.monotonic.load(Ordering::Relaxed)),
        }
    }
}

/// Whole seconds; the second that has begun is not over.
pub(crate) fn seconds_rounded_up(duration: Duration) -> u64 {
    duration.as_secs() + u64::from(duration.subsec_nanos() > 0)
}

/// Whole milliseconds; the millisecond that has begun is not over. Saturates.
pub(crate) fn milliseconds_rounded_up(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

/// Saturates after the year 2554.
pub(crate) fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn monotonic_time_ignores_a_step_back() {
        let clock = ManualClock::new(Duration::from_secs(100));
        let before = clock.now().monotonic;
        clock.set(Duration::from_secs(40));
        assert_eq!(clock.now().monotonic, before);
        clock.set(Duration::from_secs(50));
        assert_eq!(clock.now().monotonic, before + Duration::from_secs(10));
        assert_eq!(clock.now().unix_seconds(), 50);
    }
}
