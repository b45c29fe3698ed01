//! Random users at a steady rate: 30,000 calls in 30 seconds, each by one of N users, against a bursty limit and a token bucket.
//!
//! What rate-limiter-flexible was compared with hyacinth by: two calls per second with a burst of five in ten seconds, and a
//! bucket of seven that gets a token back each half second. The bands are the least and the most of 400 simulations of the exact
//! rules with calls that are evenly spaced.

use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use crate::client::{Client, call, connect, is_refused};
use crate::random::SplitMix64;
use crate::server::Server;

const CALLS: u64 = 30_000;
const PERIOD: Duration = Duration::from_millis(1);
const CONNECTIONS: usize = 100;

const RULES: &str = "
domain: bench
descriptors:
  - key: bursty
    rate_limit:
      {unit: second, requests_per_unit: 2, window_start: first_hit,
       burst: {unit: 10s, requests_per_unit: 5, window_start: first_hit}}
  - key: bucket
    rate_limit: {unit: second, requests_per_unit: 2, algorithm: token_bucket, burst_size: 7}
";

/// How many users there are, and for the bursty limit and the bucket how many calls passed when the originals were measured and
/// how many may pass.
type Row = (u64, [(u64, [u64; 2]); 2]);

const ROWS: [Row; 7] = [
    (100, [(6_995, [7_003, 7_068]), (6_601, [6_590, 6_600])]),
    (500, [(25_392, [25_281, 25_611]), (28_326, [28_155, 28_437])]),
    (1_000, [(29_779, [29_704, 29_813]), (30_007, [29_981, 30_000])]),
    (5_000, [(30_009, [CALLS, CALLS]), (30_008, [CALLS, CALLS])]),
    (10_000, [(30_004, [CALLS, CALLS]), (30_010, [CALLS, CALLS])]),
    (25_000, [(30_007, [CALLS, CALLS]), (30_010, [CALLS, CALLS])]),
    (50_000, [(30_010, [CALLS, CALLS]), (30_010, [CALLS, CALLS])]),
];

pub(crate) fn run(runtime: &Runtime) {
    println!("                bursty                              token bucket");
    println!("  users    seed passed         band             seed passed         band   latest call");
    let mut outside = Vec::new();
    for (users, columns) in ROWS {
        let server = Server::start(RULES, &[]);
        let (bursty, bucket) = runtime.block_on(async {
            tokio::join!(
                passed(server.grpc, "bursty", users),
                passed(server.grpc, "bucket", users)
            )
        });
        let mut line = format!("{users:>7}");
        for ((seed, [least, most]), passed) in columns.into_iter().zip([bursty.calls, bucket.calls]) {
            line += &format!(" {seed:>7} {passed:>6} {least:>6}..{most:<6}       ");
            if !(least..=most).contains(&passed) {
                outside.push(users);
            }
        }
        println!("{line} {:?}", bursty.latest.max(bucket.latest));
    }
    assert!(outside.is_empty(), "outside of its band with {outside:?} users");
}

struct Passed {
    calls: u64,
    /// By how much the latest call missed its time.
    latest: Duration,
}

async fn passed(port: u16, key: &'static str, users: u64) -> Passed {
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        clients.push(connect(port).await);
    }
    let mut random = SplitMix64(42);
    let mut calls = JoinSet::new();
    let mut latest = Duration::ZERO;
    let start = Instant::now();
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    for i in 0..CALLS {
        ticks.tick().await;
        let due = PERIOD * u32::try_from(i).expect("there are not so many calls");
        latest = latest.max(start.elapsed().saturating_sub(due));
        let user = random.next() % users;
        let mut client: Client = clients[i as usize % CONNECTIONS].clone();
        calls.spawn(async move { is_refused(&mut client, call(key, [user.to_string()])).await });
    }
    let refused = calls.join_all().await;
    Passed {
        calls: refused.into_iter().filter(|refused| !refused).count() as u64,
        latest,
    }
}
