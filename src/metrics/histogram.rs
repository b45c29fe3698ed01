//! How long calls take.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::clock::nanoseconds;
use crate::striped::Striped;

/// Upper bounds of the buckets in nanoseconds, each itself included. From 5 ms on they are those of envoyproxy/ratelimit.
const BOUNDS: [u64; 22] = [
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    25_000_000,
    50_000_000,
    100_000_000,
    250_000_000,
    500_000_000,
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
];

/// Durations by size; any number of threads adds to it.
#[derive(Debug, Default)]
pub(super) struct Histogram(Striped<Stripe>);

#[derive(Debug, Default)]
struct Stripe {
    /// The last one is for what is beyond all bounds.
    buckets: [AtomicU64; BOUNDS.len() + 1],
    sum_nanoseconds: AtomicU64,
}

/// What a histogram holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Observed {
    /// How many durations are in each bucket, those of smaller ones not included.
    buckets: [u64; BOUNDS.len() + 1],
    pub(super) sum: Duration,
}

impl Histogram {
    pub(super) fn observe(&self, duration: Duration) {
        let duration = nanoseconds(duration);
        let bucket = BOUNDS.partition_point(|bound| *bound < duration);
        let stripe = self.0.mine();
        stripe.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        stripe.sum_nanoseconds.fetch_add(duration, Ordering::Relaxed);
    }

    pub(super) fn observed(&self) -> Observed {
        let mut observed = Observed::default();
        let mut nanoseconds = 0u64;
        for stripe in self.0.all() {
            for (sum, bucket) in observed.buckets.iter_mut().zip(&stripe.buckets) {
                *sum += bucket.load(Ordering::Relaxed);
            }
            nanoseconds = nanoseconds.wrapping_add(stripe.sum_nanoseconds.load(Ordering::Relaxed));
        }
        observed.sum = Duration::from_nanos(nanoseconds);
        observed
    }
}

impl Observed {
    /// The upper bounds of its buckets.
    pub(super) fn bounds() -> impl Iterator<Item = Duration> {
        BOUNDS.into_iter().map(Duration::from_nanos)
    }

    pub(super) fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// How many durations are not longer than this, as far as the buckets tell.
    pub(super) fn up_to(&self, most: Duration) -> u64 {
        let most = nanoseconds(most);
        let buckets = BOUNDS.iter().zip(&self.buckets);
        buckets
            .take_while(|(bound, _)| **bound <= most)
            .map(|(_, count)| count)
            .sum()
    }

    /// The whole milliseconds at the lower end of each bucket, each with what was added to it since `earlier`.
    pub(super) fn milliseconds_since(&self, earlier: &Observed) -> Vec<(u64, u64)> {
        let lower = std::iter::once(0).chain(BOUNDS.into_iter().map(|bound| bound / 1_000_000));
        let mut added: Vec<(u64, u64)> = Vec::new();
        for ((milliseconds, bucket), before) in lower.zip(self.buckets).zip(earlier.buckets) {
            let count = bucket.saturating_sub(before);
            match added.last_mut() {
                Some((last, sum)) if *last == milliseconds => *sum += count,
                _ => added.push((milliseconds, count)),
            }
        }
        added.retain(|(_, count)| *count > 0);
        added
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_duration_is_in_the_first_bucket_that_has_room_for_it() {
        let histogram = Histogram::default();
        for micros in [1, 2, 5_000, 5_001, 20_000_000] {
            histogram.observe(Duration::from_micros(micros));
        }
        let observed = histogram.observed();
        assert_eq!(observed.count(), 5);
        assert_eq!(observed.sum, Duration::from_micros(20_010_004));
        let up_to = |micros| observed.up_to(Duration::from_micros(micros));
        assert_eq!((up_to(0), up_to(1), up_to(5_000), up_to(9_999)), (0, 1, 3, 3));
        assert_eq!((up_to(10_000), up_to(10_000_000), up_to(u64::MAX)), (4, 4, 4));
        assert_eq!(
            observed.milliseconds_since(&Observed::default()),
            [(0, 2), (2, 1), (5, 1), (10_000, 1)]
        );
        assert_eq!(observed.milliseconds_since(&observed), []);
    }
}
