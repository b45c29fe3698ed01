//! What the tests share: a server on free ports with a clock that they set, and short ways to ask.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use prost::Message as _;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tollgate::clock::{Clock, ManualClock, Timestamp};
use tollgate::config::file;
use tollgate::config::source::SourceFile;
use tollgate::config::{GrpcConfig, Listen, ServerConfig};
use tollgate::limiter::{Limiter, LimiterConfig};
use tollgate::matcher::Matcher;
use tollgate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tollgate::proto::envoy::service::ratelimit::v3::rate_limit_response::DescriptorStatus;
use tollgate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate::rls::Rls;
use tollgate::server::{Parts, Server, ServerError};
use tollgate::shutdown::Stop;
use tonic::transport::Channel;

/// 2023-11-14 22:13:20 UTC: 40 s before the end of a minute, 2,800 s before the end of an hour.
pub(crate) const T: u64 = 1_700_000_000;

/// Rules from one file.
#[track_caller]
pub(crate) fn rules(yaml: &str) -> Matcher {
    match file::load(&[source("rules.yaml", yaml)], false) {
        Ok(loaded) => loaded.matcher,
        Err(diagnostics) => panic!(
            "{:#?}",
            diagnostics.errors().map(ToString::to_string).collect::<Vec<_>>()
        ),
    }
}

pub(crate) fn source(name: &str, text: &str) -> SourceFile {
    SourceFile {
        name: name.into(),
        text: text.into(),
    }
}

/// A limiter with a clock, asked without a wire.
pub(crate) struct TestLimiter {
    pub(crate) limiter: Arc<Limiter>,
    pub(crate) rls: Rls,
    clock: Arc<Clock>,
}

impl TestLimiter {
    #[track_caller]
    pub(crate) fn new(yaml: &str) -> Self {
        TestLimiter::with_config(yaml, LimiterConfig::default())
    }

    #[track_caller]
    pub(crate) fn with_config(yaml: &str, config: LimiterConfig) -> Self {
        let limiter = Arc::new(Limiter::new(config));
        limiter.set_matcher(rules(yaml));
        let clock = Arc::new(Clock::Manual(ManualClock::new(Duration::from_secs(T))));
        let rls = Rls::new(Arc::clone(&limiter), Arc::default());
        TestLimiter { limiter, clock, rls }
    }

    pub(crate) fn set_time(&self, seconds: u64) {
        set_time(&self.clock, Duration::from_secs(seconds));
    }

    pub(crate) fn advance(&self, by: Duration) {
        set_time(&self.clock, self.now().since_epoch + by);
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    #[track_caller]
    pub(crate) fn ask(&self, request: &RateLimitRequest) -> RateLimitResponse {
        answer(&self.rls, request, self.now())
    }

    /// The short form of the answer, see [`brief`].
    #[track_caller]
    pub(crate) fn brief(&self, request: &RateLimitRequest) -> String {
        brief(&self.ask(request))
    }
}

/// The answer to a valid request, by way of the wire's bytes.
#[track_caller]
pub(crate) fn answer(rls: &Rls, request: &RateLimitRequest, now: Timestamp) -> RateLimitResponse {
    let mut answer = BytesMut::new();
    rls.answer(&request.encode_to_vec(), now, &mut answer)
        .expect("the request is valid");
    RateLimitResponse::decode(answer).expect("the answer is a response")
}

pub(crate) fn set_time(clock: &Clock, since_epoch: Duration) {
    match clock {
        Clock::Manual(clock) => clock.set(since_epoch),
        Clock::System(_) => panic!("tests use a manual clock"),
    }
}

/// `domain` with one descriptor per argument, each written as `key=value` pairs with `;` between them.
pub(crate) fn request(domain: &str, descriptors: &[&str]) -> RateLimitRequest {
    RateLimitRequest {
        domain: domain.as_bytes().to_vec().into(),
        descriptors: descriptors.iter().map(|entries| descriptor(entries)).collect(),
        hits_addend: 0,
    }
}

pub(crate) fn descriptor(entries: &str) -> RateLimitDescriptor {
    let entries = entries
        .split(';')
        .filter(|entry| !entry.is_empty())
        .map(|entry| {
            let (key, value) = entry.split_once('=').expect("entries are written key=value");
            Entry {
                key: key.as_bytes().to_vec().into(),
                value: value.as_bytes().to_vec().into(),
            }
        })
        .collect();
    RateLimitDescriptor {
        entries,
        ..RateLimitDescriptor::default()
    }
}

/// One word per descriptor: `OK` and what is left, `OVER`, `NONE` for no limit, `UNL` for an unlimited one; with `OVER:` or
/// `OK:` for the whole in front.
pub(crate) fn brief(response: &RateLimitResponse) -> String {
    let overall = if response.overall_code == 2 { "OVER" } else { "OK" };
    let statuses: Vec<String> = response.statuses.iter().map(brief_status).collect();
    format!("{overall}: {}", statuses.join(" "))
}

fn brief_status(status: &DescriptorStatus) -> String {
    match (status.code, &status.current_limit, status.limit_remaining) {
        (1, None, u32::MAX) => "UNL".into(),
        (1, None, 0) => "NONE".into(),
        (1, Some(_), left) => format!("OK{left}"),
        (2, Some(_), 0) => "OVER".into(),
        other => panic!("no status looks like {other:?}"),
    }
}

/// Waits until `condition` is true of what another task does.
pub(crate) async fn wait_until(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let is_true = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(10)).await; // between two looks at what another task does
        }
    };
    if tokio::time::timeout(Duration::from_secs(10), is_true)
        .await
        .is_err()
    {
        panic!("waited in vain for {what}");
    }
}

/// Sends one HTTP request; returns status and body.
pub(crate) async fn http(address: SocketAddr, method: &str, path: &str, body: &str) -> (u16, String) {
    try_http(address, method, path, body)
        .await
        .expect("the server answers")
}

/// The same. `None` if the connection does not come about or breaks.
pub(crate) async fn try_http(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> Option<(u16, String)> {
    let (head, body) = try_http_with_head(address, method, path, body).await?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body))
}

/// The same with all that comes before the body.
pub(crate) async fn try_http_with_head(
    address: SocketAddr,
    method: &str,
    path: &str,
    body: &str,
) -> Option<(String, String)> {
    let mut connection = TcpStream::connect(address).await.ok()?;
    let length = body.len();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nhost: t\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    );
    connection.write_all(request.as_bytes()).await.ok()?;
    let mut reply = String::new();
    connection.read_to_string(&mut reply).await.ok()?;
    let (head, body) = reply.split_once("\r\n\r\n")?;
    Some((head.to_owned(), body.to_owned()))
}

/// A free port of the loopback address.
pub(crate) fn free_port() -> Listen {
    Listen::Tcp {
        host: "127.0.0.1".into(),
        port: 0,
    }
}

/// Free ports, and an end without delay.
pub(crate) fn server_config() -> ServerConfig {
    ServerConfig {
        grpc: GrpcConfig {
            listen: free_port(),
            tls: None,
            max_connections: 1_000,
            max_calls_in_flight: 1_000,
            max_connection_age: None,
        },
        http: free_port(),
        http_tls: None,
        debug: Some(free_port()),
        prometheus: None,
        prometheus_names: Arc::default(),
        extra_tags: Vec::new(),
        statsd: None,
        spans: None,
        look_interval: Duration::from_millis(20),
        shutdown_linger: Duration::ZERO,
        shutdown_grace: Duration::from_secs(30),
        snapshot: None,
    }
}

/// A limiter with a manual clock.
pub(crate) fn parts(limiter: Limiter) -> Parts {
    let clock = Clock::Manual(ManualClock::new(Duration::from_secs(T)));
    Parts::new(Arc::new(limiter), Arc::new(clock))
}

/// A server on free ports of the loopback address.
pub(crate) struct TestServer {
    pub(crate) limiter: Arc<Limiter>,
    pub(crate) grpc: SocketAddr,
    pub(crate) http: SocketAddr,
    pub(crate) debug: Option<SocketAddr>,
    pub(crate) prometheus: Option<SocketAddr>,
    clock: Arc<Clock>,
    stop: mpsc::Sender<Stop>,
    running: JoinHandle<Result<(), ServerError>>,
}

impl TestServer {
    pub(crate) async fn start(yaml: &str) -> Self {
        let parts = parts(Limiter::new(LimiterConfig::default()));
        let mut matcher = rules(yaml);
        parts.metrics.adopt(&mut matcher);
        parts.limiter.set_matcher(matcher);
        TestServer::start_parts(server_config(), parts).await
    }

    pub(crate) async fn start_with(limiter: Limiter, shutdown_linger: Duration) -> Self {
        let parts = parts(limiter);
        let config = ServerConfig {
            shutdown_linger,
            ..server_config()
        };
        TestServer::start_parts(config, parts).await
    }

    pub(crate) async fn start_parts(config: ServerConfig, parts: Parts) -> Self {
        let (limiter, clock) = (Arc::clone(&parts.limiter), Arc::clone(&parts.clock));
        let server = Server::bind(config, parts)
            .await
            .expect("free ports can be opened");
        let nowhere = SocketAddr::from(([127, 0, 0, 1], 0));
        let (grpc, http) = (
            server.grpc_address().unwrap_or(nowhere),
            server.http_address().unwrap(),
        );
        let (debug, prometheus) = (server.debug_address(), server.prometheus_address());
        let (stop, stops) = mpsc::channel(2);
        let running = tokio::spawn(server.run(ReceiverStream::new(stops)));
        TestServer {
            limiter,
            grpc,
            http,
            debug,
            prometheus,
            clock,
            stop,
            running,
        }
    }

    pub(crate) fn set_time(&self, since_epoch: Duration) {
        set_time(&self.clock, since_epoch);
    }

    pub(crate) async fn channel(&self) -> Channel {
        Channel::from_shared(format!("http://{}", self.grpc))
            .unwrap()
            .connect()
            .await
            .expect("the server accepts connections")
    }

    pub(crate) async fn client(&self) -> RateLimitServiceClient<Channel> {
        RateLimitServiceClient::new(self.channel().await)
    }

    pub(crate) async fn ask_to_stop(&self, stop: Stop) {
        self.stop
            .send(stop)
            .await
            .expect("the server takes wishes to stop");
    }

    /// Waits for the end of a server that was asked to stop.
    pub(crate) async fn ended(self) -> Result<(), ServerError> {
        self.running.await.expect("the server does not panic")
    }
}
