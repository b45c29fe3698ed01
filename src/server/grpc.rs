//! The gRPC port: HTTP/2 connections, which end when they are too old or everything closes.

mod admission;
mod arriving;
mod calls;
mod routed;

use std::sync::Arc;
use std::time::Duration;

use h2::{Ping, PingPong};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tracing::debug;

pub(super) use self::admission::Admission;
pub(super) use self::calls::Services;

use self::calls::Calls;
use super::ServerError;
use super::connection::{Connection, secured};
use super::listener::{Listener, Socket};
use super::port::Port;
use crate::config::ConnectionAge;
use crate::jitter::jittered;
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

/// How long the answer may take.
const KEEPALIVE_PATIENCE: Duration = Duration::from_secs(20);

/// Both of them, once everything is to close.
const CLOSING_KEEPALIVE: Duration = Duration::from_secs(2);

/// How much a client may send ahead, on a call and on a connection, in bytes.
const WINDOW: u32 = 1 << 20;

/// How large the headers of a call may be, in bytes.
const LARGEST_HEADERS: u32 = 16 << 10;

/// What connections are served with.
#[derive(Clone)]
pub(super) struct GrpcPort {
    pub(super) services: Arc<Services>,
    pub(super) tls: Option<Arc<Tls>>,
    pub(super) age: Option<ConnectionAge>,
    pub(super) most_connections: usize,
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
        let _open = self.services.metrics.note_connection();
        let secured = secured(connection, self.tls.as_deref(), HTTP2_OPENING, &self.closed).await;
        let Some(connection) = secured else {
            return;
        };
        // How a connection ends is its client's affair; one who speaks something else than HTTP/2 may want to know.
        if let Err(error) = self.serve_http2(connection).await {
            debug!(%error, "a gRPC connection broke: {error}");
        }
    }

    async fn serve_http2<S>(self, connection: S) -> Result<(), h2::Error>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let connection = h2::server::Builder::new()
            .initial_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .max_header_list_size(LARGEST_HEADERS)
            .max_pending_accept_reset_streams(MOST_PENDING_RESETS)
            .max_concurrent_streams(MOST_STREAMS)
            .handshake(connection)
            .await?;
        let mut calls = Calls::new(connection, self.services);
        let mut ping_pong = calls.ping_pong().expect("it is asked for once");
        tokio::select! {
            biased;
            () = &mut calls => {}
            () = silent(&mut ping_pong, KEEPALIVE_INTERVAL, KEEPALIVE_PATIENCE) => {}
            () = shutdown::closed(self.closed) => {
                calls.graceful_shutdown();
                tokio::select! {
                    () = calls => {}
                    () = silent(&mut ping_pong, CLOSING_KEEPALIVE, CLOSING_KEEPALIVE) => {}
                }
            }
            () = grown_old(self.age) => {
                calls.graceful_shutdown();
                let grace = self.age.map_or(Duration::MAX, |age| age.grace);
                let _ = timeout(grace, calls).await;
            }
        }
        Ok(())
    }
}

/// Waits until a connection that starts now is too old.
async fn grown_old(age: Option<ConnectionAge>) {
    match age {
        Some(ConnectionAge { most, .. }) => sleep(jittered(most, AGE_JITTER)).await,
        None => std::future::pending().await,
    }
}

/// Asks a client after each interval whether it is still there, and ends when it does not say so.
async fn silent(ping_pong: &mut PingPong, interval: Duration, patience: Duration) {
    loop {
        sleep(interval).await;
        let answer = timeout(patience, ping_pong.ping(Ping::opaque())).await;
        if !matches!(answer, Ok(Ok(_))) {
            return;
        }
    }
}
