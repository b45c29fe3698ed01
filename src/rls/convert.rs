//! Between the messages on the wire and the types that decisions are made of.

use std::num::NonZeroU32;

use prost_types::{ListValue, Struct, Value, value::Kind};
use serde_json::Value as Json;

use crate::decision::{Code, CurrentLimit, Decision, DescriptorStatus, ResponseHeader};
use crate::descriptor::{Descriptor, Entry, Request};
use crate::proto::envoy::config::core::v3::HeaderValue;
use crate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use crate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use crate::proto::envoy::service::ratelimit::v3::rate_limit_response as response;
use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use crate::rate_limit::{RateLimit, Unit, Window};
use crate::rule::Metadata;

/// The most seconds of a `google.protobuf.Duration`, about 10,000 years.
const LONGEST_DURATION: i64 = 315_576_000_000;

/// What `message` asks. Cannot fail: what a descriptor gets wrong is its own affair, see [`Descriptor::limit`].
pub fn request(message: &RateLimitRequest) -> Request<'_> {
    Request {
        domain: &message.domain,
        descriptors: message.descriptors.iter().map(descriptor).collect(),
        hits_addend: message.hits_addend,
    }
}

fn descriptor(message: &RateLimitDescriptor) -> Descriptor<'_> {
    Descriptor {
        entries: message
            .entries
            .iter()
            .map(|entry| Entry {
                key: &entry.key,
                value: &entry.value,
            })
            .collect(),
        limit: message.limit.as_ref().and_then(override_limit),
        hits_addend: message.hits_addend,
        is_negative_hits: message.is_negative_hits,
    }
}

/// The limit that came with a descriptor. `None` if it has no usable window, as when the unit is UNKNOWN or the multiplier
/// 0: then the configured limit applies. The unit's number is taken as that of a response's unit, which has WEEK as well.
fn override_limit(message: &RateLimitOverride) -> Option<RateLimit> {
    let unit_multiplier = NonZeroU32::new(message.unit_multiplier.unwrap_or(1))?;
    let window = Window::of_units(Unit::from_wire(message.unit)?, unit_multiplier);
    Some(RateLimit::per_window(window, message.requests_per_unit))
}

/// `decision` as a message.
pub fn response(decision: &Decision<'_>) -> RateLimitResponse {
    RateLimitResponse {
        overall_code: code(decision.overall_code).into(),
        statuses: decision.statuses.iter().map(status).collect(),
        response_headers_to_add: decision.response_headers.iter().map(header).collect(),
        dynamic_metadata: decision.dynamic_metadata.as_ref().map(structure),
        ..RateLimitResponse::default()
    }
}

fn code(code: Code) -> response::Code {
    match code {
        Code::Ok => response::Code::Ok,
        Code::OverLimit => response::Code::OverLimit,
    }
}

fn status(status: &DescriptorStatus<'_>) -> response::DescriptorStatus {
    response::DescriptorStatus {
        code: code(status.code).into(),
        current_limit: status.current_limit.as_ref().map(current_limit),
        limit_remaining: status.limit_remaining,
        duration_until_reset: status.seconds_until_reset.map(|seconds| prost_types::Duration {
            seconds: i64::try_from(seconds).map_or(LONGEST_DURATION, |seconds| seconds.min(LONGEST_DURATION)),
            nanos: 0,
        }),
        quota: None,
    }
}

fn current_limit(limit: &CurrentLimit<'_>) -> response::RateLimit {
    let units = limit.window.units();
    response::RateLimit {
        name: limit.name.to_owned(),
        requests_per_unit: limit.requests_per_unit,
        unit: units.map_or(0, |(unit, _)| unit as i32),
        // Absent means 1; Envoys before 1.40 do not know the field.
        unit_multiplier: units
            .map(|(_, multiplier)| multiplier.get())
            .filter(|multiplier| *multiplier != 1),
    }
}

fn header(header: &ResponseHeader<'_>) -> HeaderValue {
    HeaderValue {
        key: header.name.to_owned(),
        value: header.value.to_string(),
        ..HeaderValue::default()
    }
}

fn structure(metadata: &Metadata) -> Struct {
    Struct {
        fields: metadata
            .iter()
            .map(|(key, json)| (key.clone(), value(json)))
            .collect(),
    }
}

fn value(json: &Json) -> Value {
    let kind = match json {
        Json::Null => Kind::NullValue(0),
        Json::Bool(bool) => Kind::BoolValue(*bool),
        // A Struct has doubles only.
        Json::Number(number) => Kind::NumberValue(number.as_f64().unwrap_or(f64::NAN)),
        Json::String(text) => Kind::StringValue(text.clone()),
        Json::Array(items) => Kind::ListValue(ListValue {
            values: items.iter().map(value).collect(),
        }),
        Json::Object(fields) => Kind::StructValue(structure(fields)),
    };
    Value { kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_without_a_usable_window_is_none() {
        #[track_caller]
        fn test(unit: i32, unit_multiplier: Option<u32>, expected: Option<u64>) {
            let message = RateLimitOverride {
                requests_per_unit: 9,
                unit,
                unit_multiplier,
            };
            assert_eq!(
                override_limit(&message).map(|limit| limit.window.milliseconds() / 1_000),
                expected
            );
        }
        test(2, None, Some(60));
        test(2, Some(5), Some(300));
        test(7, None, Some(604_800));
        test(0, None, None);
        test(8, None, None);
        test(-1, None, None);
        test(2, Some(0), None);
    }
}
