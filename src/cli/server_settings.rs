//! The settings of the ports, and of the server's end.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use nix::sys::resource::{Resource, getrlimit};
use rustls::pki_types::ServerName;
use tracing::warn;

use super::stats_settings::StatsSettings;
use super::tracing_settings::TracingSettings;
use super::values;
use crate::config::{ConnectionAge, GrpcConfig, Listen, ServerConfig, SnapshotConfig};
use crate::tls::TlsConfig;

/// How many connections the gRPC port takes at most.
const MOST_CONNECTIONS: usize = 100_000;

/// How often it is looked whether files have changed: some system calls each time.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// Where the server listens and how it ends.
#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
pub(super) struct ServerSettings {
    /// Address of the gRPC port
    #[arg(long, env, value_name = "ADDRESS", default_value = "0.0.0.0")]
    grpc_host: String,
    /// gRPC port; 0 takes a free one
    #[arg(long, env, value_name = "PORT", value_parser = values::port, default_value = "8081")]
    grpc_port: u16,
    /// Serve gRPC on this Unix socket instead of the port
    #[arg(long, env, value_name = "PATH", default_value = "", hide_default_value = true, value_parser = values::path)]
    grpc_uds: values::MaybePath,
    /// After this time, give or take a tenth, a gRPC client is told to go on with a new connection; 0 is never
    #[arg(long, env, value_name = "DURATION", value_parser = values::duration, default_value = "24h")]
    grpc_max_connection_age: Duration,
    /// The calls of such a connection then have this time to finish
    #[arg(long, env, value_name = "DURATION", value_parser = values::duration, default_value = "1h")]
    grpc_max_connection_age_grace: Duration,
    /// How many calls may be under way at a time: those whose request has still to arrive, and streams. More are refused with
    /// UNAVAILABLE
    #[arg(
        long,
        env = "TOLLGATE_MAX_CALLS_IN_FLIGHT",
        value_name = "CALLS",
        default_value = "10000"
    )]
    max_calls_in_flight: u64,
    /// Address of the HTTP port
    #[arg(long, env, value_name = "ADDRESS", default_value = "0.0.0.0")]
    host: String,
    /// HTTP port; 0 takes a free one
    #[arg(long, env, value_name = "PORT", value_parser = values::port, default_value = "8080")]
    port: u16,
    /// Address of the debug port
    #[arg(long, env, value_name = "ADDRESS", default_value = "0.0.0.0")]
    debug_host: String,
    /// Debug port; 0 takes a free one
    #[arg(long, env, value_name = "PORT", value_parser = values::port, default_value = "6070")]
    debug_port: u16,
    /// Want no traffic while there are no rules
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    healthy_with_at_least_one_config_loaded: bool,
    /// After SIGTERM: how long to go on serving, not ready, while clients learn that this server goes away
    #[arg(long, env = "TOLLGATE_SHUTDOWN_LINGER", value_name = "DURATION", value_parser = values::duration,
          default_value = "5s")]
    shutdown_linger: Duration,
    /// Then: how long the calls under way have to finish
    #[arg(long, env = "TOLLGATE_SHUTDOWN_GRACE", value_name = "DURATION", value_parser = values::duration,
          default_value = "10s")]
    shutdown_grace: Duration,
    /// Keep the counters over a restart in this file: it is written at the end and every so often, and read at the start
    #[arg(long, env = "TOLLGATE_SNAPSHOT", value_name = "PATH")]
    snapshot: Option<PathBuf>,
    /// How often the snapshot is written
    #[arg(long, env = "TOLLGATE_SNAPSHOT_PERIOD", value_name = "DURATION", value_parser = values::period,
          default_value = "10s")]
    snapshot_period: Duration,
    #[command(flatten)]
    tls: TlsSettings,
    #[command(flatten)]
    stats: StatsSettings,
    #[command(flatten)]
    tracing: TracingSettings,
}

impl ServerSettings {
    pub(super) fn to_config(&self) -> Result<ServerConfig, String> {
        let listen = match &self.grpc_uds.0 {
            Some(path) => Listen::Unix(path.clone()),
            None => tcp(&self.grpc_host, self.grpc_port),
        };
        Ok(ServerConfig {
            grpc: GrpcConfig {
                listen,
                tls: self.tls.of_grpc()?,
                max_connections: most_connections(),
                max_calls_in_flight: self.max_calls_in_flight,
                max_connection_age: (!self.grpc_max_connection_age.is_zero()).then_some(ConnectionAge {
                    most: self.grpc_max_connection_age,
                    grace: self.grpc_max_connection_age_grace,
                }),
            },
            http: tcp(&self.host, self.port),
            http_tls: self.tls.of_http()?,
            debug: Some(tcp(&self.debug_host, self.debug_port)),
            prometheus: self.stats.prometheus(),
            prometheus_names: Arc::new(self.stats.prometheus_names()),
            extra_tags: self.stats.tags(),
            statsd: self.stats.statsd()?,
            spans: self.tracing.to_config(),
            look_interval: LOOK_INTERVAL,
            shutdown_linger: self.shutdown_linger,
            shutdown_grace: self.shutdown_grace,
            snapshot: self.snapshot.clone().map(|path| SnapshotConfig {
                path,
                period: self.snapshot_period,
            }),
        })
    }

    pub(super) fn needs_rules(&self) -> bool {
        self.healthy_with_at_least_one_config_loaded
    }
}

/// As many as there are file descriptors, but for those that the HTTP ports, files and the log need.
fn most_connections() -> usize {
    const OTHERS: u64 = 1_200;
    let most = getrlimit(Resource::RLIMIT_NOFILE).map_or(u64::MAX, |(most, _)| most);
    usize::try_from(most.saturating_sub(OTHERS).max(most / 2))
        .unwrap_or(MOST_CONNECTIONS)
        .min(MOST_CONNECTIONS)
}

/// TLS of the gRPC and the HTTP port.
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS")]
struct TlsSettings {
    /// Serve gRPC with TLS
    #[arg(long, env, value_name = "BOOL", value_parser = values::boolean, default_value = "false",
          num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    grpc_server_use_tls: bool,
    /// The server's certificate and those between it and the authority, in PEM
    #[arg(long, env, value_name = "PATH", default_value = "", hide_default_value = true, value_parser = values::path)]
    grpc_server_tls_cert: values::MaybePath,
    /// Its private key, in PEM
    #[arg(long, env, value_name = "PATH", default_value = "", hide_default_value = true, value_parser = values::path)]
    grpc_server_tls_key: values::MaybePath,
    /// Ask clients for a certificate of one of these authorities, in PEM
    #[arg(long, env, value_name = "PATH", default_value = "", hide_default_value = true, value_parser = values::path)]
    grpc_client_tls_cacert: values::MaybePath,
    /// The same, as Envoy Gateway calls it; used if the other is not set
    #[arg(long, env, value_name = "PATH", default_value = "", hide_default_value = true, value_parser = values::path)]
    grpc_server_tls_ca_cert: values::MaybePath,
    /// The DNS name for which the certificates of clients must be valid
    #[arg(long, env, value_name = "NAME", default_value = "", hide_default_value = true)]
    grpc_client_tls_san: String,
    /// Serve the HTTP port with TLS: the server's certificate and those between it and the authority, in PEM
    #[arg(
        long,
        env = "TOLLGATE_HTTP_TLS_CERT",
        value_name = "PATH",
        requires = "http_tls_key"
    )]
    http_tls_cert: Option<PathBuf>,
    /// Its private key, in PEM
    #[arg(
        long,
        env = "TOLLGATE_HTTP_TLS_KEY",
        value_name = "PATH",
        requires = "http_tls_cert"
    )]
    http_tls_key: Option<PathBuf>,
}

impl TlsSettings {
    fn of_grpc(&self) -> Result<Option<TlsConfig>, String> {
        if !self.grpc_server_use_tls {
            let asks_for_clients =
                self.grpc_client_tls_cacert.0.is_some() || !self.grpc_client_tls_san.is_empty();
            if asks_for_clients || self.grpc_server_tls_cert.0.is_some() {
                warn!(
                    "certificates are set for gRPC, but GRPC_SERVER_USE_TLS is off: gRPC is served without TLS"
                );
            }
            return Ok(None);
        }
        let needed = |path: &values::MaybePath, variable: &str| {
            let missing =
                || format!("GRPC_SERVER_USE_TLS is on, but {variable} does not say where the file is");
            path.0.clone().ok_or_else(missing)
        };
        let authority = self.grpc_client_tls_cacert.0.as_ref();
        let authority = authority.or(self.grpc_server_tls_ca_cert.0.as_ref());
        let name = self.grpc_client_tls_san.as_str();
        if !name.is_empty() && authority.is_none() {
            return Err("GRPC_CLIENT_TLS_SAN is set, but not GRPC_CLIENT_TLS_CACERT: no client is asked for a certificate".into());
        }
        if self.grpc_client_tls_cacert.0.is_none() && authority.is_some() {
            // With envoyproxy/ratelimit it has no effect.
            warn!("gRPC clients must show a certificate: GRPC_SERVER_TLS_CA_CERT is set");
        }
        let client_name = (!name.is_empty()).then(|| ServerName::try_from(name.to_owned()));
        Ok(Some(TlsConfig {
            certificate: needed(&self.grpc_server_tls_cert, "GRPC_SERVER_TLS_CERT")?,
            key: needed(&self.grpc_server_tls_key, "GRPC_SERVER_TLS_KEY")?,
            client_authority: authority.cloned(),
            client_name: client_name
                .transpose()
                .map_err(|_| format!("GRPC_CLIENT_TLS_SAN is no DNS name: {name}"))?,
            protocols: &[b"h2"],
            named_by: "GRPC_SERVER_TLS_CERT, GRPC_SERVER_TLS_KEY, GRPC_CLIENT_TLS_CACERT or GRPC_SERVER_TLS_CA_CERT",
        }))
    }

    fn of_http(&self) -> Result<Option<TlsConfig>, String> {
        let (Some(certificate), Some(key)) = (&self.http_tls_cert, &self.http_tls_key) else {
            return Ok(None);
        };
        Ok(Some(TlsConfig {
            certificate: certificate.clone(),
            key: key.clone(),
            client_authority: None,
            client_name: None,
            protocols: &[b"h2", b"http/1.1"],
            named_by: "TOLLGATE_HTTP_TLS_CERT, TOLLGATE_HTTP_TLS_KEY",
        }))
    }
}

/// An empty address means every address, as in Go; an IPv6 address may stand in brackets.
pub(super) fn tcp(host: &str, port: u16) -> Listen {
    let bare = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    let host = if bare.is_empty() { "0.0.0.0" } else { bare };
    Listen::Tcp {
        host: host.to_owned(),
        port,
    }
}
