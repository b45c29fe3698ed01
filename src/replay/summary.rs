//! What a recording did to each rule.

use std::collections::HashMap;
use std::fmt;

use crate::decision::{Code, Decision, DescriptorStatus, LimitSource};
use crate::descriptor::Request;
use crate::matcher::{Limit, Matcher};

/// A table with one row per rule, and the totals.
#[derive(Debug, Default)]
pub(super) struct Summary {
    /// In the order of the rules.
    rows: Vec<Row>,
    /// By the rule's path, or by what stands in its place.
    places: HashMap<Box<str>, usize>,
    requests: u64,
    refused: u64,
    errors: u64,
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
            let limit = match rule.limit {
                Limit::Unlimited => "unlimited".to_owned(),
                Limit::PerUnit(limit) => limit.to_string(),
            };
            summary.row(&rule.path, &limit);
        }
        summary
    }

    fn row(&mut self, what: &str, limit: &str) -> &mut Row {
        let place = match self.places.get(what) {
            Some(place) => *place,
            None => {
                let row = Row {
                    what: what.into(),
                    limit: limit.into(),
                    calls: 0,
                    refused: 0,
                    peak: 0,
                };
                self.rows.push(row);
                self.places.insert(what.into(), self.rows.len() - 1);
                self.rows.len() - 1
            }
        };
        &mut self.rows[place]
    }

    /// Counts one request.
    pub(super) fn count(&mut self, request: &Request<'_>, decision: &Decision<'_>) {
        self.requests += 1;
        self.refused += u64::from(decision.overall_code == Code::OverLimit);
        for status in &decision.statuses {
            self.count_status(request, decision, status);
        }
    }

    fn count_status(
        &mut self,
        request: &Request<'_>,
        decision: &Decision<'_>,
        status: &DescriptorStatus<'_>,
    ) {
        let row = match status.source {
            LimitSource::Rule(rule) | LimitSource::Unlimited(rule) => self.row(&rule.path, ""),
            LimitSource::Replaced => self.row("(replaced by another rule)", "-"),
            LimitSource::Override => self.row("(limits that came with the request)", "-"),
            LimitSource::NoRule if decision.domain_found => self.row("(no rule)", "-"),
            LimitSource::NoRule => {
                // Not a row per unknown domain: a recording may hold any number of them.
                debug_assert!(!request.domain.is_empty());
                self.row("(unknown domain)", "-")
            }
        };
        row.calls += 1;
        row.refused += u64::from(status.statistics.over_limit > 0);
        row.peak = row.peak.max(status.hits_in_window);
    }

    /// Counts a request without a decision.
    pub(super) fn count_error(&mut self) {
        self.requests += 1;
        self.errors += 1;
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
