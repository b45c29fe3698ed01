//! The service on the wire: `envoy.service.ratelimit.v3.RateLimitService`.

pub mod deadline;
pub mod decode;
pub mod encode;
pub mod json;
mod unknown_domains;

use std::sync::Arc;

use bytes::BytesMut;
use thiserror::Error;
use tonic::Status;
use tracing::{Level, debug, enabled, warn};

use self::decode::DecodeError;
use self::unknown_domains::UnknownDomains;
use crate::clock::Timestamp;
use crate::decision::{Code, Decision, LimitSource};
use crate::descriptor;
use crate::limiter::{DecideError, Limiter};
use crate::metrics::Metrics;

/// The full name of the service, also the name under which its health is asked.
pub const SERVICE_NAME: &str = "envoy.service.ratelimit.v3.RateLimitService";

/// How much of a domain is logged, in bytes: a client may send any name.
const LONGEST_LOGGED: usize = 100;

/// Answers requests with decisions. A decision never waits, so a call that is cancelled is charged wholly or not at all.
#[derive(Debug, Clone)]
pub struct Rls {
    limiter: Arc<Limiter>,
    metrics: Arc<Metrics>,
    unknown_domains: Arc<UnknownDomains>,
}

/// Why a request has no answer.
#[derive(Debug, Error)]
pub enum AnswerError {
    /// It cannot be read.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// It cannot be decided.
    #[error(transparent)]
    Decide(#[from] DecideError),
}

impl Rls {
    /// Decides with `limiter`, and counts in `metrics`.
    pub fn new(limiter: Arc<Limiter>, metrics: Arc<Metrics>) -> Self {
        Rls {
            limiter,
            metrics,
            unknown_domains: Arc::default(),
        }
    }

    /// Appends the answer to a request to `answer`, both as they go over the wire, and returns its overall code.
    pub fn answer(&self, request: &[u8], now: Timestamp, answer: &mut BytesMut) -> Result<Code, AnswerError> {
        let request = decode::request(request)?;
        let matcher = self.limiter.matcher();
        let decision = self
            .limiter
            .decide(matcher.as_deref(), &request, now)
            .inspect_err(|error| {
                self.metrics.note_service_error();
                debug!(%error, "no decision: {error}");
            })?;
        self.metrics.record(&request, &decision);
        if !decision.domain_found && self.unknown_domains.is_news(request.domain, now) {
            let domain = String::from_utf8_lossy(&request.domain[..request.domain.len().min(LONGEST_LOGGED)]);
            warn!(%domain, "there are no rules for a domain that was asked about: its requests pass");
        }
        if enabled!(Level::DEBUG) {
            log_decision(&request, &decision);
        }
        encode::response(&decision, answer);
        Ok(decision.overall_code)
    }
}

/// One line per descriptor: what was asked, which rule was met, what came out. Values are shown nowhere else.
fn log_decision(request: &descriptor::Request<'_>, decision: &Decision<'_>) {
    let text = String::from_utf8_lossy;
    for (descriptor, status) in request.descriptors.iter().zip(&decision.statuses) {
        let entries: Vec<String> = descriptor
            .entries
            .iter()
            .map(|entry| format!("{}={}", text(entry.key), text(entry.value)))
            .collect();
        let rule = match status.source {
            LimitSource::Rule(rule) | LimitSource::Unlimited(rule) => &rule.path,
            LimitSource::Override => "the request's own limit",
            LimitSource::Replaced => "replaced by another rule",
            LimitSource::Refused => "refused for a malformed address",
            LimitSource::NoRule if decision.domain_found => "no rule",
            LimitSource::NoRule => "unknown domain",
        };
        debug!(
            domain = %text(request.domain),
            descriptor = entries.join(" "),
            rule,
            code = ?status.code,
            limit_remaining = status.limit_remaining,
            "decided on a descriptor"
        );
    }
}

impl From<AnswerError> for Status {
    fn from(error: AnswerError) -> Self {
        match error {
            AnswerError::Decode(DecodeError::Malformed(_)) => Status::internal(error.to_string()),
            AnswerError::Decode(DecodeError::TooLarge) => Status::invalid_argument(error.to_string()),
            AnswerError::Decide(error) => error.into(),
        }
    }
}

impl From<DecideError> for Status {
    fn from(error: DecideError) -> Self {
        match error {
            DecideError::EmptyDomain | DecideError::NoDescriptors => {
                Status::invalid_argument(error.to_string())
            }
            DecideError::NoConfiguration => Status::unavailable(error.to_string()),
        }
    }
}
