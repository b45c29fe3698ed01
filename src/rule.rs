//! A rule: what a place in the tree of descriptors limits, and how it got there.

mod metric_key;

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use ipnet::IpNet;
use smallvec::SmallVec;

pub(crate) use self::metric_key::of_override as override_metric_key;
pub use self::metric_key::{MetricKey, sanitize as sanitize_metric_key};
use crate::rate_limit::RateLimit;
use crate::statistics::Totals;

/// Free-form data that a rule carries and that passed requests get back.
pub type Metadata = serde_json::Map<String, serde_json::Value>;

/// A node of the tree of descriptors that has a limit.
#[derive(Debug)]
pub struct Rule {
    /// How much is allowed.
    pub limit: Limit,
    /// Names of the limits that do not apply to a request to which this rule does.
    pub replaces: Box<[Box<str>]>,
    /// Counted, but never refused.
    pub shadow_mode: bool,
    /// A soft limit: the request is refused only if all its soft limits are over.
    pub quota_mode: bool,
    /// Statistics are kept per value of the request.
    pub detailed_metric: bool,
    /// Returned for requests that pass.
    pub metadata: Option<Metadata>,
    /// The way from the root of the tree to this rule, one level per entry of a descriptor.
    pub levels: Levels,
    /// Domain and levels, joined by dots: `shop.path_/x.verb_get`.
    pub path: Box<str>,
    /// What was counted of it, unless its metric key depends on the request. Rules that are loaded again go on with it.
    pub totals: Arc<Totals>,
}

impl Rule {
    /// Its limits; none if it is unlimited.
    pub fn limits(&self) -> &[RateLimit] {
        match &self.limit {
            Limit::Unlimited => &[],
            Limit::All(limits) => limits,
        }
    }

    pub(crate) fn path(domain: &str, levels: &[Level]) -> Box<str> {
        let mut path = String::from(domain);
        for level in levels {
            path.push('.');
            path.push_str(&level.to_string());
        }
        path.into()
    }
}

/// What a rule allows.
#[derive(Debug, PartialEq)]
pub enum Limit {
    /// Everything.
    Unlimited,
    /// So much per window, by each of these, of which there is at least one.
    All(SmallVec<[RateLimit; 1]>),
}

/// `unlimited`, or the limits with `and` between them.
impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Limit::Unlimited => f.write_str("unlimited"),
            Limit::All(limits) => {
                for (i, limit) in limits.iter().enumerate() {
                    write!(f, "{}{limit}", if i > 0 { " and " } else { "" })?;
                }
                Ok(())
            }
        }
    }
}

/// The levels to a rule. What a decision has to know of them all it knows without looking at each.
#[derive(Debug)]
pub struct Levels {
    levels: Box<[Level]>,
    any_shared: bool,
    any_value_in_metric: bool,
}

impl From<&[Level]> for Levels {
    fn from(levels: &[Level]) -> Self {
        Levels {
            levels: levels.into(),
            any_shared: levels.iter().any(|level| level.share_threshold),
            any_value_in_metric: levels.iter().any(|level| level.value_to_metric),
        }
    }
}

impl Deref for Levels {
    type Target = [Level];

    fn deref(&self) -> &[Level] {
        &self.levels
    }
}

impl Levels {
    /// The pattern that stands for the request's value at a level in the counter, if all its values share one.
    pub(crate) fn shared_pattern(&self, level: usize) -> Option<&str> {
        self.any_shared.then(|| self.levels[level].shared_pattern())?
    }

    /// Whether any values of a level share a counter.
    pub(crate) fn any_shared(&self) -> bool {
        self.any_shared
    }

    /// Whether the request's value at any level becomes part of the key of the statistics.
    pub(crate) fn any_value_in_metric(&self) -> bool {
        self.any_value_in_metric
    }
}

/// One level of the way to a rule.
#[derive(Debug, Clone, PartialEq)]
pub struct Level {
    /// The entry's key.
    pub key: Box<str>,
    /// Which values of the entry fit.
    pub value: LevelValue,
    /// That as written; networks with commas between them.
    pub pattern: Box<str>,
    /// All values that fit the wildcard share one counter.
    pub share_threshold: bool,
    /// The request's value becomes part of the key of the statistics.
    pub value_to_metric: bool,
}

impl Level {
    /// A level without flags.
    pub(crate) fn new(key: &str, value: LevelValue) -> Self {
        let pattern = match &value {
            LevelValue::Any => String::new(),
            LevelValue::Exact(value) | LevelValue::Wildcard(value) => value.to_string(),
            LevelValue::Networks(networks) => {
                let networks: Vec<String> = networks.iter().map(ToString::to_string).collect();
                networks.join(",")
            }
        };
        Level {
            key: key.into(),
            value,
            pattern: pattern.into(),
            share_threshold: false,
            value_to_metric: false,
        }
    }

    /// The pattern that stands for the request's value in the counter, if all its values share one.
    fn shared_pattern(&self) -> Option<&str> {
        self.share_threshold.then_some(&*self.pattern)
    }
}

/// `key`, or `key_value` with the value or pattern as written.
impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.key)?;
        match &self.value {
            LevelValue::Any => Ok(()),
            _ => write!(f, "_{}", self.pattern),
        }
    }
}

/// The values that a level fits.
#[derive(Debug, Clone, PartialEq)]
pub enum LevelValue {
    /// Every value that no sibling of the same key fits.
    Any,
    /// This value.
    Exact(Box<str>),
    /// Every value that this pattern with `*` fits.
    Wildcard(Box<str>),
    /// Every address in these networks.
    Networks(Box<[IpNet]>),
}

impl LevelValue {
    /// What a `value` in a rule file means; an empty one means any.
    pub(crate) fn parse(value: &str) -> LevelValue {
        match value {
            "" => LevelValue::Any,
            value if value.contains('*') => LevelValue::Wildcard(value.into()),
            value => LevelValue::Exact(value.into()),
        }
    }
}
