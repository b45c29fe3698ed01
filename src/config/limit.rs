//! `rate_limit` as written, checked and compiled.
//!
//! Keys that mean nothing together are refused; which ones is said in README.

use std::num::NonZeroU32;
use std::time::Duration;

use jiff::tz::TimeZone;

use super::diagnostic::{Diagnostics, Place, nearest};
use super::fields::{At, BACKOFF, BAN, BURST, Fields, ON_EXCEEDED, RATE_LIMIT, REPLACES, Reading};
use super::yaml::{NodeRef, Position};
use crate::rate_limit::{
    Algorithm, Ban, BanDuration, Calendar, Charge, OnExceeded, RateLimit, Unit, Window, WindowStart,
};

/// The longest window that is not counted by the clock, in milliseconds: 100 years of 365 days.
const LONGEST_WINDOW: u64 = 100 * 365 * 86_400_000;

/// The units that a rule file may name.
const UNITS: &str =
    "second, minute, hour, day, week, month or year, or a length such as 500ms, 10s, 15m, 5h or 3d";

/// A `rate_limit` mapping, read.
pub(super) struct WrittenLimit {
    /// `None` if it is unlimited.
    pub(super) limit: Option<RateLimit>,
    /// Names of the limits that it replaces.
    pub(super) replaces: Vec<Box<str>>,
}

/// Reads one `rate_limit` mapping.
pub(super) struct LimitReader<'l, 'r> {
    pub(super) reading: &'l mut Reading<'r>,
    pub(super) place: Place<'l>,
    /// What the domain says about refused calls.
    pub(super) charge: Option<Charge>,
}

impl LimitReader<'_, '_> {
    /// Reads the mappings at `nodes` as one. `None` if there is an error.
    pub(super) fn read(mut self, nodes: &[NodeRef]) -> Option<WrittenLimit> {
        let fields = self.reading.joined_mapping(&self.place, nodes, &RATE_LIMIT)?;
        let name = self.text(&fields, "name");
        let replaces = self.replaces(&fields, name.as_ref().map(|name| name.value.as_str()));
        let unlimited = self.reading.bool(&self.place, &fields, "unlimited");
        if unlimited == Some(true) {
            self.check_unlimited(&fields);
            return Some(WrittenLimit {
                limit: None,
                replaces,
            });
        }
        let limit = self.limit(&fields);
        let (burst, ban) = (self.burst(&fields), self.ban(&fields));
        let limit = RateLimit {
            name: name?.value.into(),
            burst,
            ban,
            ..limit?
        };
        unlimited?;
        Some(WrittenLimit {
            limit: Some(limit),
            replaces,
        })
    }

    fn check_unlimited(&mut self, fields: &Fields) {
        // A unit that does not exist is let be, as by envoyproxy/ratelimit.
        let has_unit = Unit::from_name(self.reading.shown_text(fields, "unit")).is_some();
        let given = RATE_LIMIT
            .added_keys
            .iter()
            .filter(|key| fields.has(key))
            .chain(["unit"].iter().filter(|_| has_unit));
        for key in given {
            let position = fields.position_of(key);
            let fault = format!("an unlimited limit has no {key}");
            self.error(position, fault, format!("take out {key}, or unlimited"));
        }
    }

    /// What is common to a limit and to its burst.
    fn limit(&mut self, fields: &Fields) -> Option<RateLimit> {
        let unit = self.unit(fields);
        let multiplier = self.number(fields, "unit_multiplier", 1);
        let requests_per_unit = self.number(fields, "requests_per_unit", 0);
        let name = self.choice(
            fields,
            "algorithm",
            &["fixed_window", "sliding_window", "token_bucket"],
        );
        self.check_algorithm_keys(fields, name?);
        let window = self.window(fields, unit?, multiplier?)?;
        let algorithm = match name? {
            0 => Algorithm::FixedWindow(self.window_start(fields, window)?),
            1 => Algorithm::SlidingWindow,
            _ => {
                let burst_size = self.number(fields, "burst_size", 1)?;
                let burst_size = burst_size.or(requests_per_unit?).unwrap_or(0);
                Algorithm::TokenBucket { burst_size }
            }
        };
        let by_clock = matches!(
            algorithm,
            Algorithm::FixedWindow(WindowStart::Clock | WindowStart::Calendar(_))
        );
        if !by_clock && window.milliseconds() > LONGEST_WINDOW {
            let fault = "a window of more than 100 years";
            self.error(fields.position_of("unit"), fault, "write a shorter one");
        }
        let charge_refused = match fields.has("charge_refused") {
            true => self.reading.bool(&self.place, fields, "charge_refused")?,
            false => matches!(algorithm, Algorithm::FixedWindow(_)),
        };
        self.check_on_exceeded(fields, &algorithm, charge_refused);
        if charge_refused && fields.has("charge_refused") && self.charge == Some(Charge::AllOrNothing) {
            let fault = "charge_refused: true means nothing in a domain with charge: all_or_nothing";
            self.error(
                fields.position_of("charge_refused"),
                fault,
                "take out one of them",
            );
        }
        self.check_requests_per_unit(fields, &algorithm, requests_per_unit?);
        Some(RateLimit {
            algorithm,
            charge_refused,
            ..RateLimit::per_window(window, requests_per_unit?.unwrap_or(0))
        })
    }

    /// Reports the keys that belong to another algorithm.
    fn check_algorithm_keys(&mut self, fields: &Fields, algorithm: usize) {
        let (name, foreign): (_, &[&str]) = match algorithm {
            0 => ("fixed_window", &["burst_size"]),
            1 => (
                "sliding_window",
                &["burst_size", "window_start", "time_zone", "on_exceeded"],
            ),
            _ => ("token_bucket", &["window_start", "time_zone", "on_exceeded"]),
        };
        for key in foreign.iter().filter(|key| fields.has(key)) {
            let home = if *key == "burst_size" {
                "token_bucket"
            } else {
                "fixed_window"
            };
            let fault = format!("{key} means nothing for algorithm: {name}");
            let advice = format!("take it out, or write algorithm: {home}");
            self.error(fields.position_of(key), fault, advice);
        }
    }

    /// Reports limits by which nothing ever passes, unless that is what they say.
    fn check_requests_per_unit(&mut self, fields: &Fields, algorithm: &Algorithm, given: Option<u32>) {
        let position = fields.position_of("requests_per_unit");
        if matches!(algorithm, Algorithm::TokenBucket { .. }) && given.unwrap_or(0) == 0 {
            let fault = "a token_bucket needs requests_per_unit: it would never be filled again";
            self.error(position, fault, "write a number from 1 on");
        } else if given.is_none() && (fields.has("requests_per_unit") || fields.lacks("requests_per_unit")) {
            let fault = "without requests_per_unit nothing passes";
            let advice = "add it; write requests_per_unit: 0 if that is what you want";
            self.reading
                .diagnostics
                .warning(&self.place, position, fault, advice);
        }
    }

    // === windows ===

    /// The length that `unit` stands for. `None` if there is an error.
    fn unit(&mut self, fields: &Fields) -> Option<Window> {
        let unit = self.text(fields, "unit")?;
        if let Some(named) = Unit::from_name(&unit.value) {
            return Some(Window::of_units(named, NonZeroU32::MIN));
        }
        let length = length_milliseconds(&unit.value).and_then(Window::of_milliseconds);
        match length {
            Some(window) => {
                self.refuse_disguised_unit(&unit, window);
                Some(window)
            }
            None => {
                if fields.has("unit") || fields.lacks("unit") {
                    self.report_unit(fields, &unit);
                }
                None
            }
        }
    }

    /// A length that has a name is to be written by its name: one thing, one word. Months and years are not meant here,
    /// whose lengths people think of differently.
    fn refuse_disguised_unit(&mut self, unit: &At<String>, window: Window) {
        if let Some((named, NonZeroU32::MIN)) = window.units()
            && !matches!(named, Unit::Month | Unit::Year)
        {
            let name = named.name().to_lowercase();
            let fault = format!("unit \"{}\" is a {name}", unit.value);
            self.error(unit.position, fault, format!("write unit: {name}"));
        }
    }

    fn report_unit(&mut self, fields: &Fields, unit: &At<String>) {
        let legal = Unit::ALL.map(|unit| unit.name().to_lowercase());
        if unit.value.is_empty() {
            let fault = if fields.has("unit") {
                "unit is empty"
            } else {
                "there is no unit"
            };
            self.error(unit.position, fault, format!("write unit: and one of {UNITS}"));
            return;
        }
        let word = unit.value.trim().to_lowercase();
        let meant = abbreviated(&word).or_else(|| nearest(&word, legal.iter().map(String::as_str)));
        let advice = match meant {
            Some(meant) => format!("did you mean {meant}?"),
            None => format!("write {UNITS}"),
        };
        self.error(
            unit.position,
            format!("unit \"{}\" is not known", unit.value),
            advice,
        );
    }

    fn window(&mut self, fields: &Fields, unit: Window, multiplier: Option<u32>) -> Option<Window> {
        let Some(multiplier) = multiplier.and_then(NonZeroU32::new) else {
            return Some(unit);
        };
        let window = match unit.units() {
            Some((named, NonZeroU32::MIN)) => Some(Window::of_units(named, multiplier)),
            _ => unit
                .milliseconds()
                .checked_mul(u64::from(multiplier.get()))
                .and_then(Window::of_milliseconds),
        };
        if window.is_none() {
            let fault = "unit times unit_multiplier is too long";
            self.error(
                fields.position_of("unit_multiplier"),
                fault,
                "write a shorter window",
            );
        }
        window
    }

    fn window_start(&mut self, fields: &Fields, window: Window) -> Option<WindowStart> {
        let from_first_hit = self.choice(fields, "window_start", &["clock", "first_hit"])? == 1;
        let on_exceeded = self.on_exceeded(fields);
        if fields.has("time_zone") {
            return self
                .calendar(fields, window, from_first_hit)
                .map(|calendar| WindowStart::Calendar(Box::new(calendar)));
        }
        if !from_first_hit {
            return Some(WindowStart::Clock);
        }
        let on_exceeded = on_exceeded?;
        if let OnExceeded::Backoff { max_milliseconds, .. } = on_exceeded
            && max_milliseconds < window.milliseconds()
        {
            let fault = "max is shorter than the window, so that a refused hit would shorten it";
            let advice = "write at least the window's length, or take max out";
            self.error(fields.position_of("on_exceeded"), fault, advice);
        }
        Some(WindowStart::FirstHit(on_exceeded))
    }

    fn calendar(&mut self, fields: &Fields, window: Window, from_first_hit: bool) -> Option<Calendar> {
        let position = fields.position_of("time_zone");
        let name = self.text(fields, "time_zone")?;
        if from_first_hit {
            let fault = "time_zone means nothing for windows that start at the first hit";
            self.error(position, fault, "take out time_zone, or window_start: first_hit");
        }
        let unit = match window.units() {
            Some((unit @ (Unit::Day | Unit::Week | Unit::Month | Unit::Year), NonZeroU32::MIN))
                if Unit::from_name(self.reading.shown_text(fields, "unit")).is_some() =>
            {
                Some(unit)
            }
            _ => {
                let fault = "time_zone needs a single day, week, month or year";
                self.error(
                    position,
                    fault,
                    "write one of these as unit, without unit_multiplier",
                );
                None
            }
        };
        let zone = match TimeZone::get(&name.value) {
            Ok(zone) => Some(zone),
            Err(_) => {
                let known: Vec<String> = jiff::tz::db().available().map(|zone| zone.to_string()).collect();
                let advice = match nearest(&name.value, known.iter().map(String::as_str)) {
                    Some(meant) => format!("did you mean {meant}?"),
                    None => "write an IANA name such as Europe/Berlin".to_owned(),
                };
                self.error(
                    name.position,
                    format!("time zone \"{}\" is not known", name.value),
                    advice,
                );
                None
            }
        };
        Some(Calendar {
            unit: unit?,
            zone: zone?,
        })
    }

    // === what happens to refused calls ===

    fn on_exceeded(&mut self, fields: &Fields) -> Option<OnExceeded> {
        let Some(node) = self.reading.value(fields, "on_exceeded") else {
            return Some(OnExceeded::Keep);
        };
        if !self.reading.is_mapping(node) {
            return match self.choice(fields, "on_exceeded", &["keep", "renew_window"])? {
                0 => Some(OnExceeded::Keep),
                _ => Some(OnExceeded::RenewWindow),
            };
        }
        let outer = self.reading.mapping(&self.place, node, &ON_EXCEEDED)?;
        let Some(node) = self.reading.value(&outer, "backoff") else {
            let fault = "on_exceeded says nothing";
            self.error(
                outer.position,
                fault,
                "write keep, renew_window or {backoff: {factor: 2, max: 24h}}",
            );
            return None;
        };
        let backoff = self.reading.mapping(&self.place, node, &BACKOFF)?;
        let factor = self.reading.float(&self.place, &backoff, "factor");
        let max = self.length(&backoff, "max");
        let factor = factor?.unwrap_or(2.0);
        if !(1.0..=1_000_000.0).contains(&factor) {
            let fault = format!("factor must be from 1 to 1000000, not {factor}");
            self.error(
                backoff.position_of("factor"),
                fault,
                "2 doubles the wait with each refused hit",
            );
            return None;
        }
        let max_milliseconds = max?.unwrap_or(LONGEST_WINDOW);
        Some(OnExceeded::Backoff {
            factor,
            max_milliseconds,
        })
    }

    fn check_on_exceeded(&mut self, fields: &Fields, algorithm: &Algorithm, charge_refused: bool) {
        let is_active = self.reading.value(fields, "on_exceeded").is_some()
            && self.reading.shown_text(fields, "on_exceeded") != "keep";
        if !is_active || !matches!(algorithm, Algorithm::FixedWindow(_)) {
            return;
        }
        let position = fields.position_of("on_exceeded");
        if !matches!(algorithm, Algorithm::FixedWindow(WindowStart::FirstHit(_))) {
            let fault = "on_exceeded means nothing for windows of the clock: they end when the clock says";
            self.error(
                position,
                fault,
                "add window_start: first_hit, or take on_exceeded out",
            );
        }
        if !charge_refused {
            let fault = "on_exceeded means nothing where refused calls are not charged";
            self.error(position, fault, "take out charge_refused: false, or on_exceeded");
        }
        if self.charge == Some(Charge::AllOrNothing) {
            let fault = "on_exceeded means nothing in a domain with charge: all_or_nothing";
            self.error(position, fault, "take out one of them");
        }
    }

    fn burst(&mut self, fields: &Fields) -> Option<Box<RateLimit>> {
        let node = self.reading.value(fields, "burst")?;
        let burst = self.reading.mapping(&self.place, node, &BURST)?;
        Some(Box::new(self.limit(&burst)?))
    }

    fn ban(&mut self, fields: &Fields) -> Option<Ban> {
        let node = self.reading.value(fields, "ban")?;
        let ban = self.reading.mapping(&self.place, node, &BAN)?;
        let after = self.number(&ban, "after", 0)?;
        if after.is_none() {
            let fault = "the ban does not say after how many refusals";
            self.error(
                ban.position,
                fault,
                "write after: 0 to ban at the first refusal, after: 3 to allow three",
            );
        }
        let lasts = match self.reading.shown_text(&ban, "for") {
            "" | "window" => BanDuration::Window,
            _ => BanDuration::For(Duration::from_millis(self.length(&ban, "for")??)),
        };
        Some(Ban { after: after?, lasts })
    }

    fn replaces(&mut self, fields: &Fields, own_name: Option<&str>) -> Vec<Box<str>> {
        let mut names = Vec::new();
        for node in self.reading.mappings(&self.place, fields, "replaces") {
            let Some(entry) = self.reading.mapping(&self.place, node, &REPLACES) else {
                continue;
            };
            let Some(name) = self.text(&entry, "name") else {
                continue;
            };
            if name.value.is_empty() {
                let advice = "write replaces: [{name: NAME}] with the name of the rule to drop";
                self.error(entry.position, "an entry of replaces has no name", advice);
            } else if own_name == Some(name.value.as_str()) {
                let fault = format!("the rule replaces itself: '{}' is its own name", name.value);
                self.error(name.position, fault, "name another rule, or take replaces out");
            }
            names.push(name.value.into());
        }
        names
    }

    // === values ===

    fn text(&mut self, fields: &Fields, key: &str) -> Option<At<String>> {
        self.reading.text(&self.place, fields, key)
    }

    /// The number of `key`; inside, `None` if the key is absent or has no value. `None` if there is an error.
    fn number(&mut self, fields: &Fields, key: &str, least: u32) -> Option<Option<u32>> {
        self.reading.u32(&self.place, fields, key, least)
    }

    /// Which of `words` the text of `key` is; the first if the key is absent. `None` if there is an error.
    fn choice(&mut self, fields: &Fields, key: &str, words: &[&str]) -> Option<usize> {
        let text = self.text(fields, key)?;
        if text.value.is_empty() {
            return Some(0);
        }
        let place = words.iter().position(|word| *word == text.value);
        if place.is_none() {
            let advice = match nearest(&text.value, words.iter().copied()) {
                Some(meant) => format!("did you mean {meant}?"),
                None => format!("write {}", words.join(" or ")),
            };
            self.error(
                text.position,
                format!("{key} \"{}\" is not known", text.value),
                advice,
            );
        }
        place
    }

    /// The length of `key` in milliseconds; inside, `None` if the key is absent. `None` if there is an error.
    fn length(&mut self, fields: &Fields, key: &str) -> Option<Option<u64>> {
        let text = self.text(fields, key)?;
        if text.value.is_empty() {
            return Some(None);
        }
        let length = length_milliseconds(&text.value).filter(|length| (1..=LONGEST_WINDOW).contains(length));
        if length.is_none() {
            let fault = format!("{key} \"{}\" is no length of time", text.value);
            self.error(
                text.position,
                fault,
                "write a number with a unit, such as 500ms, 10s, 15m, 5h or 3d",
            );
        }
        length.map(Some)
    }

    fn error(&mut self, position: Position, fault: impl Into<String>, advice: impl Into<String>) {
        let diagnostics: &mut Diagnostics = self.reading.diagnostics;
        diagnostics.error(&self.place, position, fault, advice);
    }
}

/// The unit that people mean by words which are not near enough to its name.
fn abbreviated(word: &str) -> Option<&'static str> {
    match word {
        "s" | "sec" | "secs" => Some("second"),
        "m" | "min" | "mins" => Some("minute"),
        "h" | "hr" | "hrs" | "hourly" => Some("hour"),
        "d" | "daily" => Some("day"),
        "w" | "weekly" => Some("week"),
        "monthly" => Some("month"),
        "yearly" | "annual" => Some("year"),
        _ => None,
    }
}

/// A whole number with one of the units ms, s, m, h and d, in milliseconds.
fn length_milliseconds(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (count, unit) = text.split_at(digits);
    let milliseconds = match unit {
        "ms" => 1,
        "s" => 1_000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return None,
    };
    count.parse::<u64>().ok()?.checked_mul(milliseconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_whole_numbers_with_a_unit() {
        #[track_caller]
        fn test(text: &str, expected: Option<u64>) {
            assert_eq!(length_milliseconds(text), expected, "{text}");
        }
        test("500ms", Some(500));
        test("10s", Some(10_000));
        test("15m", Some(900_000));
        test("5h", Some(18_000_000));
        test("30d", Some(2_592_000_000));
        for wrong in [
            "",
            "10",
            "s",
            "1.5s",
            "-1s",
            "1w",
            "1h30m",
            "10 s",
            "99999999999999999999s",
            "18446744073709551615d",
        ] {
            test(wrong, None);
        }
    }
}
