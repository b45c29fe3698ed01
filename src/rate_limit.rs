//! What is allowed: so many requests per window.

use std::fmt;
use std::num::NonZeroU32;

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

    /// Length in seconds.
    pub fn seconds(self) -> u64 {
        match self {
            Unit::Second => 1,
            Unit::Minute => 60,
            Unit::Hour => 3_600,
            Unit::Day => 86_400,
            Unit::Week => 604_800,
            Unit::Month => 2_592_000,
            Unit::Year => 31_536_000,
        }
    }
}

/// So many requests in each window of `unit_multiplier` units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// How many hits one window admits; 0 admits none.
    pub requests_per_unit: u32,
    /// The window's unit.
    pub unit: Unit,
    /// How many units make a window.
    pub unit_multiplier: NonZeroU32,
}

impl RateLimit {
    /// `requests_per_unit` in each single `unit`.
    pub fn per(unit: Unit, requests_per_unit: u32) -> Self {
        RateLimit {
            requests_per_unit,
            unit,
            unit_multiplier: NonZeroU32::MIN,
        }
    }

    /// Length of the window in seconds; at least 1, below 2^57.
    pub fn window_seconds(&self) -> u64 {
        self.unit.seconds() * u64::from(self.unit_multiplier.get())
    }
}

/// `5 per MINUTE`, `5 per 10 MINUTE`.
impl fmt::Display for RateLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} per ", self.requests_per_unit)?;
        if self.unit_multiplier != NonZeroU32::MIN {
            write!(f, "{} ", self.unit_multiplier)?;
        }
        f.write_str(self.unit.name())
    }
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
        let limit = RateLimit {
            requests_per_unit: 1,
            unit: Unit::Year,
            unit_multiplier: NonZeroU32::MAX,
        };
        assert_eq!(limit.window_seconds(), 31_536_000 * u64::from(u32::MAX));
    }
}
