//! Counters in the process's memory, shared by all its threads.
//!
//! A sharded map within a budget of bytes; a counter is read and written under its shard's lock, so counts are exact at any concurrency. A key's
//! counter, its burst and its ban are in one shard. A call whose hits depend on each other holds the locks of all its shards
//! at once, taken in ascending order.

mod bound;

use std::mem;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dashmap::{DashMap, RwLockWriteGuard, SharedValue};
use hashbrown::raw::RawTable;
use smallvec::SmallVec;

pub use self::bound::{FullPolicy, MemoryConfig, default_budget};

use self::bound::Bound;
use super::{Hit, Outcomes, refuses};
use crate::algorithm::{self, Outcome, State, ban};
use crate::clock::Timestamp;
use crate::descriptor::Hits;
use crate::key::{CounterKey, PlaceHasher, Worth};
use crate::rate_limit::{BanDuration, Charge, RateLimit};

/// What a counter takes in the table: its key, its state, and a byte of the table's own.
const ENTRY_BYTES: u64 = mem::size_of::<(CounterKey, SharedValue<State>)>() as u64 + 1;

/// How much of a full shard is forgotten at a time: an eighth.
const EVICTED_SHARE: usize = 8;

/// A hit may be this much older than another that is already counted. What has expired since is kept.
const OLDEST_HIT: Duration = Duration::from_secs(1);

/// How soon a caller should come again that was refused since there is no room for its counter.
const TURNED_AWAY_FOR: Duration = Duration::from_secs(1);

/// How many counters a shard keeps room for when it gives memory back, so that short windows do not have it freed and
/// taken again all the time.
const LEAST_KEPT: usize = 64;

/// The counters. Forgets those that are as good as new when it is [swept](MemoryStore::sweep).
#[derive(Debug)]
pub struct MemoryStore {
    counters: DashMap<CounterKey, State, PlaceHasher>,
    bound: Bound,
}

/// What the bound of the memory has led to since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pressure {
    /// How many counters were forgotten to make room.
    pub evicted: u64,
    /// How many calls of new keys were refused, or passed without being counted.
    pub turned_away: u64,
}

/// The table behind one lock of the map.
type Shard = RawTable<(CounterKey, SharedValue<State>)>;

impl Default for MemoryStore {
    fn default() -> Self {
        MemoryStore::new(&MemoryConfig::default())
    }
}

// === impl MemoryStore ===

impl MemoryStore {
    /// No counters yet.
    pub fn new(config: &MemoryConfig) -> Self {
        let bound = Bound::new(config);
        MemoryStore {
            counters: DashMap::with_hasher_and_shard_amount(PlaceHasher::default(), bound.shards),
            bound,
        }
    }

    /// For how many counters there is room.
    pub fn capacity(&self) -> usize {
        self.bound.capacity()
    }

    /// How much memory the tables of the counters take, in bytes.
    pub fn allocated(&self) -> u64 {
        let shards = self.counters.shards().iter();
        shards.map(|shard| shard.read().buckets() as u64).sum::<u64>() * ENTRY_BYTES
    }

    /// What the bound has led to.
    pub fn pressure(&self) -> Pressure {
        Pressure {
            evicted: self.bound.evicted.load(Ordering::Relaxed),
            turned_away: self.bound.turned_away.load(Ordering::Relaxed),
        }
    }

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
        let index = self.shard(hit.key);
        Counters {
            shard: &mut self.counters.shards()[index].write(),
            index,
            bound: &self.bound,
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

    /// Puts in counters from elsewhere, as far as they still matter at `now`.
    pub(crate) fn restore(&self, counters: impl Iterator<Item = (CounterKey, State)>, now: Timestamp) {
        for (key, state) in counters {
            let index = self.shard(key);
            Counters {
                shard: &mut self.counters.shards()[index].write(),
                index,
                bound: &self.bound,
                now,
            }
            .set(key, state);
        }
    }

    /// Hands out a copy of each shard in turn; no lock is held meanwhile.
    pub(super) fn copy_shards<E>(
        &self,
        mut take: impl FnMut(Vec<(CounterKey, State)>) -> Result<(), E>,
    ) -> Result<(), E> {
        for shard in self.counters.shards() {
            let copy = shard.read().clone();
            take(
                copy.into_iter()
                    .map(|(key, state)| (key, state.into_inner()))
                    .collect(),
            )?;
        }
        Ok(())
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
    index: usize,
    bound: &'s Bound,
    now: Timestamp,
}

impl Counters<'_> {
    /// Charges `hits` on the limit of `hit`, on its burst if the limit refuses, and notes a refusal that counts towards a
    /// ban. During a ban the counter is left alone, unless refused hits are to renew its window: what comes in meanwhile is
    /// not to bring on the next ban.
    fn hit(&mut self, hit: &Hit<'_>, hits: Hits) -> Outcome {
        let Some(ban) = &hit.limit.ban else {
            return self.count(hit, hits);
        };
        let running = ban::of(&self.get(hit.key.of_ban()), self.now);
        let goes_on = matches!(ban.lasts, BanDuration::Window) && hit.limit.renews_window();
        let mut outcome = match (running, hits) {
            (Some(_), Hits::Charge(_)) if !goes_on => self.count(hit, Hits::Charge(0)),
            _ => self.count(hit, hits),
        };
        outcome.over_limit |= running.is_some();
        outcome.ban = match hits {
            Hits::Charge(1..) if outcome.over_limit => self.update(hit.key.of_ban(), |state, now| {
                let started = ban::note_refusal(ban, hit.limit, state, outcome.until_reset, now);
                let worth = if started.is_some() {
                    Worth::Most
                } else {
                    Worth::Much
                };
                (started, worth)
            }),
            _ => running,
        };
        if let Some(banned) = outcome.ban {
            outcome.remaining = 0;
            outcome.until_reset = outcome.until_reset.max(banned.remaining);
        }
        outcome
    }

    /// The limit, and its burst if the limit refuses. What is given back goes to the burst first: its hits came last.
    fn count(&mut self, hit: &Hit<'_>, hits: Hits) -> Outcome {
        if self.lacks_room(hit.key) {
            return self.turn_away(hit, hits);
        }
        let Some(burst) = &hit.limit.burst else {
            return self.charge(hit.key, hit.limit, hits);
        };
        if let Hits::Refund(count) = hits {
            return self.refund(hit, burst, count);
        }
        let outcome = self.charge(hit.key, hit.limit, hits);
        if !outcome.over_limit {
            return outcome;
        }
        let of_burst = self.charge(hit.key.of_burst(burst), burst, hits);
        Outcome {
            over_limit: of_burst.over_limit,
            until_reset: outcome.until_reset.min(of_burst.until_reset),
            ..outcome
        }
    }

    fn refund(&mut self, hit: &Hit<'_>, burst: &RateLimit, count: u64) -> Outcome {
        let of_burst = self.charge(hit.key.of_burst(burst), burst, Hits::Refund(count));
        let returned = of_burst.before.saturating_sub(of_burst.after);
        // The limit knows of the burst's hits only if it is charged what it refuses.
        let rest = match hit.limit.charge_refused {
            true => count,
            false => count.saturating_sub(returned),
        };
        let outcome = self.charge(hit.key, hit.limit, Hits::Refund(rest));
        Outcome {
            over_limit: outcome.over_limit && of_burst.over_limit,
            ..outcome
        }
    }

    fn charge(&mut self, key: CounterKey, limit: &RateLimit, hits: Hits) -> Outcome {
        self.update(key, |state, now| {
            let outcome = algorithm::hit(limit, state, hits, now);
            (outcome, Worth::of(&outcome, limit))
        })
    }

    fn find(&self, key: CounterKey) -> Option<&State> {
        let found = self.shard.get(key.place(), |(there, _)| *there == key);
        found.map(|(_, state)| state.get())
    }

    fn get(&self, key: CounterKey) -> State {
        self.find(key).copied().unwrap_or_default()
    }

    /// Changes a counter, and what it is worth. One that is as good as new afterwards is not created.
    fn update<T>(&mut self, key: CounterKey, change: impl FnOnce(&mut State, Timestamp) -> (T, Worth)) -> T {
        if let Some((there, state)) = self.shard.get_mut(key.place(), |(there, _)| *there == key) {
            let (result, worth) = change(state.get_mut(), self.now);
            there.set_worth(worth);
            return result;
        }
        let mut state = State::default();
        let (result, worth) = change(&mut state, self.now);
        if !is_unused(key, &state, self.now) {
            self.insert(key, state, worth);
        }
        result
    }

    fn insert(&mut self, mut key: CounterKey, state: State, worth: Worth) {
        key.set_worth(worth);
        // Places of removed counters count as taken until the table is rebuilt; without room it would grow.
        let would_grow = self.shard.capacity() == self.shard.len();
        if self.is_full() || would_grow && self.shard.buckets() >= self.bound.most_buckets(self.index) {
            self.make_room();
        }
        self.put(key, state);
    }

    fn put(&mut self, key: CounterKey, state: State) {
        self.shard
            .insert(key.place(), (key, SharedValue::new(state)), |(key, _)| {
                key.place()
            });
    }

    /// Rebuilds the shard without what has expired, and if that is not enough, without the part that is worth least.
    fn make_room(&mut self) {
        let then = Timestamp {
            since_epoch: self.now.since_epoch.saturating_sub(OLDEST_HIT),
            monotonic: self.now.monotonic.saturating_sub(OLDEST_HIT),
        };
        let mut kept: Vec<(CounterKey, State)> = self
            .shard
            .drain()
            .map(|(key, state)| (key, state.into_inner()))
            .filter(|(key, state)| !is_unused(*key, state, then))
            .collect();
        let most = self.bound.most_keys(self.index);
        if kept.len() >= most {
            let evicted = most.div_ceil(EVICTED_SHARE);
            kept.select_nth_unstable_by_key(evicted - 1, |(key, state)| {
                (key.worth(), key.kind().forgettable_at(state))
            });
            kept.drain(..evicted);
            Bound::count(&self.bound.evicted, evicted);
        }
        for (key, state) in kept {
            self.put(key, state);
        }
    }

    fn is_full(&self) -> bool {
        self.shard.len() >= self.bound.most_keys(self.index)
    }

    /// Whether the counter is not there, nor a place for it, and none is to be made.
    fn lacks_room(&self, key: CounterKey) -> bool {
        self.bound.policy != FullPolicy::Evict && self.is_full() && self.find(key).is_none()
    }

    /// The outcome for a key whose counter has no room.
    fn turn_away(&mut self, hit: &Hit<'_>, hits: Hits) -> Outcome {
        let outcome = algorithm::hit(hit.limit, &mut State::default(), hits, self.now);
        if !matches!(hits, Hits::Charge(1..)) {
            return outcome;
        }
        Bound::count(&self.bound.turned_away, 1);
        if self.bound.policy == FullPolicy::Allow {
            return outcome;
        }
        Outcome {
            over_limit: true,
            remaining: 0,
            after: outcome.before,
            until_reset: TURNED_AWAY_FOR,
            ban: None,
            ..outcome
        }
    }

    fn set(&mut self, key: CounterKey, state: State) {
        if is_unused(key, &state, self.now) {
            self.shard.remove_entry(key.place(), |(there, _)| *there == key);
        } else if let Some((_, there)) = self.shard.get_mut(key.place(), |(there, _)| *there == key) {
            *there.get_mut() = state;
        } else {
            self.insert(key, state, key.worth());
        }
    }
}

fn is_unused(key: CounterKey, state: &State, now: Timestamp) -> bool {
    key.kind().is_forgettable(state, now)
}

// === impl LockedShards ===

/// The shards of all counters of one call, locked until this is dropped.
struct LockedShards<'s> {
    /// With their numbers, ascending.
    guards: SmallVec<[(usize, RwLockWriteGuard<'s, Shard>); 4]>,
    /// Of each hit: which guard is its shard's.
    places: SmallVec<[usize; 4]>,
    bound: &'s Bound,
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
            bound: &store.bound,
            places: shards.iter().map(place).collect(),
            guards: ascending
                .iter()
                .map(|shard| (*shard, store.counters.shards()[*shard].write()))
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
                // What has refused the call has refused it, whatever is over by now.
                let was_over = outcomes[i].over_limit;
                outcomes[i] = self.counters(i, now).hit(hit, hit.hits);
                if was_over {
                    outcomes[i].over_limit = true;
                    outcomes[i].remaining = 0;
                }
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
        let (index, shard) = &mut self.guards[self.places[hit]];
        Counters {
            shard,
            index: *index,
            bound: self.bound,
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
        if self.lacks_room(hit.key) {
            return self.bound.policy == FullPolicy::Deny && matches!(hit.hits, Hits::Charge(1..));
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
