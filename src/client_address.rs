//! The client behind proxies: an address, or an `X-Forwarded-For` chain, resolved to one address in canonical text.
//!
//! A chain is read from the right, where the peer next to us stands, and no further than the first address that is not
//! trusted: what stands left of it was written by somebody whom nobody vouches for. The leftmost address is never asked, as
//! nothing is left of it. The rule is that of `proxy-addr`, which Express and Fastify use, with stricter addresses: IPv4
//! in four decimal numbers only, IPv4-mapped IPv6 folded, ports, brackets and zones taken off.

use std::fmt::Write as _;
use std::net::{IpAddr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use smallvec::SmallVec;

/// How the values of one key are resolved.
#[derive(Debug, Clone, PartialEq)]
pub struct ClientAddress {
    /// Which addresses of a chain are proxies that tell the truth about who asked them.
    pub trusted: Trusted,
    /// How much of an IPv4 address tells clients apart, in bits.
    pub ipv4_prefix: u8,
    /// How much of an IPv6 address tells clients apart, in bits: usually a client has all of a /64.
    pub ipv6_prefix: u8,
    /// What becomes of a chain with something else in it than addresses.
    pub malformed: Malformed,
}

/// Which addresses of a chain are trusted.
#[derive(Debug, Clone, PartialEq)]
pub enum Trusted {
    /// All: the client is the leftmost address, which anybody can forge.
    All,
    /// Those in these networks.
    Networks(Vec<IpNet>),
    /// So many from the right, if the peer is in these networks; `None`: whatever the peer.
    Hops {
        /// How many proxies there are.
        count: usize,
        /// Where the proxy next to us is.
        peer: Option<Vec<IpNet>>,
    },
}

/// What becomes of a chain when the walk meets something that is no address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Malformed {
    /// The client is the address right of it.
    Previous,
    /// Its text stands for the client.
    Literal,
    /// The descriptor is refused.
    Refuse,
}

/// The client, as far as it could be made out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Client<'a> {
    /// Its address.
    Address(IpAddr),
    /// A text that is no address.
    Literal(&'a [u8]),
    /// There is no address in the chain, or nothing at all.
    Unknown,
    /// Refused for what stands in the chain.
    Refused,
}

/// An address as text, on the stack.
pub type AddressText = SmallVec<[u8; 48]>;

impl ClientAddress {
    /// The client that `chain` names. Does not allocate, and reads no more of the chain than it has to.
    pub fn resolve<'a>(&self, chain: &'a [u8]) -> Client<'a> {
        let mut client = Client::Unknown;
        let items = chain.rsplit(|byte| *byte == b',').map(<[u8]>::trim_ascii);
        for (hop, item) in items.filter(|item| !item.is_empty()).enumerate() {
            let Some(address) = parse(item) else {
                return match self.malformed {
                    Malformed::Previous => client,
                    Malformed::Literal => Client::Literal(item),
                    Malformed::Refuse => Client::Refused,
                };
            };
            client = Client::Address(address);
            if !self.trusts(address, hop) {
                break;
            }
        }
        client
    }

    /// Whether the address `hop` places left of the peer is a proxy that is believed.
    fn trusts(&self, address: IpAddr, hop: usize) -> bool {
        let is_in = |networks: &[IpNet]| networks.iter().any(|network| network.contains(&address));
        match &self.trusted {
            Trusted::All => true,
            Trusted::Networks(networks) => is_in(networks),
            Trusted::Hops { count, peer } => {
                hop < *count && (hop > 0 || peer.as_ref().is_none_or(|peer| is_in(peer)))
            }
        }
    }

    /// The part of an address that tells clients apart.
    pub fn mask(&self, address: IpAddr) -> IpAddr {
        match address {
            IpAddr::V4(address) => Ipv4Net::new(address, self.ipv4_prefix)
                .map_or(address, |network| network.network())
                .into(),
            IpAddr::V6(address) => Ipv6Net::new(address, self.ipv6_prefix)
                .map_or(address, |network| network.network())
                .into(),
        }
    }
}

/// Canonical text.
pub fn text(address: IpAddr) -> AddressText {
    struct Text(AddressText);

    impl std::fmt::Write for Text {
        fn write_str(&mut self, part: &str) -> std::fmt::Result {
            self.0.extend_from_slice(part.as_bytes());
            Ok(())
        }
    }

    let mut text = Text(AddressText::new());
    let _ = write!(text, "{address}");
    text.0
}

/// The address in an item of a chain: with or without a port, an IPv6 address in brackets or not, with or without a zone.
pub fn parse(item: &[u8]) -> Option<IpAddr> {
    let item = std::str::from_utf8(item).ok()?;
    let host = match item.strip_prefix('[') {
        Some(rest) => {
            let (host, port) = rest.split_once(']')?;
            is_port(port).then_some(host)?
        }
        None => match item.split_once(':') {
            // Only IPv4 can have a port without brackets.
            Some((host, port)) if !port.contains(':') => is_port(&item[host.len()..]).then_some(host)?,
            _ => item,
        },
    };
    if let Ok(address) = host.parse::<IpAddr>() {
        return Some(address.to_canonical());
    }
    let (address, zone) = host.split_once('%')?;
    let address: Ipv6Addr = address.parse().ok()?;
    (!zone.is_empty()).then(|| IpAddr::V6(address).to_canonical())
}

/// Nothing, or a colon and a port.
fn is_port(text: &str) -> bool {
    text.is_empty()
        || text
            .strip_prefix(':')
            .is_some_and(|port| port.bytes().all(|byte| byte.is_ascii_digit()) && port.parse::<u16>().is_ok())
}

/// The networks that a name stands for: `loopback`, `linklocal` or `uniquelocal`.
pub fn preset(name: &str) -> Option<Vec<IpNet>> {
    let networks: &[&str] = match name {
        "loopback" => &["127.0.0.0/8", "::1/128"],
        "linklocal" => &["169.254.0.0/16", "fe80::/10"],
        "uniquelocal" => &["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"],
        _ => return None,
    };
    let networks = networks
        .iter()
        .map(|network| network.parse().expect("the presets are networks"));
    Some(networks.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_addresses_with_or_without_a_port() {
        #[track_caller]
        fn test(item: &str, expected: Option<&str>) {
            let shown = parse(item.as_bytes()).map(|address| address.to_string());
            assert_eq!(shown.as_deref(), expected, "{item}");
        }
        test("203.0.113.9", Some("203.0.113.9"));
        test("203.0.113.9:443", Some("203.0.113.9"));
        test("2001:DB8::1", Some("2001:db8::1"));
        test("[2001:db8::1]", Some("2001:db8::1"));
        test("[2001:db8::1]:443", Some("2001:db8::1"));
        test("::ffff:10.0.0.1", Some("10.0.0.1"));
        test("::ffff:0a00:0001", Some("10.0.0.1"));
        test("fe80::1%eth0", Some("fe80::1"));
        test("[fe80::1%eth0]:80", Some("fe80::1"));
        for junk in [
            "",
            "junk",
            "010.0.0.1",
            "0x0a.0.0.1",
            "167772161",
            "10.1",
            "10.0.0.1:",
            "10.0.0.1:99999",
            "10.0.0.1:+1",
            "[10.0.0.1",
            "[::1]x",
            "[::1]:x",
            "fe80::1%",
            "1.2.3.4%eth0",
            "::1:80:90:x",
            " 10.0.0.1",
        ] {
            test(junk, None);
        }
        assert_eq!(parse(b"\xff"), None);
    }

    fn with(trusted: Trusted) -> ClientAddress {
        ClientAddress {
            trusted,
            ipv4_prefix: 32,
            ipv6_prefix: 64,
            malformed: Malformed::Previous,
        }
    }

    fn networks(names: &[&str]) -> Trusted {
        Trusted::Networks(names.iter().flat_map(|name| preset(name).unwrap()).collect())
    }

    #[track_caller]
    fn test(rule: &ClientAddress, chain: &str, expected: &str) {
        let client = match rule.resolve(chain.as_bytes()) {
            Client::Address(address) => address.to_string(),
            Client::Literal(text) => format!("literally {}", String::from_utf8_lossy(text)),
            Client::Unknown => "unknown".into(),
            Client::Refused => "refused".into(),
        };
        assert_eq!(client, expected, "{chain}");
    }

    #[test]
    fn the_walk_ends_at_the_first_address_that_is_not_trusted() {
        let rule = with(networks(&["loopback", "uniquelocal"]));
        test(&rule, "6.6.6.6, 203.0.113.9, 10.0.0.5, 127.0.0.1", "203.0.113.9");
        test(&rule, "203.0.113.9,10.0.0.5", "203.0.113.9");
        test(&rule, "10.0.0.5, 10.0.0.6", "10.0.0.5");
        test(&rule, "198.51.100.1", "198.51.100.1");
        test(&rule, " , ,10.0.0.1, ", "10.0.0.1");
        test(&rule, "", "unknown");
        test(&with(Trusted::All), "6.6.6.6, 198.51.100.1", "6.6.6.6");
        test(
            &with(Trusted::Networks(Vec::new())),
            "6.6.6.6, 198.51.100.1",
            "198.51.100.1",
        );
    }

    #[test]
    fn hops_are_counted_only_behind_a_trusted_peer() {
        let rule = with(Trusted::Hops {
            count: 2,
            peer: Some(preset("uniquelocal").unwrap()),
        });
        test(
            &rule,
            "6.6.6.6, 203.0.113.9, 198.51.100.1, 10.0.0.1",
            "203.0.113.9",
        );
        test(&rule, "6.6.6.6, 203.0.113.9, 198.51.100.1", "198.51.100.1");
        test(&rule, "203.0.113.9, 10.0.0.1", "203.0.113.9");
        let any = with(Trusted::Hops { count: 1, peer: None });
        test(&any, "6.6.6.6, 203.0.113.9, 198.51.100.1", "203.0.113.9");
    }

    #[test]
    fn what_is_no_address_is_never_the_client_by_default() {
        let mut rule = with(networks(&["loopback", "uniquelocal"]));
        test(&rule, "1.1.1.1, junk, 10.0.0.1", "10.0.0.1");
        test(&rule, "1.1.1.1, junk", "unknown");
        test(&rule, "junk, 1.1.1.1", "1.1.1.1");
        rule.malformed = Malformed::Literal;
        test(&rule, "1.1.1.1, junk, 10.0.0.1", "literally junk");
        rule.malformed = Malformed::Refuse;
        test(&rule, "1.1.1.1, junk, 10.0.0.1", "refused");
        test(&rule, "junk, 1.1.1.1", "1.1.1.1");
    }

    #[test]
    fn clients_are_told_apart_by_what_they_own() {
        let rule = ClientAddress {
            ipv4_prefix: 24,
            ..with(Trusted::All)
        };
        let masked = |address: &str| rule.mask(address.parse().unwrap()).to_string();
        assert_eq!(masked("203.0.113.9"), "203.0.113.0");
        assert_eq!(masked("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        let single = ClientAddress {
            ipv4_prefix: 32,
            ipv6_prefix: 128,
            ..rule
        };
        assert_eq!(
            single.mask("2001:db8::6".parse().unwrap()).to_string(),
            "2001:db8::6"
        );
        assert_eq!(&text("2001:db8::6".parse().unwrap())[..], b"2001:db8::6");
    }
}
