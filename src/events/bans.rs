//! The bans that run, by their end: nobody has to ask for a key for its ban to be over.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Ban, Event};
use crate::clock::Timestamp;
use crate::store::memory::MemoryStore;

/// How many bans are watched, each with its event. The ends of more than that are not told.
const MOST_WATCHED: usize = 16_384;

/// The bans that run, each with the event that told of its start.
#[derive(Debug, Default)]
pub(super) struct Bans {
    /// By the end that is known of, on the monotonic clock, and a number that tells bans with the same end apart.
    running: BTreeMap<(Duration, u64), (Ban, Event)>,
    watched: u64,
}

impl Bans {
    /// Watches a ban. False if there are too many.
    pub(super) fn watch(&mut self, ban: Ban, start: Event) -> bool {
        let has_room = self.running.len() < MOST_WATCHED;
        if has_room {
            self.watched += 1;
            self.running.insert((ban.end, self.watched), (ban, start));
        }
        has_room
    }

    /// The ends of the bans that are over at `now`. One that was made longer meanwhile is watched on.
    pub(super) fn ended(&mut self, store: &MemoryStore, now: Timestamp) -> Vec<Event> {
        let mut ended = Vec::new();
        while let Some(first) = self.running.first_entry()
            && first.key().0 <= now.monotonic
        {
            let (ban, start) = first.remove();
            match store.ban(ban.key, now) {
                None => ended.push(start.end_of_ban(now)),
                Some(runs_on) => {
                    let end = now.monotonic.saturating_add(runs_on.remaining);
                    self.watch(Ban { end, ..ban }, start);
                }
            }
        }
        ended
    }
}
