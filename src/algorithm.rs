//! The arithmetic of limiting: pure functions of a limit, a counter's state, the hits and the time.
//!
//! One file per algorithm. Nothing here knows of keys, stores or requests.

pub mod fixed_window;

/// What became of one descriptor's hits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Outcome {
    /// Whether the counter is now above the limit.
    pub over_limit: bool,
    /// The counter before these hits.
    pub before: u64,
    /// The counter after these hits.
    pub after: u64,
    /// How many hits are left in the window; 0 when over the limit.
    pub remaining: u32,
    /// Whole seconds until the window ends, from 1 to its length.
    pub seconds_until_reset: u64,
}
