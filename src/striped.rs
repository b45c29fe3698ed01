//! One value per thread that counts, so that no two write to the same line of a cache; whoever reads puts them together.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The most stripes; more threads share them.
const MOST_STRIPES: usize = 16;

/// Copies of `T`, each with cache lines of its own.
#[derive(Debug)]
pub(crate) struct Striped<T>(Box<[Line<T>]>);

/// Two lines: processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

impl<T: Default> Default for Striped<T> {
    fn default() -> Self {
        Striped((0..stripes()).map(|_| Line::default()).collect())
    }
}

impl<T> Striped<T> {
    /// The copy of this thread.
    pub(crate) fn mine(&self) -> &T {
        &self.0[index() & (self.0.len() - 1)].0
    }

    /// All copies.
    pub(crate) fn all(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|line| &line.0)
    }
}

/// A power of two: one for each processor.
fn stripes() -> usize {
    static STRIPES: OnceLock<usize> = OnceLock::new();
    *STRIPES.get_or_init(|| {
        let processors = thread::available_parallelism().map_or(MOST_STRIPES, usize::from);
        processors.next_power_of_two().min(MOST_STRIPES)
    })
}

/// The number of this thread.
fn index() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local! {
        static INDEX: usize = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    INDEX.with(|index| *index)
}
