//! The behaviour of envoyproxy/ratelimit as recorded calls with expected answers, in `tests/conformance/`.
//!
//! Each file is `{"group": NAME, "cases": [CASE, ...]}`. A case starts with empty counters; its `config` is a set of rule
//! files, its `settings` are environment variables, its `steps` are calls in order, each at a `time` and sent `repeat`
//! times, of which the last answer is compared with `expect`, `expect_error`, or one of `expect_any`. A field that
//! `expect` does not name is not compared, `null` means absent, and proto3 JSON's defaults are filled in. `basis` says
//! whether envoyproxy/ratelimit does exactly this (`reference`) or what it does is improved upon (`want`).
//!
//! Every case runs twice: as a replay, with statistics, and against a server over gRPC.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use prost::Message as _;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use tollgate::config::{LoadError, RulesConfig, RulesSource};
use tollgate::limiter::{Limiter, LimiterConfig, ResponseHeaderNames};
use tollgate::proto::envoy::service::ratelimit::v3::RateLimitRequest;
use tollgate::rate_limit::Charge;
use tollgate::replay::{Replay, Reply};
use tollgate::rls::json::{recorded_request, response};
use tollgate::rule::sanitize_metric_key;

use crate::support::TestServer;

#[derive(Deserialize)]
struct Group {
    group: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    id: String,
    #[expect(dead_code, reason = "said for the reader of the file")]
    why: String,
    #[expect(dead_code, reason = "said for the reader of the file")]
    basis: String,
    #[serde(default)]
    config: BTreeMap<String, Value>,
    #[serde(default)]
    settings: BTreeMap<String, String>,
    expect_load: Value,
    #[serde(default)]
    warn_contains: Vec<Value>,
    steps: Vec<Step>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    time: f64,
    #[serde(default = "once")]
    repeat: usize,
    request: Value,
    expect: Option<Value>,
    expect_error: Option<Value>,
    expect_any: Option<Vec<Value>>,
}

fn once() -> usize {
    1
}

/// How many there are: a file that is lost is to be noticed.
const CASES: usize = 291;

/// Every case with its full name.
fn cases() -> Vec<(String, Case)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/conformance");
    let mut files: Vec<_> = fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let cases: Vec<_> = files
        .iter()
        .map(|file| serde_json::from_str::<Group>(&fs::read_to_string(file).unwrap()).unwrap())
        .flat_map(|group| {
            group
                .cases
                .into_iter()
                .map(move |case| (format!("{}/{}", group.group, case.id), case))
        })
        .collect();
    assert_eq!(cases.len(), CASES);
    cases
}

/// Runs `check` on every case and reports all that fail.
fn run_all(mut check: impl FnMut(&Case) -> Result<(), String>) {
    let failures: Vec<String> = cases()
        .iter()
        .filter_map(|(name, case)| Some(format!("{name}: {}", check(case).err()?)))
        .collect();
    assert!(
        failures.is_empty(),
        "{} of {CASES} cases fail:\n{}",
        failures.len(),
        failures.join("\n")
    );
}

#[test]
fn replayed() {
    run_all(|case| {
        let Some(limiter) = load(case)? else { return Ok(()) };
        let mut recording = String::new();
        for step in &case.steps {
            let line = json!({ "time": step.time, "request": step.request });
            recording.push_str(&format!("{line}\n").repeat(step.repeat));
        }
        let mut out = Vec::new();
        let unread = Replay::new(limiter, Reply::ResponsesWithMetrics, &mut out)
            .run(recording.as_bytes())
            .map_err(|error| error.to_string())?;
        if unread.count() > 0 {
            return Err(format!("{:?}", unread.shown()));
        }
        let answers: Vec<Value> = out
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).expect("every line is JSON"))
            .collect();
        let mut last = 0;
        for (i, step) in case.steps.iter().enumerate() {
            last += step.repeat;
            let answer = answers.get(last - 1).ok_or("answers are missing")?;
            compare(step, answer, true).map_err(|fault| format!("step {}: {fault}", i + 1))?;
        }
        if last == answers.len() {
            Ok(())
        } else {
            Err("there are too many answers".into())
        }
    });
}

#[test]
fn over_the_wire() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    run_all(|case| {
        let Some(limiter) = load(case)? else { return Ok(()) };
        runtime.block_on(over_one_connection(case, limiter))
    });
}

async fn over_one_connection(case: &Case, limiter: Limiter) -> Result<(), String> {
    let server = TestServer::start_with(limiter, Duration::ZERO).await;
    let mut client = server.client().await;
    for (i, step) in case.steps.iter().enumerate() {
        server.set_time(Duration::from_secs_f64(step.time));
        let wire =
            recorded_request(step.request.to_string().as_bytes()).map_err(|error| error.to_string())?;
        let request = RateLimitRequest::decode(wire.as_slice()).unwrap();
        let mut answer = Value::Null;
        for _ in 0..step.repeat {
            answer = match client.should_rate_limit(request.clone()).await {
                Ok(reply) => {
                    let reply: Value =
                        serde_json::from_str(&response(&reply.get_ref().encode_to_vec())).unwrap();
                    json!({ "response": reply })
                }
                Err(status) => {
                    let code = if status.code() == tonic::Code::InvalidArgument {
                        "INVALID_ARGUMENT"
                    } else {
                        "other"
                    };
                    json!({ "error": { "code": code, "message": status.message() } })
                }
            };
        }
        compare(step, &answer, false).map_err(|fault| format!("step {}: {fault}", i + 1))?;
    }
    Ok(())
}

// === loading ===

/// A limiter with the case's rules. `None` if they are refused as they should be.
fn load(case: &Case) -> Result<Option<Limiter>, String> {
    let directory = tempfile::tempdir().unwrap();
    for (name, content) in &case.config {
        write_file(&directory.path().join(name), content);
    }
    let on = |variable: &str| match case.settings.get(variable).map(String::as_str) {
        None | Some("false") => false,
        Some("true") => true,
        Some(other) => panic!("{variable}={other}"),
    };
    let rules = RulesConfig {
        source: RulesSource::Paths(vec![directory.path().to_owned()]),
        merge_domains: on("MERGE_DOMAIN_CONFIG"),
        ignore_dotfiles: on("RUNTIME_IGNOREDOTFILES"),
    };
    let either = case.expect_load["either"] == true;
    match rules.load() {
        Ok(loaded) => {
            if case.expect_load.is_object() && !either {
                return Err("it must be refused, but it loads".into());
            }
            let warnings: Vec<String> = loaded.diagnostics.warnings().map(ToString::to_string).collect();
            expect_words(&case.warn_contains, &warnings.join("\n"))?;
            let limiter = Limiter::new(limiter_config(&case.settings));
            limiter.set_matcher(loaded.matcher);
            Ok(Some(limiter))
        }
        Err(error) => {
            if case.expect_load == "ok" {
                return Err(format!("it must load, but: {error}"));
            }
            expect_words(words(&case.expect_load), &error.to_string())?;
            assert!(matches!(error, LoadError::Rules(_)), "{error}");
            Ok(None)
        }
    }
}

fn words(expect_load: &Value) -> &[Value] {
    expect_load["error_contains"]
        .as_array()
        .map_or(&[], Vec::as_slice)
}

fn write_file(path: &Path, content: &Value) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    match content {
        Value::String(text) => fs::write(path, text).unwrap(),
        other => {
            std::os::unix::fs::symlink(other["symlink"].as_str().expect("text or a link"), path).unwrap()
        }
    }
}

fn limiter_config(settings: &BTreeMap<String, String>) -> LimiterConfig {
    let mut config = LimiterConfig::default();
    let mut names = ResponseHeaderNames {
        limit: "RateLimit-Limit".into(),
        remaining: "RateLimit-Remaining".into(),
        reset: "RateLimit-Reset".into(),
    };
    let mut headers = false;
    for (variable, value) in settings {
        let on = value == "true";
        match variable.as_str() {
            "SHADOW_MODE" => config.shadow_mode = on,
            "QUOTA_MODE" => config.quota_mode = on,
            "NEAR_LIMIT_RATIO" => config.near_limit_ratio = value.parse().unwrap(),
            "RESPONSE_DYNAMIC_METADATA" => config.dynamic_metadata = on,
            "STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT" if on => config.charge = Charge::StopWhenOverLimit,
            "LIMIT_RESPONSE_HEADERS_ENABLED" => headers = on,
            "LIMIT_LIMIT_HEADER" => names.limit.clone_from(value),
            "LIMIT_REMAINING_HEADER" => names.remaining.clone_from(value),
            "LIMIT_RESET_HEADER" => names.reset.clone_from(value),
            // They change no decision.
            "MERGE_DOMAIN_CONFIG"
            | "RUNTIME_IGNOREDOTFILES"
            | "LOCAL_CACHE_SIZE_IN_BYTES"
            | "LOG_LEVEL"
            | "REDIS_SOCKET_TYPE"
            | "REDIS_URL"
            | "USE_STATSD"
            | "RUNTIME_ROOT"
            | "RUNTIME_SUBDIRECTORY"
            | "RUNTIME_WATCH_ROOT"
            | "HOST"
            | "GRPC_HOST" => {}
            other => panic!("a case has the setting {other}, which this test does not know"),
        }
    }
    config.response_headers = headers.then_some(names);
    config
}

/// Each word must occur in `text`; of a list of words, one.
fn expect_words(words: &[Value], text: &str) -> Result<(), String> {
    for word in words {
        let occurs = match word {
            Value::Array(any) => any.iter().any(|word| text.contains(word.as_str().unwrap())),
            word => text.contains(word.as_str().unwrap()),
        };
        if !occurs {
            return Err(format!("{word} is not mentioned in: {text}"));
        }
    }
    Ok(())
}

// === comparing ===

fn compare(step: &Step, answer: &Value, has_metrics: bool) -> Result<(), String> {
    let alternatives = match (&step.expect, &step.expect_error, &step.expect_any) {
        (Some(expect), None, None) => vec![json!({ "expect": expect })],
        (None, Some(expect), None) => vec![json!({ "expect_error": expect })],
        (None, None, Some(any)) => any.clone(),
        _ => panic!("a step expects one thing"),
    };
    let faults: Vec<String> = alternatives
        .iter()
        .filter_map(|alternative| fault(alternative, answer, has_metrics))
        .collect();
    if faults.len() < alternatives.len() {
        Ok(())
    } else {
        Err(faults.join("; or: "))
    }
}

/// What differs from one alternative, if anything does.
fn fault(alternative: &Value, answer: &Value, has_metrics: bool) -> Option<String> {
    if let Some(expected) = alternative.get("expect_error") {
        let Some(error) = answer.get("error") else {
            return Some(format!("expected the error {expected}, got {answer}"));
        };
        let code_fits = expected["grpc"]
            .as_array()
            .is_none_or(|codes| codes.contains(&error["code"]));
        let message = error["message"].as_str().unwrap().to_lowercase();
        let message_fits = expected["contains"]
            .as_str()
            .is_none_or(|part| message.contains(&part.to_lowercase()));
        let fits = code_fits && message_fits;
        return (!fits)
            .then(|| format!("expected the error {expected}, got {error}"))
            .or_else(|| metrics_fault(expected, answer, has_metrics));
    }
    let expected = &alternative["expect"];
    let Some(response) = answer.get("response") else {
        return Some(format!("no response, but {answer}"));
    };
    response_fault(expected, response).or_else(|| metrics_fault(expected, answer, has_metrics))
}

fn response_fault(expected: &Value, response: &Value) -> Option<String> {
    for (field, want) in expected.as_object().unwrap() {
        let got = &response[field];
        let fault = match field.as_str() {
            "metrics" => None,
            "statuses" => statuses_fault(want, got),
            "responseHeadersToAdd" => {
                let none = json!([]);
                let shown = |value: &Value| {
                    if value.is_null() {
                        none.clone()
                    } else {
                        value.clone()
                    }
                };
                (shown(want) != shown(got)).then(|| format!("expected {want}, got {got}"))
            }
            _ => subset_fault(want, got),
        };
        if let Some(fault) = fault {
            return Some(format!("{field}: {fault}"));
        }
    }
    None
}

fn statuses_fault(want: &Value, got: &Value) -> Option<String> {
    let (want, got) = (
        want.as_array().unwrap(),
        got.as_array().cloned().unwrap_or_default(),
    );
    if want.len() != got.len() {
        return Some(format!("expected {}, got {}", want.len(), got.len()));
    }
    want.iter().zip(&got).find_map(|(want, got)| {
        let got = with_defaults(got);
        let want = want
            .as_object()
            .unwrap()
            .iter()
            .map(|(field, value)| (field.clone(), with_limit_defaults(value)))
            .collect();
        subset_fault(&Value::Object(want), &got)
    })
}

/// A status with proto3 JSON's defaults written out.
fn with_defaults(status: &Value) -> Value {
    let mut status = status.clone();
    if status.get("limitRemaining").is_none() {
        status["limitRemaining"] = 0.into();
    }
    if let Some(limit) = status.get("currentLimit") {
        status["currentLimit"] = with_limit_defaults(limit);
    }
    status
}

fn with_limit_defaults(value: &Value) -> Value {
    let mut value = value.clone();
    if let Some(limit) = value.as_object_mut()
        && (limit.contains_key("unit") || limit.contains_key("requestsPerUnit"))
    {
        for (field, default) in [("requestsPerUnit", json!(0)), ("name", json!(""))] {
            let is_default = limit.get(field).is_none_or(Value::is_null);
            if is_default {
                limit.insert(field.into(), default);
            }
        }
    }
    value
}

/// Objects are compared by the keys that are wanted, `null` means absent, everything else is compared whole.
fn subset_fault(want: &Value, got: &Value) -> Option<String> {
    match (want, got) {
        (Value::Object(want), Value::Object(got)) => want.iter().find_map(|(key, want)| {
            let got = got.get(key).unwrap_or(&Value::Null);
            subset_fault(want, got).map(|fault| format!("{key}: {fault}"))
        }),
        (Value::Array(want), Value::Array(got)) if want.len() == got.len() => want
            .iter()
            .zip(got)
            .find_map(|(want, got)| subset_fault(want, got)),
        (Value::Number(want), Value::Number(got)) if want.as_f64() == got.as_f64() => None,
        _ if want == got => None,
        _ => Some(format!("expected {want}, got {got}")),
    }
}

/// Statistics are compared whole; those of the service only where they are named. Answers over the wire carry none.
fn metrics_fault(expected: &Value, answer: &Value, has_metrics: bool) -> Option<String> {
    if !has_metrics {
        return None;
    }
    let want = expected.get("metrics")?.as_object()?;
    let Some(got) = answer["metrics"].as_object() else {
        return Some(format!("there are no statistics in {answer}"));
    };
    let counted = |all: &Map<String, Value>, key: &str| -> BTreeMap<String, u64> {
        all.get(key)
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
            .map(|(name, count)| (name.clone(), count.as_u64().unwrap()))
            .filter(|(_, count)| *count > 0)
            .collect()
    };
    for key in want.keys().filter(|key| *key != "*" && *key != "@service") {
        let (want, got) = (counted(want, key), counted(got, &sanitize_metric_key(key)));
        if want != got {
            return Some(format!("statistics of {key}: expected {want:?}, got {got:?}"));
        }
    }
    for (name, want) in want
        .get("@service")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        let got = counted(got, "@service").get(name).copied().unwrap_or(0);
        if want.as_u64() != Some(got) {
            return Some(format!("{name}: expected {want}, got {got}"));
        }
    }
    if want.contains_key("*") {
        return None;
    }
    let known: Vec<String> = want.keys().map(|key| sanitize_metric_key(key)).collect();
    got.keys()
        .find(|key| !known.contains(key) && *key != "@service")
        .map(|key| format!("statistics of {key} must not change"))
}
