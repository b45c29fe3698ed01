//! The settings of rules that come from an xDS server.

use std::time::Duration;

use clap::Args;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue};

use super::values;
use crate::xds::{XdsConfig, XdsTlsConfig};

/// Where rules come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConfigType {
    File,
    Xds,
}

/// The largest response that gRPC takes if it is not told.
const MESSAGE_BYTES: usize = 4 << 20;

/// Rules from an xDS server.
#[derive(Debug, Args)]
#[command(next_help_heading = "Rules over xDS")]
pub(super) struct XdsSettings {
    /// Where rules come from: FILE or `GRPC_XDS_SOTW`
    #[arg(long, env, value_name = "TYPE", value_parser = values::config_type, default_value = "FILE")]
    config_type: ConfigType,
    /// The xDS server
    #[arg(long, env, value_name = "ADDRESS:PORT", value_parser = values::xds_server, default_value = "localhost:18000")]
    config_grpc_xds_server_url: String,
    /// Who asks
    #[arg(long, env, value_name = "ID", default_value = "default")]
    config_grpc_xds_node_id: String,
    /// What else it is told of who asks: name=value, with commas between them
    #[arg(long, env, value_name = "PAIRS", value_parser = values::equal_pairs, default_value = "", hide_default_value = true)]
    config_grpc_xds_node_metadata: values::Pairs,
    /// Headers of the stream: name:value, with commas between them
    #[arg(long, env, value_name = "PAIRS", value_parser = values::pairs, default_value = "", hide_default_value = true)]
    config_grpc_xds_client_additional_headers: values::Pairs,
    /// The server has TLS
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    config_grpc_xds_server_use_tls: bool,
    /// The certificate to show it, in PEM
    #[arg(long, env, value_name = "PATH", value_parser = values::path, default_value = "", hide_default_value = true)]
    config_grpc_xds_client_tls_cert: values::MaybePath,
    /// Its private key, in PEM
    #[arg(long, env, value_name = "PATH", value_parser = values::path, default_value = "", hide_default_value = true)]
    config_grpc_xds_client_tls_key: values::MaybePath,
    /// The authorities that are trusted, in PEM; else those of the system
    #[arg(long, env, value_name = "PATH", value_parser = values::path, default_value = "", hide_default_value = true)]
    config_grpc_xds_server_tls_cacert: values::MaybePath,
    /// The name in the server's certificate, if it is not that of its address
    #[arg(long, env, value_name = "NAME", default_value = "", hide_default_value = true)]
    config_grpc_xds_server_tls_san: String,
    /// The wait before the first new attempt; doubled with each further one, and up to half more or less
    #[arg(long, env, value_name = "DURATION", value_parser = values::period, default_value = "3s")]
    config_grpc_xds_server_connect_retry_interval: Duration,
    /// The same; if it is set, the other is not used
    #[arg(long, env, value_name = "DURATION", value_parser = values::period)]
    xds_client_backoff_initial_interval: Option<Duration>,
    /// The longest wait
    #[arg(long, env, value_name = "DURATION", value_parser = values::period, default_value = "60s")]
    xds_client_backoff_max_interval: Duration,
    /// The largest response, in bytes; 0 is 4 MiB
    #[arg(long, env, value_name = "BYTES", default_value = "0")]
    xds_client_max_msg_size_in_bytes: usize,
}

impl XdsSettings {
    /// The xDS server, if rules come from one.
    pub(super) fn to_config(&self, merge_domains: bool) -> Result<Option<XdsConfig>, String> {
        if self.config_type == ConfigType::File {
            return Ok(None);
        }
        let headers = self.config_grpc_xds_client_additional_headers.0.iter();
        let headers: Result<Vec<_>, String> = headers
            .map(|(name, value)| {
                let fault = || {
                    format!("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS has no valid header in {name}:{value}")
                };
                let name = name
                    .to_lowercase()
                    .parse::<AsciiMetadataKey>()
                    .map_err(|_| fault())?;
                let value = value.parse::<AsciiMetadataValue>().map_err(|_| fault())?;
                Ok((name, value))
            })
            .collect();
        let retry_interval = self.config_grpc_xds_server_connect_retry_interval;
        let initial_backoff = self.xds_client_backoff_initial_interval.unwrap_or(retry_interval);
        Ok(Some(XdsConfig {
            server: self.config_grpc_xds_server_url.clone(),
            node_id: self.config_grpc_xds_node_id.clone(),
            node_metadata: self.config_grpc_xds_node_metadata.0.clone(),
            headers: headers?,
            tls: self.tls()?,
            initial_backoff,
            max_backoff: self.xds_client_backoff_max_interval.max(initial_backoff),
            max_message_bytes: match self.xds_client_max_msg_size_in_bytes {
                0 => MESSAGE_BYTES,
                bytes => bytes,
            },
            merge_domains,
        }))
    }

    fn tls(&self) -> Result<Option<XdsTlsConfig>, String> {
        if !self.config_grpc_xds_server_use_tls {
            return Ok(None);
        }
        let certificate = self.config_grpc_xds_client_tls_cert.0.clone();
        let identity = match (certificate, self.config_grpc_xds_client_tls_key.0.clone()) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => {
                let pair = "CONFIG_GRPC_XDS_CLIENT_TLS_CERT and CONFIG_GRPC_XDS_CLIENT_TLS_KEY";
                return Err(format!("{pair}: set both of them or none"));
            }
        };
        let name = &self.config_grpc_xds_server_tls_san;
        Ok(Some(XdsTlsConfig {
            identity,
            authority: self.config_grpc_xds_server_tls_cacert.0.clone(),
            server_name: (!name.is_empty()).then(|| name.clone()),
        }))
    }
}
