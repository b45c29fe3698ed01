//! Counters in the process's memory, shared by all its threads.
//!
//! A sharded map; a counter is read and written under its shard's lock, so counts are exact at any concurrency. A key's
//! counter, its burst and its ban are in one shard. A call whose hits depend on each other holds the locks of all its shards
//! at once, taken in ascending order.

use dashmap::{DashMap, RwLockWriteGuard, SharedValue};
use hashbrown::raw::RawTable;
use smallvec::SmallVec;

use super::{Hit, Outcomes, refuses};
use crate::algorithm::{self, Outcome, State, ban};
use crate::clock::Timestamp;
use crate::descriptor::Hits;
use crate::key::{CounterKey, PlaceHasher};
use crate::rate_limit::{BanDuration, Charge};

/// Many more shards than cores: two threads seldom meet in one, and a sweep holds each only for a moment.
const SHARDS: usize = 1024;

/// How many counters a shard keeps room for when it gives memory back, so that short windows do not have it freed and
/// taken again all the time.
const LEAST_KEPT: usize = 64;

/// The counters. Forgets those that are as good as new when it is [swept](MemoryStore::sweep).
#[derive(Debug)]
pub struct MemoryStore {
    counters: DashMap<CounterKey, State, PlaceHasher>,
}

/// The table behind one lock of the map.
type Shard = RawTable<(CounterKey, SharedValue<State>)>;

impl Default for MemoryStore {
    fn default() -> Self {
        MemoryStore {
            counters: DashMap::with_hasher_and_shard_amount(PlaceHasher::default(), SHARDS),
        }
    }
}

// === impl MemoryStore ===

impl MemoryStore {
    /// Applies the hits of one call, in order, and says what became of each.
    pub fn hit(&self, hits: &[Hit<'_>], charge: Charge, now: Timestamp) -> Outcomes {
        match (charge, hits) {
            // The only hit of a call spares no others.
            (Charge::Each, _) | (Charge::StopWhenOverLimit, [_]) => {
                hits.iter().map(|hit| self.hit_alone(hit, now)).collect()
            }
            (Charge::AllOrNothing, _) => LockedShards::of(self, hits).hit_all_or_nothing(hits, now),
            (Charge::StopWhenOverLimit, _) => LockedShards::of(self, hits).hit_over_limit_only(hits, now),
        }
    }

    fn hit_alone(&self, hit: &Hit<'_>, now: Timestamp) -> Outcome {
        let mut shard = self.counters.shards()[self.shard(hit.key)].write();
        Counters {
            shard: &mut shard,
            now,
        }
        .hit(hit, hit.hits)
    }

    fn shard(&self, key: CounterKey) -> usize {
        self.counters.determine_shard(key.place() as usize)
    }

    /// Forgets the counters that were as good as new at `now`, and gives memory back where there were many. Returns how many
    /// it forgot. Holds one shard's lock at a time.
    ///
    /// `now` must be older than the time of any hit that is still to come: one from before the end of a window that has been
    /// forgotten would open that window again.
    pub fn sweep(&self, now: Timestamp) -> usize {
        let mut forgotten = 0;
        self.counters.retain(|key, state| {
            let forget = key.kind().is_forgettable(state, now);
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
            if shard.capacity() > 4 * shard.len().max(LEAST_KEPT) {
                let room = 2 * shard.len().max(LEAST_KEPT);
                shard.shrink_to(room, |(key, _)| key.place());
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

// === impl Counters ===

/// The counters of one shard, at one time.
struct Counters<'s> {
    shard: &'s mut Shard,
    now: Timestamp,
}

impl Counters<'_> {
    /// Charges `hits` on the limit of `hit`, on its burst if the limit refuses, and notes a refusal that counts towards a
    /// ban. A ban with a length of its own leaves the counter alone: what came in meanwhile is not to bring on the next.
    fn hit(&mut self, hit: &Hit<'_>, hits: Hits) -> Outcome {
        let Some(ban) = &hit.limit.ban else {
            return self.count(hit, hits);
        };
        let running = ban::of(&self.get(hit.key.of_ban()), self.now);
        let mut outcome = match (running, &ban.lasts, hits) {
            (Some(_), BanDuration::For(_), Hits::Charge(_)) => self.count(hit, Hits::Charge(0)),
            _ => self.count(hit, hits),
        };
        outcome.over_limit |= running.is_some();
        outcome.ban = match hits {
            Hits::Charge(1..) if outcome.over_limit => self.update(hit.key.of_ban(), |state, now| {
                ban::note_refusal(ban, hit.limit, state, outcome.until_reset, now)
            }),
            _ => running,
        };
        if let Some(banned) = outcome.ban {
            outcome.remaining = 0;
            outcome.until_reset = outcome.until_reset.max(banned.remaining);
        }
        outcome
    }

    /// The limit, and its burst if the limit refuses.
    fn count(&mut self, hit: &Hit<'_>, hits: Hits) -> Outcome {
        let outcome = self.update(hit.key, |state, now| algorithm::hit(hit.limit, state, hits, now));
        let Some(burst) = &hit.limit.burst else {
            return outcome;
        };
        if !outcome.over_limit || matches!(hits, Hits::Refund(_)) {
            return outcome;
        }
        let of_burst = self.update(hit.key.of_burst(burst), |state, now| {
            algorithm::hit(burst, state, hits, now)
        });
        Outcome {
            over_limit: of_burst.over_limit,
            until_reset: outcome.until_reset.min(of_burst.until_reset),
            ..outcome
        }
    }

    fn get(&self, key: CounterKey) -> State {
        self.shard
            .get(key.place(), |(there, _)| *there == key)
            .map_or_else(State::default, |(_, state)| *state.get())
    }

    /// Changes a counter. One that is as good as new afterwards is not created.
    fn update<T>(&mut self, key: CounterKey, change: impl FnOnce(&mut State, Timestamp) -> T) -> T {
        if let Some((_, state)) = self.shard.get_mut(key.place(), |(there, _)| *there == key) {
            return change(state.get_mut(), self.now);
        }
        let mut state = State::default();
        let result = change(&mut state, self.now);
        if !is_unused(key, &state, self.now) {
            self.shard
                .insert(key.place(), (key, SharedValue::new(state)), |(key, _)| {
                    key.place()
                });
        }
        result
    }

    fn set(&mut self, key: CounterKey, state: State) {
        self.update(key, |there, _| *there = state);
        if is_unused(key, &state, self.now) {
            self.shard.remove_entry(key.place(), |(there, _)| *there == key);
        }
    }
}

fn is_unused(key: CounterKey, state: &State, now: Timestamp) -> bool {
    key.kind().is_forgettable(state, now)
}

// === impl LockedShards ===

/// The shards of all counters of one call, locked until this is dropped.
struct LockedShards<'s> {
    /// By shard number, ascending.
    guards: SmallVec<[RwLockWriteGuard<'s, Shard>; 4]>,
    /// Of each hit: which guard is its shard's.
    places: SmallVec<[usize; 4]>,
}

/// What a hit may have changed, as it was before: the counter of its limit and of its burst.
type Before = [State; 2];

impl<'s> LockedShards<'s> {
    fn of(store: &'s MemoryStore, hits: &[Hit<'_>]) -> Self {
        let shards: SmallVec<[usize; 4]> = hits.iter().map(|hit| store.shard(hit.key)).collect();
        let mut ascending = shards.clone();
        ascending.sort_unstable();
        ascending.dedup();
        let place = |shard: &usize| {
            ascending
                .binary_search(shard)
                .expect("every hit's shard is in the list")
        };
        LockedShards {
            places: shards.iter().map(place).collect(),
            guards: ascending
                .iter()
                .map(|shard| store.counters.shards()[*shard].write())
                .collect(),
        }
    }

    /// Charges every hit; takes all of it back if that refuses the call. Hits that are given back stay given back, and
    /// refusals that count towards a ban stay noted.
    fn hit_all_or_nothing(mut self, hits: &[Hit<'_>], now: Timestamp) -> Outcomes {
        let mut before: SmallVec<[Before; 4]> = SmallVec::new();
        let mut outcomes = Outcomes::new();
        for (i, hit) in hits.iter().enumerate() {
            let mut counters = self.counters(i, now);
            before.push(counters.before(hit));
            outcomes.push(counters.hit(hit, hit.hits));
        }
        if refuses(hits, &outcomes) {
            self.take_back(hits, &before, &mut outcomes, now);
        }
        outcomes
    }

    /// Undoes all charges, the last one first, and says where that leaves each counter.
    fn take_back(&mut self, hits: &[Hit<'_>], before: &[Before], outcomes: &mut Outcomes, now: Timestamp) {
        for (i, hit) in hits.iter().enumerate().rev() {
            self.counters(i, now).restore(hit, before[i]);
        }
        for (i, hit) in hits.iter().enumerate() {
            if matches!(hit.hits, Hits::Refund(_)) {
                outcomes[i] = self.counters(i, now).hit(hit, hit.hits);
            }
        }
        for (i, hit) in hits.iter().enumerate() {
            let look = self.counters(i, now).look(hit);
            if outcomes[i].over_limit {
                outcomes[i].after = look.after;
            } else {
                outcomes[i] = look;
            }
        }
    }

    /// Charges every hit if none would go over its limit; else only those that would. Hits are given back in any case.
    fn hit_over_limit_only(mut self, hits: &[Hit<'_>], now: Timestamp) -> Outcomes {
        let goes_over: SmallVec<[bool; 4]> = hits
            .iter()
            .enumerate()
            .map(|(i, hit)| self.counters(i, now).would_go_over(hit))
            .collect();
        let spare_others = goes_over.contains(&true);
        hits.iter()
            .enumerate()
            .map(|(i, hit)| {
                let is_spared = spare_others && !goes_over[i] && matches!(hit.hits, Hits::Charge(_));
                let mut counters = self.counters(i, now);
                if is_spared {
                    counters.look(hit)
                } else {
                    counters.hit(hit, hit.hits)
                }
            })
            .collect()
    }

    /// The counters of the shard of one hit.
    fn counters(&mut self, hit: usize, now: Timestamp) -> Counters<'_> {
        Counters {
            shard: &mut self.guards[self.places[hit]],
            now,
        }
    }
}

impl Counters<'_> {
    fn before(&self, hit: &Hit<'_>) -> Before {
        let burst = hit.limit.burst.as_ref();
        [
            self.get(hit.key),
            burst.map_or_else(State::default, |burst| self.get(hit.key.of_burst(burst))),
        ]
    }

    fn restore(&mut self, hit: &Hit<'_>, [state, burst_state]: Before) {
        self.set(hit.key, state);
        if let Some(burst) = &hit.limit.burst {
            self.set(hit.key.of_burst(burst), burst_state);
        }
    }

    /// Where the counters of a hit stand.
    fn look(&mut self, hit: &Hit<'_>) -> Outcome {
        self.hit(hit, Hits::Charge(0))
    }

    /// Whether charging the hit would go over its limit. Hits that are given back never do.
    fn would_go_over(&mut self, hit: &Hit<'_>) -> bool {
        if matches!(hit.hits, Hits::Refund(_)) {
            return false;
        }
        let [mut state, mut burst_state] = self.before(hit);
        let mut over_limit = algorithm::hit(hit.limit, &mut state, hit.hits, self.now).over_limit;
        if let Some(burst) = &hit.limit.burst {
            over_limit &= algorithm::hit(burst, &mut burst_state, hit.hits, self.now).over_limit;
        }
        let may_be_banned = hit.limit.ban.is_some();
        over_limit || may_be_banned && ban::of(&self.get(hit.key.of_ban()), self.now).is_some()
    }
}
