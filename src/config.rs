//! What the server is told: settings by section, and the rules with all that can be wrong with them.

mod address;
mod diagnostic;
mod fields;
pub mod file;
pub(crate) mod go;
mod limit;
pub mod source;
mod yaml;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::diagnostic::nearest;
pub use self::diagnostic::{Diagnostic, Diagnostics, Severity};
use self::file::Loaded;
use self::source::{SourceError, SourceFile};
use crate::metrics::prometheus;
use crate::metrics::statsd::Lines;
use crate::spans::SpansConfig;
use crate::tls::TlsConfig;

/// The rules of a server that was given none.
const EXAMPLE: &str = include_str!("config/example.yaml");

/// Where the rules are and how to read them.
#[derive(Debug, Clone)]
pub struct RulesConfig {
    /// Which files.
    pub source: RulesSource,
    /// Several files may add descriptors to one domain.
    pub merge_domains: bool,
    /// Files and directories whose name starts with a dot are left out.
    pub ignore_dotfiles: bool,
}

/// Which rule files.
#[derive(Debug, Clone)]
pub enum RulesSource {
    /// These files and directories.
    Paths(Vec<PathBuf>),
    /// The layout of envoyproxy/ratelimit.
    Runtime(RuntimeDirectory),
    /// The embedded example.
    Example,
}

/// The directory layout of envoyproxy/ratelimit's file loader.
#[derive(Debug, Clone)]
pub struct RuntimeDirectory {
    /// `RUNTIME_ROOT`.
    pub root: PathBuf,
    /// `RUNTIME_SUBDIRECTORY`: below the root; may be empty or start with a slash.
    pub subdirectory: PathBuf,
    /// `RUNTIME_APPDIRECTORY`: what holds the rules.
    pub appdirectory: String,
    /// `RUNTIME_WATCH_ROOT`: what holds the rules may also be files and directories called `APPDIRECTORY.something`.
    pub watch_root: bool,
}

/// Why there are no rules. Shows one fault per line.
#[derive(Debug)]
pub enum LoadError {
    /// Files could not be read.
    Source(Vec<SourceError>),
    /// Files could be read and are wrong.
    Rules(Diagnostics),
}

impl LoadError {
    /// What is odd beside what is wrong.
    pub fn warnings(&self) -> impl Iterator<Item = &Diagnostic> {
        let diagnostics = match self {
            LoadError::Source(_) => None,
            LoadError::Rules(diagnostics) => Some(diagnostics),
        };
        diagnostics.into_iter().flat_map(Diagnostics::warnings)
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<String> = match self {
            LoadError::Source(errors) => errors.iter().map(ToString::to_string).collect(),
            LoadError::Rules(diagnostics) => diagnostics.errors().map(ToString::to_string).collect(),
        };
        f.write_str(&lines.join("\n"))
    }
}

impl std::error::Error for LoadError {}

impl RulesConfig {
    /// Reads and compiles the rules.
    pub fn load(&self) -> Result<Loaded, LoadError> {
        let files = self.files().map_err(LoadError::Source)?;
        file::load(&files, self.merge_domains).map_err(LoadError::Rules)
    }

    /// Whether rules come from the standard input.
    pub(crate) fn reads_stdin(&self) -> bool {
        match &self.source {
            RulesSource::Paths(paths) => paths.iter().any(|path| path.as_os_str() == "-"),
            RulesSource::Runtime(_) | RulesSource::Example => false,
        }
    }

    /// The files that hold the rules, as far as that can be said.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        match &self.source {
            RulesSource::Paths(paths) => source::list(paths, self.ignore_dotfiles),
            RulesSource::Runtime(runtime) => match runtime.paths() {
                Ok(paths) => source::list(&paths, self.ignore_dotfiles),
                Err(_) => Vec::new(),
            },
            RulesSource::Example => Vec::new(),
        }
    }

    fn files(&self) -> Result<Vec<SourceFile>, Vec<SourceError>> {
        match &self.source {
            RulesSource::Paths(paths) => source::read(paths, self.ignore_dotfiles),
            RulesSource::Runtime(runtime) => {
                let paths = runtime.paths().map_err(|error| vec![error])?;
                source::read(&paths, self.ignore_dotfiles)
            }
            RulesSource::Example => Ok(vec![SourceFile {
                name: "example.yaml".into(),
                text: EXAMPLE.into(),
            }]),
        }
    }
}

impl RuntimeDirectory {
    /// The directory that holds the rules, or holds what does.
    fn base(&self) -> PathBuf {
        let subdirectory = self.subdirectory.strip_prefix("/").unwrap_or(&self.subdirectory);
        self.root.join(subdirectory)
    }

    fn paths(&self) -> Result<Vec<PathBuf>, SourceError> {
        let base = self.base();
        if !self.watch_root {
            return Ok(vec![base.join(&self.appdirectory)]);
        }
        let unreadable = |source: io::Error| SourceError::Unreadable {
            path: base.clone(),
            source,
        };
        let mut paths = Vec::new();
        for entry in base.read_dir().map_err(unreadable)? {
            let path = entry.map_err(unreadable)?.path();
            if self.holds_rules(&path) {
                paths.push(path);
            }
        }
        if paths.is_empty() {
            let missing = io::Error::new(
                io::ErrorKind::NotFound,
                format!(
                    "neither it nor anything called {}.something is there",
                    self.appdirectory
                ),
            );
            return Err(SourceError::Unreadable {
                path: base.join(&self.appdirectory),
                source: missing,
            });
        }
        paths.sort();
        Ok(paths)
    }

    fn holds_rules(&self, path: &Path) -> bool {
        let Some(rest) = path
            .file_name()
            .and_then(|name| name.to_str())
            .and_then(|name| name.strip_prefix(&self.appdirectory))
        else {
            return false;
        };
        rest.starts_with('.') || (rest.is_empty() && path.is_dir())
    }
}

/// Where the server listens and how it ends.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// The gRPC port.
    pub grpc: GrpcConfig,
    /// The HTTP port.
    pub http: Listen,
    /// TLS for the HTTP port, if it has any.
    pub http_tls: Option<TlsConfig>,
    /// The port for people who look into the server, if there is one.
    pub debug: Option<Listen>,
    /// The port that Prometheus reads, if it has one of its own.
    pub prometheus: Option<PrometheusConfig>,
    /// How metrics are called for Prometheus.
    pub prometheus_names: Arc<prometheus::Names>,
    /// On all metrics, by name.
    pub extra_tags: Vec<(String, String)>,
    /// Where statsd is, if it is told anything.
    pub statsd: Option<StatsdConfig>,
    /// Which spans are sent, if any are.
    pub spans: Option<SpansConfig>,
    /// How often it is looked whether rules and certificates have changed.
    pub look_interval: Duration,
    /// How long the server goes on serving after it has said that it is not ready.
    pub shutdown_linger: Duration,
    /// How long calls that are under way then have to finish.
    pub shutdown_grace: Duration,
    /// Where the counters are kept over a restart, if they are.
    pub snapshot: Option<SnapshotConfig>,
}

/// The gRPC port.
#[derive(Debug, Clone)]
pub struct GrpcConfig {
    /// Where it is.
    pub listen: Listen,
    /// TLS, if it has any.
    pub tls: Option<TlsConfig>,
    /// How many connections it takes at a time. More are closed without an answer.
    pub max_connections: usize,
    /// How many calls may be under way at a time, over all connections: those whose request has still to arrive, and
    /// streams. More are refused.
    pub max_calls_in_flight: u64,
    /// How long connections live; for ever if that is not said.
    pub max_connection_age: Option<ConnectionAge>,
}

/// How long connections live.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionAge {
    /// After this time, give or take a tenth, a client is told to go on with another connection.
    pub most: Duration,
    /// Calls that are under way then have this time to finish.
    pub grace: Duration,
}

/// Where Prometheus reads.
#[derive(Debug, Clone)]
pub struct PrometheusConfig {
    /// The port.
    pub listen: Listen,
    /// The path of the page.
    pub path: String,
}

/// Where statsd is, and what it is told.
#[derive(Debug, Clone)]
pub struct StatsdConfig {
    /// Name or address.
    pub host: String,
    /// Port.
    pub port: u16,
    /// How it is reached.
    pub protocol: Protocol,
    /// How often it is told what has been added.
    pub flush_interval: Duration,
    /// How lines look.
    pub lines: Lines,
    /// Somebody has asked for it, and wants to know when it cannot be reached.
    pub is_asked_for: bool,
}

/// A transport protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// A stream of lines.
    Tcp,
    /// Packets of lines.
    Udp,
}

/// Where connections come in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listen {
    /// A TCP port.
    Tcp {
        /// Name or address that it is bound to.
        host: String,
        /// 0 takes a free one.
        port: u16,
    },
    /// A Unix socket.
    Unix(PathBuf),
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Listen::Tcp { host, port } => write!(f, "{host} port {port}"),
            Listen::Unix(path) => write!(f, "the socket {}", path.display()),
        }
    }
}

/// How the counters are kept over a restart.
#[derive(Debug, Clone)]
pub struct SnapshotConfig {
    /// The file.
    pub path: PathBuf,
    /// How often it is written. It is also written at the end.
    pub period: Duration,
}
