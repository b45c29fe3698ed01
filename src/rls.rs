//! The service on the wire: `envoy.service.ratelimit.v3.RateLimitService`.

pub mod convert;
pub mod deadline;
pub mod json;
mod unknown_domains;

use std::sync::Arc;

use tonic::{Request, Response, Status};
use tracing::{debug, warn};

use self::deadline::Deadline;
use self::unknown_domains::UnknownDomains;
use crate::clock::Clock;
use crate::limiter::{DecideError, Limiter};
use crate::proto::envoy::service::ratelimit::v3::rate_limit_service_server::RateLimitService;
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

/// The full name of the service, also the name under which its health is asked.
pub const SERVICE_NAME: &str = "envoy.service.ratelimit.v3.RateLimitService";

/// Answers requests with decisions. A decision never waits, so a call that is cancelled is charged wholly or not at all.
#[derive(Debug, Clone)]
pub struct Rls {
    limiter: Arc<Limiter>,
    clock: Arc<Clock>,
    unknown_domains: Arc<UnknownDomains>,
}

impl Rls {
    /// Decides with `limiter` at the time of `clock`.
    pub fn new(limiter: Arc<Limiter>, clock: Arc<Clock>) -> Self {
        Rls {
            limiter,
            clock,
            unknown_domains: Arc::default(),
        }
    }

    /// The answer to `message`.
    pub fn decide(&self, message: &RateLimitRequest) -> Result<RateLimitResponse, DecideError> {
        let matcher = self.limiter.matcher();
        let request = convert::request(message);
        let now = self.clock.now();
        let decision = self.limiter.decide(matcher.as_deref(), &request, now)?;
        if !decision.domain_found && self.unknown_domains.is_news(request.domain, now) {
            let domain = String::from_utf8_lossy(request.domain);
            warn!(%domain, "there are no rules for the domain {domain}: its requests pass");
        }
        Ok(convert::response(&decision))
    }
}

#[tonic::async_trait]
impl RateLimitService for Rls {
    async fn should_rate_limit(
        &self,
        request: Request<RateLimitRequest>,
    ) -> Result<Response<RateLimitResponse>, Status> {
        let deadline = request.extensions().get::<Deadline>();
        if deadline.is_some_and(|deadline| deadline.has_passed(self.clock.now())) {
            return Err(Status::deadline_exceeded(
                "the deadline passed before the decision; nothing was charged",
            ));
        }
        match self.decide(request.get_ref()) {
            Ok(response) => Ok(Response::new(response)),
            Err(error) => {
                debug!(%error, "no decision: {error}");
                Err(error.into())
            }
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
