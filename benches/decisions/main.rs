//! What a decision costs without the network: beside what the messages alone cost, with many rules and many keys, and with many
//! threads; and the client behind ten proxies.
//!
//! ```sh
//! cargo bench --bench decisions            # all of it, with 10,000,000 keys among it
//! cargo bench --bench decisions -- steps   # those whose names have this in them
//! ```

mod contention;
#[path = "../common/random.rs"]
mod random;
#[path = "../common/request.rs"]
mod request;
mod scale;

use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use criterion::{Criterion, criterion_group, criterion_main};
use mimalloc::MiMalloc;
use prost::Message as _;
use tollgate::client_address::{ClientAddress, Malformed, Trusted, preset};
use tollgate::clock::Clock;
use tollgate::config::file;
use tollgate::config::source::SourceFile;
use tollgate::events::{Delivery, EventsConfig, Sink};
use tollgate::limiter::{Limiter, LimiterConfig};
use tollgate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate::rls::Rls;
use tollgate::server::observers;
use tollgate::top::Top;

use crate::request::request;

const CLIENT: &str = "198.51.100.7";

/// The one of the server.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

const RULES: &str = "
domain: bench
descriptors:
  - {key: remote_address, rate_limit: {unit: hour, requests_per_unit: 4000000000}}
  - key: path
    value: /login
    descriptors:
      - {key: remote_address, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: bucket, rate_limit: {unit: second, requests_per_unit: 4000000000, algorithm: token_bucket}}
  - {key: sliding, rate_limit: {unit: hour, requests_per_unit: 4000000000, algorithm: sliding_window}}
  - {key: refused, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: refused_bucket, rate_limit: {unit: hour, requests_per_unit: 1, algorithm: token_bucket}}
  - {key: banned, rate_limit: {unit: hour, requests_per_unit: 1, ban: {after: 0, for: 1h}}}
";

fn limiter(rules: &str, events: Option<&Delivery>, top: Option<&Arc<Top>>) -> Limiter {
    let limiter = Limiter::new(LimiterConfig::default()).observed_by(observers(events, top));
    let source = SourceFile {
        name: "bench.yaml".into(),
        text: rules.into(),
    };
    limiter.set_matcher(file::load(&[source], false).expect("the rules are sound").matcher);
    limiter
}

fn rls(rules: &str, events: Option<&Delivery>, top: Option<&Arc<Top>>) -> Rls {
    Rls::new(Arc::new(limiter(rules, events, top)), Arc::default())
}

/// From the bytes of the request to those of the answer.
fn decide(rls: &Rls, clock: &Clock, wire: &[u8]) -> Bytes {
    let mut answer = BytesMut::with_capacity(256);
    rls.answer(wire, clock.now(), &mut answer)
        .expect("there are rules");
    answer.freeze()
}

/// A decision, and beside it what its messages cost without one.
fn decisions(criterion: &mut Criterion) {
    let rls = rls(RULES, None, None);
    let all_or_nothing = RULES.replacen("domain: bench", "domain: bench\ncharge: all_or_nothing", 1);
    let all_or_nothing = crate::rls(&all_or_nothing, None, None);
    let clock = Clock::system();

    let mut group = criterion.benchmark_group("decision");
    let client = || ("remote_address", CLIENT.to_owned());
    let three = request([
        vec![client()],
        vec![("path", "/login".to_owned()), client()],
        vec![("path", "/other".to_owned()), client()],
    ]);
    let one = |key| request([vec![(key, CLIENT.to_owned())]]);
    for (name, rls, request) in [
        ("one descriptor", &rls, one("remote_address")),
        ("three descriptors", &rls, three.clone()),
        ("three descriptors, all or nothing", &all_or_nothing, three),
        ("token bucket", &rls, one("bucket")),
        ("sliding window", &rls, one("sliding")),
        ("banned", &rls, one("banned")),
        ("no rule", &rls, one("else")),
    ] {
        let wire = request.encode_to_vec();
        let answer = decide(rls, &clock, &wire);
        let answer = RateLimitResponse::decode(answer).expect("it is a response");
        group.bench_function(name, |bencher| {
            bencher.iter(|| decide(rls, &clock, black_box(&wire)));
        });
        group.bench_function(format!("{name}, messages alone, by prost"), |bencher| {
            bencher.iter(|| {
                let message = RateLimitRequest::decode(black_box(wire.as_slice())).expect("it is a request");
                (message, black_box(&answer).clone().encode_to_vec())
            });
        });
    }
    group.finish();
}

/// A call that passes and one that is refused, by what is told of them.
fn observed(criterion: &mut Criterion) {
    let events = |sinks: &[Sink]| {
        Delivery::new(EventsConfig {
            sinks: sinks.iter().copied().collect(),
            near_limit_ratio: 0.8,
        })
    };
    let clock = Clock::system();
    let mut group = criterion.benchmark_group("observed");
    let events = events(&[Sink::Counter, Sink::Ring]);
    let top = Top::new(20);
    for (name, rls) in [
        ("by nobody", rls(RULES, None, None)),
        ("by events", rls(RULES, events.as_ref(), None)),
        ("by top", rls(RULES, None, top.as_ref())),
    ] {
        for key in ["remote_address", "refused", "refused_bucket", "banned"] {
            let wire = request([vec![(key, CLIENT.to_owned())]]).encode_to_vec();
            group.bench_function(format!("{key} {name}"), |bencher| {
                bencher.iter(|| decide(&rls, &clock, black_box(&wire)));
            });
        }
    }
    group.finish();
}

/// Ten proxies in front of a client, all in networks that are trusted.
fn client_address(criterion: &mut Criterion) {
    let chain = "203.0.113.7, 10.0.0.1, 10.0.0.2, 10.0.0.3, 10.0.0.4, 10.0.0.5, 10.0.0.6, 10.0.0.7, 10.0.0.8, \
                 10.0.0.9, 10.0.0.10";
    let networks = ["loopback", "linklocal", "uniquelocal"];
    let address = ClientAddress {
        trusted: Trusted::Networks(
            networks
                .iter()
                .filter_map(|name| preset(name))
                .flatten()
                .collect(),
        ),
        ipv4_prefix: 32,
        ipv6_prefix: 64,
        malformed: Malformed::Previous,
    };
    criterion.bench_function("chain of eleven addresses", |bencher| {
        bencher.iter(|| black_box(&address).resolve(black_box(chain.as_bytes())));
    });
}

criterion_group! {
    name = benches;
    config = Criterion::default().warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3));
    targets = decisions, observed, client_address, scale::steps, scale::rules, scale::keys, contention::contention
}
criterion_main!(benches);
