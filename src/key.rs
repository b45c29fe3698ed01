//! Which counter a descriptor counts on.

use std::hash::{BuildHasher, Hash, Hasher};

use ahash::RandomState;
use siphasher::sip128::{Hasher128 as _, SipHasher13};

use crate::algorithm::{Kind, Worth};
use crate::descriptor::Entry;
use crate::rate_limit::{Algorithm, RateLimit, WindowStart};
use crate::rule::Rule;

/// The identity of a counter: 107 bits of a keyed hash over domain, entries and what kind of windows it has, and that kind.
///
/// Not part of it: how much the limit allows, so that a changed limit keeps its counts, and the rule, so that an
/// override counts on the counter of the rule with the same window. The fields are hashed with their lengths, so no two
/// lists of entries hash the same bytes; that any two of ten million keys meet by chance has a probability of 3 in 10^19.
///
/// A counter that is held also notes here how much is used of its limit, which is no part of its identity.
///
/// It is 14 bytes, so that a counter takes 30 and a table of them, with a byte for each, as good as a power of two.
#[derive(Debug, Clone, Copy, Eq)]
pub struct CounterKey {
    /// Where the counter is: the counters of one key that depend on each other have this half in common.
    place: [u8; 8],
    /// Which of those it is; the lowest three bits are its [`Kind`], the next two its [`Worth`].
    identity: [u8; 6],
}

/// The bits of [`CounterKey::identity`] that hold the kind.
const KIND: u64 = 0b111;

/// Where [`Worth`] stands in [`CounterKey::identity`].
const WORTH_SHIFT: u32 = 3;

/// The bits of [`CounterKey::identity`] that hold the worth.
const WORTH: u64 = 0b11 << WORTH_SHIFT;

impl PartialEq for CounterKey {
    fn eq(&self, other: &Self) -> bool {
        self.place == other.place && (self.identity() ^ other.identity()) & !WORTH == 0
    }
}

impl CounterKey {
    /// Of `identity` the lowest 48 bits.
    fn new(place: u64, identity: u64) -> Self {
        let [a, b, c, d, e, f, _, _] = identity.to_le_bytes();
        CounterKey {
            place: place.to_le_bytes(),
            identity: [a, b, c, d, e, f],
        }
    }

    /// The same with other lowest bits.
    fn with_kind(place: u64, identity: u64, kind: Kind) -> Self {
        CounterKey::new(place, (identity & !(KIND | WORTH)) | kind as u64)
    }

    fn identity(&self) -> u64 {
        let [a, b, c, d, e, f] = self.identity;
        u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
    }

    /// All of it in two numbers.
    pub(crate) fn words(&self) -> [u64; 2] {
        [self.place(), self.identity()]
    }

    pub(crate) fn from_words([place, identity]: [u64; 2]) -> Self {
        CounterKey::new(place, identity)
    }

    /// What the counter is worth.
    pub(crate) fn worth(&self) -> Worth {
        match (self.identity() & WORTH) >> WORTH_SHIFT {
            0 => Worth::Least,
            1 => Worth::Little,
            2 => Worth::Much,
            _ => Worth::Most,
        }
    }

    pub(crate) fn set_worth(&mut self, worth: Worth) {
        let identity = (self.identity() & !WORTH) | (worth as u64) << WORTH_SHIFT;
        *self = CounterKey::new(self.place(), identity);
    }

    /// The shard and the slot of the counter, evenly spread.
    pub(crate) fn place(&self) -> u64 {
        u64::from_le_bytes(self.place)
    }

    /// The algorithm of the counter.
    pub(crate) fn kind(&self) -> Kind {
        Kind::from_number(self.identity() & KIND)
    }

    /// The counter of the limit's burst, which is asked when the limit itself refuses.
    pub(crate) fn of_burst(&self, burst: &RateLimit) -> CounterKey {
        // Another identity in the same place. The secret is in the one that goes in.
        let mut hasher = SipHasher13::new();
        hash_windows(burst, &mut hasher);
        hasher.write_u64(self.identity() & !WORTH);
        CounterKey::with_kind(self.place(), hasher.finish(), Kind::of(burst))
    }

    /// The refusals of the key.
    pub(crate) fn of_ban(&self) -> CounterKey {
        CounterKey::with_kind(self.place(), self.identity(), Kind::Ban)
    }
}

/// Maps hash by the place alone, which is a hash already.
impl Hash for CounterKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.place());
    }
}

/// Makes keys, with a secret of this process, so that no client can aim at a counter or a shard.
#[derive(Clone)]
pub struct KeyMaker {
    secret: SipHasher13,
}

impl Default for KeyMaker {
    /// With a new secret; for the model checker, which must be able to repeat itself, always the same.
    fn default() -> Self {
        if cfg!(shuttle) {
            return KeyMaker::with_secret([1, 2]);
        }
        let random = RandomState::new();
        KeyMaker::with_secret([random.hash_one(0), random.hash_one(1)])
    }
}

impl std::fmt::Debug for KeyMaker {
    /// Without the secret.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeyMaker").finish_non_exhaustive()
    }
}

impl KeyMaker {
    /// Makes the keys that another with this secret made.
    pub(crate) fn with_secret([secret, more_secret]: [u64; 2]) -> Self {
        KeyMaker {
            secret: SipHasher13::new_with_keys(secret, more_secret),
        }
    }

    /// What its keys depend on.
    pub(crate) fn secret(&self) -> [u64; 2] {
        self.secret.keys().into()
    }

    /// The counter of `limit` for `entries`, where the values of levels that share a counter are replaced by their pattern.
    pub fn key(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        rule: Option<&Rule>,
        limit: &RateLimit,
    ) -> CounterKey {
        let mut hasher = self.secret;
        hash_windows(limit, &mut hasher);
        hash_field(domain.as_bytes(), &mut hasher);
        for (i, entry) in entries.iter().enumerate() {
            let shared = rule.and_then(|rule| rule.levels.shared_pattern(i));
            hash_field(entry.key, &mut hasher);
            hash_field(shared.map_or(entry.value, str::as_bytes), &mut hasher);
        }
        let hash = hasher.finish128();
        CounterKey::with_kind(hash.h1, hash.h2, Kind::of(limit))
    }
}

/// What tells the counters of one key apart.
fn hash_windows(limit: &RateLimit, hasher: &mut SipHasher13) {
    hasher.write_u64(limit.window.milliseconds());
    if let Algorithm::FixedWindow(WindowStart::Calendar(calendar)) = &limit.algorithm {
        hash_field(calendar.zone_name().as_bytes(), hasher);
    }
    hasher.write_u8(Kind::of(limit) as u8);
}

fn hash_field(field: &[u8], hasher: &mut SipHasher13) {
    hasher.write_u64(field.len() as u64);
    hasher.write(field);
}

/// Takes the place of a [`CounterKey`] for its hash.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PlaceHasher(u64);

impl Hasher for PlaceHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("a counter key hashes one number");
    }

    fn write_u64(&mut self, place: u64) {
        self.0 = place;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

impl BuildHasher for PlaceHasher {
    type Hasher = PlaceHasher;

    fn build_hasher(&self) -> PlaceHasher {
        PlaceHasher(0)
    }
}

#[cfg(test)]
mod tests {
    use jiff::tz::TimeZone;

    use super::*;
    use crate::rate_limit::{Calendar, OnExceeded, Unit};

    fn per(unit: Unit, algorithm: Algorithm) -> RateLimit {
        RateLimit {
            algorithm,
            ..RateLimit::per(unit, 1)
        }
    }

    #[test]
    fn different_counters_have_different_keys() {
        let maker = KeyMaker::default();
        let key = |domain: &str, entries: &[(&str, &str)], limit: &RateLimit| {
            let entries: Vec<_> = entries
                .iter()
                .map(|(key, value)| Entry {
                    key: key.as_bytes(),
                    value: value.as_bytes(),
                })
                .collect();
            maker.key(domain, &entries, None, limit)
        };
        let hour = RateLimit::per(Unit::Hour, 1);
        let first_hit = Algorithm::FixedWindow(WindowStart::FirstHit(OnExceeded::Keep));
        let in_zone = |zone: &str| {
            let zone = TimeZone::get(zone).unwrap();
            Algorithm::FixedWindow(WindowStart::Calendar(Box::new(Calendar {
                unit: Unit::Day,
                zone,
            })))
        };
        let a = [("a", "b")];
        let keys = [
            key("d", &[("a", "b_c")], &hour),
            key("d", &[("a_b", "c")], &hour),
            key("d", &[("a", "b"), ("c", "")], &hour),
            key("d", &a, &hour),
            key("d", &a, &hour).of_ban(),
            key("d", &a, &hour).of_burst(&hour),
            key("d", &a, &RateLimit::per(Unit::Day, 1)),
            key("d", &a, &per(Unit::Hour, first_hit)),
            key("d", &a, &per(Unit::Hour, Algorithm::SlidingWindow)),
            key(
                "d",
                &a,
                &per(Unit::Hour, Algorithm::TokenBucket { burst_size: 1 }),
            ),
            key("d", &a, &per(Unit::Day, in_zone("Europe/Berlin"))),
            key("d", &a, &per(Unit::Day, in_zone("Asia/Tokyo"))),
            key("da", &[("", "b")], &hour),
        ];
        for (i, left) in keys.iter().enumerate() {
            for right in &keys[i + 1..] {
                assert_ne!(left, right);
            }
        }
    }

    #[test]
    fn the_size_of_the_limit_is_not_part_of_it() {
        let maker = KeyMaker::default();
        let entries = [Entry {
            key: b"k",
            value: b"v",
        }];
        let of = |limit| maker.key("d", &entries, None, &limit);
        assert_eq!(
            of(RateLimit::per(Unit::Hour, 5)),
            of(RateLimit::per(Unit::Hour, 500))
        );
        let bucket = |burst_size| per(Unit::Hour, Algorithm::TokenBucket { burst_size });
        assert_eq!(of(bucket(1)), of(bucket(9)));
        assert_eq!(of(bucket(1)).kind(), Kind::TokenBucket);
        assert_eq!(of(bucket(1)).of_ban().kind(), Kind::Ban);
    }

    #[test]
    fn every_process_has_a_secret_of_its_own() {
        let entries = [Entry {
            key: b"k",
            value: b"v",
        }];
        let key = || KeyMaker::default().key("d", &entries, None, &RateLimit::per(Unit::Hour, 5));
        assert_ne!(key(), key());
    }
}
