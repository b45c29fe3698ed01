//! What all ports have in common: each connection is served by a task of its own, and at the end those under way are waited for.

use std::sync::Arc;

use futures_util::stream::StreamExt as _;
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tracing::warn;

use super::ServerError;
use super::connection::{Connection, connections};
use super::listener::{Listener, Socket};
use crate::shutdown;

/// A port that takes connections.
pub(super) struct Port {
    pub(super) listener: Listener,
    /// How many bytes a client must send before it is believed to mean it.
    pub(super) opening: usize,
    /// How many connections it takes at a time. More are closed without an answer.
    pub(super) most_connections: usize,
    pub(super) closed: watch::Receiver<bool>,
}

impl Port {
    /// Serves each connection with `serve`, until everything is to close and all of them have ended.
    pub(super) async fn run<F>(self, serve: impl Fn(Connection<Socket>) -> F) -> Result<(), ServerError>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let places = Arc::new(Semaphore::new(self.most_connections));
        let mut serving = JoinSet::new();
        let connections = connections(self.listener, self.opening, self.closed.clone());
        let mut connections = Box::pin(connections.take_until(shutdown::closed(self.closed)));
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
                    let most = self.most_connections;
                    warn!(
                        most,
                        "a port has all the {most} connections that it takes; further ones are closed"
                    );
                }
                was_full = true;
                continue;
            };
            // News again only after it was half empty.
            was_full &= places.available_permits() < self.most_connections / 2;
            let served = serve(connection);
            serving.spawn(async move {
                served.await;
                drop(place);
            });
        }
        // Who comes now is to be turned away, not to wait.
        drop(connections);
        while serving.join_next().await.is_some() {}
        Ok(())
    }
}
