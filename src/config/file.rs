//! Rule files: the YAML of envoyproxy/ratelimit and our additions, compiled into a [`Matcher`].
//!
//! All faults of all files are found at once; any error, and nothing is loaded. The checks are those of
//! envoyproxy/ratelimit; what it accepts without effect is a warning here.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use serde_json::Value;

use super::diagnostic::{Diagnostics, Place, nearest};
use super::fields::{At, DESCRIPTOR, Fields, RATE_LIMIT, REPLACES, ROOT, Reading};
use super::source::SourceFile;
use super::yaml::{Content, Document, Meaning, NodeRef, Position};
use crate::decision::Metadata;
use crate::matcher::{Domain, Level, LevelValue, Limit, Matcher, NodeId, Rule};
use crate::rate_limit::{Charge, RateLimit, Unit};

/// How deep descriptors may be nested. Far beyond any real file; keeps a hostile one from exhausting the stack.
const MOST_LEVELS: usize = 100;

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
    loader.diagnostics.sort();
    if loader.diagnostics.errors().next().is_some() {
        return Err(loader.diagnostics);
    }
    Ok(Loaded {
        matcher: loader.matcher,
        diagnostics: loader.diagnostics,
    })
}

#[derive(Default)]
struct Loader {
    merge_domains: bool,
    matcher: Matcher,
    diagnostics: Diagnostics,
    /// Where each domain was first named.
    domains: HashMap<String, Origin>,
    /// Where each node was written.
    nodes: HashMap<(String, NodeId), Origin>,
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
            reading: Reading::new(&document, &mut self.diagnostics),
            merge_domains: self.merge_domains,
            domains: &mut self.domains,
            nodes: &mut self.nodes,
            domain: String::new(),
        }
        .load(&mut self.matcher, root);
    }
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
    String::new()
}

/// Loads one file.
struct FileLoader<'l> {
    file: &'l Arc<str>,
    reading: Reading<'l>,
    merge_domains: bool,
    domains: &'l mut HashMap<String, Origin>,
    nodes: &'l mut HashMap<(String, NodeId), Origin>,
    /// The file's domain.
    domain: String,
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
    fn load(&mut self, matcher: &mut Matcher, root: NodeRef) {
        let place = Place {
            file: self.file,
            path: "",
        };
        let Some(fields) = self.reading.mapping(&place, root, &ROOT) else {
            return;
        };
        let name = self.reading.text(&place, &fields, "domain");
        if let Some(name) = &name
            && (fields.has("domain") || fields.lacks("domain"))
        {
            self.check_domain(name);
        }
        self.domain = match name {
            Some(name) if !name.value.is_empty() => name.value,
            _ => "?".to_owned(),
        };

        let domain = matcher.domain_mut(&self.domain);
        self.set_charge(domain, &fields);
        let root = Branch {
            node: NodeId::ROOT,
            levels: Vec::new(),
            path: self.domain.clone(),
        };
        self.descriptors(domain, &fields, &root);
    }

    fn check_domain(&mut self, name: &At<String>) {
        let place = Place {
            file: self.file,
            path: "",
        };
        if name.value.is_empty() {
            self.reading.diagnostics.error(
                &place,
                name.position,
                "domain must not be empty",
                "write domain: NAME",
            );
            return;
        }
        let origin = Origin {
            file: Arc::clone(self.file),
            position: name.position,
        };
        if let Some(first) = self.domains.get(&name.value)
            && !self.merge_domains
        {
            self.reading.diagnostics.error(
                &place,
                name.position,
                format!("duplicate domain '{}', already in {first}", name.value),
                "put its descriptors into one file, or set MERGE_DOMAIN_CONFIG=true",
            );
        }
        self.domains.entry(name.value.clone()).or_insert(origin);
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

    fn descriptors(&mut self, domain: &mut Domain, fields: &Fields, branch: &Branch) {
        let place = Place {
            file: self.file,
            path: &branch.path,
        };
        let nodes = self.reading.mappings(&place, fields, "descriptors");
        if branch.levels.len() >= MOST_LEVELS && !nodes.is_empty() {
            let fault = format!("descriptors are nested more than {MOST_LEVELS} levels deep");
            let position = fields.position_of("descriptors");
            self.reading.diagnostics.error(
                &place,
                position,
                fault,
                "a request needs one entry per level; flatten the tree",
            );
            return;
        }
        let mut keys = Vec::with_capacity(nodes.len());
        for node in nodes {
            if self.reading.is_exhausted() {
                return;
            }
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
        let value = self.reading.text(&place, &fields, "value");
        let named = key.is_some() && value.is_some();
        let mut level = Level {
            key: self.reading.shown_text(&fields, "key").into(),
            value: LevelValue::parse(self.reading.shown_text(&fields, "value")),
            share_threshold: false,
            value_to_metric: false,
        };
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
        if let Some(rule) = self.rule(&fields, &branch) {
            domain.set_rule(node, rule);
        }
        self.descriptors(domain, &fields, &branch);
        key
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
                self.nodes.insert((self.domain.clone(), node), origin);
                node
            }
            Err(there) => {
                let first = &self.nodes[&(self.domain.clone(), there)];
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
        let has_pattern = matches!(level.value, LevelValue::Wildcard(_));
        if share_threshold && !has_pattern {
            self.reading.diagnostics.error(
                place,
                fields.position_of("share_threshold"),
                format!("share_threshold needs a value with '*', but this is {level}"),
                "put a * into value, or take share_threshold out",
            );
        }
        share_threshold && has_pattern
    }

    fn rule(&mut self, fields: &Fields, branch: &Branch) -> Option<Rule> {
        let place = Place {
            file: self.file,
            path: &branch.path,
        };
        let shadow_mode = self.bool(&place, fields, "shadow_mode");
        let quota_mode = self.bool(&place, fields, "quota_mode");
        let detailed_metric = self.bool(&place, fields, "detailed_metric");
        let metadata = self.metadata(fields, branch);
        let Some(node) = self.reading.value(fields, "rate_limit") else {
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
        };
        let path = format!("{}.rate_limit", branch.path);
        let place = Place {
            file: self.file,
            path: &path,
        };
        let limits = self.reading.mapping(&place, node, &RATE_LIMIT)?;
        let name = self.reading.text(&place, &limits, "name");
        let replaces = self.replaces(&place, &limits, name.as_ref().map(|name| name.value.as_str()));
        let limit = self.limit(&place, &limits)?;
        Some(Rule {
            limit,
            name: name?.value.into(),
            replaces,
            shadow_mode,
            quota_mode,
            detailed_metric,
            metadata,
            levels: branch.levels.clone().into(),
            path: Rule::path(&self.domain, &branch.levels),
        })
    }

    fn limit(&mut self, place: &Place<'_>, fields: &Fields) -> Option<Limit> {
        let unlimited = self.reading.bool(place, fields, "unlimited");
        let unit = self.reading.text(place, fields, "unit");
        let requests_per_unit = self.reading.u32(place, fields, "requests_per_unit", 0);
        let unit_multiplier = self.reading.u32(place, fields, "unit_multiplier", 1);
        let (unlimited, unit) = (unlimited?, unit?);
        if unlimited {
            self.check_unlimited(place, fields, &unit);
            return Some(Limit::Unlimited);
        }
        let Some(known) = Unit::from_name(&unit.value) else {
            if fields.has("unit") || fields.lacks("unit") {
                self.report_unit(place, fields, &unit);
            }
            return None;
        };
        if fields.lacks("requests_per_unit") {
            let fault = "without requests_per_unit nothing passes";
            self.reading.diagnostics.warning(
                place,
                fields.position,
                fault,
                "add it; write requests_per_unit: 0 if that is what you want",
            );
        }
        Some(Limit::PerUnit(RateLimit {
            requests_per_unit: requests_per_unit.unwrap_or(0),
            unit: known,
            unit_multiplier: unit_multiplier
                .and_then(NonZeroU32::new)
                .unwrap_or(NonZeroU32::MIN),
        }))
    }

    fn check_unlimited(&mut self, place: &Place<'_>, fields: &Fields, unit: &At<String>) {
        if Unit::from_name(&unit.value).is_some() {
            self.reading.diagnostics.error(
                place,
                unit.position,
                "a limit cannot be unlimited and have a unit",
                "take out unit, or unlimited",
            );
        }
        if fields.has("unit_multiplier") {
            self.reading.diagnostics.error(
                place,
                fields.position_of("unit_multiplier"),
                "a limit cannot be unlimited and have a unit_multiplier",
                "take out unit_multiplier, or unlimited",
            );
        }
    }

    fn report_unit(&mut self, place: &Place<'_>, fields: &Fields, unit: &At<String>) {
        const UNITS: &str = "second, minute, hour, day, week, month or year";
        let legal = Unit::ALL.map(|unit| unit.name().to_lowercase());
        let trimmed = unit.value.trim();
        let (fault, advice) = if unit.value.is_empty() {
            let fault = if fields.has("unit") {
                "unit is empty"
            } else {
                "there is no unit"
            };
            (fault.to_owned(), format!("write unit: and one of {UNITS}"))
        } else {
            let advice = match nearest(trimmed, legal.iter().map(String::as_str)) {
                Some(meant) => format!("did you mean {meant}?"),
                None => format!("write {UNITS}"),
            };
            (format!("unit \"{}\" is not known", unit.value), advice)
        };
        self.reading
            .diagnostics
            .error(place, unit.position, fault, advice);
    }

    fn replaces(&mut self, place: &Place<'_>, fields: &Fields, own_name: Option<&str>) -> Box<[Box<str>]> {
        let mut names = Vec::new();
        for node in self.reading.mappings(place, fields, "replaces") {
            let Some(entry) = self.reading.mapping(place, node, &REPLACES) else {
                continue;
            };
            let Some(name) = self.reading.text(place, &entry, "name") else {
                continue;
            };
            if name.value.is_empty() {
                self.reading.diagnostics.error(
                    place,
                    entry.position,
                    "an entry of replaces has no name",
                    "write replaces: [{name: NAME}] with the name of the rule to drop",
                );
            } else if own_name == Some(name.value.as_str()) {
                self.reading.diagnostics.error(
                    place,
                    name.position,
                    format!("the rule replaces itself: '{}' is its own name", name.value),
                    "name another rule, or take replaces out",
                );
            }
            names.push(name.value.into());
        }
        names.into()
    }

    fn metadata(&mut self, fields: &Fields, branch: &Branch) -> Option<Metadata> {
        let path = format!("{}.metadata", branch.path);
        let place = Place {
            file: self.file,
            path: &path,
        };
        let node = self.reading.value(fields, "metadata")?;
        match self.json(&place, node, 0) {
            Value::Object(metadata) => Some(metadata),
            _ => {
                let position = self.reading.document.node(node).position;
                let fault = format!("metadata must be a mapping, not {}", self.reading.shown(node));
                self.reading
                    .diagnostics
                    .error(&place, position, fault, "write keys and values");
                None
            }
        }
    }

    fn json(&mut self, place: &Place<'_>, node: NodeRef, depth: usize) -> Value {
        let document = self.reading.document;
        let position = document.node(node).position;
        if depth > MOST_LEVELS {
            let fault = format!("metadata is nested more than {MOST_LEVELS} levels deep");
            self.reading
                .diagnostics
                .error(place, position, fault, "flatten it");
            return Value::Null;
        }
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
            Content::Sequence(items) => items
                .iter()
                .map(|item| self.json(place, *item, depth + 1))
                .collect(),
            Content::Mapping(_) => {
                let entries = self.reading.free_form(place, node);
                let json = entries
                    .into_iter()
                    .map(|(key, value)| (key, self.json(place, value, depth + 1)))
                    .collect();
                Value::Object(json)
            }
        }
    }

    /// Warns of keys whose rules envoyproxy/ratelimit, which joins key and value with `_`, applies to more than we do.
    fn warn_of_joined_keys(&mut self, place: &Place<'_>, keys: &[At<String>]) {
        let known: HashSet<&str> = keys.iter().map(|key| key.value.as_str()).collect();
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
