//! tollgate decides for Envoy, or any caller over gRPC, whether a request may pass.
//!
//! The path of a request: [`rls`] takes the message off the wire and converts it into a [`descriptor::Request`];
//! [`limiter`] finds the [`rule`] of each descriptor in the [`matcher`], names its counter ([`key`]) and lets the [`store`]
//! count the hits with the arithmetic of an [`algorithm`]; the outcomes become a [`decision::Decision`], which `rls`
//! converts back.
//!
//! Whoever wants to know of it is told: [`metrics`], [`events`] and [`top`].
//!
//! Around it: [`config`] reads settings and rules, which [`reload`] and [`xds`] put in force, also when they change; [`server`]
//! wires and runs everything, with [`tls`] where it is wanted; [`http`] and [`health`] show it to the outside; [`replay`] runs
//! recorded requests on a manual [`clock`].

pub mod algorithm;
pub mod build;
pub mod cli;
pub mod client_address;
pub mod clock;
pub mod config;
pub mod decision;
pub mod descriptor;
pub mod events;
mod file_watch;
pub mod health;
pub mod http;
mod jitter;
pub mod key;
pub mod limiter;
pub mod matcher;
pub mod metrics;
pub mod proto;
pub mod rate_limit;
pub mod reload;
pub mod replay;
pub mod rls;
pub mod rule;
pub mod server;
pub mod shutdown;
pub mod spans;
pub mod statistics;
pub mod store;
mod striped;
pub mod telemetry;
pub mod tls;
pub mod top;
pub mod xds;
