//! Which counter a descriptor counts on.

use smallvec::SmallVec;

use crate::descriptor::Entry;
use crate::matcher::Rule;
use crate::rate_limit::RateLimit;

/// The identity of a counter: domain, entries and window length, each field with its length in front, so that no two
/// different ones are equal.
///
/// Not part of it: how much the limit allows, so that a changed limit keeps its counts, and the rule, so that an
/// override counts on the counter of the rule with the same window.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CounterKey(SmallVec<[u8; 160]>);

impl CounterKey {
    /// The counter of `entries`, where the values of levels that share a counter are replaced by their pattern.
    pub fn new(domain: &str, entries: &[Entry<'_>], rule: Option<&Rule>, limit: &RateLimit) -> Self {
        let mut key = CounterKey(SmallVec::new());
        key.0.extend_from_slice(&limit.window_seconds().to_le_bytes());
        key.push_field(domain.as_bytes());
        for (i, entry) in entries.iter().enumerate() {
            let shared = rule.and_then(|rule| rule.levels[i].shared_pattern());
            key.push_field(entry.key);
            key.push_field(shared.map_or(entry.value, str::as_bytes));
        }
        key
    }

    fn push_field(&mut self, field: &[u8]) {
        self.0.extend_from_slice(&(field.len() as u64).to_le_bytes());
        self.0.extend_from_slice(field);
    }

    /// The length of the counter's window in seconds, out of a stored key.
    pub(crate) fn window_seconds(key: &[u8]) -> u64 {
        let (window, _) = key
            .split_first_chunk()
            .expect("a counter key starts with its window");
        u64::from_le_bytes(*window)
    }

    /// As stored and hashed.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rate_limit::Unit;

    fn key(domain: &str, entries: &[(&str, &str)], unit: Unit) -> CounterKey {
        let entries: Vec<_> = entries
            .iter()
            .map(|(key, value)| Entry {
                key: key.as_bytes(),
                value: value.as_bytes(),
            })
            .collect();
        CounterKey::new(domain, &entries, None, &RateLimit::per(unit, 1))
    }

    #[test]
    fn different_entries_never_share_a_counter() {
        let keys = [
            key("d", &[("a", "b_c")], Unit::Hour),
            key("d", &[("a_b", "c")], Unit::Hour),
            key("d", &[("a", "b"), ("c", "")], Unit::Hour),
            key("d", &[("a", "b")], Unit::Hour),
            key("d", &[("a", "b")], Unit::Day),
            key("da", &[("", "b")], Unit::Hour),
        ];
        for (i, left) in keys.iter().enumerate() {
            for right in &keys[i + 1..] {
                assert_ne!(left, right);
            }
        }
    }

    #[test]
    fn the_size_of_the_limit_is_not_part_of_it() {
        let entries = [Entry {
            key: b"k",
            value: b"v",
        }];
        let of = |allowed| CounterKey::new("d", &entries, None, &RateLimit::per(Unit::Hour, allowed));
        assert_eq!(of(5), of(500));
        assert_eq!(CounterKey::window_seconds(of(5).as_bytes()), 3_600);
    }
}
