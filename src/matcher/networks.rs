//! Networks that values may be in: the longest one that holds an address wins.
//!
//! One look by hash per length of prefix that occurs, the longest first.

use std::collections::BTreeMap;
use std::net::IpAddr;

use hashbrown::HashMap;
use ipnet::IpNet;

use super::NodeId;
use crate::client_address;

/// The networks of one key at one level of the tree.
#[derive(Debug, Default)]
pub(super) struct Networks {
    /// By length of prefix; each with the networks of that length.
    by_length: BTreeMap<u8, HashMap<IpNet, NodeId>>,
}

impl Networks {
    /// Adds networks that lead to `node`, or says which node one of them leads to already.
    pub(super) fn add(&mut self, networks: &[IpNet], node: NodeId) -> Result<(), NodeId> {
        for network in networks {
            let length = self.by_length.entry(network.prefix_len()).or_default();
            match length.get(network) {
                Some(there) if *there != node => return Err(*there),
                _ => length.insert(*network, node),
            };
        }
        Ok(())
    }

    /// The node of the longest network that holds the address in `value`; `None` also if it is no address.
    pub(super) fn find(&self, value: &[u8]) -> Option<NodeId> {
        if self.by_length.is_empty() {
            return None;
        }
        let address: IpAddr = client_address::parse(value)?;
        self.by_length.iter().rev().find_map(|(length, networks)| {
            let network = IpNet::new(address, *length).ok()?;
            networks.get(&network.trunc()).copied()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_network_wins() {
        let mut networks = Networks::default();
        let written = [
            &["0.0.0.0/0", "::/0"][..],
            &["10.0.0.0/8"],
            &["10.1.0.0/16", "2001:db8::/32"],
            &["10.1.2.3/32"],
        ];
        for (i, written) in written.iter().enumerate() {
            let written: Vec<IpNet> = written.iter().map(|network| network.parse().unwrap()).collect();
            networks.add(&written, NodeId::new(i)).unwrap();
        }
        let find = |value: &str| networks.find(value.as_bytes()).map(NodeId::index);
        assert_eq!(find("203.0.113.9"), Some(0));
        assert_eq!(find("10.9.9.9"), Some(1));
        assert_eq!(find("10.1.9.9"), Some(2));
        assert_eq!(find("10.1.2.3"), Some(3));
        assert_eq!(find("::ffff:10.1.2.3"), Some(3));
        assert_eq!(find("2001:db8::1"), Some(2));
        assert_eq!(find("2001:db9::1"), Some(0));
        assert_eq!(find("junk"), None);
        let again = networks.add(&["10.0.0.0/8".parse().unwrap()], NodeId::new(9));
        assert_eq!(again, Err(NodeId::new(1)));
    }
}
