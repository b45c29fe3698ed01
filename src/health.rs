//! Whether the server wants traffic: one truth for the gRPC health service and for HTTP.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tonic_health::ServingStatus;
use tonic_health::pb::health_server::{Health as HealthService, HealthServer};
use tonic_health::server::{HealthReporter, health_reporter};

use crate::rls;

/// The names under which health is asked: the empty one, the service, and what envoyproxy/ratelimit calls itself.
const NAMES: [&str; 3] = ["", rls::SERVICE_NAME, "ratelimit"];

/// A handle to the server's health. Starts as serving.
#[derive(Debug, Clone)]
pub struct Health {
    serving: Arc<AtomicBool>,
    reporter: HealthReporter,
}

impl Health {
    /// The handle, and the gRPC service that shows the same.
    pub async fn new() -> (Self, HealthServer<impl HealthService>) {
        let (reporter, service) = health_reporter();
        let health = Health {
            serving: Arc::default(),
            reporter,
        };
        health.set(true).await;
        (health, service)
    }

    /// Whether the server wants traffic.
    pub fn is_serving(&self) -> bool {
        self.serving.load(Ordering::Relaxed)
    }

    /// Says that the server wants no more traffic. Nobody is turned away by this.
    pub async fn stop_serving(&self) {
        self.set(false).await;
    }

    /// Ends the watches of clients, which would hold up the end of the server: they see the last status and then no more.
    pub async fn end_watches(&self) {
        let mut reporter = self.reporter.clone();
        for name in NAMES {
            reporter.clear_service_status(name).await;
        }
    }

    async fn set(&self, serving: bool) {
        self.serving.store(serving, Ordering::Relaxed);
        let status = if serving {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        for name in NAMES {
            self.reporter.set_service_status(name, status).await;
        }
    }
}
