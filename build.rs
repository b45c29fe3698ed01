//! Compiles `proto/` with protox, so that a build needs no protoc.
//!
//! What comes out: the Rust types of the wire and of xDS; the types of the official protos, for `benches/baseline.rs`; and a
//! descriptor set in which `domain`, `key` and `value` are
//! `string`, as the official protos have them. The wire types have `bytes` there, so that a request with bytes that are
//! not UTF-8 can be decoded; reflection and JSON show the official schema.

use std::error::Error;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

use prost::Message as _;
use prost_types::field_descriptor_proto::Type;
use prost_types::{DescriptorProto, FileDescriptorSet};

/// The messages whose `bytes` fields are `string` in the official protos.
const TEXT_MESSAGES: [&str; 2] = ["RateLimitRequest", "Entry"];

fn main() -> Result<(), Box<dyn Error>> {
    let files = ["envoy/service/ratelimit/v3/rls.proto"];
    println!("cargo::rerun-if-changed=proto");
    println!("cargo::rustc-env=BUILD_REVISION={}", revision());

    let descriptors = protox::compile(files, ["proto"])?;
    tonic_prost_build::configure()
        .bytes(".")
        .include_file("protos.rs")
        .compile_fds(descriptors.clone())?;

    let files = [
        "envoy/service/discovery/v3/ads.proto",
        "ratelimit/config/ratelimit/v3/rls_conf.proto",
    ];
    tonic_prost_build::configure()
        .include_file("xds_protos.rs")
        .compile_fds(protox::compile(files, ["proto"])?)?;

    let out = PathBuf::from(env::var("OUT_DIR")?);
    let official = with_official_strings(descriptors);
    fs::write(out.join("official_descriptors.bin"), official.encode_to_vec())?;

    let baseline = out.join("baseline");
    fs::create_dir_all(&baseline)?;
    tonic_prost_build::configure()
        .build_client(false)
        .out_dir(baseline)
        .include_file("protos.rs")
        .compile_fds(official)?;
    Ok(())
}

/// The commit that is built. Whoever builds without a repository can say it.
fn revision() -> String {
    println!("cargo::rerun-if-env-changed=BUILD_REVISION");
    if let Ok(said) = env::var("BUILD_REVISION") {
        return said;
    }
    // It changes with each commit.
    let log = ".git/logs/HEAD";
    if fs::exists(log).unwrap_or(false) {
        println!("cargo::rerun-if-changed={log}");
    }
    let asked = Command::new("git")
        .args(["rev-parse", "--short=12", "HEAD"])
        .output();
    match asked {
        Ok(answer) if answer.status.success() => String::from_utf8_lossy(&answer.stdout).trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}

fn with_official_strings(mut descriptors: FileDescriptorSet) -> FileDescriptorSet {
    for file in &mut descriptors.file {
        for message in &mut file.message_type {
            restore_strings(message);
        }
    }
    descriptors
}

fn restore_strings(message: &mut DescriptorProto) {
    if TEXT_MESSAGES.contains(&message.name()) {
        for field in &mut message.field {
            if field.r#type() == Type::Bytes {
                field.set_type(Type::String);
            }
        }
    }
    message.nested_type.iter_mut().for_each(restore_strings);
}
