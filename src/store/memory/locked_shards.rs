//! Calls whose hits depend on each other: all their shards are locked at once.

use smallvec::SmallVec;

use super::bound::Bound;
use super::map::RwLockWriteGuard;
use super::{Counters, FullPolicy, MemoryStore, Shard};
use crate::algorithm::{self, Outcome, State, ban};
use crate::clock::Timestamp;
use crate::descriptor::Hits;
use crate::store::{Hit, Outcomes, refuses};

/// The shards of all counters of one call, locked until this is dropped.
pub(super) struct LockedShards<'s> {
    /// With their numbers, ascending.
    guards: SmallVec<[(usize, RwLockWriteGuard<'s, Shard>); 4]>,
    /// Of each hit: which guard is its shard's.
    places: SmallVec<[usize; 4]>,
    bound: &'s Bound,
}

/// What a hit may have changed, as it was before: the counter of its limit and of its burst.
type Before = [State; 2];

impl<'s> LockedShards<'s> {
    pub(super) fn of(store: &'s MemoryStore, hits: &[Hit<'_>]) -> Self {
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
    pub(super) fn hit_all_or_nothing(mut self, hits: &[Hit<'_>], now: Timestamp) -> Outcomes {
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
            self.counters(i, now).put_back(hit, before[i]);
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
    pub(super) fn hit_over_limit_only(mut self, hits: &[Hit<'_>], now: Timestamp) -> Outcomes {
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

// === impl Counters ===

impl Counters<'_> {
    fn before(&self, hit: &Hit<'_>) -> Before {
        let burst = hit.limit.burst.as_ref();
        [
            self.get(hit.key),
            burst.map_or_else(State::default, |burst| self.get(hit.key.of_burst(burst))),
        ]
    }

    fn put_back(&mut self, hit: &Hit<'_>, [state, burst_state]: Before) {
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
