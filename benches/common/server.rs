//! The release server as a process of its own, and what it says of itself.

#![allow(dead_code)] // no bench needs all of it

use std::collections::HashMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{self, Signal};
use nix::unistd::Pid;
use serde_json::Value;
use tempfile::TempDir;

use crate::resident::resident_bytes;

/// A running server. It ends with this.
pub(crate) struct Server {
    process: Child,
    /// Port of gRPC.
    pub(crate) grpc: u16,
    http: u16,
    /// How long it took until it took connections, from when its process was made.
    pub(crate) startup_time: Duration,
    /// Where the file of the rules is, in a directory that goes with the server.
    rules: PathBuf,
    _directory: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It holds nothing that must be saved.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    /// The release server.
    pub(crate) const PROGRAM: &str = env!("CARGO_BIN_EXE_tollgate");

    /// Starts the server with these rules and further arguments, and waits until it serves.
    pub(crate) fn start(rules: &str, arguments: &[&str]) -> Self {
        Self::start_by(Command::new(Self::PROGRAM), rules, arguments)
    }

    /// The same by a command that runs the program and hands its arguments on.
    pub(crate) fn start_by(mut command: Command, rules: &str, arguments: &[&str]) -> Self {
        let directory = TempDir::new().expect("a directory can be made");
        let file = directory.path().join("rules.yaml");
        fs::write(&file, rules).expect("the rules can be written");
        command.args(["serve", "--config"]).arg(&file).args(arguments);
        Self::start_command(command, directory)
    }

    /// The release server with the rules that it has itself.
    pub(crate) fn start_with_own_rules() -> Self {
        let mut command = Command::new(Self::PROGRAM);
        command.arg("serve");
        Self::start_command(command, TempDir::new().expect("a directory can be made"))
    }

    fn start_command(mut command: Command, directory: TempDir) -> Self {
        let (grpc, http) = (free_port(), free_port());
        let process = command
            .args(["--host", "127.0.0.1", "--grpc-host", "127.0.0.1"])
            .args(["--grpc-port", &grpc.to_string(), "--port", &http.to_string()])
            .args(["--debug-host", "127.0.0.1", "--debug-port", "0"])
            .stderr(Stdio::null());
        let start = Instant::now();
        let process = process.spawn().expect("the server can be started");
        let mut server = Server {
            process,
            grpc,
            http,
            startup_time: Duration::ZERO,
            rules: directory.path().join("rules.yaml"),
            _directory: directory,
        };
        // That of HTTP is opened a moment after that of gRPC.
        for port in [grpc, http] {
            while TcpStream::connect(("127.0.0.1", port)).is_err() {
                assert!(
                    start.elapsed() < Duration::from_secs(60),
                    "the server does not start"
                );
                thread::sleep(Duration::from_micros(200));
            }
        }
        server.startup_time = start.elapsed();
        server
    }

    pub(crate) fn pid(&self) -> Pid {
        pid(&self.process)
    }

    /// Has the server end by itself, and waits until it has.
    pub(crate) fn end(&mut self) {
        signal::kill(self.pid(), Signal::SIGINT).expect("it is running");
        self.process.wait().expect("it is our child");
    }

    /// Puts other rules into the file.
    pub(crate) fn set_rules(&self, rules: &str) {
        let new = self.rules.with_file_name("new");
        fs::write(&new, rules).expect("the rules can be written");
        fs::rename(&new, &self.rules).expect("they can be put in place");
    }

    /// What it holds in memory, in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        resident_bytes(&self.process.id().to_string())
    }

    /// The sum of each metric over its labels.
    pub(crate) fn metrics(&self) -> HashMap<String, f64> {
        let mut sums = HashMap::new();
        for line in self.get("/metrics").lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').expect("a metric has a value");
            let name = name.split('{').next().unwrap_or(name);
            *sums.entry(name.to_owned()).or_default() += value.parse().unwrap_or(0.0);
        }
        sums
    }

    /// The events that were told.
    pub(crate) fn events(&self) -> Vec<String> {
        let answer: Value = serde_json::from_str(&self.get("/events")).expect("it is JSON");
        let events = answer["events"].as_array().expect("there is a list");
        events
            .iter()
            .map(|event| event["event"].as_str().unwrap_or_default().to_owned())
            .collect()
    }

    pub(crate) fn get(&self, path: &str) -> String {
        let mut connection = TcpStream::connect(("127.0.0.1", self.http)).expect("the server is running");
        write!(
            connection,
            "GET {path} HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n\r\n"
        )
        .expect("the server reads");
        let mut answer = String::new();
        connection
            .read_to_string(&mut answer)
            .expect("the server answers");
        let (_, body) = answer.split_once("\r\n\r\n").expect("there is a body");
        // The page of metrics and the events are not chunked: their length is known.
        body.to_owned()
    }
}

pub(crate) fn pid(process: &Child) -> Pid {
    Pid::from_raw(i32::try_from(process.id()).expect("process ids are small"))
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
    listener.local_addr().expect("it has an address").port()
}
