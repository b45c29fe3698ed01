//! What is allowed: so many requests per window, counted by an algorithm.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use jiff::tz::TimeZone;

/// The named window lengths. The numbers are those of `RateLimitResponse.RateLimit.Unit` on the wire.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Unit {
    /// One second.
    Second = 1,
    /// 60 seconds.
    Minute = 2,
    /// 3,600 seconds.
    Hour = 3,
    /// 86,400 seconds.
    Day = 4,
    /// 30 days; not a calendar month.
    Month = 5,
    /// 365 days; not a calendar year.
    Year = 6,
    /// 7 days, from Thursday 00:00 UTC, since 1970-01-01 was one.
    Week = 7,
}

impl Unit {
    /// Every unit, shortest first.
    pub const ALL: [Unit; 7] = [
        Unit::Second,
        Unit::Minute,
        Unit::Hour,
        Unit::Day,
        Unit::Week,
        Unit::Month,
        Unit::Year,
    ];

    /// The unit with this number on the wire; `None` for 0 (UNKNOWN) and for numbers that do not exist.
    pub fn from_wire(number: i32) -> Option<Unit> {
        Unit::ALL.into_iter().find(|unit| *unit as i32 == number)
    }

    /// The unit with this name in a rule file, in any letter case.
    pub fn from_name(name: &str) -> Option<Unit> {
        Unit::ALL
            .into_iter()
            .find(|unit| unit.name().eq_ignore_ascii_case(name))
    }

    /// Upper-case name, as on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Unit::Second => "SECOND",
            Unit::Minute => "MINUTE",
            Unit::Hour => "HOUR",
            Unit::Day => "DAY",
            Unit::Week => "WEEK",
            Unit::Month => "MONTH",
            Unit::Year => "YEAR",
        }
    }

    /// Length in milliseconds.
    fn milliseconds(self) -> u64 {
        let seconds = match self {
            Unit::Second => 1,
            Unit::Minute => 60,
            Unit::Hour => 3_600,
            Unit::Day => 86_400,
            Unit::Week => 604_800,
            Unit::Month => 2_592_000,
            Unit::Year => 31_536_000,
        };
        seconds * 1_000
    }
}

/// The length of a window, and how it is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// At least 1.
    milliseconds: u64,
    /// The named unit and how many of it make the window. `None` if no named unit fits.
    units: Option<(Unit, NonZeroU32)>,
}

impl Window {
    /// So many units; saturates after 584 million years.
    pub fn of_units(unit: Unit, unit_multiplier: NonZeroU32) -> Self {
        let milliseconds = unit.milliseconds().saturating_mul(unit_multiplier.get().into());
        Window {
            milliseconds,
            units: Some((unit, unit_multiplier)),
        }
    }

    /// So many milliseconds, shown as a multiple of the longest named unit that fits. `None` for 0.
    pub fn of_milliseconds(milliseconds: u64) -> Option<Self> {
        let units = Unit::ALL
            .into_iter()
            .rev()
            .filter(|unit| milliseconds.is_multiple_of(unit.milliseconds()))
            .find_map(|unit| {
                let multiplier = u32::try_from(milliseconds / unit.milliseconds()).ok()?;
                Some((unit, NonZeroU32::new(multiplier)?))
            });
        (milliseconds > 0).then_some(Window { milliseconds, units })
    }

    /// Length in milliseconds; at least 1.
    pub fn milliseconds(&self) -> u64 {
        self.milliseconds
    }

    /// Length in nanoseconds; saturates after 584 years.
    pub fn nanoseconds(&self) -> u64 {
        self.milliseconds.saturating_mul(1_000_000)
    }

    /// The named unit and how many of it make the window.
    pub fn units(&self) -> Option<(Unit, NonZeroU32)> {
        self.units
    }
}

/// `MINUTE`, `10 MINUTE`, `500ms`.
impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.units {
            Some((unit, NonZeroU32::MIN)) => f.write_str(unit.name()),
            Some((unit, unit_multiplier)) => write!(f, "{unit_multiplier} {}", unit.name()),
            None => write!(f, "{}ms", self.milliseconds),
        }
    }
}

/// So many requests per window.
#[derive(Debug, Clone, PartialEq)]
pub struct RateLimit {
    /// How many hits one window admits, or a bucket gets back per window; 0 admits none.
    pub requests_per_unit: u32,
    /// The window.
    pub window: Window,
    /// How hits are counted.
    pub algorithm: Algorithm,
    /// Whether the hits of a refused call are charged.
    pub charge_refused: bool,
    /// Echoed with the limit, and what `replaces` refers to; empty if it has none.
    pub name: Box<str>,
    /// Asked only when the limit itself refuses; then its answer counts.
    pub burst: Option<Box<RateLimit>>,
    /// What happens to a key that is refused too often.
    pub ban: Option<Ban>,
}

impl RateLimit {
    /// `requests_per_unit` in each window of the clock, as envoyproxy/ratelimit counts.
    pub fn per_window(window: Window, requests_per_unit: u32) -> Self {
        RateLimit {
            requests_per_unit,
            window,
            algorithm: Algorithm::FixedWindow(WindowStart::Clock),
            charge_refused: true,
            name: Box::default(),
            burst: None,
            ban: None,
        }
    }

    /// `requests_per_unit` in each single `unit`, as envoyproxy/ratelimit counts.
    pub fn per(unit: Unit, requests_per_unit: u32) -> Self {
        RateLimit::per_window(Window::of_units(unit, NonZeroU32::MIN), requests_per_unit)
    }

    /// Whether refused hits start the window again.
    pub fn renews_window(&self) -> bool {
        matches!(
            self.algorithm,
            Algorithm::FixedWindow(WindowStart::FirstHit(
                OnExceeded::RenewWindow | OnExceeded::Backoff { .. }
            ))
        )
    }

    /// The most hits that can pass at once.
    pub fn capacity(&self) -> u32 {
        match self.algorithm {
            Algorithm::TokenBucket { burst_size } => burst_size,
            Algorithm::FixedWindow(_) | Algorithm::SlidingWindow => self.requests_per_unit,
        }
    }
}

/// `5 per MINUTE`, and the algorithm unless it is the reference's.
impl fmt::Display for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} per {}", self.requests_per_unit, self.window)?;
        match &self.algorithm {
            Algorithm::FixedWindow(WindowStart::Clock) => {}
            Algorithm::FixedWindow(WindowStart::FirstHit(on_exceeded)) => {
                write!(f, " from the first hit{on_exceeded}")?;
            }
            Algorithm::FixedWindow(WindowStart::Calendar(calendar)) => {
                write!(f, " in {}", calendar.zone_name())?;
            }
            Algorithm::SlidingWindow => f.write_str(" sliding")?,
            Algorithm::TokenBucket { burst_size } => write!(f, " with bursts of {burst_size}")?,
        }
        let charges_refused = matches!(self.algorithm, Algorithm::FixedWindow(_));
        if self.charge_refused != charges_refused {
            write!(f, ", charge_refused {}", self.charge_refused)?;
        }
        if let Some(burst) = &self.burst {
            write!(f, ", then {burst}")?;
        }
        if let Some(ban) = &self.ban {
            write!(f, ", {ban}")?;
        }
        Ok(())
    }
}

impl fmt::Display for OnExceeded {
    /// With a comma in front, unless there is nothing to say.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OnExceeded::Keep => Ok(()),
            OnExceeded::RenewWindow => f.write_str(", renewed when exceeded"),
            OnExceeded::Backoff {
                factor,
                max_milliseconds,
            } => {
                let max = Duration::from_millis(*max_milliseconds);
                write!(
                    f,
                    ", {factor} times as long with each hit when exceeded, up to {max:?}"
                )
            }
        }
    }
}

impl fmt::Display for Ban {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ban after {} refusals ", self.after)?;
        match self.lasts {
            BanDuration::Window => f.write_str("for the rest of the window"),
            BanDuration::For(duration) => write!(f, "for {duration:?}"),
        }
    }
}

/// How hits are counted against a limit.
#[derive(Debug, Clone, PartialEq)]
pub enum Algorithm {
    /// A counter that starts at zero in each window.
    FixedWindow(WindowStart),
    /// The hits of the last window length, the older ones estimated.
    SlidingWindow,
    /// A bucket that holds `burst_size` tokens and gets `requests_per_unit` of them back per window, continuously.
    TokenBucket {
        /// Its capacity.
        burst_size: u32,
    },
}

/// Where fixed windows start.
#[derive(Debug, Clone, PartialEq)]
pub enum WindowStart {
    /// At multiples of their length since 1970-01-01 UTC.
    Clock,
    /// At the first hit of a key.
    FirstHit(OnExceeded),
    /// With the days, weeks, months or years of a place.
    Calendar(Box<Calendar>),
}

/// What a refused hit does to a window that started at the first hit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OnExceeded {
    /// Nothing.
    Keep,
    /// The window starts again, its count stays: the key is free after a whole window without a hit.
    RenewWindow,
    /// The window starts again and is longer with each hit beyond the limit.
    Backoff {
        /// By how much: the hit number *e* beyond the limit makes the window `factor^(e-1)` times as long.
        factor: f64,
        /// The longest it gets, in milliseconds.
        max_milliseconds: u64,
    },
}

/// Days, weeks (from Monday), months or years in a time zone.
#[derive(Debug, Clone, PartialEq)]
pub struct Calendar {
    /// Day, week, month or year.
    pub unit: Unit,
    /// Where.
    pub zone: TimeZone,
}

impl Calendar {
    /// The IANA name of the zone.
    pub fn zone_name(&self) -> &str {
        self.zone.iana_name().unwrap_or("UTC")
    }
}

/// A ban: a key that is refused too often is refused whatever its counter says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ban {
    /// How many refusals a key gets in a window; the next one bans it. 0: the first refusal.
    pub after: u32,
    /// How long the ban lasts.
    pub lasts: BanDuration,
}

/// How long a ban lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BanDuration {
    /// As long as the window in which it started.
    Window,
    /// So long from its start, whatever becomes of the window.
    For(Duration),
}

/// Which counters a call charges when one of its descriptors is over its limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Charge {
    /// Every descriptor is charged on its own.
    #[default]
    Each,
    /// A call that is refused charges nothing.
    AllOrNothing,
    /// The descriptors over their limit are charged, the others are not. What envoyproxy/ratelimit does with
    /// `STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT`.
    StopWhenOverLimit,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_wire() {
        assert_eq!(Unit::from_wire(0), None);
        assert_eq!(Unit::from_wire(7), Some(Unit::Week));
        assert_eq!(Unit::from_wire(8), None);
        assert_eq!(Unit::from_wire(-1), None);
    }

    #[test]
    fn names_match_in_any_case() {
        assert_eq!(Unit::from_name("sEcOnD"), Some(Unit::Second));
        assert_eq!(Unit::from_name("minutes"), None);
        assert_eq!(Unit::from_name("unknown"), None);
    }

    #[test]
    fn the_longest_window_does_not_overflow() {
        let window = Window::of_units(Unit::Year, NonZeroU32::MAX);
        assert_eq!(window.milliseconds(), u64::MAX);
        assert_eq!(window.nanoseconds(), u64::MAX);
    }

    #[test]
    fn a_length_is_shown_as_a_multiple_of_the_longest_unit_that_fits() {
        #[track_caller]
        fn test(milliseconds: u64, shown: &str) {
            let window = Window::of_milliseconds(milliseconds).unwrap();
            assert_eq!(window.to_string(), shown);
            assert_eq!(window.milliseconds(), milliseconds);
        }
        test(500, "500ms");
        test(1_500, "1500ms");
        test(90_000, "90 SECOND");
        test(900_000, "15 MINUTE");
        test(18_000_000, "5 HOUR");
        test(30 * 86_400_000, "MONTH");
        test(14 * 86_400_000, "2 WEEK");
        assert_eq!(Window::of_milliseconds(0), None);
    }
}
