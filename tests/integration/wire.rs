//! The server over its ports.

use std::time::Duration;

use bytes::Bytes;
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use prost::Message as _;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorProto};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tollgate::config::Listen;
use tollgate::limiter::{Limiter, LimiterConfig};
use tollgate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tollgate::server::Server;
use tollgate::shutdown::Stop;
use tonic::Code;
use tonic::transport::Channel;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use crate::support::{
    T, TestServer, brief, http, parts, request, rules, server_config, try_http, try_http_with_head,
    wait_until,
};

const RULES: &str = "
domain: d
descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: uri, rate_limit: {unit: hour, requests_per_unit: 2}}
";

/// What health can be asked for.
const NAMES: [&str; 3] = ["", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService"];

fn health_of(service: &str) -> HealthCheckRequest {
    HealthCheckRequest {
        service: service.into(),
    }
}

/// A server that lingers for an hour, unless it is told twice or to end soon.
async fn lingering() -> TestServer {
    let limiter = Limiter::new(LimiterConfig::default());
    limiter.set_matcher(rules(RULES));
    TestServer::start_with(limiter, Duration::from_secs(3_600)).await
}

#[tokio::test]
async fn health_is_told_under_every_name_that_is_asked() {
    let server = TestServer::start(RULES).await;
    let mut health = HealthClient::new(server.channel().await);
    for service in NAMES {
        let answer = health.check(health_of(service)).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service}");
    }
    let unknown = health.check(health_of("rate-limit")).await.unwrap_err();
    assert_eq!(unknown.code(), Code::NotFound);
}

#[tokio::test]
async fn reflection_shows_the_official_strings() {
    let server = TestServer::start(RULES).await;
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::FileContainingSymbol(
            "envoy.extensions.common.ratelimit.v3.RateLimitDescriptor".into(),
        )),
    };
    let answer = ServerReflectionClient::new(server.channel().await)
        .server_reflection_info(tokio_stream::once(ask))
        .await
        .unwrap()
        .into_inner()
        .next()
        .await
        .unwrap()
        .unwrap();
    let Some(MessageResponse::FileDescriptorResponse(files)) = answer.message_response else {
        panic!("{answer:?}");
    };
    let file = FileDescriptorProto::decode(files.file_descriptor_proto[0].as_slice()).unwrap();
    let named = |messages: &[DescriptorProto], name: &str| {
        messages
            .iter()
            .find(|message| message.name() == name)
            .unwrap()
            .clone()
    };
    let entry = named(
        &named(&file.message_type, "RateLimitDescriptor").nested_type,
        "Entry",
    );
    assert!(
        entry.field.iter().all(|field| field.r#type() == Type::String),
        "{entry:?}"
    );
}

/// An HTTP/2 client that sends what a test wants, frame by frame.
struct RawClient(SendRequest<Bytes>);

/// A call of a [`RawClient`].
struct RawCall {
    answer: ResponseFuture,
    body: SendStream<Bytes>,
}

impl RawClient {
    async fn new(server: &TestServer) -> Self {
        let stream = TcpStream::connect(server.grpc).await.unwrap();
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        RawClient(client)
    }

    /// Sends the headers of a call.
    async fn call(&self, headers: &[(&'static str, &str)]) -> RawCall {
        let mut request =
            http::Request::post("http://t/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit")
                .header("content-type", "application/grpc")
                .header("te", "trailers");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let mut client = self.0.clone().ready().await.unwrap();
        let (answer, body) = client.send_request(request.body(()).unwrap(), false).unwrap();
        RawCall { answer, body }
    }

    /// Makes a call and waits for its answer: what was sent before it has been taken in as well then.
    async fn settle(&self) {
        let mut call = self.call(&[]).await;
        call.send(&framed(&request("d", &["no=rule"])), true);
        assert_eq!(call.status().await.0, "0");
    }
}

impl RawCall {
    fn send(&mut self, bytes: &[u8], is_last: bool) {
        self.body
            .send_data(Bytes::copy_from_slice(bytes), is_last)
            .unwrap();
    }

    /// `grpc-status` and `grpc-message`, from the headers or the trailers.
    async fn status(self) -> (String, String) {
        let (head, mut body) = self.answer.await.unwrap().into_parts();
        let headers = if head.headers.contains_key("grpc-status") {
            head.headers
        } else {
            while let Some(part) = body.data().await {
                let part = part.unwrap().len();
                body.flow_control().release_capacity(part).unwrap();
            }
            body.trailers().await.unwrap().unwrap()
        };
        let text = |name| {
            let value = headers.get(name).map(|value| value.to_str().unwrap());
            value.unwrap_or_default().to_owned()
        };
        (text("grpc-status"), text("grpc-message"))
    }
}

fn framed(request: &RateLimitRequest) -> Vec<u8> {
    let message = request.encode_to_vec();
    let length = u32::try_from(message.len()).unwrap();
    [&[0], length.to_be_bytes().as_slice(), &message].concat()
}

#[tokio::test]
async fn a_caller_who_has_given_up_is_not_charged() {
    let server = TestServer::start(RULES).await;
    let client = RawClient::new(&server).await;
    let mut late = client.call(&[("grpc-timeout", "20m")]).await;
    let mut in_time = client.call(&[("grpc-timeout", "21m")]).await;
    let mut without_time = client.call(&[("grpc-timeout", "0m")]).await;
    let message = framed(&request("d", &["k=v"]));
    without_time.send(&message, true);
    assert_eq!(without_time.status().await.0, "4");
    server.set_time(Duration::from_millis(T * 1_000 + 20));
    late.send(&message, true);
    let status = late.status().await;
    assert_eq!(
        status,
        (
            "4".into(),
            "the%20deadline%20passed%20before%20the%20decision;%20nothing%20was%20charged".into()
        )
    );
    assert!(server.limiter.store().is_empty());
    in_time.send(&message, true);
    assert_eq!(in_time.status().await.0, "0");
    assert_eq!(server.limiter.store().len(), 1);
}

#[tokio::test]
async fn a_request_may_come_in_pieces() {
    let server = TestServer::start(RULES).await;
    let client = RawClient::new(&server).await;
    let message = framed(&request("d", &["k=v"]));
    let mut call = client.call(&[]).await;
    for byte in &message {
        call.send(&[*byte], false);
        client.settle().await;
    }
    assert!(server.limiter.store().is_empty());
    call.send(&[], true);
    assert_eq!(call.status().await.0, "0");
    assert_eq!(server.limiter.store().len(), 1);
}

#[tokio::test]
async fn what_is_no_message_is_refused_without_a_charge() {
    let server = TestServer::start(RULES).await;
    let client = RawClient::new(&server).await;
    let message = framed(&request("d", &["k=v"]));
    let with_first = |first: u8| [&[first], &message[1..]].concat();
    let damaged = [0, 0, 0, 0, 2, 0x0a, 9];
    for (sent, code) in [
        (Vec::new(), "13"),
        (message[..3].to_vec(), "13"),
        (message[..message.len() - 1].to_vec(), "13"),
        ([message.clone(), message.clone()].concat(), "13"),
        (with_first(1), "12"),
        (with_first(7), "13"),
        (damaged.to_vec(), "13"),
        // It says that it has more than 4 MiB, and is not waited for.
        (vec![0, 0, 64, 0, 1], "8"),
    ] {
        let mut call = client.call(&[]).await;
        call.send(&sent, code != "8");
        assert_eq!(call.status().await.0, code, "{sent:?}");
    }
    assert!(server.limiter.store().is_empty());
}

#[tokio::test]
async fn a_call_that_is_taken_back_is_forgotten() {
    let server = TestServer::start(RULES).await;
    let client = RawClient::new(&server).await;
    let mut call = client.call(&[]).await;
    call.send(&framed(&request("d", &["k=v"]))[..7], false);
    client.settle().await;
    call.body.send_reset(h2::Reason::CANCEL);
    client.settle().await;
    assert!(server.limiter.store().is_empty());
}

#[tokio::test]
async fn calls_under_way_are_bounded_and_others_are_still_answered() {
    let mut config = server_config();
    config.grpc.max_calls_in_flight = 2;
    let limiter = Limiter::new(LimiterConfig::default());
    limiter.set_matcher(rules(RULES));
    let server = TestServer::start_parts(config, parts(limiter)).await;
    let (client, other) = (RawClient::new(&server).await, RawClient::new(&server).await);
    let mut first = client.call(&[]).await;
    let second = client.call(&[]).await;
    client.settle().await;
    let (code, message) = other.call(&[]).await.status().await;
    assert_eq!(
        (code.as_str(), message.as_str()),
        ("14", "too%20many%20calls%20are%20under%20way")
    );
    other.settle().await;
    first.send(&framed(&request("d", &["k=v"])), true);
    assert_eq!(first.status().await.0, "0");
    drop(second);
    client.settle().await;
    let mut third = other.call(&[]).await;
    other.settle().await;
    third.send(&framed(&request("d", &["k=v"])), true);
    assert_eq!(third.status().await.0, "0");
    let page = http(server.http, "GET", "/metrics", "").await.1;
    assert!(page.contains("tollgate_shed_calls_total 1\n"), "{page}");
}

#[tokio::test]
async fn other_methods_are_unknown() {
    let server = TestServer::start(RULES).await;
    let mut client = RawClient::new(&server).await.0.ready().await.unwrap();
    let request = http::Request::post("http://t/envoy.service.ratelimit.v3.RateLimitService/Else")
        .header("content-type", "application/grpc");
    let (answer, _) = client.send_request(request.body(()).unwrap(), true).unwrap();
    assert_eq!(answer.await.unwrap().headers()["grpc-status"], "12");
}

#[tokio::test]
async fn requests_without_a_question_are_invalid() {
    let server = TestServer::start(RULES).await;
    let mut client = server.client().await;
    for (request, message) in [
        (request("", &["k=v"]), "rate limit domain must not be empty"),
        (request("d", &[]), "rate limit descriptor list must not be empty"),
    ] {
        let status = client.should_rate_limit(request).await.unwrap_err();
        assert_eq!(
            (status.code(), status.message()),
            (Code::InvalidArgument, message)
        );
    }
}

#[tokio::test]
async fn without_rules_there_is_no_decision() {
    let server = TestServer::start_with(Limiter::new(LimiterConfig::default()), Duration::ZERO).await;
    let status = server
        .client()
        .await
        .should_rate_limit(request("d", &["k=v"]))
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    let json = r#"{"domain": "d", "descriptors": [{}]}"#;
    assert_eq!(http(server.http, "POST", "/json", json).await.0, 400);
}

#[tokio::test]
async fn json_is_answered_with_the_status_of_the_decision() {
    let server = TestServer::start(RULES).await;
    let json =
        r#"{"domain": "d", "descriptors": [{"entries": [{"key": "k", "value": "v"}]}], "hits_addend": "2"}"#;
    let (status, body) = http(server.http, "POST", "/json", json).await;
    assert_eq!(status, 200);
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["overallCode"], "OK");
    assert_eq!(body["statuses"][0]["durationUntilReset"], "2800s");
    let (status, body) = http(server.http, "PUT", "/json", json).await;
    assert_eq!(status, 429);
    assert!(body.contains("OVER_LIMIT"), "{body}");
    for bad in ["", "{", r#"{"domian": "d"}"#, r#"{"domain": "d"}"#, "[]"] {
        assert_eq!(
            http(server.http, "POST", "/json", bad).await,
            (400, "Bad Request\n".into()),
            "{bad}"
        );
    }
    for (bad, reason) in [
        (r#"{"domian": "d"}"#, "unrecognized field name 'domian'"),
        (r#"{"domain": "d"}"#, "descriptor"),
    ] {
        let (head, _) = try_http_with_head(server.http, "POST", "/json", bad)
            .await
            .unwrap();
        let said = head.split("x-tollgate-reason: ").nth(1).unwrap();
        assert!(said.lines().next().unwrap().contains(reason), "{head}");
    }
    let too_large = " ".repeat(256 * 1024 + 1);
    assert_eq!(http(server.http, "POST", "/json", &too_large).await.0, 400);
    let descriptors = ["{}"; 1_001].join(",");
    let too_many = format!(r#"{{"domain": "d", "descriptors": [{descriptors}]}}"#);
    assert_eq!(http(server.http, "POST", "/json", &too_many).await.0, 400);
    // A window of 20,000 years would end later than a Duration can say.
    let limit = r#"{"domain": "d", "descriptors": [{"limit": {"unit": "YEAR", "unitMultiplier": 20000, "requestsPerUnit": 1}}]}"#;
    let (status, body) = http(server.http, "POST", "/json", limit).await;
    assert_eq!(status, 200);
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert!(body["statuses"][0]["durationUntilReset"].is_string(), "{body}");
    assert_eq!(http(server.http, "GET", "/nothing", "").await.0, 404);
    assert_eq!(http(server.http, "HEAD", "/healthcheck", "").await.0, 200);
}

#[tokio::test]
async fn who_asks_the_wrong_port_or_path_learns_of_it_and_harms_nobody() {
    let server = TestServer::start(RULES).await;
    let (status, hint) = http(server.http, "GET", "/", "").await;
    assert_eq!((status, hint.lines().count()), (404, 1), "{hint}");
    assert!(hint.contains("/json"), "{hint}");
    assert_eq!(http(server.http, "GET", "/json", "").await.0, 400);
    // HTTP/1.1 where gRPC is spoken, and the other way round.
    assert_eq!(try_http(server.grpc, "GET", "/", "").await, None);
    let endpoint = Channel::from_shared(format!("http://{}", server.http)).unwrap();
    let mut client = RateLimitServiceClient::new(endpoint.connect_lazy());
    client
        .should_rate_limit(request("d", &["k=v"]))
        .await
        .unwrap_err();
    let mut client = server.client().await;
    let answer = client.should_rate_limit(request("d", &["k=v"])).await.unwrap();
    assert_eq!(brief(answer.get_ref()), "OK: OK1");
    assert_eq!(http(server.http, "GET", "/healthcheck", "").await.0, 200);
}

#[tokio::test]
async fn it_goes_on_serving_after_it_has_said_that_it_stops() {
    let server = lingering().await;
    let mut client = server.client().await;
    let mut health = HealthClient::new(server.channel().await);
    let request_health = HealthCheckRequest {
        service: String::new(),
    };
    let mut watch = health.watch(request_health).await.unwrap().into_inner();
    let first = watch.next().await.unwrap().unwrap();
    assert_eq!(first.status(), ServingStatus::Serving);
    assert_eq!(
        http(server.http, "GET", "/healthcheck", "").await,
        (200, "OK".into())
    );

    server.ask_to_stop(Stop::Gently).await;
    let second = watch.next().await.unwrap().unwrap();
    assert_eq!(second.status(), ServingStatus::NotServing);
    assert_eq!(
        http(server.http, "GET", "/healthcheck", "").await,
        (500, String::new())
    );
    let answer = client.should_rate_limit(request("d", &["k=v"])).await.unwrap();
    assert_eq!(brief(answer.get_ref()), "OK: OK1");
    let mut late = server.client().await;
    let answer = late.should_rate_limit(request("d", &["k=v"])).await.unwrap();
    assert_eq!(brief(answer.get_ref()), "OK: OK0");

    server.ask_to_stop(Stop::Gently).await;
    server.ended().await.unwrap();
}

#[tokio::test]
async fn every_name_is_told_that_it_stops() {
    let server = lingering().await;
    let mut health = HealthClient::new(server.channel().await);
    let mut watches = Vec::new();
    for service in NAMES {
        let mut watch = health.watch(health_of(service)).await.unwrap().into_inner();
        let first = watch.next().await.unwrap().unwrap();
        assert_eq!(first.status(), ServingStatus::Serving, "{service}");
        watches.push((service, watch));
    }
    server.ask_to_stop(Stop::Gently).await;
    for (service, mut watch) in watches {
        let second = watch.next().await.unwrap().unwrap();
        assert_eq!(second.status(), ServingStatus::NotServing, "{service}");
        let checked = health.check(health_of(service)).await.unwrap().into_inner();
        assert_eq!(checked.status(), ServingStatus::NotServing, "{service}");
    }
}

#[tokio::test]
async fn calls_under_way_are_answered_before_it_ends() {
    let server = TestServer::start(RULES).await;
    let (client, address) = (RawClient::new(&server).await, server.grpc);
    let mut calls = Vec::new();
    for _ in 0..20 {
        calls.push(client.call(&[]).await);
    }
    client.settle().await;
    server.ask_to_stop(Stop::Soon).await;
    wait_until("the port to be closed", async || {
        TcpStream::connect(address).await.is_err()
    })
    .await;
    for mut call in calls {
        call.send(&framed(&request("d", &["k=v"])), true);
        assert_eq!(call.status().await.0, "0");
    }
    server.ended().await.unwrap();
}

#[tokio::test]
async fn a_request_with_too_many_parts_is_invalid() {
    let server = TestServer::start(RULES).await;
    let mut client = server.client().await;
    let mut most = request("d", &["k=v"; 1_000]);
    client.should_rate_limit(most.clone()).await.unwrap();
    most.descriptors.push(most.descriptors[0].clone());
    let error = client.should_rate_limit(most).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert_eq!(
        error.message(),
        "a request may have 1000 descriptors, and these 10000 entries together"
    );
}

/// The grace time of [`TestServer`] is longer than a test may take.
#[tokio::test]
async fn it_ends_with_idle_connections_open() {
    let server = lingering().await;
    let mut client = server.client().await;
    client.should_rate_limit(request("d", &["k=v"])).await.unwrap();
    let mut health = HealthClient::new(server.channel().await);
    let watched = HealthCheckRequest {
        service: String::new(),
    };
    let mut watch = health.watch(watched).await.unwrap().into_inner();
    let (_questions, asked) = mpsc::channel(1);
    let mut reflection = ServerReflectionClient::new(server.channel().await);
    let _answers = reflection
        .server_reflection_info(ReceiverStream::new(asked))
        .await
        .unwrap();
    // Whoever says no more than this answers no question whether it is still there.
    let settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00".as_slice();
    let mut silent = Vec::new();
    for (address, opening) in [
        (server.grpc, b"".as_slice()),
        (server.grpc, b"PRI * HTTP/2.0\r\n"),
        (server.grpc, settings),
        (server.http, b""),
    ] {
        let mut connection = TcpStream::connect(address).await.unwrap();
        connection.write_all(opening).await.unwrap();
        silent.push(connection);
    }
    // An answer on a later connection shows that those before were accepted.
    assert_eq!(http(server.http, "GET", "/healthcheck", "").await.0, 200);
    server
        .client()
        .await
        .should_rate_limit(request("d", &["k=v"]))
        .await
        .unwrap();
    server.ask_to_stop(Stop::Soon).await;
    timeout(Duration::from_secs(10), server.ended())
        .await
        .expect("nothing is waited for")
        .unwrap();
    assert!(
        watch
            .any(|status| status.is_ok_and(|status| status.status() == ServingStatus::NotServing))
            .await
    );
    assert!(client.should_rate_limit(request("d", &["k=v"])).await.is_err());
}

#[tokio::test]
async fn a_port_that_is_taken_is_named() {
    let server = TestServer::start(RULES).await;
    let mut config = server_config();
    config.grpc.listen = Listen::Tcp {
        host: "127.0.0.1".into(),
        port: server.grpc.port(),
    };
    let parts = parts(Limiter::new(LimiterConfig::default()));
    let error = Server::bind(config, parts).await.unwrap_err();
    let port = server.grpc.port();
    assert!(
        error
            .to_string()
            .starts_with(&format!("cannot listen on 127.0.0.1 port {port} for gRPC")),
        "{error}"
    );
}
