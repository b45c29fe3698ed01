//! What is asked: a request and its descriptors, free of protobuf, borrowed from the message.

use smallvec::SmallVec;

use crate::rate_limit::RateLimit;

/// One question: may these hits pass?
#[derive(Debug, Clone, PartialEq)]
pub struct Request<'a> {
    /// Which set of rules applies. Any bytes; empty is refused by the limiter.
    pub domain: &'a [u8],
    /// Each is judged on its own.
    pub descriptors: SmallVec<[Descriptor<'a>; 4]>,
    /// Hits of each descriptor that names none itself; 0 stands for 1.
    pub hits_addend: u32,
}

impl Request<'_> {
    /// The hits that `descriptor` asks for: its own, else the request's, where 0 stands for 1.
    pub fn hits(&self, descriptor: &Descriptor<'_>) -> Hits {
        let count = descriptor
            .hits_addend
            .unwrap_or(u64::from(self.hits_addend.max(1)));
        if descriptor.is_negative_hits {
            Hits::Refund(count)
        } else {
            Hits::Charge(count)
        }
    }
}

/// One thing to be limited, described by an ordered list of entries.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Descriptor<'a> {
    /// Matched against the rules in this order.
    pub entries: SmallVec<[Entry<'a>; 4]>,
    /// A limit to use instead of the configured one. An override that cannot be used (unit UNKNOWN, multiplier 0)
    /// is dropped before it gets here.
    pub limit: Option<RateLimit>,
    /// Hits of this descriptor; 0 looks without charging.
    pub hits_addend: Option<u64>,
    /// The hits are given back instead of charged.
    pub is_negative_hits: bool,
}

/// A key and its value: any bytes, compared byte by byte. The value may be empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// For example `remote_address`.
    pub key: &'a [u8],
    /// For example `203.0.113.7`.
    pub value: &'a [u8],
}

/// What a descriptor does to its counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hits {
    /// Adds this many; 0 looks without charging.
    Charge(u64),
    /// Gives this many back, never below an empty counter.
    Refund(u64),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn test(request: u32, descriptor: Option<u64>, expected: u64) {
        let request = Request {
            domain: b"d",
            descriptors: SmallVec::new(),
            hits_addend: request,
        };
        let descriptor = Descriptor {
            hits_addend: descriptor,
            ..Descriptor::default()
        };
        assert_eq!(request.hits(&descriptor), Hits::Charge(expected));
    }

    #[test]
    fn the_descriptors_hits_beat_the_requests() {
        test(0, None, 1);
        test(1, None, 1);
        test(7, None, 7);
        test(7, Some(0), 0);
        test(7, Some(3), 3);
        test(0, Some(u64::MAX), u64::MAX);
    }
}
