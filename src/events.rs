//! Edges, told once: a key comes near its limit, goes over it, is banned, and is free again.
//!
//! An event is found by the thread that decides and put into a bounded queue; a [`Delivery`] takes it from there to the
//! sinks: lines in the log, counters, and a ring of the last events that can be read and followed. With no sink there are no
//! [`Events`], and decisions are not observed at all.

mod announced;
mod bans;
mod ring;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::mpsc;
use tracing::{Level, debug, enabled, warn};

pub use self::ring::{Numbered, Ring};

use self::announced::{Announced, News};
use self::bans::Bans;
use crate::clock::{Timestamp, milliseconds_rounded_up};
use crate::key::CounterKey;
use crate::limiter::{EntryText, Observation, Observer};
use crate::statistics::near_limit_threshold;
use crate::store::memory::MemoryStore;

/// How many events wait to be delivered. Of more than that the newest are dropped, and counted.
const QUEUE: usize = 8192;

/// How many events are delivered before other tasks have their turn.
const AT_A_TIME: usize = 1024;

/// What happened to a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// More of its limit is used than the near-limit ratio says.
    NearLimit,
    /// A call was refused, or would have been but for shadow mode.
    OverLimit,
    /// It is refused from now on, whatever its counter says.
    BanStarted,
    /// It is not any more.
    BanEnded,
}

impl EventKind {
    /// All of them.
    pub const ALL: [EventKind; 4] = [
        EventKind::NearLimit,
        EventKind::OverLimit,
        EventKind::BanStarted,
        EventKind::BanEnded,
    ];

    /// Its name in answers, logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            EventKind::NearLimit => "near_limit",
            EventKind::OverLimit => "over_limit",
            EventKind::BanStarted => "ban_started",
            EventKind::BanEnded => "ban_ended",
        }
    }
}

/// An edge of one key on one limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Event {
    /// When, in UTC.
    pub time: String,
    /// What.
    pub event: EventKind,
    /// The domain.
    pub domain: Box<str>,
    /// Where in the rule file the limit stands; nothing if it came with the request.
    pub rule: Option<Box<str>>,
    /// The limit, in words.
    pub limit: Box<str>,
    /// Whose it is.
    pub descriptor: Vec<EntryText>,
    /// Nothing is refused for it.
    pub shadow_mode: bool,
    /// Until the key can pass again, or for [`EventKind::NearLimit`] has all of its limit again, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub until_reset_ms: Option<u64>,
    /// How long the ban lasts as far as is known at its start, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ban_remaining_ms: Option<u64>,
}

/// Where events go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Sink {
    /// A line each in the log, without the values of the descriptor.
    Log,
    /// Counters, by the kind of the event.
    Counter,
    /// The last events, to be read and followed over HTTP.
    Ring,
}

/// Which events are told, and where.
#[derive(Debug, Clone, Default)]
pub struct EventsConfig {
    /// The sinks; with none nothing is observed.
    pub sinks: BTreeSet<Sink>,
    /// The share of a limit above which a key is near it.
    pub near_limit_ratio: f32,
}

/// Finds the edges among the hits, and holds what the sinks keep.
#[derive(Debug)]
pub struct Events {
    config: EventsConfig,
    announced: Announced,
    queue: mpsc::Sender<Occurrence>,
    dropped: AtomicU64,
    delivered: [AtomicU64; EventKind::ALL.len()],
    ring: Option<Ring>,
}

/// An event on its way to the sinks.
#[derive(Debug)]
struct Occurrence {
    event: Event,
    /// The ban that started with it.
    ban: Option<Ban>,
}

/// A ban that runs.
#[derive(Debug, Clone, Copy)]
struct Ban {
    /// The counter whose key is banned.
    key: CounterKey,
    /// When it ends, on the monotonic clock, as far as is known.
    end: Duration,
}

/// Takes events from the queue to the sinks, and notices when bans are over.
#[derive(Debug)]
pub struct Delivery {
    events: Arc<Events>,
    queue: mpsc::Receiver<Occurrence>,
    /// Taken off the queue, not delivered yet.
    received: Vec<Occurrence>,
    bans: Bans,
}

// === impl Events ===

impl Events {
    /// The last events, if there is a ring.
    pub fn ring(&self) -> Option<&Ring> {
        self.ring.as_ref()
    }

    /// How many events were lost: the queue was full, or there were too many keys to remember.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// How many events of each kind were delivered, if that is counted.
    pub fn counts(&self) -> Option<impl Iterator<Item = (EventKind, u64)>> {
        self.config.sinks.contains(&Sink::Counter).then(|| {
            let counts = EventKind::ALL.into_iter().zip(&self.delivered);
            counts.map(|(kind, count)| (kind, count.load(Ordering::Relaxed)))
        })
    }

    /// Whether the counter is near its limit after the hits.
    fn is_near(&self, observation: &Observation<'_>) -> bool {
        let (outcome, limit) = (observation.outcome, observation.hit.limit);
        !outcome.over_limit && outcome.after > near_limit_threshold(limit, self.config.near_limit_ratio)
    }

    fn announce(&self, observation: &Observation<'_>, kind: EventKind) {
        match self.announced.note(observation, kind) {
            News::Known => {}
            News::Lost => self.drop_one(),
            News::First => self.send(|| Occurrence {
                event: Event::of(observation, kind),
                ban: None,
            }),
        }
    }

    /// Puts an occurrence into the queue; it is made only if there is a place for it.
    fn send(&self, occurrence: impl FnOnce() -> Occurrence) {
        match self.queue.try_reserve() {
            Ok(place) => place.send(occurrence()),
            Err(_) => self.drop_one(),
        }
    }

    /// Gives an event to all sinks.
    fn deliver(&self, event: Event) {
        if self.config.sinks.contains(&Sink::Log) {
            event.log();
        }
        self.delivered[event.event as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(ring) = &self.ring {
            ring.push(event);
        }
    }

    fn drop_one(&self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

impl Observer for Events {
    fn observe(&self, observation: &Observation<'_>) {
        if self.is_near(observation) {
            self.announce(observation, EventKind::NearLimit);
        }
        if is_over(observation) {
            self.announce(observation, EventKind::OverLimit);
        }
        // The store says this once for each ban.
        if let Some(ban) = observation.outcome.ban.filter(|ban| ban.started) {
            self.send(|| Occurrence {
                event: Event {
                    ban_remaining_ms: Some(milliseconds_rounded_up(ban.remaining)),
                    ..Event::of(observation, EventKind::BanStarted)
                },
                ban: Some(Ban {
                    key: observation.hit.key,
                    end: observation.now.monotonic.saturating_add(ban.remaining),
                }),
            });
        }
    }
}

/// Whether the hits were refused by the limit, and not by a ban that runs.
fn is_over(observation: &Observation<'_>) -> bool {
    let outcome = observation.outcome;
    let was_banned = outcome.ban.is_some_and(|ban| !ban.started);
    outcome.over_limit && !was_banned
}

// === impl Event ===

impl Event {
    fn of(observation: &Observation<'_>, event: EventKind) -> Self {
        Event {
            time: observation.now.rfc3339(),
            event,
            domain: observation.domain.into(),
            rule: observation.rule_path().map(Into::into),
            limit: observation.hit.limit.to_string().into(),
            descriptor: observation.descriptor(),
            shadow_mode: observation.shadow_mode,
            until_reset_ms: Some(milliseconds_rounded_up(observation.outcome.until_reset)),
            ban_remaining_ms: None,
        }
    }

    /// The end of the ban that started with `self`.
    fn end_of_ban(self, now: Timestamp) -> Self {
        Event {
            time: now.rfc3339(),
            event: EventKind::BanEnded,
            until_reset_ms: None,
            ban_remaining_ms: None,
            ..self
        }
    }

    /// A line in the log. What the descriptor's values are is shown in detailed logs only.
    fn log(&self) {
        let (event, domain, limit) = (self.event.name(), &*self.domain, &*self.limit);
        let rule = self.rule.as_deref().unwrap_or("the request's own limit");
        let shadow_mode = self.shadow_mode;
        warn!(
            event,
            domain, rule, limit, shadow_mode, "{event}: a key of {rule}"
        );
        if !enabled!(Level::DEBUG) {
            return;
        }
        let descriptor: Vec<String> = self
            .descriptor
            .iter()
            .map(|entry| format!("{}={}", entry.key, entry.value))
            .collect();
        let descriptor = descriptor.join(" ");
        debug!(event, domain, rule, descriptor, "{event}: {descriptor}");
    }
}

// === impl Delivery ===

impl Delivery {
    /// Events as they are wanted, none yet. `None` if there is no sink.
    pub fn new(config: EventsConfig) -> Option<Self> {
        if config.sinks.is_empty() {
            return None;
        }
        let (sender, receiver) = mpsc::channel(QUEUE);
        let events = Events {
            ring: config.sinks.contains(&Sink::Ring).then(Ring::default),
            config,
            announced: Announced::default(),
            queue: sender,
            dropped: AtomicU64::default(),
            delivered: Default::default(),
        };
        Some(Delivery {
            events: Arc::new(events),
            queue: receiver,
            received: Vec::new(),
            bans: Bans::default(),
        })
    }

    /// What this delivers the events of.
    pub fn events(&self) -> &Arc<Events> {
        &self.events
    }

    /// Waits until there is an event to deliver. May be given up at any time without a loss.
    pub async fn wait(&mut self) {
        // `events` has a sender, so that the queue is never closed.
        if self.received.is_empty() {
            self.queue.recv_many(&mut self.received, AT_A_TIME).await;
        }
    }

    /// Delivers what is waiting, up to a bound, and tells of the bans that are over at `now`, which `store` knows. Returns how
    /// many events that were.
    pub fn deliver(&mut self, store: &MemoryStore, now: Timestamp) -> usize {
        while self.received.len() < AT_A_TIME
            && let Ok(occurrence) = self.queue.try_recv()
        {
            self.received.push(occurrence);
        }
        let received = self.received.len();
        for Occurrence { event, ban } in self.received.drain(..) {
            if let Some(ban) = ban
                && !self.bans.watch(ban, event.clone())
            {
                self.events.drop_one();
            }
            self.events.deliver(event);
        }
        let ended = self.bans.ended(store, now);
        let delivered = received + ended.len();
        for event in ended {
            self.events.deliver(event);
        }
        delivered
    }
}
