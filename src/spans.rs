//! Spans of calls, sent over OTLP: one for each call and, below it, one for its decision, as envoyproxy/ratelimit sends them.
//!
//! Where they go is said by the standard variables, `OTEL_EXPORTER_OTLP_ENDPOINT` and so on. They are handed to a thread that
//! sends them in batches; when that cannot keep up they are lost, and calls do not wait.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use http::HeaderMap;
use opentelemetry::propagation::{Extractor, TextMapPropagator as _};
use opentelemetry::trace::{
    Span as _, SpanContext, SpanId, SpanKind, Status as SpanStatus, TraceContextExt as _, TraceFlags,
    TraceId, TraceState, Tracer as _, TracerProvider as _,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{self, Sampler, SdkTracer, SdkTracerProvider, SpanData};
use thiserror::Error;
use tonic::Code;
use tracing::warn;

use crate::rls::{SERVICE_NAME, json};

/// How spans are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// Protobuf over HTTP.
    Http,
    /// gRPC.
    Grpc,
}

/// Which spans are sent, and by whom.
#[derive(Debug, Clone)]
pub struct SpansConfig {
    /// How.
    pub protocol: Protocol,
    /// `service.name`.
    pub service_name: String,
    /// `service.namespace`.
    pub service_namespace: String,
    /// `service.instance.id`; by chance if it is empty.
    pub service_instance_id: String,
    /// The share of traces that is sent, from 0 to 1, of those that start here. Others do as their caller says.
    pub sampling_rate: f64,
}

/// Spans cannot be sent.
#[derive(Debug, Error)]
#[error("cannot send spans")]
pub struct SpansError(#[from] ExporterBuildError);

/// Sends spans.
#[derive(Debug)]
pub struct Spans {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// What became of a call.
pub(crate) struct CallSpan<'a> {
    /// Where its caller was, see [`Spans::caller`].
    pub(crate) caller: &'a Context,
    /// The request as it came over the wire; `None` if there was none.
    pub(crate) request: Option<&'a [u8]>,
    pub(crate) code: Code,
    pub(crate) start: SystemTime,
    pub(crate) end: SystemTime,
}

impl Spans {
    /// Starts the thread that sends. To be called within a runtime.
    pub fn start(config: &SpansConfig) -> Result<Self, SpansError> {
        let exporter = match config.protocol {
            Protocol::Http => {
                // What has none of its own to name takes it from here.
                let _ = rustls::crypto::ring::default_provider().install_default();
                let builder = SpanExporter::builder().with_http();
                // Whichever `OTEL_EXPORTER_OTLP_PROTOCOL` names for other programs.
                builder
                    .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
                    .build()?
            }
            Protocol::Grpc => SpanExporter::builder().with_tonic().build()?,
        };
        let resource = Resource::builder()
            .with_service_name(config.service_name.clone())
            .with_attributes([
                KeyValue::new("service.namespace", config.service_namespace.clone()),
                KeyValue::new("service.instance.id", config.instance_id()),
            ])
            .build();
        let sampler = Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(config.sampling_rate)));
        let provider = SdkTracerProvider::builder()
            .with_batch_exporter(LoggedExporter {
                exporter,
                is_failing: AtomicBool::new(false),
            })
            .with_sampler(sampler)
            .with_resource(resource)
            .build();
        let tracer = provider.tracer("tollgate");
        Ok(Spans { provider, tracer })
    }

    /// Where the caller is, by the headers that came with a call: those of W3C, or of B3.
    pub(crate) fn caller(headers: &HeaderMap) -> Context {
        let headers = Headers(headers);
        let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &headers);
        if context.span().span_context().is_valid() {
            return context;
        }
        match b3(&headers) {
            Some(caller) => context.with_remote_span_context(caller),
            None => context,
        }
    }

    /// Hands on the spans of a call.
    pub(crate) fn send(&self, call: &CallSpan<'_>) {
        let builder = self
            .tracer
            .span_builder(format!("{SERVICE_NAME}/ShouldRateLimit"))
            .with_kind(SpanKind::Server)
            .with_start_time(call.start);
        let mut span = self.tracer.build_with_context(builder, call.caller);
        if !span.is_recording() {
            return;
        }
        span.set_attributes([
            KeyValue::new("rpc.system", "grpc"),
            KeyValue::new("rpc.service", SERVICE_NAME),
            KeyValue::new("rpc.method", "ShouldRateLimit"),
            KeyValue::new("rpc.grpc.status_code", call.code as i64),
        ]);
        if call.code != Code::Ok {
            span.set_status(SpanStatus::error(call.code.description()));
        }
        if let Some(request) = call.request {
            let below = call.caller.with_remote_span_context(span.span_context().clone());
            let builder = self
                .tracer
                .span_builder("ShouldRateLimit Execution")
                .with_start_time(call.start)
                .with_attributes(json::request_text(request).into_iter().flat_map(|text| {
                    [
                        KeyValue::new("domain", text.domain),
                        KeyValue::new("request string", text.json),
                    ]
                }));
            let mut decision = self.tracer.build_with_context(builder, &below);
            decision.end_with_timestamp(call.end);
        }
        span.end_with_timestamp(call.end);
    }

    /// Sends what is left. Blocks, for some seconds at most.
    pub(crate) fn stop(&self) {
        if let Err(error) = self.provider.shutdown() {
            warn!(%error, "the last spans could not be sent: {error}");
        }
    }
}

/// An exporter that logs when spans can no longer be sent, and when they can again.
#[derive(Debug)]
struct LoggedExporter {
    exporter: SpanExporter,
    /// Whether the last batch could not be sent.
    is_failing: AtomicBool,
}

impl trace::SpanExporter for LoggedExporter {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let sent = self.exporter.export(batch).await;
        let was_failing = self.is_failing.swap(sent.is_err(), Ordering::Relaxed);
        match &sent {
            Err(error) if !was_failing => {
                warn!(%error, "spans cannot be sent, and are lost until they can: {error}");
            }
            Ok(()) if was_failing => warn!("spans are sent again"),
            _ => {}
        }
        sent
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.exporter.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

impl SpansConfig {
    fn instance_id(&self) -> String {
        if self.service_instance_id.is_empty() {
            uuid::Uuid::new_v4().to_string()
        } else {
            self.service_instance_id.clone()
        }
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

/// The caller as Zipkin's headers have it, in one or in several. See <https://github.com/openzipkin/b3-propagation>.
fn b3(headers: &Headers<'_>) -> Option<SpanContext> {
    let (trace, span, sampled) = match headers.get("b3") {
        Some(one) => {
            let mut parts = one.split('-');
            (parts.next()?, parts.next()?, parts.next())
        }
        None => (
            headers.get("x-b3-traceid")?,
            headers.get("x-b3-spanid")?,
            headers
                .get("x-b3-flags")
                .filter(|flags| *flags == "1")
                .or_else(|| headers.get("x-b3-sampled")),
        ),
    };
    let flags = match sampled {
        Some("1" | "d" | "true") => TraceFlags::SAMPLED,
        _ => TraceFlags::default(),
    };
    let caller = SpanContext::new(
        TraceId::from_hex(trace).ok()?,
        SpanId::from_hex(span).ok()?,
        flags,
        true,
        TraceState::default(),
    );
    caller.is_valid().then_some(caller)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caller_is_found_in_the_headers_of_w3c_and_b3() {
        #[track_caller]
        fn test(headers: &[(&'static str, &'static str)], expected: Option<bool>) {
            let headers: HeaderMap = headers
                .iter()
                .map(|(name, value)| {
                    (
                        http::HeaderName::from_static(name),
                        http::HeaderValue::from_static(value),
                    )
                })
                .collect();
            let caller = Spans::caller(&headers);
            let caller = caller.span().span_context().clone();
            assert_eq!(caller.is_valid().then(|| caller.is_sampled()), expected);
            if caller.is_valid() {
                assert_eq!(caller.trace_id().to_string(), "0af7651916cd43dd8448eb211c80319c");
                assert_eq!(caller.span_id().to_string(), "b7ad6b7169203331");
            }
        }
        let (trace, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        test(&[], None);
        test(
            &[(
                "traceparent",
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            )],
            Some(true),
        );
        test(
            &[(
                "traceparent",
                "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00",
            )],
            Some(false),
        );
        test(
            &[("b3", "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-1")],
            Some(true),
        );
        test(
            &[("b3", "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331")],
            Some(false),
        );
        test(&[("b3", "0")], None);
        let with = |name, value| [("x-b3-traceid", trace), ("x-b3-spanid", span), (name, value)];
        test(&with("x-b3-sampled", "1"), Some(true));
        test(&with("x-b3-sampled", "0"), Some(false));
        test(&with("x-b3-flags", "1"), Some(true));
        test(&[("x-b3-traceid", trace)], None);
        test(&[("x-b3-traceid", "nonsense"), ("x-b3-spanid", span)], None);
    }
}
