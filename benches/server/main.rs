//! What the release server costs over the wire, beside `benches/baseline.rs`: a tonic server as anybody would write it, which
//! decides nothing.
//!
//! ```sh
//! cargo bench --bench server -- closed              # CPU time of a call and calls per second; needs h2load
//! cargo bench --bench server -- closed --load own   # the same, each call of another client
//! cargo bench --bench server -- open                # how long calls take at given rates
//! cargo bench --bench server -- disturbance         # the same while the server is busy with something else
//! cargo bench --bench server -- start               # how long until it takes connections
//! cargo bench --bench server -- instructions        # instructions of a call; needs h2load and valgrind
//! cargo bench --bench server -- plot target/bench-server.json > closed.svg
//! ```
//!
//! Each has `--help`, and writes its figures as JSON as well. All servers are measured in turn, as often as `--repetitions` says, and
//! the figures are medians. A machine on which load and server share the cores is noisy: compare the ratios of one table, and look at
//! the load averages below it. `--against` measures a server that runs already, which should have the rules that `rules` prints.
//!
//! Each call of tollgate is a whole decision with 100,000 clients, all of which have called before: one or three counters are found
//! and charged. What the server has counted must be what it was sent. What is easier than real traffic:
//!
//! - h2load can send one message only: each of its runs is the calls of one client, whose counters are in the processor's caches.
//!   With `--load own`, and in `open` and `disturbance`, each call is of any client; that load takes more CPU time than h2load.
//! - All calls have the same headers, and none of those for tracing that Envoy adds. There is no TLS, and no network.
//! - There are four rules, except where `disturbance` says so.

#![allow(clippy::disallowed_methods)] // a bench reads the real clock

mod arrivals;
mod closed;
mod disturbance;
mod generator;
#[path = "../common/h2load.rs"]
mod h2load;
mod instructions;
mod open;
mod plot;
#[path = "../common/random.rs"]
mod random;
mod report;
#[path = "../common/request.rs"]
mod request;
#[path = "../common/resident.rs"]
mod resident;
#[path = "../common/server.rs"]
mod server;
mod start;
mod target;
mod timer;
mod traffic;

use std::path::PathBuf;
use std::{env, fs};

use clap::Parser;

/// Measures the release server beside a tonic server that decides nothing
#[derive(Debug, Parser)]
#[command(name = "cargo bench --bench server --")]
enum Mode {
    /// CPU time of a call and calls per second, the next call sent as soon as one is answered
    Closed(closed::Options),
    /// How long a call takes when calls come at a given rate
    Open(open::Options),
    /// How long a call takes while the server loads rules, forgets keys, writes a snapshot, shows metrics
    Disturbance(disturbance::Options),
    /// How long until the server takes connections
    Start(start::Options),
    /// Instructions of a call, counted by callgrind
    Instructions(instructions::Options),
    /// Print the rules that a server needs to be measured `--against`
    Rules,
    /// Draw what `closed` has written as JSON, as SVG to standard output
    Plot { file: PathBuf },
}

fn main() -> anyhow::Result<()> {
    // Cargo adds an argument of its own.
    let mode = Mode::parse_from(env::args().filter(|argument| argument != "--bench"));
    // One thread, so that the load leaves a core to the server.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    match mode {
        Mode::Closed(options) => closed::run(&options, &runtime),
        Mode::Open(options) => open::run(&options, &runtime),
        Mode::Disturbance(options) => disturbance::run(&options, &runtime),
        Mode::Start(options) => start::run(&options),
        Mode::Instructions(options) => instructions::run(&options),
        Mode::Rules => {
            print!("{}", traffic::RULES);
            Ok(())
        }
        Mode::Plot { file } => {
            print!("{}", plot::draw(&serde_json::from_slice(&fs::read(file)?)?)?);
            Ok(())
        }
    }
}
