//! The server over its ports.

use std::time::Duration;

use prost::Message as _;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorProto};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_stream::StreamExt as _;
use tollgate::config::Listen;
use tollgate::limiter::{Limiter, LimiterConfig};
use tollgate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitService as _;
use tollgate::rls::deadline::Deadline;
use tollgate::server::Server;
use tollgate::shutdown::Stop;
use tonic::{Code, Request};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

use crate::support::{TestLimiter, TestServer, brief, http, parts, request, rules, server_config};

const RULES: &str = "
domain: d
descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: uri, rate_limit: {unit: hour, requests_per_unit: 2}}
";

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
    for service in ["", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService"] {
        let request = HealthCheckRequest {
            service: service.into(),
        };
        let answer = health.check(request).await.unwrap().into_inner();
        assert_eq!(answer.status(), ServingStatus::Serving, "{service}");
    }
    let unknown = HealthCheckRequest {
        service: "else".into(),
    };
    assert_eq!(health.check(unknown).await.unwrap_err().code(), Code::NotFound);
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

/// Without a wire: tonic's client gives up by itself before the server has seen the call.
#[tokio::test]
async fn a_caller_who_has_given_up_is_not_charged() {
    let limiter = TestLimiter::new(RULES);
    let with_timeout = |grpc_timeout: &str| {
        let mut call = Request::new(request("d", &["k=v"]));
        let deadline = Deadline::new(grpc_timeout, limiter.now()).unwrap();
        call.extensions_mut().insert(deadline);
        call
    };
    let (late, in_time) = (with_timeout("20m"), with_timeout("21m"));
    limiter.advance(Duration::from_millis(20));
    let status = limiter.rls.should_rate_limit(late).await.unwrap_err();
    assert_eq!(status.code(), Code::DeadlineExceeded, "{status}");
    assert!(limiter.limiter.store().is_empty());
    let answer = limiter.rls.should_rate_limit(in_time).await.unwrap();
    assert_eq!(brief(answer.get_ref()), "OK: OK1");
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
    let mut silent = Vec::new();
    for (address, opening) in [
        (server.grpc, ""),
        (server.grpc, "PRI * HTTP/2.0\r\n"),
        (server.http, ""),
    ] {
        let mut connection = TcpStream::connect(address).await.unwrap();
        connection.write_all(opening.as_bytes()).await.unwrap();
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
