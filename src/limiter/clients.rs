//! The clients in a request: its chains of addresses, resolved.

use std::borrow::Cow;

use smallvec::SmallVec;

use crate::client_address::{AddressText, Client, text};
use crate::descriptor::{Entry, Request};
use crate::matcher::Domain;

/// The entries of a request whose values are chains of addresses. Empty in domains that have no such keys.
#[derive(Debug, Default)]
pub(super) struct Clients {
    /// In the order of the request.
    found: SmallVec<[Found; 1]>,
}

#[derive(Debug)]
struct Found {
    /// Place of the descriptor in the request.
    descriptor: usize,
    /// Place of the entry in the descriptor.
    entry: usize,
    /// The client's address as rules see it, and as counters do. `None` if the descriptor is refused.
    address: Option<[AddressText; 2]>,
}

impl Clients {
    /// Resolves all chains of `request`.
    pub(super) fn of(domain: Option<&Domain>, request: &Request<'_>) -> Self {
        let mut clients = Clients::default();
        let Some(domain) = domain.filter(|domain| domain.has_client_addresses()) else {
            return clients;
        };
        for (i, descriptor) in request.descriptors.iter().enumerate() {
            for (j, entry) in descriptor.entries.iter().enumerate() {
                let Some(rule) = domain.client_address(entry.key) else {
                    continue;
                };
                let address = match rule.resolve(entry.value) {
                    Client::Address(address) => Some([text(address), text(rule.mask(address))]),
                    Client::Literal(literal) => Some([literal.into(), literal.into()]),
                    Client::Unknown => Some(Default::default()),
                    Client::Refused => None,
                };
                clients.found.push(Found {
                    descriptor: i,
                    entry: j,
                    address,
                });
            }
        }
        clients
    }

    /// Whether a descriptor is refused for what stands in its chain.
    pub(super) fn is_refused(&self, descriptor: usize) -> bool {
        self.of_descriptor(descriptor)
            .any(|found| found.address.is_none())
    }

    /// A descriptor's entries with the clients' full addresses, which rules are about.
    pub(super) fn full<'q>(&'q self, descriptor: usize, entries: &'q [Entry<'q>]) -> Cow<'q, [Entry<'q>]> {
        self.replaced(descriptor, entries, 0)
    }

    /// A descriptor's entries with what tells clients apart, which is counted.
    pub(super) fn masked<'q>(&'q self, descriptor: usize, entries: &'q [Entry<'q>]) -> Cow<'q, [Entry<'q>]> {
        self.replaced(descriptor, entries, 1)
    }

    fn replaced<'q>(
        &'q self,
        descriptor: usize,
        entries: &'q [Entry<'q>],
        which: usize,
    ) -> Cow<'q, [Entry<'q>]> {
        let mut replaced = Cow::Borrowed(entries);
        for found in self.of_descriptor(descriptor) {
            if let Some(address) = &found.address {
                replaced.to_mut()[found.entry].value = &address[which];
            }
        }
        replaced
    }

    fn of_descriptor(&self, descriptor: usize) -> impl Iterator<Item = &Found> {
        let first = self.found.partition_point(|found| found.descriptor < descriptor);
        self.found[first..]
            .iter()
            .take_while(move |found| found.descriptor == descriptor)
    }
}
