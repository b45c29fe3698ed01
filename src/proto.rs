//! The wire types, generated from `proto/`, and the official schema for JSON and reflection.

#![allow(missing_docs, unreachable_pub, clippy::doc_markdown)] // the code is generated

include!(concat!(env!("OUT_DIR"), "/protos.rs"));

/// The types with which rules are asked for over xDS.
pub mod xds {
    include!(concat!(env!("OUT_DIR"), "/xds_protos.rs"));
}

/// A serialized `FileDescriptorSet` of `proto/` in which `domain`, `key` and `value` are `string`, as in the official
/// protos; the types here have bytes there.
pub const OFFICIAL_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/official_descriptors.bin"));
