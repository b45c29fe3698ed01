//! What operators measure, over HTTP.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use regex::Regex;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, UdpSocket};
use tollgate::config::{Protocol, ServerConfig, StatsdConfig};
use tollgate::limiter::{Limiter, LimiterConfig};
use tollgate::metrics::Metrics;
use tollgate::metrics::mapping::Mapping;
use tollgate::metrics::prometheus::Names;
use tollgate::metrics::statsd::{Format, Lines};
use tollgate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tollgate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate::server::Parts;
use tollgate::shutdown::Stop;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::support::{T, TestServer, brief, http, parts, request, rules, server_config, wait_until};

const RULES: &str = "
domain: shop
descriptors:
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 5}}
  - key: path
    value: /login
    descriptors:
      - {key: ip, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: url, value: '/a:b|c', rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: ip, detailed_metric: true, rate_limit: {unit: hour, requests_per_unit: 5}}
";

/// A mapping file in the manner of Envoy Gateway's: globs, a level a label, and times as they are, in milliseconds.
const MAPPING: &str = "
mappings:
- match: ratelimit.service.rate_limit.*.*.over_limit
  name: ratelimit_service_rate_limit_over_limit
  timer_type: histogram
  labels: {domain: $1, key1: $2}
- match: ratelimit.service.rate_limit.*.*.*.over_limit
  name: ratelimit_service_rate_limit_over_limit
  labels: {domain: $1, key1: $2, key2: $3}
- match: ratelimit.service.call.should_rate_limit.*
  name: ratelimit_service_should_rate_limit_error
  match_metric_type: counter
  labels: {err_type: $1}
- match: ratelimit_server.*.response_time
  name: ratelimit_service_response_time_seconds
  help: How long it took.
  labels: {grpc_method: $1}
- match: 'total_requests$'
  match_type: regex
  action: drop
";

async fn server(metrics: Metrics) -> TestServer {
    let limiter = Limiter::new(LimiterConfig::default());
    load_rules(RULES, &limiter, &metrics);
    start(limiter, Arc::new(metrics)).await
}

fn load_rules(yaml: &str, limiter: &Limiter, metrics: &Metrics) {
    let mut matcher = rules(yaml);
    metrics.adopt(&mut matcher);
    limiter.set_matcher(matcher);
}

async fn start(limiter: Limiter, metrics: Arc<Metrics>) -> TestServer {
    start_with(server_config(), limiter, metrics).await
}

async fn start_with(config: ServerConfig, limiter: Limiter, metrics: Arc<Metrics>) -> TestServer {
    let parts = Parts {
        metrics,
        ..parts(limiter)
    };
    TestServer::start_parts(config, parts).await
}

/// A server whose names for Prometheus are these.
async fn named(names: Names) -> TestServer {
    let (limiter, metrics) = (Limiter::new(LimiterConfig::default()), Metrics::default());
    load_rules(RULES, &limiter, &metrics);
    let config = ServerConfig {
        prometheus_names: Arc::new(names),
        ..server_config()
    };
    start_with(config, limiter, Arc::new(metrics)).await
}

/// The lines of the page that start with `prefix`.
async fn lines(server: &TestServer, prefix: &str) -> Vec<String> {
    let (status, page) = http(server.http, "GET", "/metrics", "").await;
    assert_eq!(status, 200);
    page.lines()
        .filter(|line| line.starts_with(prefix))
        .map(str::to_owned)
        .collect()
}

async fn ask(server: &TestServer, calls: impl IntoIterator<Item = RateLimitRequest>) {
    let mut client = server.client().await;
    for call in calls {
        client.should_rate_limit(call).await.unwrap();
    }
}

fn overridden(descriptor: &str) -> RateLimitRequest {
    let mut call = request("shop", &[descriptor]);
    call.descriptors[0].limit = Some(RateLimitOverride {
        requests_per_unit: 500,
        unit: 2,
        ..RateLimitOverride::default()
    });
    call
}

#[tokio::test]
async fn rules_are_counted_by_the_names_of_the_reference() {
    let server = server(Metrics::default()).await;
    ask(&server, (0..7).map(|_| request("shop", &["user=a"]))).await;
    ask(
        &server,
        (0..3).map(|_| request("shop", &["path=/login;ip=198.51.100.7", "other=x"])),
    )
    .await;
    ask(&server, [request("nowhere", &["a=b", "c=d"])]).await;
    assert_eq!(
        lines(&server, "ratelimit_service_rate_limit").await,
        [
            "ratelimit_service_rate_limit_near_limit{domain=\"shop\",key1=\"path_/login\",key2=\"ip\"} 1",
            "ratelimit_service_rate_limit_near_limit{domain=\"shop\",key1=\"user\"} 1",
            "ratelimit_service_rate_limit_nowhere_domain_not_found 2",
            "ratelimit_service_rate_limit_over_limit{domain=\"shop\",key1=\"path_/login\",key2=\"ip\"} 2",
            "ratelimit_service_rate_limit_over_limit{domain=\"shop\",key1=\"user\"} 2",
            "ratelimit_service_rate_limit_total_hits{domain=\"shop\",key1=\"path_/login\",key2=\"ip\"} 3",
            "ratelimit_service_rate_limit_total_hits{domain=\"shop\",key1=\"user\"} 7",
            "ratelimit_service_rate_limit_within_limit{domain=\"shop\",key1=\"path_/login\",key2=\"ip\"} 1",
            "ratelimit_service_rate_limit_within_limit{domain=\"shop\",key1=\"user\"} 5",
        ]
    );
}

#[tokio::test]
async fn calls_and_their_errors_are_counted() {
    let server = server(Metrics::default()).await;
    ask(&server, [request("shop", &["user=a"])]).await;
    let mut client = server.client().await;
    client
        .should_rate_limit(request("", &["user=a"]))
        .await
        .unwrap_err();
    client.should_rate_limit(request("shop", &[])).await.unwrap_err();
    let mut health = HealthClient::new(server.channel().await);
    health.check(HealthCheckRequest::default()).await.unwrap();
    // A call over HTTP is none over gRPC.
    http(server.http, "POST", "/json", "{").await;
    assert_eq!(
        lines(&server, "ratelimit_service_total_requests").await,
        [
            "ratelimit_service_total_requests{grpc_method=\"Check\"} 1",
            "ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"} 3"
        ]
    );
    assert_eq!(
        lines(&server, "ratelimit_service_should_rate_limit_error").await,
        ["ratelimit_service_should_rate_limit_error{err_type=\"service_error\"} 2"]
    );
    assert_eq!(
        lines(
            &server,
            "ratelimit_service_response_time_seconds_bucket{grpc_method=\"ShouldRateLimit\""
        )
        .await[0],
        "ratelimit_service_response_time_seconds_bucket{grpc_method=\"ShouldRateLimit\",le=\"0.005\"} 3"
    );
    assert_eq!(
        lines(&server, "tollgate_decision_seconds_count").await,
        ["tollgate_decision_seconds_count 3"]
    );
    assert_eq!(
        lines(&server, "tollgate_counters ").await,
        ["tollgate_counters 1"]
    );
}

#[tokio::test]
async fn health_checks_are_counted_and_timed_like_other_calls() {
    let server = server(Metrics::default()).await;
    let mut health = HealthClient::new(server.channel().await);
    health.check(HealthCheckRequest::default()).await.unwrap();
    assert_eq!(
        lines(&server, "ratelimit_service_response_time_seconds_count").await,
        [
            "ratelimit_service_response_time_seconds_count{grpc_method=\"Check\"} 1",
            "ratelimit_service_response_time_seconds_count{grpc_method=\"ShouldRateLimit\"} 0"
        ]
    );
}

#[tokio::test]
async fn a_mapping_file_says_what_names_become() {
    let server = named(Names {
        mapping: Some(Mapping::parse(MAPPING).unwrap()),
        milliseconds: false,
    })
    .await;
    ask(&server, (0..6).map(|_| request("shop", &["user=a"]))).await;
    ask(
        &server,
        (0..3).map(|_| request("shop", &["path=/login;ip=198.51.100.7"])),
    )
    .await;
    let shown = lines(&server, "ratelimit").await;
    assert_eq!(
        shown
            .iter()
            .filter(|line| !line.contains("_seconds"))
            .collect::<Vec<_>>(),
        [
            "ratelimit_service_config_load_error 0",
            "ratelimit_service_config_load_success 0",
            "ratelimit_service_global_shadow_mode 0",
            "ratelimit_service_rate_limit_over_limit{domain=\"shop\",key1=\"path_/login\",key2=\"ip\"} 2",
            "ratelimit_service_rate_limit_over_limit{domain=\"shop\",key1=\"user\"} 1",
            // What the file does not name keeps its internal name.
            "ratelimit_service_rate_limit_shop_path__login_ip_near_limit 1",
            "ratelimit_service_rate_limit_shop_path__login_ip_total_hits 3",
            "ratelimit_service_rate_limit_shop_path__login_ip_within_limit 1",
            "ratelimit_service_rate_limit_shop_user_near_limit 1",
            "ratelimit_service_rate_limit_shop_user_total_hits 6",
            "ratelimit_service_rate_limit_shop_user_within_limit 5",
            "ratelimit_service_should_rate_limit_error{err_type=\"service_error\"} 0",
        ]
    );
    let page = http(server.http, "GET", "/metrics", "").await.1;
    assert!(page.contains("# HELP ratelimit_service_response_time_seconds How long it took.\n"));
    // A clock that stands still sees no time pass, so all are below 5 us.
    assert!(page.contains(
        "ratelimit_service_response_time_seconds_bucket{grpc_method=\"ShouldRateLimit\",le=\"0.005\"} 9\n"
    ));
    assert!(page.contains("tollgate_counters 2\n"));
}

#[tokio::test]
async fn it_is_told_which_build_this_is_and_what_the_process_holds() {
    let server = server(Metrics::default()).await;
    let build = lines(&server, "tollgate_build_info").await;
    let version = env!("CARGO_PKG_VERSION");
    assert!(
        build[0].ends_with(&format!("version=\"{version}\"}} 1")),
        "{build:?}"
    );
    for name in [
        "process_resident_memory_bytes ",
        "process_open_fds ",
        "process_cpu_seconds_total ",
    ] {
        assert_eq!(lines(&server, name).await.len(), 1, "{name}");
    }
}

#[tokio::test]
async fn counters_of_rules_go_on_after_a_reload() {
    let metrics = Arc::new(Metrics::default());
    let server = start(Limiter::new(LimiterConfig::default()), Arc::clone(&metrics)).await;
    for rounds in 1..4 {
        load_rules(RULES, &server.limiter, &metrics);
        ask(&server, [request("shop", &["user=a"])]).await;
        assert_eq!(
            lines(&server, "ratelimit_service_rate_limit_total_hits").await,
            [format!(
                "ratelimit_service_rate_limit_total_hits{{domain=\"shop\",key1=\"user\"}} {rounds}"
            )]
        );
    }
}

#[tokio::test]
async fn dots_in_names_and_values_do_not_part_labels() {
    const DOTTED: &str = r"
domain: shop.example
descriptors:
  - key: host
    detailed_metric: true
    rate_limit: {unit: hour, requests_per_unit: 100}
  - key: method
    value: pkg.v1.Carts/Add
    rate_limit: {unit: hour, requests_per_unit: 100}
";
    let (limiter, metrics) = (Limiter::new(LimiterConfig::default()), Metrics::default());
    load_rules(DOTTED, &limiter, &metrics);
    let server = start(limiter, Arc::new(metrics)).await;
    ask(
        &server,
        [request(
            "shop.example",
            &["host=a.b.example", "method=pkg.v1.Carts/Add"],
        )],
    )
    .await;
    assert_eq!(
        lines(&server, "ratelimit_service_rate_limit_total_hits").await,
        [
            "ratelimit_service_rate_limit_total_hits{domain=\"shop.example\",key1=\"host_a.b.example\"} 1",
            "ratelimit_service_rate_limit_total_hits{domain=\"shop.example\",key1=\"method_pkg.v1.Carts/Add\"} 1",
        ]
    );
}

#[tokio::test]
async fn very_long_names_make_no_series() {
    let server = server(Metrics::default()).await;
    let long = "x".repeat(100_000);
    ask(
        &server,
        [
            overridden(&format!("ip={long}")),
            request("shop", &[&format!("ip={long}")]),
            request(&long, &["a=b"]),
        ],
    )
    .await;
    let (_, page) = http(server.http, "GET", "/metrics", "").await;
    assert!(page.len() < 20_000);
    let hits = lines(&server, "ratelimit_service_rate_limit_total_hits").await;
    assert_eq!(
        hits,
        ["ratelimit_service_rate_limit_total_hits{domain=\"shop\",key1=\"__overflow__\"} 2"]
    );
}

#[tokio::test]
async fn values_of_requests_make_only_so_many_series() {
    let server = server(Metrics::new(3)).await;
    let mut client = server.client().await;
    for i in 0..50 {
        let call = overridden(&format!("ip=10.0.0.{i}"));
        let answer = client.should_rate_limit(call).await.unwrap();
        assert_eq!(brief(answer.get_ref()), "OK: OK499", "it is decided by itself");
    }
    ask(
        &server,
        (0..50).map(|i| request("shop", &[&format!("ip=10.0.1.{i}")])),
    )
    .await;
    ask(
        &server,
        (0..1000).map(|i| request(&format!("unknown{i:04}"), &["a=b"])),
    )
    .await;
    let hits = lines(&server, "ratelimit_service_rate_limit_total_hits").await;
    assert_eq!(hits.len(), 4, "{hits:?}");
    assert_eq!(
        hits[0],
        "ratelimit_service_rate_limit_total_hits{domain=\"shop\",key1=\"__overflow__\"} 97"
    );
    let unknown = lines(&server, "ratelimit_service_rate_limit_unknown").await;
    assert_eq!(unknown.len(), 100);
    assert_eq!(
        lines(&server, "ratelimit_service_rate_limit___overflow___domain").await,
        ["ratelimit_service_rate_limit___overflow___domain_not_found 900"]
    );
}

#[tokio::test]
async fn whatever_stands_in_a_value_the_page_can_be_read() {
    let server = server(Metrics::default()).await;
    ask(
        &server,
        [
            request("shop", &["url=/a:b|c"]),
            request("shop", &["ip=198.51.100.7"]),
            request("shop", &["ip=2001:db8::1"]),
            request("shop", &["ip=a b\"c\\d\ne"]),
        ],
    )
    .await;
    assert_eq!(
        lines(&server, "ratelimit_service_rate_limit_total_hits").await,
        [
            r#"ratelimit_service_rate_limit_total_hits{domain="shop",key1="ip_198_51_100_7"} 1"#,
            r#"ratelimit_service_rate_limit_total_hits{domain="shop",key1="ip_2001_db8__1"} 1"#,
            r#"ratelimit_service_rate_limit_total_hits{domain="shop",key1="ip_a b\"c\\d_e"} 1"#,
            r#"ratelimit_service_rate_limit_total_hits{domain="shop",key1="url_/a_b_c"} 1"#,
        ]
    );
}

#[tokio::test]
async fn counters_whose_window_has_passed_are_no_longer_counted() {
    let server = server(Metrics::default()).await;
    ask(
        &server,
        (0..100).map(|i| request("shop", &[&format!("user={i}")])),
    )
    .await;
    assert_eq!(
        lines(&server, "tollgate_counters ").await,
        ["tollgate_counters 100"]
    );
    server.set_time(Duration::from_secs(T + 3_600));
    wait_until("the counters to be given back", async || {
        lines(&server, "tollgate_counters ").await == ["tollgate_counters 0"]
    })
    .await;
    ask(&server, [request("shop", &["user=0"])]).await;
    assert_eq!(
        lines(&server, "tollgate_counters ").await,
        ["tollgate_counters 1"]
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn totals_by_many_clients_are_exact() {
    let server = server(Metrics::default()).await;
    let mut clients = Vec::new();
    for _ in 0..16 {
        let mut client = server.client().await;
        clients.push(tokio::spawn(async move {
            for _ in 0..100 {
                client
                    .should_rate_limit(request("shop", &["user=a"]))
                    .await
                    .unwrap();
            }
        }));
    }
    for client in clients {
        client.await.unwrap();
    }
    for (name, expected) in [("total_hits", 1600), ("within_limit", 5), ("over_limit", 1595)] {
        let line = format!("ratelimit_service_rate_limit_{name}");
        assert_eq!(
            lines(&server, &line).await,
            [format!("{line}{{domain=\"shop\",key1=\"user\"}} {expected}")]
        );
    }
}

#[tokio::test]
async fn a_mapping_file_cannot_break_the_page() {
    // What Prometheus reads must have a name, and no name twice.
    for name in ["$1", "${1}process_open_fds", "${1}tollgate_build_info"] {
        let mapping = format!("mappings: [{{match: '^(x?)', match_type: regex, name: '{name}'}}]");
        let server = named(Names {
            mapping: Some(Mapping::parse(&mapping).unwrap()),
            milliseconds: false,
        })
        .await;
        ask(&server, [request("shop", &["user=a"])]).await;
        assert_eq!(lines(&server, "# TYPE tollgate_build_info").await.len(), 1);
        assert_eq!(lines(&server, "# TYPE process_open_fds").await.len(), 1);
        assert_eq!(lines(&server, "ratelimit").await, [""; 0]);
    }
}

#[tokio::test]
async fn extra_tags_make_no_label_twice_and_none_that_prometheus_keeps_for_itself() {
    let mut config = server_config();
    let tags = [
        ("version", "mine"),
        ("a-b", "1"),
        ("a-c", "2"),
        ("a.b", "3"),
        ("le", "4"),
        ("__name__", "5"),
    ];
    config.extra_tags = tags
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec();
    let server = start_with(
        config,
        Limiter::new(LimiterConfig::default()),
        Arc::new(Metrics::default()),
    )
    .await;
    assert_eq!(
        lines(&server, "ratelimit_service_config_load_error").await,
        ["ratelimit_service_config_load_error{a_b=\"1\",a_c=\"2\",version=\"mine\"} 0"]
    );
    let build = lines(&server, "tollgate_build_info").await;
    assert_eq!(build.len(), 1);
    assert_eq!(build[0].matches("version=").count(), 1, "{build:?}");
    assert!(!build[0].contains("mine"), "{build:?}");
}

#[tokio::test]
async fn extra_tags_are_labels_of_everything() {
    let mut config = server_config();
    config.extra_tags = vec![("a-z".into(), "eu.1".into())];
    let parts = parts(Limiter::new(LimiterConfig::default()));
    let server = TestServer::start_parts(config, parts).await;
    let (_, page) = http(server.http, "GET", "/metrics", "").await;
    let metrics: Vec<&str> = page.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(metrics.len() > 20);
    for metric in metrics {
        assert!(metric.contains("a_z=\"eu.1\""), "{metric}");
    }
    assert!(page.contains("ratelimit_service_config_load_error{a_z=\"eu.1\"} 0"));
}

// === statsd ===

fn statsd(address: std::net::SocketAddr, protocol: Protocol) -> StatsdConfig {
    StatsdConfig {
        host: address.ip().to_string(),
        port: address.port(),
        protocol,
        flush_interval: Duration::from_millis(50),
        lines: Lines {
            format: Format::Statsd,
            tags: Vec::new(),
        },
        is_asked_for: true,
    }
}

async fn server_with_statsd(statsd: StatsdConfig) -> TestServer {
    let parts = parts(Limiter::new(LimiterConfig::default()));
    let mut matcher = rules(RULES);
    parts.metrics.adopt(&mut matcher);
    parts.limiter.set_matcher(matcher);
    let mut config = server_config();
    config.statsd = Some(statsd);
    TestServer::start_parts(config, parts).await
}

/// How much the counter grows by these lines.
fn growth(lines: &str, counter: &str) -> u64 {
    let prefix = format!("{counter}:");
    lines
        .lines()
        .filter_map(|line| line.strip_prefix(&prefix)?.strip_suffix("|c"))
        .map(|count| count.parse::<u64>().unwrap())
        .sum()
}

const HITS: &str = "ratelimit.service.rate_limit.shop.user.total_hits";

#[tokio::test]
async fn what_statsd_could_not_be_told_is_told_once_it_is_there() {
    // A port on which nobody listens yet.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let server = server_with_statsd(statsd(address, Protocol::Tcp)).await;
    ask(&server, (0..7).map(|_| request("shop", &["user=a"]))).await;
    let listener = TcpListener::bind(address).await.unwrap();
    let (mut stream, _) = listener.accept().await.unwrap();
    ask(&server, (0..3).map(|_| request("shop", &["user=a"]))).await;
    server.ask_to_stop(Stop::Soon).await;
    server.ended().await.unwrap();
    let mut received = String::new();
    stream.read_to_string(&mut received).await.unwrap();
    assert_eq!(growth(&received, HITS), 10, "{received}");
    assert!(
        received.contains("ratelimit_server.ShouldRateLimit.response_time:0|ms"),
        "{received}"
    );
    assert!(received.contains("\ntollgate.counters:1|g\n"), "{received}");
}

#[tokio::test]
async fn statsd_can_be_told_in_packets() {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let server = server_with_statsd(statsd(socket.local_addr().unwrap(), Protocol::Udp)).await;
    ask(&server, (0..7).map(|_| request("shop", &["user=a"]))).await;
    let (mut hits, mut packet) = (0, vec![0; 65_536]);
    wait_until("all hits", async || {
        let length = socket.recv(&mut packet).await.unwrap();
        assert!(length <= 1_432);
        hits += growth(std::str::from_utf8(&packet[..length]).unwrap(), HITS);
        hits == 7
    })
    .await;
}

#[tokio::test]
async fn whatever_stands_in_a_value_statsd_can_read_the_lines() {
    let socket = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let server = server_with_statsd(statsd(socket.local_addr().unwrap(), Protocol::Udp)).await;
    ask(
        &server,
        [
            request("shop", &["url=/a:b|c"]),
            request("shop", &["ip=2001:db8::1"]),
            request("shop", &["ip=a b\"c\\d\ne"]),
            request("no:such|shop\nat all", &["a=b"]),
            overridden("new:key\n=a|b:c"),
        ],
    )
    .await;
    let line = Regex::new(r"^[^:|\n]+:\d+\|(c|g|ms(\|@[0-9.e-]+)?)$").unwrap();
    let mut missing = HashSet::from([
        "ratelimit.service.rate_limit.shop.url_/a_b_c.total_hits:1|c",
        "ratelimit.service.rate_limit.shop.ip_2001_db8__1.total_hits:1|c",
        "ratelimit.service.rate_limit.shop.ip_a b\"c\\d_e.total_hits:1|c",
        "ratelimit.service.rate_limit.no_such_shop_at all.domain_not_found:1|c",
        "ratelimit.service.rate_limit.shop.new_key__a_b_c.total_hits:1|c",
    ]);
    let mut packet = vec![0; 65_536];
    wait_until("all lines", async || {
        let length = socket.recv(&mut packet).await.unwrap();
        for told in std::str::from_utf8(&packet[..length]).unwrap().split('\n') {
            assert!(line.is_match(told), "{told:?}");
            missing.remove(told);
        }
        missing.is_empty()
    })
    .await;
}
