//! Values with `*`: each star stands for any number of any bytes, none included.
//!
//! A pattern is its literal prefix, its literal suffix and the pieces between them. [`Wildcards`] finds the first of
//! many patterns that fits: patterns with the same prefix and suffix share a bucket, and buckets are found by hash, one
//! look per pair of lengths that occurs. So a thousand patterns of one shape (`/orders/*`, `/basket/*`) cost what one
//! does; only patterns with equal prefix and suffix and something between (`a*b*c`, `a*d*c`) are tried one by one.

use std::hash::BuildHasher as _;

use hashbrown::HashTable;
use hashbrown::hash_map::DefaultHashBuilder;
use memchr::memmem::Finder;

use super::NodeId;

/// Whether a rule's value is a pattern.
pub(crate) fn is_wildcard(value: &str) -> bool {
    value.contains('*')
}

/// The patterns of one key at one level of the tree, in the order written.
#[derive(Debug, Default)]
pub(super) struct Wildcards {
    /// The pairs of lengths that occur, the one with the earliest pattern first.
    shapes: Vec<Shape>,
    buckets: HashTable<Bucket>,
    hasher: DefaultHashBuilder,
    /// How many patterns there are.
    count: usize,
}

#[derive(Debug)]
struct Shape {
    prefix: usize,
    suffix: usize,
    /// Place of the earliest pattern of this shape.
    earliest: usize,
}

#[derive(Debug)]
struct Bucket {
    prefix: Box<[u8]>,
    suffix: Box<[u8]>,
    /// In the order written.
    candidates: Vec<Candidate>,
}

#[derive(Debug)]
struct Candidate {
    /// Place among all patterns.
    place: usize,
    /// Must occur in this order between prefix and suffix.
    middle: Vec<Finder<'static>>,
    node: NodeId,
}

impl Wildcards {
    /// Adds a pattern after all others.
    pub(super) fn push(&mut self, pattern: &str, node: NodeId) {
        let (prefix, rest) = pattern
            .split_once('*')
            .expect("only values with a star are patterns");
        let (middle, suffix) = rest.rsplit_once('*').unwrap_or(("", rest));
        let candidate = Candidate {
            place: self.count,
            middle: middle
                .split('*')
                .filter(|piece| !piece.is_empty())
                .map(|piece| Finder::new(piece.as_bytes()).into_owned())
                .collect(),
            node,
        };
        self.count += 1;
        self.add_shape(prefix.len(), suffix.len(), candidate.place);
        self.bucket(prefix.as_bytes(), suffix.as_bytes())
            .candidates
            .push(candidate);
    }

    fn add_shape(&mut self, prefix: usize, suffix: usize, place: usize) {
        let known = self
            .shapes
            .iter()
            .any(|shape| shape.prefix == prefix && shape.suffix == suffix);
        if !known {
            self.shapes.push(Shape {
                prefix,
                suffix,
                earliest: place,
            });
        }
    }

    fn bucket(&mut self, prefix: &[u8], suffix: &[u8]) -> &mut Bucket {
        let hasher = &self.hasher;
        self.buckets
            .entry(
                hasher.hash_one((prefix, suffix)),
                |bucket| *bucket.prefix == *prefix && *bucket.suffix == *suffix,
                |bucket| hasher.hash_one((&*bucket.prefix, &*bucket.suffix)),
            )
            .or_insert_with(|| Bucket {
                prefix: prefix.into(),
                suffix: suffix.into(),
                candidates: Vec::new(),
            })
            .into_mut()
    }

    /// The earliest pattern that fits all of `value`.
    pub(super) fn find(&self, value: &[u8]) -> Option<NodeId> {
        let mut best: Option<&Candidate> = None;
        for shape in &self.shapes {
            if best.is_some_and(|best| best.place < shape.earliest) {
                break;
            }
            if shape.prefix + shape.suffix > value.len() {
                continue;
            }
            let (prefix, rest) = value.split_at(shape.prefix);
            let (between, suffix) = rest.split_at(rest.len() - shape.suffix);
            let hash = self.hasher.hash_one((prefix, suffix));
            let bucket = self.buckets.find(hash, |bucket| {
                *bucket.prefix == *prefix && *bucket.suffix == *suffix
            });
            let Some(bucket) = bucket else { continue };
            let earlier = |candidate: &&Candidate| best.is_none_or(|best| candidate.place < best.place);
            best = bucket
                .candidates
                .iter()
                .take_while(earlier)
                .find(|candidate| candidate.fits(between))
                .or(best);
        }
        best.map(|candidate| candidate.node)
    }
}

impl Candidate {
    fn fits(&self, mut between: &[u8]) -> bool {
        self.middle.iter().all(|piece| {
            let found = piece.find(between);
            if let Some(start) = found {
                between = &between[start + piece.needle().len()..];
            }
            found.is_some()
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn first_fit(patterns: &[&str], value: &str) -> Option<usize> {
        let mut wildcards = Wildcards::default();
        for (place, pattern) in patterns.iter().enumerate() {
            wildcards.push(pattern, NodeId::new(place));
        }
        wildcards.find(value.as_bytes()).map(NodeId::index)
    }

    #[test]
    fn stars_stand_for_any_bytes_and_for_none() {
        #[track_caller]
        fn test(pattern: &str, value: &str, expected: bool) {
            assert_eq!(
                first_fit(&[pattern], value).is_some(),
                expected,
                "{pattern} on {value}"
            );
        }
        test("*", "", true);
        test("*", "anything/at.all", true);
        test("foo*", "foo", true);
        test("foo*", "fo", false);
        test("bar*b", "barb", true);
        test("bar*b", "bar", false);
        test("aba*aba", "aba", false);
        test("a*b*c", "abc", true);
        test("a*b*c", "aXbYc", true);
        test("a*b*c", "acb", false);
        test("a*bb*b", "abb", false);
        test("a**c", "ac", true);
        test("*.example", "a.example", true);
        test("log*end", "log\nend", true);
        test("v1.*", "v1x", false);
    }

    #[test]
    fn the_earliest_fit_wins_over_the_more_specific() {
        assert_eq!(first_fit(&["a*", "ab*", "abc*"], "abd"), Some(0));
        assert_eq!(first_fit(&["ab*", "a*"], "abd"), Some(0));
        assert_eq!(first_fit(&["x*", "a*b*d", "*d", "a*"], "abcd"), Some(1));
        assert_eq!(first_fit(&["a*q*d", "a*b*d"], "abcd"), Some(1));
    }

    /// Straightforward matching, for comparison.
    fn fits(pattern: &[u8], value: &[u8]) -> bool {
        match pattern.split_first() {
            None => value.is_empty(),
            Some((b'*', rest)) => (0..=value.len()).any(|skip| fits(rest, &value[skip..])),
            Some((byte, rest)) => value.first() == Some(byte) && fits(rest, &value[1..]),
        }
    }

    proptest! {
        #[test]
        fn finds_what_trying_each_in_order_finds(
            patterns in prop::collection::vec("[ab]{0,2}\\*[ab*]{0,4}", 1..12), value in "[ab]{0,8}",
        ) {
            let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
            let expected = patterns.iter().position(|p| fits(p.as_bytes(), value.as_bytes()));
            prop_assert_eq!(first_fit(&patterns, &value), expected);
        }
    }
}
