//! What a recording did to each rule.

use std::collections::HashMap;
use std::fmt;

use crate::decision::{Code, Decision, DescriptorStatus, LimitSource};
use crate::matcher::Matcher;
use crate::rule::Rule;

/// A table with one row per rule, and the totals.
#[derive(Debug, Default)]
pub(super) struct Summary {
    /// In the order of the rules; after them what is no rule's.
    rows: Vec<Row>,
    places: HashMap<Subject, usize>,
    requests: u64,
    refused: u64,
    errors: u64,
}

/// What a row is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Subject {
    /// A rule, by its address: two rules may have the same path.
    Rule(*const Rule),
    Other(&'static str),
}

#[derive(Debug)]
struct Row {
    what: Box<str>,
    limit: String,
    /// Descriptors judged.
    calls: u64,
    /// Those over the limit; of rules in shadow mode, those that would have been.
    refused: u64,
    /// The most hits that one counter had in one window.
    peak: u64,
}

impl Summary {
    /// All rules, nothing counted yet.
    pub(super) fn new(matcher: Option<&Matcher>) -> Self {
        let mut summary = Summary::default();
        let mut domains: Vec<_> = matcher.into_iter().flat_map(Matcher::domains).collect();
        domains.sort_by_key(|domain| domain.name());
        for rule in domains.iter().flat_map(|domain| domain.rules()) {
            summary.row(Subject::Rule(rule), || (rule.path.clone(), limit_of(rule)));
        }
        summary
    }

    fn row(&mut self, subject: Subject, new: impl FnOnce() -> (Box<str>, String)) -> &mut Row {
        let place = *self.places.entry(subject).or_insert_with(|| {
            let (what, limit) = new();
            self.rows.push(Row {
                what,
                limit,
                calls: 0,
                refused: 0,
                peak: 0,
            });
            self.rows.len() - 1
        });
        &mut self.rows[place]
    }

    /// Counts one request.
    pub(super) fn count(&mut self, decision: &Decision<'_>) {
        self.requests += 1;
        self.refused += u64::from(decision.overall_code == Code::OverLimit);
        for status in &decision.statuses {
            let subject = subject(status, decision);
            let row = self.row(subject, || match subject {
                Subject::Other(what) => (what.into(), "-".to_owned()),
                Subject::Rule(_) => unreachable!("every rule has its row from the start"),
            });
            row.calls += 1;
            row.refused += u64::from(status.over_limit);
            row.peak = row.peak.max(status.hits_in_window);
        }
    }

    /// Counts a request without a decision.
    pub(super) fn count_error(&mut self) {
        self.requests += 1;
        self.errors += 1;
    }
}

fn limit_of(rule: &Rule) -> String {
    let shadow = if rule.shadow_mode { " (shadow_mode)" } else { "" };
    format!("{}{shadow}", rule.limit)
}

/// Whose row a status counts in. Unknown domains share one: a recording may hold any number of them.
fn subject(status: &DescriptorStatus<'_>, decision: &Decision<'_>) -> Subject {
    match status.source {
        LimitSource::Rule(rule) | LimitSource::Unlimited(rule) => Subject::Rule(rule),
        LimitSource::Refused => Subject::Other("(refused for a malformed address)"),
        LimitSource::Replaced => Subject::Other("(replaced by another rule)"),
        LimitSource::Override => Subject::Other("(limits that came with the request)"),
        LimitSource::NoRule if decision.domain_found => Subject::Other("(no rule)"),
        LimitSource::NoRule => Subject::Other("(unknown domain)"),
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |of: fn(&Row) -> &str, title: &str| {
            let longest = self.rows.iter().map(|row| of(row).chars().count()).max();
            longest.unwrap_or(0).max(title.len())
        };
        let (what, limit) = (width(|row| &row.what, "rule"), width(|row| &row.limit, "limit"));
        writeln!(
            f,
            "{:what$}  {:limit$}  {:>10}  {:>10}  {:>10}",
            "rule", "limit", "calls", "refused", "peak"
        )?;
        for row in &self.rows {
            writeln!(
                f,
                "{:what$}  {:limit$}  {:>10}  {:>10}  {:>10}",
                row.what, row.limit, row.calls, row.refused, row.peak
            )?;
        }
        writeln!(
            f,
            "{} requests, {} refused, {} without a decision",
            self.requests, self.refused, self.errors
        )
    }
}
