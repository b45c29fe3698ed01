//! Who is told of every hit: events, and who is refused most. With nobody there is no call at all.

use std::fmt::Debug;

use crate::algorithm::Outcome;
use crate::clock::Timestamp;
use crate::descriptor::Entry;
use crate::rule::Rule;
use crate::store::Hit;

/// Is told what became of the hits that a call charged. Called by the thread that decides, after the counting, without any lock.
pub trait Observer: Debug + Send + Sync {
    /// One descriptor's hits on one limit. Looks and refunds are not told.
    fn observe(&self, observation: &Observation<'_>);
}

/// What became of one descriptor's hits on one limit.
#[derive(Debug, Clone, Copy)]
pub struct Observation<'a> {
    /// The domain, as the rules name it.
    pub domain: &'a str,
    /// What is counted: the descriptor's entries, with the address of the client where there was a chain.
    pub entries: &'a [Entry<'a>],
    /// The rule; `None` if the limit came with the request.
    pub rule: Option<&'a Rule>,
    /// The hits, their limit and their counter.
    pub hit: &'a Hit<'a>,
    /// What became of them.
    pub outcome: &'a Outcome,
    /// Being over this limit refuses nothing, by the rule or by the setting.
    pub shadow_mode: bool,
    /// When.
    pub now: Timestamp,
}

/// An entry of a descriptor as people read it.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct EntryText {
    /// Its key.
    pub key: String,
    /// Its value, or the pattern that stands for all the values that share the counter.
    pub value: String,
}

/// How much of a key or a value is kept, in bytes: a client may send any.
const LONGEST_TEXT: usize = 256;

/// How many entries of a descriptor are kept.
const MOST_ENTRIES: usize = 16;

impl Observation<'_> {
    /// What is counted. Bytes that are not UTF-8 are written `\xHH`; what is too long ends in `…`.
    pub fn descriptor(&self) -> Vec<EntryText> {
        self.entries
            .iter()
            .enumerate()
            .take(MOST_ENTRIES)
            .map(|(i, entry)| {
                let shared = self.rule.and_then(|rule| rule.levels.shared_pattern(i));
                EntryText {
                    key: text(entry.key),
                    value: shared.map_or_else(|| text(entry.value), str::to_owned),
                }
            })
            .collect()
    }

    /// Where in the rule file the limit stands; `None` if it came with the request.
    pub fn rule_path(&self) -> Option<&str> {
        self.rule.map(|rule| &*rule.path)
    }
}

fn text(bytes: &[u8]) -> String {
    let kept = &bytes[..bytes.len().min(LONGEST_TEXT)];
    let mut text = String::with_capacity(kept.len());
    for chunk in kept.utf8_chunks() {
        text.push_str(chunk.valid());
        // A character that the cut has gone through is not malformed.
        if text.len() + chunk.invalid().len() == LONGEST_TEXT && kept.len() < bytes.len() {
            break;
        }
        for byte in chunk.invalid() {
            text.push_str(&format!("\\x{byte:02x}"));
        }
    }
    if kept.len() < bytes.len() {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_readable_and_short() {
        #[track_caller]
        fn test(bytes: &[u8], expected: &str) {
            assert_eq!(text(bytes), expected);
        }
        test(b"198.51.100.7", "198.51.100.7");
        test(b"a\xffb", r"a\xffb");
        test("é".as_bytes(), "é");
        test(&[b'x'; 300], &format!("{}…", "x".repeat(256)));
        let cut_through = [vec![b'x'; 255], "é and more".into()].concat();
        test(&cut_through, &format!("{}…", "x".repeat(255)));
    }
}
