//! One mapping of a rule file: which keys it may have, and their values by type.

use indexmap::IndexMap;
use indexmap::map::Entry;

use super::diagnostic::{Diagnostics, Place, nearest};
use super::yaml::{Content, Document, Meaning, NodeRef, Position, Scalar};

/// The keys of one kind of mapping.
#[derive(Debug)]
pub(super) struct Schema {
    /// What the mapping is, for messages.
    pub(super) what: &'static str,
    /// The keys that envoyproxy/ratelimit has here.
    pub(super) keys: &'static [&'static str],
    /// The keys that only we have here.
    pub(super) added_keys: &'static [&'static str],
}

impl Schema {
    fn legal_keys(&self) -> impl Iterator<Item = &'static str> {
        self.keys.iter().chain(self.added_keys).copied()
    }

    fn list(&self) -> String {
        self.legal_keys().collect::<Vec<_>>().join(", ")
    }
}

pub(super) const ROOT: Schema = Schema {
    what: "the file",
    keys: &["domain", "descriptors"],
    added_keys: &["charge", "client_address"],
};

pub(super) const DESCRIPTOR: Schema = Schema {
    what: "a descriptor",
    keys: &[
        "key",
        "value",
        "rate_limit",
        "descriptors",
        "shadow_mode",
        "quota_mode",
        "detailed_metric",
        "value_to_metric",
        "share_threshold",
        "metadata",
    ],
    added_keys: &["value_cidr", "rate_limits"],
};

pub(super) const RATE_LIMIT: Schema = Schema {
    what: "rate_limit",
    keys: &["unit", "requests_per_unit", "unlimited", "name", "replaces"],
    added_keys: &[
        "unit_multiplier",
        "algorithm",
        "window_start",
        "time_zone",
        "burst_size",
        "burst",
        "charge_refused",
        "on_exceeded",
        "ban",
    ],
};

pub(super) const BURST: Schema = Schema {
    what: "burst",
    keys: &["unit", "requests_per_unit"],
    added_keys: &[
        "unit_multiplier",
        "algorithm",
        "window_start",
        "time_zone",
        "burst_size",
        "charge_refused",
        "on_exceeded",
    ],
};

pub(super) const BAN: Schema = Schema {
    what: "ban",
    keys: &[],
    added_keys: &["after", "for"],
};

pub(super) const ON_EXCEEDED: Schema = Schema {
    what: "on_exceeded",
    keys: &[],
    added_keys: &["backoff"],
};

pub(super) const BACKOFF: Schema = Schema {
    what: "backoff",
    keys: &[],
    added_keys: &["factor", "max"],
};

pub(super) const CLIENT_ADDRESS: Schema = Schema {
    what: "client_address",
    keys: &["key"],
    added_keys: &["trusted", "ipv4_prefix", "ipv6_prefix", "malformed"],
};

pub(super) const TRUSTED: Schema = Schema {
    what: "trusted",
    keys: &[],
    added_keys: &["hops", "peer"],
};

pub(super) const REPLACES: Schema = Schema {
    what: "an entry of replaces",
    keys: &["name"],
    added_keys: &[],
};

/// In the order in which the home of a misplaced key is looked for.
const SCHEMAS: [&Schema; 10] = [
    &ROOT,
    &DESCRIPTOR,
    &RATE_LIMIT,
    &REPLACES,
    &BURST,
    &BAN,
    &ON_EXCEEDED,
    &BACKOFF,
    &CLIENT_ADDRESS,
    &TRUSTED,
];

/// The keys whose mappings are joined when they are written twice, as by envoyproxy/ratelimit's library: what a later one
/// does not say stays as the earlier one has it.
const JOINED: [&str; 2] = ["rate_limit", "metadata"];

/// What reading a file needs at hand.
pub(super) struct Reading<'r> {
    pub(super) document: &'r Document,
    pub(super) diagnostics: &'r mut Diagnostics,
}

/// The entries of one mapping: merge keys resolved, each key once, all of them legal.
pub(super) struct Fields {
    /// Where the mapping starts.
    pub(super) position: Position,
    fields: IndexMap<String, Field>,
    /// A key was refused.
    has_refused_keys: bool,
}

#[derive(Debug, Clone)]
struct Field {
    position: Position,
    value: NodeRef,
    /// What stood there before, if that still counts: see [`JOINED`].
    earlier: Vec<NodeRef>,
    /// It came with a merge key.
    merged: bool,
}

/// A value with the place it stands at.
pub(super) struct At<T> {
    pub(super) position: Position,
    pub(super) value: T,
}

// === impl Fields ===

impl Fields {
    fn get(&self, key: &str) -> Option<&Field> {
        self.fields.get(key)
    }

    /// Where `key` stands; where the mapping starts if it does not.
    pub(super) fn position_of(&self, key: &str) -> Position {
        self.get(key).map_or(self.position, |field| field.position)
    }

    /// Whether the key is written, be it without a value.
    pub(super) fn has(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// Whether the key is absent for certain. If another key was refused, that may be this one, misspelt.
    pub(super) fn lacks(&self, key: &str) -> bool {
        !self.has(key) && !self.has_refused_keys
    }
}

// === impl Reading ===

impl<'r> Reading<'r> {
    /// The mapping at `node`, its keys checked against `schema`. `None` if it is no mapping.
    pub(super) fn mapping(&mut self, place: &Place<'_>, node: NodeRef, schema: &Schema) -> Option<Fields> {
        self.joined_mapping(place, &[node], schema)
    }

    /// The mappings at `nodes` as one, a later one before the earlier, the keys checked against `schema`. `None` if one of
    /// them is no mapping, or there is none.
    pub(super) fn joined_mapping(
        &mut self,
        place: &Place<'_>,
        nodes: &[NodeRef],
        schema: &Schema,
    ) -> Option<Fields> {
        let mut fields = IndexMap::new();
        for node in nodes {
            let position = self.document.node(*node).position;
            if !self.is_mapping(*node) {
                let fault = format!("{} must be a mapping, not {}", schema.what, self.shown(*node));
                let advice = format!("write keys and values; its keys are {}", schema.list());
                self.diagnostics.error(place, position, fault, advice);
                return None;
            }
            fields.extend(self.flattened(place, *node));
        }
        let mut has_refused_keys = false;
        fields.retain(|key, field| match self.is_legal_here(place, key, field, schema) {
            Legality::Legal => true,
            Legality::WithoutEffect => false,
            Legality::Refused => {
                has_refused_keys = true;
                false
            }
        });
        Some(Fields {
            position: self.document.node(*nodes.last()?).position,
            fields,
            has_refused_keys,
        })
    }

    /// The entries of a mapping in the order written, with what its merge keys add put in their place.
    ///
    /// As in envoyproxy/ratelimit's library, what comes later wins, be it written or merged. YAML says that written keys
    /// always win; where that makes a difference there is a warning.
    fn flattened(&mut self, place: &Place<'_>, node: NodeRef) -> IndexMap<String, Field> {
        let document = self.document;
        let mut fields = IndexMap::new();
        let Content::Mapping(pairs) = &document.node(node).content else {
            let advice = "write a mapping or a list of mappings, usually as aliases";
            let position = document.node(node).position;
            self.diagnostics
                .error(place, position, "<< must be followed by a mapping", advice);
            return fields;
        };
        for (key, value) in pairs {
            match self.key(place, *key) {
                Some(Key::Merge) => {
                    for (key, mut field) in self.merged(place, *value) {
                        field.merged = true;
                        self.put(place, &mut fields, key, field);
                    }
                }
                Some(Key::Text(text)) => {
                    let field = Field {
                        position: document.node(*key).position,
                        value: *value,
                        earlier: Vec::new(),
                        merged: false,
                    };
                    self.put(place, &mut fields, text, field);
                }
                None => {}
            }
        }
        fields
    }

    /// What a merge key adds: of a list, the first mapping that has a key decides.
    fn merged(&mut self, place: &Place<'_>, value: NodeRef) -> Vec<(String, Field)> {
        match &self.document.node(value).content {
            Content::Sequence(items) => items
                .iter()
                .rev()
                .flat_map(|item| self.flattened(place, *item))
                .collect(),
            _ => self.flattened(place, value).into_iter().collect(),
        }
    }

    fn put(
        &mut self,
        place: &Place<'_>,
        fields: &mut IndexMap<String, Field>,
        key: String,
        mut field: Field,
    ) {
        let joins = JOINED.contains(&key.as_str());
        let mut entry = match fields.entry(key) {
            Entry::Vacant(entry) => {
                entry.insert(field);
                return;
            }
            Entry::Occupied(entry) => entry,
        };
        let (key, there) = (entry.key(), entry.get());
        if !there.merged {
            let line = there.position.line;
            let (fault, advice) = match (field.merged, joins) {
                (true, false) => (
                    format!("{key} comes before << and is overwritten by what << brings"),
                    "write << first if the value here is the one you want",
                ),
                (true, true) => (
                    format!("{key} comes before << and is overwritten where << brings the same keys"),
                    "write << first if the values here are the ones you want",
                ),
                (false, false) => (
                    format!("{key} is written twice, first at line {line}"),
                    "the last one counts; take out the other",
                ),
                (false, true) => (
                    format!("{key} is written twice, first at line {line}"),
                    "the last one counts, and of the first what the last does not say; write one",
                ),
            };
            let position = if field.merged {
                there.position
            } else {
                field.position
            };
            self.diagnostics.warning(place, position, fault, advice);
        }
        if joins && !self.is_null(field.value) {
            let mut earlier = there.earlier.clone();
            earlier.push(there.value);
            earlier.append(&mut field.earlier);
            field.earlier = earlier;
        }
        entry.insert(field);
    }

    fn key(&mut self, place: &Place<'_>, node: NodeRef) -> Option<Key> {
        let position = self.document.node(node).position;
        match &self.document.node(node).content {
            Content::Scalar(Scalar {
                meaning: Meaning::Merge,
                ..
            }) => Some(Key::Merge),
            Content::Scalar(Scalar {
                meaning: Meaning::Text,
                text,
            }) => Some(Key::Text(text.clone())),
            _ => {
                let fault = format!("{} is not a key: YAML does not read it as text", self.shown(node));
                let advice = "keys are words such as domain, descriptors, key, value, rate_limit";
                self.diagnostics.error(place, position, fault, advice);
                None
            }
        }
    }

    /// Whether the key has a meaning in a mapping of this kind; if not, says so.
    fn is_legal_here(&mut self, place: &Place<'_>, key: &str, field: &Field, schema: &Schema) -> Legality {
        if schema.legal_keys().any(|legal| legal == key) {
            return Legality::Legal;
        }
        let homes = |of: fn(&Schema) -> &'static [&'static str]| {
            SCHEMAS
                .iter()
                .find(|schema| of(schema).contains(&key))
                .map(|schema| schema.what)
        };
        if let Some(home) = homes(|schema| schema.keys) {
            let fault = format!("{key} has no effect in {}", schema.what);
            self.diagnostics
                .warning(place, field.position, fault, format!("it belongs in {home}"));
            if key != "metadata" {
                self.check_ignored(place, field.value);
            }
            return Legality::WithoutEffect;
        }
        if let Some(home) = homes(|schema| schema.added_keys) {
            let fault = format!("{key} cannot stand in {}", schema.what);
            self.diagnostics
                .error(place, field.position, fault, format!("it belongs in {home}"));
        } else {
            self.report_unknown(place, field.position, key, schema);
        }
        Legality::Refused
    }

    fn report_unknown(&mut self, place: &Place<'_>, position: Position, key: &str, schema: &Schema) {
        let everywhere = SCHEMAS.iter().flat_map(|schema| schema.legal_keys());
        let advice = match nearest(key, schema.legal_keys()).or_else(|| nearest(key, everywhere)) {
            Some(meant) => format!("did you mean {meant}?"),
            None => format!("the keys of {} are {}", schema.what, schema.list()),
        };
        self.diagnostics
            .error(place, position, format!("unknown key '{key}'"), advice);
    }

    /// Checks a value that has no effect as far as envoyproxy/ratelimit does, so that a file which it refuses is refused.
    fn check_ignored(&mut self, place: &Place<'_>, node: NodeRef) {
        let document = self.document;
        match &document.node(node).content {
            Content::Scalar(_) => {
                self.refuse_float(place, node);
            }
            Content::Sequence(items) => {
                for item in items {
                    match document.node(*item).content {
                        Content::Mapping(_) => self.check_ignored(place, *item),
                        _ => self.refuse_item(place, *item),
                    }
                }
            }
            Content::Mapping(_) => {
                for (key, field) in self.flattened(place, node) {
                    let known = SCHEMAS.iter().any(|schema| schema.keys.contains(&key.as_str()));
                    if !known {
                        self.report_unknown(place, field.position, &key, &DESCRIPTOR);
                    } else if key != "metadata" {
                        self.check_ignored(place, field.value);
                    }
                }
            }
        }
    }

    /// The text of `key`, as written; empty if the key is absent or has no value. `None` if there is an error.
    pub(super) fn text(&mut self, place: &Place<'_>, fields: &Fields, key: &str) -> Option<At<String>> {
        let Some(field) = fields.get(key) else {
            return Some(At {
                position: fields.position,
                value: String::new(),
            });
        };
        let position = self.document.node(field.value).position;
        match &self.document.node(field.value).content {
            Content::Scalar(Scalar {
                meaning: Meaning::Null,
                ..
            }) => Some(At {
                position: field.position,
                value: String::new(),
            }),
            Content::Scalar(scalar) => {
                let value = scalar.text.clone();
                (!self.refuse_float(place, field.value)).then_some(At { position, value })
            }
            _ => {
                let fault = format!("{key} must be text, not {}", self.shown(field.value));
                self.diagnostics
                    .error(place, position, fault, format!("write {key}: \"...\""));
                None
            }
        }
    }

    /// The text of `key` for messages, right or wrong.
    pub(super) fn shown_text(&self, fields: &Fields, key: &str) -> &'r str {
        let document = self.document;
        match fields.get(key).map(|field| &document.node(field.value).content) {
            Some(Content::Scalar(Scalar { meaning, text })) if *meaning != Meaning::Null => text,
            None | Some(Content::Scalar(_)) => "",
            Some(_) => "?",
        }
    }

    /// The truth of `key`; false if the key is absent or has no value. `None` if there is an error.
    pub(super) fn bool(&mut self, place: &Place<'_>, fields: &Fields, key: &str) -> Option<bool> {
        let Some(field) = fields.get(key) else {
            return Some(false);
        };
        match &self.document.node(field.value).content {
            Content::Scalar(Scalar {
                meaning: Meaning::Bool(value),
                ..
            }) => Some(*value),
            Content::Scalar(Scalar {
                meaning: Meaning::Null,
                ..
            }) => Some(false),
            _ => {
                let position = self.document.node(field.value).position;
                let fault = format!("{key} must be true or false, not {}", self.shown(field.value));
                self.diagnostics.error(
                    place,
                    position,
                    fault,
                    format!("write {key}: true or {key}: false, without quotes"),
                );
                None
            }
        }
    }

    /// The whole number of `key`, from `least` to 4294967295; inside, `None` if the key is absent or has no value. `None` if
    /// there is an error.
    pub(super) fn u32(
        &mut self,
        place: &Place<'_>,
        fields: &Fields,
        key: &str,
        least: u32,
    ) -> Option<Option<u32>> {
        let Some(field) = fields.get(key) else {
            return Some(None);
        };
        let node = self.document.node(field.value);
        let any = format!("write a whole number from {least} to {}", u32::MAX);
        let advice = match &node.content {
            Content::Scalar(scalar) => match scalar.meaning {
                Meaning::Null => return Some(None),
                Meaning::Int(int) => match u32::try_from(int) {
                    Ok(value) if value >= least => return Some(Some(value)),
                    _ => any,
                },
                Meaning::Float(float) => match whole(float) {
                    Some(whole) if whole >= least => format!("write {key}: {whole}"),
                    _ => any,
                },
                _ if scalar.text.parse::<u32>().is_ok() => {
                    format!("write {key}: {}, without quotes", scalar.text)
                }
                _ => any,
            },
            _ => any,
        };
        let fault = format!("{key} cannot be {}", self.shown(field.value));
        self.diagnostics.error(place, node.position, fault, advice);
        None
    }

    /// The number of `key`, fractions allowed; inside, `None` if the key is absent or has no value. `None` if there is an
    /// error.
    pub(super) fn float(&mut self, place: &Place<'_>, fields: &Fields, key: &str) -> Option<Option<f64>> {
        let Some(field) = fields.get(key) else {
            return Some(None);
        };
        let node = self.document.node(field.value);
        if let Content::Scalar(scalar) = &node.content {
            match scalar.meaning {
                Meaning::Null => return Some(None),
                Meaning::Int(int) => return Some(Some(int as f64)),
                Meaning::Float(float) => return Some(Some(float)),
                _ => {}
            }
        }
        let fault = format!("{key} must be a number, not {}", self.shown(field.value));
        self.diagnostics
            .error(place, node.position, fault, format!("write {key}: 2"));
        None
    }

    /// Whether the node is a mapping.
    pub(super) fn is_mapping(&self, node: NodeRef) -> bool {
        matches!(self.document.node(node).content, Content::Mapping(_))
    }

    /// Whether the node is a list.
    pub(super) fn is_list(&self, node: NodeRef) -> bool {
        matches!(self.document.node(node).content, Content::Sequence(_))
    }

    /// The texts of `key`: one, or a list of them. `None` if there is an error.
    pub(super) fn texts(&mut self, place: &Place<'_>, fields: &Fields, key: &str) -> Option<Vec<At<String>>> {
        let document = self.document;
        let Some(node) = self.value(fields, key) else {
            return Some(Vec::new());
        };
        let items = match &document.node(node).content {
            Content::Sequence(items) => items.clone(),
            _ => vec![node],
        };
        items
            .into_iter()
            .map(|item| {
                let node = document.node(item);
                match &node.content {
                    Content::Scalar(scalar) if scalar.meaning != Meaning::Null => Some(At {
                        position: node.position,
                        value: scalar.text.clone(),
                    }),
                    _ => {
                        let fault =
                            format!("{key} must be text or a list of texts, not {}", self.shown(item));
                        self.diagnostics.error(
                            place,
                            node.position,
                            fault,
                            "write texts, in quotes if need be",
                        );
                        None
                    }
                }
            })
            .collect()
    }

    /// The mappings in the list of `key`; none if the key is absent or has no value.
    pub(super) fn mappings(&mut self, place: &Place<'_>, fields: &Fields, key: &str) -> Vec<NodeRef> {
        let Some(field) = fields.get(key) else {
            return Vec::new();
        };
        let document = self.document;
        match &document.node(field.value).content {
            Content::Scalar(Scalar {
                meaning: Meaning::Null,
                ..
            }) => Vec::new(),
            Content::Sequence(items) => items
                .iter()
                .copied()
                .filter(|item| {
                    let fits = matches!(document.node(*item).content, Content::Mapping(_));
                    if !fits {
                        self.refuse_item(place, *item);
                    }
                    fits
                })
                .collect(),
            _ => {
                let position = document.node(field.value).position;
                let fault = format!("{key} must be a list, not {}", self.shown(field.value));
                self.diagnostics
                    .error(place, position, fault, "start each entry with a dash");
                Vec::new()
            }
        }
    }

    /// The value of `key`; `None` if the key is absent or has no value.
    pub(super) fn value(&self, fields: &Fields, key: &str) -> Option<NodeRef> {
        let value = fields.get(key)?.value;
        (!self.is_null(value)).then_some(value)
    }

    /// The values of a key whose mappings are joined, the one that counts most last. None if the key is absent or has no
    /// value.
    pub(super) fn joined_values(&self, fields: &Fields, key: &str) -> Vec<NodeRef> {
        let Some(value) = self.value(fields, key) else {
            return Vec::new();
        };
        let mut values = fields
            .get(key)
            .map(|field| field.earlier.clone())
            .unwrap_or_default();
        values.push(value);
        // What stands before one without a value is gone.
        match values.iter().rposition(|value| self.is_null(*value)) {
            Some(null) => values.split_off(null + 1),
            None => values,
        }
    }

    fn is_null(&self, node: NodeRef) -> bool {
        matches!(
            &self.document.node(node).content,
            Content::Scalar(Scalar {
                meaning: Meaning::Null,
                ..
            })
        )
    }

    /// The entries of a free-form mapping, keys as written.
    pub(super) fn free_form(&mut self, place: &Place<'_>, node: NodeRef) -> Vec<(String, NodeRef)> {
        let document = self.document;
        let Content::Mapping(pairs) = &document.node(node).content else {
            return Vec::new();
        };
        let mut entries = Vec::new();
        for (key, value) in pairs {
            match &document.node(*key).content {
                Content::Scalar(Scalar {
                    meaning: Meaning::Merge,
                    ..
                }) => {
                    let merged: Vec<NodeRef> = match &document.node(*value).content {
                        Content::Sequence(items) => items.iter().rev().copied().collect(),
                        _ => vec![*value],
                    };
                    for mapping in merged {
                        entries.extend(self.free_form(place, mapping));
                    }
                }
                Content::Scalar(scalar) => entries.push((scalar.text.clone(), *value)),
                _ => {
                    let fault = format!("{} cannot be a key", self.shown(*key));
                    self.diagnostics
                        .error(place, document.node(*key).position, fault, "write text");
                }
            }
        }
        entries
    }

    fn refuse_item(&mut self, place: &Place<'_>, node: NodeRef) {
        let fault = format!("a list may hold only mappings, not {}", self.shown(node));
        let position = self.document.node(node).position;
        self.diagnostics
            .error(place, position, fault, "write a dash and then keys with values");
    }

    /// Refuses what YAML reads as a fraction or as a number that is too large, since its text could not be trusted.
    fn refuse_float(&mut self, place: &Place<'_>, node: NodeRef) -> bool {
        let Content::Scalar(Scalar {
            meaning: Meaning::Float(_),
            text,
        }) = &self.document.node(node).content
        else {
            return false;
        };
        self.diagnostics.error(
            place,
            self.document.node(node).position,
            format!("{text} is a floating-point number to YAML"),
            format!("quote it: \"{text}\""),
        );
        true
    }

    /// A node as a message shows it.
    pub(super) fn shown(&self, node: NodeRef) -> String {
        match &self.document.node(node).content {
            Content::Scalar(Scalar {
                meaning: Meaning::Null,
                ..
            }) => "nothing".into(),
            Content::Scalar(Scalar {
                meaning: Meaning::Text,
                text,
            }) => format!("the text \"{text}\""),
            Content::Scalar(Scalar { text, .. }) => text.clone(),
            Content::Sequence(_) => "a list".into(),
            Content::Mapping(_) => "a mapping".into(),
        }
    }
}

/// Whether a key has a meaning where it stands.
enum Legality {
    Legal,
    /// It has one elsewhere; envoyproxy/ratelimit ignores it here.
    WithoutEffect,
    /// It was reported as an error.
    Refused,
}

enum Key {
    Merge,
    Text(String),
}

/// The whole number that a float is, if it fits.
fn whole(float: f64) -> Option<u32> {
    let whole = float as u32;
    (f64::from(whole) == float).then_some(whole)
}
