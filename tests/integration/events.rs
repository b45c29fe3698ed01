//! Edges are told once per key and window, and who is refused most is shown.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tollgate::clock::{Clock, ManualClock};
use tollgate::events::{Delivery, EventsConfig, Sink};
use tollgate::limiter::{Limiter, LimiterConfig, Observation, Observer};
use tollgate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate::rls::Rls;
use tollgate::server::{Parts, observers};
use tollgate::shutdown::Stop;
use tollgate::top::Top;

use crate::support::{
    T, TestServer, answer, http, parts, request, rules, server_config, set_time, wait_until,
};

const RULES: &str = "
domain: d
descriptors:
  - {key: fixed, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: spared, rate_limit: {unit: minute, requests_per_unit: 5, charge_refused: false}}
  - {key: first_hit, rate_limit: {unit: minute, requests_per_unit: 5, window_start: first_hit}}
  - {key: sliding, rate_limit: {unit: minute, requests_per_unit: 5, algorithm: sliding_window}}
  - {key: bucket, rate_limit: {unit: minute, requests_per_unit: 5, algorithm: token_bucket}}
  - {key: burst, rate_limit: {unit: minute, requests_per_unit: 2, burst: {unit: hour, requests_per_unit: 3}}}
  - {key: shadow, shadow_mode: true, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: ban, rate_limit: {unit: minute, requests_per_unit: 1, ban: {after: 1, for: 10m}}}
  - {key: renewed, rate_limit: {unit: minute, requests_per_unit: 1, window_start: first_hit,
                                on_exceeded: renew_window, ban: {after: 0, for: window}}}
  - key: several
    rate_limits:
      - {unit: minute, requests_per_unit: 1}
      - {unit: hour, requests_per_unit: 2}
";

/// A limiter whose events are delivered when the test says so.
struct Watched {
    limiter: Arc<Limiter>,
    rls: Rls,
    clock: Arc<Clock>,
    delivery: Delivery,
    seen: u64,
}

impl Watched {
    fn new(yaml: &str) -> Self {
        Watched::with_config(yaml, LimiterConfig::default())
    }

    fn with_config(yaml: &str, config: LimiterConfig) -> Self {
        let delivery = ring(config.near_limit_ratio);
        let limiter = Limiter::new(config).observed_by([Arc::clone(delivery.events()) as _]);
        limiter.set_matcher(rules(yaml));
        let limiter = Arc::new(limiter);
        let clock = Arc::new(Clock::Manual(ManualClock::new(Duration::from_secs(T))));
        let rls = Rls::new(Arc::clone(&limiter), Arc::default());
        Watched {
            limiter,
            rls,
            clock,
            delivery,
            seen: 0,
        }
    }

    fn ask(&self, descriptor: &str) {
        self.ask_all(&request("d", &[descriptor]));
    }

    fn ask_all(&self, request: &RateLimitRequest) {
        answer(&self.rls, request, self.clock.now());
    }

    fn advance(&self, seconds: u64) {
        set_time(
            &self.clock,
            self.clock.now().since_epoch + Duration::from_secs(seconds),
        );
    }

    /// What was told since the last time, as `event value`.
    fn told(&mut self) -> Vec<String> {
        self.events()
            .iter()
            .map(|event| {
                format!(
                    "{} {}",
                    event["event"].as_str().unwrap(),
                    event["descriptor"][0]["value"].as_str().unwrap()
                )
            })
            .collect()
    }

    fn events(&mut self) -> Vec<Value> {
        while self.delivery.deliver(self.limiter.store(), self.clock.now()) > 0 {}
        let events = self.delivery.events().ring().unwrap().after(self.seen);
        self.seen = events.last().map_or(self.seen, |event| event.id);
        events
            .iter()
            .map(|event| serde_json::to_value(event).unwrap())
            .collect()
    }
}

fn ring(near_limit_ratio: f32) -> Delivery {
    Delivery::new(EventsConfig {
        sinks: [Sink::Ring].into(),
        near_limit_ratio,
    })
    .expect("there is a sink")
}

#[test]
fn each_edge_is_told_once_per_key_and_window_by_every_algorithm() {
    for key in ["fixed", "spared", "first_hit", "sliding", "bucket"] {
        let mut watched = Watched::new(RULES);
        let ask = |watched: &Watched, times| {
            for _ in 0..times {
                watched.ask(&format!("{key}=a"));
            }
        };
        ask(&watched, 4);
        assert_eq!(watched.told(), Vec::<String>::new(), "{key}");
        ask(&watched, 1);
        assert_eq!(watched.told(), ["near_limit a"], "{key}");
        ask(&watched, 100);
        assert_eq!(watched.told(), ["over_limit a"], "{key}");
        watched.ask(&format!("{key}=b"));
        // A bucket and a sliding window let single calls pass here; neither edge is news within the minute.
        for _ in 0..3 {
            watched.advance(13);
            ask(&watched, 2);
        }
        assert_eq!(watched.told(), Vec::<String>::new(), "{key}");
        watched.advance(120);
        ask(&watched, 100);
        assert_eq!(watched.told(), ["near_limit a", "over_limit a"], "{key}");
    }
}

#[test]
fn a_limit_with_a_burst_is_over_when_both_are() {
    let mut watched = Watched::new(RULES);
    for _ in 0..5 {
        watched.ask("burst=a");
    }
    assert_eq!(watched.told(), ["near_limit a"]);
    for _ in 0..5 {
        watched.ask("burst=a");
    }
    assert_eq!(watched.told(), ["over_limit a"]);
}

#[test]
fn a_call_that_leaps_over_the_limit_is_over_it_and_not_near_it() {
    let mut watched = Watched::new(RULES);
    let mut call = request("d", &["fixed=a"]);
    call.hits_addend = 7;
    watched.ask_all(&call);
    assert_eq!(watched.told(), ["over_limit a"]);
}

#[test]
fn each_of_several_limits_has_edges() {
    let mut watched = Watched::new(RULES);
    for _ in 0..4 {
        watched.ask("several=a");
    }
    let told: Vec<String> = watched
        .events()
        .iter()
        .map(|event| {
            format!(
                "{} {}",
                event["event"].as_str().unwrap(),
                event["limit"].as_str().unwrap()
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            "near_limit 1 per MINUTE",
            "over_limit 1 per MINUTE",
            "near_limit 2 per HOUR",
            "over_limit 2 per HOUR"
        ]
    );
}

#[test]
fn a_ban_starts_once_and_ends_without_anybody_asking() {
    let mut watched = Watched::new(RULES);
    for _ in 0..50 {
        watched.ask("ban=a");
    }
    assert_eq!(watched.told(), ["near_limit a", "over_limit a", "ban_started a"]);
    // Windows pass; a banned key is not over its limit anew.
    watched.advance(300);
    watched.ask("ban=a");
    watched.advance(299);
    assert_eq!(watched.told(), Vec::<String>::new());
    watched.advance(1);
    assert_eq!(watched.told(), ["ban_ended a"]);
    watched.advance(3600);
    assert_eq!(watched.told(), Vec::<String>::new());
}

#[test]
fn a_ban_that_is_made_longer_ends_when_it_ends() {
    let mut watched = Watched::new(RULES);
    watched.ask("renewed=a");
    watched.ask("renewed=a");
    assert_eq!(watched.told(), ["near_limit a", "over_limit a", "ban_started a"]);
    for _ in 0..5 {
        watched.advance(50);
        watched.ask("renewed=a");
        assert_eq!(watched.told(), Vec::<String>::new());
    }
    watched.advance(59);
    assert_eq!(watched.told(), Vec::<String>::new());
    watched.advance(1);
    assert_eq!(watched.told(), ["ban_ended a"]);
}

#[test]
fn an_event_says_what_whose_and_for_how_long() {
    let mut watched = Watched::new(RULES);
    for _ in 0..6 {
        watched.ask("shadow=a");
    }
    let event = &watched.events()[1];
    assert_eq!(
        *event,
        json!({
            "id": 2, "time": "2023-11-14T22:13:20Z", "event": "over_limit", "domain": "d", "rule": "d.shadow",
            "limit": "5 per MINUTE", "descriptor": [{"key": "shadow", "value": "a"}], "shadow_mode": true,
            "until_reset_ms": 40_000
        })
    );
}

/// Notes the counts before and after what it is told of.
#[derive(Debug, Default)]
struct Recorder(Mutex<Vec<(u64, u64)>>);

impl Observer for Recorder {
    fn observe(&self, observation: &Observation<'_>) {
        let outcome = observation.outcome;
        self.0.lock().unwrap().push((outcome.before, outcome.after));
    }
}

#[test]
fn observers_are_told_of_charges_and_not_of_looks_and_refunds() {
    let recorder = Arc::new(Recorder::default());
    let limiter = Limiter::new(LimiterConfig::default()).observed_by([Arc::clone(&recorder) as _]);
    limiter.set_matcher(rules(RULES));
    let clock = Clock::Manual(ManualClock::new(Duration::from_secs(T)));
    let rls = Rls::new(Arc::new(limiter), Arc::default());
    let charge = request("d", &["fixed=a", "none=b"]);
    let mut look = request("d", &["fixed=a"]);
    look.descriptors[0].hits_addend = Some(0);
    let mut refund = request("d", &["fixed=a"]);
    refund.descriptors[0].is_negative_hits = true;
    for call in [&charge, &look, &refund, &charge] {
        answer(&rls, call, clock.now());
    }
    assert_eq!(*recorder.0.lock().unwrap(), [(0, 1), (0, 1)]);
}

#[test]
fn a_limit_that_becomes_smaller_than_its_count_is_told_of() {
    let of = |limit: u32| {
        rules(&format!(
            "{{domain: d, descriptors: [{{key: k, rate_limit: {{unit: minute, requests_per_unit: {limit}}}}}]}}"
        ))
    };
    let mut watched = Watched::new(RULES);
    watched.limiter.set_matcher(of(100));
    (0..50).for_each(|_| watched.ask("k=a"));
    watched.limiter.set_matcher(of(10));
    (0..50).for_each(|_| watched.ask("k=a"));
    assert_eq!(watched.told(), ["over_limit a"]);
}

#[test]
fn more_edges_than_can_be_held_are_counted() {
    let mut watched = Watched::new(
        "{domain: d, descriptors: [{key: k, rate_limit: {unit: minute, requests_per_unit: 0}}]}",
    );
    for i in 0..100_000 {
        watched.ask(&format!("k={i}"));
    }
    watched.told();
    let events = watched.delivery.events();
    assert_eq!(events.ring().unwrap().after(0).len(), 1024, "the ring is bounded");
    assert_eq!(
        events.ring().unwrap().after(0)[0].id + 1023 + events.dropped(),
        100_000
    );
    // In the next window there is room again.
    watched.advance(60);
    watched.ask("k=5");
    assert_eq!(watched.told().last().unwrap(), "over_limit 5");
}

#[test]
fn edges_are_told_once_by_many_threads() {
    let mut watched = Watched::new(RULES);
    std::thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                for _ in 0..200 {
                    for key in ["fixed=a", "spared=b", "bucket=c", "ban=d"] {
                        watched.ask(key);
                    }
                }
            });
        }
    });
    let mut told = watched.told();
    told.sort();
    assert_eq!(
        told,
        [
            "ban_started d",
            "near_limit a",
            "near_limit b",
            "near_limit c",
            "near_limit d",
            "over_limit a",
            "over_limit b",
            "over_limit c",
            "over_limit d"
        ]
    );
}

async fn watched_server() -> TestServer {
    let (events, top) = (Some(ring(0.8)), Top::new(3));
    let limiter =
        Limiter::new(LimiterConfig::default()).observed_by(observers(events.as_ref(), top.as_ref()));
    limiter.set_matcher(rules(RULES));
    let parts = Parts {
        events,
        top,
        ..parts(limiter)
    };
    TestServer::start_parts(server_config(), parts).await
}

async fn get(server: &TestServer, path: &str) -> Value {
    let (status, body) = http(server.http, "GET", path, "").await;
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).unwrap()
}

#[tokio::test]
async fn events_can_be_followed_over_http_and_do_not_hold_up_the_end() {
    let server = watched_server().await;
    let mut client = server.client().await;
    for _ in 0..6 {
        client
            .should_rate_limit(request("d", &["fixed=a"]))
            .await
            .unwrap();
    }
    let mut stream = BufReader::new(TcpStream::connect(server.http).await.unwrap());
    stream
        .write_all(
            b"GET /events HTTP/1.1\r\nhost: t\r\naccept: text/event-stream\r\nlast-event-id: 1\r\n\r\n",
        )
        .await
        .unwrap();
    let mut lines = stream.lines();
    let mut data = async || loop {
        let line = lines.next_line().await.unwrap().expect("the stream goes on");
        if let Some(data) = line.strip_prefix("data: ") {
            return serde_json::from_str::<Value>(data).unwrap();
        }
    };
    let event = data().await;
    assert_eq!(
        (event["id"].as_u64(), event["event"].as_str()),
        (Some(2), Some("over_limit"))
    );
    for _ in 0..5 {
        client
            .should_rate_limit(request("d", &["fixed=b"]))
            .await
            .unwrap();
    }
    let event = data().await;
    assert_eq!(
        (event["id"].as_u64(), event["event"].as_str()),
        (Some(3), Some("near_limit"))
    );

    let all = get(&server, "/events").await;
    assert_eq!(all["events"].as_array().unwrap().len(), 3);
    assert_eq!(all["dropped"], 0);
    let later = get(&server, "/events?after=2").await;
    assert_eq!(later["events"].as_array().unwrap().len(), 1);
    // Who asks for what another process has told gets all that there is.
    assert_eq!(
        get(&server, "/events?after=99").await["events"]
            .as_array()
            .unwrap()
            .len(),
        3
    );
    assert_eq!(http(server.http, "GET", "/events?last=2", "").await.0, 400);

    server.ask_to_stop(Stop::Gently).await;
    let ended = tokio::time::timeout(Duration::from_secs(5), server.ended()).await;
    ended
        .expect("it ends long before its grace time is over")
        .unwrap();
    while let Some(line) = lines.next_line().await.unwrap() {
        assert!(!line.starts_with("data: "), "{line}");
    }
}

#[tokio::test]
async fn the_keys_that_are_refused_most_are_shown_for_some_minutes() {
    let server = watched_server().await;
    let mut client = server.client().await;
    for (value, calls) in [("a", 30), ("b", 40), ("c", 20), ("d", 5)] {
        for _ in 0..calls {
            client
                .should_rate_limit(request("d", &[&format!("fixed={value}")]))
                .await
                .unwrap();
        }
    }
    let top = get(&server, "/top").await;
    let domain = &top["domains"][0];
    assert_eq!(
        (domain["domain"].as_str(), domain["refused"].as_u64()),
        (Some("d"), Some(75))
    );
    assert_eq!(
        domain["keys"][0],
        json!({"descriptor": [{"key": "fixed", "value": "b"}], "rule": "d.fixed", "limit": "5 per MINUTE",
               "shadow_mode": false, "refused": 35, "error": 0})
    );
    let counts: Vec<u64> = domain["keys"]
        .as_array()
        .unwrap()
        .iter()
        .map(|key| key["refused"].as_u64().unwrap())
        .collect();
    assert_eq!(counts, [35, 25, 15]);
    assert_eq!(get(&server, "/top?domain=other").await["domains"], json!([]));

    server.set_time(Duration::from_secs(T + 400));
    let later = get(&server, "/top?domain=d").await;
    assert_eq!(later["domains"][0]["refused"], 75);
    assert_eq!(later["domains"][0]["seconds"], 400);
    server.set_time(Duration::from_secs(T + 701));
    assert_eq!(get(&server, "/top").await["domains"], json!([]));
}

#[tokio::test]
async fn who_comes_too_late_is_told_how_many_events_are_forgotten() {
    let server = watched_server().await;
    let mut client = server.client().await;
    for i in 0..1_100 {
        let call = request("d", &[&format!("ban={i}")]);
        client.should_rate_limit(call).await.unwrap();
    }
    wait_until("all events", async || {
        get(&server, "/events").await["events"]
            .as_array()
            .unwrap()
            .last()
            .unwrap()["id"]
            == 1_100
    })
    .await;
    let answer = get(&server, "/events?after=10").await;
    assert_eq!(
        (&answer["missed"], &answer["events"][0]["id"]),
        (&json!(66), &json!(77))
    );
    assert_eq!(get(&server, "/events").await["missed"], 0);
}

#[tokio::test]
async fn a_server_that_observes_nothing_says_how_to_change_that() {
    let server = TestServer::start(RULES).await;
    let (status, body) = http(server.http, "GET", "/events", "").await;
    assert_eq!(
        (status, body.trim()),
        (404, "events are not kept; start the server with --events ring")
    );
    let (status, body) = http(server.http, "GET", "/top", "").await;
    assert_eq!(
        (status, body.trim()),
        (
            404,
            "refused keys are not counted; start the server with --top 20"
        )
    );
}
