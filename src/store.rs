//! Where the counters are. A store takes all hits of one call at once and answers with their outcomes.

pub mod memory;
pub mod snapshot;

use smallvec::SmallVec;

use crate::algorithm::Outcome;
use crate::descriptor::Hits;
use crate::key::CounterKey;
use crate::rate_limit::RateLimit;

/// The hits of one descriptor on one limit.
#[derive(Debug, Clone)]
pub struct Hit<'a> {
    /// Which counter.
    pub key: CounterKey,
    /// What the counter is measured against.
    pub limit: &'a RateLimit,
    /// What is charged or given back.
    pub hits: Hits,
    /// Whose hits they are: the place of the descriptor in its request. A descriptor's hits come one after the other.
    pub descriptor: usize,
    /// Being over the limit does not count against the call.
    pub shadow_mode: bool,
    /// Being over the limit counts against the call only if all descriptors of this kind are over.
    pub quota_mode: bool,
}

/// One outcome per hit, in the same order.
pub type Outcomes = SmallVec<[Outcome; 4]>;

/// Whether a call with these hits and outcomes is refused: if a descriptor is over a limit that neither shadow mode nor
/// quota mode excuses, or if there are descriptors in quota mode and all of them are over.
pub fn refuses(hits: &[Hit<'_>], outcomes: &[Outcome]) -> bool {
    let (mut quotas, mut quotas_over) = (0, 0);
    let mut rest = outcomes;
    for hits in hits.chunk_by(|a, b| a.descriptor == b.descriptor) {
        let outcomes = rest
            .split_off(..hits.len())
            .expect("there is an outcome for each hit");
        let over = !hits[0].shadow_mode && outcomes.iter().any(|outcome| outcome.over_limit);
        if hits[0].quota_mode {
            quotas += 1;
            quotas_over += usize::from(over);
        } else if over {
            return true;
        }
    }
    quotas > 0 && quotas == quotas_over
}
