//! What is counted, as lines for statsd and dogstatsd: what has been added since the last lines that arrived.

use std::collections::HashMap;
use std::fmt::Write as _;

use regex::Regex;

use super::histogram::Observed;
use super::{Metrics, Sample, SampleValue};

/// The response times of the one method that is timed.
const RESPONSE_TIME: &str = "ratelimit_server.ShouldRateLimit.response_time";

/// How lines look.
#[derive(Debug, Clone)]
pub enum Format {
    /// `name.__tag=value:1|c`, as envoyproxy/ratelimit writes for plain statsd.
    Statsd,
    /// `name:1|c|#tag:value`. Names are first rewritten by the first mogrifier that fits.
    DogStatsd(Vec<Mogrifier>),
}

/// Makes tags of parts of a name.
#[derive(Debug, Clone)]
pub struct Mogrifier {
    /// Which names it is for.
    pub pattern: Regex,
    /// The name, with `$1` for what the first group of the pattern has matched.
    pub name: String,
    /// Tags and their values, which may refer to groups as well.
    pub tags: Vec<(String, String)>,
}

/// How far the receiver has been told.
#[derive(Debug, Default)]
pub struct Told {
    counters: HashMap<String, u64>,
    response_times: Observed,
}

/// Makes lines.
#[derive(Debug, Clone)]
pub struct Lines {
    /// How they look.
    pub format: Format,
    /// On every line; sorted by their names.
    pub tags: Vec<(String, String)>,
}

impl Lines {
    /// What has been counted since `told`, one line for each thing, and what will have been told once they have arrived.
    pub fn since(&self, told: &Told, metrics: &Metrics, samples: Vec<Sample>) -> (Vec<String>, Told) {
        let mut lines = Vec::new();
        let mut next = Told {
            response_times: metrics.response_time.observed(),
            ..Told::default()
        };
        for Sample { name, value } in samples {
            match value {
                SampleValue::Gauge(value) => lines.push(self.line(&name, &format!("{value}|g"))),
                SampleValue::Counter(value) => {
                    // A counter that is smaller than before started again.
                    let before = told.counters.get(&name).copied().unwrap_or(0);
                    let added = value.checked_sub(before).unwrap_or(value);
                    if added > 0 {
                        lines.push(self.line(&name, &format!("{added}|c")));
                    }
                    next.counters.insert(name, value);
                }
            }
        }
        for (milliseconds, count) in next.response_times.milliseconds_since(&told.response_times) {
            // One line stands for all calls that took as long.
            let rate = if count > 1 {
                format!("|@{}", 1.0 / count as f64)
            } else {
                String::new()
            };
            lines.push(self.line(RESPONSE_TIME, &format!("{milliseconds}|ms{rate}")));
        }
        (lines, next)
    }

    fn line(&self, name: &str, value: &str) -> String {
        let mogrifiers = match &self.format {
            Format::Statsd => {
                let mut line = name.to_owned();
                for (tag, value) in &self.tags {
                    write!(line, ".__{tag}={}", value.replace(['.', ':', '|'], "_"))
                        .expect("a string takes everything");
                }
                return format!("{line}:{value}");
            }
            Format::DogStatsd(mogrifiers) => mogrifiers,
        };
        let fits = mogrifiers
            .iter()
            .find_map(|mogrifier| Some((mogrifier, mogrifier.pattern.captures(name)?)));
        let (name, mut tags) = match fits {
            Some((mogrifier, groups)) => {
                let expand = |template: &str| {
                    let mut text = String::new();
                    groups.expand(&braced(template), &mut text);
                    text
                };
                let tags = mogrifier
                    .tags
                    .iter()
                    .map(|(tag, value)| (expand(tag), expand(value)));
                (expand(&mogrifier.name), tags.collect())
            }
            None => (name.to_owned(), Vec::new()),
        };
        tags.extend(self.tags.iter().cloned());
        let mut line = format!("{name}:{value}");
        for (i, (tag, value)) in tags.iter().enumerate() {
            let before = if i == 0 { "|#" } else { "," };
            write!(line, "{before}{tag}:{value}").expect("a string takes everything");
        }
        line
    }
}

/// `$1_x` means the first group and then `_x`, not a group called `1_x`.
fn braced(template: &str) -> String {
    let mut braced = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find('$') {
        let digits = rest[at + 1..].bytes().take_while(u8::is_ascii_digit).count();
        let end = at + 1 + digits;
        braced.push_str(&rest[..at]);
        if digits > 0 {
            write!(braced, "${{{}}}", &rest[at + 1..end]).expect("a string takes everything");
        } else {
            braced.push_str("$$");
        }
        rest = &rest[end..];
    }
    braced + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(name: &str, value: SampleValue) -> Sample {
        Sample {
            name: name.to_owned(),
            value,
        }
    }

    #[test]
    fn counters_tell_what_was_added_and_gauges_what_is() {
        let lines = Lines {
            format: Format::Statsd,
            tags: vec![("az".into(), "eu.1:a".into())],
        };
        let metrics = Metrics::default();
        let samples = |hits| {
            vec![
                sample("a.hits", SampleValue::Counter(hits)),
                sample("a.keys", SampleValue::Gauge(7)),
            ]
        };
        let (first, told) = lines.since(&Told::default(), &metrics, samples(5));
        assert_eq!(first, ["a.hits.__az=eu_1_a:5|c", "a.keys.__az=eu_1_a:7|g"]);
        let (same, _) = lines.since(&told, &metrics, samples(5));
        assert_eq!(same, ["a.keys.__az=eu_1_a:7|g"]);
        let (more, _) = lines.since(&told, &metrics, samples(8));
        assert_eq!(more[0], "a.hits.__az=eu_1_a:3|c");
        let (again, _) = lines.since(&told, &metrics, samples(2));
        assert_eq!(again[0], "a.hits.__az=eu_1_a:2|c");
    }

    #[test]
    fn one_line_stands_for_all_calls_that_took_as_long() {
        let lines = Lines {
            format: Format::Statsd,
            tags: Vec::new(),
        };
        let metrics = Metrics::default();
        for _ in 0..4 {
            metrics.note_call(std::time::Duration::from_micros(3));
        }
        metrics.note_call(std::time::Duration::from_millis(30));
        let (told, _) = lines.since(&Told::default(), &metrics, Vec::new());
        assert_eq!(
            told,
            [
                format!("{RESPONSE_TIME}:0|ms|@0.25"),
                format!("{RESPONSE_TIME}:25|ms")
            ]
        );
    }

    #[test]
    fn a_mogrifier_makes_tags_of_parts_of_a_name() {
        let mogrifier = |pattern: &str, name: &str, tags: &[(&str, &str)]| Mogrifier {
            pattern: Regex::new(pattern).unwrap(),
            name: name.to_owned(),
            tags: tags
                .iter()
                .map(|(tag, value)| ((*tag).to_owned(), (*value).to_owned()))
                .collect(),
        };
        let lines = Lines {
            format: Format::DogStatsd(vec![
                mogrifier(
                    r"^ratelimit\.service\.rate_limit\.(.*)\.(.*)\.(.*)$",
                    "ratelimit.$3_x",
                    &[("domain", "$1"), ("descriptor", "$2")],
                ),
                mogrifier("rate", "never", &[]),
            ]),
            tags: vec![("az".into(), "eu".into())],
        };
        assert_eq!(
            lines.line("ratelimit.service.rate_limit.shop.user_a.over_limit", "3|c"),
            "ratelimit.over_limit_x:3|c|#domain:shop,descriptor:user_a,az:eu"
        );
        assert_eq!(lines.line("other", "1|g"), "other:1|g|#az:eu");
        assert_eq!(braced("$1_$ $22"), "${1}_$$ ${22}");
    }
}
