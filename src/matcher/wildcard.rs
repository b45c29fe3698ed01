//! Values with `*`: each star stands for any number of any bytes, none included.
//!
//! A pattern is its literal prefix, its literal suffix and the pieces between them. [`Wildcards`] finds the first of
//! many patterns that fits, without trying each: prefixes are found by hash, one look per length of prefix that occurs; below
//! each prefix suffixes are found in the same way; and where many patterns have the same prefix and suffix (`*bot*`,
//! `*crawler*`), one pass over the value finds all whose first piece occurs in it.

use std::hash::BuildHasher as _;
use std::sync::OnceLock;

use aho_corasick::AhoCorasick;
use hashbrown::HashTable;
use hashbrown::hash_map::DefaultHashBuilder;
use memchr::memmem::Finder;

use super::NodeId;

/// From how many patterns with the same prefix and suffix on they are searched together and not one by one.
const MANY: usize = 16;

/// The patterns of one key at one level of the tree, in the order written.
#[derive(Debug, Default)]
pub(super) struct Wildcards {
    /// By prefix.
    patterns: ByAffix<ByAffix<Candidates>>,
    /// How many patterns there are.
    count: usize,
}

/// Things found by a text that a value starts or ends with.
#[derive(Debug)]
struct ByAffix<T> {
    /// The lengths that occur, the one with the earliest pattern first, each with the place of that.
    lengths: Vec<(usize, usize)>,
    things: HashTable<(Box<[u8]>, T)>,
    hasher: DefaultHashBuilder,
}

/// The patterns with one prefix and one suffix, in the order written.
#[derive(Debug, Default)]
struct Candidates {
    all: Vec<Candidate>,
    /// Finds the first pieces of all of them. Made when it is first needed, and only for many patterns.
    first_pieces: OnceLock<AhoCorasick>,
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
        let place = self.count;
        self.count += 1;
        let middle = middle
            .split('*')
            .filter(|piece| !piece.is_empty())
            .map(|piece| Finder::new(piece.as_bytes()).into_owned())
            .collect();
        self.patterns
            .entry(prefix.as_bytes(), place)
            .entry(suffix.as_bytes(), place)
            .all
            .push(Candidate { place, middle, node });
    }

    /// The earliest pattern that fits all of `value`.
    pub(super) fn find(&self, value: &[u8]) -> Option<NodeId> {
        let mut best: Option<&Candidate> = None;
        for (prefix, earliest) in &self.patterns.lengths {
            if !may_be_earlier(*earliest, best) {
                break;
            }
            let Some((prefix, rest)) = value.split_at_checked(*prefix) else {
                continue;
            };
            let Some(by_suffix) = self.patterns.get(prefix) else {
                continue;
            };
            for (suffix, earliest) in &by_suffix.lengths {
                if !may_be_earlier(*earliest, best) {
                    break;
                }
                let Some(between) = rest.len().checked_sub(*suffix) else {
                    continue;
                };
                let (between, suffix) = rest.split_at(between);
                if let Some(candidates) = by_suffix.get(suffix) {
                    best = candidates.first_fit(between, best).or(best);
                }
            }
        }
        best.map(|candidate| candidate.node)
    }
}

/// Whether a pattern at `place` would win over the best so far.
fn may_be_earlier(place: usize, best: Option<&Candidate>) -> bool {
    best.is_none_or(|best| place < best.place)
}

impl<T> Default for ByAffix<T> {
    fn default() -> Self {
        ByAffix {
            lengths: Vec::new(),
            things: HashTable::new(),
            hasher: DefaultHashBuilder::default(),
        }
    }
}

impl<T: Default> ByAffix<T> {
    /// What belongs to `affix`, which a pattern at `place` has.
    fn entry(&mut self, affix: &[u8], place: usize) -> &mut T {
        if !self.lengths.iter().any(|(length, _)| *length == affix.len()) {
            self.lengths.push((affix.len(), place));
        }
        let hasher = &self.hasher;
        let entry = self.things.entry(
            hasher.hash_one(affix),
            |(there, _)| **there == *affix,
            |(there, _)| hasher.hash_one(&**there),
        );
        let (_, thing) = entry.or_insert_with(|| (affix.into(), T::default())).into_mut();
        thing
    }
}

impl<T> ByAffix<T> {
    fn get(&self, affix: &[u8]) -> Option<&T> {
        let found = self
            .things
            .find(self.hasher.hash_one(affix), |(there, _)| **there == *affix);
        found.map(|(_, thing)| thing)
    }
}

impl Candidates {
    /// The earliest that fits what is between prefix and suffix, if it comes before the best so far.
    fn first_fit<'c>(&'c self, between: &[u8], best: Option<&Candidate>) -> Option<&'c Candidate> {
        let is_earlier = |candidate: &&Candidate| may_be_earlier(candidate.place, best);
        // Nothing comes before a pattern without pieces, which fits always.
        let pieces = self
            .all
            .iter()
            .take_while(|candidate| !candidate.middle.is_empty())
            .count();
        if pieces < MANY {
            return self
                .all
                .iter()
                .take_while(is_earlier)
                .find(|candidate| candidate.fits(between));
        }
        let together = self.first_fit_of_many(pieces, between);
        together.or(self.all.get(pieces)).filter(is_earlier)
    }

    /// The earliest of the first so many candidates, all of which have pieces, that fits.
    fn first_fit_of_many(&self, count: usize, between: &[u8]) -> Option<&Candidate> {
        let first_pieces = self.first_pieces.get_or_init(|| {
            let pieces = self.all[..count]
                .iter()
                .map(|candidate| candidate.middle[0].needle());
            AhoCorasick::new(pieces).expect("the pieces of rules are far below the limits of the automaton")
        });
        let mut tried = vec![false; count];
        let mut first = count;
        for occurrence in first_pieces.find_overlapping_iter(between) {
            let i = occurrence.pattern().as_usize();
            if i < first && !tried[i] {
                tried[i] = true;
                if self.all[i].fits(between) {
                    first = i;
                }
            }
        }
        (first < count).then(|| &self.all[first])
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

    #[test]
    fn many_patterns_are_searched_together() {
        let patterns: Vec<String> = (0..1_000).map(|i| format!("*bot{i:03}*x*")).collect();
        let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
        assert_eq!(first_fit(&patterns, "a bot777 and bot123 x"), Some(123));
        assert_eq!(first_fit(&patterns, "x bot777"), None);
        let with_rest: Vec<&str> = patterns
            .iter()
            .copied()
            .chain(["*"])
            .chain(["*bot123*"])
            .collect();
        assert_eq!(first_fit(&with_rest, "bot123"), Some(1_000));
    }

    proptest! {
        #[test]
        fn finds_what_trying_each_in_order_finds(
            patterns in prop::collection::vec("[ab]{0,2}\\*[ab*]{0,4}", 1..60), value in "[ab]{0,8}",
        ) {
            let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
            let expected = patterns.iter().position(|p| fits(p.as_bytes(), value.as_bytes()));
            prop_assert_eq!(first_fit(&patterns, &value), expected);
        }
    }
}
