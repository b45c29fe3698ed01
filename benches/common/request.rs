//! What calls are made of.

#![allow(dead_code)] // no bench needs all of it

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
