//! What a process holds in memory.

use std::fs;

/// In bytes, of the process with this number, or of `self`.
pub(crate) fn resident_bytes(process: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).expect("it is running, on Linux");
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
