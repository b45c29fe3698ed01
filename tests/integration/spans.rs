//! Spans of calls, as a collector gets them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::routing::post;
use nix::sys::signal::Signal;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tollgate::proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;
use tonic::transport::Channel;
use tonic::{Code, Request};

use crate::program::Served;
use crate::support::request;

const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
const CALLER: &str = "b7ad6b7169203331";

/// Takes spans over HTTP.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<ExportTraceServiceRequest>>>);

impl Collector {
    /// Where it is.
    async fn start(&self) -> SocketAddr {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let collector = self.clone();
        let take = move |body: Bytes| async move {
            let message = ExportTraceServiceRequest::decode(body).unwrap();
            collector.0.lock().unwrap().push(message);
        };
        let routes = Router::new().route("/v1/traces", post(take));
        tokio::spawn(async { axum::serve(listener, routes).await });
        address
    }

    fn spans(&self) -> Vec<Span> {
        let messages = self.0.lock().unwrap();
        let resources = messages.iter().flat_map(|message| &message.resource_spans);
        resources
            .flat_map(|resource| &resource.scope_spans)
            .flat_map(|scope| scope.spans.clone())
            .collect()
    }

    fn resource(&self) -> HashMap<String, String> {
        let messages = self.0.lock().unwrap();
        let resource = messages[0].resource_spans[0].resource.as_ref().unwrap();
        texts(&resource.attributes)
    }
}

fn texts(attributes: &[KeyValue]) -> HashMap<String, String> {
    let text = |value: &AnyValue| match &value.value {
        Some(any_value::Value::StringValue(text)) => text.clone(),
        Some(any_value::Value::IntValue(number)) => number.to_string(),
        other => panic!("{other:?}"),
    };
    attributes
        .iter()
        .map(|attribute| (attribute.key.clone(), text(attribute.value.as_ref().unwrap())))
        .collect()
}

async fn client(served: &mut Served) -> RateLimitServiceClient<Channel> {
    let address = served.address_of("gRPC");
    RateLimitServiceClient::connect(format!("http://{address}"))
        .await
        .unwrap()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_is_a_span_below_its_callers_and_its_decision_one_below_that() {
    let collector = Collector::default();
    let endpoint = format!("http://{}", collector.start().await);
    let mut served = Served::start_with(
        &["serve", "--debug-port", "0"],
        &[
            ("TRACING_ENABLED", "true"),
            ("TRACING_SERVICE_NAMESPACE", "edge"),
            // That is for other programs.
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", &endpoint),
        ],
    );
    let mut client = client(&mut served).await;
    let traced = |sampled: &str, message| {
        let mut call = Request::new(message);
        let parent = format!("00-{TRACE}-{CALLER}-{sampled}");
        call.metadata_mut().insert("traceparent", parent.parse().unwrap());
        call
    };
    let question = request("shop", &["user=alice"]);
    client
        .should_rate_limit(traced("01", question.clone()))
        .await
        .unwrap();
    client.should_rate_limit(traced("00", question)).await.unwrap();
    let refused = client.should_rate_limit(traced("01", request("", &[]))).await;
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);
    served.signal(Signal::SIGINT);
    assert_eq!(served.exit_code(), Some(0));

    let spans = collector.spans();
    assert!(spans.iter().all(|span| hex(&span.trace_id) == TRACE));
    let (calls, decisions): (Vec<_>, Vec<_>) = spans
        .iter()
        .partition(|span| span.name == "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    assert_eq!((calls.len(), decisions.len()), (2, 2), "{spans:?}");
    assert!(calls.iter().all(|span| hex(&span.parent_span_id) == CALLER));
    let codes: Vec<_> = calls
        .iter()
        .map(|span| texts(&span.attributes)["rpc.grpc.status_code"].clone())
        .collect();
    assert_eq!(codes, ["0", "3"]);
    let decision = decisions[0];
    assert_eq!(decision.name, "ShouldRateLimit Execution");
    assert_eq!(decision.parent_span_id, calls[0].span_id);
    let attributes = texts(&decision.attributes);
    assert_eq!(attributes["domain"], "shop");
    assert!(attributes["request string"].contains("alice"), "{attributes:?}");
    let resource = collector.resource();
    assert_eq!(resource["service.name"], "RateLimit");
    assert_eq!(resource["service.namespace"], "edge");
    assert_eq!(resource["service.instance.id"].len(), 36);
}

#[tokio::test]
async fn spans_that_go_nowhere_hold_up_nothing_and_are_told_of() {
    let mut served = Served::start_with(
        &["serve", "--debug-port", "0"],
        &[
            ("TRACING_ENABLED", "true"),
            ("TRACING_EXPORTER_PROTOCOL", "grpc"),
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9"),
        ],
    );
    let question = request("shop", &["user=alice"]);
    client(&mut served)
        .await
        .should_rate_limit(question)
        .await
        .unwrap();
    served.signal(Signal::SIGINT);
    served.line_with("spans cannot be sent, and are lost until they can");
    assert_eq!(served.exit_code(), Some(0));
}
