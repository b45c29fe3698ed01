//! The `dynamic_metadata` of an answer: the request as it was understood, and the metadata of the rules that let it
//! pass. The shape is that of envoyproxy/ratelimit.

use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::algorithm::BanOutcome;
use crate::clock::milliseconds_rounded_up;
use crate::decision::{Code, DescriptorStatus, LimitSource};
use crate::descriptor::{Descriptor, Entry, Request};
use crate::rate_limit::RateLimit;
use crate::rule::Metadata;

/// Bytes that are not UTF-8 show as U+FFFD.
pub(super) fn of(request: &Request<'_>, statuses: &[DescriptorStatus<'_>]) -> Metadata {
    let mut metadata = Metadata::new();
    metadata.insert("domain".into(), text(request.domain));
    metadata.insert(
        "descriptors".into(),
        request.descriptors.iter().map(descriptor).collect(),
    );
    if request.hits_addend != 0 {
        metadata.insert("hitsAddend".into(), request.hits_addend.into());
    }
    let of_rules = merged(statuses);
    if !of_rules.is_empty() {
        metadata.insert("metadata".into(), Value::Object(of_rules));
    }
    metadata
}

/// What Envoy needs to know of a ban, to answer it in its own way.
pub(super) fn of_ban(ban: &BanOutcome) -> Value {
    json!({ "banned": true, "ban_remaining_ms": milliseconds_rounded_up(ban.remaining) })
}

fn descriptor(descriptor: &Descriptor<'_>) -> Value {
    let mut shown = json!({ "entries": descriptor.entries.iter().map(entry).collect::<Value>() });
    if let Some(limit) = &descriptor.limit {
        shown["limit"] = override_text(limit).into();
    }
    if let Some(hits) = descriptor.hits_addend {
        shown["hitsAddend"] = hits.into();
    }
    shown
}

fn entry(entry: &Entry<'_>) -> Value {
    let mut shown = String::from_utf8_lossy(entry.key).into_owned();
    shown.push('=');
    shown.push_str(&String::from_utf8_lossy(entry.value));
    shown.into()
}

fn text(bytes: &[u8]) -> Value {
    String::from_utf8_lossy(bytes).into()
}

/// The override in protobuf's text form, on one line.
fn override_text(limit: &RateLimit) -> String {
    let mut shown = String::new();
    if limit.requests_per_unit != 0 {
        let _ = write!(shown, "requests_per_unit:{} ", limit.requests_per_unit);
    }
    if let Some((unit, unit_multiplier)) = limit.window.units() {
        let _ = write!(shown, "unit:{}", unit.name());
        if unit_multiplier.get() != 1 {
            let _ = write!(shown, " unit_multiplier:{{value:{unit_multiplier}}}");
        }
    }
    shown
}

/// The metadata of all rules whose descriptors are not over their limit, unlimited ones left out.
fn merged(statuses: &[DescriptorStatus<'_>]) -> Metadata {
    let mut all = Metadata::new();
    for status in statuses {
        if let LimitSource::Rule(rule) = status.source
            && status.code == Code::Ok
            && let Some(metadata) = &rule.metadata
        {
            merge(&mut all, metadata);
        }
    }
    all
}

/// Adds what `into` lacks: the first writer of a key wins, and only objects are merged into each other.
fn merge(into: &mut Metadata, from: &Metadata) {
    for (key, value) in from {
        match (into.get_mut(key), value) {
            (None, value) => {
                into.insert(key.clone(), value.clone());
            }
            (Some(Value::Object(into)), Value::Object(from)) => merge(into, from),
            (Some(_), _) => {}
        }
    }
}
