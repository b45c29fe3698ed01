//! tollgate decides for Envoy, or any caller over gRPC, whether a request may pass.

pub mod proto;
