//! The smallest cases of calls that meet in the store, in every order of their steps; and larger ones, in many orders.
//!
//! ```sh
//! RUSTFLAGS="--cfg shuttle" cargo test --test model --target-dir target/shuttle
//! ```
//!
//! The store is the real one but for its locks, which belong to the model checker shuttle. A deadlock fails like a wrong count.

#![cfg(shuttle)]
#![allow(clippy::unwrap_used)] // what a test cannot go on without fails it

use std::sync::Arc;
use std::time::Duration;

use shuttle::thread;
use tollgate::clock::Timestamp;
use tollgate::descriptor::{Entry, Hits};
use tollgate::key::{CounterKey, KeyMaker};
use tollgate::rate_limit::{Ban, BanDuration, Charge, RateLimit, Unit};
use tollgate::store::memory::MemoryStore;
use tollgate::store::{Hit, refuses};

/// How many random schedules of the larger cases are tried.
const SCHEDULES: usize = 20_000;

const NOW: Timestamp = Timestamp {
    since_epoch: Duration::from_secs(1_700_000_000),
    monotonic: Duration::from_secs(10),
};

/// Keys whose shards are the same in every run of a case: they are made outside of it.
fn keys(count: u8) -> Vec<CounterKey> {
    let maker = KeyMaker::default();
    let limit = RateLimit::per(Unit::Hour, 1);
    let key = |value: u8| {
        maker.key(
            "d",
            &[Entry {
                key: b"k",
                value: &[value],
            }],
            None,
            &limit,
        )
    };
    (0..count).map(key).collect()
}

fn limit(requests_per_unit: u32) -> RateLimit {
    RateLimit::per(Unit::Hour, requests_per_unit)
}

/// A call that hits each of `keys` once. Whether it passes.
fn passes(store: &MemoryStore, keys: &[CounterKey], limit: &RateLimit, charge: Charge) -> bool {
    let hits = hits(keys, limit, 1);
    let outcomes = store.hit(&hits, charge, NOW);
    !refuses(&hits, &outcomes)
}

fn hits<'a>(keys: &[CounterKey], limit: &'a RateLimit, count: u64) -> Vec<Hit<'a>> {
    let hit = |(descriptor, key): (usize, &CounterKey)| Hit {
        key: *key,
        limit,
        hits: Hits::Charge(count),
        descriptor,
        shadow_mode: false,
        quota_mode: false,
    };
    keys.iter().enumerate().map(hit).collect()
}

fn charged(store: &MemoryStore, key: CounterKey, limit: &RateLimit) -> u64 {
    store.hit(&hits(&[key], limit, 0), Charge::Each, NOW)[0].after
}

/// Runs each of `calls` in a thread of its own. Which of them passed.
fn together(store: &Arc<MemoryStore>, calls: &[Vec<CounterKey>], limit: u32, charge: Charge) -> Vec<bool> {
    let threads: Vec<_> = calls
        .iter()
        .map(|keys| {
            let (store, keys) = (Arc::clone(store), keys.clone());
            thread::spawn(move || passes(&store, &keys, &self::limit(limit), charge))
        })
        .collect();
    threads.into_iter().map(|thread| thread.join().unwrap()).collect()
}

#[test]
fn of_two_calls_that_want_the_same_keys_in_another_order_one_passes() {
    let keys = keys(2);
    shuttle::check_dfs(
        move || {
            let store = Arc::new(MemoryStore::default());
            let calls = [vec![keys[0], keys[1]], vec![keys[1], keys[0]]];
            let passed = together(&store, &calls, 1, Charge::AllOrNothing);
            assert_eq!(passed.iter().filter(|passed| **passed).count(), 1);
            assert!(keys.iter().all(|key| charged(&store, *key, &limit(1)) == 1));
        },
        None,
    );
}

#[test]
fn a_refused_call_charges_nothing_whatever_comes_between() {
    let keys = keys(2);
    shuttle::check_dfs(
        move || {
            let store = Arc::new(MemoryStore::default());
            let calls = [vec![keys[0], keys[1]], vec![keys[1]]];
            let passed = together(&store, &calls, 1, Charge::AllOrNothing);
            let first = charged(&store, keys[0], &limit(1));
            assert_eq!(charged(&store, keys[1], &limit(1)), 1);
            match passed[..] {
                [true, false] => assert_eq!(first, 1),
                [false, true] => assert_eq!(first, 0),
                _ => panic!("one call passes, not {passed:?}"),
            }
        },
        None,
    );
}

#[test]
fn exactly_the_limit_passes() {
    let keys = keys(1);
    shuttle::check_dfs(
        move || {
            let store = Arc::new(MemoryStore::default());
            let calls = vec![vec![keys[0]]; 3];
            let passed = together(&store, &calls, 2, Charge::Each);
            assert_eq!(passed.iter().filter(|passed| **passed).count(), 2);
        },
        None,
    );
}

#[test]
fn calls_that_overlap_in_a_ring_neither_wait_for_ever_nor_admit_too_much() {
    let keys = keys(3);
    shuttle::check_random(
        move || {
            let store = Arc::new(MemoryStore::default());
            let calls = [
                vec![keys[0], keys[1]],
                vec![keys[1], keys[2]],
                vec![keys[2], keys[0]],
                vec![keys[1], keys[0]],
            ];
            let passed = together(&store, &calls, 1, Charge::AllOrNothing);
            // Any two of them share a key.
            assert_eq!(passed.iter().filter(|passed| **passed).count(), 1);
            for key in &keys {
                let admitted = calls.iter().zip(&passed);
                let admitted = admitted.filter(|(call, passed)| **passed && call.contains(key));
                assert_eq!(charged(&store, *key, &limit(1)), admitted.count() as u64);
            }
        },
        SCHEDULES,
    );
}

#[test]
fn calls_that_spare_others_when_over_their_limit_are_counted_exactly() {
    let keys = keys(2);
    shuttle::check_random(
        move || {
            let store = Arc::new(MemoryStore::default());
            let calls = [vec![keys[0], keys[1]], vec![keys[1], keys[0]], vec![keys[1]]];
            let passed = together(&store, &calls, 2, Charge::StopWhenOverLimit);
            // Two of three fit on the second key; the one that does not spares the first.
            assert_eq!(passed.iter().filter(|passed| **passed).count(), 2);
            let admitted = calls.iter().zip(&passed);
            let admitted = admitted.filter(|(call, passed)| **passed && call.contains(&keys[0]));
            assert_eq!(charged(&store, keys[0], &limit(2)), admitted.count() as u64);
            assert_eq!(charged(&store, keys[1], &limit(2)), 3);
        },
        SCHEDULES,
    );
}

#[test]
fn a_ban_starts_once_while_the_store_is_swept() {
    let keys = keys(1);
    shuttle::check_random(
        move || {
            let store = Arc::new(MemoryStore::default());
            let banning = RateLimit {
                ban: Some(Ban {
                    after: 1,
                    lasts: BanDuration::For(Duration::from_secs(60)),
                }),
                ..limit(1)
            };
            let threads: Vec<_> = (0..4)
                .map(|_| {
                    let (store, key, banning) = (Arc::clone(&store), keys[0], banning.clone());
                    thread::spawn(move || store.hit(&hits(&[key], &banning, 1), Charge::Each, NOW)[0])
                })
                .collect();
            let sweeper = Arc::clone(&store);
            let sweep = thread::spawn(move || sweeper.sweep(NOW));
            let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
            assert_eq!(sweep.join().unwrap(), 0);
            let banned: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.ban).collect();
            assert_eq!(outcomes.iter().filter(|outcome| !outcome.over_limit).count(), 1);
            assert_eq!(banned.len(), 2);
            assert_eq!(banned.iter().filter(|ban| ban.started).count(), 1);
        },
        SCHEDULES,
    );
}
