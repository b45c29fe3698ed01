//! What is counted of calls for operators: by one call, and in all.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::algorithm::Outcome;
use crate::descriptor::Hits;
use crate::rate_limit::RateLimit;
use crate::striped::Striped;

/// How much each statistic of a rule grows by one call: the counters of envoyproxy/ratelimit, by its names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Hits asked for.
    pub total_hits: u64,
    /// Hits beyond the limit, also of rules in shadow mode.
    pub over_limit: u64,
    /// Hits between the near-limit threshold and the limit.
    pub near_limit: u64,
    /// Hits of calls that were not over the limit.
    pub within_limit: u64,
    /// Hits beyond the limit that passed because the rule is in shadow mode.
    pub shadow_mode: u64,
}

/// Sums of [`Statistics`], added to by any number of threads.
#[derive(Debug, Default)]
pub struct Totals(Striped<[AtomicU64; 5]>);

// === impl Statistics ===

impl Statistics {
    /// The names of the statistics, in the order of [`Statistics::values`].
    pub const NAMES: [&'static str; 5] = [
        "total_hits",
        "over_limit",
        "near_limit",
        "within_limit",
        "shadow_mode",
    ];

    /// The statistics, in the order of [`Statistics::NAMES`].
    pub fn values(&self) -> [u64; 5] {
        [
            self.total_hits,
            self.over_limit,
            self.near_limit,
            self.within_limit,
            self.shadow_mode,
        ]
    }

    /// What `hits` with this `outcome` add. A refund adds nothing: these counters only grow.
    ///
    /// The arithmetic is that of envoyproxy/ratelimit: a call that crosses a threshold is split at it, except that the
    /// passed part of a call that goes over counts as near the limit at most, not as within it.
    pub fn new(
        limit: &RateLimit,
        near_limit_ratio: f32,
        shadow_mode: bool,
        hits: Hits,
        outcome: &Outcome,
    ) -> Self {
        let Hits::Charge(hits) = hits else {
            return Statistics::default();
        };
        let allowed = u64::from(limit.capacity());
        let near = near_limit_threshold(limit, near_limit_ratio);
        let Outcome {
            before,
            after,
            over_limit,
            ..
        } = *outcome;
        let mut statistics = Statistics {
            total_hits: hits,
            ..Statistics::default()
        };
        if over_limit {
            let asked = before.saturating_add(hits);
            statistics.over_limit = hits;
            // Under a ban no part of the call would have passed.
            let was_banned = outcome.ban.is_some_and(|ban| !ban.started);
            if !was_banned && before < allowed && asked > allowed {
                statistics.over_limit = asked - allowed;
                statistics.near_limit = allowed.saturating_sub(near.max(before));
            }
            if shadow_mode {
                statistics.shadow_mode = statistics.over_limit;
            }
        } else {
            statistics.within_limit = hits;
            // Not `hits`: a call that charges nothing because another descriptor is over moves no counter.
            statistics.near_limit = after.saturating_sub(near.max(before));
        }
        statistics
    }
}

/// The count above which hits are near the limit. In single precision, as in envoyproxy/ratelimit: 0.29 of 100 is 29.
pub(crate) fn near_limit_threshold(limit: &RateLimit, ratio: f32) -> u64 {
    // A float-to-integer cast saturates and makes 0 of NaN and negatives.
    (limit.capacity() as f32 * ratio).floor() as u64
}

// === impl Totals ===

impl Totals {
    /// Adds what one call counts.
    pub fn add(&self, statistics: &Statistics) {
        for (total, value) in self.0.mine().iter().zip(statistics.values()) {
            if value > 0 {
                total.fetch_add(value, Ordering::Relaxed);
            }
        }
    }

    /// The sums, in the order of [`Statistics::NAMES`]. Calls that are counted meanwhile may be in some of them only.
    pub fn sums(&self) -> [u64; 5] {
        let mut sums = [0u64; 5];
        for stripe in self.0.all() {
            for (sum, total) in sums.iter_mut().zip(stripe) {
                *sum = sum.wrapping_add(total.load(Ordering::Relaxed));
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::rate_limit::Unit;

    #[track_caller]
    fn test(limit: u32, before: u64, hits: u64, expected: [u64; 4]) {
        let limit = RateLimit::per(Unit::Hour, limit);
        let after = before + hits;
        let outcome = Outcome {
            over_limit: after > u64::from(limit.requests_per_unit),
            before,
            after,
            remaining: 0,
            until_reset: Duration::from_secs(1),
            ban: None,
        };
        let s = Statistics::new(&limit, 0.8, false, Hits::Charge(hits), &outcome);
        assert_eq!(
            [s.total_hits, s.over_limit, s.near_limit, s.within_limit],
            expected
        );
    }

    #[test]
    fn calls_are_split_at_the_thresholds() {
        test(15, 0, 11, [11, 0, 0, 11]);
        test(15, 11, 2, [2, 0, 1, 2]);
        test(15, 13, 3, [3, 1, 2, 0]);
        test(15, 15, 3, [3, 3, 0, 0]);
        test(20, 0, 16, [16, 0, 0, 16]);
        test(20, 16, 3, [3, 0, 3, 3]);
        test(20, 0, 30, [30, 10, 4, 0]);
        test(0, 0, 2, [2, 2, 0, 0]);
    }

    #[test]
    fn the_threshold_is_computed_in_single_precision() {
        assert_eq!(near_limit_threshold(&RateLimit::per(Unit::Day, 100), 0.29), 29);
        assert_eq!(
            near_limit_threshold(&RateLimit::per(Unit::Day, u32::MAX), 1.0),
            1 << 32
        );
        assert_eq!(near_limit_threshold(&RateLimit::per(Unit::Day, 5), f32::NAN), 0);
    }

    #[test]
    fn a_refund_counts_nothing() {
        let limit = RateLimit::per(Unit::Hour, 5);
        let outcome = Outcome {
            over_limit: false,
            before: 5,
            after: 3,
            remaining: 2,
            until_reset: Duration::from_secs(1),
            ban: None,
        };
        let statistics = Statistics::new(&limit, 0.8, true, Hits::Refund(2), &outcome);
        assert_eq!(statistics, Statistics::default());
    }

    #[test]
    fn totals_are_the_sum_of_what_all_threads_added() {
        let totals = Totals::default();
        let one = Statistics {
            total_hits: 3,
            over_limit: 1,
            shadow_mode: 2,
            ..Statistics::default()
        };
        std::thread::scope(|scope| {
            for _ in 0..32 {
                scope.spawn(|| (0..1000).for_each(|_| totals.add(&one)));
            }
        });
        assert_eq!(totals.sums(), [96_000, 32_000, 0, 0, 64_000]);
    }
}
