//! The laws that every store keeps.

use std::sync::LazyLock;
use std::time::Duration;

use tollgate::clock::{ManualClock, Timestamp};
use tollgate::descriptor::{Entry, Hits};
use tollgate::key::KeyMaker;
use tollgate::rate_limit::{Ban, BanDuration, Charge, RateLimit, Unit};
use tollgate::store::Hit;
use tollgate::store::memory::{FullPolicy, MemoryConfig, MemoryStore};

use crate::support::T;

/// A hit on the counter of a value.
fn hit<'a>(value: &str, limit: &'a RateLimit, hits: Hits) -> Hit<'a> {
    static KEYS: LazyLock<KeyMaker> = LazyLock::new(KeyMaker::default);
    let entries = [Entry {
        key: b"k",
        value: value.as_bytes(),
    }];
    let key = KEYS.key("d", &entries, None, limit);
    Hit {
        key,
        limit,
        hits,
        descriptor: 0,
        shadow_mode: false,
        quota_mode: false,
    }
}

fn at(seconds: u64) -> Timestamp {
    ManualClock::new(Duration::from_secs(seconds)).now()
}

/// The counter after one hit.
fn after(store: &MemoryStore, hit: &Hit<'_>, charge: Charge, now: Timestamp) -> u64 {
    store.hit(std::slice::from_ref(hit), charge, now)[0].after
}

const CHARGES: [Charge; 3] = [Charge::Each, Charge::AllOrNothing, Charge::StopWhenOverLimit];

#[test]
fn outcomes_come_in_the_order_of_the_hits() {
    let limit = RateLimit::per(Unit::Hour, 100);
    for charge in CHARGES {
        let store = MemoryStore::default();
        let hits: Vec<Hit> = (0..50)
            .map(|i| hit(&format!("v{i}"), &limit, Hits::Charge(i)))
            .collect();
        let counters: Vec<u64> = store
            .hit(&hits, charge, at(T))
            .iter()
            .map(|outcome| outcome.after)
            .collect();
        assert_eq!(counters, (0..50).collect::<Vec<_>>(), "{charge:?}");
    }
}

#[test]
fn no_hits_have_no_outcomes() {
    for charge in CHARGES {
        assert!(MemoryStore::default().hit(&[], charge, at(T)).is_empty());
    }
}

#[test]
fn looks_and_refunds_create_no_counter() {
    let limit = RateLimit::per(Unit::Hour, 1);
    for charge in CHARGES {
        let store = MemoryStore::default();
        assert_eq!(
            after(&store, &hit("v", &limit, Hits::Charge(0)), charge, at(T)),
            0
        );
        assert_eq!(
            after(&store, &hit("v", &limit, Hits::Refund(9)), charge, at(T)),
            0
        );
        assert!(store.is_empty(), "{charge:?}");
    }
}

#[test]
fn a_refused_call_leaves_no_counter_behind() {
    let limit = RateLimit::per(Unit::Hour, 1);
    let store = MemoryStore::default();
    let hits = [
        hit("a", &limit, Hits::Charge(1)),
        hit("b", &limit, Hits::Charge(2)),
    ];
    let outcomes = store.hit(&hits, Charge::AllOrNothing, at(T));
    assert_eq!((outcomes[0].over_limit, outcomes[1].over_limit), (false, true));
    assert!(store.is_empty());
}

#[test]
fn a_changed_limit_keeps_its_counter() {
    let store = MemoryStore::default();
    let charged = |requests_per_unit| {
        let limit = RateLimit::per(Unit::Hour, requests_per_unit);
        after(&store, &hit("v", &limit, Hits::Charge(1)), Charge::Each, at(T))
    };
    for _ in 0..7 {
        charged(10);
    }
    assert_eq!(charged(5), 8);
    assert_eq!(charged(20), 9);
}

#[test]
fn counters_whose_window_has_passed_are_forgotten() {
    let store = MemoryStore::default();
    let clock = ManualClock::new(Duration::from_secs(T));
    let (now, later) = (clock.now(), {
        clock.advance(Duration::from_secs(1));
        clock.now()
    });
    let (second, hour) = (RateLimit::per(Unit::Second, 1), RateLimit::per(Unit::Hour, 9));
    for i in 0..10_000 {
        after(
            &store,
            &hit(&format!("s{i}"), &second, Hits::Charge(1)),
            Charge::Each,
            now,
        );
    }
    after(&store, &hit("h", &hour, Hits::Charge(4)), Charge::Each, now);
    assert_eq!(store.len(), 10_001);
    assert_eq!(store.sweep(now), 0);
    assert_eq!(store.sweep(later), 10_000);
    assert_eq!(store.len(), 1);
    assert_eq!(
        after(&store, &hit("h", &hour, Hits::Charge(1)), Charge::Each, later),
        5
    );
}

#[test]
fn sweeping_does_not_disturb_counting() {
    let store = MemoryStore::default();
    let limit = RateLimit::per(Unit::Hour, 1_000);
    let admitted: usize = std::thread::scope(|scope| {
        let sweeper = scope.spawn(|| (0..200).map(|_| store.sweep(at(T))).sum::<usize>());
        let threads: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let call = [hit("v", &limit, Hits::Charge(1))];
                    (0..500)
                        .filter(|_| !store.hit(&call, Charge::Each, at(T))[0].over_limit)
                        .count()
                })
            })
            .collect();
        assert_eq!(sweeper.join().unwrap(), 0);
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(admitted, 1_000);
}

/// A store with a small budget of kibibytes.
fn small(kibibytes: u64, policy: FullPolicy) -> MemoryStore {
    MemoryStore::new(&MemoryConfig {
        budget: Some(kibibytes << 10),
        policy,
    })
}

#[test]
fn a_flood_of_keys_evicts_those_that_give_least_away() {
    let store = small(1_024, FullPolicy::Evict);
    let limit = RateLimit::per(Unit::Hour, 100);
    let mut banning = limit.clone();
    banning.ban = Some(Ban {
        after: 0,
        lasts: BanDuration::For(Duration::from_secs(600)),
    });
    let charge = |value: &str, limit: &RateLimit, hits| {
        store.hit(&[hit(value, limit, Hits::Charge(hits))], Charge::Each, at(T))[0]
    };
    charge("abuser", &limit, 101);
    charge("heavy", &limit, 60);
    assert!(charge("banned", &banning, 101).ban.is_some());
    let room = store.capacity();
    for i in 0..3 * room {
        charge(&format!("{i}"), &limit, 1);
        assert!(store.len() <= room);
    }
    assert!(store.len() >= room / 2);
    assert!(store.pressure().evicted as usize >= 2 * room);
    assert!(charge("abuser", &limit, 1).over_limit);
    assert_eq!(charge("heavy", &limit, 1).after, 61);
    assert!(charge("banned", &banning, 1).ban.is_some());
}

#[test]
fn without_room_new_keys_are_refused_or_pass_uncounted() {
    for (policy, is_refused) in [(FullPolicy::Deny, true), (FullPolicy::Allow, false)] {
        for charge in CHARGES {
            let store = small(256, policy);
            let limit = RateLimit::per(Unit::Hour, 100);
            let charged = |value: &str| {
                let hits = [
                    hit(value, &limit, Hits::Charge(1)),
                    hit(value, &limit, Hits::Charge(1)),
                ];
                store.hit(&hits, charge, at(T))[0]
            };
            charged("first");
            for i in 0..3 * store.capacity() {
                charged(&format!("{i}"));
            }
            assert!(store.len() <= store.capacity());
            assert_eq!(store.pressure().evicted, 0);
            assert!(store.pressure().turned_away > 0);
            assert_eq!(charged("first").before, 2, "{policy:?} {charge:?}");
            let new: Vec<_> = (0..100).map(|i| charged(&format!("new{i}"))).collect();
            let uncounted = new.iter().filter(|outcome| outcome.before == 0);
            assert!(uncounted.count() > 90, "{policy:?} {charge:?}");
            let refused = new.iter().filter(|outcome| outcome.over_limit).count();
            assert_eq!(refused > 90, is_refused, "{policy:?} {charge:?}");
            // A look at a key without a counter is what it would be with room.
            let look = store.hit(&[hit("looked at", &limit, Hits::Charge(0))], charge, at(T));
            assert_eq!((look[0].over_limit, look[0].remaining), (false, 100));
        }
    }
}

#[test]
fn a_new_key_without_room_is_not_banned_and_evicts_nothing() {
    let store = small(256, FullPolicy::Deny);
    let limit = RateLimit {
        ban: Some(Ban {
            after: 0,
            lasts: BanDuration::For(Duration::from_secs(600)),
        }),
        burst: Some(Box::new(RateLimit::per(Unit::Day, 1))),
        ..RateLimit::per(Unit::Hour, 100)
    };
    let charge = |value: &str| store.hit(&[hit(value, &limit, Hits::Charge(1))], Charge::Each, at(T))[0];
    let refused = (0..2 * store.capacity())
        .map(|i| charge(&format!("{i}")))
        .filter(|outcome| outcome.over_limit);
    assert!(refused.map(|outcome| assert_eq!(outcome.ban, None)).count() > 0);
    assert_eq!(store.pressure().evicted, 0);
}

/// Removed counters leave marks in a table, which would make it grow.
#[test]
fn a_full_store_does_not_grow_when_counters_come_and_go() {
    let store = small(256, FullPolicy::Evict);
    let clock = ManualClock::new(Duration::from_secs(T));
    let limit = RateLimit::per(Unit::Second, 2);
    let room = store.capacity();
    for round in 0..20 {
        for i in 0..room {
            let hit = hit(&format!("{round} {i}"), &limit, Hits::Charge(1));
            store.hit(&[hit], Charge::Each, clock.now());
            assert!(store.len() <= room);
        }
        clock.advance(Duration::from_millis(700));
        store.sweep(clock.now());
    }
    assert!(store.allocated() <= (256 << 10) + (8 << 10));
}
