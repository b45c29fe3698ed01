//! YAML as rule files use it: a tree of nodes that keep their text and place.
//!
//! The parser speaks YAML 1.2 and leaves scalars alone; what an unquoted scalar means is decided here, as YAML 1.1 has it
//! in envoyproxy/ratelimit's library (yaml.v2), so that the same file means the same. Aliases are references, not
//! copies, and what they come to is bounded in size and depth, so a small file cannot grow into a large tree: who walks it
//! may recurse and need not count.

use std::borrow::Cow;
use std::collections::HashMap;

use saphyr_parser::{Event, Parser, ScalarStyle, Span, StrInput, Tag};

use super::go;

/// Where something stands in a file, both counted from 1, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Position {
    pub(crate) line: usize,
    pub(crate) column: usize,
}

impl Position {
    pub(crate) const START: Position = Position { line: 1, column: 1 };

    fn of(marker: saphyr_parser::Marker) -> Self {
        Position {
            line: marker.line().max(1),
            column: marker.col() + 1,
        }
    }
}

/// How many nodes the aliases of a file may add to those that are written in it: far more than real files have, and few
/// enough that a small hostile one cannot exhaust the memory.
const MOST_ADDED_NODES: usize = 2_000_000;

/// How many levels a file may have, aliases followed. A descriptor takes two.
const MOST_LEVELS: usize = 250;

/// The first document of a file.
#[derive(Debug)]
pub(crate) struct Document {
    nodes: Vec<Node>,
    root: Option<NodeRef>,
    /// Where a second document starts. Only the first is read.
    pub(crate) second_document: Option<Position>,
}

/// A node of a [`Document`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct NodeRef(usize);

/// A node, and what it comes to when all aliases in it are followed.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) position: Position,
    pub(crate) content: Content,
    /// How many nodes; saturates. Known once the node is closed.
    size: usize,
    /// How many levels, its own included. Known once the node is closed.
    pub(crate) height: usize,
}

#[derive(Debug)]
pub(crate) enum Content {
    Scalar(Scalar),
    Sequence(Vec<NodeRef>),
    /// Keys and values as written, merge keys and repeated keys included.
    Mapping(Vec<(NodeRef, NodeRef)>),
}

/// A scalar: its text, and what that text means.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Scalar {
    /// As written, quotes and escapes resolved.
    pub(crate) text: String,
    pub(crate) meaning: Meaning,
}

/// What YAML 1.1 makes of a scalar.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Meaning {
    Null,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text,
    /// The unquoted `<<`.
    Merge,
}

/// Why a file is not YAML.
#[derive(Debug)]
pub(crate) struct SyntaxError {
    pub(crate) position: Position,
    pub(crate) message: String,
}

impl Document {
    /// Reads the first document of `source`.
    pub(crate) fn parse(source: &str) -> Result<Document, SyntaxError> {
        let mut source = Cow::Borrowed(source.strip_prefix('\u{feff}').unwrap_or(source));
        loop {
            let error = match Reader::new(&source).read() {
                Ok(document) => return Ok(document),
                Err(error) => error,
            };
            let spaced = without_tab_after_colon(&source, error.position).ok_or(error)?;
            source = spaced.into();
        }
    }

    /// `None` for an empty file.
    pub(crate) fn root(&self) -> Option<NodeRef> {
        self.root
    }

    /// Size and height of a collection out of those of its children.
    fn measure(&self, node: NodeRef) -> (usize, usize) {
        let (mut size, mut height) = (1usize, 0);
        let mut add = |child: &NodeRef| {
            let child = self.node(*child);
            size = size.saturating_add(child.size);
            height = height.max(child.height);
        };
        match &self.node(node).content {
            Content::Scalar(_) => {}
            Content::Sequence(items) => items.iter().for_each(&mut add),
            Content::Mapping(pairs) => pairs.iter().for_each(|(key, value)| {
                add(key);
                add(value);
            }),
        }
        (size, height + 1)
    }

    pub(crate) fn node(&self, node: NodeRef) -> &Node {
        &self.nodes[node.0]
    }
}

/// The source with spaces for the tabs between a colon and `position`, if there are any. YAML allows them; the parser stops
/// there.
fn without_tab_after_colon(source: &str, position: Position) -> Option<String> {
    let line_start: usize = source
        .split_inclusive('\n')
        .take(position.line - 1)
        .map(str::len)
        .sum();
    let line = &source[line_start..];
    let column = line
        .char_indices()
        .nth(position.column - 1)
        .map_or(line.len(), |(i, _)| i);
    let before = &line[..column];
    let blanks = before.len() - before.trim_end_matches([' ', '\t']).len();
    let (value, blanks) = before.split_at(before.len() - blanks);
    if !value.ends_with(':') || !blanks.contains('\t') {
        return None;
    }
    let start = line_start + value.len();
    let mut spaced = source.to_owned();
    spaced.replace_range(start..start + blanks.len(), &" ".repeat(blanks.len()));
    Some(spaced)
}

// === impl Reader ===

/// Builds the tree from the parser's events.
struct Reader<'s> {
    parser: Parser<'s, StrInput<'s>>,
    document: Document,
    /// By the parser's number for the anchor.
    anchors: HashMap<usize, NodeRef>,
    /// The collections that are not closed yet, the innermost last.
    open: Vec<Open>,
}

struct Open {
    node: NodeRef,
    /// In a mapping: the key that waits for its value.
    key: Option<NodeRef>,
}

impl<'s> Reader<'s> {
    fn new(source: &'s str) -> Self {
        Reader {
            parser: Parser::new_from_str(source),
            document: Document {
                nodes: Vec::new(),
                root: None,
                second_document: None,
            },
            anchors: HashMap::new(),
            open: Vec::new(),
        }
    }

    fn read(mut self) -> Result<Document, SyntaxError> {
        let mut ended = false;
        while let Some(event) = self.parser.next_event() {
            let (event, span) = match event {
                Ok(event) => event,
                // What comes after the first document is not read, so it may be broken.
                Err(_) if ended => break,
                Err(error) => return Err(SyntaxError::of_parser(&error)),
            };
            match event {
                Event::DocumentEnd => ended = true,
                Event::DocumentStart(_) if ended => {
                    self.document.second_document = Some(Position::of(span.start));
                    break;
                }
                event => self.on(event, span)?,
            }
        }
        Ok(self.document)
    }

    fn on(&mut self, event: Event<'s>, span: Span) -> Result<(), SyntaxError> {
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                if tag
                    .as_ref()
                    .is_some_and(|tag| tag.is_yaml_core_schema() && tag.suffix == "binary")
                {
                    return Err(SyntaxError {
                        position: Position::of(span.start),
                        message: "!!binary is not read; write the text itself, with \\x escapes in double quotes if need be".into(),
                    });
                }
                let meaning = Meaning::of(&text, style, tag.as_deref());
                let scalar = Scalar {
                    text: text.into_owned(),
                    meaning,
                };
                self.add(Content::Scalar(scalar), anchor, span);
            }
            Event::SequenceStart(anchor, _) => self.open(Content::Sequence(Vec::new()), anchor, span),
            Event::MappingStart(anchor, _) => self.open(Content::Mapping(Vec::new()), anchor, span),
            Event::SequenceEnd | Event::MappingEnd => self.close()?,
            Event::Alias(anchor) => self.alias(anchor, span)?,
            _ => {}
        }
        Ok(())
    }

    fn open(&mut self, content: Content, anchor: usize, span: Span) {
        let node = self.add(content, anchor, span);
        self.open.push(Open { node, key: None });
    }

    /// Closes the innermost collection and measures it.
    fn close(&mut self) -> Result<(), SyntaxError> {
        let Some(Open { node, .. }) = self.open.pop() else {
            return Ok(());
        };
        let (size, height) = self.document.measure(node);
        let closed = &mut self.document.nodes[node.0];
        (closed.size, closed.height) = (size, height);
        let position = closed.position;
        let error = |message: &str| {
            Err(SyntaxError {
                position,
                message: message.into(),
            })
        };
        if height > MOST_LEVELS {
            return error("with all its aliases followed this is nested too deeply; flatten it");
        }
        if size > self.document.nodes.len() + MOST_ADDED_NODES {
            return error("with all its aliases followed this is too large; use fewer aliases of aliases");
        }
        Ok(())
    }

    fn alias(&mut self, anchor: usize, span: Span) -> Result<(), SyntaxError> {
        let error = |message: &str| SyntaxError {
            position: Position::of(span.start),
            message: message.into(),
        };
        let node = *self
            .anchors
            .get(&anchor)
            .ok_or_else(|| error("this alias names no anchor"))?;
        if self.open.iter().any(|open| open.node == node) {
            return Err(error(
                "this alias stands inside the block that it refers to; take it out",
            ));
        }
        self.attach(node);
        Ok(())
    }

    fn add(&mut self, content: Content, anchor: usize, span: Span) -> NodeRef {
        let node = NodeRef(self.document.nodes.len());
        self.document.nodes.push(Node {
            position: Position::of(span.start),
            content,
            size: 1,
            height: 1,
        });
        if anchor > 0 {
            self.anchors.insert(anchor, node);
        }
        self.attach(node);
        node
    }

    /// Puts a node where it stands: in the innermost open collection, or at the root.
    fn attach(&mut self, node: NodeRef) {
        let Some(open) = self.open.last_mut() else {
            self.document.root = Some(node);
            return;
        };
        match &mut self.document.nodes[open.node.0].content {
            Content::Sequence(items) => items.push(node),
            Content::Mapping(pairs) => match open.key.take() {
                Some(key) => pairs.push((key, node)),
                None => open.key = Some(node),
            },
            Content::Scalar(_) => unreachable!("only collections are opened"),
        }
    }
}

impl SyntaxError {
    fn of_parser(error: &saphyr_parser::ScanError) -> Self {
        SyntaxError {
            position: Position::of(*error.marker()),
            message: error.info().to_owned(),
        }
    }
}

// === impl Meaning ===

impl Meaning {
    fn of(text: &str, style: ScalarStyle, tag: Option<&Tag>) -> Self {
        match tag {
            Some(tag)
                if tag.is_yaml_core_schema()
                    && matches!(tag.suffix.as_str(), "int" | "bool" | "float" | "null") =>
            {
                Meaning::of_plain(text)
            }
            Some(_) => Meaning::Text,
            None if style == ScalarStyle::Plain => Meaning::of_plain(text),
            None => Meaning::Text,
        }
    }

    /// The rules of yaml.v2: those of YAML 1.1 without base 60, and dates stay text.
    fn of_plain(text: &str) -> Self {
        match text {
            "" | "~" | "null" | "Null" | "NULL" => Meaning::Null,
            "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
                Meaning::Bool(true)
            }
            "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
                Meaning::Bool(false)
            }
            ".nan" | ".NaN" | ".NAN" => Meaning::Float(f64::NAN),
            ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF" => Meaning::Float(f64::INFINITY),
            "-.inf" | "-.Inf" | "-.INF" => Meaning::Float(f64::NEG_INFINITY),
            "<<" => Meaning::Merge,
            _ => Meaning::of_number(text),
        }
    }

    fn of_number(text: &str) -> Self {
        let starts_like_a_number =
            text.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '+' | '-' | '.'));
        if !starts_like_a_number {
            return Meaning::Text;
        }
        let digits = if text.starts_with('.') {
            text.to_owned()
        } else {
            text.replace('_', "")
        };
        if let Some(int) = go::integer(&digits) {
            return i64::try_from(int).map_or(Meaning::Float(int as f64), Meaning::Int);
        }
        if is_float(&digits) {
            // What no float can hold is text, as with a hash that looks like 7e123456.
            let float = digits.parse().ok().filter(|float: &f64| float.is_finite());
            return float.map_or(Meaning::Text, Meaning::Float);
        }
        Meaning::Text
    }
}

/// `[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?`
fn is_float(text: &str) -> bool {
    let text = text.strip_prefix(['-', '+']).unwrap_or(text);
    let (mantissa, exponent) = text
        .split_once(['e', 'E'])
        .map_or((text, None), |(mantissa, exponent)| (mantissa, Some(exponent)));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, "0"));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    let exponent_fits = exponent.is_none_or(|exponent| {
        let exponent = exponent.strip_prefix(['-', '+']).unwrap_or(exponent);
        !exponent.is_empty() && digits(exponent)
    });
    digits(whole) && digits(fraction) && !(whole.is_empty() && fraction.is_empty()) && exponent_fits
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scalar(source: &str) -> Scalar {
        let document = Document::parse(source).expect("it is YAML");
        match &document.node(document.root().expect("it is not empty")).content {
            Content::Scalar(scalar) => scalar.clone(),
            other => panic!("{other:?} is no scalar"),
        }
    }

    #[test]
    fn unquoted_scalars_mean_what_yaml_1_1_says() {
        #[track_caller]
        fn test(source: &str, expected: Meaning) {
            assert_eq!(scalar(source).meaning, expected, "{source}");
        }
        for null in ["~", "null", "Null", "NULL"] {
            test(null, Meaning::Null);
        }
        for yes in ["y", "Y", "yes", "on", "On", "true", "TRUE"] {
            test(yes, Meaning::Bool(true));
        }
        for no in ["n", "N", "no", "off", "OFF", "False"] {
            test(no, Meaning::Bool(false));
        }
        for (source, int) in [
            ("123", 123),
            ("0x1F", 31),
            ("0b11", 3),
            ("0o17", 15),
            ("010", 8),
            ("1_000", 1000),
            ("+5", 5),
            ("-1", -1),
            ("0", 0),
            ("1__0", 10),
            ("-0x10", -16),
            ("9223372036854775807", i64::MAX),
        ] {
            test(source, Meaning::Int(int));
        }
        for (source, float) in [
            ("1.0", 1.0),
            ("1e3", 1000.0),
            ("1e+06", 1e6),
            (".5", 0.5),
            ("+.5", 0.5),
            ("0093", 93.0),
            ("08", 8.0),
            ("0099.5", 99.5),
            ("12e03", 12000.0),
            ("1_0.5", 10.5),
            ("1.", 1.0),
            (".inf", f64::INFINITY),
            ("18446744073709551615", 18446744073709551615.0),
        ] {
            test(source, Meaning::Float(float));
        }
        for text in [
            "a",
            "yEs",
            "1.0.0",
            "2024-01-01",
            "190:20:30",
            "0x",
            "1e",
            ".5e",
            "._5",
            "=",
            "0x1p4",
            "v1",
            "\"5\"",
            "'no'",
            "\"\"",
            "!!str 1.5",
            "!foo 1.5",
            "0b",
            "-",
            "+",
            ".",
            "0x-1",
            "--1",
            "1e999",
            "7e123456",
        ] {
            // A lone dash starts a sequence.
            if text != "-" {
                test(text, Meaning::Text);
            }
        }
        test("!!int \"5\"", Meaning::Int(5));
    }

    #[test]
    fn a_tab_may_separate_a_key_from_its_value() {
        #[track_caller]
        fn test(source: &str, expected: &str) {
            let document = Document::parse(source).expect("it is YAML");
            let Content::Mapping(pairs) = &document.node(document.root().unwrap()).content else {
                panic!("{source} is no mapping");
            };
            let texts: Vec<&str> = pairs
                .iter()
                .flat_map(|(key, value)| [key, value])
                .map(|node| match &document.node(*node).content {
                    Content::Scalar(scalar) => scalar.text.as_str(),
                    _ => "?",
                })
                .collect();
            assert_eq!(texts.join(" "), expected, "{source}");
        }
        test("domain:\td\nkey: \t k", "domain d key k");
        test("{a:\tb, c: \"x:\ty\"}", "a b c x:\ty");
        test("k: |\n  a:\tb\nc:\td", "k a:\tb\n c d");
    }

    #[test]
    fn the_text_stays_as_written() {
        assert_eq!(scalar("0x1F").text, "0x1F");
        assert_eq!(scalar("\u{feff}on").text, "on");
        assert_eq!(scalar("|\n  a\n  b\n").text, "a\nb\n");
    }

    #[test]
    fn an_alias_inside_its_own_anchor_is_refused() {
        let error = Document::parse("a: &a\n  b: *a\n").unwrap_err();
        assert_eq!(error.position, Position { line: 2, column: 6 });
    }

    #[test]
    fn a_second_document_is_noticed_and_not_read() {
        let document = Document::parse("a\n---\n{{{").unwrap();
        assert!(document.second_document.is_some());
        assert!(Document::parse("---\na\n").unwrap().second_document.is_none());
    }
}
