//! The running server: the only place that wires the parts together and spawns tasks.

mod connection;
mod events;
mod grpc;
mod http_port;
mod listener;
mod looks;
mod port;
mod snapshots;
mod statsd;
mod sweep;

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use std::{future, io};

use futures_util::stream::{Stream, StreamExt as _};
use thiserror::Error;
use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};
use tonic::service::Routes;
use tracing::warn;

use self::grpc::{Admission, GrpcPort, Services};
use self::http_port::HttpPort;
use self::listener::Listener;
use self::looks::Looks;
use self::snapshots::Snapshots;
use crate::clock::Clock;
use crate::config::{Listen, ServerConfig};
use crate::events::Delivery;
use crate::health::{Health, HealthReport};
use crate::http::{self, Shown};
use crate::limiter::{Limiter, Observer};
use crate::metrics::Metrics;
use crate::proto::OFFICIAL_DESCRIPTORS;
use crate::reload::{InForce, Reloader};
use crate::rls::Rls;
use crate::shutdown::{self, Stop};
use crate::spans::{Spans, SpansError};
use crate::store::snapshot::SnapshotFile;
use crate::tls::{TlsConfig, TlsError, TlsWatch};
use crate::top::Top;
use crate::xds::XdsClient;

/// How long the last snapshot may take to write.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(30);

/// Why the server could not start, or stopped.
#[derive(Debug, Error)]
pub enum ServerError {
    /// A port could not be opened.
    #[error("cannot listen on {listen} for {purpose}")]
    Listen {
        /// `gRPC`, `HTTP` or `Prometheus`.
        purpose: &'static str,
        /// Where.
        listen: Listen,
        /// Why not.
        source: io::Error,
    },
    /// Certificates cannot be used.
    #[error("cannot use the certificates for {purpose} ({named_by})")]
    Tls {
        /// `gRPC` or `HTTP`.
        purpose: &'static str,
        /// What says where they are.
        named_by: &'static str,
        /// Why not.
        source: Box<TlsError>,
    },
    /// Spans cannot be sent.
    #[error(transparent)]
    Spans(#[from] SpansError),
    /// Reflection could not be set up.
    #[error("cannot offer reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
}

/// What a server serves, and who takes part.
#[derive(Debug)]
pub struct Parts {
    /// Decides.
    pub limiter: Arc<Limiter>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Tells of edges, if somebody wants to know. Observes the limiter.
    pub events: Option<Delivery>,
    /// Who is refused most, if somebody wants to know. Observes the limiter.
    pub top: Option<Arc<Top>>,
    /// Whether traffic is wanted.
    pub health: Health,
    /// Where rules come from as long as the server runs, if they are not what they are for good.
    pub rules: Option<RulesFrom>,
    /// Says what time it is.
    pub clock: Arc<Clock>,
}

/// Where rules come from.
#[derive(Debug)]
pub enum RulesFrom {
    /// Files that may change.
    Files(Reloader),
    /// An xDS server.
    Xds(Box<XdsClient>),
}

impl Parts {
    /// A limiter, and nobody who wants to know more.
    pub fn new(limiter: Arc<Limiter>, clock: Arc<Clock>) -> Self {
        Parts {
            limiter,
            clock,
            metrics: Arc::default(),
            events: None,
            top: None,
            health: Health::default(),
            rules: None,
        }
    }

    /// Where rules are put in force.
    pub fn in_force(&self) -> InForce {
        InForce {
            limiter: Arc::clone(&self.limiter),
            metrics: Arc::clone(&self.metrics),
            health: self.health.clone(),
            clock: Arc::clone(&self.clock),
        }
    }
}

/// Those of `events` and `top` that are there, as observers of a limiter.
pub fn observers(
    events: Option<&Delivery>,
    top: Option<&Arc<Top>>,
) -> impl Iterator<Item = Arc<dyn Observer>> {
    let events = events.map(|events| Arc::clone(events.events()) as _);
    events.into_iter().chain(top.map(|top| Arc::clone(top) as _))
}

/// A server that holds its ports and serves once it runs.
#[derive(Debug)]
pub struct Server {
    config: ServerConfig,
    parts: Parts,
    ports: Ports,
    spans: Option<Arc<Spans>>,
}

/// The open ports, and their certificates.
#[derive(Debug)]
struct Ports {
    grpc: Listener,
    grpc_tls: Option<TlsWatch>,
    http: Listener,
    http_tls: Option<TlsWatch>,
    debug: Option<Listener>,
    prometheus: Option<Listener>,
}

impl Server {
    /// Reads certificates and opens the ports.
    pub async fn bind(config: ServerConfig, parts: Parts) -> Result<Self, ServerError> {
        let prometheus = match &config.prometheus {
            Some(prometheus) => Some(listen("Prometheus", &prometheus.listen).await?),
            None => None,
        };
        let ports = Ports {
            grpc_tls: tls("gRPC", config.grpc.tls.as_ref(), &parts.clock)?,
            http_tls: tls("HTTP", config.http_tls.as_ref(), &parts.clock)?,
            grpc: listen("gRPC", &config.grpc.listen).await?,
            http: listen("HTTP", &config.http).await?,
            debug: listen_if_possible(config.debug.as_ref()).await,
            prometheus,
        };
        let spans = config.spans.as_ref().map(Spans::start).transpose()?;
        Ok(Server {
            config,
            parts,
            ports,
            spans: spans.map(Arc::new),
        })
    }

    /// The address of the gRPC port; `None` if it is a Unix socket.
    pub fn grpc_address(&self) -> Option<SocketAddr> {
        self.ports.grpc.address()
    }

    /// The address of the HTTP port.
    pub fn http_address(&self) -> Option<SocketAddr> {
        self.ports.http.address()
    }

    /// The address of the debug port, if it is open.
    pub fn debug_address(&self) -> Option<SocketAddr> {
        self.ports.debug.as_ref().and_then(Listener::address)
    }

    /// The address of the port for Prometheus, if there is one.
    pub fn prometheus_address(&self) -> Option<SocketAddr> {
        self.ports.prometheus.as_ref().and_then(Listener::address)
    }

    /// Serves until `stops` yields, then ends in order: not ready; go on for the linger time; no new calls; the calls under
    /// way have the grace time to finish; the last snapshot. When `stops` yields again, it goes on to the snapshot at once, and
    /// when it yields once more, it does without.
    pub async fn run(self, stops: impl Stream<Item = Stop>) -> Result<(), ServerError> {
        let mut stops = pin!(stops);
        let (close, closed) = watch::channel(false);
        let (linger, grace) = (self.config.shutdown_linger, self.config.shutdown_grace);
        let health = self.parts.health.clone();
        let snapshots = self.snapshots();
        let spans = self.spans.clone();
        let mut tasks = self.start(snapshots.clone(), closed).await?;

        let asked = tokio::select! {
            asked = next(&mut stops) => asked,
            ended = all(&mut tasks) => return ended,
        };
        health.stop_serving();
        let linger = match asked {
            Stop::Gently => linger,
            Stop::Soon => Duration::ZERO,
        };
        // Life and death are told at the level that is shown by default, as by envoyproxy/ratelimit.
        warn!(
            linger_seconds = linger.as_secs_f64(),
            "stopping: not ready any more"
        );
        let ended = async {
            sleep(linger).await;
            close.send_replace(true);
            timeout(grace, all(&mut tasks)).await
        };
        let ended = tokio::select! {
            ended = ended => ended.unwrap_or_else(|_| {
                warn!("the grace time is over: calls or connections under way are dropped");
                Ok(())
            }),
            _ = next(&mut stops) => {
                warn!("stopping at once: asked a second time");
                Ok(())
            }
        };
        close.send_replace(true);
        if let Some(spans) = spans {
            let _ = spawn_blocking(move || spans.stop()).await;
        }
        if let Some(snapshots) = snapshots {
            tokio::select! {
                written = timeout(SNAPSHOT_PATIENCE, snapshots.write(false)) => if written.is_err() {
                    warn!("stopping without the last snapshot: it takes too long to write");
                },
                _ = next(&mut stops) => warn!("stopping without the last snapshot: asked once more"),
            }
        }
        warn!("stopped");
        ended
    }

    fn snapshots(&self) -> Option<Snapshots> {
        let config = self.config.snapshot.as_ref()?;
        Some(Snapshots {
            file: Arc::new(SnapshotFile::new(config.path.clone())),
            period: config.period,
            limiter: Arc::clone(&self.parts.limiter),
            clock: Arc::clone(&self.parts.clock),
        })
    }

    /// What there is to show over HTTP.
    fn shown(&self, closed: &watch::Receiver<bool>) -> Shown {
        let (parts, ports) = (&self.parts, &self.ports);
        let certificates = [("grpc", &ports.grpc_tls), ("http", &ports.http_tls)];
        Shown {
            events: parts.events.as_ref().map(|events| Arc::clone(events.events())),
            top: parts.top.clone(),
            metrics: Arc::clone(&parts.metrics),
            limiter: Arc::clone(&parts.limiter),
            names: Arc::clone(&self.config.prometheus_names),
            extra_tags: self.config.extra_tags.clone().into(),
            health: parts.health.clone(),
            clock: Arc::clone(&parts.clock),
            certificates: certificates
                .into_iter()
                .filter_map(|(port, tls)| Some((port, tls.as_ref()?.tls())))
                .collect(),
            closed: closed.clone(),
        }
    }

    /// Starts everything that runs until it is closed.
    async fn start(
        self,
        snapshots: Option<Snapshots>,
        closed: watch::Receiver<bool>,
    ) -> Result<JoinSet<Result<(), ServerError>>, ServerError> {
        let shown = self.shown(&closed);
        let Server {
            config,
            parts,
            ports,
            spans,
        } = self;
        let in_force = parts.in_force();
        let Parts {
            limiter,
            metrics,
            events,
            health,
            rules,
            clock,
            ..
        } = parts;
        let rls = Rls::new(Arc::clone(&limiter), Arc::clone(&metrics));
        let grpc_tls = ports.grpc_tls.as_ref().map(TlsWatch::tls);
        let http_tls = ports.http_tls.as_ref().map(TlsWatch::tls);
        let (reloader, xds) = match rules {
            Some(RulesFrom::Files(reloader)) => (Some(reloader), None),
            Some(RulesFrom::Xds(client)) => (None, Some(client)),
            None => (None, None),
        };
        let looks = Looks {
            interval: config.look_interval,
            rules: reloader,
            in_force,
            certificates: ports.grpc_tls.into_iter().chain(ports.http_tls).collect(),
        };

        let (routes, health_report) = grpc_routes(&health).await?;
        let mut tasks = JoinSet::new();
        let most_calls = config.grpc.max_calls_in_flight;
        let services = Services {
            rls: rls.clone(),
            routes,
            clock: Arc::clone(&clock),
            admission: Arc::new(Admission::new(most_calls, Arc::clone(&metrics))),
            metrics,
            spans,
            closed: closed.clone(),
        };
        let grpc = GrpcPort {
            services: Arc::new(services),
            tls: grpc_tls,
            age: config.grpc.max_connection_age,
            most_connections: config.grpc.max_connections,
            closed: closed.clone(),
        };
        tasks.spawn(grpc.run(ports.grpc));
        let http = |routes, tls| HttpPort {
            routes,
            tls,
            closed: closed.clone(),
        };
        tasks.spawn(http(http::routes(rls, shown.clone()), http_tls).run(ports.http));
        if let (Some(listener), Some(prometheus)) = (ports.prometheus, &config.prometheus) {
            let routes = http::prometheus_routes(&prometheus.path, shown.clone());
            tasks.spawn(http(routes, None).run(listener));
        }
        if let Some(statsd) = config.statsd {
            tasks.spawn(statsd::run(statsd, shown.clone(), closed.clone()));
        }
        if let Some(listener) = ports.debug {
            let routes = http::debug_routes(shown);
            tasks.spawn(http(routes, None).run(listener));
        }
        let end = shutdown::closed(closed.clone());
        tasks.spawn(async {
            health_report.run(end).await;
            Ok(())
        });
        tasks.spawn(looks.run(closed.clone()));
        if let Some(client) = xds {
            let end = shutdown::closed(closed.clone());
            tasks.spawn(async {
                tokio::select! {
                    () = client.run() => {}
                    () = end => {}
                }
                Ok(())
            });
        }
        if let Some(snapshots) = snapshots {
            tasks.spawn(snapshots.run(closed.clone()));
        }
        if let Some(events) = events {
            let (limiter, clock) = (Arc::clone(&limiter), Arc::clone(&clock));
            tasks.spawn(events::run(events, limiter, clock, closed.clone()));
        }
        tasks.spawn(sweep::run(limiter, clock, closed));
        Ok(tasks)
    }
}

/// The services of the gRPC port beside the one that decides, and what keeps its health up to date.
async fn grpc_routes(health: &Health) -> Result<(Routes, HealthReport), ServerError> {
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(OFFICIAL_DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let (health, report) = health.service().await;
    let routes = Routes::new(health)
        .add_service(reflection().build_v1()?)
        // What older tools ask.
        .add_service(reflection().build_v1alpha()?);
    Ok((routes.prepare(), report))
}

fn tls(
    purpose: &'static str,
    config: Option<&TlsConfig>,
    clock: &Arc<Clock>,
) -> Result<Option<TlsWatch>, ServerError> {
    let Some(config) = config else {
        return Ok(None);
    };
    let tls = TlsWatch::load(config.clone(), Arc::clone(clock));
    tls.map(Some).map_err(|source| ServerError::Tls {
        purpose,
        named_by: config.named_by,
        source: Box::new(source),
    })
}

async fn listen(purpose: &'static str, listen: &Listen) -> Result<Listener, ServerError> {
    Listener::open(listen)
        .await
        .map_err(|source| ServerError::Listen {
            purpose,
            listen: listen.clone(),
            source,
        })
}

/// Nobody depends on the debug port: without it the server runs all the same.
async fn listen_if_possible(listen: Option<&Listen>) -> Option<Listener> {
    let listen = listen?;
    match Listener::open(listen).await {
        Ok(listener) => Some(listener),
        Err(error) => {
            warn!(%error, "cannot listen on {listen} for debugging: {error}");
            None
        }
    }
}

/// The next wish to stop. Without anybody left who could wish, never.
async fn next(stops: &mut (impl Stream<Item = Stop> + Unpin)) -> Stop {
    match stops.next().await {
        Some(stop) => stop,
        None => future::pending().await,
    }
}

/// Waits for all tasks, or for the first failure.
async fn all(tasks: &mut JoinSet<Result<(), ServerError>>) -> Result<(), ServerError> {
    while let Some(ended) = tasks.join_next().await {
        ended.expect("no task of the server panics or is aborted")?;
    }
    Ok(())
}
