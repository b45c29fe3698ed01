//! Requests and responses in proto3 JSON, as the official protos have them.
//!
//! The official schema has strings where ours has bytes. In [recorded requests](recorded_request) a byte that is not
//! UTF-8 is written `\xHH`, two hexadecimal digits; a backslash that is meant literally and is followed by `x` and two
//! hexadecimal digits is written `\x5c`. All other text stands for itself.

use std::borrow::Cow;
use std::sync::LazyLock;

use bytes::Bytes;
use prost::Message as _;
use prost_reflect::{DescriptorPool, DynamicMessage, MessageDescriptor, SerializeOptions};
use thiserror::Error;

use crate::proto::OFFICIAL_DESCRIPTORS;
use crate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

static REQUEST: LazyLock<MessageDescriptor> = LazyLock::new(|| official("RateLimitRequest"));
static RESPONSE: LazyLock<MessageDescriptor> = LazyLock::new(|| official("RateLimitResponse"));

fn official(message: &str) -> MessageDescriptor {
    static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
        DescriptorPool::decode(OFFICIAL_DESCRIPTORS).expect("the build wrote a valid descriptor set")
    });
    POOL.get_message_by_name(&format!("envoy.service.ratelimit.v3.{message}"))
        .expect("the descriptor set has the messages of the service")
}

/// The text is no `RateLimitRequest` in proto3 JSON.
#[derive(Debug, Error)]
#[error("not a RateLimitRequest in proto3 JSON: {0}")]
pub struct InvalidJson(#[from] serde_json::Error);

/// Reads a request, and returns it as it goes over the wire. Fields are in lowerCamel or as in the proto, unknown ones
/// refused, 64-bit numbers are numbers or strings, enums names or numbers.
pub fn request(json: &[u8]) -> Result<Vec<u8>, InvalidJson> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let message = DynamicMessage::deserialize(REQUEST.clone(), &mut deserializer)?;
    deserializer.end()?;
    Ok(message.encode_to_vec())
}

/// Reads a request like [`request`], with escapes for bytes that are not UTF-8.
pub fn recorded_request(json: &[u8]) -> Result<Vec<u8>, InvalidJson> {
    let mut request = RateLimitRequest::decode(request(json)?.as_slice())
        .expect("the schemas differ only in strings, which are bytes");
    unescape(&mut request.domain);
    for entry in request
        .descriptors
        .iter_mut()
        .flat_map(|descriptor| &mut descriptor.entries)
    {
        unescape(&mut entry.key);
        unescape(&mut entry.value);
    }
    Ok(request.encode_to_vec())
}

/// A request in words.
#[derive(Debug)]
pub(crate) struct RequestText {
    pub(crate) domain: String,
    pub(crate) json: String,
}

/// Shows a request as it came over the wire. `None` if it cannot be read, or has bytes that are not UTF-8.
pub(crate) fn request_text(wire: &[u8]) -> Option<RequestText> {
    let message = DynamicMessage::decode(REQUEST.clone(), wire).ok()?;
    let domain = message.get_field_by_name("domain")?.as_str()?.to_owned();
    let json = serde_json::to_string(&message).ok()?;
    Some(RequestText { domain, json })
}

/// Writes a response as it goes over the wire in JSON: lowerCamel, default values left out, enums by name. What could not
/// be written does not get this far: durations are cut to what a `Duration` holds, and the loader bounds how deep metadata
/// is nested.
pub fn response(wire: &[u8]) -> String {
    let official = DynamicMessage::decode(RESPONSE.clone(), wire).expect("strings of a response are UTF-8");
    let mut json = Vec::with_capacity(256);
    official
        .serialize_with_options(
            &mut serde_json::Serializer::new(&mut json),
            &SerializeOptions::new(),
        )
        .expect("a response can be written as JSON");
    String::from_utf8(json).expect("JSON is UTF-8")
}

fn unescape(text: &mut Bytes) {
    if let Cow::Owned(unescaped) = unescaped(text) {
        *text = unescaped.into();
    }
}

fn unescaped(text: &[u8]) -> Cow<'_, [u8]> {
    let Some(first) = (0..text.len()).find(|i| escape_at(text, *i).is_some()) else {
        return Cow::Borrowed(text);
    };
    let mut bytes = text[..first].to_vec();
    let mut i = first;
    while i < text.len() {
        match escape_at(text, i) {
            Some(byte) => {
                bytes.push(byte);
                i += 4;
            }
            None => {
                bytes.push(text[i]);
                i += 1;
            }
        }
    }
    Cow::Owned(bytes)
}

/// The byte that an escape at `i` stands for.
fn escape_at(text: &[u8], i: usize) -> Option<u8> {
    let [b'\\', b'x', high, low] = *text.get(i..i + 4)? else {
        return None;
    };
    let digit = |digit: u8| char::from(digit).to_digit(16);
    u8::try_from(digit(high)? * 16 + digit(low)?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_two_hexadecimal_digits_make_an_escape() {
        #[track_caller]
        fn test(text: &str, expected: &[u8]) {
            assert_eq!(*unescaped(text.as_bytes()), *expected, "{text}");
        }
        test(r"a\xffb", b"a\xffb");
        test(r"\xFE\xfe", b"\xfe\xfe");
        test(r"\x5cxff", br"\xff");
        test(r"c:\x\xz1\", br"c:\x\xz1\");
        test(r#"a b"c\d"#, br#"a b"c\d"#);
        test("", b"");
    }

    #[test]
    fn unknown_fields_and_trailing_text_are_refused() {
        assert!(request(br#"{"domain": "d"}"#).is_ok());
        assert!(request(br#"{"domian": "d"}"#).is_err());
        assert!(request(br#"{"domain": "d"} x"#).is_err());
        assert!(request(b"").is_err());
    }

    #[test]
    fn numbers_and_enums_come_in_all_spellings() {
        let json = br#"{"domain": "d", "hits_addend": "2", "descriptors": [{"entries": [{"key": "k"}],
            "hitsAddend": 3, "limit": {"unit": 7, "requestsPerUnit": 4, "unitMultiplier": 2}, "isNegativeHits": true}]}"#;
        let request = RateLimitRequest::decode(request(json).unwrap().as_slice()).unwrap();
        assert_eq!(request.hits_addend, 2);
        let descriptor = &request.descriptors[0];
        assert_eq!(descriptor.hits_addend, Some(3));
        assert!(descriptor.is_negative_hits);
        let limit = descriptor.limit.unwrap();
        assert_eq!(
            (limit.unit, limit.requests_per_unit, limit.unit_multiplier),
            (7, 4, Some(2))
        );
    }
}
