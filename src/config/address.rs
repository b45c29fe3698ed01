//! Networks and client addresses as written in rule files.

use std::net::IpAddr;

use ipnet::IpNet;

use super::diagnostic::{Place, nearest};
use super::fields::{At, CLIENT_ADDRESS, Fields, Reading, TRUSTED};
use super::yaml::NodeRef;
use crate::client_address::{ClientAddress, Malformed, Trusted, preset};

/// Reads one entry of `client_address`: the key it is for, and how its values are resolved. `None` if there is an error.
pub(super) fn read(
    reading: &mut Reading<'_>,
    place: &Place<'_>,
    node: NodeRef,
) -> Option<(At<String>, ClientAddress)> {
    let fields = reading.mapping(place, node, &CLIENT_ADDRESS)?;
    let key = reading.text(place, &fields, "key");
    if key.as_ref().is_some_and(|key| key.value.is_empty()) {
        let fault = "client_address does not say for which key";
        reading
            .diagnostics
            .error(place, fields.position, fault, "write key: NAME");
        return None;
    }
    let trusted = trusted(reading, place, &fields);
    let ipv4_prefix = prefix(reading, place, &fields, "ipv4_prefix", 32);
    let ipv6_prefix = prefix(reading, place, &fields, "ipv6_prefix", 128);
    let malformed = malformed(reading, place, &fields);
    let address = ClientAddress {
        trusted: trusted?,
        ipv4_prefix: ipv4_prefix?.unwrap_or(32),
        ipv6_prefix: ipv6_prefix?.unwrap_or(64),
        malformed: malformed?,
    };
    Some((key?, address))
}

/// The networks of `key`: CIDRs, addresses and names of presets, one or a list. `None` if there is an error.
pub(super) fn networks(
    reading: &mut Reading<'_>,
    place: &Place<'_>,
    fields: &Fields,
    key: &str,
) -> Option<Vec<IpNet>> {
    let texts = reading.texts(place, fields, key)?;
    let mut networks = Vec::new();
    let mut has_errors = false;
    for text in texts {
        match network(&text.value) {
            Ok(found) => networks.extend(found),
            Err(advice) => {
                let fault = format!("\"{}\" is no network", text.value);
                reading.diagnostics.error(place, text.position, fault, advice);
                has_errors = true;
            }
        }
    }
    (!has_errors).then_some(networks)
}

/// The networks that a text stands for, or what to write instead.
fn network(text: &str) -> Result<Vec<IpNet>, String> {
    if let Some(networks) = preset(text) {
        return Ok(networks);
    }
    if let Ok(address) = text.parse::<IpAddr>() {
        return Ok(vec![address.to_canonical().into()]);
    }
    match text.parse::<IpNet>() {
        Ok(network) if network.trunc() == network => Ok(vec![canonical(network)]),
        Ok(network) => Err(format!("did you mean {}?", network.trunc())),
        Err(_) => Err(match nearest(text, ["loopback", "linklocal", "uniquelocal"]) {
            Some(meant) => format!("did you mean {meant}?"),
            None => {
                "write a network such as 10.0.0.0/8, an address, or loopback, linklocal or uniquelocal".into()
            }
        }),
    }
}

/// A network of IPv4-mapped addresses as the IPv4 network that it is.
fn canonical(network: IpNet) -> IpNet {
    match (
        network.addr().to_canonical(),
        network.prefix_len().checked_sub(96),
    ) {
        (address @ IpAddr::V4(_), Some(length)) if matches!(network, IpNet::V6(_)) => {
            IpNet::new(address, length).unwrap_or(network)
        }
        _ => network,
    }
}

fn trusted(reading: &mut Reading<'_>, place: &Place<'_>, fields: &Fields) -> Option<Trusted> {
    let Some(node) = reading.value(fields, "trusted") else {
        return Some(Trusted::Networks(Vec::new()));
    };
    if reading.is_mapping(node) {
        let hops = reading.mapping(place, node, &TRUSTED)?;
        let count = reading.u32(place, &hops, "hops", 1)?;
        if count.is_none() && hops.lacks("hops") {
            let fault = "trusted does not say how many hops";
            reading
                .diagnostics
                .error(place, hops.position, fault, "write hops: 1");
        }
        let peer = match hops.has("peer") {
            true if reading.shown_text(&hops, "peer") == "all" => None,
            true => Some(networks(reading, place, &hops, "peer")?),
            false => Some(private_networks()),
        };
        return Some(Trusted::Hops {
            count: usize::try_from(count?).ok()?,
            peer,
        });
    }
    if reading.shown_text(fields, "trusted") == "all" {
        return Some(Trusted::All);
    }
    networks(reading, place, fields, "trusted").map(Trusted::Networks)
}

/// The networks that a proxy usually is in.
fn private_networks() -> Vec<IpNet> {
    ["loopback", "linklocal", "uniquelocal"]
        .iter()
        .filter_map(|name| preset(name))
        .flatten()
        .collect()
}

fn prefix(
    reading: &mut Reading<'_>,
    place: &Place<'_>,
    fields: &Fields,
    key: &str,
    most: u8,
) -> Option<Option<u8>> {
    let Some(given) = reading.u32(place, fields, key, 0)? else {
        return Some(None);
    };
    match u8::try_from(given) {
        Ok(prefix) if prefix <= most => Some(Some(prefix)),
        _ => {
            let fault = format!("{key} must be from 0 to {most}, not {given}");
            let position = fields.position_of(key);
            reading.diagnostics.error(
                place,
                position,
                fault,
                format!("write {key}: {most} for single addresses"),
            );
            None
        }
    }
}

fn malformed(reading: &mut Reading<'_>, place: &Place<'_>, fields: &Fields) -> Option<Malformed> {
    let text = reading.text(place, fields, "malformed")?;
    match text.value.as_str() {
        "" | "previous" => Some(Malformed::Previous),
        "literal" => Some(Malformed::Literal),
        "refuse" => Some(Malformed::Refuse),
        other => {
            let fault = format!("malformed \"{other}\" is not known");
            reading
                .diagnostics
                .error(place, text.position, fault, "write previous, literal or refuse");
            None
        }
    }
}
