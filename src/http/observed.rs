//! What is limited and why: `/metrics`, `/events` and `/top`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::Json;
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt as _};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, watch};
use tokio::task::spawn_blocking;

use crate::clock::Clock;
use crate::events::{Events, Numbered};
use crate::health::Health;
use crate::limiter::Limiter;
use crate::metrics::{Metrics, prometheus};
use crate::tls::Tls;
use crate::top::Top;

/// What there is to show, and when to stop.
#[derive(Debug, Clone)]
pub struct Shown {
    /// Events, if there are any.
    pub events: Option<Arc<Events>>,
    /// Who is refused most, if that is counted.
    pub top: Option<Arc<Top>>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Whose counters are counted.
    pub limiter: Arc<Limiter>,
    /// How metrics are called for Prometheus.
    pub names: Arc<prometheus::Names>,
    /// On all metrics.
    pub extra_tags: Arc<[(String, String)]>,
    /// Whether traffic is wanted.
    pub health: Health,
    /// The certificates in use, by what they are for.
    pub certificates: Vec<(&'static str, Arc<Tls>)>,
    /// What time it is.
    pub clock: Arc<Clock>,
    /// Streams end when this becomes true.
    pub closed: watch::Receiver<bool>,
}

/// What to leave out of the events.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EventsQuery {
    /// Events up to this number.
    #[serde(default)]
    after: u64,
}

/// Which domains to show.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TopQuery {
    /// Only this one.
    domain: Option<String>,
}

/// The last events as JSON, or for who accepts `text/event-stream` as a stream that goes on.
pub(super) async fn events(
    State(shown): State<Shown>,
    Query(query): Query<EventsQuery>,
    headers: HeaderMap,
) -> Response {
    let Some(events) = shown.events else {
        return off("events are not kept; start the server with --events ring");
    };
    let Some(ring) = events.ring() else {
        return off("events are not kept; add ring to the server's --events");
    };
    if accepts_stream(&headers) {
        let after = last_seen(&headers).unwrap_or(query.after);
        let (seen, coming) = ring.follow(after);
        let missed = Some(missed(after, &seen)).filter(|missed| *missed > 0);
        let seen = missed.map(Err).into_iter().chain(seen.into_iter().map(Ok));
        let events = stream::iter(seen).chain(following(coming));
        let closed = crate::shutdown::closed(shown.closed);
        return Sse::new(
            events
                .map(|event| Ok::<_, Infallible>(sse_event(event)))
                .take_until(closed),
        )
        .keep_alive(KeepAlive::default())
        .into_response();
    }
    let seen = ring.after(query.after);
    let missed = missed(query.after, &seen);
    let answer = json!({"events": seen, "missed": missed, "dropped": events.dropped()});
    Json(answer).into_response()
}

/// The keys that are refused most, as JSON.
pub(super) async fn top(State(shown): State<Shown>, Query(query): Query<TopQuery>) -> Response {
    let Some(top) = shown.top else {
        return off("refused keys are not counted; start the server with --top 20");
    };
    // Decisions are not to wait for it.
    let shown = spawn_blocking(move || top.show(shown.clock.now())).await;
    let mut domains = shown.expect("the keys are shown without panic");
    if let Some(wanted) = query.domain {
        domains.retain(|domain| *domain.domain == wanted);
    }
    Json(json!({ "domains": domains })).into_response()
}

/// How many events after this one are forgotten already. Who starts has missed nothing.
fn missed(after: u64, seen: &[Numbered]) -> u64 {
    match seen.first() {
        Some(first) if after > 0 => first.id.saturating_sub(after + 1),
        _ => 0,
    }
}

/// The page that Prometheus reads.
pub(super) async fn metrics(State(shown): State<Shown>) -> Response {
    // With many rules it takes a while; decisions are not to wait for it.
    let page = spawn_blocking(move || page(&shown))
        .await
        .expect("the page is made without panic");
    ([(header::CONTENT_TYPE, prometheus::CONTENT_TYPE)], page).into_response()
}

fn page(shown: &Shown) -> String {
    let page = prometheus::Page {
        metrics: &shown.metrics,
        limiter: &shown.limiter,
        events: shown.events.as_deref(),
        certificates: &shown.certificates,
        names: &shown.names,
        extra_labels: &shown.extra_tags,
    };
    page.to_string()
}

fn off(advice: &'static str) -> Response {
    (StatusCode::NOT_FOUND, format!("{advice}\n")).into_response()
}

fn accepts_stream(headers: &HeaderMap) -> bool {
    let accepted = headers.get_all(header::ACCEPT).iter();
    accepted
        .filter_map(|accepted| accepted.to_str().ok())
        .any(|accepted| accepted.contains("text/event-stream"))
}

/// The number of the last event that a client has seen that comes again.
fn last_seen(headers: &HeaderMap) -> Option<u64> {
    headers.get("last-event-id")?.to_str().ok()?.parse().ok()
}

/// What is still to come, and how many events a slow follower missed.
fn following(
    coming: broadcast::Receiver<Numbered>,
) -> impl Stream<Item = Result<Numbered, u64>> + Send + 'static {
    stream::unfold(coming, |mut coming| async move {
        match coming.recv().await {
            Ok(event) => Some((Ok(event), coming)),
            Err(RecvError::Lagged(missed)) => Some((Err(missed), coming)),
            Err(RecvError::Closed) => None,
        }
    })
}

fn sse_event(event: Result<Numbered, u64>) -> sse::Event {
    match event {
        Ok(event) => sse::Event::default()
            .id(event.id.to_string())
            .event(event.event.event.name())
            .json_data(&event)
            .expect("an event can be written as JSON"),
        Err(missed) => sse::Event::default()
            .event("missed")
            .data(json!({ "missed": missed }).to_string()),
    }
}
