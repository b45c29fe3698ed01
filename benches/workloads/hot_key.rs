//! One key that everybody hits: 5,000 calls in five hours, then one refusal, then a ban.
//!
//! What @fastify/rate-limit was measured with: 150 connections, each of which calls again as soon as it has its answer.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use crate::client::{ask, call, connect, is_over_limit};
use crate::h2load::h2load;
use crate::server::Server;

const LIMIT: f64 = 5_000.0;
const CONNECTIONS: usize = 150;
const SECONDS: u64 = 10;

const RULES: &str = "
domain: bench
descriptors:
  - key: user
    rate_limit: {unit: 5h, requests_per_unit: 5000, window_start: first_hit, ban: {after: 1, for: window}}
";

pub(crate) fn run(runtime: &Runtime) {
    println!("load            calls/s    calls      OK  refused  banned  events");
    let server = Server::start(RULES, &["--events", "ring,counter"]);
    let seconds = SECONDS.to_string();
    h2load(
        SocketAddr::from(([127, 0, 0, 1], server.grpc)),
        CONNECTIONS,
        1,
        ["-D", &seconds],
        &call("user", ["hot".to_owned()]),
    );
    report("h2load", &server);

    let server = Server::start(RULES, &["--events", "ring,counter"]);
    let answers = runtime.block_on(clients(server.grpc));
    report("clients", &server);
    println!("what the clients saw: {answers:?}");
    assert_eq!((answers.ok, answers.refused), (5_000, 1));
}

/// What the server has counted, which must be what the rule says.
fn report(load: &str, server: &Server) {
    let metrics = server.metrics();
    let of = |name: &str| metrics.get(name).copied().unwrap_or(0.0);
    let calls = of("ratelimit_service_rate_limit_total_hits");
    let ok = of("ratelimit_service_rate_limit_within_limit");
    let banned = of("tollgate_banned_hits_total");
    let refused = calls - ok - banned;
    // Those of different calls may come in another order than the calls.
    let mut events = server.events();
    events.sort();
    println!(
        "{load:<12} {:>10.0} {calls:>8} {ok:>7} {refused:>8} {banned:>7}  {}",
        calls / SECONDS as f64,
        events.join(", ")
    );
    assert_eq!(
        (ok, refused),
        (LIMIT, 1.0),
        "exactly the limit passes, and one refusal is no ban"
    );
    assert_eq!(
        of("ratelimit_service_total_requests"),
        calls,
        "every call was decided"
    );
    assert_eq!(
        events,
        ["ban_started", "near_limit", "over_limit"],
        "each edge is told once"
    );
}

#[derive(Debug, Default)]
struct Answers {
    ok: u64,
    refused: u64,
    banned: u64,
}

/// The same load by clients that read their answers.
async fn clients(port: u16) -> Answers {
    let end = Instant::now() + Duration::from_secs(SECONDS);
    let mut clients = Vec::new();
    for _ in 0..CONNECTIONS {
        let mut client = connect(port).await;
        clients.push(tokio::spawn(async move {
            let mut answers = Answers::default();
            while Instant::now() < end {
                let answer = ask(&mut client, call("user", ["hot".to_owned()])).await;
                let metadata = answer.dynamic_metadata.as_ref();
                let is_banned = metadata.is_some_and(|metadata| metadata.fields.contains_key("tollgate"));
                match (is_over_limit(&answer), is_banned) {
                    (false, _) => answers.ok += 1,
                    (true, false) => answers.refused += 1,
                    (true, true) => answers.banned += 1,
                }
            }
            answers
        }));
    }
    let mut sum = Answers::default();
    for client in clients {
        let answers = client.await.expect("a client does not panic");
        sum.ok += answers.ok;
        sum.refused += answers.refused;
        sum.banned += answers.banned;
    }
    sum
}
