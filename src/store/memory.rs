//! Counters in the process's memory, shared by all its threads.
//!
//! A sharded map; a counter is read and written under its shard's lock, so counts are exact at any concurrency. A call
//! whose hits depend on each other holds the locks of all its shards at once, taken in ascending order.

use ahash::RandomState;
use dashmap::{DashMap, RwLockWriteGuard, SharedValue};
use hashbrown::raw::RawTable;
use smallvec::SmallVec;

use super::{Hit, Outcomes, refuses};
use crate::algorithm::fixed_window::State;
use crate::algorithm::{Outcome, fixed_window};
use crate::clock::Timestamp;
use crate::descriptor::Hits;
use crate::key::CounterKey;
use crate::rate_limit::Charge;

/// Many more shards than cores: two threads seldom meet in one, and a sweep holds each only for a moment.
const SHARDS: usize = 1024;

/// The counters. Forgets those whose window has passed when it is [swept](MemoryStore::sweep).
#[derive(Debug)]
pub struct MemoryStore {
    /// By [`CounterKey`] as bytes. Hashed with a secret of this process, so that no client can aim at a shard.
    counters: DashMap<Box<[u8]>, State, RandomState>,
}

/// The table behind one lock of the map.
type Shard = RawTable<(Box<[u8]>, SharedValue<State>)>;

impl Default for MemoryStore {
    fn default() -> Self {
        MemoryStore {
            counters: DashMap::with_hasher_and_shard_amount(RandomState::new(), SHARDS),
        }
    }
}

// === impl MemoryStore ===

impl MemoryStore {
    /// Applies the hits of one call, in order, and says what became of each.
    pub fn hit(&self, hits: &[Hit], charge: Charge, now: Timestamp) -> Outcomes {
        match charge {
            Charge::Each => hits.iter().map(|hit| self.hit_alone(hit, now)).collect(),
            Charge::AllOrNothing => LockedShards::of(self, hits).hit_all_or_nothing(hits, now),
            Charge::StopWhenOverLimit => LockedShards::of(self, hits).hit_over_limit_only(hits, now),
        }
    }

    fn hit_alone(&self, hit: &Hit, now: Timestamp) -> Outcome {
        let hash = self.hash(hit);
        let mut shard = self.counters.shards()[self.shard(hash)].write();
        apply(&mut shard, hash, hit, hit.hits, now, self.counters.hasher()).0
    }

    fn hash(&self, hit: &Hit) -> u64 {
        self.counters.hasher().hash_one(hit.key.as_bytes())
    }

    fn shard(&self, hash: u64) -> usize {
        self.counters.determine_shard(hash as usize)
    }

    /// Forgets the counters whose window has passed, and gives memory back where many did. Returns how many it forgot.
    /// Holds one shard's lock at a time.
    pub fn sweep(&self, now: Timestamp) -> usize {
        let mut forgotten = 0;
        self.counters.retain(|key, state| {
            let forget = state.is_forgettable(CounterKey::window_seconds(key), now);
            forgotten += usize::from(forget);
            !forget
        });
        if forgotten > 0 {
            self.shrink();
        }
        forgotten
    }

    fn shrink(&self) {
        for shard in self.counters.shards() {
            let mut shard = shard.write();
            if shard.capacity() > 4 * shard.len() {
                let room = 2 * shard.len();
                shard.shrink_to(room, |(key, _)| self.counters.hasher().hash_one(&**key));
            }
        }
    }

    /// How many counters are held, those not yet swept included.
    pub fn len(&self) -> usize {
        self.counters.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.counters.is_empty()
    }
}

// === impl LockedShards ===

/// The shards of all counters of one call, locked until this is dropped.
struct LockedShards<'s> {
    hasher: &'s RandomState,
    /// By shard number, ascending.
    guards: SmallVec<[(usize, RwLockWriteGuard<'s, Shard>); 4]>,
    /// Of each hit: where its guard is, and its hash.
    places: SmallVec<[(usize, u64); 4]>,
}

impl<'s> LockedShards<'s> {
    fn of(store: &'s MemoryStore, hits: &[Hit]) -> Self {
        let hashes: SmallVec<[u64; 4]> = hits.iter().map(|hit| store.hash(hit)).collect();
        let mut numbers: SmallVec<[usize; 4]> = hashes.iter().map(|hash| store.shard(*hash)).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let guard_of = |hash: u64| {
            numbers
                .binary_search(&store.shard(hash))
                .expect("every hit's shard is in the list")
        };
        LockedShards {
            hasher: store.counters.hasher(),
            places: hashes.iter().map(|hash| (guard_of(*hash), *hash)).collect(),
            guards: numbers
                .iter()
                .map(|number| (*number, store.counters.shards()[*number].write()))
                .collect(),
        }
    }

    /// Charges every hit; takes all of it back if that refuses the call.
    fn hit_all_or_nothing(mut self, hits: &[Hit], now: Timestamp) -> Outcomes {
        let mut outcomes = Outcomes::new();
        let mut before: SmallVec<[Option<State>; 4]> = SmallVec::new();
        for (i, hit) in hits.iter().enumerate() {
            let (outcome, state) = self.apply(i, hit, hit.hits, now);
            outcomes.push(outcome);
            before.push(state);
        }
        if refuses(hits, &outcomes) {
            for (i, hit) in hits.iter().enumerate().rev() {
                self.restore(i, hit, before[i]);
            }
            for (i, hit) in hits.iter().enumerate() {
                if !outcomes[i].over_limit {
                    outcomes[i] = self.apply(i, hit, Hits::Charge(0), now).0;
                }
            }
        }
        outcomes
    }

    /// Charges every hit if none would go over its limit; else only those that would.
    fn hit_over_limit_only(mut self, hits: &[Hit], now: Timestamp) -> Outcomes {
        let goes_over: SmallVec<[bool; 4]> = hits
            .iter()
            .enumerate()
            .map(|(i, hit)| self.would_go_over(i, hit, now))
            .collect();
        let spare_others = goes_over.contains(&true);
        hits.iter()
            .enumerate()
            .map(|(i, hit)| {
                let charged = if spare_others && !goes_over[i] {
                    Hits::Charge(0)
                } else {
                    hit.hits
                };
                self.apply(i, hit, charged, now).0
            })
            .collect()
    }

    fn would_go_over(&mut self, i: usize, hit: &Hit, now: Timestamp) -> bool {
        let (outcome, before) = self.apply(i, hit, hit.hits, now);
        self.restore(i, hit, before);
        outcome.over_limit
    }

    fn apply(&mut self, i: usize, hit: &Hit, hits: Hits, now: Timestamp) -> (Outcome, Option<State>) {
        let (guard, hash) = self.places[i];
        apply(&mut self.guards[guard].1, hash, hit, hits, now, self.hasher)
    }

    fn restore(&mut self, i: usize, hit: &Hit, before: Option<State>) {
        let (guard, hash) = self.places[i];
        restore(&mut self.guards[guard].1, hash, hit, before);
    }
}

// === on one shard ===

/// Applies `hits` to the hit's counter; also returns the state it had. A counter that nothing is charged on is not
/// created.
fn apply(
    shard: &mut Shard,
    hash: u64,
    hit: &Hit,
    hits: Hits,
    now: Timestamp,
    hasher: &RandomState,
) -> (Outcome, Option<State>) {
    let key = hit.key.as_bytes();
    if let Some((_, state)) = shard.get_mut(hash, |(there, _)| **there == *key) {
        let state = state.get_mut();
        let before = *state;
        return (fixed_window::hit(&hit.limit, state, hits, now), Some(before));
    }
    let mut state = State::open(&hit.limit, now);
    let outcome = fixed_window::hit(&hit.limit, &mut state, hits, now);
    if outcome.after > 0 {
        let entry = (key.into(), SharedValue::new(state));
        shard.insert(hash, entry, |(key, _)| hasher.hash_one(&**key));
    }
    (outcome, None)
}

/// Gives the hit's counter back the state it had; `None`: it was not there.
fn restore(shard: &mut Shard, hash: u64, hit: &Hit, before: Option<State>) {
    let key = hit.key.as_bytes();
    match before {
        Some(before) => {
            if let Some((_, state)) = shard.get_mut(hash, |(there, _)| **there == *key) {
                *state.get_mut() = before;
            }
        }
        None => {
            shard.remove_entry(hash, |(there, _)| **there == *key);
        }
    }
}
