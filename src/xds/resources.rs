//! Rules as an xDS server sends them, written as rule files: JSON is YAML, and so there is one grammar, one validation and one way
//! to say what is wrong.

use prost::Message as _;
use prost_types::value::Kind;
use prost_types::{Any, Struct, Value};
use serde_json::{Map, Number, Value as Json, json};
use thiserror::Error;

use crate::config::source::SourceFile;
use crate::proto::xds::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};

/// The type of the resources.
pub(super) const TYPE_URL: &str = "type.googleapis.com/ratelimit.config.ratelimit.v3.RateLimitConfig";

/// A resource is something else than rules.
#[derive(Debug, Error)]
pub(super) enum InvalidResource {
    #[error("resource {number} is a {type_url}, not a {TYPE_URL}")]
    Type { number: usize, type_url: String },
    #[error("resource {number} cannot be decoded: {source}")]
    Malformed {
        number: usize,
        source: prost::DecodeError,
    },
}

/// A rule file for each resource, in the order of their names.
pub(super) fn files(resources: &[Any]) -> Result<Vec<SourceFile>, InvalidResource> {
    let mut files = Vec::new();
    for (i, resource) in resources.iter().enumerate() {
        let number = i + 1;
        if resource.type_url != TYPE_URL {
            return Err(InvalidResource::Type {
                number,
                type_url: resource.type_url.clone(),
            });
        }
        let config = RateLimitConfig::decode(&*resource.value)
            .map_err(|source| InvalidResource::Malformed { number, source })?;
        files.push(SourceFile {
            text: config_json(&config).to_string(),
            name: config.name,
        });
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(files)
}

fn config_json(config: &RateLimitConfig) -> Json {
    let mut json = Map::new();
    json.insert("domain".into(), config.domain.clone().into());
    json.insert("descriptors".into(), descriptors_json(&config.descriptors));
    json.into()
}

fn descriptors_json(descriptors: &[RateLimitDescriptor]) -> Json {
    descriptors.iter().map(descriptor_json).collect()
}

/// What has its default value is left out: so it is in a file.
fn descriptor_json(descriptor: &RateLimitDescriptor) -> Json {
    let mut json = Map::new();
    json.insert("key".into(), descriptor.key.clone().into());
    if !descriptor.value.is_empty() {
        json.insert("value".into(), descriptor.value.clone().into());
    }
    if let Some(policy) = &descriptor.rate_limit {
        json.insert("rate_limit".into(), policy_json(policy));
    }
    if !descriptor.descriptors.is_empty() {
        json.insert("descriptors".into(), descriptors_json(&descriptor.descriptors));
    }
    for (flag, is_on) in [
        ("shadow_mode", descriptor.shadow_mode),
        ("detailed_metric", descriptor.detailed_metric),
        ("quota_mode", descriptor.quota_mode),
    ] {
        if is_on {
            json.insert(flag.into(), true.into());
        }
    }
    if let Some(metadata) = &descriptor.metadata {
        json.insert("metadata".into(), struct_json(metadata));
    }
    json.into()
}

fn policy_json(policy: &RateLimitPolicy) -> Json {
    let mut json = Map::new();
    if policy.unlimited {
        json.insert("unlimited".into(), true.into());
    }
    if !policy.unlimited || policy.unit != RateLimitUnit::Unknown as i32 {
        let unit = RateLimitUnit::try_from(policy.unit).map_or("", |unit| unit.as_str_name());
        json.insert("unit".into(), unit.into());
    }
    if policy.requests_per_unit > 0 {
        json.insert("requests_per_unit".into(), policy.requests_per_unit.into());
    }
    if !policy.name.is_empty() {
        json.insert("name".into(), policy.name.clone().into());
    }
    if !policy.replaces.is_empty() {
        let replaces = policy.replaces.iter().map(|other| json!({ "name": other.name }));
        json.insert("replaces".into(), replaces.collect());
    }
    json.into()
}

fn struct_json(fields: &Struct) -> Json {
    let fields = fields.fields.iter();
    fields
        .map(|(name, value)| (name.clone(), value_json(value)))
        .collect::<Map<_, _>>()
        .into()
}

fn value_json(value: &Value) -> Json {
    match &value.kind {
        None | Some(Kind::NullValue(_)) => Json::Null,
        Some(Kind::NumberValue(number)) => Number::from_f64(*number).map_or(Json::Null, Json::Number),
        Some(Kind::StringValue(text)) => text.clone().into(),
        Some(Kind::BoolValue(truth)) => (*truth).into(),
        Some(Kind::StructValue(fields)) => struct_json(fields),
        Some(Kind::ListValue(list)) => list.values.iter().map(value_json).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::file;
    use crate::proto::xds::ratelimit::config::ratelimit::v3::RateLimitReplace;

    fn any(config: &RateLimitConfig) -> Any {
        Any {
            type_url: TYPE_URL.to_owned(),
            value: config.encode_to_vec(),
        }
    }

    #[test]
    fn everything_that_a_resource_can_say_is_a_rule() {
        let leaf = |key: &str, policy: RateLimitPolicy| RateLimitDescriptor {
            key: key.to_owned(),
            rate_limit: Some(policy),
            ..RateLimitDescriptor::default()
        };
        let per = |unit: RateLimitUnit, requests_per_unit| RateLimitPolicy {
            unit: unit.into(),
            requests_per_unit,
            ..RateLimitPolicy::default()
        };
        let config = RateLimitConfig {
            name: "listener".to_owned(),
            domain: "ns/gateway/http: #1".to_owned(),
            descriptors: vec![
                RateLimitDescriptor {
                    value: "yes".to_owned(),
                    shadow_mode: true,
                    quota_mode: true,
                    detailed_metric: true,
                    metadata: Some(Struct {
                        fields: [(
                            "a".to_owned(),
                            Value {
                                kind: Some(Kind::NumberValue(1.5)),
                            },
                        )]
                        .into(),
                    }),
                    descriptors: vec![leaf("inner*", per(RateLimitUnit::Week, 0))],
                    ..leaf(
                        "k\"\n:",
                        RateLimitPolicy {
                            name: "mine".to_owned(),
                            replaces: vec![RateLimitReplace {
                                name: "other".to_owned(),
                            }],
                            ..per(RateLimitUnit::Month, 7)
                        },
                    )
                },
                leaf(
                    "free",
                    RateLimitPolicy {
                        unlimited: true,
                        ..RateLimitPolicy::default()
                    },
                ),
            ],
        };
        let files = files(&[any(&config)]).unwrap();
        let loaded = file::load(&files, false);
        let loaded =
            loaded.map_err(|diagnostics| diagnostics.errors().map(ToString::to_string).collect::<Vec<_>>());
        let matcher = loaded.unwrap().matcher;
        let domain = matcher.domain(b"ns/gateway/http: #1").unwrap();
        let rules: Vec<String> = domain
            .rules()
            .map(|rule| {
                let (path, limit) = (&rule.path, &rule.limit);
                format!(
                    "{path}: {limit} {} {} {}",
                    rule.shadow_mode,
                    rule.quota_mode,
                    rule.replaces.len()
                )
            })
            .collect();
        assert_eq!(
            rules,
            [
                "ns/gateway/http: #1.k\"\n:_yes: 7 per MONTH true true 1",
                "ns/gateway/http: #1.k\"\n:_yes.inner*: 0 per WEEK false false 0",
                "ns/gateway/http: #1.free: unlimited false false 0",
            ]
        );
    }

    #[test]
    fn what_is_no_rules_is_refused() {
        let other = Any {
            type_url: "type.googleapis.com/envoy.config.cluster.v3.Cluster".to_owned(),
            value: Vec::new(),
        };
        assert!(
            files(&[other])
                .unwrap_err()
                .to_string()
                .contains("resource 1 is a type.googleapis.com/envoy")
        );
        let broken = Any {
            type_url: TYPE_URL.to_owned(),
            value: vec![0xff],
        };
        assert!(
            files(&[broken])
                .unwrap_err()
                .to_string()
                .contains("cannot be decoded")
        );
        let unknown_unit = any(&RateLimitConfig {
            name: "c".to_owned(),
            domain: "d".to_owned(),
            descriptors: vec![RateLimitDescriptor {
                key: "k".to_owned(),
                rate_limit: Some(RateLimitPolicy::default()),
                ..RateLimitDescriptor::default()
            }],
        });
        let faults = file::load(&files(&[unknown_unit]).unwrap(), false).unwrap_err();
        let faults: Vec<String> = faults.errors().map(ToString::to_string).collect();
        assert!(
            faults[0].contains("d.k.rate_limit: unit \"UNKNOWN\" is not known"),
            "{faults:?}"
        );
    }
}
