//! The running server: the only place that wires the parts together and spawns tasks.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use std::{future, io};

use futures_util::stream::{self, Stream};
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tonic::codegen::http::{HeaderValue, Response};
use tonic::{Code, Request, Status};
use tower::util::MapResponseLayer;
use tracing::{debug, warn};

use crate::clock::Clock;
use crate::config::ServerConfig;
use crate::health::Health;
use crate::http;
use crate::limiter::Limiter;
use crate::proto::OFFICIAL_DESCRIPTORS;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitServiceServer;
use crate::rls::Rls;
use crate::rls::deadline::Deadline;
use crate::shutdown::Stop;

/// How many streams a client may reset before the server has taken them up. Envoy resets every call that timed out while
/// the server stood still; with the default of 20 the h2 crate then drops the connection and all its calls.
const MOST_PENDING_RESETS: usize = 100_000;

/// How often counters that have run out are looked for.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// How long to wait when no connection can be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why the server could not start, or stopped.
#[derive(Debug, Error)]
pub enum ServerError {
    /// A port could not be opened.
    #[error("cannot listen on {host} port {port} for {purpose}: {source}")]
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
    #[error("cannot offer reflection: {0}")]
    Reflection(#[from] tonic_reflection::server::Error),
    /// The gRPC port broke.
    #[error("the gRPC server failed: {0}")]
    Grpc(#[from] tonic::transport::Error),
    /// The HTTP port broke.
    #[error("the HTTP server failed: {0}")]
    Http(#[source] io::Error),
}

/// A server that holds its ports and serves once it runs.
#[derive(Debug)]
pub struct Server {
    config: ServerConfig,
    limiter: Arc<Limiter>,
    clock: Arc<Clock>,
    grpc: TcpListener,
    http: TcpListener,
}

impl Server {
    /// Opens the ports.
    pub async fn bind(
        config: ServerConfig,
        limiter: Arc<Limiter>,
        clock: Arc<Clock>,
    ) -> Result<Self, ServerError> {
        let grpc = listen("gRPC", &config.grpc_host, config.grpc_port).await?;
        let http = listen("HTTP", &config.host, config.port).await?;
        Ok(Server {
            config,
            limiter,
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
    /// way have the grace time to finish. When `stops` yields again, all of this ends at once.
    pub async fn run(self, mut stops: mpsc::Receiver<Stop>) -> Result<(), ServerError> {
        let (health, health_service) = Health::new().await;
        let (close, closed) = watch::channel(false);
        let rls = Rls::new(Arc::clone(&self.limiter), Arc::clone(&self.clock));
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(OFFICIAL_DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1()?;
        let grpc = tonic::transport::Server::builder()
            .http2_max_pending_accept_reset_streams(Some(MOST_PENDING_RESETS))
            .layer(MapResponseLayer::new(name_too_large))
            .add_service(RateLimitServiceServer::with_interceptor(
                rls.clone(),
                note_deadline(&self.clock),
            ))
            .add_service(health_service)
            .add_service(reflection)
            .serve_with_incoming_shutdown(connections(self.grpc), told(closed.clone()));
        let http = axum::serve(self.http, http::routes(rls, health.clone()))
            .with_graceful_shutdown(told(closed.clone()));

        let mut tasks = JoinSet::new();
        tasks.spawn(async { grpc.await.map_err(ServerError::Grpc) });
        tasks.spawn(async { http.await.map_err(ServerError::Http) });
        tasks.spawn(sweep(self.limiter, self.clock, closed));

        let asked = tokio::select! {
            asked = next(&mut stops) => asked,
            ended = all(&mut tasks) => return ended,
        };
        health.stop_serving().await;
        let linger = match asked {
            Stop::Gently => self.config.shutdown_linger,
            Stop::Soon => Duration::ZERO,
        };
        warn!(
            linger_seconds = linger.as_secs_f64(),
            "stopping: not ready any more"
        );
        let ended = async {
            sleep(linger).await;
            close.send_replace(true);
            timeout(self.config.shutdown_grace, all(&mut tasks)).await
        };
        tokio::select! {
            ended = ended => match ended {
                Ok(ended) => ended?,
                Err(_) => warn!("the grace time is over: calls or connections under way are dropped"),
            },
            _ = next(&mut stops) => warn!("stopping at once: asked a second time"),
        }
        warn!("stopped");
        Ok(())
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

/// The connections to the gRPC port. When none can be taken, as when the process has no file descriptor left, it waits a
/// moment and tries again; tonic would end the server.
fn connections(listener: TcpListener) -> impl Stream<Item = io::Result<TcpStream>> {
    stream::unfold(listener, |listener| async {
        loop {
            match accept(&listener).await {
                Ok(connection) => return Some((Ok(connection), listener)),
                Err(error) => {
                    warn!(%error, "cannot accept a connection: {error}");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    })
}

async fn accept(listener: &TcpListener) -> io::Result<TcpStream> {
    let (connection, _) = listener.accept().await?;
    connection.set_nodelay(true)?;
    Ok(connection)
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

/// Has the store forget what has run out, until it is told to end.
async fn sweep(
    limiter: Arc<Limiter>,
    clock: Arc<Clock>,
    closed: watch::Receiver<bool>,
) -> Result<(), ServerError> {
    let mut ticks = interval(SWEEP_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told = pin!(told(closed));
    loop {
        tokio::select! {
            () = &mut told => return Ok(()),
            _ = ticks.tick() => {}
        }
        let (limiter, now) = (Arc::clone(&limiter), clock.now());
        // A sweep of millions of counters takes long; calls are not to wait behind it.
        let swept = spawn_blocking(move || limiter.store().sweep(now)).await;
        debug!(forgotten = swept.unwrap_or(0), "swept");
    }
}

/// Waits until everything is to close.
async fn told(mut closed: watch::Receiver<bool>) {
    // An error means that the server is gone.
    let _ = closed.wait_for(|closed| *closed).await;
}

/// The next wish to stop. Without anybody left who could wish, never.
async fn next(stops: &mut mpsc::Receiver<Stop>) -> Stop {
    match stops.recv().await {
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
