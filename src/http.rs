//! The HTTP port.
//!
//! | path | answer |
//! |---|---|
//! | `/healthcheck` | 200 `OK`, or 500 while the server wants no traffic |
//! | `/json` | a `RateLimitRequest` in proto3 JSON, answered with 200 or, over the limit, 429 and the `RateLimitResponse` |
//!
//! Any method will do, as with envoyproxy/ratelimit.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use tracing::debug;

use crate::health::Health;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response::Code;
use crate::rls::{Rls, json};

/// The largest body that `/json` reads, in bytes: what gRPC takes as well.
const LARGEST_BODY: usize = 4 * 1024 * 1024;

/// The routes of the HTTP port.
pub fn routes(rls: Rls, health: Health) -> Router {
    Router::new()
        .route("/healthcheck", any(healthcheck).with_state(health))
        .route("/json", any(decide).with_state(rls))
        .layer(DefaultBodyLimit::max(LARGEST_BODY))
}

async fn healthcheck(State(health): State<Health>) -> Response {
    if health.is_serving() {
        "OK".into_response()
    } else {
        StatusCode::INTERNAL_SERVER_ERROR.into_response()
    }
}

async fn decide(
    State(rls): State<Rls>,
    body: Result<Bytes, axum::extract::rejection::BytesRejection>,
) -> Response {
    let decided = body
        .map_err(|error| error.to_string())
        .and_then(|body| json::request(&body).map_err(|error| error.to_string()))
        .and_then(|request| rls.decide(&request).map_err(|error| error.to_string()));
    match decided {
        Ok(response) => {
            let status = match response.overall_code() {
                Code::OverLimit => StatusCode::TOO_MANY_REQUESTS,
                Code::Ok => StatusCode::OK,
                Code::Unknown => StatusCode::INTERNAL_SERVER_ERROR,
            };
            (
                status,
                [(header::CONTENT_TYPE, "application/json")],
                json::response(&response),
            )
                .into_response()
        }
        Err(error) => {
            debug!(%error, "bad request on /json: {error}");
            (StatusCode::BAD_REQUEST, "Bad Request\n").into_response()
        }
    }
}
