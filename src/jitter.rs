//! Waits that are not all the same, so that what began together does not come again together.

use std::time::Duration;

use ahash::RandomState;

/// `wait`, up to this share of it more or less, evenly spread.
pub(crate) fn jittered(wait: Duration, share: f64) -> Duration {
    // As random as the seed of the hasher; a double holds 53 bits.
    let random = (RandomState::new().hash_one(0) >> 11) as f64 / (1u64 << 53) as f64;
    wait.mul_f64(1.0 - share + 2.0 * share * random)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_differ_within_their_share() {
        let waits: Vec<Duration> = (0..100).map(|_| jittered(Duration::from_secs(10), 0.1)).collect();
        let (least, most) = (waits.iter().min().unwrap(), waits.iter().max().unwrap());
        assert!(*least >= Duration::from_secs(9) && *most <= Duration::from_secs(11));
        assert!(*most - *least > Duration::from_secs(1));
    }
}
