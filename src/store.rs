//! Where the counters are. A store takes all hits of one call at once and answers with their outcomes.

pub mod memory;

use smallvec::SmallVec;

use crate::algorithm::Outcome;
use crate::descriptor::Hits;
use crate::key::CounterKey;
use crate::rate_limit::RateLimit;

/// One descriptor's hits on one counter.
#[derive(Debug, Clone)]
pub struct Hit {
    /// Which counter.
    pub key: CounterKey,
    /// What the counter is measured against.
    pub limit: RateLimit,
    /// What is charged or given back.
    pub hits: Hits,
    /// Being over the limit does not count against the call.
    pub shadow_mode: bool,
    /// Being over the limit counts against the call only if all hits of this kind are over.
    pub quota_mode: bool,
}

/// One outcome per hit, in the same order.
pub type Outcomes = SmallVec<[Outcome; 4]>;

/// Whether a call with these hits and outcomes is refused: if a hit is over its limit that neither shadow mode nor quota
/// mode excuses, or if there are hits in quota mode and all of them are over.
pub fn refuses(hits: &[Hit], outcomes: &[Outcome]) -> bool {
    let (mut quotas, mut quotas_over) = (0, 0);
    for (hit, outcome) in hits.iter().zip(outcomes) {
        let over = outcome.over_limit && !hit.shadow_mode;
        if hit.quota_mode {
            quotas += 1;
            quotas_over += usize::from(over);
        } else if over {
            return true;
        }
    }
    quotas > 0 && quotas == quotas_over
}
