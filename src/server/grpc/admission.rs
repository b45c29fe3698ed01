//! How many calls may be under way, and how much of them may be held. Beyond that they are refused at once, so that a
//! server with too much to do does not grow.
//!
//! A call whose request is there is answered at once and is never under way: only those count whose request has still to
//! arrive, and streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tonic::Status;

use crate::metrics::Metrics;

/// How much of large requests may have arrived in all calls together, in bytes.
const MOST_BYTES: u64 = 64 << 20;

/// A request is large from so many bytes on. Smaller ones are not counted: of them only so many can be open.
const LARGE: u64 = 4_096;

/// What the calls of all connections hold.
#[derive(Debug)]
pub(in crate::server) struct Admission {
    most_calls: u64,
    calls: AtomicU64,
    bytes: AtomicU64,
    metrics: Arc<Metrics>,
}

/// A call that is under way. Gives back what it holds when it is gone.
#[derive(Debug)]
pub(super) struct Admitted {
    admission: Arc<Admission>,
    arrived: u64,
}

impl Admission {
    /// Lets `most_calls` be under way at a time, and counts in `metrics` those that are refused.
    pub(in crate::server) fn new(most_calls: u64, metrics: Arc<Metrics>) -> Self {
        Admission {
            most_calls,
            calls: AtomicU64::default(),
            bytes: AtomicU64::default(),
            metrics,
        }
    }

    /// Takes in a call.
    pub(super) fn admit(self: &Arc<Self>) -> Result<Admitted, Status> {
        let calls = self.calls.fetch_add(1, Ordering::Relaxed);
        let admitted = Admitted {
            admission: Arc::clone(self),
            arrived: 0,
        };
        if calls < self.most_calls {
            Ok(admitted)
        } else {
            Err(self.shed("too many calls are under way"))
        }
    }

    fn shed(&self, reason: &str) -> Status {
        self.metrics.note_shed_call();
        Status::unavailable(reason)
    }
}

impl Admitted {
    /// Counts what has arrived of its request. An error if all calls together hold too much.
    pub(super) fn count(&mut self, bytes: usize) -> Result<(), Status> {
        let counted = self.counted();
        self.arrived += bytes as u64;
        let more = self.counted() - counted;
        if more > 0 && self.admission.bytes.fetch_add(more, Ordering::Relaxed) + more > MOST_BYTES {
            return Err(self
                .admission
                .shed("too much has arrived of calls that are not complete"));
        }
        Ok(())
    }

    fn counted(&self) -> u64 {
        self.arrived.saturating_sub(LARGE)
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.admission.calls.fetch_sub(1, Ordering::Relaxed);
        if self.counted() > 0 {
            self.admission.bytes.fetch_sub(self.counted(), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admission(most_calls: u64) -> Arc<Admission> {
        Arc::new(Admission::new(most_calls, Arc::default()))
    }

    #[test]
    fn so_many_calls_are_under_way_and_no_more() {
        let admission = admission(2);
        let first = admission.admit().unwrap();
        let second = admission.admit().unwrap();
        assert_eq!(admission.admit().unwrap_err().code(), tonic::Code::Unavailable);
        drop(first);
        let third = admission.admit().unwrap();
        drop((second, third));
        assert_eq!(admission.calls.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_large_requests_hold_is_bounded_and_given_back() {
        let admission = admission(100);
        let admit = || admission.admit().unwrap();
        let mut small = admit();
        small.count(LARGE as usize).unwrap();
        assert_eq!(admission.bytes.load(Ordering::Relaxed), 0);
        let mut large: Vec<Admitted> = (0..8).map(|_| admit()).collect();
        for call in &mut large {
            call.count(1_000).unwrap();
            call.count((MOST_BYTES / 8) as usize).unwrap();
        }
        // Each had its first bytes for nothing.
        let room = 8 * (LARGE - 1_000);
        let mut last = admit();
        last.count((LARGE + room) as usize).unwrap();
        assert!(last.count(1).is_err());
        drop((large, last));
        assert_eq!(admission.bytes.load(Ordering::Relaxed), 0);
    }
}
