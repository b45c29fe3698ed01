//! Ports and Unix sockets.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio_util::either::Either;

use crate::config::Listen;

/// A connection of either kind.
pub(super) type Socket = Either<TcpStream, UnixStream>;

/// What connections come in on.
#[derive(Debug)]
pub(super) enum Listener {
    Tcp(TcpListener),
    /// The file goes first: nobody who finds it is to find it dead.
    Unix(
        #[expect(dead_code, reason = "held to be dropped")] SocketFile,
        UnixListener,
    ),
}

/// The file of a Unix socket. It goes away with this.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and number, so that what somebody else has put there stays.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    fn of(path: &Path) -> Self {
        SocketFile {
            path: path.to_owned(),
            identity: identity(path),
        }
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.identity.is_some() && identity(&self.path) == self.identity {
            // The next server removes it if this one cannot.
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let metadata = fs::symlink_metadata(path).ok()?;
    Some((metadata.dev(), metadata.ino()))
}

impl Listener {
    /// Opens a port or a socket. A socket that is left from a server that is gone is replaced.
    pub(super) async fn open(listen: &Listen) -> io::Result<Self> {
        match listen {
            Listen::Tcp { host, port } => Ok(Listener::Tcp(TcpListener::bind((host.as_str(), *port)).await?)),
            Listen::Unix(path) => {
                remove_stale(path)?;
                let listener = UnixListener::bind(path)?;
                Ok(Listener::Unix(SocketFile::of(path), listener))
            }
        }
    }

    /// The port; `None` for a Unix socket.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().ok(),
            Listener::Unix(..) => None,
        }
    }

    pub(super) async fn accept(&self) -> io::Result<Socket> {
        match self {
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // Without it answers are only late.
                let _ = stream.set_nodelay(true);
                Ok(Either::Left(stream))
            }
            Listener::Unix(_, listener) => {
                let (stream, _) = listener.accept().await?;
                Ok(Either::Right(stream))
            }
        }
    }
}

/// Removes a socket on which nobody listens. Anything else is left alone: then the path is in use.
fn remove_stale(path: &Path) -> io::Result<()> {
    let Ok(metadata) = fs::symlink_metadata(path) else {
        return Ok(());
    };
    let is_stale = metadata.file_type().is_socket() && {
        let attempt = std::os::unix::net::UnixStream::connect(path);
        attempt.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
    };
    if is_stale { fs::remove_file(path) } else { Ok(()) }
}
