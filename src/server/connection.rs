//! Connections as they come in: accepted whatever happens to single ones, and not waited for if they say nothing.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::stream::{self, Stream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;
use tokio::time::{Sleep, sleep, timeout};
use tokio_rustls::server::TlsStream;
use tokio_util::either::Either;
use tracing::{debug, warn};

use super::listener::{Listener, Socket};
use crate::shutdown;
use crate::tls::Tls;

/// How long to wait when no connection can be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long a client may take to say its first words.
const OPENING_PATIENCE: Duration = Duration::from_secs(10);

/// How long a client may take to agree on TLS.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);

/// How long a client may leave an answer unread that no more can be written.
const READING_PATIENCE: Duration = Duration::from_secs(30);

/// The connections to a port. When none can be taken, as when the process has no file descriptor left, it waits a moment
/// and tries again.
///
/// A connection whose client has not sent the first `opening` bytes breaks after [`OPENING_PATIENCE`], or as soon as
/// `closed` says that everything is to close: there is nothing on it that could be finished.
pub(super) fn connections(
    listener: Listener,
    opening: usize,
    closed: watch::Receiver<bool>,
) -> impl Stream<Item = Connection<Socket>> {
    // Whether the last attempt failed, so that a shortage is told once.
    let state = (listener, false);
    stream::unfold(state, move |(listener, mut is_failing)| {
        let closed = closed.clone();
        async move {
            let stream = accept(&listener, &mut is_failing).await;
            let connection = Connection::new(stream, opening, closed);
            Some((connection, (listener, is_failing)))
        }
    })
}

/// The connection as its port speaks: with TLS if there is any. `None` if the client does not agree on it.
pub(super) async fn secured(
    connection: Connection<Socket>,
    tls: Option<&Tls>,
    opening: usize,
    closed: &watch::Receiver<bool>,
) -> Option<Either<Connection<Socket>, Connection<TlsStream<Connection<Socket>>>>> {
    let Some(tls) = tls else {
        return Some(Either::Left(connection));
    };
    let agreed = tokio::select! {
        agreed = tls.acceptor().accept(connection) => agreed,
        () = sleep(HANDSHAKE_PATIENCE) => Err(io::ErrorKind::TimedOut.into()),
        () = shutdown::closed(closed.clone()) => return None,
    };
    match agreed {
        // What the client has said so far was about TLS; that it means it is still to be seen.
        Ok(stream) => Some(Either::Right(Connection::new(stream, opening, closed.clone()))),
        Err(error) => {
            tls.note_handshake_error();
            debug!(%error, "no TLS with a client: {error}");
            None
        }
    }
}

async fn accept(listener: &Listener, is_failing: &mut bool) -> Socket {
    let mut has_failed = false;
    loop {
        match listener.accept().await {
            Ok(stream) => {
                *is_failing = has_failed;
                return stream;
            }
            Err(error) if is_of_one_connection(&error) => {}
            Err(error) => {
                if !*is_failing {
                    warn!(%error, "cannot accept connections, trying again: {error}");
                }
                (*is_failing, has_failed) = (true, true);
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Whether the client went away before it was accepted.
fn is_of_one_connection(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

/// A connection that breaks if its client does not begin.
pub(super) struct Connection<S> {
    stream: S,
    /// `None` once the client has begun.
    opening: Option<Opening>,
    /// Runs while nothing more can be written.
    stalled: Option<Pin<Box<Sleep>>>,
}

/// What a connection waits for at first.
struct Opening {
    /// How many bytes.
    missing: usize,
    /// Ends when the wait is over.
    patience: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl<S> Connection<S> {
    fn new(stream: S, opening: usize, closed: watch::Receiver<bool>) -> Self {
        let patience = Box::pin(async move {
            let _ = timeout(OPENING_PATIENCE, shutdown::closed(closed)).await;
        });
        Connection {
            stream,
            opening: Some(Opening {
                missing: opening,
                patience,
            }),
            stalled: None,
        }
    }

    /// What became of a write; an error if none has worked for too long.
    fn unless_stalled(
        &mut self,
        written: Poll<io::Result<usize>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stalled = self
            .stalled
            .get_or_insert_with(|| Box::pin(sleep(READING_PATIENCE)));
        ready!(stalled.as_mut().poll(context));
        self.stalled = None;
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let filled = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        let Some(opening) = &mut self.opening else {
            return read;
        };
        if read.is_ready() {
            opening.missing = opening.missing.saturating_sub(buffer.filled().len() - filled);
            if opening.missing == 0 {
                self.opening = None;
            }
            return read;
        }
        ready!(opening.patience.as_mut().poll(context));
        self.opening = None;
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.unless_stalled(written, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.unless_stalled(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}
