//! What is answered over HTTP.
//!
//! | port | path | answer |
//! |---|---|---|
//! | HTTP | `/healthcheck` | 200 `OK`, or 500 while the server wants no traffic |
//! | HTTP | `/livez`, `/readyz` | 200 `ok`; `/readyz` 503 and the reason while the server wants no traffic |
//! | HTTP | `/json` | a `RateLimitRequest` in proto3 JSON, answered with 200 or, over the limit, 429 and the `RateLimitResponse` |
//! | HTTP | `GET /metrics` | what is counted, as Prometheus reads it |
//! | HTTP | `GET /events` | the last edges as JSON, or as server-sent events |
//! | HTTP | `GET /top` | the keys that are refused most, as JSON |
//! | HTTP | any other | 404, and what there is on this port |
//! | debug | `/rlconfig` | the rules in force, one line for each limit |
//! | debug | `/stats` | what is counted, one line for each name |
//! | debug | any other | what there is on this port |
//! | Prometheus | as configured | the same as `/metrics` |
//!
//! Where no method stands any will do, as with envoyproxy/ratelimit.

mod debug;
mod observed;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{any, get};
use bytes::BytesMut;
use thiserror::Error;
use tokio::time::error::Elapsed;
use tokio::time::timeout;
use tracing::debug;

pub use self::observed::Shown;

use crate::clock::Clock;
use crate::decision::Code;
use crate::rls::json::InvalidJson;
use crate::rls::{AnswerError, Rls, json};

/// The largest body that `/json` reads, in bytes. As JSON is parsed it takes a hundred times as much memory.
const LARGEST_BODY: usize = 256 * 1024;

/// How long a body may take to arrive.
const BODY_PATIENCE: Duration = Duration::from_secs(30);

/// Why there is no decision.
const REASON: HeaderName = HeaderName::from_static("x-tollgate-reason");

/// For who asks for a path that there is not.
const HINT: &str = "there are /healthcheck, /livez, /readyz, /json, /metrics, /events and /top here; gRPC has a port of its own\n";

/// The routes of the HTTP port.
pub fn routes(rls: Rls, shown: Shown) -> Router {
    let clock = Arc::clone(&shown.clock);
    Router::new()
        .route("/healthcheck", any(healthcheck))
        .route("/livez", any(async || "ok"))
        .route("/readyz", any(ready))
        .route("/metrics", get(observed::metrics))
        .route("/events", get(observed::events))
        .route("/top", get(observed::top))
        .with_state(shown)
        .route("/json", any(decide).with_state((rls, clock)))
        .fallback(async || (StatusCode::NOT_FOUND, HINT))
}

/// The routes of the port that Prometheus reads.
pub fn prometheus_routes(path: &str, shown: Shown) -> Router {
    Router::new()
        .route(path, get(observed::metrics))
        .with_state(shown)
}

/// The routes of the debug port.
pub fn debug_routes(shown: Shown) -> Router {
    Router::new()
        .route("/rlconfig", any(debug::rules))
        .route("/stats", any(debug::stats))
        .fallback(debug::index)
        .with_state(shown)
}

async fn healthcheck(State(shown): State<Shown>) -> Response {
    match shown.health.reason() {
        None => "OK".into_response(),
        Some(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn ready(State(shown): State<Shown>) -> Response {
    match shown.health.reason() {
        None => "ok".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

async fn decide(State((rls, clock)): State<(Rls, Arc<Clock>)>, body: Body) -> Response {
    match answer(&rls, &clock, body).await {
        Ok(response) => response,
        Err(error) => {
            debug!(%error, "bad request on /json: {error}");
            let mut answer = (StatusCode::BAD_REQUEST, "Bad Request\n").into_response();
            // The body is that of envoyproxy/ratelimit. A reason with control characters, as it may quote the request, is left out.
            if let Ok(reason) = HeaderValue::try_from(error.to_string()) {
                answer.headers_mut().insert(REASON, reason);
            }
            answer
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
    Answer(#[from] AnswerError),
}

async fn answer(rls: &Rls, clock: &Clock, body: Body) -> Result<Response, BadRequest> {
    let body = timeout(BODY_PATIENCE, to_bytes(body, LARGEST_BODY)).await??;
    let mut wire = BytesMut::new();
    let code = rls.answer(&json::request(&body)?, clock.now(), &mut wire)?;
    let status = match code {
        Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
        Code::Ok => StatusCode::OK,
    };
    let headers = [(header::CONTENT_TYPE, "application/json")];
    Ok((status, headers, json::response(&wire)).into_response())
}
