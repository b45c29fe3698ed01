//! A tonic server of the same service that decides nothing, for the bench `server` to compare with.
//!
//! It is what anybody gets who follows tonic's documentation: the generated service, prost, the defaults of tonic, tokio and the
//! system's allocator, and the profile `baseline`. Each descriptor is answered with a status in which all is set that a limit sets.
//!
//! Run with a port, 0 for a free one, it prints `port N`; for each line it reads it prints `calls N`, and it ends when there are
//! no more.

use std::env;
use std::io::stdin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use tokio::sync::oneshot;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use crate::protos::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use crate::protos::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus, RateLimit};
use crate::protos::envoy::service::ratelimit::v3::rate_limit_service_server::{
    RateLimitService, RateLimitServiceServer,
};
use crate::protos::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

#[allow(dead_code, unreachable_pub, clippy::doc_markdown)] // the code is generated
mod protos {
    include!(concat!(env!("OUT_DIR"), "/baseline/protos.rs"));
}

/// Answers OK, and counts the calls.
struct Baseline(Arc<AtomicU64>);

#[tonic::async_trait]
impl RateLimitService for Baseline {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        self.0.fetch_add(1, Ordering::Relaxed);
        let statuses = request.into_inner().descriptors.into_iter().map(|_| status());
        Ok(Response::new(RateLimitResponse {
            overall_code: Code::Ok.into(),
            statuses: statuses.collect(),
            ..RateLimitResponse::default()
        }))
    }
}

fn status() -> DescriptorStatus {
    DescriptorStatus {
        code: Code::Ok.into(),
        current_limit: Some(RateLimit {
            requests_per_unit: 4_000_000_000,
            unit: Unit::Year.into(),
            ..RateLimit::default()
        }),
        limit_remaining: 3_999_999_999,
        duration_until_reset: Some(prost_types::Duration {
            seconds: 1_000_000,
            nanos: 0,
        }),
        quota: None,
    }
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let port: u16 = env::args().nth(1).context("name a port")?.parse()?;
    // What `Server::serve` makes of an address; this one can be asked for its port.
    let incoming = TcpIncoming::bind(([127, 0, 0, 1], port).into())?.with_nodelay(Some(true));
    println!("port {}", incoming.local_addr()?.port());

    let calls = Arc::new(AtomicU64::new(0));
    let service = RateLimitServiceServer::new(Baseline(Arc::clone(&calls)));
    let (asker, nobody_asks) = oneshot::channel::<()>();
    std::thread::spawn(move || {
        let _asker = asker;
        for _line in stdin().lines() {
            println!("calls {}", calls.load(Ordering::Relaxed));
        }
    });
    let serve = Server::builder()
        .add_service(service)
        .serve_with_incoming(incoming);
    tokio::select! {
        served = serve => Ok(served?),
        _ = nobody_asks => Ok(()),
    }
}
