//! The release server as a process of its own, and what it says of itself.

use std::collections::HashMap;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// A running server. It ends with this.
pub(crate) struct Server {
    process: Child,
    /// Port of gRPC.
    pub(crate) grpc: u16,
    http: u16,
    _rules: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        // It holds nothing that must be saved.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Server {
    /// Starts the server with these rules and further arguments, and waits until it serves.
    pub(crate) fn start(rules: &str, arguments: &[&str]) -> Self {
        let directory = TempDir::new().expect("a directory can be made");
        let file = directory.path().join("rules.yaml");
        fs::write(&file, rules).expect("the rules can be written");
        let (grpc, http) = (free_port(), free_port());
        let process = Command::new(env!("CARGO_BIN_EXE_tollgate"))
            .args(["serve", "--host", "127.0.0.1", "--grpc-host", "127.0.0.1"])
            .args(["--grpc-port", &grpc.to_string(), "--port", &http.to_string()])
            .arg("--config")
            .arg(&file)
            .args(arguments)
            .stderr(Stdio::null())
            .spawn()
            .expect("the server can be started");
        let server = Server {
            process,
            grpc,
            http,
            _rules: directory,
        };
        let start = Instant::now();
        while TcpStream::connect(("127.0.0.1", grpc)).is_err() {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "the server does not start"
            );
            thread::sleep(Duration::from_millis(10));
        }
        server
    }

    /// What it holds in memory, in bytes.
    pub(crate) fn resident_bytes(&self) -> u64 {
        let status =
            fs::read_to_string(format!("/proc/{}/status", self.process.id())).expect("it is running");
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:"))
            .expect("Linux tells the resident size");
        let kibibytes: u64 = line
            .split_whitespace()
            .next()
            .and_then(|size| size.parse().ok())
            .expect("it is a number");
        kibibytes * 1024
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

    fn get(&self, path: &str) -> String {
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

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
    listener.local_addr().expect("it has an address").port()
}
