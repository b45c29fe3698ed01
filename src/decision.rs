//! The answer: codes, statuses and statistics, free of protobuf.

use std::borrow::Cow;

use smallvec::SmallVec;

use crate::algorithm::{BanOutcome, Outcome};
use crate::descriptor::{Entry, Hits};
use crate::rate_limit::{RateLimit, Window};
use crate::rule::{Metadata, Rule, override_metric_key};

/// May the request pass, or one descriptor of it?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// It may.
    Ok,
    /// It may not.
    OverLimit,
}

/// The answer to one request. Borrows from the rules and settings it was made with.
#[derive(Debug)]
pub struct Decision<'m> {
    /// The one code that decides.
    pub overall_code: Code,
    /// One per descriptor, in the order asked.
    pub statuses: SmallVec<[DescriptorStatus<'m>; 4]>,
    /// Headers for the client, in order; empty unless they are switched on and a limit or a ban applied.
    pub response_headers: SmallVec<[ResponseHeader<'m>; 4]>,
    /// For Envoy's later filters and logs: the request and its rules if that is switched on, and a ban in any case.
    pub dynamic_metadata: Option<Metadata>,
    /// Whether there are rules for the request's domain.
    pub domain_found: bool,
    /// Whether the call would have been refused but for the global shadow mode.
    pub global_shadow_mode: bool,
}

/// A header with a number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResponseHeader<'m> {
    /// As configured.
    pub name: &'m str,
    /// Sent in decimal.
    pub value: u64,
}

/// The answer for one descriptor.
#[derive(Debug, Clone, PartialEq)]
pub struct DescriptorStatus<'m> {
    /// What the descriptor comes to on its own. Refusals of rules in shadow mode are `Ok`.
    pub code: Code,
    /// Whether it is over its limit, also where shadow mode excuses that.
    pub over_limit: bool,
    /// The limit that was applied, if one was; of several, the one that refuses or is closest to it.
    pub current_limit: Option<CurrentLimit<'m>>,
    /// Hits left in the window: 0 without a limit, `u32::MAX` for an unlimited rule.
    pub limit_remaining: u32,
    /// Whole seconds until the window ends, at least 1; only with a limit.
    pub seconds_until_reset: Option<u64>,
    /// Hits counted in the window after this call; 0 without a limit.
    pub hits_in_window: u64,
    /// Where the limit came from.
    pub source: LimitSource<'m>,
    /// What to count.
    pub statistics: Statistics,
    /// The ban that the descriptor is under, if it is.
    pub ban: Option<BanOutcome>,
}

impl<'m> DescriptorStatus<'m> {
    /// A status that names no limit.
    pub fn without_limit(source: LimitSource<'m>) -> Self {
        let is_refused = matches!(source, LimitSource::Refused);
        DescriptorStatus {
            code: if is_refused { Code::OverLimit } else { Code::Ok },
            over_limit: is_refused,
            current_limit: None,
            limit_remaining: if matches!(source, LimitSource::Unlimited(_)) {
                u32::MAX
            } else {
                0
            },
            seconds_until_reset: None,
            hits_in_window: 0,
            source,
            statistics: Statistics::default(),
            ban: None,
        }
    }

    /// The key under which the statistics of this status are kept, for a descriptor with these entries. `None` if nothing
    /// was counted.
    pub fn metric_key(&self, domain: &str, entries: &[Entry<'_>]) -> Option<Cow<'m, str>> {
        match self.source {
            LimitSource::Rule(rule) => Some(rule.metric_key(domain, entries)),
            LimitSource::Override => Some(override_metric_key(domain, entries).into()),
            LimitSource::NoRule
            | LimitSource::Unlimited(_)
            | LimitSource::Replaced
            | LimitSource::Refused => None,
        }
    }
}

/// A limit as it is shown.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurrentLimit<'m> {
    /// How many hits a window admits.
    pub requests_per_unit: u32,
    /// The window.
    pub window: Window,
    /// Empty if it has none.
    pub name: &'m str,
}

/// Where the limit of a descriptor comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LimitSource<'m> {
    /// No rule matched, or the one that did has no limit: everything passes.
    NoRule,
    /// A rule that never limits.
    Unlimited(&'m Rule),
    /// A rule that another rule of the same request replaces: it does not apply.
    Replaced,
    /// None: the chain of addresses in the descriptor has something else in it, and is refused for that.
    Refused,
    /// A rule.
    Rule(&'m Rule),
    /// The request itself.
    Override,
}

impl<'m> LimitSource<'m> {
    /// The rule that applies.
    pub fn rule(self) -> Option<&'m Rule> {
        match self {
            LimitSource::Rule(rule) | LimitSource::Unlimited(rule) => Some(rule),
            LimitSource::NoRule | LimitSource::Replaced | LimitSource::Refused | LimitSource::Override => {
                None
            }
        }
    }
}

/// How much each statistic of a rule grows by one call: the counters of envoyproxy/ratelimit, by its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Hits asked for.
    pub total_hits: u64,
    /// Hits beyond the limit, also of rules in shadow mode.
    pub over_limit: u64,
    /// Hits between the near-limit threshold and the limit.
    pub near_limit: u64,
    /// Hits of calls that were not over the limit.
    pub within_limit: u64,
    /// Hits beyond the limit that passed because the rule is in shadow mode.
    pub shadow_mode: u64,
}

impl Statistics {
    /// What `hits` with this `outcome` add. A refund adds nothing: these counters only grow.
    ///
    /// The arithmetic is that of envoyproxy/ratelimit: a call that crosses a threshold is split at it, except that the
    /// passed part of a call that goes over counts as near the limit at most, not as within it.
    pub fn new(
        limit: &RateLimit,
        near_limit_ratio: f32,
        shadow_mode: bool,
        hits: Hits,
        outcome: &Outcome,
    ) -> Self {
        let Hits::Charge(hits) = hits else {
            return Statistics::default();
        };
        let allowed = u64::from(limit.capacity());
        let near = near_limit_threshold(limit, near_limit_ratio);
        let Outcome {
            before,
            after,
            over_limit,
            ..
        } = *outcome;
        let mut statistics = Statistics {
            total_hits: hits,
            ..Statistics::default()
        };
        if over_limit {
            let asked = before.saturating_add(hits);
            statistics.over_limit = hits;
            // Under a ban no part of the call would have passed.
            let was_banned = outcome.ban.is_some_and(|ban| !ban.started);
            if !was_banned && before < allowed && asked > allowed {
                statistics.over_limit = asked - allowed;
                statistics.near_limit = allowed.saturating_sub(near.max(before));
            }
            if shadow_mode {
                statistics.shadow_mode = statistics.over_limit;
            }
        } else {
            statistics.within_limit = hits;
            // Not `hits`: a call that charges nothing because another descriptor is over moves no counter.
            statistics.near_limit = after.saturating_sub(near.max(before));
        }
        statistics
    }
}

/// The count above which hits are near the limit. In single precision, as in envoyproxy/ratelimit: 0.29 of 100 is 29.
pub(crate) fn near_limit_threshold(limit: &RateLimit, ratio: f32) -> u64 {
    // A float-to-integer cast saturates and makes 0 of NaN and negatives.
    (limit.capacity() as f32 * ratio).floor() as u64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::rate_limit::Unit;

    #[track_caller]
    fn test(limit: u32, before: u64, hits: u64, expected: [u64; 4]) {
        let limit = RateLimit::per(Unit::Hour, limit);
        let after = before + hits;
        let outcome = Outcome {
            over_limit: after > u64::from(limit.requests_per_unit),
            before,
            after,
            remaining: 0,
            until_reset: Duration::from_secs(1),
            ban: None,
        };
        let s = Statistics::new(&limit, 0.8, false, Hits::Charge(hits), &outcome);
        assert_eq!(
            [s.total_hits, s.over_limit, s.near_limit, s.within_limit],
            expected
        );
    }

    #[test]
    fn calls_are_split_at_the_thresholds() {
        test(15, 0, 11, [11, 0, 0, 11]);
        test(15, 11, 2, [2, 0, 1, 2]);
        test(15, 13, 3, [3, 1, 2, 0]);
        test(15, 15, 3, [3, 3, 0, 0]);
        test(20, 0, 16, [16, 0, 0, 16]);
        test(20, 16, 3, [3, 0, 3, 3]);
        test(20, 0, 30, [30, 10, 4, 0]);
        test(0, 0, 2, [2, 2, 0, 0]);
    }

    #[test]
    fn the_threshold_is_computed_in_single_precision() {
        assert_eq!(near_limit_threshold(&RateLimit::per(Unit::Day, 100), 0.29), 29);
        assert_eq!(
            near_limit_threshold(&RateLimit::per(Unit::Day, u32::MAX), 1.0),
            1 << 32
        );
        assert_eq!(near_limit_threshold(&RateLimit::per(Unit::Day, 5), f32::NAN), 0);
    }

    #[test]
    fn a_refund_counts_nothing() {
        let limit = RateLimit::per(Unit::Hour, 5);
        let outcome = Outcome {
            over_limit: false,
            before: 5,
            after: 3,
            remaining: 2,
            until_reset: Duration::from_secs(1),
            ban: None,
        };
        let statistics = Statistics::new(&limit, 0.8, true, Hits::Refund(2), &outcome);
        assert_eq!(statistics, Statistics::default());
    }
}
