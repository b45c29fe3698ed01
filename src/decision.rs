//! The answer: codes, statuses and statistics, free of protobuf.

use smallvec::SmallVec;

use crate::algorithm::BanOutcome;
use crate::descriptor::Entry;
use crate::rate_limit::Window;
use crate::rule::{Metadata, MetricKey, Rule, override_metric_key};
use crate::statistics::Statistics;

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
#[derive(Debug, Clone)]
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
    pub fn metric_key(&self, domain: &str, entries: &[Entry<'_>]) -> Option<MetricKey> {
        match self.source {
            LimitSource::Rule(rule) => Some(rule.metric_key(domain, entries)),
            LimitSource::Override => Some(override_metric_key(domain, entries)),
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
#[derive(Debug, Clone, Copy)]
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
