//! Logs: one line per event to stderr, as logfmt or as JSON, with the field names of envoyproxy/ratelimit.

use std::fmt;
use std::io;

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_appender::non_blocking::{NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;

use crate::clock::Clock;

/// How a log line looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// `time="..." level=info msg="..." field=value`
    Text,
    /// `{"@timestamp": "...", "level": "info", "@message": "...", "field": value}`
    Json,
}

/// How many lines wait to be written. Of more than that, as when nobody reads the log, the newest are lost.
const MOST_WAITING_LINES: usize = 10_000;

/// Writes what is still waiting when it is dropped, unless nobody reads it.
#[derive(Debug)]
pub struct LogGuard(#[expect(dead_code, reason = "held to be dropped")] WorkerGuard);

/// Sends all our events of `level` and above to stderr; those of libraries go into too much detail. Call it once.
///
/// A thread of its own writes them: a log that is full, closed or not read never holds up or ends the program.
pub fn init(level: LevelFilter, format: LogFormat) -> LogGuard {
    let (writer, guard) = NonBlockingBuilder::default()
        .lossy(true)
        .buffered_lines_limit(MOST_WAITING_LINES)
        .thread_name("log")
        .finish(io::stderr());
    tracing_subscriber::fmt()
        .with_writer(writer)
        .log_internal_errors(false)
        .with_max_level(level)
        .event_format(Lines {
            format,
            clock: Clock::system(),
        })
        .finish()
        .with(Targets::new().with_target(env!("CARGO_PKG_NAME"), level))
        .init();
    LogGuard(guard)
}

struct Lines {
    format: LogFormat,
    clock: Clock,
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Fields::default();
        event.record(&mut fields);
        let time = self.clock.now().rfc3339();
        let level = level_name(*event.metadata().level());
        match self.format {
            LogFormat::Text => {
                write!(
                    writer,
                    "time=\"{time}\" level={level} msg={}",
                    Quoted(&fields.message)
                )?;
                for (key, value) in &fields.others {
                    match value {
                        Value::String(text) => write!(writer, " {key}={}", Quoted(text))?,
                        other => write!(writer, " {key}={other}")?,
                    }
                }
                writeln!(writer)
            }
            LogFormat::Json => {
                let mut line = Map::new();
                line.insert("@timestamp".into(), time.into());
                line.insert("level".into(), level.into());
                line.insert("@message".into(), fields.message.into());
                line.extend(fields.others);
                writeln!(writer, "{}", Value::Object(line))
            }
        }
    }
}

fn level_name(level: tracing::Level) -> &'static str {
    match level {
        tracing::Level::ERROR => "error",
        tracing::Level::WARN => "warning",
        tracing::Level::INFO => "info",
        tracing::Level::DEBUG => "debug",
        tracing::Level::TRACE => "trace",
    }
}

/// The fields of an event, its message apart.
#[derive(Default)]
struct Fields {
    message: String,
    others: Map<String, Value>,
}

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        self.others.insert(field.name().to_owned(), value);
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" {
            self.message = text;
        } else {
            self.put(field, text.into());
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" {
            value.clone_into(&mut self.message);
        } else {
            self.put(field, value.into());
        }
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }
}

/// A logfmt value: in quotes unless it is one plain word.
struct Quoted<'a>(&'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._/@^+:".contains(&byte);
        if !self.0.is_empty() && self.0.bytes().all(plain) {
            f.write_str(self.0)
        } else {
            write!(f, "{}", Value::from(self.0))
        }
    }
}
