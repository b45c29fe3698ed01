//! The key of a rule's statistics: `ratelimit.service.rate_limit.<key>.total_hits`, as envoyproxy/ratelimit names them.

use std::borrow::Cow;

use super::{Level, LevelValue, Rule};
use crate::descriptor::Entry;

impl Rule {
    /// The key under which this rule's statistics are kept for a descriptor with these entries. Values that are not
    /// UTF-8 show as U+FFFD.
    pub(crate) fn metric_key(&self, domain: &str, entries: &[Entry<'_>]) -> Cow<'_, str> {
        if !self.metric_key_depends_on_request() {
            return Cow::Borrowed(&self.path);
        }
        let any_shared = self.levels.iter().any(|level| level.shared_pattern().is_some());
        let mut key = String::from(domain);
        for (level, entry) in self.levels.iter().zip(entries) {
            push_level(
                &mut key,
                level.key.as_bytes(),
                self.shown_value(level, entry.value, any_shared),
            );
        }
        Cow::Owned(key)
    }

    /// Whether that key is another than [`Rule::path`] for some descriptors.
    pub(crate) fn metric_key_depends_on_request(&self) -> bool {
        self.detailed_metric || self.levels.iter().any(|level| level.value_to_metric)
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
pub(crate) fn of_override(domain: &str, entries: &[Entry<'_>]) -> String {
    let mut key = String::from(domain);
    for entry in entries {
        push_level(
            &mut key,
            entry.key,
            (!entry.value.is_empty()).then_some(entry.value),
        );
    }
    key
}

fn push_level(key: &mut String, level: &[u8], value: Option<&[u8]>) {
    key.push('.');
    key.push_str(&String::from_utf8_lossy(level));
    if let Some(value) = value {
        key.push('_');
        key.push_str(&String::from_utf8_lossy(value));
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
