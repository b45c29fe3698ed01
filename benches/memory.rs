//! What the counters cost in memory, and what a flood of keys and the end of many windows cost in time.
//!
//! ```sh
//! cargo bench --bench memory -- keys     # memory for 10,000,000 live keys
//! cargo bench --bench memory -- flood    # 50,000,000 keys against 256 MiB, with one abuser among them
//! cargo bench --bench memory -- expiry   # decisions while 1,000,000 counters expire
//! ```

#![allow(clippy::disallowed_methods)] // a bench reads the real clock

#[path = "common/resident.rs"]
mod resident;

use std::sync::Barrier;
use std::time::{Duration, Instant};
use std::{env, thread};

use hdrhistogram::Histogram;
use mimalloc::MiMalloc;
use tollgate::clock::{Clock, Timestamp};
use tollgate::descriptor::{Entry, Hits};
use tollgate::key::KeyMaker;
use tollgate::rate_limit::{Charge, RateLimit, Unit};
use tollgate::store::Hit;
use tollgate::store::memory::{FullPolicy, MemoryConfig, MemoryStore};

use crate::resident::resident_bytes;

/// The one of the server.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

const THREADS: u64 = 2;

fn main() {
    let asked: Vec<String> = env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    for (name, bench) in [("keys", keys as fn()), ("flood", flood), ("expiry", expiry)] {
        if asked.is_empty() || asked.iter().any(|asked| asked == name) {
            println!("== {name}");
            bench();
        }
    }
}

/// A store, and what a decision needs besides.
struct Bench {
    store: MemoryStore,
    keys: KeyMaker,
    clock: Clock,
}

impl Bench {
    fn new(budget: Option<u64>) -> Self {
        let policy = FullPolicy::Evict;
        Bench {
            store: MemoryStore::new(&MemoryConfig { budget, policy }),
            keys: KeyMaker::default(),
            clock: Clock::system(),
        }
    }

    /// One decision; whether it was refused.
    fn hit(&self, value: u64, limit: &RateLimit, now: Timestamp) -> bool {
        let value = value.to_le_bytes();
        let entries = [Entry {
            key: b"remote_address",
            value: &value,
        }];
        let hit = Hit {
            key: self.keys.key("bench", &entries, None, limit),
            limit,
            hits: Hits::Charge(1),
            descriptor: 0,
            shadow_mode: false,
            quota_mode: false,
        };
        self.store.hit(&[hit], Charge::Each, now)[0].over_limit
    }

    /// One decision at the time of the clock, timed.
    fn timed_hit(&self, value: u64, limit: &RateLimit, times: &mut Histogram<u64>) -> bool {
        let start = Instant::now();
        let refused = self.hit(value, limit, self.clock.now());
        times
            .record(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
            .expect("the histogram has no bound");
        refused
    }
}

fn keys() {
    const KEYS: u64 = 10_000_000;
    let bench = Bench::new(None);
    let limit = RateLimit::per(Unit::Year, 100);
    let now = bench.clock.now();
    let before = resident_bytes("self");
    for key in 0..KEYS {
        bench.hit(key, &limit, now);
    }
    let bytes = resident_bytes("self") - before;
    println!(
        "{KEYS} keys: {} MiB, {:.1} bytes per key",
        bytes >> 20,
        bytes as f64 / KEYS as f64
    );
    assert_eq!(bench.store.len() as u64, KEYS);
}

fn flood() {
    const KEYS: u64 = 50_000_000;
    const BUDGET: u64 = 256 << 20;
    /// Every so many calls one is the abuser's.
    const ABUSE: u64 = 1_000;
    let bench = Bench::new(Some(BUDGET));
    let limit = RateLimit::per(Unit::Year, 100);
    let abuser = u64::MAX;
    let before = resident_bytes("self");
    while !bench.hit(abuser, &limit, bench.clock.now()) {}

    let quiet = Bench::new(None);
    let mut calm = Histogram::new(3).expect("three digits are possible");
    for i in 0..1_000_000 {
        quiet.timed_hit(i % 1_000, &limit, &mut calm);
    }
    drop(quiet);

    let start = Instant::now();
    let (mut times, mut admitted) = (Histogram::new(3).expect("three digits are possible"), 0);
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (bench, limit) = (&bench, &limit);
                scope.spawn(move || {
                    let mut times = Histogram::new(3).expect("three digits are possible");
                    let mut admitted = 0;
                    for i in 0..KEYS / THREADS {
                        bench.timed_hit(thread * KEYS + i, limit, &mut times);
                        if i % ABUSE == 0 {
                            admitted += u64::from(!bench.hit(abuser, limit, bench.clock.now()));
                        }
                    }
                    (times, admitted)
                })
            })
            .collect();
        for thread in threads {
            let (of_thread, admitted_there) = thread.join().expect("no thread panics");
            times.add(of_thread).expect("the histograms are alike");
            admitted += admitted_there;
        }
    });
    let bytes = resident_bytes("self") - before;
    println!("1000 keys, alone:  {}", shown(&calm));
    println!("flood, {THREADS} threads:  {}", shown(&times));
    println!(
        "{KEYS} keys in {:.1} s; room for {}; evicted {}; {} MiB of {} MiB ({:+.1} %); the abuser was admitted {admitted} times",
        start.elapsed().as_secs_f64(),
        bench.store.capacity(),
        bench.store.pressure().evicted,
        bytes >> 20,
        BUDGET >> 20,
        (bytes as f64 / BUDGET as f64 - 1.0) * 100.0,
    );
}

fn expiry() {
    const KEYS: u64 = 1_000_000;
    const MEASURED: Duration = Duration::from_secs(5);
    let limit = RateLimit::per(Unit::Year, 1_000_000);
    let second = RateLimit::per(Unit::Second, 100);
    for expiring in [false, true] {
        let bench = Bench::new(None);
        let now = bench.clock.now();
        if expiring {
            for key in 0..KEYS {
                bench.hit(key, &second, now);
            }
        }
        let start = Barrier::new(2);
        let mut times = Histogram::new(3).expect("three digits are possible");
        let forgotten = thread::scope(|scope| {
            let sweeper = scope.spawn(|| {
                start.wait();
                let mut forgotten = 0;
                for _ in 0..MEASURED.as_secs() {
                    // As the server does: once a second, at the time of the sweep before.
                    let then = bench.clock.now();
                    thread::sleep(Duration::from_secs(1));
                    forgotten += bench.store.sweep(then);
                }
                forgotten
            });
            start.wait();
            let end = Instant::now() + MEASURED;
            let mut i = 0;
            while Instant::now() < end {
                bench.timed_hit(KEYS + i % 1_000, &limit, &mut times);
                i += 1;
            }
            sweeper.join().expect("the sweeper does not panic")
        });
        println!("{forgotten:>8} expired: {}", shown(&times));
    }
}

fn shown(times: &Histogram<u64>) -> String {
    let at = |quantile| times.value_at_quantile(quantile) as f64 / 1_000.0;
    format!(
        "{} decisions, p50 {:.2} us, p99 {:.2} us, p99.9 {:.2} us, max {:.0} us",
        times.len(),
        at(0.5),
        at(0.99),
        at(0.999),
        times.max() as f64 / 1_000.0
    )
}
