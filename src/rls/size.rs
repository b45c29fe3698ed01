//! How large a request may be: not in bytes alone, since an empty descriptor takes two of them on the wire and a hundred
//! times as much in memory and in the answer.
//!
//! The wire is counted before it is decoded. See <https://protobuf.dev/programming-guides/encoding/>.

use std::marker::PhantomData;

use prost::Message;
use thiserror::Error;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic_prost::{ProstCodec, ProstDecoder, ProstEncoder};

use crate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};

/// How many descriptors a request may have.
const MOST_DESCRIPTORS: usize = 1_000;

/// How many entries the descriptors of a request may have together.
const MOST_ENTRIES: usize = 10_000;

/// The field number of `descriptors` in a `RateLimitRequest`.
const DESCRIPTORS: u64 = 2;

/// The field number of `entries` in a `RateLimitDescriptor`.
const ENTRIES: u64 = 1;

/// The request is larger than any honest one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("a request may have {MOST_DESCRIPTORS} descriptors, and these {MOST_ENTRIES} entries together")]
pub struct TooLarge;

/// Refuses a request on the wire that has too many parts. What is malformed is left to the decoder.
pub(super) fn check(request: &[u8]) -> Result<(), TooLarge> {
    let (mut descriptors, mut entries) = (0, 0);
    for descriptor in payloads(request, DESCRIPTORS) {
        descriptors += 1;
        entries += payloads(descriptor, ENTRIES).count();
        if descriptors > MOST_DESCRIPTORS || entries > MOST_ENTRIES {
            return Err(TooLarge);
        }
    }
    Ok(())
}

/// The length-delimited fields of `message` with this number, up to the first that is malformed.
fn payloads(mut message: &[u8], number: u64) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        loop {
            let key = varint(&mut message)?;
            match key & 7 {
                0 => {
                    varint(&mut message)?;
                }
                1 => {
                    message.split_off(..8)?;
                }
                2 => {
                    let length = usize::try_from(varint(&mut message)?).ok()?;
                    let payload = message.split_off(..length)?;
                    if key >> 3 == number {
                        return Some(payload);
                    }
                }
                5 => {
                    message.split_off(..4)?;
                }
                // The marks around a group: what is in it counts as if it stood outside.
                _ => {}
            }
        }
    })
}

fn varint(message: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let byte = *message.split_off_first()?;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

/// A message that may be too large to be decoded.
pub trait Bounded {
    /// Looks at the message on the wire.
    fn check(wire: &[u8]) -> Result<(), TooLarge>;
}

impl Bounded for RateLimitRequest {
    fn check(wire: &[u8]) -> Result<(), TooLarge> {
        check(wire)
    }
}

impl Bounded for RateLimitResponse {
    fn check(_: &[u8]) -> Result<(), TooLarge> {
        Ok(())
    }
}

/// prost's codec, which decodes only what is not too large.
#[derive(Debug, Clone, Copy)]
pub struct BoundedCodec<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for BoundedCodec<T, U> {
    fn default() -> Self {
        BoundedCodec(PhantomData)
    }
}

impl<T, U> Codec for BoundedCodec<T, U>
where
    T: Message + Send + 'static,
    U: Message + Bounded + Default + Send + 'static,
{
    type Encode = T;
    type Decode = U;
    type Encoder = ProstEncoder<T>;
    type Decoder = BoundedDecoder<U>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<T, U>::raw_encoder(BufferSettings::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        BoundedDecoder(ProstCodec::<T, U>::raw_decoder(BufferSettings::default()))
    }
}

/// The decoder of [`BoundedCodec`].
#[derive(Debug, Clone)]
pub struct BoundedDecoder<U>(ProstDecoder<U>);

impl<U: Message + Bounded + Default> Decoder for BoundedDecoder<U> {
    type Item = U;
    type Error = Status;

    fn decode(&mut self, wire: &mut DecodeBuf<'_>) -> Result<Option<U>, Status> {
        // A message lies in one piece.
        U::check(bytes::Buf::chunk(wire)).map_err(|error| Status::invalid_argument(error.to_string()))?;
        self.0.decode(wire)
    }

    fn buffer_settings(&self) -> BufferSettings {
        self.0.buffer_settings()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
    use crate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;

    fn request(descriptors: usize, entries: usize) -> Vec<u8> {
        let descriptor = RateLimitDescriptor {
            entries: vec![Entry::default(); entries],
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
        assert_eq!(check(&request(1_000, 10)), Ok(()));
        assert_eq!(check(&request(1_001, 0)), Err(TooLarge));
        assert_eq!(check(&request(1_000, 11)), Err(TooLarge));
        assert_eq!(check(&request(1, 10_001)), Err(TooLarge));
    }

    #[test]
    fn unknown_fields_and_groups_hide_nothing() {
        // A 64-bit field, a 32-bit field, the start of a group and its end.
        let mut wire = vec![0x51, 1, 2, 3, 4, 5, 6, 7, 8, 0x55, 1, 2, 3, 4, 0x5b, 0x5c];
        wire.extend(request(1_001, 0));
        assert_eq!(check(&wire), Err(TooLarge));
    }

    proptest! {
        #[test]
        fn it_counts_what_prost_decodes(wire: Vec<u8>) {
            if let Ok(request) = RateLimitRequest::decode(wire.as_slice()) {
                prop_assert!(payloads(&wire, DESCRIPTORS).count() >= request.descriptors.len());
            }
        }
    }
}
