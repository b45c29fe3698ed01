//! The last events, for whoever asks and whoever follows.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use tokio::sync::broadcast;

use super::Event;

/// How many events are kept.
const KEPT: usize = 1024;

/// How far behind a follower may be before it misses events.
const FOLLOWED: usize = 1024;

/// An event and its number. Numbers grow by one with each event since the start, so that a gap is a loss.
#[derive(Debug, Clone, Serialize)]
pub struct Numbered {
    /// From 1.
    pub id: u64,
    /// The event.
    #[serde(flatten)]
    pub event: Arc<Event>,
}

/// The last events.
#[derive(Debug)]
pub struct Ring {
    /// Held while an event is added or copied, never while one is waited for.
    kept: Mutex<Kept>,
    followers: broadcast::Sender<Numbered>,
}

#[derive(Debug, Default)]
struct Kept {
    last_id: u64,
    events: VecDeque<Numbered>,
}

impl Default for Ring {
    fn default() -> Self {
        Ring {
            kept: Mutex::default(),
            followers: broadcast::Sender::new(FOLLOWED),
        }
    }
}

impl Ring {
    /// Adds an event, and forgets the oldest if there are too many.
    pub(super) fn push(&self, event: Event) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.last_id += 1;
        let event = Numbered {
            id: kept.last_id,
            event: Arc::new(event),
        };
        if kept.events.len() == KEPT {
            kept.events.pop_front();
        }
        kept.events.push_back(event.clone());
        // Under the lock, so that a new follower misses nothing. An error says that nobody follows.
        let _ = self.followers.send(event);
    }

    /// The kept events with a higher number than `after`, from the oldest on.
    pub fn after(&self, after: u64) -> Vec<Numbered> {
        self.follow(after).0
    }

    /// The same, and all that follow. Numbers that are missing at the start are of events that are forgotten.
    pub fn follow(&self, after: u64) -> (Vec<Numbered>, broadcast::Receiver<Numbered>) {
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        // Who has seen a higher number than the last has seen another process.
        let after = if after > kept.last_id { 0 } else { after };
        let first = kept.events.partition_point(|event| event.id <= after);
        let seen = kept.events.range(first..).cloned().collect();
        (seen, self.followers.subscribe())
    }
}
