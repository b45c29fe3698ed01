//! Rules from an xDS server: a state-of-the-world client of the aggregated discovery service.
//!
//! Each response holds all rules that there are. Those that can be used are put in force and acknowledged; those that cannot are
//! refused with the reason, and the last good ones stay. See
//! <https://www.envoyproxy.io/docs/envoy/latest/api-docs/xds_protocol>.

mod resources;

use std::path::PathBuf;
use std::time::Duration;
use std::{fs, io};

use prost_types::value::Kind;
use prost_types::{Struct, Value};
use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{AsciiMetadataKey, AsciiMetadataValue};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Request, Status, Streaming};
use tracing::{debug, warn};

use self::resources::TYPE_URL;
use crate::config::{LoadError, file};
use crate::jitter::jittered;
use crate::proto::xds::envoy::config::core::v3::Node;
use crate::proto::xds::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use crate::proto::xds::envoy::service::discovery::v3::{DiscoveryRequest, DiscoveryResponse};
use crate::proto::xds::google::rpc;
use crate::reload::InForce;

/// How long a connection may take to come about.
const CONNECT_PATIENCE: Duration = Duration::from_secs(10);

/// How often a silent connection is asked whether the server is still there.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(30);

/// By which share waits are longer or shorter.
const JITTER: f64 = 0.5;

/// How long to wait before the same response is refused a second time.
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// Where the xDS server is, and who asks.
#[derive(Debug, Clone)]
pub struct XdsConfig {
    /// `host:port`.
    pub server: String,
    /// Who asks.
    pub node_id: String,
    /// What else is told of who asks.
    pub node_metadata: Vec<(String, String)>,
    /// Sent with the stream.
    pub headers: Vec<(AsciiMetadataKey, AsciiMetadataValue)>,
    /// TLS, if the server has it.
    pub tls: Option<XdsTlsConfig>,
    /// The wait before the first new attempt; doubled with each further one.
    pub initial_backoff: Duration,
    /// The longest wait.
    pub max_backoff: Duration,
    /// The largest response, in bytes.
    pub max_message_bytes: usize,
    /// Several resources may add descriptors to one domain.
    pub merge_domains: bool,
}

/// TLS to the xDS server. Files are read for each connection.
#[derive(Debug, Clone, Default)]
pub struct XdsTlsConfig {
    /// The client's certificate and key, in PEM.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The authorities that are trusted, in PEM; else those of the system.
    pub authority: Option<PathBuf>,
    /// The name in the server's certificate, if it is not that of the host.
    pub server_name: Option<String>,
}

/// Why there is no stream, or no more.
#[derive(Debug, Error)]
enum StreamError {
    #[error("cannot read {}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("cannot connect: {0}")]
    Connect(String),
    #[error("the server does not answer")]
    Late,
    #[error("{}: {}", .0.code(), .0.message())]
    Status(Box<Status>),
    #[error("the server ended the stream")]
    Ended,
}

impl From<Status> for StreamError {
    fn from(status: Status) -> Self {
        StreamError::Status(Box::new(status))
    }
}

impl From<tonic::transport::Error> for StreamError {
    fn from(error: tonic::transport::Error) -> Self {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(error) = source {
            text = format!("{text}: {error}");
            source = error.source();
        }
        StreamError::Connect(text)
    }
}

/// A client of an xDS server.
#[derive(Debug)]
pub struct XdsClient {
    config: XdsConfig,
    in_force: InForce,
    /// The version that was accepted last.
    version: String,
    /// How many responses there were, good or bad.
    responses: u64,
    /// The response that was refused last, unless another came since.
    refused: Option<Refused>,
}

/// A response that was refused. Servers of go-control-plane send it again at once, as often as it is refused.
#[derive(Debug)]
struct Refused {
    response: DiscoveryResponse,
    fault: String,
    /// How long to wait before it is refused again.
    wait: Duration,
}

impl XdsClient {
    /// A client that puts rules in force there. It does nothing until it is run.
    pub fn new(config: XdsConfig, in_force: InForce) -> Self {
        XdsClient {
            config,
            in_force,
            version: String::new(),
            responses: 0,
            refused: None,
        }
    }

    /// Follows the server until the first response, good or bad.
    pub async fn wait_for_rules(&mut self) {
        self.follow(|client| client.responses > 0).await;
    }

    /// Follows the server for ever.
    pub async fn run(mut self) {
        self.follow(|_| false).await;
    }

    /// Follows the server until `is_enough`, over broken streams and servers that are gone.
    async fn follow(&mut self, is_enough: impl Fn(&Self) -> bool) {
        let mut wait = self.config.initial_backoff;
        loop {
            let before = self.responses;
            let error = match self.stream(&is_enough).await {
                Ok(()) => return,
                Err(error) => error,
            };
            if self.responses > before {
                wait = self.config.initial_backoff;
            }
            warn!(%error, "no rules from the xDS server {}, trying again: {error}", self.config.server);
            sleep(jittered(wait, JITTER)).await;
            wait = wait.saturating_mul(2).min(self.config.max_backoff);
        }
    }

    /// One stream, until it breaks or `is_enough`.
    async fn stream(&mut self, is_enough: impl Fn(&Self) -> bool) -> Result<(), StreamError> {
        let channel = timeout(CONNECT_PATIENCE, connect(&self.config)).await;
        let channel = channel.map_err(|_| StreamError::Late)??;
        // As many as one response needs.
        let (requests, outgoing) = mpsc::channel(4);
        // The stream is new and knows of no nonce.
        let first = self.request(String::new(), None);
        requests.send(first).await.map_err(|_| StreamError::Ended)?;
        let mut responses = self.open(channel, outgoing).await?;
        while let Some(response) = responses.message().await? {
            let request = match self.refuse_again(&response).await {
                Some(request) => request,
                None => self.take(response),
            };
            requests.send(request).await.map_err(|_| StreamError::Ended)?;
            if is_enough(self) {
                return Ok(());
            }
        }
        Err(StreamError::Ended)
    }

    async fn open(
        &self,
        channel: Channel,
        outgoing: mpsc::Receiver<DiscoveryRequest>,
    ) -> Result<Streaming<DiscoveryResponse>, StreamError> {
        let mut request = Request::new(ReceiverStream::new(outgoing));
        for (name, value) in &self.config.headers {
            request.metadata_mut().append(name.clone(), value.clone());
        }
        let mut client = AggregatedDiscoveryServiceClient::new(channel)
            .max_decoding_message_size(self.config.max_message_bytes);
        Ok(client.stream_aggregated_resources(request).await?.into_inner())
    }

    /// What to say to a response that was refused already, after a wait that grows each time. `None` for another.
    async fn refuse_again(&mut self, response: &DiscoveryResponse) -> Option<DiscoveryRequest> {
        let refused = self.refused.as_mut().filter(|refused| {
            let before = &refused.response;
            before.version_info == response.version_info && before.resources == response.resources
        })?;
        sleep(jittered(refused.wait, JITTER)).await;
        refused.wait = refused.wait.saturating_mul(2).min(self.config.max_backoff);
        let fault = refused.fault.clone();
        Some(self.request(response.nonce.clone(), Some(fault)))
    }

    /// Puts the rules of a response in force, or not. What to say to it.
    fn take(&mut self, response: DiscoveryResponse) -> DiscoveryRequest {
        self.responses += 1;
        let nonce = response.nonce.clone();
        match self.put_in_force(&response) {
            Ok(()) => {
                debug!(version = response.version_info, "took rules from the xDS server");
                self.version = response.version_info;
                self.refused = None;
                self.request(nonce, None)
            }
            Err(fault) => {
                self.refused = Some(Refused {
                    response,
                    fault: fault.clone(),
                    wait: FIRST_WAIT,
                });
                self.request(nonce, Some(fault))
            }
        }
    }

    /// The reason if that cannot be done.
    fn put_in_force(&self, response: &DiscoveryResponse) -> Result<(), String> {
        let files = resources::files(&response.resources).map_err(|fault| {
            warn!(%fault, "the xDS server sends what is no rules: {fault}");
            fault.to_string()
        })?;
        match file::load(&files, self.config.merge_domains) {
            Ok(loaded) => {
                for warning in loaded.diagnostics.warnings() {
                    warn!("{warning}");
                }
                self.in_force.put(loaded);
                Ok(())
            }
            Err(diagnostics) => {
                let fault = LoadError::Rules(diagnostics);
                self.in_force.refuse(&fault);
                Err(fault.to_string())
            }
        }
    }

    fn request(&self, response_nonce: String, fault: Option<String>) -> DiscoveryRequest {
        let metadata = self.config.node_metadata.iter().map(|(name, value)| {
            let value = Value {
                kind: Some(Kind::StringValue(value.clone())),
            };
            (name.clone(), value)
        });
        DiscoveryRequest {
            version_info: self.version.clone(),
            node: Some(Node {
                id: self.config.node_id.clone(),
                metadata: Some(Struct {
                    fields: metadata.collect(),
                }),
            }),
            resource_names: Vec::new(),
            type_url: TYPE_URL.to_owned(),
            response_nonce,
            error_detail: fault.map(|message| rpc::Status {
                code: Code::InvalidArgument as i32,
                message,
            }),
        }
    }
}

async fn connect(config: &XdsConfig) -> Result<Channel, StreamError> {
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let endpoint = Endpoint::from_shared(format!("{scheme}://{}", config.server))?
        .connect_timeout(CONNECT_PATIENCE)
        .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
        .keep_alive_while_idle(true);
    let endpoint = match &config.tls {
        Some(tls) => endpoint.tls_config(client_tls(tls)?)?,
        None => endpoint,
    };
    Ok(endpoint.connect().await?)
}

fn client_tls(config: &XdsTlsConfig) -> Result<ClientTlsConfig, StreamError> {
    let read = |path: &PathBuf| {
        fs::read(path).map_err(|source| StreamError::File {
            path: path.clone(),
            source,
        })
    };
    let mut tls = ClientTlsConfig::new();
    tls = match &config.authority {
        Some(authority) => tls.ca_certificate(Certificate::from_pem(read(authority)?)),
        None => tls.with_native_roots(),
    };
    if let Some((certificate, key)) = &config.identity {
        tls = tls.identity(Identity::from_pem(read(certificate)?, read(key)?));
    }
    if let Some(name) = &config.server_name {
        tls = tls.domain_name(name);
    }
    Ok(tls)
}
