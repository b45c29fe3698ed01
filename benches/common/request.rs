//! What calls are made of.

#![allow(dead_code)] // no bench needs all of it

use memchr::memmem;
use prost::Message as _;
use tollgate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use tollgate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

/// The path of the one call there is.
pub(crate) const PATH: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// A request for the domain `bench`, each descriptor as its keys and values.
pub(crate) fn request(
    descriptors: impl IntoIterator<Item = Vec<(&'static str, String)>>,
) -> RateLimitRequest {
    let descriptors = descriptors.into_iter().map(|entries| RateLimitDescriptor {
        entries: entries
            .into_iter()
            .map(|(key, value)| Entry {
                key: key.into(),
                value: value.into(),
            })
            .collect(),
        ..RateLimitDescriptor::default()
    });
    RateLimitRequest {
        domain: "bench".into(),
        descriptors: descriptors.collect(),
        hits_addend: 0,
    }
}

/// The message as gRPC sends it: not compressed, and its length before it.
pub(crate) fn frame(request: &RateLimitRequest) -> Vec<u8> {
    let message = request.encode_to_vec();
    let length = u32::try_from(message.len()).expect("it is a short message");
    [&[0], length.to_be_bytes().as_slice(), &message].concat()
}

/// Where in the bytes of a request a text stands in whose place others of its length are to be written.
pub(crate) struct Blanks {
    starts: Vec<usize>,
}

impl Blanks {
    pub(crate) fn find(bytes: &[u8], text: &str) -> Self {
        let starts = memmem::find_iter(bytes, text).collect();
        Blanks { starts }
    }

    pub(crate) fn fill(&self, bytes: &mut [u8], text: &[u8]) {
        for start in &self.starts {
            bytes[*start..][..text.len()].copy_from_slice(text);
        }
    }
}
