//! One value per thread that counts, so that no two write to the same line of a cache; whoever reads puts them together.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The most stripes; more threads share them.
const MOST_STRIPES: usize = 16;

/// Copies of `T`, each with cache lines of its own. They are made when the first thread counts: of many rules most are never met.
#[derive(Debug)]
pub(crate) struct Striped<T>(OnceLock<Box<[Line<T>]>>);

/// Two lines: processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

impl<T> Default for Striped<T> {
    fn default() -> Self {
        Striped(OnceLock::new())
    }
}

impl<T: Default> Striped<T> {
    /// The copy of this thread.
    pub(crate) fn mine(&self) -> &T {
        let lines = self
            .0
            .get_or_init(|| (0..stripes()).map(|_| Line::default()).collect());
        &lines[index() & (lines.len() - 1)].0
    }

    /// All copies.
    pub(crate) fn all(&self) -> impl Iterator<Item = &T> {
        self.0.get().into_iter().flatten().map(|line| &line.0)
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
