//! The HTTP port.
//!
//! | path | answer |
//! |---|---|
//! | `/healthcheck` | 200 `OK`, or 500 while the server wants no traffic |
//! | `/json` | a `RateLimitRequest` in proto3 JSON, answered with 200 or, over the limit, 429 and the `RateLimitResponse` |
//! | `GET /metrics` | what is counted, as Prometheus reads it |
//! | `GET /events` | the last edges as JSON, or as server-sent events |
//! | `GET /top` | the keys that are refused most, as JSON |
//!
//! Where no method stands any will do, as with envoyproxy/ratelimit.

mod observed;

use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::error::Elapsed;
use tokio::time::timeout;
use tracing::debug;

pub use self::observed::Shown;

use crate::health::Health;
use crate::limiter::DecideError;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use crate::rls::json::InvalidJson;
use crate::rls::{Rls, json};

/// The largest body that `/json` reads, in bytes. As JSON is parsed it takes a hundred times as much memory.
const LARGEST_BODY: usize = 256 * 1024;

/// How long a body may take to arrive.
const BODY_PATIENCE: Duration = Duration::from_secs(30);

/// The routes of the HTTP port.
pub fn routes(rls: Rls, health: Health, shown: Shown) -> Router {
    Router::new()
        .route("/metrics", get(observed::metrics))
        .route("/events", get(observed::events))
        .route("/top", get(observed::top))
        .with_state(shown)
        .route("/healthcheck", any(healthcheck).with_state(health))
        .route("/json", any(decide).with_state(rls))
}

/// Waits until everything is to close.
pub(crate) async fn closed(mut closed: watch::Receiver<bool>) {
    // An error means that the server is gone.
    let _ = closed.wait_for(|closed| *closed).await;
}

async fn healthcheck(State(health): State<Health>) -> Response {
    if health.is_serving() {
        "OK".into_response()
    } else {
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}

async fn decide(State(rls): State<Rls>, body: Body) -> Response {
    match answer(&rls, body).await {
        Ok(response) => response,
        Err(error) => {
            debug!(%error, "bad request on /json: {error}");
            (StatusCode::BAD_REQUEST, "Bad Request\n").into_response()
        }
    }
}

/// Why there is no answer. envoyproxy/ratelimit says 400 to all of it.
#[derive(Debug, Error)]
enum BadRequest {
    #[error("the body did not arrive in time")]
    Late(#[from] Elapsed),
    #[error("{0}")]
    Body(#[from] axum::Error),
    #[error("{0}")]
    Json(#[from] InvalidJson),
    #[error("{0}")]
    Decide(#[from] DecideError),
}

async fn answer(rls: &Rls, body: Body) -> Result<Response, BadRequest> {
    let body = timeout(BODY_PATIENCE, to_bytes(body, LARGEST_BODY)).await??;
    let response = rls.decide(&json::request(&body)?)?;
    let status = match response.overall_code() {
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
        Code::Ok => StatusCode::OK,
        Code::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
    };
    let headers = [(header::CONTENT_TYPE, "application/json")];
    Ok((status, headers, json::response(&response)).into_response())
}
