//! One decision, from the question to the answer: find the rules, count the hits, combine the outcomes.
//!
//! What a mode does (shadow, quota, unlimited, replaces) is decided here and nowhere else.

mod dynamic_metadata;

use std::sync::Arc;

use arc_swap::{ArcSwapOption, Guard};
use smallvec::SmallVec;
use thiserror::Error;

use crate::clock::Timestamp;
use crate::decision::{Code, Decision, DescriptorStatus, LimitSource, ResponseHeader, Statistics};
use crate::descriptor::{Descriptor, Request};
use crate::key::CounterKey;
use crate::matcher::{Domain, Limit, Matcher, Rule};
use crate::rate_limit::{Charge, RateLimit};
use crate::store::memory::MemoryStore;
use crate::store::{Hit, refuses};

/// How decisions are made, whatever the rules. All fields are also settings of the server.
#[derive(Debug, Clone)]
pub struct LimiterConfig {
    /// Nothing is ever refused; statuses still say what would have been.
    pub shadow_mode: bool,
    /// Every rule is a soft limit.
    pub quota_mode: bool,
    /// The share of a limit above which hits are near it.
    pub near_limit_ratio: f32,
    /// What a refused call charges in domains whose rules do not say.
    pub charge: Charge,
    /// Names of the three headers with limit, remaining hits and seconds until reset, if they are sent.
    pub response_headers: Option<ResponseHeaderNames>,
    /// Whether answers echo the request and carry the metadata of the rules.
    pub dynamic_metadata: bool,
}

/// What the headers for the client are called.
#[derive(Debug, Clone)]
pub struct ResponseHeaderNames {
    /// Carries `requests_per_unit`.
    pub limit: String,
    /// Carries the hits left.
    pub remaining: String,
    /// Carries the whole seconds until the window ends.
    pub reset: String,
}

impl Default for LimiterConfig {
    fn default() -> Self {
        LimiterConfig {
            shadow_mode: false,
            quota_mode: false,
            near_limit_ratio: 0.8,
            charge: Charge::Each,
            response_headers: None,
            dynamic_metadata: false,
        }
    }
}

/// Why there is no decision.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DecideError {
    /// The request names no domain.
    #[error("rate limit domain must not be empty")]
    EmptyDomain,
    /// The request has nothing to decide on.
    #[error("rate limit descriptor list must not be empty")]
    NoDescriptors,
    /// No rules were ever loaded.
    #[error("no rate limit configuration loaded")]
    NoConfiguration,
}

/// The rules in force, the counters, and how to decide with them.
#[derive(Debug)]
pub struct Limiter {
    config: LimiterConfig,
    /// Swapped whole on a reload; a decision takes it once.
    matcher: ArcSwapOption<Matcher>,
    store: MemoryStore,
}

impl Limiter {
    /// A limiter without rules: it refuses to decide until it gets some.
    pub fn new(config: LimiterConfig) -> Self {
        Limiter {
            config,
            matcher: ArcSwapOption::empty(),
            store: MemoryStore::default(),
        }
    }

    /// Puts rules in force. Counters stay.
    pub fn set_matcher(&self, matcher: Matcher) {
        self.matcher.store(Some(Arc::new(matcher)));
    }

    /// The rules in force now.
    pub fn matcher(&self) -> Guard<Option<Arc<Matcher>>> {
        self.matcher.load()
    }

    /// The counters.
    pub fn store(&self) -> &MemoryStore {
        &self.store
    }

    /// Decides on `request` and charges its counters.
    ///
    /// `matcher` is what [`Limiter::matcher`] gave for this request, so that one request never sees two sets of rules.
    pub fn decide<'m>(
        &'m self,
        matcher: Option<&'m Matcher>,
        request: &Request<'_>,
        now: Timestamp,
    ) -> Result<Decision<'m>, DecideError> {
        if request.domain.is_empty() {
            return Err(DecideError::EmptyDomain);
        }
        if request.descriptors.is_empty() {
            return Err(DecideError::NoDescriptors);
        }
        let domain = matcher
            .ok_or(DecideError::NoConfiguration)?
            .domain(request.domain);

        let mut statuses = find_limits(domain, request);
        drop_replaced(&mut statuses);
        let refused = domain.is_some_and(|domain| self.charge(domain, request, &mut statuses, now));

        Ok(Decision {
            overall_code: if refused && !self.config.shadow_mode {
                Code::OverLimit
            } else {
                Code::Ok
            },
            response_headers: self.response_headers(&statuses),
            dynamic_metadata: self
                .config
                .dynamic_metadata
                .then(|| dynamic_metadata::of(request, &statuses)),
            domain_found: domain.is_some(),
            global_shadow_mode: refused && self.config.shadow_mode,
            statuses,
        })
    }

    /// Counts the hits of every descriptor with a limit, completes its status, and says whether the call is refused.
    fn charge(
        &self,
        domain: &Domain,
        request: &Request<'_>,
        statuses: &mut [DescriptorStatus<'_>],
        now: Timestamp,
    ) -> bool {
        let hits: SmallVec<[Hit; 4]> = statuses
            .iter()
            .zip(&request.descriptors)
            .filter_map(|(status, descriptor)| self.hit(domain, request, descriptor, status))
            .collect();
        // A descriptor without a limit passes, and under the global quota mode one that passes is enough.
        let quota_passes = self.config.quota_mode
            && statuses
                .iter()
                .any(|status| matches!(status.source, LimitSource::NoRule | LimitSource::Replaced));
        let charge = match domain.charge().unwrap_or(self.config.charge) {
            Charge::AllOrNothing if quota_passes || self.config.shadow_mode => Charge::Each,
            charge => charge,
        };
        let outcomes = self.store.hit(&hits, charge, now);

        let limited = statuses
            .iter_mut()
            .filter(|status| status.current_limit.is_some());
        for ((status, hit), outcome) in limited.zip(&hits).zip(&outcomes) {
            if outcome.over_limit && !hit.shadow_mode {
                status.code = Code::OverLimit;
            }
            status.limit_remaining = outcome.remaining;
            status.hits_in_window = outcome.after;
            status.seconds_until_reset = Some(outcome.seconds_until_reset);
            status.statistics = Statistics::new(
                &hit.limit,
                self.config.near_limit_ratio,
                hit.shadow_mode,
                hit.hits,
                outcome,
            );
        }
        !quota_passes && refuses(&hits, &outcomes)
    }

    fn hit(
        &self,
        domain: &Domain,
        request: &Request<'_>,
        descriptor: &Descriptor<'_>,
        status: &DescriptorStatus<'_>,
    ) -> Option<Hit> {
        let limit = status.current_limit?;
        let rule = status.source.rule();
        Some(Hit {
            key: CounterKey::new(domain.name(), &descriptor.entries, rule, &limit),
            limit,
            hits: request.hits(descriptor),
            shadow_mode: rule.is_some_and(|rule| rule.shadow_mode),
            quota_mode: self.config.quota_mode || rule.is_some_and(|rule| rule.quota_mode),
        })
    }

    /// The headers of the descriptor that is closest to its limit; of those over a hard limit, the last.
    fn response_headers<'m>(
        &'m self,
        statuses: &[DescriptorStatus<'m>],
    ) -> SmallVec<[ResponseHeader<'m>; 3]> {
        let Some(names) = &self.config.response_headers else {
            return SmallVec::new();
        };
        let mut shown = None;
        let mut least = u32::MAX;
        for status in statuses {
            let Some(limit) = &status.current_limit else {
                continue;
            };
            let over_a_hard_limit = status.code == Code::OverLimit && !self.is_quota(status);
            if status.limit_remaining < least || over_a_hard_limit {
                shown = Some((limit, status));
                least = status.limit_remaining;
            }
        }
        let Some((limit, status)) = shown else {
            return SmallVec::new();
        };
        let header = |name, value| ResponseHeader { name, value };
        SmallVec::from([
            header(names.limit.as_str(), u64::from(limit.requests_per_unit)),
            header(names.remaining.as_str(), u64::from(status.limit_remaining)),
            header(names.reset.as_str(), status.seconds_until_reset.unwrap_or(0)),
        ])
    }

    fn is_quota(&self, status: &DescriptorStatus<'_>) -> bool {
        self.config.quota_mode || status.source.rule().is_some_and(|rule| rule.quota_mode)
    }
}

/// The limit of each descriptor: the one it brings along, else that of its rule. Nothing is counted yet.
fn find_limits<'m>(domain: Option<&'m Domain>, request: &Request<'_>) -> SmallVec<[DescriptorStatus<'m>; 4]> {
    request
        .descriptors
        .iter()
        .map(|descriptor| match domain {
            None => DescriptorStatus::without_limit(LimitSource::NoRule),
            Some(domain) => find_limit(domain, descriptor),
        })
        .collect()
}

fn find_limit<'m>(domain: &'m Domain, descriptor: &Descriptor<'_>) -> DescriptorStatus<'m> {
    if let Some(limit) = descriptor.limit {
        return limited(LimitSource::Override, limit);
    }
    match domain.find(&descriptor.entries) {
        None => DescriptorStatus::without_limit(LimitSource::NoRule),
        Some(rule) => match rule.limit {
            Limit::Unlimited => DescriptorStatus::without_limit(LimitSource::Unlimited(rule)),
            Limit::PerUnit(limit) => limited(LimitSource::Rule(rule), limit),
        },
    }
}

fn limited(source: LimitSource<'_>, limit: RateLimit) -> DescriptorStatus<'_> {
    DescriptorStatus {
        current_limit: Some(limit),
        ..DescriptorStatus::without_limit(source)
    }
}

/// Takes the limit from every descriptor whose rule another rule of the same request replaces. A rule that is itself
/// replaced still replaces others.
fn drop_replaced(statuses: &mut [DescriptorStatus<'_>]) {
    let rules: SmallVec<[&Rule; 4]> = statuses
        .iter()
        .filter_map(|status| status.source.rule())
        .collect();
    if rules.iter().all(|rule| rule.replaces.is_empty()) {
        return;
    }
    let replaced = |name: &str| {
        rules
            .iter()
            .any(|rule| rule.replaces.iter().any(|replaced| **replaced == *name))
    };
    for status in statuses.iter_mut() {
        if let LimitSource::Rule(rule) = status.source
            && !rule.name.is_empty()
            && replaced(&rule.name)
        {
            *status = DescriptorStatus::without_limit(LimitSource::Replaced);
        }
    }
}
