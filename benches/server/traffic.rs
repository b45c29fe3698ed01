//! The calls that are made, and the rules that decide them.

use std::fmt::Write as _;

use bytes::Bytes;
use clap::ValueEnum;
use tollgate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

use crate::random::SplitMix64;
use crate::request::{Blanks, frame, request};

/// How many clients there are: so many counters has each rule that is met.
pub(crate) const CLIENTS: u64 = 100_000;

/// Each descriptor of either size meets one limit, which nobody reaches, and counts for the client that is named in it.
pub(crate) const RULES: &str = "
domain: bench
descriptors:
  - key: path
    descriptors: &clients [{key: remote_address, rate_limit: {unit: year, requests_per_unit: 4000000000}}]
  - {key: tenant, descriptors: &paths [{key: path, descriptors: *clients}]}
  - {key: route, descriptors: *paths}
  - {key: cluster, descriptors: *paths}
";

/// Names of clients are all of one length.
fn client_name(client: u64) -> String {
    format!("client-{client:010}")
}

/// The rules of the calls and so many more, which differ by their limit.
pub(crate) fn many_rules(rules: u32, limit: u32) -> String {
    let mut text = RULES.to_owned();
    for rule in 0..rules {
        let limit = format!("{{unit: hour, requests_per_unit: {limit}}}");
        writeln!(
            text,
            "  - {{key: rule, value: {:?}, rate_limit: {limit}}}",
            value(rule.into())
        )
        .expect("a string takes everything");
    }
    text
}

/// The value of one of those rules, by its number.
pub(crate) fn value(number: u64) -> String {
    format!("{number:08}")
}

/// How large a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Size {
    /// One descriptor of two entries, 69 bytes.
    Small,
    /// Three descriptors of three entries each, 282 bytes.
    Big,
}

impl Size {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Size::Small => "small",
            Size::Big => "big",
        }
    }

    /// How many hits one call is.
    pub(crate) fn descriptors(self) -> u64 {
        match self {
            Size::Small => 1,
            Size::Big => 3,
        }
    }

    /// The call of one client.
    pub(crate) fn request(self, client: u64) -> RateLimitRequest {
        let first: &[_] = match self {
            Size::Small => &[None],
            Size::Big => &[
                Some(("tenant", "acme-corporation-1")),
                Some(("route", "checkout-service-v1")),
                Some(("cluster", "storefront-north")),
            ],
        };
        request(first.iter().map(|first| {
            let first = first.map(|(key, value)| (key, value.to_owned()));
            let rest = [
                ("path", "/api/v1/items".to_owned()),
                ("remote_address", client_name(client)),
            ];
            first.into_iter().chain(rest).collect()
        }))
    }
}

/// Makes the frames of calls that differ in their client only.
pub(crate) struct Frames {
    template: Vec<u8>,
    /// Where the name of the client stands.
    blanks: Blanks,
    clients: Clients,
}

/// Whose call each one is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Clients {
    /// All in turn.
    InTurn,
    /// Any, each as likely as the others; the same ones for the same seed.
    Random(u64),
}

impl Frames {
    pub(crate) fn new(size: Size, clients: Clients) -> Self {
        let template = frame(&size.request(0));
        Frames {
            blanks: Blanks::find(&template, &client_name(0)),
            template,
            clients,
        }
    }

    /// The frame of one call, counted from 0.
    pub(crate) fn frame(&self, call: u64) -> Bytes {
        let client = client_name(self.clients.client(call));
        let mut frame = self.template.clone();
        self.blanks.fill(&mut frame, client.as_bytes());
        frame.into()
    }
}

impl Clients {
    pub(crate) fn client(self, call: u64) -> u64 {
        match self {
            Clients::InTurn => call % CLIENTS,
            // Each number is one of the generator's own sequence, started elsewhere.
            Clients::Random(seed) => SplitMix64(SplitMix64(seed).next().wrapping_add(call)).next() % CLIENTS,
        }
    }
}
