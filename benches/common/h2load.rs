//! Load by h2load, which sends one and the same message in all calls, and ends each with an empty frame of its own.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use tempfile::NamedTempFile;
use tollgate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

use crate::request::{PATH, frame};

/// Runs it with so many connections and calls under way on each, for what `amount` says. What it prints.
pub(crate) fn h2load(
    address: SocketAddr,
    connections: usize,
    streams: usize,
    amount: [&str; 2],
    request: &RateLimitRequest,
) -> String {
    let message = NamedTempFile::new().expect("a file can be made");
    fs::write(message.path(), frame(request)).expect("the message can be written");
    let output = Command::new("h2load")
        .args(["-c", &connections.to_string(), "-m", &streams.to_string()])
        .args(amount)
        .args(["-H", "content-type: application/grpc", "-H", "te: trailers", "-d"])
        .arg(message.path())
        .arg(format!("http://{address}{PATH}"))
        .output()
        .expect("h2load is there (Debian: nghttp2-client)");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}
