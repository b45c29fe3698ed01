//! A request as it comes over the wire: read where it lies, without a copy.
//!
//! What it makes of a message is what prost makes of it, to the order of fields and the choice among repeated ones; but a
//! request may have only so many parts. An empty descriptor takes two bytes on the wire and a hundred times as much in
//! memory and in the answer. See <https://protobuf.dev/programming-guides/encoding/>.

use std::num::NonZeroU32;

use prost::encoding::{DecodeContext, WireType, check_wire_type, decode_key, decode_varint, skip_field};
use smallvec::SmallVec;
use thiserror::Error;

use crate::descriptor::{Descriptor, Entry, Request};
use crate::rate_limit::{RateLimit, Unit, Window};

/// How many descriptors a request may have.
const MOST_DESCRIPTORS: usize = 1_000;

/// How many entries the descriptors of a request may have together.
const MOST_ENTRIES: usize = 10_000;

/// Why bytes are no request that could be answered.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// They are no `RateLimitRequest`.
    #[error("not a RateLimitRequest: {0}")]
    Malformed(#[from] prost::DecodeError),
    /// It is larger than any honest one.
    #[error("a request may have {MOST_DESCRIPTORS} descriptors, and these {MOST_ENTRIES} entries together")]
    TooLarge,
}

/// Reads a `RateLimitRequest`. What a descriptor gets wrong is its own affair, see [`Descriptor::limit`].
pub fn request(mut wire: &[u8]) -> Result<Request<'_>, DecodeError> {
    let mut request = Request {
        domain: b"",
        descriptors: SmallVec::new(),
        hits_addend: 0,
    };
    let mut entries = 0;
    while !wire.is_empty() {
        match decode_key(&mut wire)? {
            (1, wire_type) => request.domain = payload(wire_type, &mut wire)?,
            (2, wire_type) => {
                let descriptor = descriptor(payload(wire_type, &mut wire)?, &mut entries)?;
                if request.descriptors.len() == MOST_DESCRIPTORS {
                    return Err(DecodeError::TooLarge);
                }
                request.descriptors.push(descriptor);
            }
            (3, wire_type) => request.hits_addend = number(wire_type, &mut wire)? as u32,
            (tag, wire_type) => skip(tag, wire_type, &mut wire)?,
        }
    }
    Ok(request)
}

/// Reads a `RateLimitDescriptor`, and adds to the count of `entries`.
fn descriptor<'a>(mut wire: &'a [u8], entries: &mut usize) -> Result<Descriptor<'a>, DecodeError> {
    let mut descriptor = Descriptor::default();
    let mut limit = None;
    while !wire.is_empty() {
        match decode_key(&mut wire)? {
            (1, wire_type) => {
                let entry = entry(payload(wire_type, &mut wire)?)?;
                *entries += 1;
                if *entries > MOST_ENTRIES {
                    return Err(DecodeError::TooLarge);
                }
                descriptor.entries.push(entry);
            }
            (2, wire_type) => limit_override(
                payload(wire_type, &mut wire)?,
                limit.get_or_insert_with(LimitOverride::default),
            )?,
            (3, wire_type) => wrapped(
                payload(wire_type, &mut wire)?,
                descriptor.hits_addend.get_or_insert(0),
            )?,
            (4, wire_type) => descriptor.is_negative_hits = number(wire_type, &mut wire)? != 0,
            (tag, wire_type) => skip(tag, wire_type, &mut wire)?,
        }
    }
    descriptor.limit = limit.and_then(|limit| limit.usable());
    Ok(descriptor)
}

/// Reads a `RateLimitDescriptor.Entry`.
fn entry(mut wire: &[u8]) -> Result<Entry<'_>, DecodeError> {
    let mut entry = Entry { key: b"", value: b"" };
    while !wire.is_empty() {
        match decode_key(&mut wire)? {
            (1, wire_type) => entry.key = payload(wire_type, &mut wire)?,
            (2, wire_type) => entry.value = payload(wire_type, &mut wire)?,
            (tag, wire_type) => skip(tag, wire_type, &mut wire)?,
        }
    }
    Ok(entry)
}

/// A `RateLimitDescriptor.RateLimitOverride`.
#[derive(Debug, Default)]
struct LimitOverride {
    requests_per_unit: u32,
    unit: i32,
    unit_multiplier: Option<u64>,
}

impl LimitOverride {
    /// The limit. `None` if it has no usable window, as when the unit is UNKNOWN or the multiplier 0: then the configured
    /// limit applies. The unit's number is taken as that of a response's unit, which has WEEK as well.
    fn usable(&self) -> Option<RateLimit> {
        let unit_multiplier = NonZeroU32::new(self.unit_multiplier.unwrap_or(1) as u32)?;
        let window = Window::of_units(Unit::from_wire(self.unit)?, unit_multiplier);
        Some(RateLimit::per_window(window, self.requests_per_unit))
    }
}

/// Reads an override into one that may have been read in part.
fn limit_override(mut wire: &[u8], limit: &mut LimitOverride) -> Result<(), DecodeError> {
    while !wire.is_empty() {
        match decode_key(&mut wire)? {
            (1, wire_type) => limit.requests_per_unit = number(wire_type, &mut wire)? as u32,
            (2, wire_type) => limit.unit = number(wire_type, &mut wire)? as i32,
            (3, wire_type) => wrapped(
                payload(wire_type, &mut wire)?,
                limit.unit_multiplier.get_or_insert(0),
            )?,
            (tag, wire_type) => skip(tag, wire_type, &mut wire)?,
        }
    }
    Ok(())
}

/// Reads a `google.protobuf.UInt64Value` or `UInt32Value`.
fn wrapped(mut wire: &[u8], value: &mut u64) -> Result<(), DecodeError> {
    while !wire.is_empty() {
        match decode_key(&mut wire)? {
            (1, wire_type) => *value = number(wire_type, &mut wire)?,
            (tag, wire_type) => skip(tag, wire_type, &mut wire)?,
        }
    }
    Ok(())
}

fn number(wire_type: WireType, wire: &mut &[u8]) -> Result<u64, prost::DecodeError> {
    check_wire_type(WireType::Varint, wire_type)?;
    decode_varint(wire)
}

/// The bytes of a field that says how long it is.
fn payload<'a>(wire_type: WireType, wire: &mut &'a [u8]) -> Result<&'a [u8], prost::DecodeError> {
    check_wire_type(WireType::LengthDelimited, wire_type)?;
    let length = decode_varint(wire)?;
    let payload = usize::try_from(length)
        .ok()
        .and_then(|length| wire.split_off(..length));
    payload.ok_or_else(ends_too_early)
}

/// prost makes its errors itself.
#[cold]
fn ends_too_early() -> prost::DecodeError {
    decode_varint(&mut [0x80].as_slice()).expect_err("a number cannot end so")
}

fn skip(tag: u32, wire_type: WireType, wire: &mut &[u8]) -> Result<(), prost::DecodeError> {
    skip_field(wire_type, tag, wire, DecodeContext::default())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
    use crate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor as message;
    use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

    /// What prost has read.
    fn borrowed(message: &RateLimitRequest) -> Request<'_> {
        Request {
            domain: &message.domain,
            descriptors: message.descriptors.iter().map(borrowed_descriptor).collect(),
            hits_addend: message.hits_addend,
        }
    }

    fn borrowed_descriptor(message: &RateLimitDescriptor) -> Descriptor<'_> {
        let entries = message.entries.iter().map(|entry| Entry {
            key: &entry.key,
            value: &entry.value,
        });
        let limit = message.limit.as_ref().map(|limit| LimitOverride {
            requests_per_unit: limit.requests_per_unit,
            unit: limit.unit,
            unit_multiplier: limit.unit_multiplier.map(u64::from),
        });
        Descriptor {
            entries: entries.collect(),
            limit: limit.and_then(|limit| limit.usable()),
            hits_addend: message.hits_addend,
            is_negative_hits: message.is_negative_hits,
        }
    }

    prop_compose! {
        fn a_descriptor()(
            entries in prop::collection::vec((any::<Vec<u8>>(), any::<Vec<u8>>()), 0..6),
            limit in prop::option::of((any::<u32>(), -1..9, prop::option::of(0..3u32))),
            hits_addend in prop::option::of(prop_oneof![0..3u64, any::<u64>()]),
            is_negative_hits: bool,
        ) -> RateLimitDescriptor {
            RateLimitDescriptor {
                entries: entries
                    .into_iter()
                    .map(|(key, value)| message::Entry { key: key.into(), value: value.into() })
                    .collect(),
                limit: limit.map(|(requests_per_unit, unit, unit_multiplier)| message::RateLimitOverride {
                    requests_per_unit,
                    unit,
                    unit_multiplier,
                }),
                hits_addend,
                is_negative_hits,
            }
        }
    }

    prop_compose! {
        fn a_request()(
            domain: Vec<u8>,
            descriptors in prop::collection::vec(a_descriptor(), 0..6),
            hits_addend: u32,
        ) -> RateLimitRequest {
            RateLimitRequest { domain: domain.into(), descriptors, hits_addend }
        }
    }

    #[track_caller]
    fn assert_same(wire: &[u8]) {
        let expected = RateLimitRequest::decode(wire);
        match (&expected, request(wire)) {
            (Ok(message), Ok(request)) => assert_eq!(request, borrowed(message)),
            (Err(_), Err(DecodeError::Malformed(_))) => {}
            (expected, got) => panic!("prost makes of it {expected:?}, we make {got:?}"),
        }
    }

    proptest! {
        #[test]
        fn a_request_is_what_prost_reads(message in a_request()) {
            assert_same(&message.encode_to_vec());
        }

        /// One message after the other is one message in which the later fields count, or are added.
        #[test]
        fn so_are_two_in_one(first in a_request(), second in a_request()) {
            assert_same(&[first.encode_to_vec(), second.encode_to_vec()].concat());
        }

        #[test]
        fn so_are_messages_that_are_damaged(
            message in a_request(),
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
            end: prop::sample::Index,
        ) {
            let mut wire = message.encode_to_vec();
            if !wire.is_empty() {
                for (at, byte) in damage {
                    let at = at.index(wire.len());
                    wire[at] = byte;
                }
                wire.truncate(end.index(wire.len() + 1));
            }
            assert_same(&wire);
        }

        #[test]
        fn so_are_bytes(wire: Vec<u8>) {
            assert_same(&wire);
        }
    }

    #[test]
    fn parts_of_one_override_are_joined() {
        // Descriptor { limit: {requests_per_unit: 9}, limit: {unit: MINUTE}, limit: {unit_multiplier: {}} }
        assert_same(&[0x12, 11, 0x12, 2, 0x08, 9, 0x12, 2, 0x10, 2, 0x12, 2, 0x1a, 0]);
        assert_same(&[0x12, 8, 0x12, 2, 0x08, 9, 0x12, 2, 0x10, 2]);
    }

    #[test]
    fn unknown_fields_and_groups_are_left_out() {
        let known = request_of(1, 1);
        // A 64-bit field, a 32-bit field, a group with a number in it.
        let unknown = [
            0x51, 1, 2, 3, 4, 5, 6, 7, 8, 0x55, 1, 2, 3, 4, 0x5b, 0x08, 1, 0x5c,
        ];
        assert_same(&[unknown.as_slice(), &known].concat());
        assert_same(&[known.as_slice(), &unknown].concat());
        // A group that does not end.
        assert_same(&[known.as_slice(), &[0x5b]].concat());
    }

    fn request_of(descriptors: usize, entries: usize) -> Vec<u8> {
        let descriptor = RateLimitDescriptor {
            entries: vec![message::Entry::default(); entries],
            hits_addend: Some(7),
            ..RateLimitDescriptor::default()
        };
        RateLimitRequest {
            domain: "d".into(),
            descriptors: vec![descriptor; descriptors],
            hits_addend: 300,
        }
        .encode_to_vec()
    }

    #[test]
    fn descriptors_and_entries_are_counted() {
        assert!(request(&request_of(1_000, 10)).is_ok());
        assert_eq!(request(&request_of(1_001, 0)), Err(DecodeError::TooLarge));
        assert_eq!(request(&request_of(1_000, 11)), Err(DecodeError::TooLarge));
        assert_eq!(request(&request_of(1, 10_001)), Err(DecodeError::TooLarge));
    }

    #[test]
    fn an_override_without_a_usable_window_is_none() {
        #[track_caller]
        fn test(unit: i32, unit_multiplier: Option<u64>, expected: Option<u64>) {
            let limit = LimitOverride {
                requests_per_unit: 9,
                unit,
                unit_multiplier,
            };
            let milliseconds = limit.usable().map(|limit| limit.window.milliseconds());
            assert_eq!(milliseconds.map(|milliseconds| milliseconds / 1_000), expected);
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
