//! The running server: the only place that wires the parts together and spawns tasks.

mod connection;
mod events;
mod snapshots;
mod sweep;

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use std::{future, io};

use axum::Router;
use futures_util::stream::{Stream, StreamExt as _};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use thiserror::Error;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tonic::codegen::http::{HeaderValue, Response};
use tonic::{Code, Request, Status};
use tower::util::MapResponseLayer;
use tracing::warn;

use self::connection::connections;
use self::snapshots::Snapshots;
use crate::clock::Clock;
use crate::config::ServerConfig;
use crate::events::Delivery;
use crate::health::Health;
use crate::http::{self, Shown};
use crate::limiter::{Limiter, Observer};
use crate::metrics::Metrics;
use crate::proto::OFFICIAL_DESCRIPTORS;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitServiceServer;
use crate::rls::Rls;
use crate::rls::deadline::Deadline;
use crate::shutdown::Stop;
use crate::store::snapshot::SnapshotFile;
use crate::top::Top;

/// How many streams a client may reset before the server has taken them up. Envoy resets every call that timed out while
/// the server stood still; with the default of 20 the h2 crate then drops the connection and all its calls.
const MOST_PENDING_RESETS: usize = 20_000;

/// How long a caller may take to send its request.
const REQUEST_PATIENCE: Duration = Duration::from_secs(30);

/// How often a connection on which nothing happens is asked whether its client is still there.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(60);

/// How long the last snapshot may take to write.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(30);

/// What an HTTP/2 client says first: the connection preface of RFC 9113, section 3.4.
const HTTP2_OPENING: usize = 24;

/// How many connections the HTTP port takes at a time; it is for probes and people. More are closed without an answer.
const MOST_HTTP_CONNECTIONS: usize = 1_000;

/// Why the server could not start, or stopped.
#[derive(Debug, Error)]
pub enum ServerError {
    /// A port could not be opened.
    #[error("cannot listen on {host} port {port} for {purpose}")]
    Listen {
        /// `gRPC` or `HTTP`.
        purpose: &'static str,
        /// Name or address.
        host: String,
        /// Port.
        port: u16,
        /// Why not.
        source: io::Error,
    },
    /// Reflection could not be set up.
    #[error("cannot offer reflection")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The gRPC port broke.
    #[error("the gRPC server failed")]
    Grpc(#[from] tonic::transport::Error),
}

/// Who watches the decisions of the limiter. Default: nothing but metrics.
#[derive(Debug, Default)]
pub struct Observers {
    /// Counts them.
    pub metrics: Arc<Metrics>,
    /// Tells of edges.
    pub events: Option<Delivery>,
    /// Who is refused most.
    pub top: Option<Arc<Top>>,
}

impl Observers {
    /// What the limiter has to tell of its decisions.
    pub fn handles(&self) -> impl Iterator<Item = Arc<dyn Observer>> {
        let events = self.events.iter().map(|events| Arc::clone(events.events()) as _);
        let top = self.top.iter().map(|top| Arc::clone(top) as _);
        events.chain(top)
    }
}

/// A server that holds its ports and serves once it runs.
#[derive(Debug)]
pub struct Server {
    config: ServerConfig,
    limiter: Arc<Limiter>,
    observers: Observers,
    clock: Arc<Clock>,
    grpc: TcpListener,
    http: TcpListener,
}

impl Server {
    /// Opens the ports. `limiter` is observed by `observers`.
    pub async fn bind(
        config: ServerConfig,
        limiter: Arc<Limiter>,
        observers: Observers,
        clock: Arc<Clock>,
    ) -> Result<Self, ServerError> {
        let grpc = listen("gRPC", &config.grpc_host, config.grpc_port).await?;
        let http = listen("HTTP", &config.host, config.port).await?;
        Ok(Server {
            config,
            limiter,
            observers,
            clock,
            grpc,
            http,
        })
    }

    /// The address of the gRPC port.
    pub fn grpc_address(&self) -> io::Result<SocketAddr> {
        self.grpc.local_addr()
    }

    /// The address of the HTTP port.
    pub fn http_address(&self) -> io::Result<SocketAddr> {
        self.http.local_addr()
    }

    /// Serves until `stops` yields, then ends in order: not ready; go on for the linger time; no new calls; the calls under
    /// way have the grace time to finish; the last snapshot. When `stops` yields again, it goes on to the snapshot at once, and
    /// when it yields once more, it does without.
    pub async fn run(self, stops: impl Stream<Item = Stop>) -> Result<(), ServerError> {
        let mut stops = pin!(stops);
        let (health, health_service) = Health::new().await;
        let (close, closed) = watch::channel(false);
        let metrics = self.observers.metrics;
        let rls = Rls::new(
            Arc::clone(&self.limiter),
            Arc::clone(&self.clock),
            Arc::clone(&metrics),
        );
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(OFFICIAL_DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
        };
        let grpc = tonic::transport::Server::builder()
            .http2_max_pending_accept_reset_streams(Some(MOST_PENDING_RESETS))
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .timeout(REQUEST_PATIENCE)
            .layer(MapResponseLayer::new(name_too_large))
            .add_service(RateLimitServiceServer::with_interceptor(
                rls.clone(),
                note_deadline(&self.clock),
            ))
            .add_service(health_service)
            .add_service(reflection().build_v1()?)
            // What older tools ask.
            .add_service(reflection().build_v1alpha()?)
            .serve_with_incoming_shutdown(
                connections(self.grpc, HTTP2_OPENING, closed.clone()).map(Ok::<_, io::Error>),
                http::closed(closed.clone()),
            );
        let shown = Shown {
            events: self
                .observers
                .events
                .as_ref()
                .map(|events| Arc::clone(events.events())),
            top: self.observers.top,
            metrics,
            limiter: Arc::clone(&self.limiter),
            clock: Arc::clone(&self.clock),
            closed: closed.clone(),
        };
        let http = serve_http(
            self.http,
            http::routes(rls, health.clone(), shown),
            closed.clone(),
        );

        let mut tasks = JoinSet::new();
        tasks.spawn(async { grpc.await.map_err(ServerError::Grpc) });
        tasks.spawn(http);
        let snapshots = self.config.snapshot.map(|config| {
            let snapshots = Snapshots {
                file: Arc::new(SnapshotFile::new(config.path)),
                limiter: Arc::clone(&self.limiter),
                clock: Arc::clone(&self.clock),
            };
            tasks.spawn(snapshots.clone().run(config.period, closed.clone()));
            snapshots
        });
        if let Some(events) = self.observers.events {
            let (limiter, clock) = (Arc::clone(&self.limiter), Arc::clone(&self.clock));
            tasks.spawn(events::run(events, limiter, clock, closed.clone()));
        }
        tasks.spawn(sweep::run(self.limiter, self.clock, closed));

        let asked = tokio::select! {
            asked = next(&mut stops) => asked,
            ended = all(&mut tasks) => return ended,
        };
        health.stop_serving().await;
        let linger = match asked {
            Stop::Gently => self.config.shutdown_linger,
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
            health.end_watches().await;
            timeout(self.config.shutdown_grace, all(&mut tasks)).await
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
}

async fn listen(purpose: &'static str, host: &str, port: u16) -> Result<TcpListener, ServerError> {
    TcpListener::bind((host, port))
        .await
        .map_err(|source| ServerError::Listen {
            purpose,
            host: host.to_owned(),
            port,
            source,
        })
}

/// Serves HTTP/1 until everything is to close and the requests under way are answered.
async fn serve_http(
    listener: TcpListener,
    routes: Router,
    closed: watch::Receiver<bool>,
) -> Result<(), ServerError> {
    let mut builder = hyper::server::conn::http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_PATIENCE);
    let under_way = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(MOST_HTTP_CONNECTIONS));
    let connections = connections(listener, 1, closed.clone()).take_until(http::closed(closed));
    let mut connections = Box::pin(connections);
    let mut was_full = false;
    while let Some(connection) = connections.next().await {
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            if !was_full {
                warn!("the HTTP port has all the connections that it takes; further ones are closed");
            }
            was_full = true;
            continue;
        };
        was_full = false;
        let service = TowerToHyperService::new(routes.clone());
        let serving = under_way.watch(builder.serve_connection(TokioIo::new(connection), service));
        tokio::spawn(async move {
            // A connection that broke is its client's affair.
            let _ = serving.await;
            drop(place);
        });
    }
    // Nobody waits for a connection that is not taken any more.
    drop(connections);
    under_way.shutdown().await;
    Ok(())
}

/// tonic answers a message that is too large with `OUT_OF_RANGE`, which nothing else here uses; gRPC's code for it is
/// `RESOURCE_EXHAUSTED`.
fn name_too_large<B>(mut response: Response<B>) -> Response<B> {
    if let Some(status) = response.headers_mut().get_mut(Status::GRPC_STATUS)
        && *status == HeaderValue::from(Code::OutOfRange as u16)
    {
        *status = HeaderValue::from(Code::ResourceExhausted as u16);
    }
    response
}

/// Notes on each call when its caller gives up.
fn note_deadline(clock: &Arc<Clock>) -> impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone + use<> {
    let clock = Arc::clone(clock);
    move |mut request| {
        let timeout = request.metadata().get("grpc-timeout");
        if let Some(timeout) = timeout.and_then(|timeout| timeout.to_str().ok())
            && let Some(deadline) = Deadline::new(timeout, clock.now())
        {
            request.extensions_mut().insert(deadline);
        }
        Ok(request)
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
