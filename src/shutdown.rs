//! When to stop: the signals, as envoyproxy/ratelimit takes them.

use std::io;

use futures_util::stream::{self, Stream};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

/// SIGTERM, SIGINT and SIGHUP: each of them asks the server to stop. SIGHUP does not reload; files do that by changing.
#[derive(Debug)]
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
}

/// What a signal asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// Somebody takes this server out of service: go on while its clients learn of it.
    Gently,
    /// Somebody at the keyboard wants it gone: finish what is under way.
    Soon,
}

/// Waits until everything is to close.
pub(crate) async fn closed(mut closed: watch::Receiver<bool>) {
    // An error means that the server is gone.
    let _ = closed.wait_for(|closed| *closed).await;
}

impl Signals {
    /// From now on these signals do not end the process by themselves.
    pub fn listen() -> io::Result<Self> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    /// What each signal asks for, without an end.
    pub fn into_stream(self) -> impl Stream<Item = Stop> {
        stream::unfold(self, |mut signals| async {
            let stop = signals.next().await;
            Some((stop, signals))
        })
    }

    /// Waits for the next signal.
    async fn next(&mut self) -> Stop {
        tokio::select! {
            _ = self.terminate.recv() => Stop::Gently,
            _ = self.hang_up.recv() => Stop::Gently,
            _ = self.interrupt.recv() => Stop::Soon,
        }
    }
}
