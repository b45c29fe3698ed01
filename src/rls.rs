//! The service on the wire: `envoy.service.ratelimit.v3.RateLimitService`.

pub mod convert;
pub mod deadline;
pub mod json;
pub mod size;
mod unknown_domains;

use std::sync::Arc;

use tonic::{Request, Response, Status};
use tracing::{Level, debug, enabled, warn};

use self::deadline::Deadline;
use self::unknown_domains::UnknownDomains;
use crate::clock::{Clock, Timestamp};
use crate::decision::{Decision, LimitSource};
use crate::descriptor;
use crate::limiter::{DecideError, Limiter};
use crate::metrics::Metrics;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitService;
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

/// The full name of the service, also the name under which its health is asked.
pub const SERVICE_NAME: &str = "envoy.service.ratelimit.v3.RateLimitService";

/// How much of a domain is logged, in bytes: a client may send any name.
const LONGEST_LOGGED: usize = 100;

/// Answers requests with decisions. A decision never waits, so a call that is cancelled is charged wholly or not at all.
#[derive(Debug, Clone)]
pub struct Rls {
    limiter: Arc<Limiter>,
    clock: Arc<Clock>,
    metrics: Arc<Metrics>,
    unknown_domains: Arc<UnknownDomains>,
}

impl Rls {
    /// Decides with `limiter` at the time of `clock`, and counts in `metrics`.
    pub fn new(limiter: Arc<Limiter>, clock: Arc<Clock>, metrics: Arc<Metrics>) -> Self {
        Rls {
            limiter,
            clock,
            metrics,
            unknown_domains: Arc::default(),
        }
    }

    /// The answer to `message`.
    pub fn decide(&self, message: &RateLimitRequest) -> Result<RateLimitResponse, DecideError> {
        self.decide_at(message, self.clock.now())
    }

    fn answer(
        &self,
        request: &Request<RateLimitRequest>,
        now: Timestamp,
    ) -> Result<RateLimitResponse, Status> {
        let deadline = request.extensions().get::<Deadline>();
        if deadline.is_some_and(|deadline| deadline.has_passed(now)) {
            return Err(Status::deadline_exceeded(
                "the deadline passed before the decision; nothing was charged",
            ));
        }
        self.decide_at(request.get_ref(), now).map_err(|error| {
            debug!(%error, "no decision: {error}");
            error.into()
        })
    }

    fn decide_at(
        &self,
        message: &RateLimitRequest,
        now: Timestamp,
    ) -> Result<RateLimitResponse, DecideError> {
        let matcher = self.limiter.matcher();
        let request = convert::request(message);
        let decision = self
            .limiter
            .decide(matcher.as_deref(), &request, now)
            .inspect_err(|_| self.metrics.note_service_error())?;
        self.metrics.record(&request, &decision);
        if !decision.domain_found && self.unknown_domains.is_news(request.domain, now) {
            let domain = String::from_utf8_lossy(&request.domain[..request.domain.len().min(LONGEST_LOGGED)]);
            warn!(%domain, "there are no rules for a domain that was asked about: its requests pass");
        }
        if enabled!(Level::DEBUG) {
            log_decision(&request, &decision);
        }
        Ok(convert::response(&decision))
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

#[tonic::async_trait]
impl RateLimitService for Rls {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let now = self.clock.now();
        let answer = self.answer(&request, now);
        let took = self.clock.monotonic().saturating_sub(now.monotonic);
        self.metrics.note_call(took);
        answer.map(Response::new)
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
