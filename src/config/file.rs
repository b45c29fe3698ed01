//! Rule files: the YAML of envoyproxy/ratelimit and our additions, compiled into a [`Matcher`].
//!
//! All faults of all files are found at once; any error, and nothing is loaded. The checks are those of
//! envoyproxy/ratelimit; what it accepts without effect is a warning here.

use std::collections::{HashMap, HashSet};
use std::hash::Hasher as _;
use std::sync::Arc;

use serde_json::Value;
use siphasher::sip::SipHasher13;
use smallvec::smallvec;

use super::address;
use super::diagnostic::{Diagnostics, Place, nearest};
use super::fields::{At, DESCRIPTOR, Fields, ROOT, Reading};
use super::limit::{LimitReader, WrittenLimit};
use super::source::SourceFile;
use super::yaml::{Content, Document, Meaning, Node, NodeRef, Position};
use crate::algorithm::Kind;
use crate::matcher::{Domain, Matcher, NodeId};
use crate::rate_limit::{Algorithm, Charge, RateLimit, WindowStart};
use crate::rule::{Level, LevelValue, Limit, Metadata, Rule};

/// How many levels metadata may have. Clients decode 100 levels of a message, and one of metadata takes three.
const MOST_METADATA_LEVELS: usize = 30;

/// Up to which length, in bytes, keys are compared with each other's beginnings.
const LONGEST_COMPARED: usize = 1_000;

/// Compiled rules, and what was odd about their files.
#[derive(Debug)]
pub struct Loaded {
    /// The rules.
    pub matcher: Matcher,
    /// Only warnings.
    pub diagnostics: Diagnostics,
}

/// Compiles `files`, in this order. With `merge_domains` several files may add to one domain.
pub fn load(files: &[SourceFile], merge_domains: bool) -> Result<Loaded, Diagnostics> {
    let mut loader = Loader {
        merge_domains,
        ..Loader::default()
    };
    for file in files {
        loader.load(file);
    }
    let has_errors = loader.diagnostics.errors().next().is_some();
    if !has_errors {
        loader.warn_of_unknown_names();
        loader.warn_of_unused_addresses();
    }
    loader.diagnostics.sort();
    if has_errors {
        return Err(loader.diagnostics);
    }
    loader.matcher.set_version(version(files));
    Ok(Loaded {
        matcher: loader.matcher,
        diagnostics: loader.diagnostics,
    })
}

/// A fingerprint of what the files hold, whatever they are called.
fn version(files: &[SourceFile]) -> String {
    let mut hasher = SipHasher13::new();
    for file in files {
        hasher.write_usize(file.text.len());
        hasher.write(file.text.as_bytes());
    }
    format!("{:016x}", hasher.finish())
}

#[derive(Default)]
struct Loader {
    merge_domains: bool,
    matcher: Matcher,
    diagnostics: Diagnostics,
    /// Where each domain was first named.
    domains: HashMap<String, Origin>,
    /// Where each node of each domain was written.
    nodes: HashMap<String, HashMap<NodeId, Origin>>,
    /// What entries of `replaces` refer to, with the domain.
    replaced: Vec<(String, Box<str>, Origin)>,
    /// The keys that `client_address` names, with the domain.
    address_keys: Vec<(String, Box<str>, Origin)>,
}

/// A place in one of the files.
#[derive(Debug, Clone)]
struct Origin {
    file: Arc<str>,
    position: Position,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}:{}", self.file, self.position.line, self.position.column)
    }
}

// === impl Loader ===

impl Loader {
    /// Points out entries of `replaces` that replace nothing.
    fn warn_of_unknown_names(&mut self) {
        let names: HashMap<&str, HashSet<&str>> = self
            .matcher
            .domains()
            .map(|domain| (domain.name(), names_of_limits(domain)))
            .collect();
        for (domain, name, origin) in &self.replaced {
            let known = &names[domain.as_str()];
            if known.contains(&**name) {
                continue;
            }
            let place = Place {
                file: &origin.file,
                path: domain,
            };
            let advice = match nearest(name, known.iter().copied()) {
                Some(meant) => format!("did you mean {meant}?"),
                None => "give the limit that it is to replace this name".to_owned(),
            };
            let fault = format!("replaces '{name}', but no limit of the domain has that name");
            self.diagnostics.warning(&place, origin.position, fault, advice);
        }
    }

    /// Points out keys of `client_address` that no rule has.
    fn warn_of_unused_addresses(&mut self) {
        for (domain, key, origin) in &self.address_keys {
            let rules = self.matcher.domains().filter(|there| there.name() == domain);
            let known: HashSet<&str> = rules
                .flat_map(|domain| domain.rules())
                .flat_map(|rule| rule.levels.iter().map(|level| &*level.key))
                .collect();
            if known.contains(&**key) {
                continue;
            }
            let path = format!("{domain}.client_address");
            let place = Place {
                file: &origin.file,
                path: &path,
            };
            let advice = match nearest(key, known.iter().copied()) {
                Some(meant) => format!("did you mean {meant}?"),
                None => "write the key of a descriptor, or take it out".to_owned(),
            };
            let fault = format!("no rule has the key {key}");
            self.diagnostics.warning(&place, origin.position, fault, advice);
        }
    }

    fn load(&mut self, file: &SourceFile) {
        let name: Arc<str> = file.name.as_str().into();
        let place = Place {
            file: &name,
            path: "",
        };
        let document = match Document::parse(&file.text) {
            Ok(document) => document,
            Err(error) => {
                let advice = syntax_advice(&file.text, error.position);
                let fault = format!("not YAML: {}", error.message);
                self.diagnostics.error(&place, error.position, fault, advice);
                return;
            }
        };
        if let Some(position) = document.second_document {
            self.diagnostics.warning(
                &place,
                position,
                "a second document starts here; only the first is read",
                "put it into a file of its own",
            );
        }
        let Some(root) = document.root() else {
            let fault = "the file is empty, so it has no domain";
            self.diagnostics.error(
                &place,
                Position::START,
                fault,
                "write domain: NAME, or remove the file",
            );
            return;
        };
        FileLoader {
            file: &name,
            reading: Reading {
                document: &document,
                diagnostics: &mut self.diagnostics,
            },
            merge_domains: self.merge_domains,
            domains: &mut self.domains,
            nodes_of_domains: &mut self.nodes,
            domain: "?".to_owned(),
            nodes: HashMap::new(),
            replaced: &mut self.replaced,
            address_keys: &mut self.address_keys,
        }
        .load(&mut self.matcher, root);
    }
}

fn names_of_limits(domain: &Domain) -> HashSet<&str> {
    domain
        .rules()
        .flat_map(Rule::limits)
        .map(|limit| &*limit.name)
        .filter(|name| !name.is_empty())
        .collect()
}

/// Whether two limits of one key would count on the same counter.
fn counts_like(a: &RateLimit, b: &RateLimit) -> bool {
    let zone = |limit: &RateLimit| match &limit.algorithm {
        Algorithm::FixedWindow(WindowStart::Calendar(calendar)) => Some(calendar.zone.clone()),
        _ => None,
    };
    Kind::of(a) == Kind::of(b) && a.window.milliseconds() == b.window.milliseconds() && zone(a) == zone(b)
}

/// A word on the syntax errors that rule files usually have.
fn syntax_advice(source: &str, position: Position) -> String {
    let line = source.lines().nth(position.line - 1).unwrap_or_default();
    if line.trim_start_matches(' ').starts_with('\t') {
        return "indent with spaces, not with tabs".into();
    }
    let bare_star = line.contains(": *") || line.trim_start().starts_with("- *");
    if bare_star {
        return "a value that starts with * must be quoted: \"*\"".into();
    }
    "look at the indentation, the quotes and the brackets of this line and the one before".into()
}

/// Loads one file.
struct FileLoader<'l> {
    file: &'l Arc<str>,
    reading: Reading<'l>,
    merge_domains: bool,
    domains: &'l mut HashMap<String, Origin>,
    nodes_of_domains: &'l mut HashMap<String, HashMap<NodeId, Origin>>,
    /// The file's domain; a question mark if it has none.
    domain: String,
    /// Where each node of the domain was written.
    nodes: HashMap<NodeId, Origin>,
    replaced: &'l mut Vec<(String, Box<str>, Origin)>,
    address_keys: &'l mut Vec<(String, Box<str>, Origin)>,
}

/// Where in the tree of descriptors the loading is.
#[derive(Clone)]
struct Branch {
    node: NodeId,
    levels: Vec<Level>,
    path: String,
}

// === impl FileLoader ===

impl FileLoader<'_> {
    fn load(mut self, matcher: &mut Matcher, root: NodeRef) {
        let place = Place {
            file: self.file,
            path: "",
        };
        let Some(fields) = self.reading.mapping(&place, root, &ROOT) else {
            return;
        };
        // What a file without a usable domain holds is checked on its own.
        let mut apart = Matcher::default();
        let domain = match self.domain(&fields) {
            Some(name) => {
                self.domain = name;
                self.nodes = self.nodes_of_domains.remove(&self.domain).unwrap_or_default();
                matcher.domain_mut(&self.domain)
            }
            None => apart.domain_mut(&self.domain),
        };
        self.set_charge(domain, &fields);
        self.set_client_addresses(domain, &fields);
        let root = Branch {
            node: NodeId::ROOT,
            levels: Vec::new(),
            path: self.domain.clone(),
        };
        self.descriptors(domain, &fields, &root);
        self.nodes_of_domains.insert(self.domain, self.nodes);
    }

    /// The file's domain. `None` if there is an error.
    fn domain(&mut self, fields: &Fields) -> Option<String> {
        let place = Place {
            file: self.file,
            path: "",
        };
        let name = self.reading.text(&place, fields, "domain")?;
        if name.value.is_empty() {
            if fields.has("domain") || fields.lacks("domain") {
                let fault = "domain must not be empty";
                self.reading
                    .diagnostics
                    .error(&place, name.position, fault, "write domain: NAME");
            }
            return None;
        }
        match self.domains.get(&name.value) {
            Some(first) if !self.merge_domains => {
                self.reading.diagnostics.error(
                    &place,
                    name.position,
                    format!("duplicate domain '{}', already in {first}", name.value),
                    "put its descriptors into one file, or set MERGE_DOMAIN_CONFIG=true",
                );
                return None;
            }
            Some(_) => {}
            None => {
                let origin = Origin {
                    file: Arc::clone(self.file),
                    position: name.position,
                };
                self.domains.insert(name.value.clone(), origin);
            }
        }
        Some(name.value)
    }

    fn set_charge(&mut self, domain: &mut Domain, fields: &Fields) {
        let path = format!("{}.charge", self.domain);
        let place = Place {
            file: self.file,
            path: &path,
        };
        let Some(At { position, value }) = self.reading.text(&place, fields, "charge") else {
            return;
        };
        let charge = match value.as_str() {
            "" => return,
            "each" => Charge::Each,
            "all_or_nothing" => Charge::AllOrNothing,
            other => {
                let fault = format!("'{other}' is no way to charge");
                self.reading
                    .diagnostics
                    .error(&place, position, fault, "write each or all_or_nothing");
                return;
            }
        };
        if domain.charge().is_some_and(|there| there != charge) {
            let fault = "another file of this domain says otherwise";
            self.reading
                .diagnostics
                .error(&place, position, fault, "say it in one file only");
        }
        domain.set_charge(charge);
    }

    fn set_client_addresses(&mut self, domain: &mut Domain, fields: &Fields) {
        let path = format!("{}.client_address", self.domain);
        let place = Place {
            file: self.file,
            path: &path,
        };
        for node in self.reading.mappings(&place, fields, "client_address") {
            let Some((key, address)) = address::read(&mut self.reading, &place, node) else {
                continue;
            };
            let origin = Origin {
                file: Arc::clone(self.file),
                position: key.position,
            };
            self.address_keys
                .push((self.domain.clone(), key.value.as_str().into(), origin));
            if !domain.add_client_address(&key.value, address) {
                let fault = format!("the key {} is named twice", key.value);
                self.reading
                    .diagnostics
                    .error(&place, key.position, fault, "say it once for each key");
            }
        }
    }

    fn descriptors(&mut self, domain: &mut Domain, fields: &Fields, branch: &Branch) {
        let place = Place {
            file: self.file,
            path: &branch.path,
        };
        let nodes = self.reading.mappings(&place, fields, "descriptors");
        let mut keys = Vec::with_capacity(nodes.len());
        for node in nodes {
            keys.extend(self.descriptor(domain, node, branch));
        }
        self.warn_of_joined_keys(&place, &keys);
    }

    /// Loads one descriptor and all below it; returns its key.
    fn descriptor(&mut self, domain: &mut Domain, node: NodeRef, parent: &Branch) -> Option<At<String>> {
        let place = Place {
            file: self.file,
            path: &parent.path,
        };
        let fields = self.reading.mapping(&place, node, &DESCRIPTOR)?;
        let key = self.reading.text(&place, &fields, "key");
        let is_empty = key.as_ref().is_some_and(|key| key.value.is_empty());
        if is_empty && (fields.has("key") || fields.lacks("key")) {
            self.reading.diagnostics.error(
                &place,
                fields.position,
                "this descriptor has an empty key",
                "write key: NAME",
            );
        }
        let named = key.is_some() && self.reading.text(&place, &fields, "value").is_some();
        let value = self.level_value(&place, &fields);
        let mut level = Level::new(self.reading.shown_text(&fields, "key"), value);
        let path = format!("{}.{level}", parent.path);
        let place = Place {
            file: self.file,
            path: &path,
        };
        level.value_to_metric = self.bool(&place, &fields, "value_to_metric");
        level.share_threshold = self.share_threshold(&place, &fields, &level);

        let mut levels = parent.levels.clone();
        levels.push(level);
        let node = match levels.last() {
            Some(level) if named && !level.key.is_empty() => {
                self.add_node(domain, parent.node, level, &place, &fields)
            }
            _ => domain.add_detached(),
        };
        let branch = Branch { node, levels, path };
        if let Some(rule) = self.rule(&fields, &branch, domain.charge()) {
            domain.set_rule(node, rule);
        }
        self.descriptors(domain, &fields, &branch);
        key
    }

    /// The values that a descriptor fits, from `value` or `value_cidr`.
    fn level_value(&mut self, place: &Place<'_>, fields: &Fields) -> LevelValue {
        let value = LevelValue::parse(self.reading.shown_text(fields, "value"));
        if !fields.has("value_cidr") {
            return value;
        }
        let position = fields.position_of("value_cidr");
        if value != LevelValue::Any {
            let fault = "a descriptor cannot have value and value_cidr";
            self.reading
                .diagnostics
                .error(place, position, fault, "write two descriptors");
        }
        let networks = address::networks(&mut self.reading, place, fields, "value_cidr");
        if networks.as_ref().is_some_and(|networks| networks.is_empty()) {
            let fault = "value_cidr is empty";
            self.reading.diagnostics.error(
                place,
                position,
                fault,
                "write a network such as 10.0.0.0/8, or a list of them",
            );
        }
        networks.map_or(LevelValue::Any, |networks| LevelValue::Networks(networks.into()))
    }

    fn add_node(
        &mut self,
        domain: &mut Domain,
        parent: NodeId,
        level: &Level,
        place: &Place<'_>,
        fields: &Fields,
    ) -> NodeId {
        match domain.add(parent, level) {
            Ok(node) => {
                let origin = Origin {
                    file: Arc::clone(self.file),
                    position: fields.position,
                };
                self.nodes.insert(node, origin);
                node
            }
            Err(there) => {
                let first = &self.nodes[&there];
                self.reading.diagnostics.error(
                    place,
                    fields.position,
                    format!("duplicate descriptor: {level} is already at {first}"),
                    "keep one of them; several files cannot add below one descriptor",
                );
                domain.add_detached()
            }
        }
    }

    fn bool(&mut self, place: &Place<'_>, fields: &Fields, key: &str) -> bool {
        self.reading.bool(place, fields, key).unwrap_or_default()
    }

    fn share_threshold(&mut self, place: &Place<'_>, fields: &Fields, level: &Level) -> bool {
        let share_threshold = self.bool(place, fields, "share_threshold");
        let has_pattern = matches!(level.value, LevelValue::Wildcard(_) | LevelValue::Networks(_));
        if share_threshold && !has_pattern {
            self.reading.diagnostics.error(
                place,
                fields.position_of("share_threshold"),
                format!("share_threshold needs a value with '*', or a value_cidr, but this is {level}"),
                "put a * into value, or take share_threshold out",
            );
        }
        share_threshold && has_pattern
    }

    fn rule(&mut self, fields: &Fields, branch: &Branch, charge: Option<Charge>) -> Option<Rule> {
        let place = Place {
            file: self.file,
            path: &branch.path,
        };
        let shadow_mode = self.bool(&place, fields, "shadow_mode");
        let quota_mode = self.bool(&place, fields, "quota_mode");
        let detailed_metric = self.bool(&place, fields, "detailed_metric");
        let metadata = self.metadata(fields, branch);
        if !fields.has("rate_limits") && self.reading.value(fields, "rate_limit").is_none() {
            let given = [
                ("shadow_mode", shadow_mode),
                ("quota_mode", quota_mode),
                ("detailed_metric", detailed_metric),
                ("metadata", metadata.is_some()),
            ];
            for (key, _) in given.into_iter().filter(|(_, given)| *given) {
                self.reading.diagnostics.warning(
                    &place,
                    fields.position_of(key),
                    format!("{key} has no effect without a rate_limit beside it"),
                    "add rate_limit here, or take it out",
                );
            }
            return None;
        }
        let (limit, replaces) = self.limits(fields, branch, charge)?;
        Some(Rule {
            limit,
            replaces,
            shadow_mode,
            quota_mode,
            detailed_metric,
            metadata,
            levels: branch.levels.as_slice().into(),
            path: Rule::path(&self.domain, &branch.levels),
            totals: Arc::default(),
        })
    }

    /// The limits of a descriptor, from `rate_limit` or `rate_limits`, and the names of those that they replace.
    fn limits(
        &mut self,
        fields: &Fields,
        branch: &Branch,
        charge: Option<Charge>,
    ) -> Option<(Limit, Box<[Box<str>]>)> {
        if !fields.has("rate_limits") {
            let nodes = self.reading.joined_values(fields, "rate_limit");
            let written = self.written_limit(&nodes, &branch.path, charge)?;
            let limit = match written.limit {
                Some(limit) => Limit::All(smallvec![limit]),
                None => Limit::Unlimited,
            };
            return Some((limit, written.replaces.into()));
        }
        let path = format!("{}.rate_limits", branch.path);
        let place = Place {
            file: self.file,
            path: &path,
        };
        let position = fields.position_of("rate_limits");
        if fields.has("rate_limit") {
            let fault = "a descriptor cannot have rate_limit and rate_limits";
            self.reading
                .diagnostics
                .error(&place, position, fault, "put all limits into rate_limits");
        }
        let nodes = self.reading.mappings(&place, fields, "rate_limits");
        let is_list = self
            .reading
            .value(fields, "rate_limits")
            .is_none_or(|node| self.reading.is_list(node));
        if nodes.is_empty() && is_list {
            let fault = "rate_limits is empty";
            self.reading
                .diagnostics
                .error(&place, position, fault, "list limits in it, or take it out");
        }
        let mut limits: Vec<RateLimit> = Vec::new();
        let mut replaces = Vec::new();
        for node in nodes {
            let Some(written) = self.written_limit(&[node], &branch.path, charge) else {
                continue;
            };
            replaces.extend(written.replaces);
            let position = self.reading.document.node(node).position;
            let fault = match written.limit {
                None => "an unlimited limit means nothing beside others",
                Some(limit) if limits.iter().any(|there| counts_like(there, &limit)) => {
                    "two limits with the same algorithm and window would share a counter"
                }
                Some(limit) => {
                    limits.push(limit);
                    continue;
                }
            };
            self.reading
                .diagnostics
                .error(&place, position, fault, "take it out of the list");
        }
        (!limits.is_empty()).then(|| (Limit::All(limits.into()), replaces.into()))
    }

    fn written_limit(
        &mut self,
        nodes: &[NodeRef],
        path: &str,
        charge: Option<Charge>,
    ) -> Option<WrittenLimit> {
        let path = format!("{path}.rate_limit");
        let place = Place {
            file: self.file,
            path: &path,
        };
        let written = LimitReader {
            reading: &mut self.reading,
            place,
            charge,
        }
        .read(nodes)?;
        let position = self.reading.document.node(*nodes.last()?).position;
        for name in &written.replaces {
            let origin = Origin {
                file: Arc::clone(self.file),
                position,
            };
            self.replaced.push((self.domain.clone(), name.clone(), origin));
        }
        Some(written)
    }

    fn metadata(&mut self, fields: &Fields, branch: &Branch) -> Option<Metadata> {
        let path = format!("{}.metadata", branch.path);
        let place = Place {
            file: self.file,
            path: &path,
        };
        let mut metadata = Metadata::new();
        for node in self.reading.joined_values(fields, "metadata") {
            let Node { position, height, .. } = *self.reading.document.node(node);
            if !self.reading.is_mapping(node) {
                let fault = format!("metadata must be a mapping, not {}", self.reading.shown(node));
                self.reading
                    .diagnostics
                    .error(&place, position, fault, "write keys and values");
                return None;
            }
            if height > MOST_METADATA_LEVELS {
                let fault = format!("metadata has more than {MOST_METADATA_LEVELS} levels");
                let advice = "flatten it: clients would not decode it";
                self.reading.diagnostics.error(&place, position, fault, advice);
                return None;
            }
            metadata.extend(self.json_entries(&place, node));
        }
        (!metadata.is_empty() || self.reading.value(fields, "metadata").is_some()).then_some(metadata)
    }

    fn json(&mut self, place: &Place<'_>, node: NodeRef) -> Value {
        let document = self.reading.document;
        let position = document.node(node).position;
        match &document.node(node).content {
            Content::Scalar(scalar) => match scalar.meaning {
                Meaning::Null => Value::Null,
                Meaning::Bool(bool) => bool.into(),
                Meaning::Int(int) => int.into(),
                Meaning::Float(float) if !float.is_finite() => {
                    let fault = format!("{} cannot be sent as metadata", scalar.text);
                    self.reading.diagnostics.error(
                        place,
                        position,
                        fault,
                        format!("quote it: \"{}\"", scalar.text),
                    );
                    Value::Null
                }
                Meaning::Float(float) => float.into(),
                Meaning::Text | Meaning::Merge => scalar.text.clone().into(),
            },
            Content::Sequence(items) => items.iter().map(|item| self.json(place, *item)).collect(),
            Content::Mapping(_) => Value::Object(self.json_entries(place, node)),
        }
    }

    fn json_entries(&mut self, place: &Place<'_>, mapping: NodeRef) -> Metadata {
        let entries = self.reading.free_form(place, mapping);
        entries
            .into_iter()
            .map(|(key, value)| (key, self.json(place, value)))
            .collect()
    }

    /// Warns of keys whose rules envoyproxy/ratelimit, which joins key and value with `_`, applies to more than we do.
    fn warn_of_joined_keys(&mut self, place: &Place<'_>, keys: &[At<String>]) {
        let keys = keys.iter().filter(|key| key.value.len() <= LONGEST_COMPARED);
        let known: HashSet<&str> = keys.clone().map(|key| key.value.as_str()).collect();
        let mut warned = HashSet::new();
        for key in keys {
            if !warned.insert(key.value.as_str()) {
                continue;
            }
            if key.value.contains('*') {
                self.reading.diagnostics.warning(
                    place,
                    key.position,
                    format!("the * in the key {} is an ordinary character", key.value),
                    "patterns go into value (envoyproxy/ratelimit also reads them in a key)",
                );
            }
            let joined = key
                .value
                .match_indices('_')
                .map(|(i, _)| (&key.value[..i], &key.value[i + 1..]))
                .find(|(prefix, _)| known.contains(prefix));
            if let Some((prefix, rest)) = joined {
                self.reading.diagnostics.warning(
                    place,
                    key.position,
                    format!(
                        "the keys {prefix} and {} are told apart: neither catches what is meant for the other",
                        key.value
                    ),
                    format!(
                        "nothing to do, unless you rely on envoyproxy/ratelimit taking the key {prefix} with a value \
                         like {rest} for the key {}",
                        key.value
                    ),
                );
            }
        }
    }
}
