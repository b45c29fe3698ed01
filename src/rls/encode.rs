//! A decision as it goes over the wire: a `RateLimitResponse`, written once and in place.

use bytes::BytesMut;
use prost::Message as _;
use prost::encoding::encode_varint;
use prost_types::{ListValue, Struct, Value, value::Kind};
use serde_json::Value as Json;

use crate::decision::{Code, CurrentLimit, Decision, DescriptorStatus, ResponseHeader};
use crate::rule::Metadata;

/// The most seconds of a `google.protobuf.Duration`, about 10,000 years.
const LONGEST_DURATION: u64 = 315_576_000_000;

/// Appends `decision` to `wire`. Fields with default values are left out, as proto3 has it.
pub fn response(decision: &Decision<'_>, wire: &mut BytesMut) {
    number(1, code(decision.overall_code), wire);
    for of_descriptor in &decision.statuses {
        message(2, wire, |wire| status(of_descriptor, wire));
    }
    for of_client in &decision.response_headers {
        message(3, wire, |wire| header(of_client, wire));
    }
    if let Some(metadata) = &decision.dynamic_metadata {
        let metadata = structure(metadata);
        message(6, wire, |wire| {
            metadata.encode(wire).expect("a buffer grows as needed");
        });
    }
}

fn code(code: Code) -> u64 {
    match code {
        Code::Ok => 1,
        Code::OverLimit => 2,
    }
}

fn status(status: &DescriptorStatus<'_>, wire: &mut BytesMut) {
    number(1, code(status.code), wire);
    if let Some(limit) = &status.current_limit {
        message(2, wire, |wire| current_limit(limit, wire));
    }
    number(3, u64::from(status.limit_remaining), wire);
    if let Some(seconds) = status.seconds_until_reset {
        message(4, wire, |wire| number(1, seconds.min(LONGEST_DURATION), wire));
    }
}

fn current_limit(limit: &CurrentLimit<'_>, wire: &mut BytesMut) {
    number(1, u64::from(limit.requests_per_unit), wire);
    if let Some((unit, unit_multiplier)) = limit.window.units() {
        number(2, unit as u64, wire);
        // Absent means 1; Envoys before 1.40 do not know the field.
        if unit_multiplier.get() != 1 {
            message(4, wire, |wire| number(1, u64::from(unit_multiplier.get()), wire));
        }
    }
    text(3, limit.name, wire);
}

fn header(header: &ResponseHeader<'_>, wire: &mut BytesMut) {
    text(1, header.name, wire);
    text(2, &header.value.to_string(), wire);
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

fn number(field: u8, value: u64, wire: &mut BytesMut) {
    if value != 0 {
        wire.extend_from_slice(&[field << 3]);
        encode_varint(value, wire);
    }
}

fn text(field: u8, text: &str, wire: &mut BytesMut) {
    if !text.is_empty() {
        message(field, wire, |wire| wire.extend_from_slice(text.as_bytes()));
    }
}

/// Appends a field that says how long it is. Most are short: one byte is left for the length, and room made if it takes more.
fn message(field: u8, wire: &mut BytesMut, write: impl FnOnce(&mut BytesMut)) {
    const LENGTH_DELIMITED: u8 = 2;
    wire.extend_from_slice(&[field << 3 | LENGTH_DELIMITED, 0]);
    let start = wire.len();
    write(wire);
    let length = wire.len() - start;
    if let Ok(short @ ..=0x7f) = u8::try_from(length) {
        wire[start - 1] = short;
        return;
    }
    let payload = wire.split_off(start);
    wire.truncate(start - 1);
    encode_varint(length as u64, wire);
    wire.unsplit(payload);
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::decision::LimitSource;
    use crate::proto::envoy::config::core::v3::HeaderValue;
    use crate::proto::envoy::service::ratelimit::v3::RateLimitResponse;
    use crate::proto::envoy::service::ratelimit::v3::rate_limit_response as message;
    use crate::rate_limit::{Unit, Window};

    #[test]
    fn prost_reads_what_was_decided() {
        let long_name = "n".repeat(20_000);
        let limit = |unit, unit_multiplier, name| CurrentLimit {
            requests_per_unit: 7,
            window: Window::of_units(unit, unit_multiplier),
            name,
        };
        let (one, three) = (
            1.try_into().expect("it is not 0"),
            3.try_into().expect("it is not 0"),
        );
        let with = |limit, seconds| DescriptorStatus {
            current_limit: Some(limit),
            limit_remaining: 300,
            seconds_until_reset: Some(seconds),
            ..DescriptorStatus::without_limit(LimitSource::NoRule)
        };
        let refused = DescriptorStatus {
            code: Code::OverLimit,
            ..DescriptorStatus::without_limit(LimitSource::NoRule)
        };
        let metadata = serde_json::from_str(r#"{"a": [1, true, null, {"b": "c"}]}"#).expect("it is JSON");
        let decision = Decision {
            overall_code: Code::OverLimit,
            statuses: smallvec![
                with(limit(Unit::Minute, one, "short"), 60),
                with(limit(Unit::Week, three, &long_name), u64::MAX),
                refused,
            ],
            response_headers: smallvec![ResponseHeader {
                name: "ratelimit-limit",
                value: 0
            }],
            dynamic_metadata: Some(metadata),
            domain_found: true,
            global_shadow_mode: false,
        };
        let mut wire = BytesMut::from("before");
        response(&decision, &mut wire);
        assert_eq!(wire.split_to(6), "before");

        let shown = |unit: message::rate_limit::Unit, unit_multiplier, name: &str, seconds| {
            message::DescriptorStatus {
                code: 1,
                current_limit: Some(message::RateLimit {
                    name: name.to_owned(),
                    requests_per_unit: 7,
                    unit: unit.into(),
                    unit_multiplier,
                }),
                limit_remaining: 300,
                duration_until_reset: Some(prost_types::Duration { seconds, nanos: 0 }),
                quota: None,
            }
        };
        let expected = RateLimitResponse {
            overall_code: 2,
            statuses: vec![
                shown(message::rate_limit::Unit::Minute, None, "short", 60),
                shown(
                    message::rate_limit::Unit::Week,
                    Some(3),
                    &long_name,
                    315_576_000_000,
                ),
                message::DescriptorStatus {
                    code: 2,
                    ..message::DescriptorStatus::default()
                },
            ],
            response_headers_to_add: vec![HeaderValue {
                key: "ratelimit-limit".to_owned(),
                value: "0".to_owned(),
                ..HeaderValue::default()
            }],
            dynamic_metadata: Some(structure(&decision.dynamic_metadata.expect("it was set above"))),
            ..RateLimitResponse::default()
        };
        assert_eq!(RateLimitResponse::decode(wire), Ok(expected));
    }
}
