//! A word in the log when a caller asks about a domain without rules: usually the name in the proxy's configuration and the
//! one in the rule file differ, and then everything passes.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use ahash::RandomState;

use crate::clock::Timestamp;

/// How long nothing more is said of a domain.
const SILENCE: Duration = Duration::from_secs(60);

/// How many domains are remembered. Of more than that in one [`SILENCE`] nothing is said.
const MOST_REMEMBERED: usize = 64;

/// Which unknown domains were spoken of, and when.
#[derive(Debug, Default)]
pub(super) struct UnknownDomains {
    hasher: RandomState,
    /// By the hash of the domain, on the monotonic clock. Locked only for calls with an unknown domain.
    warned: Mutex<HashMap<u64, Duration>>,
}

impl UnknownDomains {
    /// Whether to speak of `domain` now.
    pub(super) fn is_news(&self, domain: &[u8], now: Timestamp) -> bool {
        let domain = self.hasher.hash_one(domain);
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        let is_recent = |at: &Duration| now.monotonic.saturating_sub(*at) < SILENCE;
        if warned.get(&domain).is_some_and(is_recent) {
            return false;
        }
        if warned.len() >= MOST_REMEMBERED {
            warned.retain(|_, at| is_recent(at));
        }
        let has_room = warned.len() < MOST_REMEMBERED;
        if has_room {
            warned.insert(domain, now.monotonic);
        }
        has_room
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp {
            since_epoch: Duration::ZERO,
            monotonic: Duration::from_secs(seconds),
        }
    }

    #[test]
    fn each_is_spoken_of_once_a_minute() {
        let domains = UnknownDomains::default();
        assert!(domains.is_news(b"apis", at(0)));
        assert!(!domains.is_news(b"apis", at(59)));
        assert!(domains.is_news(b"other", at(59)));
        assert!(domains.is_news(b"apis", at(60)));
    }

    #[test]
    fn only_so_many_are_remembered() {
        let domains = UnknownDomains::default();
        let spoken = (0..1000u32)
            .filter(|i| domains.is_news(&i.to_le_bytes(), at(0)))
            .count();
        assert_eq!(spoken, MOST_REMEMBERED);
        assert!(domains.is_news(b"later", at(60)));
    }
}
