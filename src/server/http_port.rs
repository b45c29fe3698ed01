//! The HTTP ports: HTTP/1.1 and HTTP/2, for probes, Prometheus and people.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::sync::watch;

use super::ServerError;
use super::connection::{Connection, secured};
use super::listener::{Listener, Socket};
use super::port::Port;
use crate::shutdown;
use crate::tls::Tls;

/// How many connections an HTTP port takes at a time.
const MOST_CONNECTIONS: usize = 1_000;

/// How long a client may take to send the head of its request.
const REQUEST_PATIENCE: Duration = Duration::from_secs(30);

/// How often an HTTP/2 connection on which nothing happens is asked whether its client is still there, and how long it has to
/// answer. Places are few here.
const KEEPALIVE: Duration = Duration::from_secs(10);

/// As many bytes tell HTTP/2 from HTTP/1. A shorter request is answered before they are missed.
const OPENING: usize = 24;

/// What connections are served with.
#[derive(Clone)]
pub(super) struct HttpPort {
    pub(super) routes: Router,
    pub(super) tls: Option<Arc<Tls>>,
    pub(super) closed: watch::Receiver<bool>,
}

impl HttpPort {
    /// Serves HTTP until everything is to close and the requests under way are answered.
    pub(super) async fn run(self, listener: Listener) -> Result<(), ServerError> {
        let port = Port {
            listener,
            opening: OPENING,
            most_connections: MOST_CONNECTIONS,
            closed: self.closed.clone(),
        };
        port.run(|connection| self.clone().serve(connection)).await
    }

    async fn serve(self, connection: Connection<Socket>) {
        let secured = secured(connection, self.tls.as_deref(), OPENING, &self.closed).await;
        let Some(connection) = secured else {
            return;
        };
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_PATIENCE);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(KEEPALIVE)
            .keep_alive_timeout(KEEPALIVE);
        let service = TowerToHyperService::new(self.routes);
        let mut serving = pin!(builder.serve_connection(TokioIo::new(connection), service));
        // A connection that broke is its client's affair.
        tokio::select! {
            _ = serving.as_mut() => {}
            () = shutdown::closed(self.closed) => {
                serving.as_mut().graceful_shutdown();
                let _ = serving.await;
            }
        }
    }
}
