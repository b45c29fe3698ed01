//! One decision, from the question to the answer: find the rules, count the hits, combine the outcomes.
//!
//! What a mode does (shadow, quota, unlimited, replaces) is decided here and nowhere else.

mod clients;
mod dynamic_metadata;
mod observer;

use std::borrow::Cow;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;

use arc_swap::{ArcSwapOption, Guard};
use smallvec::SmallVec;
use thiserror::Error;

pub use self::observer::{EntryText, Observation, Observer};

use self::clients::Clients;
use crate::algorithm::{BanOutcome, Outcome};
use crate::clock::{Timestamp, seconds_rounded_up};
use crate::decision::{Code, CurrentLimit, Decision, DescriptorStatus, LimitSource, ResponseHeader};
use crate::descriptor::{Descriptor, Entry, Hits, Request};
use crate::key::KeyMaker;
use crate::matcher::{Domain, Matcher};
use crate::rate_limit::{Charge, RateLimit};
use crate::rule::{Limit, Metadata, Rule};
use crate::statistics::Statistics;
use crate::store::memory::{MemoryConfig, MemoryStore};
use crate::store::snapshot::{Snapshot, SnapshotFile};
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
    /// Name of a header that says for how many seconds a refused client is banned, if it is sent.
    pub ban_header: Option<String>,
    /// How much memory the counters may take.
    pub memory: MemoryConfig,
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
            ban_header: None,
            memory: MemoryConfig::default(),
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
    keys: KeyMaker,
    observers: Box<[Arc<dyn Observer>]>,
}

impl Limiter {
    /// A limiter without rules: it refuses to decide until it gets some.
    pub fn new(config: LimiterConfig) -> Self {
        Limiter {
            store: MemoryStore::new(&config.memory),
            config,
            matcher: ArcSwapOption::empty(),
            keys: KeyMaker::default(),
            observers: Box::default(),
        }
    }

    /// The same, which tells `observers` what becomes of every hit.
    #[must_use]
    pub fn observed_by(self, observers: impl IntoIterator<Item = Arc<dyn Observer>>) -> Self {
        Limiter {
            observers: observers.into_iter().collect(),
            ..self
        }
    }

    /// A limiter that goes on with the counters of `snapshot`, as far as they still matter at `now`.
    pub fn resume(config: LimiterConfig, snapshot: &Snapshot, now: Timestamp) -> io::Result<Self> {
        let limiter = Limiter {
            keys: snapshot.keys(),
            ..Limiter::new(config)
        };
        snapshot.read_counters(|key, state| limiter.store.restore(key, state, now))?;
        Ok(limiter)
    }

    /// Writes its counters to `file`.
    pub fn write_snapshot(&self, file: &SnapshotFile, now: Timestamp) -> io::Result<()> {
        file.write(&self.store, &self.keys, now)
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

        let clients = Clients::of(domain, request);
        let mut questions = find_limits(domain, request, &clients);
        drop_replaced(&mut questions);
        let (statuses, refused) = self.charge(domain, request, &questions, now);

        Ok(Decision {
            overall_code: if refused && !self.config.shadow_mode {
                Code::OverLimit
            } else {
                Code::Ok
            },
            response_headers: self.response_headers(&statuses),
            dynamic_metadata: self.dynamic_metadata(request, &statuses),
            domain_found: domain.is_some(),
            global_shadow_mode: refused && self.config.shadow_mode,
            statuses,
        })
    }

    /// Counts the hits of every descriptor on its limits. Returns the statuses, and whether the call is refused.
    fn charge<'m>(
        &self,
        domain: Option<&Domain>,
        request: &Request<'_>,
        questions: &[Question<'_, 'm>],
        now: Timestamp,
    ) -> (SmallVec<[DescriptorStatus<'m>; 4]>, bool) {
        let hits: SmallVec<[Hit<'_>; 4]> = match domain {
            Some(domain) => self.hits(domain, request, questions),
            None => SmallVec::new(),
        };
        // A descriptor without a limit passes, and under the global quota mode one that passes is enough.
        let quota_passes = self.config.quota_mode
            && questions
                .iter()
                .any(|question| matches!(question.source, LimitSource::NoRule | LimitSource::Replaced));
        let charge = match domain.and_then(Domain::charge).unwrap_or(self.config.charge) {
            Charge::AllOrNothing if quota_passes || self.config.shadow_mode => Charge::Each,
            charge => charge,
        };
        // An address that is no address refuses the call, before anything is counted.
        let refused_outright = questions
            .iter()
            .any(|question| matches!(question.source, LimitSource::Refused));
        let outcomes = if refused_outright && charge != Charge::Each {
            self.store.hit(&without_charges(&hits), Charge::Each, now)
        } else {
            self.store.hit(&hits, charge, now)
        };

        if !self.observers.is_empty()
            && let Some(domain) = domain
        {
            self.tell(domain, questions, &hits, &outcomes, now);
        }

        let mut statuses: SmallVec<[DescriptorStatus<'m>; 4]> = questions
            .iter()
            .map(|question| DescriptorStatus::without_limit(question.source))
            .collect();
        let mut rest = outcomes.as_slice();
        for hits in hits.chunk_by(|a, b| a.descriptor == b.descriptor) {
            let outcomes = rest
                .split_off(..hits.len())
                .expect("there is an outcome for each hit");
            let shown = shown(hits, outcomes);
            let status = &mut statuses[hits[0].descriptor];
            self.complete(status, &hits[shown], &outcomes[shown]);
        }
        (
            statuses,
            refused_outright || !quota_passes && refuses(&hits, &outcomes),
        )
    }

    fn hits<'q>(
        &self,
        domain: &Domain,
        request: &Request<'_>,
        questions: &'q [Question<'_, '_>],
    ) -> SmallVec<[Hit<'q>; 4]> {
        let mut hits = SmallVec::new();
        for (i, (question, descriptor)) in questions.iter().zip(&request.descriptors).enumerate() {
            let rule = question.source.rule();
            for limit in &question.limits {
                hits.push(Hit {
                    key: self.keys.key(domain.name(), &question.entries, rule, limit),
                    limit,
                    hits: request.hits(descriptor),
                    descriptor: i,
                    shadow_mode: rule.is_some_and(|rule| rule.shadow_mode),
                    quota_mode: self.config.quota_mode || rule.is_some_and(|rule| rule.quota_mode),
                });
            }
        }
        hits
    }

    /// Tells the observers what became of the hits that were charged.
    fn tell(
        &self,
        domain: &Domain,
        questions: &[Question<'_, '_>],
        hits: &[Hit<'_>],
        outcomes: &[Outcome],
        now: Timestamp,
    ) {
        for (hit, outcome) in hits.iter().zip(outcomes) {
            if !matches!(hit.hits, Hits::Charge(1..)) {
                continue;
            }
            let question = &questions[hit.descriptor];
            let observation = Observation {
                domain: domain.name(),
                entries: &question.entries,
                rule: question.source.rule(),
                hit,
                outcome,
                shadow_mode: hit.shadow_mode || self.config.shadow_mode,
                now,
            };
            for observer in &self.observers {
                observer.observe(&observation);
            }
        }
    }

    /// Fills in what became of the limit that is shown.
    fn complete(&self, status: &mut DescriptorStatus<'_>, hit: &Hit<'_>, outcome: &Outcome) {
        if outcome.over_limit && !hit.shadow_mode {
            status.code = Code::OverLimit;
        }
        // The name of a rule's limit lives as long as the rules; a limit that came with the request has none.
        let name = status
            .source
            .rule()
            .and_then(|rule| rule.limits().iter().find(|limit| std::ptr::eq(*limit, hit.limit)))
            .map_or("", |limit| &limit.name);
        status.current_limit = Some(CurrentLimit {
            requests_per_unit: hit.limit.requests_per_unit,
            window: hit.limit.window,
            name,
        });
        status.over_limit = outcome.over_limit;
        status.limit_remaining = outcome.remaining;
        status.hits_in_window = outcome.after;
        status.seconds_until_reset = Some(outcome.seconds_until_reset());
        status.ban = outcome.ban;
        status.statistics = Statistics::new(
            hit.limit,
            self.config.near_limit_ratio,
            hit.shadow_mode,
            hit.hits,
            outcome,
        );
    }

    /// What goes into `dynamic_metadata`.
    fn dynamic_metadata(&self, request: &Request<'_>, statuses: &[DescriptorStatus<'_>]) -> Option<Metadata> {
        let mut metadata = self
            .config
            .dynamic_metadata
            .then(|| dynamic_metadata::of(request, statuses));
        if let Some(ban) = longest_ban(statuses) {
            metadata
                .get_or_insert_default()
                .insert("tollgate".into(), dynamic_metadata::of_ban(&ban));
        }
        metadata
    }

    /// The headers of the limit that is shown, and of a ban.
    fn response_headers<'m>(
        &'m self,
        statuses: &[DescriptorStatus<'m>],
    ) -> SmallVec<[ResponseHeader<'m>; 4]> {
        let mut headers = SmallVec::new();
        let mut push = |name, value| headers.push(ResponseHeader { name, value });
        if let Some(names) = &self.config.response_headers
            && let Some((limit, status)) = self.closest_to_its_limit(statuses)
        {
            push(names.limit.as_str(), u64::from(limit.requests_per_unit));
            push(names.remaining.as_str(), u64::from(status.limit_remaining));
            push(names.reset.as_str(), status.seconds_until_reset.unwrap_or(0));
        }
        if let Some(name) = &self.config.ban_header
            && let Some(ban) = longest_ban(statuses)
        {
            push(name.as_str(), seconds_rounded_up(ban.remaining));
        }
        headers
    }

    /// The limit with the least left, and its status; of those over a hard limit, the last.
    fn closest_to_its_limit<'s, 'm>(
        &self,
        statuses: &'s [DescriptorStatus<'m>],
    ) -> Option<(CurrentLimit<'m>, &'s DescriptorStatus<'m>)> {
        let mut closest = None;
        let mut least = u32::MAX;
        for status in statuses {
            let Some(limit) = status.current_limit else {
                continue;
            };
            let over_a_hard_limit = status.code == Code::OverLimit && !self.is_quota(status);
            if status.limit_remaining < least || over_a_hard_limit {
                closest = Some((limit, status));
                least = status.limit_remaining;
            }
        }
        closest
    }

    fn is_quota(&self, status: &DescriptorStatus<'_>) -> bool {
        self.config.quota_mode || status.source.rule().is_some_and(|rule| rule.quota_mode)
    }
}

/// A descriptor and what limits it.
struct Question<'q, 'm> {
    source: LimitSource<'m>,
    limits: SmallVec<[&'q RateLimit; 1]>,
    /// What is counted: the descriptor's entries, with the address of the client where there is a chain.
    entries: Cow<'q, [Entry<'q>]>,
}

/// The limits of each descriptor: the one it brings along, else those of its rule. Nothing is counted yet.
fn find_limits<'q, 'm: 'q>(
    domain: Option<&'m Domain>,
    request: &'q Request<'_>,
    clients: &'q Clients,
) -> SmallVec<[Question<'q, 'm>; 4]> {
    let descriptors = request.descriptors.iter().enumerate();
    descriptors
        .map(|(i, descriptor)| {
            let entries = clients.masked(i, &descriptor.entries);
            let (source, limits) = match domain {
                _ if clients.is_refused(i) => (LimitSource::Refused, SmallVec::new()),
                None => (LimitSource::NoRule, SmallVec::new()),
                Some(domain) => find_limit(domain, descriptor, &clients.full(i, &descriptor.entries)),
            };
            Question {
                source,
                limits,
                entries,
            }
        })
        .collect()
}

fn find_limit<'q, 'm: 'q>(
    domain: &'m Domain,
    descriptor: &'q Descriptor<'_>,
    entries: &[Entry<'_>],
) -> (LimitSource<'m>, SmallVec<[&'q RateLimit; 1]>) {
    if let Some(limit) = &descriptor.limit {
        return (LimitSource::Override, SmallVec::from_slice(&[limit]));
    }
    let Some(rule) = domain.find(entries) else {
        return (LimitSource::NoRule, SmallVec::new());
    };
    let source = match rule.limit {
        Limit::Unlimited => LimitSource::Unlimited(rule),
        Limit::All(_) => LimitSource::Rule(rule),
    };
    (source, rule.limits().iter().collect())
}

/// Drops every limit that a rule of the same request replaces. A rule whose own limits are replaced still replaces others.
fn drop_replaced(questions: &mut [Question<'_, '_>]) {
    let rules: SmallVec<[&Rule; 4]> = questions
        .iter()
        .filter_map(|question| question.source.rule())
        .collect();
    if rules.iter().all(|rule| rule.replaces.is_empty()) {
        return;
    }
    let replaced: HashSet<&str> = rules
        .iter()
        .flat_map(|rule| &rule.replaces)
        .map(|name| &**name)
        .collect();
    let is_replaced = |limit: &RateLimit| !limit.name.is_empty() && replaced.contains(&*limit.name);
    for question in questions.iter_mut() {
        if matches!(question.source, LimitSource::Rule(_)) {
            question.limits.retain(|limit| !is_replaced(limit));
            if question.limits.is_empty() {
                question.source = LimitSource::Replaced;
            }
        }
    }
}

/// The same hits, but what they would charge is only looked at.
fn without_charges<'a>(hits: &[Hit<'a>]) -> SmallVec<[Hit<'a>; 4]> {
    let mut hits: SmallVec<[Hit<'a>; 4]> = hits.iter().cloned().collect();
    for hit in &mut hits {
        if let Hits::Charge(count) = &mut hit.hits {
            *count = 0;
        }
    }
    hits
}

/// Which of a descriptor's limits its status shows: the first that refuses, else the one with the least left in proportion.
fn shown(hits: &[Hit<'_>], outcomes: &[Outcome]) -> usize {
    let share = |i: usize| {
        (
            u64::from(outcomes[i].remaining),
            u64::from(hits[i].limit.capacity()),
        )
    };
    let first_over = outcomes.iter().position(|outcome| outcome.over_limit);
    first_over.unwrap_or_else(|| {
        (1..hits.len()).fold(0, |least, i| {
            let ((remaining, capacity), (least_remaining, least_capacity)) = (share(i), share(least));
            if remaining * least_capacity < least_remaining * capacity {
                i
            } else {
                least
            }
        })
    })
}

/// The ban that lasts longest, of the descriptors that are refused.
fn longest_ban(statuses: &[DescriptorStatus<'_>]) -> Option<BanOutcome> {
    statuses
        .iter()
        .filter(|status| status.code == Code::OverLimit)
        .filter_map(|status| status.ban)
        .max_by_key(|ban| ban.remaining)
}
