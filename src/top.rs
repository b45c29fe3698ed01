//! Who is refused most: for each domain the keys with the most refused calls, in bounded memory.
//!
//! The counts are those of the filtered space-saving algorithm (Homem and Carvalho, "Finding top-k elements in data streams",
//! 2010): a count may be too high, by no more than its error, and a key that is refused more often than the last one shown is
//! shown as well. Two summaries take turns, so that what is shown is of the last five to ten minutes.

use std::collections::HashMap;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use serde::Serialize;
use topk::FilteredSpaceSaving;

use crate::clock::Timestamp;
use crate::key::{CounterKey, PlaceHasher};
use crate::limiter::{EntryText, Observation, Observer};

/// After how long a summary is put aside; it is shown for as long again.
const PERIOD: Duration = Duration::from_secs(300);

/// Who is refused most, by domain.
#[derive(Debug)]
pub struct Top {
    keys: usize,
    /// Only domains that have rules are in it. Read for each refused call, written when a domain has its first.
    domains: RwLock<HashMap<Box<str>, Arc<Mutex<Turns>>>>,
}

/// A key that is refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RefusedKey {
    /// What is counted.
    pub descriptor: Vec<EntryText>,
    /// Where in the rule file the limit stands; nothing if it came with the request.
    pub rule: Option<Box<str>>,
    /// The limit, in words.
    pub limit: Box<str>,
    /// It would have been refused but for shadow mode.
    pub shadow_mode: bool,
}

/// A key that is refused, and how often.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refusals {
    /// The key.
    #[serde(flatten)]
    pub key: RefusedKey,
    /// How many of its calls were refused.
    pub refused: u64,
    /// By how much that may be too high.
    pub error: u64,
}

/// The keys of one domain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DomainTop {
    /// The domain.
    pub domain: Box<str>,
    /// How long the calls were counted, in seconds.
    pub seconds: u64,
    /// How many calls were refused in that time, whoever made them; by each limit that refused.
    pub refused: u64,
    /// The keys that were refused most, from the first on.
    pub keys: Vec<Refusals>,
}

/// Two summaries that take turns.
#[derive(Debug, Clone)]
struct Turns {
    current: Summary,
    last: Summary,
}

#[derive(Clone)]
struct Summary {
    /// On the monotonic clock.
    start: Duration,
    counts: FilteredSpaceSaving<CounterKey>,
    /// Of the keys that are counted, and of some that are not any more.
    keys: HashMap<CounterKey, RefusedKey, PlaceHasher>,
}

// === impl Top ===

impl Top {
    /// Shows so many keys of each domain. `None` for 0.
    pub fn new(keys: usize) -> Option<Arc<Self>> {
        (keys > 0).then(|| {
            Arc::new(Top {
                keys,
                domains: RwLock::default(),
            })
        })
    }

    /// The keys that were refused most, of the domains in which calls were refused, by name.
    pub fn show(&self, now: Timestamp) -> Vec<DomainTop> {
        let domains = self.domains.read().unwrap_or_else(PoisonError::into_inner);
        let mut shown: Vec<DomainTop> = domains
            .iter()
            .map(|(domain, turns)| {
                let mut turns = turns.lock().unwrap_or_else(PoisonError::into_inner);
                turns.turn_over(now.monotonic);
                let copy = turns.clone();
                drop(turns);
                copy.show(domain, now.monotonic)
            })
            .filter(|domain| domain.refused > 0)
            .collect();
        shown.sort_by(|a, b| a.domain.cmp(&b.domain));
        shown
    }

    fn turns(&self, domain: &str, now: Duration) -> Arc<Mutex<Turns>> {
        let domains = self.domains.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(turns) = domains.get(domain) {
            return Arc::clone(turns);
        }
        drop(domains);
        let mut domains = self.domains.write().unwrap_or_else(PoisonError::into_inner);
        let turns = domains
            .entry(domain.into())
            .or_insert_with(|| Arc::new(Mutex::new(Turns::new(self.keys, now))));
        Arc::clone(turns)
    }
}

impl Observer for Top {
    fn observe(&self, observation: &Observation<'_>) {
        if !observation.outcome.over_limit {
            return;
        }
        let now = observation.now.monotonic;
        let turns = self.turns(observation.domain, now);
        let mut turns = turns.lock().unwrap_or_else(PoisonError::into_inner);
        turns.turn_over(now);
        turns.current.note(observation);
    }
}

// === impl Turns ===

impl Turns {
    fn new(keys: usize, now: Duration) -> Self {
        Turns {
            current: Summary::new(keys, now),
            last: Summary::new(keys, now),
        }
    }

    /// Puts the current summary aside when its time is over.
    fn turn_over(&mut self, now: Duration) {
        let age = now.saturating_sub(self.current.start);
        if age < PERIOD {
            return;
        }
        let fresh = Summary::new(self.current.counts.k(), now);
        self.last = mem::replace(&mut self.current, fresh);
        if age >= 2 * PERIOD {
            self.last = Summary::new(self.current.counts.k(), now);
        }
    }

    fn show(&self, domain: &str, now: Duration) -> DomainTop {
        let mut counts = self.last.counts.clone();
        counts
            .merge(&self.current.counts)
            .expect("both summaries hold as many keys");
        let refused = counts.count();
        let keys = counts.into_sorted_iter().filter_map(|(key, count)| {
            let text = self.current.keys.get(&key).or_else(|| self.last.keys.get(&key))?;
            Some(Refusals {
                key: text.clone(),
                refused: count.estimated_count(),
                error: count.associated_error(),
            })
        });
        DomainTop {
            domain: domain.into(),
            seconds: now.saturating_sub(self.last.start).as_secs(),
            refused,
            keys: keys.collect(),
        }
    }
}

// === impl Summary ===

impl fmt::Debug for Summary {
    /// How long the counts are is of no interest.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Summary")
            .field("start", &self.start)
            .field("keys", &self.keys)
            .finish_non_exhaustive()
    }
}

impl Summary {
    fn new(keys: usize, start: Duration) -> Self {
        Summary {
            start,
            counts: FilteredSpaceSaving::new(keys),
            keys: HashMap::default(),
        }
    }

    fn note(&mut self, observation: &Observation<'_>) {
        let key = observation.hit.key;
        self.counts.insert(key, 1);
        if self.keys.contains_key(&key) || self.counts.get(&key).is_none() {
            return;
        }
        if self.keys.len() >= 2 * self.counts.k() {
            self.keys.retain(|key, _| self.counts.get(key).is_some());
        }
        let refused = RefusedKey {
            descriptor: observation.descriptor(),
            rule: observation.rule_path().map(Into::into),
            limit: observation.hit.limit.to_string().into(),
            shadow_mode: observation.shadow_mode,
        };
        self.keys.insert(key, refused);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::Outcome;
    use crate::descriptor::{Entry, Hits};
    use crate::key::KeyMaker;
    use crate::rate_limit::{RateLimit, Unit};
    use crate::store::Hit;

    #[test]
    fn counts_of_many_keys_are_right_within_their_error() {
        let (keys, limit) = (KeyMaker::default(), RateLimit::per(Unit::Hour, 1));
        let top = Top::new(10).unwrap();
        let now = Timestamp {
            since_epoch: Duration::ZERO,
            monotonic: Duration::ZERO,
        };
        // Key i is refused 2,000 / (i + 1) times, the keys in turn.
        let refusals = |key: u32| u64::from(2_000 / (key + 1));
        for round in 0..2_000 {
            for key in (0..1_000).filter(|key| refusals(*key) > round) {
                let value = key.to_string();
                let entries = [Entry {
                    key: b"k",
                    value: value.as_bytes(),
                }];
                let hit = Hit {
                    key: keys.key("d", &entries, None, &limit),
                    limit: &limit,
                    hits: Hits::Charge(1),
                    descriptor: 0,
                    shadow_mode: false,
                    quota_mode: false,
                };
                let outcome = Outcome {
                    over_limit: true,
                    before: 1,
                    after: 2,
                    remaining: 0,
                    until_reset: Duration::ZERO,
                    ban: None,
                };
                top.observe(&Observation {
                    domain: "d",
                    entries: &entries,
                    rule: None,
                    hit: &hit,
                    outcome: &outcome,
                    shadow_mode: false,
                    now,
                });
            }
        }
        let shown = &top.show(now)[0];
        assert_eq!(shown.refused, (0..1_000).map(refusals).sum::<u64>());
        assert_eq!(shown.keys.len(), 10);
        for key in &shown.keys {
            let value: u32 = key.key.descriptor[0].value.parse().unwrap();
            let least = key.refused - key.error;
            assert!((least..=key.refused).contains(&refusals(value)), "{key:?}");
        }
        assert_eq!(shown.keys[0].key.descriptor[0].value, "0");
        assert!(
            top.domains.read().unwrap()["d"]
                .lock()
                .unwrap()
                .current
                .keys
                .len()
                <= 20
        );
    }
}
