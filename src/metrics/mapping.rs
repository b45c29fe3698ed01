//! What internal names become on the page for Prometheus, as a mapping file of `statsd_exporter` says it: envoyproxy/ratelimit
//! takes such files, and Envoy Gateway always passes one.
//!
//! Patterns are tried in the order of the file, those with `*` before regular expressions. What is honoured: `match`,
//! `match_type`, `match_metric_type`, `name`, `labels`, `help`, `action`, `scale` and buckets. Nothing expires, so `ttl`
//! means nothing, and summaries are shown as histograms.
//! See <https://github.com/prometheus/statsd_exporter#metric-mapping-and-configuration>.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use regex::{Captures, Regex, RegexSet};
use serde::Deserialize;
use serde::de::IgnoredAny;
use thiserror::Error;

use super::SampleValue;

/// Upper bounds of the buckets of a histogram, unless the file says others.
pub(super) const BUCKETS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Why a mapping cannot be used.
#[derive(Debug, Error)]
pub enum MappingError {
    /// The file cannot be read.
    #[error("cannot read it: {0}")]
    Read(#[from] io::Error),
    /// It is no mapping.
    #[error("{0}")]
    Malformed(#[from] serde_saphyr::Error),
    /// One of its mappings is wrong.
    #[error("mappings[{index}] ({pattern}): {fault}")]
    Rule {
        /// Which one, from 0.
        index: usize,
        /// What it matches.
        pattern: String,
        /// What is wrong with it, and what to write instead.
        fault: String,
    },
}

/// What to do with each name.
#[derive(Debug)]
pub struct Mapping {
    rules: Vec<Rule>,
    /// The patterns of all rules, in their order.
    patterns: RegexSet,
}

#[derive(Debug)]
struct Rule {
    pattern: Regex,
    /// Any, if it is not said.
    of: Option<MetricType>,
    /// `None` drops what matches.
    target: Option<Target>,
}

#[derive(Debug)]
struct Target {
    name: String,
    labels: Vec<(String, String)>,
    help: Option<String>,
    scale: f64,
    buckets: Vec<f64>,
}

/// What a name becomes.
#[derive(Debug, PartialEq)]
pub(super) enum Mapped {
    /// Something else.
    To {
        name: String,
        labels: Vec<(String, String)>,
        help: Option<String>,
        /// What a time in milliseconds is multiplied with.
        scale: f64,
        /// The bounds of the buckets of a time, scaled.
        buckets: Vec<f64>,
    },
    /// Nothing: it is not shown.
    Dropped,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    defaults: Defaults,
    #[serde(default)]
    mappings: Vec<FileRule>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Defaults {
    match_type: MatchType,
    buckets: Option<Vec<f64>>,
    histogram_options: Option<HistogramOptions>,
    #[serde(rename = "observer_type")]
    _observer_type: Option<ObserverType>,
    #[serde(rename = "timer_type")]
    _timer_type: Option<ObserverType>,
    #[serde(rename = "summary_options")]
    _summary_options: Option<IgnoredAny>,
    #[serde(rename = "quantiles")]
    _quantiles: Option<IgnoredAny>,
    #[serde(rename = "glob_disable_ordering")]
    _glob_disable_ordering: bool,
    #[serde(rename = "ttl")]
    _ttl: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FileRule {
    r#match: String,
    match_type: Option<MatchType>,
    match_metric_type: Option<MetricType>,
    name: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    help: Option<String>,
    #[serde(default)]
    action: Action,
    scale: Option<f64>,
    buckets: Option<Vec<f64>>,
    histogram_options: Option<HistogramOptions>,
    #[serde(rename = "honor_labels")]
    _honor_labels: Option<bool>,
    #[serde(rename = "observer_type")]
    _observer_type: Option<ObserverType>,
    #[serde(rename = "timer_type")]
    _timer_type: Option<ObserverType>,
    #[serde(rename = "summary_options")]
    _summary_options: Option<IgnoredAny>,
    #[serde(rename = "quantiles")]
    _quantiles: Option<IgnoredAny>,
    #[serde(rename = "ttl")]
    _ttl: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct HistogramOptions {
    #[serde(default)]
    buckets: Vec<f64>,
    #[serde(rename = "native_histogram_bucket_factor")]
    _bucket_factor: Option<f64>,
    #[serde(rename = "native_histogram_max_buckets")]
    _max_buckets: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum MatchType {
    #[default]
    Glob,
    Regex,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Action {
    #[default]
    Map,
    Drop,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum MetricType {
    Counter,
    Gauge,
    #[serde(alias = "timer", alias = "histogram", alias = "distribution")]
    Observer,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ObserverType {
    #[serde(alias = "default")]
    Histogram,
    Summary,
}

impl Mapping {
    /// Reads a mapping file.
    pub fn read(path: &Path) -> Result<Self, MappingError> {
        Mapping::parse(&fs::read_to_string(path)?)
    }

    /// Reads the text of a mapping file.
    pub fn parse(yaml: &str) -> Result<Self, MappingError> {
        let File { defaults, mappings } = serde_saphyr::from_str(yaml)?;
        let buckets =
            buckets(defaults.histogram_options, defaults.buckets).unwrap_or_else(|| BUCKETS.to_vec());
        let mut rules = Vec::new();
        for (index, rule) in mappings.into_iter().enumerate() {
            let match_type = rule.match_type.unwrap_or(defaults.match_type);
            let pattern = rule.r#match.clone();
            let rule = rule.compile(match_type, &buckets);
            let rule = rule.map_err(|fault| MappingError::Rule {
                index,
                pattern,
                fault,
            })?;
            rules.push((match_type, rule));
        }
        rules.sort_by_key(|(match_type, _)| *match_type == MatchType::Regex);
        let rules: Vec<Rule> = rules.into_iter().map(|(_, rule)| rule).collect();
        let patterns = RegexSet::new(rules.iter().map(|rule| rule.pattern.as_str()))
            .expect("each of them is a regular expression");
        Ok(Mapping { rules, patterns })
    }

    /// What becomes of a name. `None` if nothing is said of it.
    pub(super) fn find(&self, name: &str, value: &SampleValue) -> Option<Mapped> {
        let of = match value {
            SampleValue::Counter(_) => MetricType::Counter,
            SampleValue::Gauge(_) => MetricType::Gauge,
            SampleValue::Time(_) => MetricType::Observer,
        };
        let fits = self.patterns.matches(name).into_iter();
        let rule = fits
            .map(|index| &self.rules[index])
            .find(|rule| rule.of.is_none_or(|only| only == of))?;
        let Some(target) = &rule.target else {
            return Some(Mapped::Dropped);
        };
        let groups = rule.pattern.captures(name)?;
        let labels = target.labels.iter();
        Some(Mapped::To {
            name: expanded(&groups, &target.name),
            labels: labels
                .map(|(label, value)| (label.clone(), expanded(&groups, value)))
                .collect(),
            help: target.help.clone(),
            scale: target.scale,
            buckets: target.buckets.clone(),
        })
    }
}

impl FileRule {
    fn compile(self, match_type: MatchType, default_buckets: &[f64]) -> Result<Rule, String> {
        let pattern = match match_type {
            MatchType::Glob => glob(&self.r#match)?,
            MatchType::Regex => self.r#match,
        };
        let pattern =
            Regex::new(&pattern).map_err(|fault| format!("match is no regular expression: {fault}"))?;
        let target = match self.action {
            Action::Drop => None,
            Action::Map => {
                let name = self.name.filter(|name| !name.is_empty());
                let name =
                    name.ok_or("name is missing: say what the metric becomes, or write action: drop")?;
                check_name(&name, &pattern)?;
                if let Some(label) = self.labels.keys().find(|label| is_reserved(label)) {
                    return Err(format!(
                        "labels: {label:?} is a name that Prometheus keeps for itself: write another"
                    ));
                }
                if let Some(label) = self.labels.keys().find(|label| !is_label(label)) {
                    return Err(format!(
                        "labels: {label:?} is no name for a label: write letters, digits and _"
                    ));
                }
                Some(Target {
                    name,
                    labels: self.labels.into_iter().collect(),
                    help: self.help,
                    scale: self.scale.unwrap_or(1.0),
                    buckets: buckets(self.histogram_options, self.buckets)
                        .unwrap_or_else(|| default_buckets.to_vec()),
                })
            }
        };
        Ok(Rule {
            pattern,
            of: self.match_metric_type,
            target,
        })
    }
}

fn buckets(options: Option<HistogramOptions>, buckets: Option<Vec<f64>>) -> Option<Vec<f64>> {
    let options = options.map(|options| options.buckets);
    let mut buckets = options.or(buckets).filter(|buckets| !buckets.is_empty())?;
    buckets.sort_by(f64::total_cmp);
    Some(buckets)
}

/// The regular expression for parts with dots between them, of which `*` stands for any one.
fn glob(pattern: &str) -> Result<String, String> {
    let mut parts = Vec::new();
    for part in pattern.split('.') {
        if part == "*" {
            parts.push("([^.]*)".to_owned());
        } else if part.is_empty() || part.contains('*') {
            return Err(
                "match: each part between dots is a name or a single *; for anything else write \
                        match_type: regex"
                    .to_owned(),
            );
        } else {
            parts.push(regex::escape(part));
        }
    }
    Ok(format!("^{}$", parts.join(r"\.")))
}

/// A name must come out of it for whatever fits the pattern, and not one under which something else is shown.
fn check_name(name: &str, pattern: &Regex) -> Result<(), String> {
    for reference in references(name) {
        let number = reference.parse::<usize>();
        let is_there = match number {
            Ok(number) => number < pattern.captures_len(),
            Err(_) => pattern.capture_names().flatten().any(|there| there == reference),
        };
        if !is_there {
            let advice = match reference.split_once(|other: char| !other.is_ascii_digit()) {
                Some((number, _)) if !number.is_empty() => {
                    format!("; write ${{{number}}}{}", &reference[number.len()..])
                }
                _ => String::new(),
            };
            return Err(format!("name: match has no capture {reference:?}{advice}"));
        }
    }
    if is_taken(name) {
        return Err(
            "name: what begins with process_ or tollgate_ is shown already: write another".to_owned(),
        );
    }
    Ok(())
}

/// The captures that a template names: `$1`, `${1}`.
fn references(template: &str) -> impl Iterator<Item = &str> {
    let is_name = |other: char| other.is_ascii_alphanumeric() || other == '_';
    let mut after_dollars = template.split('$');
    // What stands before the first.
    after_dollars.next();
    after_dollars.filter_map(move |rest| match rest.strip_prefix('{') {
        Some(braced) => braced.split_once('}').map(|(reference, _)| reference),
        None => {
            let end = rest.find(|other| !is_name(other)).unwrap_or(rest.len());
            (end > 0).then(|| &rest[..end])
        }
    })
}

/// Whether metrics have names like this whatever a mapping file says.
pub(super) fn is_taken(name: &str) -> bool {
    name.starts_with("process_") || name.starts_with("tollgate_")
}

/// Whether Prometheus, or the way in which it reads histograms, gives a label of this name a meaning.
pub(super) fn is_reserved(label: &str) -> bool {
    label.starts_with("__") || ["le", "quantile"].contains(&label)
}

fn is_label(name: &str) -> bool {
    let is_first = |first: char| first.is_ascii_alphabetic() || first == '_';
    name.starts_with(is_first)
        && name
            .chars()
            .all(|other| is_first(other) || other.is_ascii_digit())
}

fn expanded(groups: &Captures<'_>, template: &str) -> String {
    let mut text = String::new();
    groups.expand(template, &mut text);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const COUNTER: SampleValue = SampleValue::Counter(1);

    fn name_and_labels(mapping: &Mapping, name: &str, value: &SampleValue) -> Option<String> {
        match mapping.find(name, value)? {
            Mapped::Dropped => Some("dropped".to_owned()),
            Mapped::To { name, labels, .. } => {
                let labels: Vec<_> = labels
                    .into_iter()
                    .map(|(label, value)| format!("{label}={value}"))
                    .collect();
                Some(format!("{name} {}", labels.join(",")))
            }
        }
    }

    #[test]
    fn the_first_pattern_that_fits_decides_and_globs_go_before_expressions() {
        let mapping = Mapping::parse(
            r#"
mappings:
- {match: 'a\.(.+)\.hits', match_type: regex, name: by_expression, labels: {key: "${1}"}}
- {match: a.*.*.hits, name: "${2}_hits", labels: {first: $1, all: $1-$2}, ttl: 1m}
- {match: a.gone.hits, action: drop}
- {match: a.*.hits, name: one, match_metric_type: gauge}
- {match: '.', match_type: regex, action: drop, match_metric_type: timer}
"#,
        )
        .unwrap();
        let test = |name, expected: Option<&str>| {
            assert_eq!(
                name_and_labels(&mapping, name, &COUNTER).as_deref(),
                expected,
                "{name}"
            );
        };
        test("a.b.c.hits", Some("c_hits all=b-c,first=b"));
        test("a.b.c.d.hits", Some("by_expression key=b.c.d"));
        test("a.gone.hits", Some("dropped"));
        test("a.b.hits", Some("by_expression key=b"));
        test("a.b.hits.more", Some("by_expression key=b"));
        test("b.a", None);
        let gauge = name_and_labels(&mapping, "a.b.hits", &SampleValue::Gauge(1));
        assert_eq!(gauge.as_deref(), Some("one "));
        let time = name_and_labels(&mapping, "t", &SampleValue::Time(Box::default()));
        assert_eq!(time.as_deref(), Some("dropped"));
    }

    #[test]
    fn the_file_says_the_buckets_and_the_scale_or_its_defaults_do() {
        let mapping = Mapping::parse(
            "
defaults: {observer_type: histogram, histogram_options: {buckets: [2, 1]}, match_type: regex, ttl: 0}
mappings:
- {match: '^a$', name: a, scale: 0.001, timer_type: histogram}
- {match: '^b$', name: b, buckets: [3]}
",
        )
        .unwrap();
        let time = SampleValue::Time(Box::default());
        let of = |name| match mapping.find(name, &time).unwrap() {
            Mapped::To { scale, buckets, .. } => (scale, buckets),
            Mapped::Dropped => panic!("it is mapped"),
        };
        assert_eq!(of("a"), (0.001, vec![1.0, 2.0]));
        assert_eq!(of("b"), (1.0, vec![3.0]));
    }

    #[test]
    fn a_bad_one_is_told_with_what_to_write() {
        #[track_caller]
        fn test(yaml: &str, expected: &str) {
            let error = Mapping::parse(yaml).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        test("mappings: [{match: a.b}]", "mappings[0] (a.b): name is missing");
        test(
            "mappings: [{match: a, name: b}, {match: a*.b, name: c}]",
            "mappings[1] (a*.b): match: each part between dots is a name or a single *",
        );
        test(
            "mappings: [{match: '(', match_type: regex, name: c}]",
            "mappings[0] ((): match is no regular expression",
        );
        test(
            "mappings: [{match: a, name: b, labels: {a-b: c}}]",
            "\"a-b\" is no name for a label",
        );
        test("mappings: [{match: a, nam: b}]", "nam");
        test(
            "mappings: [{match: a.*, name: $1_total}]",
            "name: match has no capture \"1_total\"; write ${1}_total",
        );
        test(
            "mappings: [{match: a.*, name: 'a_${2}'}]",
            "match has no capture \"2\"",
        );
        test(
            "mappings: [{match: '(?P<n>.)', match_type: regex, name: $m}]",
            "match has no capture \"m\"",
        );
        test(
            "mappings: [{match: a.*, name: process_open_fds}]",
            "is shown already",
        );
        test(
            "mappings: [{match: a, name: b, labels: {le: c}}]",
            "\"le\" is a name that Prometheus keeps for itself",
        );
        test(
            "mappings: [{match: a, name: b, labels: {__name__: c}}]",
            "keeps for itself",
        );
        test("mapping: []", "line 1");
    }
}
