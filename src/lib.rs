//! tollgate decides for Envoy, or any caller over gRPC, whether a request may pass.

pub mod algorithm;
pub mod clock;
pub mod config;
pub mod decision;
pub mod descriptor;
pub mod key;
pub mod limiter;
pub mod matcher;
pub mod proto;
pub mod rate_limit;
pub mod store;
