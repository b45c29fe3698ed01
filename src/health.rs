//! Whether the server wants traffic: one truth for the gRPC health service and for HTTP.

use std::sync::Arc;

use tokio::sync::watch;
use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health as HealthService, HealthServer};
use tonic_health::server::{HealthReporter, health_reporter};

use crate::rls;

/// The names under which health is asked: the empty one, the service, and what envoyproxy/ratelimit calls itself.
const NAMES: [&str; 3] = ["", rls::SERVICE_NAME, "ratelimit"];

/// A handle to the server's health.
#[derive(Debug, Clone)]
pub struct Health {
    components: Arc<watch::Sender<Components>>,
}

/// What health depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Components {
    is_stopping: bool,
    /// Without rules it is not healthy.
    needs_rules: bool,
    has_rules: bool,
}

impl Components {
    /// Why no traffic is wanted. Nothing if it is.
    fn reason(self) -> Option<&'static str> {
        if self.is_stopping {
            Some("stopping")
        } else if self.needs_rules && !self.has_rules {
            Some("no rules are loaded")
        } else {
            None
        }
    }
}

impl Default for Health {
    fn default() -> Self {
        Health::new(false)
    }
}

impl Health {
    /// Healthy from the start, or with `needs_rules` as soon and as long as there are rules.
    pub fn new(needs_rules: bool) -> Self {
        let components = Components {
            is_stopping: false,
            needs_rules,
            has_rules: false,
        };
        Health {
            components: Arc::new(watch::Sender::new(components)),
        }
    }

    /// Why the server wants no traffic. `None` if it does.
    pub fn reason(&self) -> Option<&'static str> {
        self.components.borrow().reason()
    }

    /// Says that the server wants no more traffic. Nobody is turned away by this.
    pub fn stop_serving(&self) {
        self.components
            .send_modify(|components| components.is_stopping = true);
    }

    /// Says whether there are rules.
    pub fn set_rules(&self, has_rules: bool) {
        self.components
            .send_modify(|components| components.has_rules = has_rules);
    }

    /// The gRPC service that shows the same, as long as what comes with it is run.
    pub async fn service(&self) -> (HealthServer<impl HealthService>, HealthReport) {
        let (reporter, service) = health_reporter();
        let report = HealthReport {
            reporter,
            components: self.components.subscribe(),
        };
        report.update().await;
        (service, report)
    }
}

/// Keeps what the gRPC service says of health up to date.
pub struct HealthReport {
    reporter: HealthReporter,
    components: watch::Receiver<Components>,
}

impl HealthReport {
    /// Follows the health of the server until `end`. Then it ends the watches of clients, which would hold up the end of the
    /// server: they see the last status and no more.
    pub async fn run(mut self, end: impl Future<Output = ()>) {
        let mut end = std::pin::pin!(end);
        loop {
            self.components.mark_unchanged();
            self.update().await;
            tokio::select! {
                () = &mut end => break,
                // An error says that nobody is left who could change it.
                changed = self.components.changed() => if changed.is_err() {
                    end.await;
                    break;
                },
            }
        }
        self.update().await;
        for name in NAMES {
            self.reporter.clear_service_status(name).await;
        }
    }

    async fn update(&self) {
        let is_healthy = self.components.borrow().reason().is_none();
        let status = match is_healthy {
            true => ServingStatus::Serving,
            false => ServingStatus::NotServing,
        };
        for name in NAMES {
            self.reporter.set_service_status(name, status).await;
        }
    }
}
