//! Millions of keys, a hundred in each call.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use tokio::runtime::{Builder, Runtime};
use tokio::time::sleep;
use tollgate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

use crate::client::{Client, call, connect, is_refused};
use crate::server::Server;

/// How many keys a call has.
const KEYS_PER_CALL: u64 = 100;

const RULES: &str = "
domain: bench
descriptors:
  - {key: remote_address, rate_limit: {unit: year, requests_per_unit: 100}}
";

const KEY: &str = "remote_address";

/// What ten million live keys take within the budget that is the default where there is no control group.
pub(crate) fn keys(runtime: &Runtime) {
    const KEYS: u64 = 10_000_000;
    let server = Server::start(RULES, &["--memory-budget", "1GiB"]);
    let before = server.resident_bytes();
    runtime.block_on(async {
        let mut client = connect(server.grpc).await;
        for first in (0..KEYS).step_by(KEYS_PER_CALL as usize) {
            is_refused(&mut client, many(first)).await;
        }
    });
    assert_eq!(server.metrics()["tollgate_counters"], KEYS as f64);
    let bytes = server.resident_bytes() - before;
    println!(
        "{KEYS} live keys: {} MiB more resident memory, {:.1} bytes per key",
        bytes >> 20,
        bytes as f64 / KEYS as f64
    );
    assert!(bytes <= 64 * KEYS, "more than 64 bytes per key");
}

/// A budget of memory against a flood of new keys, with a client in it that is over its limit.
pub(crate) fn flood(runtime: &Runtime) {
    const KEYS: u64 = 50_000_000;
    const BUDGET: u64 = 256 << 20;
    let server = Server::start(RULES, &["--memory-budget", &BUDGET.to_string()]);
    let before = server.resident_bytes();
    let mut most = before;
    let calm = runtime.block_on(async {
        let mut abuser = connect(server.grpc).await;
        while !is_refused(&mut abuser, call_of_abuser()).await {}
        Abuse::run(&mut abuser, |calls| calls == 1_000).await
    });

    let done = AtomicBool::new(false);
    let under_flood = thread::scope(|scope| {
        // A thread of its own: the calls of the flood take their time to make.
        let abuser = scope.spawn(|| {
            let runtime = Builder::new_current_thread().enable_all().build();
            runtime.expect("a runtime can be started").block_on(async {
                let mut abuser = connect(server.grpc).await;
                Abuse::run(&mut abuser, |_| done.load(Ordering::Relaxed)).await
            })
        });
        runtime.block_on(async {
            let mut client = connect(server.grpc).await;
            for (i, first) in (0..KEYS).step_by(KEYS_PER_CALL as usize).enumerate() {
                is_refused(&mut client, many(first)).await;
                if i % 100 == 0 {
                    most = most.max(server.resident_bytes());
                }
            }
        });
        done.store(true, Ordering::Relaxed);
        abuser.join().expect("the abuser does not panic")
    });
    most = most.max(server.resident_bytes());
    let grown = most - before;
    println!(
        "{KEYS} new keys against {} MiB: {} MiB more resident memory at most",
        BUDGET >> 20,
        grown >> 20
    );
    println!(
        "{} of them were evicted",
        server.metrics()["tollgate_evicted_counters_total"]
    );
    println!("a call of the abuser before:     {calm}");
    println!("a call of the abuser, meanwhile: {under_flood}");
    assert_eq!(under_flood.admitted, 0, "the abuser stays refused");
    assert!(grown * 10 <= BUDGET * 11, "more than the budget and a tenth");
}

/// What becomes of the calls of a client that is over its limit.
struct Abuse {
    admitted: u64,
    /// In microseconds.
    times: Histogram<u64>,
}

impl Abuse {
    /// Calls until it is done, which is asked with the number of calls so far, with a pause after each call.
    async fn run(client: &mut Client, is_done: impl Fn(u64) -> bool) -> Self {
        let mut abuse = Abuse {
            admitted: 0,
            times: Histogram::new(3).expect("three digits are possible"),
        };
        while !is_done(abuse.times.len()) {
            let start = Instant::now();
            abuse.admitted += u64::from(!is_refused(client, call_of_abuser()).await);
            let micros = u64::try_from(start.elapsed().as_micros()).unwrap_or(u64::MAX);
            abuse.times.record(micros).expect("the histogram has no bound");
            sleep(Duration::from_millis(5)).await;
        }
        abuse
    }
}

impl fmt::Display for Abuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = |quantile| Duration::from_micros(self.times.value_at_quantile(quantile));
        write!(
            f,
            "{} calls, {} admitted, p50 {:?}, p99 {:?}, p99.9 {:?}, max {:?}",
            self.times.len(),
            self.admitted,
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0)
        )
    }
}

fn call_of_abuser() -> RateLimitRequest {
    call(KEY, ["abuser".to_owned()])
}

fn many(first: u64) -> RateLimitRequest {
    call(KEY, (first..first + KEYS_PER_CALL).map(|key| format!("{key:x}")))
}
