//! The compiled rules: one tree of descriptors per domain.
//!
//! [`Domain::find`] walks one level per entry of the request's descriptor. At each level the entry's key leads to the
//! alternatives written for that key; of these an exact value beats the longest network, a network beats a wildcard, the first
//! written wildcard that fits beats the others, and a rule without a value comes last. There is no way back: once an alternative is taken, its siblings are
//! not tried. A descriptor matches only if its last entry ends on a node with a limit.
//!
//! Keys and values are compared as pairs of bytes. envoyproxy/ratelimit joins them with `_` first, so that its rule for
//! the key `a_b` also catches the key `a` with the value `b`; this one does not.

mod networks;
mod wildcard;

use hashbrown::HashMap;
use smallvec::SmallVec;

use self::networks::Networks;
use self::wildcard::Wildcards;
use crate::client_address::ClientAddress;
use crate::descriptor::Entry;
use crate::rate_limit::Charge;
use crate::rule::{Level, LevelValue, Rule};

/// All rules in force. Immutable: a reload makes a new one.
#[derive(Debug, Default)]
pub struct Matcher {
    /// By name as bytes, as requests have it.
    domains: HashMap<Box<[u8]>, Domain>,
    version: Box<str>,
}

impl Matcher {
    /// What tells these rules from others: the same for the same files.
    pub fn version(&self) -> &str {
        &self.version
    }

    pub(crate) fn set_version(&mut self, version: String) {
        self.version = version.into();
    }

    /// The rules of a domain, if there are any.
    pub fn domain(&self, name: &[u8]) -> Option<&Domain> {
        self.domains.get(name)
    }

    /// The domains, in no particular order.
    pub fn domains(&self) -> impl Iterator<Item = &Domain> {
        self.domains.values()
    }

    /// How many rules there are.
    pub fn rules(&self) -> usize {
        self.domains().flat_map(Domain::rules).count()
    }

    /// Every rule with its domain's name, to be completed before it is in force.
    pub(crate) fn rules_mut(&mut self) -> impl Iterator<Item = (&str, &mut Rule)> {
        self.domains.values_mut().flat_map(|domain| {
            let rules = domain
                .nodes
                .iter_mut()
                .filter_map(|node| node.rule.as_deref_mut());
            rules.map(|rule| (&*domain.name, rule))
        })
    }

    /// The domain of this name, new and empty if it is not there yet.
    pub(crate) fn domain_mut(&mut self, name: &str) -> &mut Domain {
        self.domains
            .entry_ref(name.as_bytes())
            .or_insert_with(|| Domain::new(name))
    }
}

/// The rules of one domain.
#[derive(Debug)]
pub struct Domain {
    name: Box<str>,
    charge: Option<Charge>,
    /// By the key of the entries that hold an address.
    client_addresses: HashMap<Box<[u8]>, ClientAddress>,
    /// The keys of all levels.
    keys: HashMap<Box<[u8]>, KeyId>,
    /// The tree; the root comes first, a parent before its children.
    nodes: Vec<Node>,
}

/// A place in a domain's tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NodeId(u32);

impl NodeId {
    /// Above all levels; holds no rule.
    pub(crate) const ROOT: NodeId = NodeId(0);

    fn new(index: usize) -> NodeId {
        NodeId(u32::try_from(index).expect("a tree has fewer than 2^32 nodes"))
    }

    fn index(self) -> usize {
        self.0 as usize
    }
}

/// A key of a level. A request finds those of its entries once, wherever in the tree it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct KeyId(u32);

#[derive(Debug, Default)]
struct Node {
    rule: Option<Box<Rule>>,
    children: Children,
}

/// What is below a node. Of thousands of rules most are met seldom, and what a decision costs is then what it has to fetch
/// from memory: where rules differ by one value, all that is below that value is here at once.
#[derive(Debug, Default)]
enum Children {
    #[default]
    None,
    /// One node, for any value of this key.
    AnyValue(KeyId, NodeId),
    Many(Box<HashMap<KeyId, Alternatives>>),
}

impl Children {
    fn find(&self, key: KeyId, value: &[u8]) -> Option<NodeId> {
        match self {
            Children::None => None,
            Children::AnyValue(there, node) => (*there == key).then_some(*node),
            Children::Many(alternatives) => alternatives.get(&key)?.find(value),
        }
    }

    /// Adds a node, or says which one is there already for the same key and value.
    fn add(&mut self, key: KeyId, value: &LevelValue, node: NodeId) -> Result<(), NodeId> {
        match (&mut *self, value) {
            (Children::None, LevelValue::Any) => {
                *self = Children::AnyValue(key, node);
                Ok(())
            }
            (Children::Many(alternatives), _) => alternatives.entry(key).or_default().add(value, node),
            (Children::None | Children::AnyValue(..), _) => {
                let mut alternatives = HashMap::<_, Alternatives>::new();
                if let Children::AnyValue(there, child) = *self {
                    alternatives.entry(there).or_default().without_value = Some(child);
                }
                let added = alternatives.entry(key).or_default().add(value, node);
                *self = Children::Many(Box::new(alternatives));
                added
            }
        }
    }
}

/// The nodes below one node for one key.
#[derive(Debug, Default)]
struct Alternatives {
    /// By exact value. Patterns are here as well: a value that is written like a pattern takes that pattern's node.
    values: HashMap<SmallVec<[u8; 24]>, NodeId>,
    networks: Networks,
    wildcards: Wildcards,
    without_value: Option<NodeId>,
}

impl Alternatives {
    fn find(&self, value: &[u8]) -> Option<NodeId> {
        self.values
            .get(value)
            .copied()
            .or_else(|| self.networks.find(value))
            .or_else(|| self.wildcards.find(value))
            .or(self.without_value)
    }

    /// Adds a node, or says which one is there already for the same value.
    fn add(&mut self, value: &LevelValue, node: NodeId) -> Result<(), NodeId> {
        match value {
            LevelValue::Any => match self.without_value {
                Some(there) => return Err(there),
                None => self.without_value = Some(node),
            },
            LevelValue::Exact(text) | LevelValue::Wildcard(text) => {
                if let Some(there) = self.values.get(text.as_bytes()) {
                    return Err(*there);
                }
                self.values.insert(text.as_bytes().into(), node);
                if let LevelValue::Wildcard(pattern) = value {
                    self.wildcards.push(pattern, node);
                }
            }
            LevelValue::Networks(networks) => self.networks.add(networks, node)?,
        }
        Ok(())
    }
}

impl Domain {
    fn new(name: &str) -> Self {
        Domain {
            name: name.into(),
            charge: None,
            client_addresses: HashMap::new(),
            keys: HashMap::new(),
            nodes: vec![Node::default()],
        }
    }

    /// As in the rule file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Which counters a refused call charges, if the rules say so.
    pub fn charge(&self) -> Option<Charge> {
        self.charge
    }

    pub(crate) fn set_charge(&mut self, charge: Charge) {
        self.charge = Some(charge);
    }

    /// Adds how the values of `key` are resolved. False if that was said before.
    pub(crate) fn add_client_address(&mut self, key: &str, address: ClientAddress) -> bool {
        self.client_addresses
            .insert(key.as_bytes().into(), address)
            .is_none()
    }

    /// The keys of entries that may hold an address.
    pub(crate) fn client_address_keys(&self) -> impl Iterator<Item = &[u8]> {
        self.client_addresses.keys().map(|key| &**key)
    }

    /// Whether any entry may hold an address that is to be resolved.
    pub fn has_client_addresses(&self) -> bool {
        !self.client_addresses.is_empty()
    }

    /// How the values of `key` are resolved, if they hold addresses.
    pub fn client_address(&self, key: &[u8]) -> Option<&ClientAddress> {
        self.client_addresses.get(key)
    }

    /// The rule for a descriptor with these entries. `None` also where the tree holds a node without a limit: what ends
    /// there passes.
    pub fn find(&self, entries: &[Entry<'_>]) -> Option<&Rule> {
        let mut node = &self.nodes[NodeId::ROOT.index()];
        for entry in entries {
            let key = self.keys.get(entry.key)?;
            let id = node.children.find(*key, entry.value)?;
            node = &self.nodes[id.index()];
        }
        node.rule.as_deref()
    }

    /// Every rule, parents before their children and otherwise as written.
    pub fn rules(&self) -> impl Iterator<Item = &Rule> {
        self.nodes.iter().filter_map(|node| node.rule.as_deref())
    }

    /// Adds a node below `parent`, or says which one is there already for the same key and value.
    pub(crate) fn add(&mut self, parent: NodeId, level: &Level) -> Result<NodeId, NodeId> {
        let node = NodeId::new(self.nodes.len());
        let next = KeyId(u32::try_from(self.keys.len()).expect("there are fewer than 2^32 keys"));
        let key = *self.keys.entry_ref(level.key.as_bytes()).or_insert(next);
        self.nodes[parent.index()].children.add(key, &level.value, node)?;
        self.nodes.push(Node::default());
        Ok(node)
    }

    /// Adds a node that no request reaches: a place for what stands below a descriptor that could not be added.
    pub(crate) fn add_detached(&mut self) -> NodeId {
        let node = NodeId::new(self.nodes.len());
        self.nodes.push(Node::default());
        node
    }

    pub(crate) fn set_rule(&mut self, node: NodeId, rule: Rule) {
        self.nodes[node.index()].rule = Some(Box::new(rule));
    }
}
