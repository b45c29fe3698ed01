//! Rules from an xDS server that the tests drive by hand.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use prost::Message as _;
use prost_types::Any;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tollgate::health::Health;
use tollgate::limiter::{Limiter, LimiterConfig};
use tollgate::proto::xds::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use tollgate::proto::xds::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use tollgate::proto::xds::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy,
};
use tollgate::server::{Parts, RulesFrom};
use tollgate::xds::{XdsClient, XdsConfig};
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::support::{TestServer, brief, http, parts, request, server_config};

const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// One stream, as the server sees it.
struct Stream {
    requests: Streaming<DiscoveryRequest>,
    responses: mpsc::Sender<Result<DiscoveryResponse, Status>>,
    /// The header that the client was told to send.
    tenant: Option<String>,
}

impl Stream {
    async fn request(&mut self) -> DiscoveryRequest {
        self.requests
            .message()
            .await
            .unwrap()
            .expect("the client goes on")
    }

    async fn send(&self, version: &str, configs: &[RateLimitConfig]) {
        let resources = configs.iter().map(|config| Any {
            type_url: TYPE_URL.to_owned(),
            value: config.encode_to_vec(),
        });
        let response = DiscoveryResponse {
            version_info: version.to_owned(),
            resources: resources.collect(),
            type_url: TYPE_URL.to_owned(),
            nonce: format!("nonce of {version}"),
        };
        self.responses.send(Ok(response)).await.unwrap();
    }

    /// Sends rules. What the client says to them: version and nonce, and the reason if it does not accept them.
    async fn push(&mut self, version: &str, configs: &[RateLimitConfig]) -> (String, String, Option<String>) {
        self.send(version, configs).await;
        let request = self.request().await;
        let fault = request.error_detail.map(|detail| detail.message);
        (request.version_info, request.response_nonce, fault)
    }
}

struct Service(mpsc::Sender<Stream>);

#[tonic::async_trait]
impl AggregatedDiscoveryService for Service {
    type StreamAggregatedResourcesStream = ReceiverStream<Result<DiscoveryResponse, Status>>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        let tenant = request.metadata().get("x-tenant");
        let tenant = tenant.map(|tenant| tenant.to_str().unwrap().to_owned());
        let (responses, outgoing) = mpsc::channel(4);
        let stream = Stream {
            requests: request.into_inner(),
            responses,
            tenant,
        };
        self.0.send(stream).await.unwrap();
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }
}

/// An xDS server, and the streams that clients open.
struct XdsServer {
    address: SocketAddr,
    streams: Mutex<mpsc::Receiver<Stream>>,
    serving: JoinHandle<()>,
}

impl XdsServer {
    async fn start(address: SocketAddr) -> Self {
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (sender, streams) = mpsc::channel(4);
        let serving = Server::builder()
            .add_service(AggregatedDiscoveryServiceServer::new(Service(sender)))
            .serve_with_incoming(TcpListenerStream::new(listener));
        XdsServer {
            address,
            streams: Mutex::new(streams),
            serving: tokio::spawn(async { serving.await.unwrap() }),
        }
    }

    async fn stream(&self) -> Stream {
        self.streams.lock().await.recv().await.expect("the server runs")
    }
}

fn config(address: SocketAddr) -> XdsConfig {
    XdsConfig {
        server: address.to_string(),
        node_id: "envoy-ratelimit".into(),
        node_metadata: vec![("zone".into(), "a".into())],
        headers: vec![("x-tenant".parse().unwrap(), "blue".parse().unwrap())],
        tls: None,
        initial_backoff: Duration::from_millis(20),
        max_backoff: Duration::from_millis(100),
        max_message_bytes: 4 << 20,
        merge_domains: false,
    }
}

async fn serve(address: SocketAddr) -> TestServer {
    let parts = Parts {
        health: Health::new(true),
        ..parts(Limiter::new(LimiterConfig::default()))
    };
    let client = XdsClient::new(config(address), parts.in_force());
    let parts = Parts {
        rules: Some(RulesFrom::Xds(Box::new(client))),
        ..parts
    };
    TestServer::start_parts(server_config(), parts).await
}

fn rules(domain: &str, unit: i32, limit: u32) -> RateLimitConfig {
    RateLimitConfig {
        name: format!("config of {domain}"),
        domain: domain.into(),
        descriptors: vec![RateLimitDescriptor {
            key: "k".into(),
            rate_limit: Some(RateLimitPolicy {
                unit,
                requests_per_unit: limit,
                ..RateLimitPolicy::default()
            }),
            ..RateLimitDescriptor::default()
        }],
    }
}

const HOUR: i32 = 3;

/// The line of the metric that counts rules that could not be used.
async fn errors(server: &TestServer) -> String {
    let (_, page) = http(server.http, "GET", "/metrics", "").await;
    let mut lines = page.lines();
    let line = lines.find(|line| line.starts_with("ratelimit_service_config_load_error "));
    line.expect("it is always there").to_owned()
}

async fn ask(server: &TestServer, domain: &str, value: &str) -> String {
    let mut client = server.client().await;
    let call = request(domain, &[&format!("k={value}")]);
    match client.should_rate_limit(call).await {
        Ok(answer) => brief(&answer.into_inner()),
        Err(status) => status.message().to_owned(),
    }
}

#[tokio::test]
async fn good_rules_are_accepted_and_bad_ones_refused_with_the_reason() {
    let xds = XdsServer::start(([127, 0, 0, 1], 0).into()).await;
    let server = serve(xds.address).await;
    let mut stream = xds.stream().await;
    let first = stream.request().await;
    let node = first.node.unwrap();
    assert_eq!(
        (node.id.as_str(), stream.tenant.as_deref()),
        ("envoy-ratelimit", Some("blue"))
    );
    assert_eq!(node.metadata.unwrap().fields.len(), 1);
    assert_eq!(first.type_url, TYPE_URL);
    assert_eq!(
        (first.version_info, first.response_nonce),
        (String::new(), String::new())
    );
    assert_eq!(ask(&server, "a", "1").await, "no rate limit configuration loaded");
    assert_eq!(http(server.http, "GET", "/healthcheck", "").await.0, 500);

    let accepted = stream
        .push("1", &[rules("a", HOUR, 5), rules("b", HOUR, 7)])
        .await;
    assert_eq!(accepted, ("1".into(), "nonce of 1".into(), None));
    assert_eq!(ask(&server, "a", "1").await, "OK: OK4");
    assert_eq!(http(server.http, "GET", "/healthcheck", "").await.0, 200);

    let (version, nonce, fault) = stream.push("2", &[rules("a", 0, 5)]).await;
    assert_eq!((version.as_str(), nonce.as_str()), ("1", "nonce of 2"));
    let fault = fault.expect("it is refused");
    assert!(
        fault.contains("config of a") && fault.contains("a.k.rate_limit: unit"),
        "{fault}"
    );
    let (_, _, fault) = stream
        .push("3", &[rules("a", HOUR, 5), rules("a", HOUR, 6)])
        .await;
    assert!(fault.unwrap().contains("duplicate"), "a domain can be named once");
    assert_eq!(ask(&server, "a", "1").await, "OK: OK3");

    // Some servers send again what was refused. It is refused again, in peace, and not counted as another fault.
    let again = [rules("a", HOUR, 5), rules("a", HOUR, 6)];
    let before = errors(&server).await;
    for _ in 0..2 {
        assert!(stream.push("3", &again).await.2.unwrap().contains("duplicate"));
    }
    assert_eq!(errors(&server).await, before);

    // What is missing from a response is gone.
    let accepted = stream.push("4", &[rules("a", HOUR, 10)]).await;
    assert_eq!(accepted, ("4".into(), "nonce of 4".into(), None));
    assert_eq!(ask(&server, "a", "1").await, "OK: OK7");
    assert_eq!(ask(&server, "b", "1").await, "OK: NONE");
    assert_eq!(stream.push("5", &[]).await.2, None);
    assert_eq!(ask(&server, "a", "1").await, "OK: NONE");
    assert_eq!(http(server.http, "GET", "/healthcheck", "").await.0, 500);
}

#[tokio::test]
async fn a_stream_that_breaks_is_opened_again_and_rules_stay() {
    let xds = XdsServer::start(([127, 0, 0, 1], 0).into()).await;
    let server = serve(xds.address).await;
    let mut stream = xds.stream().await;
    stream.request().await;
    stream.push("1", &[rules("a", HOUR, 5)]).await;
    stream
        .responses
        .send(Err(Status::unavailable("gone")))
        .await
        .unwrap();
    drop(stream);
    let mut stream = xds.stream().await;
    let first = stream.request().await;
    assert_eq!(
        (first.version_info.as_str(), first.response_nonce.as_str()),
        ("1", "")
    );
    assert_eq!(ask(&server, "a", "1").await, "OK: OK4");

    // The whole server goes away, and comes back.
    xds.serving.abort();
    drop(stream);
    let _ = xds.serving.await;
    assert_eq!(ask(&server, "a", "1").await, "OK: OK3");
    let xds = XdsServer::start(xds.address).await;
    let mut stream = xds.stream().await;
    stream.request().await;
    stream.push("2", &[rules("a", HOUR, 50)]).await;
    assert_eq!(ask(&server, "a", "1").await, "OK: OK47");
}

#[tokio::test]
async fn who_waits_for_rules_waits_for_the_first_response_even_if_it_is_bad() {
    let xds = XdsServer::start(([127, 0, 0, 1], 0).into()).await;
    let parts = parts(Limiter::new(LimiterConfig::default()));
    let mut client = XdsClient::new(config(xds.address), parts.in_force());
    let waiting = tokio::spawn(async move { client.wait_for_rules().await });
    let mut stream = xds.stream().await;
    stream.request().await;
    assert!(!waiting.is_finished());
    stream.send("1", &[rules("a", 0, 1)]).await;
    waiting.await.unwrap();
    assert!(parts.limiter.matcher().is_none());
}

#[tokio::test]
async fn five_thousand_rules_a_bad_set_and_a_good_one() {
    let xds = XdsServer::start(([127, 0, 0, 1], 0).into()).await;
    let server = Arc::new(serve(xds.address).await);
    let mut stream = xds.stream().await;
    stream.request().await;
    let many = |limit: u32| {
        let mut config = rules("a", HOUR, limit);
        let template = config.descriptors[0].clone();
        config.descriptors = (0..5_000)
            .map(|i| RateLimitDescriptor {
                value: format!("v{i}"),
                ..template.clone()
            })
            .collect();
        config
    };
    assert_eq!(stream.push("1", &[many(5)]).await.2, None);
    assert_eq!(ask(&server, "a", "v4999").await, "OK: OK4");
    let mut bad = many(6);
    bad.descriptors[2_500].key.clear();
    assert!(stream.push("2", &[bad]).await.2.is_some());
    assert_eq!(ask(&server, "a", "v4999").await, "OK: OK3");
    assert_eq!(stream.push("3", &[many(7)]).await.2, None);
    assert_eq!(ask(&server, "a", "v4999").await, "OK: OK4");
}
