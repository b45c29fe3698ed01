//! Recorded requests, run against rules on a clock that follows the recording.
//!
//! In: one line per request, `{"time": UNIX_SECONDS, "request": {...}}`. Out: one line per request in the same order, or a
//! summary per rule. A request that is no valid one gets an error as its answer and the run goes on; so it does after a line
//! that is not such an object, which is remembered and reported at the end.

mod summary;

use std::io::{self, BufRead, Write};
use std::time::Duration;

use bytes::BytesMut;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use tonic::Code;

use self::summary::Summary;
use crate::clock::{ManualClock, Timestamp};
use crate::decision::Decision;
use crate::descriptor::Request;
use crate::limiter::Limiter;
use crate::rls::{decode, encode, json as proto_json};
use crate::rule::sanitize_metric_key;
use crate::statistics::Statistics;

/// How many requests pass between two looks for counters that have run out.
const SWEEP_AFTER: u64 = 1 << 16;

/// What a replay writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reply {
    /// A line with the answer to each request.
    Responses,
    /// The same, with what each request added to the statistics.
    ResponsesWithMetrics,
    /// A table of the rules at the end.
    Summary,
}

/// A run.
#[derive(Debug)]
pub struct Replay<W> {
    limiter: Limiter,
    /// Starts with the first request.
    clock: Option<ManualClock>,
    answers: Answers<W>,
}

/// Where the answers go.
#[derive(Debug)]
struct Answers<W> {
    reply: Reply,
    summary: Summary,
    out: W,
}

/// The lines of a recording that could not be read.
#[derive(Debug, Default)]
pub struct Unread {
    count: u64,
    shown: Vec<String>,
}

impl Unread {
    /// How many of them are kept word for word.
    const MOST_SHOWN: usize = 20;

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// `line: what is wrong`, for the first of them.
    pub fn shown(&self) -> &[String] {
        &self.shown
    }

    fn push(&mut self, line: u64, fault: &str) {
        self.count += 1;
        if self.shown.len() < Unread::MOST_SHOWN {
            self.shown.push(format!("{line}: {fault}"));
        }
    }
}

/// One line of a recording. Further fields are let be.
#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    time: &'a RawValue,
    #[serde(borrow)]
    request: &'a RawValue,
}

impl Line<'_> {
    fn since_epoch(&self) -> Option<Duration> {
        let text = self.time.get();
        let seconds = match decimal(text) {
            Some(seconds) => seconds,
            None => Duration::try_from_secs_f64(text.parse().ok()?).ok()?,
        };
        // Later than the clock goes, in the year 2554: these are milliseconds.
        (seconds.as_secs() < u64::MAX / 1_000_000_000).then_some(seconds)
    }
}

/// The time that a number without an exponent stands for, to the nanosecond, which a float would not hold.
fn decimal(text: &str) -> Option<Duration> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let nanoseconds = format!("{fraction:0<9.9}");
    let is_digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if !is_digits(seconds) || !is_digits(fraction) {
        return None;
    }
    Some(Duration::new(seconds.parse().ok()?, nanoseconds.parse().ok()?))
}

impl<W: Write> Replay<W> {
    /// A run on empty counters. `limiter` needs rules.
    pub fn new(limiter: Limiter, reply: Reply, out: W) -> Self {
        let summary = Summary::new(limiter.matcher().as_deref());
        Replay {
            limiter,
            clock: None,
            answers: Answers { reply, summary, out },
        }
    }

    /// Answers all of `recording`. Fails only if that cannot be read or the answers cannot be written.
    pub fn run(&mut self, mut recording: impl BufRead) -> io::Result<Unread> {
        let mut unread = Unread::default();
        let mut bytes = Vec::new();
        for number in 1.. {
            bytes.clear();
            if recording.read_until(b'\n', &mut bytes)? == 0 {
                break;
            }
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            if let Err(fault) = self.answer_line(&bytes)? {
                unread.push(number, &fault);
            }
            if number % SWEEP_AFTER == 0 {
                self.limiter.store().sweep(self.now());
            }
        }
        self.answers.finish()?;
        Ok(unread)
    }

    /// Answers one line; `Ok(Err(_))` says why it could not be read.
    fn answer_line(&mut self, bytes: &[u8]) -> io::Result<Result<(), String>> {
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        if !bytes.trim_ascii_start().starts_with(b"{") {
            return Ok(Err("it is no JSON object with time and request".to_owned()));
        }
        let line: Line<'_> = match serde_json::from_slice(bytes) {
            Ok(line) => line,
            // The line that it counts is the one inside this line.
            Err(error) => return Ok(Err(error.to_string().replace(" at line 1 column", ", at column"))),
        };
        let Some(since_epoch) = line.since_epoch() else {
            let fault = format!(
                "time must be a number of seconds since 1970, before the year 2554, not {}",
                line.time
            );
            return Ok(Err(fault));
        };
        self.clock
            .get_or_insert_with(|| ManualClock::new(since_epoch))
            .set(since_epoch);
        match proto_json::recorded_request(line.request.get().as_bytes()) {
            Ok(wire) => self.answer(line.time, &wire)?,
            Err(error) => self.answers.unread(line.time, &error.to_string())?,
        }
        Ok(Ok(()))
    }

    fn now(&self) -> Timestamp {
        self.clock
            .as_ref()
            .map_or_else(|| ManualClock::default().now(), ManualClock::now)
    }

    fn answer(&mut self, time: &RawValue, wire: &[u8]) -> io::Result<()> {
        let matcher = self.limiter.matcher();
        let request = match decode::request(wire) {
            Ok(request) => request,
            Err(error) => return self.answers.unread(time, &error.to_string()),
        };
        match self.limiter.decide(matcher.as_deref(), &request, self.now()) {
            Ok(decision) => self.answers.decision(time, &request, &decision),
            Err(error) => {
                let code = tonic::Status::from(error).code();
                let metrics = json!({ "@service": { "service_error": 1 } });
                self.answers.error(time, code, &error.to_string(), metrics)
            }
        }
    }
}

impl<W: Write> Answers<W> {
    fn decision(
        &mut self,
        time: &RawValue,
        request: &Request<'_>,
        decision: &Decision<'_>,
    ) -> io::Result<()> {
        if self.reply == Reply::Summary {
            self.summary.count(decision);
            return Ok(());
        }
        let mut wire = BytesMut::new();
        encode::response(decision, &mut wire);
        let response = proto_json::response(&wire);
        write!(self.out, "{{\"time\":{time},\"response\":{response}")?;
        self.end_line(|| Value::Object(metrics(request, decision)))
    }

    /// Says that a request cannot be read. It never reached the service, whose statistics do not move.
    fn unread(&mut self, time: &RawValue, message: &str) -> io::Result<()> {
        self.error(time, Code::InvalidArgument, message, json!({}))
    }

    /// Says that there is no decision.
    fn error(&mut self, time: &RawValue, code: Code, message: &str, metrics: Value) -> io::Result<()> {
        if self.reply == Reply::Summary {
            self.summary.count_error();
            return Ok(());
        }
        let error = json!({ "code": code_name(code), "message": message });
        write!(self.out, "{{\"time\":{time},\"error\":{error}")?;
        self.end_line(|| metrics)
    }

    fn end_line(&mut self, metrics: impl FnOnce() -> Value) -> io::Result<()> {
        if self.reply == Reply::ResponsesWithMetrics {
            write!(self.out, ",\"metrics\":{}", metrics())?;
        }
        writeln!(self.out, "}}")
    }

    fn finish(&mut self) -> io::Result<()> {
        if self.reply == Reply::Summary {
            write!(self.out, "{}", self.summary)?;
        }
        self.out.flush()
    }
}

/// The names of gRPC for the codes that a decision can fail with.
fn code_name(code: Code) -> &'static str {
    match code {
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::Unavailable => "UNAVAILABLE",
        _ => "INTERNAL",
    }
}

/// By how much the statistics grew, by key and by name.
fn metrics(request: &Request<'_>, decision: &Decision<'_>) -> Map<String, Value> {
    let domain = String::from_utf8_lossy(request.domain);
    let mut metrics = Map::new();
    let mut add = |key: &str, name: &str, count: u64| {
        if count > 0 {
            let counters = metrics.entry(key).or_insert_with(|| json!({}));
            let total = counters[name].as_u64().unwrap_or(0).saturating_add(count);
            counters[name] = total.into();
        }
    };
    if !decision.domain_found {
        add(
            &sanitize_metric_key(&domain),
            "domain_not_found",
            decision.statuses.len() as u64,
        );
    }
    if decision.global_shadow_mode {
        add("@service", "global_shadow_mode", 1);
    }
    for (status, descriptor) in decision.statuses.iter().zip(&request.descriptors) {
        if let Some(key) = status.metric_key(&domain, &descriptor.entries) {
            let key = key.name();
            for (name, count) in Statistics::NAMES.into_iter().zip(status.statistics.values()) {
                add(&key, name, count);
            }
        }
    }
    metrics
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_to_the_nanosecond() {
        #[track_caller]
        fn test(text: &str, expected: Option<(u64, u32)>) {
            let expected = expected.map(|(seconds, nanoseconds)| Duration::new(seconds, nanoseconds));
            assert_eq!(decimal(text), expected, "{text}");
        }
        test("1700000000", Some((1_700_000_000, 0)));
        test("1699999999.374", Some((1_699_999_999, 374_000_000)));
        test("0.0000000019", Some((0, 1)));
        for other in ["1.7e9", "-1", "1.-5", "99999999999999999999", "null"] {
            test(other, None);
        }
    }
}
