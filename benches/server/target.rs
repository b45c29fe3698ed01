//! The servers that are measured: what they have counted, and what CPU time they have taken.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::sync::Mutex;
use std::time::{Duration, Instant};
use std::{env, thread};

use anyhow::{Context as _, bail, ensure};
use clap::Args;
use nix::time::ClockId;
use nix::unistd::Pid;
use serde_json::Value;

use crate::server::{self, Server};
use crate::traffic::{RULES, Size};

/// A server that runs already, as it is named on the command line.
#[derive(Debug, Clone)]
pub(crate) struct Against {
    name: String,
    address: SocketAddr,
    pid: Option<Pid>,
}

impl FromStr for Against {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (name, rest) = text.split_once('=').context("write NAME=HOST:PORT[,PID]")?;
        let (address, pid) = match rest.split_once(',') {
            Some((address, pid)) => (address, Some(Pid::from_raw(pid.parse()?))),
            None => (rest, None),
        };
        let address = address
            .to_socket_addrs()?
            .next()
            .context("the host has no address")?;
        Ok(Against {
            name: name.to_owned(),
            address,
            pid,
        })
    }
}

/// The release server with further arguments, as it is named on the command line.
#[derive(Debug, Clone)]
pub(crate) struct With {
    name: String,
    arguments: Vec<String>,
}

impl FromStr for With {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (name, arguments) = text.split_once('=').context("write NAME=ARGUMENTS")?;
        Ok(With {
            name: name.to_owned(),
            arguments: arguments.split_whitespace().map(str::to_owned).collect(),
        })
    }
}

/// Which servers are measured beside the baseline and tollgate.
#[derive(Debug, Clone, Args)]
pub(crate) struct Others {
    /// A server to measure as well; its CPU time if the process is named
    #[arg(long, value_name = "NAME=HOST:PORT[,PID]")]
    against: Vec<Against>,
    /// The release server with further arguments, to measure as well: `events=--events log`
    #[arg(long, value_name = "NAME=ARGUMENTS")]
    with: Vec<With>,
}

/// A server that is measured.
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) address: SocketAddr,
    kind: Kind,
}

enum Kind {
    Tollgate(Server),
    Baseline(Baseline),
    Other(Option<Pid>),
}

/// What a server says it has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Counts {
    calls: u64,
    /// Only of a server that decides.
    hits: Option<u64>,
}

impl Target {
    /// The baseline, tollgate, and the others.
    pub(crate) fn all(others: &Others) -> anyhow::Result<Vec<Self>> {
        let baseline = Baseline::start_by(Command::new(Baseline::build()?))?;
        let mut all = vec![
            Target::baseline(baseline),
            Target::tollgate(Server::start(RULES, &[])),
        ];
        all.extend(others.with.iter().map(|with| {
            let arguments: Vec<_> = with.arguments.iter().map(String::as_str).collect();
            Target {
                name: with.name.clone(),
                ..Target::tollgate(Server::start(RULES, &arguments))
            }
        }));
        all.extend(others.against.iter().map(Target::other));
        Ok(all)
    }

    pub(crate) fn tollgate(server: Server) -> Self {
        Target {
            name: "tollgate".to_owned(),
            address: SocketAddr::from(([127, 0, 0, 1], server.grpc)),
            kind: Kind::Tollgate(server),
        }
    }

    pub(crate) fn baseline(baseline: Baseline) -> Self {
        Target {
            name: "baseline".to_owned(),
            address: SocketAddr::from(([127, 0, 0, 1], baseline.port)),
            kind: Kind::Baseline(baseline),
        }
    }

    fn other(against: &Against) -> Self {
        Target {
            name: against.name.clone(),
            address: against.address,
            kind: Kind::Other(against.pid),
        }
    }

    /// Whether it decides, so that it is to know all clients first.
    pub(crate) fn decides(&self) -> bool {
        !matches!(self.kind, Kind::Baseline(_))
    }

    /// The server, where it is tollgate of ours.
    pub(crate) fn server(&self) -> &Server {
        match &self.kind {
            Kind::Tollgate(server) => server,
            _ => panic!("{} is no tollgate of ours", self.name),
        }
    }

    /// The CPU time that its process has taken so far, in user mode and in the kernel, threads that have ended included.
    /// None if nobody said which process it is.
    pub(crate) fn cpu_time(&self) -> Option<Duration> {
        let pid = match &self.kind {
            Kind::Tollgate(server) => server.pid(),
            Kind::Baseline(baseline) => server::pid(&baseline.process),
            Kind::Other(pid) => (*pid)?,
        };
        let clock = ClockId::pid_cpu_clock_id(pid).expect("the process is running");
        Some(clock.now().expect("the process is running").into())
    }

    /// None if it cannot be asked.
    pub(crate) fn counts(&self) -> Option<Counts> {
        match &self.kind {
            Kind::Tollgate(server) => {
                let metrics = server.metrics();
                let of = |name| metrics.get(name).map_or(0, |value| *value as u64);
                Some(Counts {
                    calls: of("ratelimit_service_total_requests"),
                    hits: Some(of("ratelimit_service_rate_limit_total_hits")),
                })
            }
            Kind::Baseline(baseline) => Some(Counts {
                calls: baseline.calls(),
                hits: None,
            }),
            Kind::Other(_) => None,
        }
    }

    /// Fails unless exactly so many calls of this size were answered, and decided, since `before`.
    pub(crate) fn check(&self, before: Option<Counts>, calls: u64, size: Size) -> anyhow::Result<()> {
        let Some(before) = before else {
            return Ok(());
        };
        let expected = Counts {
            calls: before.calls + calls,
            hits: before.hits.map(|hits| hits + calls * size.descriptors()),
        };
        // The last calls may be counted just after their answers were sent.
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) {
            if self.counts() == Some(expected) {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(20));
        }
        bail!(
            "{} has not done what it was sent: {:?} in place of {expected:?}",
            self.name,
            self.counts()
        )
    }

    /// Has a server of ours end by itself, and waits until it has.
    pub(crate) fn end(self) {
        match self.kind {
            Kind::Tollgate(mut server) => server.end(),
            Kind::Baseline(mut baseline) => baseline.end(),
            Kind::Other(_) => {}
        }
    }
}

/// `benches/baseline.rs`, running. It ends with this.
pub(crate) struct Baseline {
    process: Child,
    port: u16,
    input: Option<ChildStdin>,
    output: Mutex<BufReader<ChildStdout>>,
}

impl Drop for Baseline {
    fn drop(&mut self) {
        // It holds nothing that must be saved.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Baseline {
    /// Builds it, which `cargo bench` does not. Where the program is.
    pub(crate) fn build() -> anyhow::Result<PathBuf> {
        let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let output = Command::new(cargo)
            .args(["build", "--example", "baseline", "--profile", "baseline"])
            .args(["--message-format", "json-render-diagnostics"])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .stderr(Stdio::inherit())
            .output()?;
        ensure!(output.status.success(), "the baseline does not build");
        let messages = output.stdout.split(|byte| *byte == b'\n');
        messages
            .filter_map(|line| serde_json::from_slice::<Value>(line).ok())
            .find_map(|message| message["executable"].as_str().map(PathBuf::from))
            .context("cargo does not say where the baseline is")
    }

    /// Starts it by a command that runs the program and hands its argument on, and waits until it serves.
    pub(crate) fn start_by(mut command: Command) -> anyhow::Result<Self> {
        let mut process = command
            .arg("0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let input = process.stdin.take();
        let mut output = BufReader::new(process.stdout.take().expect("it is piped"));
        let port = number(&mut output, "port ");
        Ok(Baseline {
            process,
            port: u16::try_from(port).expect("it is a port"),
            input,
            output: Mutex::new(output),
        })
    }

    fn calls(&self) -> u64 {
        let mut input = self.input.as_ref().expect("it is there until the end");
        writeln!(input).expect("the baseline reads");
        number(&mut self.output.lock().expect("nobody panics"), "calls ")
    }

    /// Has it end by itself, at the end of its input, and waits until it has.
    fn end(&mut self) {
        drop(self.input.take());
        self.process.wait().expect("it is our child");
    }
}

/// The number in the next line, behind `prefix`.
fn number(lines: &mut BufReader<ChildStdout>, prefix: &str) -> u64 {
    let mut line = String::new();
    lines.read_line(&mut line).expect("the baseline writes");
    let number = line.trim().strip_prefix(prefix);
    let number = number.and_then(|number| number.parse().ok());
    number.unwrap_or_else(|| panic!("the baseline says {line:?} where {prefix:?} and a number are expected"))
}
