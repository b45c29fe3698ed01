//! Counters in the process's memory, shared by all its threads.
//!
//! A sharded map within a budget of bytes; a counter is read and written under its shard's lock, so counts are exact at any concurrency. A key's
//! counter, its burst and its ban are in one shard. A call whose hits depend on each other holds the locks of all its shards
//! at once, taken in ascending order.

mod bound;
mod locked_shards;
mod map;

use std::mem;
use std::time::Duration;

use hashbrown::raw::RawTable;

pub use self::bound::{FullPolicy, MemoryConfig};

use self::bound::Bound;
use self::locked_shards::LockedShards;
use self::map::{DashMap, SharedValue};
use super::{Hit, Outcomes};
use crate::algorithm::{self, BanOutcome, Outcome, State, Worth, ban};
use crate::clock::Timestamp;
use crate::descriptor::Hits;
use crate::key::{CounterKey, PlaceHasher};
use crate::rate_limit::{BanDuration, Charge, RateLimit};

/// What a counter takes in the table: its key, its state, and a byte of the table's own.
const ENTRY_BYTES: u64 = mem::size_of::<(CounterKey, SharedValue<Packed>)>() as u64 + 1;

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
    counters: DashMap<CounterKey, Packed, PlaceHasher>,
    bound: Bound,
}

/// What the bound of the memory has led to since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Pressure {
    /// How many counters were forgotten to make room.
    pub evicted: u64,
    /// How many hits of new keys found no room: their calls were refused, or passed without being counted.
    pub turned_away: u64,
}

/// A state as the table holds it: a table of larger things than bytes has gaps.
#[derive(Debug, Clone, Copy)]
struct Packed([u8; mem::size_of::<State>()]);

impl From<State> for Packed {
    fn from(State([first, second]): State) -> Self {
        let mut packed = [0; mem::size_of::<State>()];
        packed[..8].copy_from_slice(&first.to_le_bytes());
        packed[8..].copy_from_slice(&second.to_le_bytes());
        Packed(packed)
    }
}

impl From<Packed> for State {
    fn from(Packed(packed): Packed) -> Self {
        let [first, second] = [0, 8].map(|at| {
            let word = packed[at..at + 8].try_into();
            u64::from_le_bytes(word.expect("it is eight bytes"))
        });
        State([first, second])
    }
}

/// The table behind one lock of the map.
type Shard = RawTable<(CounterKey, SharedValue<Packed>)>;

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

    /// What happens when there is no room.
    pub fn policy(&self) -> FullPolicy {
        self.bound.policy
    }

    /// How much memory the tables of the counters take, in bytes.
    pub fn allocated(&self) -> u64 {
        let shards = self.counters.shards().iter();
        shards.map(|shard| shard.read().buckets() as u64).sum::<u64>() * ENTRY_BYTES
    }

    /// What the bound has led to.
    pub fn pressure(&self) -> Pressure {
        self.bound.pressure()
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
        self.with_counters(hit.key, now, |mut counters| counters.hit(hit, hit.hits))
    }

    fn with_counters<T>(&self, key: CounterKey, now: Timestamp, work: impl FnOnce(Counters<'_>) -> T) -> T {
        let index = self.shard(key);
        work(Counters {
            shard: &mut self.counters.shards()[index].write(),
            index,
            bound: &self.bound,
            now,
        })
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
            let forget = key.kind().is_forgettable(&State::from(*state), now);
            forgotten += usize::from(forget);
            !forget
        });
        if forgotten > 0 {
            self.shrink();
        }
        forgotten
    }

    /// The ban that the key of a counter is under at `now`, if it is.
    pub fn ban(&self, key: CounterKey, now: Timestamp) -> Option<BanOutcome> {
        let state = self.with_counters(key, now, |counters| counters.get(key.of_ban()));
        ban::of(&state, now)
    }

    /// Puts in a counter from elsewhere, if it still matters at `now`.
    pub(crate) fn restore(&self, key: CounterKey, state: State, now: Timestamp) {
        self.with_counters(key, now, |mut counters| counters.set(key, state));
    }

    /// Hands out a copy of each shard in turn. It is cloned under the shard's lock, so that none is held while `take` works;
    /// the copies are of different instants.
    pub(super) fn copy_shards<E>(
        &self,
        mut take: impl FnMut(Vec<(CounterKey, State)>) -> Result<(), E>,
    ) -> Result<(), E> {
        for shard in self.counters.shards() {
            let copy = shard.read().clone();
            take(
                copy.into_iter()
                    .map(|(key, state)| (key, state.into_inner().into()))
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
        if self.lacks_room(hit.key) {
            return self.turn_away(hit, hits);
        }
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

    fn find(&self, key: CounterKey) -> Option<State> {
        let found = self.shard.get(key.place(), |(there, _)| *there == key);
        found.map(|(_, state)| (*state.get()).into())
    }

    fn get(&self, key: CounterKey) -> State {
        self.find(key).unwrap_or_default()
    }

    /// Changes a counter, and what it is worth. One that is as good as new afterwards is not created.
    fn update<T>(&mut self, key: CounterKey, change: impl FnOnce(&mut State, Timestamp) -> (T, Worth)) -> T {
        if let Some((there, packed)) = self.shard.get_mut(key.place(), |(there, _)| *there == key) {
            let mut state = (*packed.get()).into();
            let (result, worth) = change(&mut state, self.now);
            *packed.get_mut() = state.into();
            there.set_worth(worth);
            return result;
        }
        let mut state = State::default();
        let (result, worth) = change(&mut state, self.now);
        if !is_forgettable(key, &state, self.now) {
            self.insert(key, state, worth);
        }
        result
    }

    /// Adds a counter that is not there, and makes room for it.
    fn insert(&mut self, mut key: CounterKey, state: State, worth: Worth) {
        key.set_worth(worth);
        // Places of removed counters count as taken until the table is rebuilt; without room it would grow.
        let would_grow = self.shard.capacity() == self.shard.len();
        let most_buckets = self.bound.most_buckets(self.index);
        if self.is_full() || would_grow && self.shard.buckets() >= most_buckets {
            self.make_room();
        } else if would_grow && self.bound.leaps(self.index) && self.shard.buckets() == most_buckets / 4 {
            let room = self.bound.most_counters(self.index) - self.shard.len();
            self.shard.reserve(room, |(key, _)| key.place());
        }
        self.put(key, state);
    }

    /// Adds a counter for which there is room.
    fn put(&mut self, key: CounterKey, state: State) {
        self.shard
            .insert(key.place(), (key, SharedValue::new(state.into())), |(key, _)| {
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
            .map(|(key, state)| (key, State::from(state.into_inner())))
            .filter(|(key, state)| !is_forgettable(*key, state, then))
            .collect();
        let most = self.bound.most_counters(self.index);
        if kept.len() >= most {
            let evicted = most.div_ceil(EVICTED_SHARE);
            kept.select_nth_unstable_by_key(evicted - 1, |(key, state)| {
                (key.worth(), key.kind().forgettable_at(state))
            });
            kept.drain(..evicted);
            self.bound.note_evicted(evicted);
        }
        for (key, state) in kept {
            self.put(key, state);
        }
    }

    fn is_full(&self) -> bool {
        self.shard.len() >= self.bound.most_counters(self.index)
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
        self.bound.note_turned_away();
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

    /// Gives a counter this state, whether it is there or not.
    fn set(&mut self, key: CounterKey, state: State) {
        if is_forgettable(key, &state, self.now) {
            self.shard.remove_entry(key.place(), |(there, _)| *there == key);
        } else if let Some((_, there)) = self.shard.get_mut(key.place(), |(there, _)| *there == key) {
            *there.get_mut() = state.into();
        } else {
            self.insert(key, state, key.worth());
        }
    }
}

fn is_forgettable(key: CounterKey, state: &State, now: Timestamp) -> bool {
    key.kind().is_forgettable(state, now)
}
