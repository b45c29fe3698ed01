//! What a hit costs when several threads count at once, beside the keyed limiter of the crate governor.

#![allow(clippy::disallowed_methods)] // a bench reads the real clock

use std::hint::black_box;
use std::num::NonZeroU32;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{Bencher, Criterion};
use governor::{DefaultKeyedRateLimiter, Quota};
use tollgate::clock::Clock;
use tollgate::descriptor::{Entry, Hits};
use tollgate::key::KeyMaker;
use tollgate::rate_limit::{Algorithm, Charge, RateLimit, Unit};
use tollgate::store::Hit;
use tollgate::store::memory::{MemoryConfig, MemoryStore};

const KEYS: usize = 100_000;

/// Counters as a limiter has them: the key of a counter is made, the clock read, the hit counted.
struct Tollgate {
    store: MemoryStore,
    keys: KeyMaker,
    clock: Clock,
    limit: RateLimit,
}

impl Tollgate {
    fn hit(&self, value: &str) {
        let entries = [Entry {
            key: b"remote_address",
            value: value.as_bytes(),
        }];
        let hit = Hit {
            key: self.keys.key("bench", &entries, None, &self.limit),
            limit: &self.limit,
            hits: Hits::Charge(1),
            descriptor: 0,
            shadow_mode: false,
            quota_mode: false,
        };
        black_box(self.store.hit(&[hit], Charge::Each, self.clock.now()));
    }
}

/// Times hits by so many threads at once: how long it takes until each has made as many as it is asked for.
fn time(threads: usize, hit: impl Fn(usize) + Sync) -> impl FnMut(&mut Bencher<'_>) {
    move |bencher| {
        bencher.iter_custom(|hits| {
            let start = Barrier::new(threads);
            let of_thread = |thread: usize| {
                start.wait();
                let started = Instant::now();
                (0..hits as usize).for_each(|number| hit(number * threads + thread));
                started.elapsed()
            };
            thread::scope(|scope| {
                let of_thread = &of_thread;
                let threads: Vec<_> = (0..threads)
                    .map(|thread| scope.spawn(move || of_thread(thread)))
                    .collect();
                let times = threads
                    .into_iter()
                    .map(|thread| thread.join().expect("no thread panics"));
                times.max().unwrap_or(Duration::ZERO)
            })
        });
    }
}

/// By the number of threads, all on one key and each on all keys.
pub(crate) fn contention(criterion: &mut Criterion) {
    let bucket = RateLimit {
        algorithm: Algorithm::TokenBucket {
            burst_size: 4_000_000_000,
        },
        ..RateLimit::per(Unit::Second, 4_000_000_000)
    };
    let tollgate = |limit: RateLimit| Tollgate {
        store: MemoryStore::new(&MemoryConfig::default()),
        keys: KeyMaker::default(),
        clock: Clock::system(),
        limit,
    };
    let window = tollgate(RateLimit::per(Unit::Year, 4_000_000_000));
    let bucket = tollgate(bucket);
    let most = NonZeroU32::new(4_000_000_000).expect("it is more than none");
    let governor = DefaultKeyedRateLimiter::<String>::keyed(Quota::per_second(most));
    let values: Vec<String> = (0..KEYS).map(|number| format!("client-{number:010}")).collect();

    let mut group = criterion.benchmark_group("contention");
    let most_threads = thread::available_parallelism().map_or(1, usize::from);
    for threads in 1..=most_threads {
        for keys in [1, KEYS] {
            // Neighbours in time are none in memory.
            let value = |number: usize| &values[number.wrapping_mul(0x9e37_79b9) % keys];
            let mut of = |name: &str, hit: &(dyn Fn(usize) + Sync)| {
                let name = format!("{keys} keys, {threads} threads, {name}");
                group.bench_function(name, time(threads, hit));
            };
            of("fixed window", &|number| window.hit(value(number)));
            of("token bucket", &|number| bucket.hit(value(number)));
            of("governor", &|number| {
                black_box(governor.check_key(value(number))).expect("the limit is high");
            });
        }
    }
    group.finish();
}
