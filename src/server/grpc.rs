//! The gRPC port: HTTP/2 connections, which end when they are too old or everything closes.

use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tonic::service::Routes;

use super::ServerError;
use super::connection::{Connection, secured};
use super::listener::{Listener, Socket};
use super::patience::Patience;
use super::port::Port;
use crate::config::ConnectionAge;
use crate::jitter::jittered;
use crate::metrics::Metrics;
use crate::shutdown;
use crate::tls::Tls;

/// How many streams a client may reset before the server has taken them up. Envoy resets every call that timed out while
/// the server stood still; with the default of 20 the h2 crate then drops the connection and all its calls.
const MOST_PENDING_RESETS: usize = 20_000;

/// How many calls one connection may have under way. Envoy has few connections, with many calls on each.
const MOST_STREAMS: u32 = 10_000;

/// How often a connection on which nothing happens is asked whether its client is still there.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(60);

/// By which share connections live longer or shorter than others.
const AGE_JITTER: f64 = 0.1;

/// What an HTTP/2 client says first: the connection preface of RFC 9113, section 3.4.
const HTTP2_OPENING: usize = 24;

/// What connections are served with.
#[derive(Clone)]
pub(super) struct GrpcPort {
    pub(super) routes: Routes,
    pub(super) tls: Option<Arc<Tls>>,
    pub(super) age: Option<ConnectionAge>,
    pub(super) most_connections: usize,
    pub(super) metrics: Arc<Metrics>,
    /// What has arrived of calls that are not complete, in bytes.
    pub(super) waiting: Arc<AtomicU64>,
    pub(super) closed: watch::Receiver<bool>,
}

impl GrpcPort {
    /// Serves calls until everything is to close and those under way are answered.
    pub(super) async fn run(self, listener: Listener) -> Result<(), ServerError> {
        let port = Port {
            listener,
            opening: HTTP2_OPENING,
            most_connections: self.most_connections,
            closed: self.closed.clone(),
        };
        port.run(|connection| self.clone().serve(connection)).await
    }

    async fn serve(self, connection: Connection<Socket>) {
        let _open = self.metrics.note_connection();
        let secured = secured(connection, self.tls.as_deref(), HTTP2_OPENING, &self.closed).await;
        let Some(connection) = secured else {
            return;
        };
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder
            .timer(TokioTimer::new())
            .max_pending_accept_reset_streams(MOST_PENDING_RESETS)
            .max_concurrent_streams(MOST_STREAMS)
            .keep_alive_interval(KEEPALIVE_INTERVAL);
        let service = TowerToHyperService::new(Patience::new(self.routes, self.waiting));
        let mut serving = pin!(builder.serve_connection(TokioIo::new(connection), service));
        // How a connection ends is its client's affair.
        tokio::select! {
            _ = serving.as_mut() => {}
            () = shutdown::closed(self.closed) => {
                serving.as_mut().graceful_shutdown();
                let _ = serving.await;
            }
            () = grown_old(self.age) => {
                serving.as_mut().graceful_shutdown();
                let grace = self.age.map_or(Duration::MAX, |age| age.grace);
                let _ = timeout(grace, serving).await;
            }
        }
    }
}

/// Waits until a connection that starts now is too old.
async fn grown_old(age: Option<ConnectionAge>) {
    match age {
        Some(ConnectionAge { most, .. }) => sleep(jittered(most, AGE_JITTER)).await,
        None => std::future::pending().await,
    }
}
