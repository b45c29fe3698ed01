//! How much memory the counters may take, and what happens when it is full.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{ENTRY_BYTES, Pressure};

/// How much memory the counters may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryConfig {
    /// In bytes. `None` is without bounds.
    pub budget: Option<u64>,
    /// What happens to a new key when there is no room.
    pub policy: FullPolicy,
}

/// What happens to a new key when there is no room for its counter. Bursts and bans of keys that are counted make room in
/// any case, as [`FullPolicy::Evict`] does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum FullPolicy {
    /// Others are forgotten, those first that give least away: expired ones, then those furthest from their limit, and of
    /// these the ones that would soonest be as good as new. Exhausted and banned keys go last.
    #[default]
    Evict,
    /// The call is refused.
    Deny,
    /// The call passes and is not counted.
    Allow,
}

impl Default for MemoryConfig {
    /// Without bounds.
    fn default() -> Self {
        MemoryConfig {
            budget: None,
            policy: FullPolicy::Evict,
        }
    }
}

/// How many buckets a shard may have at least: a table of these is rebuilt in some microseconds. Shards grow beyond it when
/// there are [`MOST_SHARDS`], which is from 256 MiB on; at 8 GiB a rebuild holds one for about half a millisecond.
const SHARD_BUCKETS: u64 = 512;

/// A quarter of the budget is left to the allocator, which keeps for a while what tables had before they grew: while all of them
/// grow at about the same time that is half as much again.
const ALLOCATOR_SHARE: u64 = 4;

/// Many more shards than cores: two threads seldom meet in one.
const LEAST_SHARDS: u64 = 1_024;

/// Where the shards themselves begin to take memory and cache.
const MOST_SHARDS: u64 = 16_384;

/// How much each shard may hold, and what that led to.
///
/// A table has a power of two of buckets. So that the budget is used up all the same, some shards may have twice as many
/// as the others.
#[derive(Debug)]
pub(super) struct Bound {
    pub(super) shards: usize,
    /// The most buckets of the smaller shards.
    small: usize,
    /// How many shards, the first ones, are twice as large.
    large_shards: usize,
    pub(super) policy: FullPolicy,
    evicted: AtomicU64,
    turned_away: AtomicU64,
}

impl Bound {
    pub(super) fn new(config: &MemoryConfig) -> Self {
        let budget = config.budget.unwrap_or(0);
        let shards = (budget / (SHARD_BUCKETS * ENTRY_BYTES))
            .clamp(LEAST_SHARDS, MOST_SHARDS)
            .next_power_of_two();
        let (small, large_shards) = match config.budget {
            Some(budget) => {
                let buckets = (budget - budget / ALLOCATOR_SHARE) / ENTRY_BYTES;
                // A table has at least four.
                let small = 1 << (buckets / shards).max(4).ilog2();
                (small, (buckets / small).saturating_sub(shards))
            }
            None => (1 << 40, 0),
        };
        Bound {
            shards: shards as usize,
            small: small as usize,
            large_shards: large_shards as usize,
            policy: config.policy,
            evicted: 0.into(),
            turned_away: 0.into(),
        }
    }

    /// How many buckets the table of a shard may have.
    pub(super) fn most_buckets(&self, shard: usize) -> usize {
        if shard < self.large_shards {
            2 * self.small
        } else {
            self.small
        }
    }

    /// Whether the table of a shard grows to its full size at once from a quarter of it, as in those that are half as large
    /// as others. Allocators keep things of one size together and give back only what is wholly free: the tables that stay at
    /// that size are not to be among those that leave it.
    pub(super) fn leaps(&self, shard: usize) -> bool {
        shard >= self.large_shards && self.large_shards > 0
    }

    /// How many counters a shard may hold.
    pub(super) fn most_counters(&self, shard: usize) -> usize {
        counters_of(self.most_buckets(shard))
    }

    /// How many counters all shards may hold.
    pub(super) fn capacity(&self) -> usize {
        let large = self.large_shards * counters_of(2 * self.small);
        (self.shards - self.large_shards).saturating_mul(counters_of(self.small)) + large
    }

    pub(super) fn note_evicted(&self, counters: usize) {
        // Only told, never decided upon.
        self.evicted.fetch_add(counters as u64, Ordering::Relaxed);
    }

    pub(super) fn note_turned_away(&self) {
        self.turned_away.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn pressure(&self) -> Pressure {
        Pressure {
            evicted: self.evicted.load(Ordering::Relaxed),
            turned_away: self.turned_away.load(Ordering::Relaxed),
        }
    }
}

/// How many counters a table of so many buckets takes before it grows.
fn counters_of(buckets: usize) -> usize {
    if buckets < 8 { buckets - 1 } else { buckets / 8 * 7 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_budget_is_used_up_but_for_the_share_of_the_allocator() {
        for megabytes in (1..2_000).chain([4_096, 65_536]) {
            let budget = megabytes << 20;
            let bound = Bound::new(&MemoryConfig {
                budget: Some(budget),
                policy: FullPolicy::Evict,
            });
            let shards = 0..bound.shards;
            let buckets: usize = shards.clone().map(|shard| bound.most_buckets(shard)).sum();
            let bytes = buckets as u64 * ENTRY_BYTES;
            let most = budget - budget / ALLOCATOR_SHARE;
            let table = bound.small as u64 * ENTRY_BYTES;
            assert!(bytes <= most, "{megabytes} MiB: {bytes}");
            assert!(bytes + table.max(1 << 19) >= most, "{megabytes} MiB: {bytes}");
            let keys: usize = shards.map(|shard| bound.most_counters(shard)).sum();
            assert_eq!(keys, bound.capacity());
        }
    }
}
