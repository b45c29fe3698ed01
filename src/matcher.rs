//! The compiled rules: one tree of descriptors per domain.
//!
//! [`Domain::find`] walks one level per entry of the request's descriptor. At each level the entry's key leads to the
//! alternatives written for that key; of these an exact value beats a wildcard, the first written wildcard that fits beats
//! the others, and a rule without a value comes last. There is no way back: once an alternative is taken, its siblings are
//! not tried. A descriptor matches only if its last entry ends on a node with a limit.
//!
//! Keys and values are compared as pairs of bytes. envoyproxy/ratelimit joins them with `_` first, so that its rule for
//! the key `a_b` also catches the key `a` with the value `b`; this one does not.

mod metric_key;
mod wildcard;

use std::fmt;

use hashbrown::HashMap;

use crate::decision::Metadata;
use crate::descriptor::Entry;
use crate::rate_limit::{Charge, RateLimit};

pub(crate) use metric_key::of_override as override_metric_key;
pub use metric_key::sanitize as sanitize_metric_key;
use wildcard::Wildcards;
pub(crate) use wildcard::is_wildcard;

/// All rules in force. Immutable: a reload makes a new one.
#[derive(Debug, Default)]
pub struct Matcher {
    domains: HashMap<Box<str>, Domain>,
}

impl Matcher {
    /// The rules of a domain, if there are any.
    pub fn domain(&self, name: &[u8]) -> Option<&Domain> {
        // The key is text, the question may be any bytes; bytes that are not text name no domain.
        self.domains.get(std::str::from_utf8(name).ok()?)
    }

    /// The domains, in no particular order.
    pub fn domains(&self) -> impl Iterator<Item = &Domain> {
        self.domains.values()
    }

    /// How many rules have a limit.
    pub fn limits(&self) -> usize {
        self.domains().flat_map(Domain::rules).count()
    }

    /// The domain of this name, new and empty if it is not there yet.
    pub(crate) fn domain_mut(&mut self, name: &str) -> &mut Domain {
        self.domains.entry_ref(name).or_insert_with(|| Domain::new(name))
    }
}

/// The rules of one domain.
#[derive(Debug)]
pub struct Domain {
    name: Box<str>,
    charge: Option<Charge>,
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

#[derive(Debug, Default)]
struct Node {
    rule: Option<Box<Rule>>,
    children: HashMap<Box<[u8]>, Alternatives>,
}

/// The nodes below one node for one key.
#[derive(Debug, Default)]
struct Alternatives {
    /// By exact value. Patterns are here as well: a value that is written like a pattern takes that pattern's node.
    values: HashMap<Box<[u8]>, NodeId>,
    wildcards: Wildcards,
    without_value: Option<NodeId>,
}

impl Alternatives {
    fn find(&self, value: &[u8]) -> Option<NodeId> {
        self.values
            .get(value)
            .copied()
            .or_else(|| self.wildcards.find(value))
            .or(self.without_value)
    }
}

impl Domain {
    fn new(name: &str) -> Self {
        Domain {
            name: name.into(),
            charge: None,
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

    /// The rule for a descriptor with these entries. `None` also where the tree holds a node without a limit: what ends
    /// there passes.
    pub fn find(&self, entries: &[Entry<'_>]) -> Option<&Rule> {
        let mut node = &self.nodes[NodeId::ROOT.index()];
        for entry in entries {
            let id = node.children.get(entry.key)?.find(entry.value)?;
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
        let alternatives = self.nodes[parent.index()]
            .children
            .entry_ref(level.key.as_bytes())
            .or_default();
        match &level.value {
            LevelValue::Any => match alternatives.without_value {
                Some(there) => return Err(there),
                None => alternatives.without_value = Some(node),
            },
            LevelValue::Exact(value) | LevelValue::Wildcard(value) => {
                if let Some(there) = alternatives.values.get(value.as_bytes()) {
                    return Err(*there);
                }
                alternatives.values.insert(value.as_bytes().into(), node);
                if let LevelValue::Wildcard(pattern) = &level.value {
                    alternatives.wildcards.push(pattern, node);
                }
            }
        }
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

/// A node with a limit.
#[derive(Debug, PartialEq)]
pub struct Rule {
    /// How much is allowed.
    pub limit: Limit,
    /// Echoed with the limit, and what `replaces` refers to; empty if it has none.
    pub name: Box<str>,
    /// Names of the rules that do not apply to a request to which this one does.
    pub replaces: Box<[Box<str>]>,
    /// Counted, but never refused.
    pub shadow_mode: bool,
    /// A soft limit: the request is refused only if all its soft limits are over.
    pub quota_mode: bool,
    /// Statistics are kept per value of the request.
    pub detailed_metric: bool,
    /// Returned for requests that pass.
    pub metadata: Option<Metadata>,
    /// The way from the root of the tree to this rule, one level per entry of a descriptor.
    pub levels: Box<[Level]>,
    /// Domain and levels, joined by dots: `shop.path_/x.verb_get`. Also the key of its statistics, unless that
    /// depends on the request.
    pub path: Box<str>,
}

impl Rule {
    pub(crate) fn path(domain: &str, levels: &[Level]) -> Box<str> {
        let mut path = String::from(domain);
        for level in levels {
            path.push('.');
            path.push_str(&level.to_string());
        }
        path.into()
    }
}

/// What a rule allows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Limit {
    /// Everything.
    Unlimited,
    /// So much per window.
    PerUnit(RateLimit),
}

/// One level of the way to a rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Level {
    /// The entry's key.
    pub key: Box<str>,
    /// Which values of the entry fit.
    pub value: LevelValue,
    /// All values that fit the wildcard share one counter.
    pub share_threshold: bool,
    /// The request's value becomes part of the key of the statistics.
    pub value_to_metric: bool,
}

impl Level {
    /// The pattern that stands for the request's value in the counter, if all its values share one.
    pub(crate) fn shared_pattern(&self) -> Option<&str> {
        match &self.value {
            LevelValue::Wildcard(pattern) if self.share_threshold => Some(pattern),
            _ => None,
        }
    }
}

/// `key`, or `key_value` with the value or pattern as written.
impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key)?;
        match &self.value {
            LevelValue::Any => Ok(()),
            LevelValue::Exact(value) | LevelValue::Wildcard(value) => write!(f, "_{value}"),
        }
    }
}

/// The values that a level fits.
#[derive(Debug, Clone, PartialEq)]
pub enum LevelValue {
    /// Every value that no sibling of the same key fits.
    Any,
    /// This value.
    Exact(Box<str>),
    /// Every value that this pattern with `*` fits.
    Wildcard(Box<str>),
}

impl LevelValue {
    /// What a `value` in a rule file means; an empty one means any.
    pub(crate) fn parse(value: &str) -> LevelValue {
        match value {
            "" => LevelValue::Any,
            value if is_wildcard(value) => LevelValue::Wildcard(value.into()),
            value => LevelValue::Exact(value.into()),
        }
    }
}
