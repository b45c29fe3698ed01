//! The settings of spans. Where they are sent is said by the standard variables of OTLP.

use clap::Args;

use super::values;
use crate::spans::{Protocol, SpansConfig};

/// Spans of calls.
#[derive(Debug, Args)]
#[command(next_help_heading = "Tracing")]
pub(super) struct TracingSettings {
    /// Send a span for each call over OTLP, to where `OTEL_EXPORTER_OTLP_ENDPOINT` says
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    tracing_enabled: bool,
    /// How: http or grpc
    #[arg(long, env, value_name = "PROTOCOL", value_parser = values::span_protocol, default_value = "http")]
    tracing_exporter_protocol: Protocol,
    /// The service's name in them
    #[arg(long, env, value_name = "NAME", default_value = "RateLimit")]
    tracing_service_name: String,
    /// The namespace of that name
    #[arg(long, env, value_name = "NAME", default_value = "", hide_default_value = true)]
    tracing_service_namespace: String,
    /// Which instance of the service this is [default: by chance]
    #[arg(long, env, value_name = "ID", default_value = "", hide_default_value = true)]
    tracing_service_instance_id: String,
    /// The share of traces that start here and are sent; others do as their caller says
    #[arg(long, env, value_name = "RATIO", value_parser = values::share, default_value = "1")]
    tracing_sampling_rate: f64,
}

impl TracingSettings {
    pub(super) fn to_config(&self) -> Option<SpansConfig> {
        self.tracing_enabled.then(|| SpansConfig {
            protocol: self.tracing_exporter_protocol,
            service_name: self.tracing_service_name.clone(),
            service_namespace: self.tracing_service_namespace.clone(),
            service_instance_id: self.tracing_service_instance_id.clone(),
            sampling_rate: self.tracing_sampling_rate,
        })
    }
}
