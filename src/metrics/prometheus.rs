//! The page that Prometheus reads: names and labels as envoyproxy/ratelimit's exporter makes them, without its faults.
//!
//! A rule's statistics become `ratelimit_service_rate_limit_<statistic>{domain, key1, key2}`: the parts of its metric key; what
//! is deeper than two levels is folded into them. Everything else keeps its internal name, with `_` for what a name cannot
//! hold.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use ::prometheus::{Encoder as _, TextEncoder};

use super::mapping::{BUCKETS, Mapped, Mapping, is_reserved, is_taken};
use super::{Metrics, Observed, Sample, SampleValue};
use crate::build;
use crate::events::Events;
use crate::limiter::Limiter;
use crate::tls::Tls;

/// The content type of the page.
pub const CONTENT_TYPE: &str = ::prometheus::TEXT_FORMAT;

/// How names are shown.
#[derive(Debug, Default)]
pub struct Names {
    /// What names become; without it, what envoyproxy/ratelimit makes of them.
    pub mapping: Option<Mapping>,
    /// Whether response times are in milliseconds, whatever their name says, where no mapping says so.
    pub milliseconds: bool,
}

/// What is shown.
#[derive(Debug, Clone, Copy)]
pub struct Page<'a> {
    /// What is counted.
    pub metrics: &'a Metrics,
    /// Whose counters are counted.
    pub limiter: &'a Limiter,
    /// Events, if there are any.
    pub events: Option<&'a Events>,
    /// The certificates of the ports that have TLS, by what these are for.
    pub certificates: &'a [(&'static str, Arc<Tls>)],
    /// How they are called.
    pub names: &'a Names,
    /// On everything.
    pub extra_labels: &'a [(String, String)],
}

impl fmt::Display for Page<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut families = Families::default();
        for sample in self.metrics.samples(self.limiter, self.events) {
            families.add(sample, self.names);
        }
        for (port, tls) in self.certificates {
            families.add_certificate(port, tls);
        }
        families.add_build();
        let decisions = self.metrics.response_time.observed();
        let bounds = Observed::bounds().map(|bound| bound.as_secs_f64());
        families.put_time(
            "tollgate_decision_seconds".to_owned(),
            Labels::new(),
            histogram(&decisions, bounds, SECONDS),
        );
        f.write_str(&families.encode(self.extra_labels))
    }
}

/// A millisecond.
const SECONDS: f64 = 0.001;

/// By name.
#[derive(Debug, Default)]
struct Families(BTreeMap<String, Family>);

type Labels = Vec<(Cow<'static, str>, String)>;

#[derive(Debug)]
struct Family {
    values: Values,
    /// What a mapping file says of it.
    help: Option<String>,
}

/// By labels.
#[derive(Debug)]
enum Values {
    Counters(BTreeMap<Labels, u64>),
    Gauges(BTreeMap<Labels, u64>),
    Histograms(BTreeMap<Labels, Histogram>),
}

impl Families {
    fn add(&mut self, sample: Sample, names: &Names) {
        let Sample {
            name,
            metric_key,
            value,
        } = sample;
        let mapped = names
            .mapping
            .as_ref()
            .and_then(|mapping| mapping.find(&name, &value));
        let (shown, labels, scale, buckets, help) = match mapped {
            Some(Mapped::Dropped) => return,
            Some(Mapped::To {
                name,
                labels,
                help,
                scale,
                buckets,
            }) => {
                let shown = plain(&name);
                // Captures may leave nothing of a name, or make one of ours.
                if shown.is_empty() || is_taken(&shown) {
                    return;
                }
                let labels = labels
                    .into_iter()
                    .map(|(label, value)| (Cow::Owned(label), value));
                (shown, labels.collect(), scale, buckets, help)
            }
            // What is ours stays as it is; a mapping file speaks of the others.
            None if names.mapping.is_some() && name.starts_with("ratelimit") => {
                (plain(&name), Labels::new(), 1.0, BUCKETS.to_vec(), None)
            }
            None => {
                let (shown, labels) = named(&name, metric_key.as_deref());
                let scale = if names.milliseconds { 1.0 } else { SECONDS };
                (shown, labels, scale, BUCKETS.to_vec(), None)
            }
        };
        match value {
            SampleValue::Counter(value) => self.put(shown.clone(), labels, Value::Counter(value)),
            SampleValue::Gauge(value) => self.put(shown.clone(), labels, Value::Gauge(value)),
            SampleValue::Time(observed) => {
                let histogram = histogram(&observed, buckets.into_iter(), scale);
                self.put_time(shown.clone(), labels, histogram);
            }
        }
        if let (Some(help), Some(family)) = (help, self.0.get_mut(&shown)) {
            family.help = Some(help);
        }
    }

    fn add_certificate(&mut self, port: &str, tls: &Tls) {
        let mut put =
            |name: &str, value| self.put(name.to_owned(), vec![label("port", port.to_owned())], value);
        put(
            "tollgate_certificate_expiry_seconds",
            Value::Gauge(tls.expiry().max(0).cast_unsigned()),
        );
        put(
            "tollgate_certificate_load_errors_total",
            Value::Counter(tls.load_errors()),
        );
        put(
            "tollgate_tls_handshake_errors_total",
            Value::Counter(tls.handshake_errors()),
        );
    }

    /// Which program this is.
    fn add_build(&mut self) {
        let labels = vec![
            label("revision", build::REVISION.to_owned()),
            label("version", build::VERSION.to_owned()),
        ];
        self.put("tollgate_build_info".to_owned(), labels, Value::Gauge(1));
    }

    /// Adds a value to its family. Counters of equal labels are one: deeper rules are folded together.
    fn put(&mut self, name: String, labels: Labels, value: Value) {
        match value {
            Value::Gauge(value) => {
                if let Values::Gauges(gauges) = self.values(name, || Values::Gauges(BTreeMap::new())) {
                    gauges.insert(labels, value);
                }
            }
            Value::Counter(value) => {
                if let Values::Counters(counters) = self.values(name, || Values::Counters(BTreeMap::new())) {
                    *counters.entry(labels).or_default() += value;
                }
            }
        }
    }

    fn put_time(&mut self, name: String, labels: Labels, histogram: Histogram) {
        let empty = || Values::Histograms(BTreeMap::new());
        if let Values::Histograms(histograms) = self.values(name, empty) {
            histograms.insert(labels, histogram);
        }
    }

    /// The values of a family. They may be of another type than is asked for, if a mapping file gives one name to things of
    /// different types: then the first type counts.
    fn values(&mut self, name: String, empty: impl FnOnce() -> Values) -> &mut Values {
        let family = self.0.entry(name).or_insert_with(|| Family {
            values: empty(),
            help: None,
        });
        &mut family.values
    }

    fn encode(self, extra_labels: &[(String, String)]) -> String {
        let mut extra: Vec<LabelPair> = extra_labels
            .iter()
            .map(|(name, value)| (plain(name), value))
            .filter(|(name, _)| !is_reserved(name))
            .map(|(name, value)| pair((name.into(), value.clone())))
            .collect();
        // Different tags may have become labels of one name.
        extra.sort_by(|a, b| a.name().cmp(b.name()));
        extra.dedup_by(|later, first| later.name() == first.name());
        let mut families: Vec<MetricFamily> = self
            .0
            .into_iter()
            .map(|(name, family)| family.encoded(name))
            .chain(of_process())
            .collect();
        for metric in families
            .iter_mut()
            .flat_map(|family| family.mut_metric().iter_mut())
        {
            let mut labels = metric.take_label();
            // A metric's own labels tell its values apart.
            let is_own = |extra: &LabelPair| labels.iter().any(|own| own.name() == extra.name());
            let others: Vec<_> = extra.iter().filter(|extra| !is_own(extra)).cloned().collect();
            labels.extend(others);
            metric.set_label(labels);
        }
        let mut page = Vec::new();
        TextEncoder::new()
            .encode(&families, &mut page)
            .expect("every family has a name and a metric");
        String::from_utf8(page).expect("the page is text")
    }
}

/// The memory, files and processor time of this process, under the names that Prometheus' own clients use.
#[cfg(target_os = "linux")]
fn of_process() -> Vec<MetricFamily> {
    use ::prometheus::core::Collector as _;
    ::prometheus::process_collector::ProcessCollector::for_self().collect()
}

#[cfg(not(target_os = "linux"))]
fn of_process() -> Vec<MetricFamily> {
    Vec::new()
}

/// A number.
enum Value {
    Counter(u64),
    Gauge(u64),
}

impl Family {
    fn encoded(self, name: String) -> MetricFamily {
        let mut family = MetricFamily::default();
        family.set_help(self.help.unwrap_or_else(|| help(&name).to_owned()));
        family.set_name(name);
        let (kind, metrics) = match self.values {
            Values::Counters(counters) => (MetricType::COUNTER, metrics(counters, set_counter)),
            Values::Gauges(gauges) => (MetricType::GAUGE, metrics(gauges, set_gauge)),
            Values::Histograms(histograms) => {
                (MetricType::HISTOGRAM, metrics(histograms, Metric::set_histogram))
            }
        };
        family.set_field_type(kind);
        family.set_metric(metrics);
        family
    }
}

fn metrics<T>(values: BTreeMap<Labels, T>, set: impl Fn(&mut Metric, T)) -> Vec<Metric> {
    values
        .into_iter()
        .map(|(labels, value)| {
            let mut metric = Metric::from_label(labels.into_iter().map(pair).collect());
            set(&mut metric, value);
            metric
        })
        .collect()
}

fn set_counter(metric: &mut Metric, value: u64) {
    let mut counter = Counter::default();
    counter.set_value(value as f64);
    metric.set_counter(counter);
}

fn set_gauge(metric: &mut Metric, value: u64) {
    let mut gauge = Gauge::default();
    gauge.set_value(value as f64);
    metric.set_gauge(gauge);
}

fn label(name: &'static str, value: String) -> (Cow<'static, str>, String) {
    (name.into(), value)
}

fn pair((name, value): (Cow<'static, str>, String)) -> LabelPair {
    let mut pair = LabelPair::default();
    pair.set_name(name.into_owned());
    pair.set_value(value);
    pair
}

/// Durations with buckets of these bounds, where a millisecond counts as `scale`.
fn histogram(observed: &Observed, bounds: impl Iterator<Item = f64>, scale: f64) -> Histogram {
    let duration = |bound: f64| Duration::try_from_secs_f64(bound / scale / 1_000.0).unwrap_or(Duration::MAX);
    let buckets = bounds.map(|bound| {
        let mut bucket = Bucket::default();
        bucket.set_upper_bound(bound);
        bucket.set_cumulative_count(observed.up_to(duration(bound)));
        bucket
    });
    let mut histogram = Histogram::default();
    histogram.set_bucket(buckets.collect());
    histogram.set_sample_count(observed.count());
    histogram.set_sample_sum(observed.sum.as_secs_f64() * 1_000.0 * scale);
    histogram
}

/// The name and labels for an internal name, with the parts of its metric key, if it has one.
fn named(internal: &str, metric_key: Option<&[String]>) -> (String, Labels) {
    if let Some([domain, key1, deeper @ ..]) = metric_key
        && let Some((_, statistic)) = internal.rsplit_once('.')
    {
        let mut labels = vec![label("domain", domain.clone()), label("key1", key1.clone())];
        labels.extend(deeper.first().map(|key2| label("key2", key2.clone())));
        return (format!("ratelimit_service_rate_limit_{statistic}"), labels);
    }
    let service = internal.strip_prefix("ratelimit.service.");
    if let Some(kind) = service.and_then(|name| name.strip_prefix("call.should_rate_limit.")) {
        return (
            "ratelimit_service_should_rate_limit_error".to_owned(),
            vec![label("err_type", kind.to_owned())],
        );
    }
    if let Some((method, of)) = internal
        .strip_prefix("ratelimit_server.")
        .and_then(|name| name.split_once('.'))
    {
        let name = match of {
            "response_time" => "ratelimit_service_response_time_seconds".to_owned(),
            _ => format!("ratelimit_service_{of}"),
        };
        return (name, vec![label("grpc_method", method.to_owned())]);
    }
    if let Some(kind) = internal
        .strip_prefix("tollgate.events.")
        .and_then(|name| name.strip_suffix("_total"))
    {
        return (
            "tollgate_events_total".to_owned(),
            vec![label("event", kind.to_owned())],
        );
    }
    (plain(internal), Vec::new())
}

/// A name with `_` for every byte that it cannot hold.
fn plain(internal: &str) -> String {
    let mut name: String = internal
        .bytes()
        .map(|byte| {
            if byte.is_ascii_alphanumeric() {
                byte.into()
            } else {
                '_'
            }
        })
        .collect();
    if name.starts_with(|first: char| first.is_ascii_digit()) {
        name.insert(0, '_');
    }
    name
}

fn help(name: &str) -> &'static str {
    match name {
        "ratelimit_service_rate_limit_total_hits" => "Hits asked for.",
        "ratelimit_service_rate_limit_over_limit" => "Hits beyond the limit, also in shadow mode.",
        "ratelimit_service_rate_limit_near_limit" => "Hits between the near-limit threshold and the limit.",
        "ratelimit_service_rate_limit_within_limit" => "Hits of calls that were not over the limit.",
        "ratelimit_service_rate_limit_shadow_mode" => {
            "Hits beyond the limit that passed since the rule is in shadow mode."
        }
        "ratelimit_service_should_rate_limit_error" => "Calls that could not be decided.",
        "ratelimit_service_total_requests" => "Calls over gRPC.",
        "ratelimit_service_response_time_seconds" => "How long calls took, the network left aside.",
        "ratelimit_service_config_load_success" => "Rules that were loaded.",
        "ratelimit_service_config_load_error" => "Rules that could not be loaded.",
        "ratelimit_service_global_shadow_mode" => "Calls that passed since the server is in shadow mode.",
        "tollgate_config_load_time_seconds" => "When the rules in force were loaded, in seconds since 1970.",
        "tollgate_certificate_expiry_seconds" => "When a port's certificate expires, in seconds since 1970.",
        "tollgate_certificate_load_errors_total" => "Changed certificates of a port that could not be used.",
        "tollgate_grpc_connections" => "Open connections to the gRPC port.",
        "tollgate_grpc_connections_total" => "Connections to the gRPC port.",
        "tollgate_tls_handshake_errors_total" => "Connections to a port that did not come to agree on TLS.",
        "tollgate_shed_calls_total" => "Calls that were refused since too many were under way.",
        "tollgate_counters" => "Counters that are held.",
        "tollgate_counters_capacity" => "Counters for which there is room.",
        "tollgate_counters_bytes" => "Memory of the tables of counters in bytes.",
        "tollgate_evicted_counters_total" => "Counters that were forgotten early to make room.",
        "tollgate_turned_away_hits_total" => "Hits of new keys for whose counters there was no room.",
        "tollgate_banned_hits_total" => "Hits that were refused for a ban, the one that started it included.",
        "tollgate_events_total" => "Events that were delivered.",
        "tollgate_dropped_events_total" => "Events that were lost since too many came at a time.",
        "tollgate_decision_seconds" => "How long a decision took.",
        "tollgate_build_info" => "Which version this is, and from which commit it was built.",
        name if name.ends_with("_domain_not_found") => "Descriptors of requests for a domain without rules.",
        _ => "Named by the mapping file.",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_names_become_names_and_labels() {
        #[track_caller]
        fn test(internal: &str, name: &str, labels: &[(&str, &str)]) {
            let (is_name, is_labels) = named(internal, None);
            let is_labels: Vec<_> = is_labels
                .iter()
                .map(|(label, value)| (&**label, value.as_str()))
                .collect();
            assert_eq!(
                (is_name.as_str(), is_labels.as_slice()),
                (name, labels),
                "{internal}"
            );
        }
        test(
            "ratelimit.service.rate_limit.my-shop.domain_not_found",
            "ratelimit_service_rate_limit_my_shop_domain_not_found",
            &[],
        );
        test(
            "ratelimit.service.call.should_rate_limit.service_error",
            "ratelimit_service_should_rate_limit_error",
            &[("err_type", "service_error")],
        );
        test(
            "ratelimit_server.Check.total_requests",
            "ratelimit_service_total_requests",
            &[("grpc_method", "Check")],
        );
        test(
            "ratelimit.service.config_load_success",
            "ratelimit_service_config_load_success",
            &[],
        );
        test("7é", "_7__", &[]);
    }

    #[test]
    fn parts_of_a_rule_are_labels_whatever_dots_are_in_them() {
        #[track_caller]
        fn test(parts: &[&str], expected: &[(&str, &str)]) {
            let internal = format!("ratelimit.service.rate_limit.{}.over_limit", parts.join("."));
            let parts: Vec<String> = parts.iter().map(|part| (*part).to_owned()).collect();
            let (name, labels) = named(&internal, Some(&parts));
            let labels: Vec<_> = labels
                .iter()
                .map(|(label, value)| (&**label, value.as_str()))
                .collect();
            assert_eq!(name, "ratelimit_service_rate_limit_over_limit");
            assert_eq!(labels, expected);
        }
        test(&["d", "k_v"], &[("domain", "d"), ("key1", "k_v")]);
        test(
            &["d.x", "host_a.b.example", "m_pkg.Svc/Do"],
            &[
                ("domain", "d.x"),
                ("key1", "host_a.b.example"),
                ("key2", "m_pkg.Svc/Do"),
            ],
        );
        test(
            &["d", "a", "b", "c"],
            &[("domain", "d"), ("key1", "a"), ("key2", "b")],
        );
    }
}
