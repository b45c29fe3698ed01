//! The key of a rule's statistics: `ratelimit.service.rate_limit.<key>.total_hits`, as envoyproxy/ratelimit names them.

use super::{Level, LevelValue, Rule};
use crate::descriptor::Entry;

impl Rule {
    /// The key under which this rule's statistics are kept for a descriptor with these entries. Values that are not
    /// UTF-8 show as U+FFFD.
    pub(crate) fn metric_key(&self, domain: &str, entries: &[Entry<'_>]) -> MetricKey {
        if !self.metric_key_depends_on_request() {
            return MetricKey::of_levels(domain, &self.levels);
        }
        let any_shared = self.levels.any_shared();
        let mut key = MetricKey::new(domain);
        for (level, entry) in self.levels.iter().zip(entries) {
            key.push(
                level.key.as_bytes(),
                self.shown_value(level, entry.value, any_shared),
            );
        }
        key
    }

    /// Whether that key is another than that of the rule itself for some descriptors.
    pub(crate) fn metric_key_depends_on_request(&self) -> bool {
        self.detailed_metric || self.levels.any_value_in_metric()
    }

    /// The value that stands in the key beside the level's key, if one does.
    fn shown_value<'a>(&self, level: &'a Level, asked: &'a [u8], any_shared: bool) -> Option<&'a [u8]> {
        if let Some(pattern) = level.shared_pattern() {
            return Some(pattern.as_bytes());
        }
        if self.detailed_metric {
            return (!any_shared || !asked.is_empty()).then_some(asked);
        }
        match &level.value {
            LevelValue::Exact(_) => Some(level.pattern.as_bytes()),
            _ if level.value_to_metric => (!asked.is_empty()).then_some(asked),
            LevelValue::Any => None,
            LevelValue::Wildcard(_) | LevelValue::Networks(_) => Some(level.pattern.as_bytes()),
        }
    }
}

/// The key for a limit that came with the request: every entry with its value, where it has one.
pub(crate) fn of_override(domain: &str, entries: &[Entry<'_>]) -> MetricKey {
    let mut key = MetricKey::new(domain);
    for entry in entries {
        key.push(entry.key, (!entry.value.is_empty()).then_some(entry.value));
    }
    key
}

/// Under what statistics are kept: a domain and levels, each `key` or `key_value`. There may be dots in all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricKey(Vec<String>);

impl MetricKey {
    pub(crate) fn new(domain: &str) -> Self {
        MetricKey(vec![domain.to_owned()])
    }

    pub(crate) fn of_levels(domain: &str, levels: &[Level]) -> Self {
        let levels = levels.iter().map(ToString::to_string);
        MetricKey(std::iter::once(domain.to_owned()).chain(levels).collect())
    }

    pub(crate) fn push(&mut self, level: &[u8], value: Option<&[u8]>) {
        let mut part = String::from_utf8_lossy(level).into_owned();
        if let Some(value) = value {
            part.push('_');
            part.push_str(&String::from_utf8_lossy(value));
        }
        self.0.push(part);
    }

    /// In one, with dots between its parts, [sanitized](sanitize): as statsd is told.
    pub fn name(&self) -> String {
        sanitize(&self.0.join("."))
    }

    /// The domain and the levels, each sanitized.
    pub fn parts(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(|part| sanitize(part))
    }
}

/// A key as it is emitted: `:` and `|`, which statsd gives a meaning, become `_`, and so do the dots of anything that
/// looks like an IPv4 address. Line breaks as well, since statsd lines end there.
pub fn sanitize(key: &str) -> String {
    let mut sanitized = String::with_capacity(key.len());
    let mut rest = key;
    while !rest.is_empty() {
        if let Some(length) = ipv4_length(rest.as_bytes()) {
            sanitized.push_str(&rest[..length].replace('.', "_"));
            rest = &rest[length..];
            continue;
        }
        let next = rest.chars().next().expect("it is not empty");
        sanitized.push(if matches!(next, ':' | '|' | '\n' | '\r') {
            '_'
        } else {
            next
        });
        rest = &rest[next.len_utf8()..];
    }
    sanitized
}

/// The length of four groups of one to three digits, joined by dots, at the start of `text`.
fn ipv4_length(text: &[u8]) -> Option<usize> {
    let mut length = 0;
    for group in 0..4 {
        if group > 0 {
            if text.get(length) != Some(&b'.') {
                return None;
            }
            length += 1;
        }
        let digits = text[length..]
            .iter()
            .take(3)
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        if digits == 0 {
            return None;
        }
        length += digits;
    }
    Some(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emitted_keys_hold_nothing_that_statsd_would_misread() {
        #[track_caller]
        fn test(key: &str, expected: &str) {
            assert_eq!(sanitize(key), expected);
        }
        test("d.url_/a:b|c", "d.url_/a_b_c");
        test("d.ip_198.51.100.7", "d.ip_198_51_100_7");
        test("d.ip_2001:db8::1", "d.ip_2001_db8__1");
        test("d.v_1.2.3", "d.v_1.2.3");
        test("d.v_1234.1.1.1", "d.v_1234_1_1_1");
        test("d.é_a\nb", "d.é_a_b");
    }
}
