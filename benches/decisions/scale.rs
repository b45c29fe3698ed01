//! What a decision costs with many rules and many keys, and what each part of it costs.

use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::Arc;

use bytes::BytesMut;
use criterion::{Bencher, Criterion};
use prost::Message as _;
use tollgate::clock::Clock;
use tollgate::limiter::Limiter;
use tollgate::rls::{Rls, decode};

use crate::limiter;
use crate::random::SplitMix64;
use crate::request::{Blanks, request};

/// Of the first entries of the descriptors of a request: each descriptor has rules of its own.
const KEYS: [&str; 3] = ["path", "route", "cluster"];

/// How many counters there are, unless that is what is varied.
const KEYS_IN_ALL: u32 = 100_000;

/// What the digits of rules and clients stand for in a request until they are known.
const RULE: &str = "RRRRRRRR";
const CLIENT: &str = "CCCCCCCC";

/// How many clients one measurement goes through before it begins again.
const DRAWN: usize = 1 << 20;

/// Which clients call.
#[derive(Debug, Clone, Copy)]
enum Draw {
    /// Each as often as the others.
    Uniform,
    /// The n-th most frequent one 1/n times as often as the first: Zipf's law with the exponent 1.
    Zipf,
}

impl Draw {
    fn clients(self, keys: u32) -> Vec<u32> {
        let mut random = SplitMix64(7);
        let mut draw = || match self {
            Draw::Uniform => (random.next() % u64::from(keys)) as u32,
            Draw::Zipf => {
                // The inverse of the distribution, as a continuous one: ln(n) / ln(N).
                let uniform = random.next() as f64 / u64::MAX as f64;
                let rank = (f64::from(keys) + 1.0).powf(uniform) as u32;
                rank.clamp(1, keys) - 1
            }
        };
        (0..DRAWN).map(|_| draw()).collect()
    }
}

/// The bytes of a request, in which rule and client can be changed.
struct Wire {
    bytes: Vec<u8>,
    rules: Blanks,
    clients: Blanks,
}

impl Wire {
    fn new(descriptors: usize) -> Self {
        let request = request(KEYS[..descriptors].iter().map(|key| {
            vec![
                (*key, format!("/api/v1/{RULE}")),
                ("remote_address", CLIENT.to_owned()),
            ]
        }));
        let bytes = request.encode_to_vec();
        Wire {
            rules: Blanks::find(&bytes, RULE),
            clients: Blanks::find(&bytes, CLIENT),
            bytes,
        }
    }

    fn of(&mut self, rule: u32, client: u32) -> &[u8] {
        self.rules.fill(&mut self.bytes, &digits(rule));
        self.clients.fill(&mut self.bytes, &digits(client));
        &self.bytes
    }
}

/// Eight decimal ones.
fn digits(mut number: u32) -> [u8; RULE.len()] {
    let mut digits = [0; RULE.len()];
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
    digits
}

/// What decides, with so many rules, and a counter for each descriptor of each client that may call.
struct Bench {
    rls: Rls,
    limiter: Arc<Limiter>,
    clock: Clock,
    wire: Wire,
    rules_per_key: u32,
    answer: BytesMut,
}

impl Bench {
    fn new(rules: u32, clients: u32, descriptors: usize) -> Self {
        // The rules of all keys together are as many as were asked for, but for the remainder.
        let rules_per_key = rules / descriptors as u32;
        let mut text = "domain: bench\ndescriptors:\n".to_owned();
        for key in &KEYS[..descriptors] {
            for rule in 0..rules_per_key {
                writeln!(
                    text,
                    "  - {{key: {key}, value: /api/v1/{rule:08}, descriptors: [{{key: remote_address, rate_limit: \
                     {{unit: year, requests_per_unit: 4000000000}}}}]}}"
                )
                .expect("a string takes everything");
            }
        }
        let limiter = Arc::new(limiter(&text, None, None));
        let mut bench = Bench {
            rls: Rls::new(Arc::clone(&limiter), Arc::default()),
            limiter,
            clock: Clock::system(),
            wire: Wire::new(descriptors),
            rules_per_key,
            answer: BytesMut::with_capacity(512),
        };
        for client in 0..clients {
            bench.answer(client);
        }
        assert_eq!(bench.limiter.store().len(), clients as usize * descriptors);
        bench
    }

    /// The bytes of a request. Each client has its rule.
    fn request(&mut self, client: u32) -> &[u8] {
        self.wire.of(client % self.rules_per_key, client)
    }

    /// From the bytes of a request to those of its answer.
    fn answer(&mut self, client: u32) {
        let now = self.clock.now();
        self.answer.clear();
        let request = self.wire.of(client % self.rules_per_key, client);
        let answered = self.rls.answer(request, now, &mut self.answer);
        answered.expect("there are rules");
        black_box(&self.answer);
    }

    /// From the bytes of a request to a decision.
    fn decide(&mut self, client: u32) {
        let now = self.clock.now();
        let request = self.wire.of(client % self.rules_per_key, client);
        let request = decode::request(request).expect("it is a request");
        let matcher = self.limiter.matcher();
        black_box(self.limiter.decide(matcher.as_deref(), &request, now)).expect("there are rules");
    }
}

/// Times `step` for one client after the other.
fn time<'b>(
    bench: &'b mut Bench,
    clients: &'b [u32],
    step: impl Fn(&mut Bench, u32) + 'b,
) -> impl FnMut(&mut Bencher<'_>) + 'b {
    let mut clients = clients.iter().cycle();
    move |bencher| bencher.iter(|| step(bench, *clients.next().expect("they begin again")))
}

/// By the number of rules.
pub(crate) fn rules(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("rules");
    for rules in [10, 10_000, 100_000] {
        for descriptors in [1, 3] {
            let clients = KEYS_IN_ALL / descriptors as u32;
            let mut bench = Bench::new(rules, clients, descriptors);
            let clients = Draw::Uniform.clients(clients);
            group.bench_function(
                format!("{rules} rules, {descriptors} descriptors"),
                time(&mut bench, &clients, Bench::answer),
            );
        }
    }
    group.finish();
}

/// What the time goes into, with 10,000 rules and 100,000 keys. Each step has those before it in it.
pub(crate) fn steps(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("steps");
    for descriptors in [1, 3] {
        let clients = KEYS_IN_ALL / descriptors as u32;
        let mut bench = Bench::new(10_000, clients, descriptors);
        let clients = Draw::Uniform.clients(clients);
        let mut step = |name: &str, step: fn(&mut Bench, u32)| {
            group.bench_function(
                format!("{name}, {descriptors} descriptors"),
                time(&mut bench, &clients, step),
            );
        };
        step("write the request", |bench, client| {
            black_box(bench.request(client));
        });
        step("read it", |bench, client| {
            black_box(decode::request(bench.request(client))).expect("it is a request");
        });
        step("match, key, count", Bench::decide);
        step("metrics, answer", Bench::answer);
    }
    group.finish();
}

/// By the number of keys, and by how often each is called.
pub(crate) fn keys(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("keys");
    for keys in [1, 100_000, 10_000_000] {
        let mut bench = Bench::new(10, keys, 1);
        for draw in [Draw::Uniform, Draw::Zipf] {
            let clients = draw.clients(keys);
            group.bench_function(
                format!("{keys} keys, {draw:?}"),
                time(&mut bench, &clients, Bench::answer),
            );
        }
    }
    group.finish();
}
