//! Whole workloads over the wire against the release server: what it decides, and what it costs in memory.
//!
//! ```sh
//! cargo bench --bench workloads -- hot-key       # one key, 150 connections: exactly its limit passes; needs h2load
//! cargo bench --bench workloads -- random-users  # bursty limits and token buckets at 1,000 calls per second
//! cargo bench --bench workloads -- keys          # memory for 10,000,000 live keys
//! cargo bench --bench workloads -- flood         # 50,000,000 keys against 256 MiB, with one abuser among them
//! ```
//!
//! A workload whose figures are not what they must be ends the program with an error.

#![allow(clippy::disallowed_methods)] // a bench reads the real clock

mod client;
#[path = "../common/h2load.rs"]
mod h2load;
mod hot_key;
mod many_keys;
#[path = "../common/random.rs"]
mod random;
mod random_users;
#[path = "../common/request.rs"]
mod request;
#[path = "../common/resident.rs"]
mod resident;
#[path = "../common/server.rs"]
mod server;

use std::env;

fn main() {
    let asked: Vec<String> = env::args()
        .skip(1)
        .filter(|argument| !argument.starts_with("--"))
        .collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime can be started");
    type Workload = fn(&tokio::runtime::Runtime);
    let workloads: [(&str, Workload); 4] = [
        ("hot-key", hot_key::run),
        ("random-users", random_users::run),
        ("keys", many_keys::keys),
        ("flood", many_keys::flood),
    ];
    let names = workloads.map(|(name, _)| name).join(", ");
    assert!(!asked.is_empty(), "name one or more of the workloads {names}");
    for asked in asked {
        let found = workloads.iter().find(|(name, _)| *name == asked);
        let (name, run) = found.unwrap_or_else(|| panic!("{asked} is none of the workloads {names}"));
        println!("== {name}");
        run(&runtime);
    }
}
