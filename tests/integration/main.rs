//! The program from outside: decisions on a manual clock, the wire, the command line.

#![allow(clippy::unwrap_used)] // what a test cannot go on without fails it

mod command_line;
mod conformance;
mod decisions;
mod events;
mod metrics;
mod ports;
mod program;
mod readme;
mod regression;
mod reload;
mod rule_files;
mod seeds;
mod snapshots;
mod spans;
mod store_contract;
mod support;
mod wire;
mod xds;
