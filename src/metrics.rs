//! What operators measure: statistics of the rules by the names of envoyproxy/ratelimit, calls and how long they take, and what
//! the store and the events have come to.
//!
//! Counting is cheap and always on. [`Metrics::samples`] has everything under its internal name, such as
//! `ratelimit.service.rate_limit.shop.user.total_hits`, from which [`prometheus`] and [`statsd`] make what they tell.

mod histogram;
pub mod mapping;
pub mod prometheus;
pub mod statsd;

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

pub use self::histogram::Observed;

use self::histogram::Histogram;
use crate::clock::Timestamp;
use crate::decision::{Code, Decision, LimitSource};
use crate::descriptor::Request;
use crate::events::Events;
use crate::limiter::Limiter;
use crate::matcher::Matcher;
use crate::rule::{MetricKey, sanitize_metric_key};
use crate::statistics::{Statistics, Totals};
use crate::striped::Striped;

/// How many unknown domains have a counter of their own.
const MOST_UNKNOWN_DOMAINS: usize = 100;

/// Stands for the keys and domains beyond what is counted by name.
const OVERFLOW: &str = "__overflow__";

/// How long a key or domain may be, in bytes, to be counted by name: a client may send any.
const LONGEST_NAME: usize = 512;

/// All that is counted.
#[derive(Debug)]
pub struct Metrics {
    /// By metric key. Those of the rules in force, which hold them as well; written on a reload.
    of_rules: Mutex<HashMap<String, Series>>,
    /// By metric keys that hold values of requests. Written when a key is new.
    of_values: RwLock<HashMap<String, Series>>,
    most_value_keys: usize,
    /// Descriptors of requests for domains that have no rules. Locked for such requests only.
    unknown_domains: Mutex<HashMap<String, u64>>,
    service: Service,
    response_time: Histogram,
    check_time: Histogram,
    shed_calls: AtomicU64,
    connections: AtomicU64,
    ended_connections: AtomicU64,
    /// Hits that were refused for a ban.
    banned_hits: Striped<AtomicU64>,
}

/// What is counted under one metric key.
#[derive(Debug)]
struct Series {
    /// Domain and levels.
    parts: Arc<[String]>,
    totals: Arc<Totals>,
}

impl Series {
    fn new(key: &MetricKey) -> Self {
        Series {
            parts: key.parts().collect(),
            totals: Arc::default(),
        }
    }
}

/// Counters of the service as a whole.
#[derive(Debug, Default)]
struct Service {
    config_load_success: AtomicU64,
    config_load_error: AtomicU64,
    /// In seconds since 1970; 0 before the first.
    config_load_time: AtomicU64,
    global_shadow_mode: AtomicU64,
    service_error: AtomicU64,
}

/// A number under its internal name.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    /// Parts with dots between them.
    pub name: String,
    /// The parts of its metric key, sanitized: domain and levels. `None` for what is not kept by metric key.
    pub metric_key: Option<Arc<[String]>>,
    /// What it is.
    pub value: SampleValue,
}

/// What a sample measures.
#[derive(Debug, Clone, PartialEq)]
pub enum SampleValue {
    /// Only grows.
    Counter(u64),
    /// Goes up and down.
    Gauge(u64),
    /// How long something took, each time.
    Time(Box<Observed>),
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics::new(10_000)
    }
}

impl Metrics {
    /// Nothing counted yet. Of the keys that hold values of requests (`detailed_metric`, `value_to_metric`, limits that come
    /// with a request) `most_value_keys` are counted by name, and the others of each domain together.
    pub fn new(most_value_keys: usize) -> Self {
        Metrics {
            of_rules: Mutex::default(),
            of_values: RwLock::default(),
            most_value_keys,
            unknown_domains: Mutex::default(),
            service: Service::default(),
            response_time: Histogram::default(),
            check_time: Histogram::default(),
            shed_calls: AtomicU64::default(),
            connections: AtomicU64::default(),
            ended_connections: AtomicU64::default(),
            banned_hits: Striped::default(),
        }
    }

    /// Has the rules go on with what was counted of them before. To be called before they are in force.
    pub fn adopt(&self, matcher: &mut Matcher) {
        let mut of_rules = self.of_rules.lock().unwrap_or_else(PoisonError::into_inner);
        for (domain, rule) in matcher.rules_mut() {
            let key = MetricKey::of_levels(domain, &rule.levels);
            let series = of_rules.entry(key.name()).or_insert_with(|| Series::new(&key));
            rule.totals = Arc::clone(&series.totals);
        }
        // Rules that went away the time before last.
        of_rules.retain(|_, series| Arc::strong_count(&series.totals) > 1);
    }

    /// Counts that rules were loaded at `now`, or could not be.
    pub fn note_config_load(&self, is_success: bool, now: Timestamp) {
        let service = &self.service;
        if is_success {
            service.config_load_success.fetch_add(1, Ordering::Relaxed);
            service
                .config_load_time
                .store(now.unix_seconds(), Ordering::Relaxed);
        } else {
            service.config_load_error.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// When rules were loaded last, in seconds since 1970; 0 before.
    pub fn config_load_time(&self) -> u64 {
        self.service.config_load_time.load(Ordering::Relaxed)
    }

    /// Counts a call that could not be decided.
    pub fn note_service_error(&self) {
        self.service.service_error.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a question about health over gRPC, and how long the answer took.
    pub fn note_health_check(&self, took: Duration) {
        self.check_time.observe(took);
    }

    /// Counts a call that was refused since too many were under way.
    pub fn note_shed_call(&self) {
        self.shed_calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a connection to the gRPC port, which is open as long as what comes back is kept.
    pub fn note_connection(self: &Arc<Self>) -> OpenConnection {
        self.connections.fetch_add(1, Ordering::Relaxed);
        OpenConnection(Arc::clone(self))
    }

    /// Counts a call over gRPC, and how long it took.
    pub fn note_call(&self, took: Duration) {
        self.response_time.observe(took);
    }

    /// Counts what was decided.
    pub fn record(&self, request: &Request<'_>, decision: &Decision<'_>) {
        if decision.global_shadow_mode {
            self.service.global_shadow_mode.fetch_add(1, Ordering::Relaxed);
        }
        if !decision.domain_found {
            self.note_unknown_domain(request);
            return;
        }
        for (status, descriptor) in decision.statuses.iter().zip(&request.descriptors) {
            if status.ban.is_some() && status.code == Code::OverLimit {
                let hits = status.statistics.total_hits;
                self.banned_hits.mine().fetch_add(hits, Ordering::Relaxed);
            }
            match status.source {
                LimitSource::Rule(rule) if !rule.metric_key_depends_on_request() => {
                    rule.totals.add(&status.statistics);
                }
                _ => {
                    let domain = String::from_utf8_lossy(request.domain);
                    if let Some(key) = status.metric_key(&domain, &descriptor.entries) {
                        self.totals_of_values(&domain, &key).add(&status.statistics);
                    }
                }
            }
        }
    }

    fn note_unknown_domain(&self, request: &Request<'_>) {
        let mut domains = self
            .unknown_domains
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut domain = sanitize_metric_key(&String::from_utf8_lossy(request.domain));
        let has_room = domains.len() < MOST_UNKNOWN_DOMAINS && domain.len() <= LONGEST_NAME;
        if !has_room && !domains.contains_key(&domain) {
            OVERFLOW.clone_into(&mut domain);
        }
        *domains.entry(domain).or_default() += request.descriptors.len() as u64;
    }

    /// The totals of a key that holds values of a request, or those of its domain's further keys. Names are never given back.
    fn totals_of_values(&self, domain: &str, key: &MetricKey) -> Arc<Totals> {
        let name = key.name();
        let of_values = self.of_values.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(series) = of_values.get(&name) {
            return Arc::clone(&series.totals);
        }
        let has_room = of_values.len() < self.most_value_keys && name.len() <= LONGEST_NAME;
        let mut overflow = MetricKey::new(domain);
        overflow.push(OVERFLOW.as_bytes(), None);
        let key = if has_room { key } else { &overflow };
        if let Some(series) = of_values.get(&key.name()) {
            return Arc::clone(&series.totals);
        }
        drop(of_values);
        let mut of_values = self.of_values.write().unwrap_or_else(PoisonError::into_inner);
        // Others may have come in between.
        let is_full = of_values.len() >= self.most_value_keys && !of_values.contains_key(&key.name());
        let key = if is_full { &overflow } else { key };
        let series = of_values.entry(key.name()).or_insert_with(|| Series::new(key));
        Arc::clone(&series.totals)
    }

    /// The totals by metric key, and its parts.
    fn totals(&self) -> Vec<(String, Arc<[String]>, [u64; 5])> {
        let shown = |(name, series): (&String, &Series)| {
            (name.clone(), Arc::clone(&series.parts), series.totals.sums())
        };
        let of_rules = self.of_rules.lock().unwrap_or_else(PoisonError::into_inner);
        let mut totals: Vec<_> = of_rules.iter().map(shown).collect();
        drop(of_rules);
        let of_values = self.of_values.read().unwrap_or_else(PoisonError::into_inner);
        totals.extend(of_values.iter().map(shown));
        totals
    }

    /// Everything that is counted, under its internal name. Counters of rules that count nothing yet are left out.
    pub fn samples(&self, limiter: &Limiter, events: Option<&Events>) -> Vec<Sample> {
        let mut samples = self.of_reference();
        let banned_hits = self.banned_hits.all().map(|hits| hits.load(Ordering::Relaxed));
        samples.push(counter(
            "tollgate.banned_hits_total".to_owned(),
            banned_hits.sum(),
        ));
        let shed_calls = self.shed_calls.load(Ordering::Relaxed);
        samples.push(counter("tollgate.shed_calls_total".to_owned(), shed_calls));
        let connections = self.connections.load(Ordering::Relaxed);
        let ended = self.ended_connections.load(Ordering::Relaxed);
        samples.push(counter("tollgate.grpc_connections_total".to_owned(), connections));
        samples.push(gauge(
            "tollgate.grpc_connections",
            connections.saturating_sub(ended),
        ));
        samples.push(gauge(
            "tollgate.config_load_time_seconds",
            self.config_load_time(),
        ));
        samples.extend(of_store(limiter));
        samples.extend(events.into_iter().flat_map(of_events));
        samples
    }

    /// What envoyproxy/ratelimit has as well.
    fn of_reference(&self) -> Vec<Sample> {
        const SERVICE: &str = "ratelimit.service";
        let mut samples = Vec::new();
        for (key, parts, sums) in self.totals() {
            let names = Statistics::NAMES.into_iter().zip(sums);
            samples.extend(names.filter(|(_, sum)| *sum > 0).map(|(name, sum)| Sample {
                metric_key: Some(Arc::clone(&parts)),
                ..counter(format!("{SERVICE}.rate_limit.{key}.{name}"), sum)
            }));
        }
        let unknown_domains = self
            .unknown_domains
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        samples.extend(unknown_domains.iter().map(|(domain, count)| {
            counter(format!("{SERVICE}.rate_limit.{domain}.domain_not_found"), *count)
        }));
        drop(unknown_domains);
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let service = &self.service;
        samples.extend([
            counter(
                format!("{SERVICE}.config_load_success"),
                of(&service.config_load_success),
            ),
            counter(
                format!("{SERVICE}.config_load_error"),
                of(&service.config_load_error),
            ),
            counter(
                format!("{SERVICE}.global_shadow_mode"),
                of(&service.global_shadow_mode),
            ),
            counter(
                format!("{SERVICE}.call.should_rate_limit.service_error"),
                of(&service.service_error),
            ),
        ]);
        for (method, times) in [
            ("ShouldRateLimit", &self.response_time),
            ("Check", &self.check_time),
        ] {
            let observed = times.observed();
            let name = |of: &str| format!("ratelimit_server.{method}.{of}");
            samples.push(counter(name("total_requests"), observed.count()));
            samples.push(Sample {
                name: name("response_time"),
                metric_key: None,
                value: SampleValue::Time(Box::new(observed)),
            });
        }
        samples
    }
}

/// A connection that is counted as open.
#[derive(Debug)]
pub struct OpenConnection(Arc<Metrics>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.ended_connections.fetch_add(1, Ordering::Relaxed);
    }
}

fn counter(name: String, value: u64) -> Sample {
    Sample {
        name,
        metric_key: None,
        value: SampleValue::Counter(value),
    }
}

fn gauge(name: &str, value: u64) -> Sample {
    Sample {
        name: name.to_owned(),
        metric_key: None,
        value: SampleValue::Gauge(value),
    }
}

fn of_store(limiter: &Limiter) -> [Sample; 5] {
    let store = limiter.store();
    let pressure = store.pressure();
    [
        gauge("tollgate.counters", store.len() as u64),
        gauge("tollgate.counters_capacity", store.capacity() as u64),
        gauge("tollgate.counters_bytes", store.allocated()),
        counter("tollgate.evicted_counters_total".to_owned(), pressure.evicted),
        counter("tollgate.turned_away_hits_total".to_owned(), pressure.turned_away),
    ]
}

fn of_events(events: &Events) -> Vec<Sample> {
    let mut samples: Vec<Sample> = events
        .counts()
        .into_iter()
        .flatten()
        .map(|(kind, count)| counter(format!("tollgate.events.{}_total", kind.name()), count))
        .collect();
    samples.push(counter(
        "tollgate.dropped_events_total".to_owned(),
        events.dropped(),
    ));
    samples
}
