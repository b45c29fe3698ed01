//! What is counted, as lines for statsd and dogstatsd: what has been added since the last lines that arrived.

use std::collections::HashMap;
use std::fmt::Write as _;

use regex::Regex;

use super::{Observed, Sample, SampleValue};

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
    times: HashMap<String, Observed>,
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
    pub fn since(&self, told: &Told, samples: Vec<Sample>) -> (Vec<String>, Told) {
        let mut lines = Vec::new();
        let mut next = Told::default();
        for Sample { name, value, .. } in samples {
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
                SampleValue::Time(observed) => {
                    let before = told.times.get(&name).copied().unwrap_or_default();
                    for (milliseconds, count) in observed.milliseconds_since(&before) {
                        lines.push(self.line(&name, &time(milliseconds, count)));
                    }
                    next.times.insert(name, *observed);
                }
            }
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

/// One line stands for all calls that took as long.
fn time(milliseconds: u64, count: u64) -> String {
    match count {
        1 => format!("{milliseconds}|ms"),
        _ => format!("{milliseconds}|ms|@{}", 1.0 / count as f64),
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
    use std::time::Duration;

    use super::super::histogram::Histogram;
    use super::*;

    fn sample(name: &str, value: SampleValue) -> Sample {
        Sample {
            name: name.to_owned(),
            metric_key: None,
            value,
        }
    }

    #[test]
    fn counters_tell_what_was_added_and_gauges_what_is() {
        let lines = Lines {
            format: Format::Statsd,
            tags: vec![("az".into(), "eu.1:a".into())],
        };
        let samples = |hits| {
            vec![
                sample("a.hits", SampleValue::Counter(hits)),
                sample("a.keys", SampleValue::Gauge(7)),
            ]
        };
        let (first, told) = lines.since(&Told::default(), samples(5));
        assert_eq!(first, ["a.hits.__az=eu_1_a:5|c", "a.keys.__az=eu_1_a:7|g"]);
        let (same, _) = lines.since(&told, samples(5));
        assert_eq!(same, ["a.keys.__az=eu_1_a:7|g"]);
        let (more, _) = lines.since(&told, samples(8));
        assert_eq!(more[0], "a.hits.__az=eu_1_a:3|c");
        let (again, _) = lines.since(&told, samples(2));
        assert_eq!(again[0], "a.hits.__az=eu_1_a:2|c");
    }

    #[test]
    fn one_line_stands_for_all_calls_that_took_as_long() {
        let lines = Lines {
            format: Format::Statsd,
            tags: Vec::new(),
        };
        let times = Histogram::default();
        for micros in [3, 3, 3, 3, 30_000] {
            times.observe(Duration::from_micros(micros));
        }
        let samples = || vec![sample("t", SampleValue::Time(Box::new(times.observed())))];
        let (lines_of_all, told) = lines.since(&Told::default(), samples());
        assert_eq!(lines_of_all, ["t:0|ms|@0.25", "t:25|ms"]);
        times.observe(Duration::from_millis(6));
        assert_eq!(lines.since(&told, samples()).0, ["t:5|ms"]);
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
