//! The HTTP ports: HTTP/1.1 and HTTP/2, for probes, Prometheus and people.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use futures_util::stream::StreamExt as _;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tracing::warn;

use super::ServerError;
use super::connection::{Connection, connections, secured};
use super::listener::Listener;
use crate::http;
use crate::tls::Tls;

/// How many connections an HTTP port takes at a time. More are closed without an answer.
const MOST_CONNECTIONS: usize = 1_000;

/// How long a client may take to send the head of its request.
const REQUEST_PATIENCE: Duration = Duration::from_secs(30);

/// Serves HTTP until everything is to close and the requests under way are answered.
pub(super) async fn serve(
    listener: Listener,
    routes: Router,
    tls: Option<Arc<Tls>>,
    closed: watch::Receiver<bool>,
) -> Result<(), ServerError> {
    let port = Port {
        routes,
        tls,
        closed: closed.clone(),
    };
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let mut serving = JoinSet::new();
    let connections = connections(listener, 1, closed.clone()).take_until(http::closed(closed));
    let mut connections = Box::pin(connections);
    let mut was_full = false;
    loop {
        let connection = tokio::select! {
            connection = connections.next() => match connection {
                Some(connection) => connection,
                None => break,
            },
            // Forgets connections that have ended.
            Some(_) = serving.join_next() => continue,
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            if !was_full {
                warn!("an HTTP port has all the connections that it takes; further ones are closed");
            }
            was_full = true;
            continue;
        };
        was_full = false;
        let port = port.clone();
        serving.spawn(async move {
            port.serve(connection).await;
            drop(place);
        });
    }
    // Nobody waits for a connection that is not taken any more.
    drop(connections);
    while serving.join_next().await.is_some() {}
    Ok(())
}

/// What a connection is served with.
#[derive(Clone)]
struct Port {
    routes: Router,
    tls: Option<Arc<Tls>>,
    closed: watch::Receiver<bool>,
}

impl Port {
    async fn serve(self, connection: Connection) {
        let Some(connection) = secured(connection, self.tls.as_deref()).await else {
            return;
        };
        let mut builder = auto::Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_PATIENCE);
        builder.http2().timer(TokioTimer::new());
        let service = TowerToHyperService::new(self.routes);
        let mut serving = pin!(builder.serve_connection(TokioIo::new(connection), service));
        // A connection that broke is its client's affair.
        tokio::select! {
            _ = serving.as_mut() => {}
            () = http::closed(self.closed) => {
                serving.as_mut().graceful_shutdown();
                let _ = serving.await;
            }
        }
    }
}
