//! The debug port: what is in force, and what is counted.

use axum::extract::State;
use axum::http::HeaderName;
use axum::response::{IntoResponse, Response};
use tokio::task::spawn_blocking;

use super::Shown;
use crate::matcher::Matcher;
use crate::metrics::SampleValue;
use crate::rate_limit::RateLimit;
use crate::rule::{Limit, Rule};

/// Says which rules are in force: the same for the same files.
const VERSION: HeaderName = HeaderName::from_static("x-tollgate-config-version");

/// Says for how many seconds they have been.
const AGE: HeaderName = HeaderName::from_static("x-tollgate-config-age");

/// What there is on the port.
pub(super) async fn index() -> &'static str {
    "/rlconfig: print out the currently loaded configuration for debugging\n/stats: print out stats\n"
}

/// The rules in force, one line for each limit, in the order of their text.
pub(super) async fn rules(State(shown): State<Shown>) -> Response {
    // With many rules it takes a while; decisions are not to wait for it.
    let answer = spawn_blocking(move || rules_in_force(&shown)).await;
    answer.expect("rules are shown without panic")
}

fn rules_in_force(shown: &Shown) -> Response {
    let matcher = shown.limiter.matcher();
    let Some(matcher) = matcher.as_deref() else {
        return String::new().into_response();
    };
    let now = shown.clock.now().unix_seconds();
    let age = now.saturating_sub(shown.metrics.config_load_time());
    let headers = [(VERSION, matcher.version().to_owned()), (AGE, age.to_string())];
    (headers, rule_lines(matcher)).into_response()
}

fn rule_lines(matcher: &Matcher) -> String {
    let mut lines = Vec::new();
    for rule in matcher.domains().flat_map(|domain| domain.rules()) {
        match &rule.limit {
            Limit::Unlimited => lines.push(line(rule, None)),
            Limit::All(limits) => lines.extend(limits.iter().map(|limit| line(rule, Some(limit)))),
        }
    }
    // Domains come in another order each time.
    lines.sort();
    lines.concat()
}

/// As envoyproxy/ratelimit writes it; a limit that it does not know in words as well.
fn line(rule: &Rule, limit: Option<&RateLimit>) -> String {
    let named_unit = limit
        .and_then(|limit| limit.window.units())
        .filter(|(_, multiplier)| multiplier.get() == 1);
    let unit = named_unit.map_or("UNKNOWN", |(unit, _)| unit.name());
    let requests_per_unit = limit.map_or(0, |limit| limit.requests_per_unit);
    let (path, shadow_mode, quota_mode) = (&rule.path, rule.shadow_mode, rule.quota_mode);
    let in_words = match limit {
        Some(limit) if limit.to_string() != format!("{requests_per_unit} per {unit}") => {
            format!(", limit: {limit}")
        }
        _ => String::new(),
    };
    format!(
        "{path}: unit={unit} requests_per_unit={requests_per_unit}, shadow_mode: {shadow_mode}, quota_mode: \
         {quota_mode}{in_words}\n"
    )
}

/// What is counted, one line for each internal name.
pub(super) async fn stats(State(shown): State<Shown>) -> String {
    // With many rules it takes a while; decisions are not to wait for it.
    let lines = spawn_blocking(move || {
        let samples = shown.metrics.samples(&shown.limiter, shown.events.as_deref());
        let mut lines: Vec<String> = samples
            .into_iter()
            .filter_map(|sample| match sample.value {
                SampleValue::Counter(value) | SampleValue::Gauge(value) => {
                    Some(format!("{}: {value}\n", sample.name))
                }
                SampleValue::Time(_) => None,
            })
            .collect();
        lines.sort();
        lines.concat()
    });
    lines.await.expect("lines are made without panic")
}
