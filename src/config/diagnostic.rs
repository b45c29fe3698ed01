//! What is wrong with a rule file, where, and what to write instead.

use std::fmt;
use std::sync::Arc;

use super::yaml::Position;

/// One fault or doubt in a rule file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    severity: Severity,
    file: Arc<str>,
    position: Position,
    /// Where in the tree of descriptors: `shop.path_/x.rate_limit.unit`; may be empty.
    path: String,
    /// What is wrong.
    fault: String,
    /// What to write instead; may be empty.
    advice: String,
}

/// Whether a file with this fault can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// It cannot.
    Error,
    /// It can, but probably does not mean what its author thinks.
    Warning,
}

/// `file:line:column: path: fault; advice`, with `warning: ` after the place of a warning.
impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}:{}: ",
            self.file, self.position.line, self.position.column
        )?;
        if self.severity == Severity::Warning {
            f.write_str("warning: ")?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.fault)?;
        if !self.advice.is_empty() {
            write!(f, "; {}", self.advice)?;
        }
        Ok(())
    }
}

/// Everything found in a set of rule files.
#[derive(Debug, Default)]
pub struct Diagnostics {
    all: Vec<Diagnostic>,
}

impl Diagnostics {
    pub(super) fn error(
        &mut self,
        place: &Place<'_>,
        position: Position,
        fault: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.push(Severity::Error, place, position, fault.into(), advice.into());
    }

    pub(super) fn warning(
        &mut self,
        place: &Place<'_>,
        position: Position,
        fault: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.push(Severity::Warning, place, position, fault.into(), advice.into());
    }

    fn push(
        &mut self,
        severity: Severity,
        place: &Place<'_>,
        position: Position,
        fault: String,
        advice: String,
    ) {
        let file = Arc::clone(place.file);
        let path = place.path.to_owned();
        self.all.push(Diagnostic {
            severity,
            file,
            position,
            path,
            fault,
            advice,
        });
    }

    /// The faults, in the order of files and lines.
    pub fn errors(&self) -> impl Iterator<Item = &Diagnostic> {
        self.of(Severity::Error)
    }

    /// The doubts, in the order of files and lines.
    pub fn warnings(&self) -> impl Iterator<Item = &Diagnostic> {
        self.of(Severity::Warning)
    }

    fn of(&self, severity: Severity) -> impl Iterator<Item = &Diagnostic> {
        self.all
            .iter()
            .filter(move |diagnostic| diagnostic.severity == severity)
    }

    /// Orders by place; what an alias makes true at several places of the tree is said once.
    pub(super) fn sort(&mut self) {
        let place = |diagnostic: &Diagnostic| (Arc::clone(&diagnostic.file), diagnostic.position);
        self.all
            .sort_by(|a, b| (place(a), &a.fault, &a.path).cmp(&(place(b), &b.fault, &b.path)));
        self.all
            .dedup_by(|a, b| (place(a), &a.fault) == (place(b), &b.fault));
    }
}

/// Where in which file the reading is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place<'a> {
    pub(super) file: &'a Arc<str>,
    /// As in [`Diagnostic`].
    pub(super) path: &'a str,
}

/// The legal word that `word` was probably meant to be.
pub(crate) fn nearest<'w>(word: &str, legal: impl IntoIterator<Item = &'w str>) -> Option<&'w str> {
    let lower = word.to_lowercase();
    legal
        .into_iter()
        .map(|legal| (strsim::osa_distance(&lower, &legal.to_lowercase()), legal))
        .filter(|(distance, legal)| *distance <= 1.max(legal.len() / 4))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, legal)| legal)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typos_find_the_word_that_was_meant() {
        let legal = [
            "key",
            "value",
            "rate_limit",
            "unlimited",
            "requests_per_unit",
            "unit",
        ];
        #[track_caller]
        fn test(word: &str, legal: &[&str], expected: Option<&str>) {
            assert_eq!(nearest(word, legal.iter().copied()), expected, "{word}");
        }
        test("unlimied", &legal, Some("unlimited"));
        test("Value", &legal, Some("value"));
        test("ratelimit", &legal, Some("rate_limit"));
        test("request_per_unit", &legal, Some("requests_per_unit"));
        test("units", &legal, Some("unit"));
        test("burst", &legal, None);
    }
}
