//! An open loop: calls that come when they come, whether or not those before are answered.
//!
//! The time of a call runs from the instant at which it was to be sent, not from that at which it was: a server that falls
//! behind is charged for the calls that had to wait. So it is when the machine lets the load fall behind, which is why the time
//! from when a call was in fact sent is told as well.

use std::mem;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::ensure;
use hdrhistogram::Histogram;
use serde_json::{Value, json};
use tokio::task::yield_now;
use tokio::time::sleep;

use crate::generator::Generator;
use crate::random::SplitMix64;
use crate::report::median;
use crate::timer::Timer;
use crate::traffic::Frames;

/// When calls come: each independently of the others.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Arrivals {
    /// How many in a second, on average.
    pub(crate) rate: f64,
    /// For how long.
    pub(crate) lasting: Duration,
    /// The same seed makes the same arrivals.
    pub(crate) seed: u64,
}

/// What became of them.
#[derive(Debug)]
pub(crate) struct Times {
    /// How long calls took, in nanoseconds.
    calls: Histogram<u64>,
    /// How much of that was after they were sent.
    once_sent: Histogram<u64>,
    /// How many calls were sent.
    pub(crate) sent: u64,
    /// As many calls as come in a second were under way: the server takes fewer than come. Nothing more was sent.
    pub(crate) gave_up: bool,
    error: Option<anyhow::Error>,
}

impl Arrivals {
    /// Makes the calls. Fails unless all are answered OK.
    pub(crate) async fn send(self, generator: &Generator, frames: Frames) -> anyhow::Result<Times> {
        let times = Arc::new(Mutex::new(Times::new()));
        let mut random = SplitMix64(self.seed);
        let (timer, start) = (Timer::new()?, Instant::now());
        let mut due = Duration::ZERO;
        for call in 0.. {
            due += Duration::from_secs_f64(gap(&mut random) / self.rate);
            if due >= self.lasting {
                break;
            }
            let due = start + due;
            timer.until(due).await?;
            if call % 8 == 0 {
                // A load that is behind never waits, but has to let go of what it sent.
                yield_now().await;
            }
            if !times.lock().expect("nobody panics").send(self.rate) {
                break;
            }
            let (connection, frame, times) =
                (generator.connection(call), frames.frame(call), Arc::clone(&times));
            tokio::spawn(async move {
                let sent = Instant::now();
                let answer = connection.call(frame).await;
                let mut times = times.lock().expect("nobody panics");
                record(&mut times.calls, due);
                record(&mut times.once_sent, sent);
                times.error = times.error.take().or(answer.err());
            });
        }
        let end = Instant::now() + Duration::from_secs(10);
        while times.lock().expect("nobody panics").under_way() > 0 && Instant::now() < end {
            sleep(Duration::from_millis(1)).await;
        }
        let mut times = times.lock().expect("nobody panics");
        let unanswered = times.under_way();
        ensure!(unanswered == 0, "{unanswered} calls were never answered");
        match times.error.take() {
            Some(error) => Err(error),
            None => Ok(mem::replace(&mut times, Times::new())),
        }
    }
}

/// How long until the next arrival, by the mean of that time: the gaps of a Poisson process.
fn gap(random: &mut SplitMix64) -> f64 {
    let uniform = (random.next() >> 11) as f64 / (1_u64 << 53) as f64;
    -(1.0 - uniform).ln()
}

impl Times {
    fn new() -> Self {
        let histogram = Histogram::new(3).expect("three digits are possible");
        Times {
            calls: histogram.clone(),
            once_sent: histogram,
            sent: 0,
            gave_up: false,
            error: None,
        }
    }

    fn under_way(&self) -> u64 {
        self.sent - self.calls.len()
    }

    /// Counts one call more, if there are not too many under way already.
    fn send(&mut self, most_under_way: f64) -> bool {
        self.gave_up = self.under_way() as f64 >= most_under_way;
        self.sent += u64::from(!self.gave_up);
        !self.gave_up
    }

    /// The columns of [`Times::row`].
    pub(crate) const COLUMNS: [&str; 5] = ["p50 us", "p99 us", "p99.9 us", "max us", "once sent p99.9 us"];

    /// In microseconds, or of several measurements the medians.
    pub(crate) fn row(all: &[Times]) -> [f64; 5] {
        let of = |of: fn(&Times) -> u64| median(all.iter().map(|times| of(times) as f64 / 1_000.0));
        [
            of(|times| times.calls.value_at_quantile(0.5)),
            of(|times| times.calls.value_at_quantile(0.99)),
            of(|times| times.calls.value_at_quantile(0.999)),
            of(|times| times.calls.max()),
            of(|times| times.once_sent.value_at_quantile(0.999)),
        ]
    }

    pub(crate) fn json(all: &[Times]) -> Value {
        let row = Times::row(all).map(|micros| (micros * 10.0).round() / 10.0);
        let columns = Times::COLUMNS.into_iter().zip(row);
        columns
            .map(|(column, micros)| (column.to_owned(), json!(micros)))
            .collect()
    }
}

fn record(histogram: &mut Histogram<u64>, since: Instant) {
    let nanos = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
    histogram.record(nanos).expect("the histogram has no bound");
}
