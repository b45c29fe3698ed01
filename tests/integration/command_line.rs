//! The program as a user starts it.

use std::fs;
use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::program::{Served, tollgate};
use crate::support::{http, try_http};

fn run(mut command: Command) -> (i32, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().expect("the program can be started");
    let text = |bytes| String::from_utf8(bytes).expect("it prints text");
    (status.code().expect("it exits"), text(stdout), text(stderr))
}

fn file(directory: &TempDir, name: &str, text: &str) -> String {
    let path = directory.path().join(name);
    fs::write(&path, text).unwrap();
    path.display().to_string()
}

const GOOD: &str = "
domain: shop
descriptors:
  - {key: ip, rate_limit: {unit: minute, requests_per_unit: 2, name: per-ip}}
  - {key: path, value: '/a/*', share_threshold: true, shadow_mode: true, rate_limit: {unit: hour, unit_multiplier: 2, requests_per_unit: 9}}
  - {key: free, rate_limit: {unlimited: true, replaces: [{name: per-ip}]}}
";

const BAD: &str = "
domain: shop
descriptors:
  - {key: ip, rate_limit: {unit: minutes, requests_per_unit: 2}}
  - {key: path, valeu: x}
  - {key: user, rate_limit: {unit: hour, requests_per_unit: '5'}}
  - {value: x}
  - {key: ip}
";

#[test]
fn check_prints_every_error_and_serve_refuses_with_the_same_words() {
    let directory = tempfile::tempdir().unwrap();
    let bad = file(&directory, "bad.yaml", BAD);
    let (code, out, checked) = run(tollgate(&["check", &bad]));
    assert_eq!((code, out.as_str()), (1, ""));
    let places: Vec<String> = checked
        .lines()
        .map(|line| line.strip_prefix(&format!("{bad}:")).unwrap_or(line))
        .map(|line| line.split(": ").next().unwrap().to_owned())
        .collect();
    assert_eq!(places, ["4:34", "5:17", "6:61", "7:5", "8:5"], "{checked}");
    assert!(
        checked.lines().all(|line| line.contains("; ")),
        "every error has advice: {checked}"
    );

    let (code, _, served) = run(tollgate(&[
        "serve",
        "--config",
        &bad,
        "--grpc-port",
        "0",
        "--port",
        "0",
    ]));
    assert_eq!((code, served), (1, checked));
}

#[test]
fn check_prints_one_line_per_rule() {
    let directory = tempfile::tempdir().unwrap();
    let good = file(&directory, "good.yaml", GOOD);
    let (code, out, _) = run(tollgate(&["check", "--print", &good]));
    let expected = "\
shop > ip: 2 per MINUTE, name per-ip
shop > path=/a/*: 9 per 2 HOUR, shadow_mode, share_threshold
shop > free: unlimited, replaces per-ip
ok: 1 domain, 3 rules
";
    assert_eq!((code, out.as_str()), (0, expected));
}

#[test]
fn check_prints_what_else_decides() {
    let directory = tempfile::tempdir().unwrap();
    let rules = file(
        &directory,
        "rules.yaml",
        "
domain: edge
client_address: [{key: ip, trusted: all}]
descriptors:
  - {key: ip, rate_limit: {unit: 10s, requests_per_unit: 2, window_start: first_hit, on_exceeded: renew_window, ban: {after: 2, for: 10m}}}
  - {key: b, rate_limit: {unit: second, requests_per_unit: 5, algorithm: token_bucket, charge_refused: true}}
",
    );
    let expected = "\
edge: client_address ip
edge > ip: 2 per 10 SECOND from the first hit, renewed when exceeded, ban after 2 refusals for 600s
edge > b: 5 per SECOND with bursts of 5, charge_refused true
ok: 1 domain, 2 rules
";
    let (code, out, err) = run(tollgate(&["check", "--print", &rules]));
    assert_eq!((code, out.as_str()), (0, expected), "{err}");
}

#[test]
fn check_reads_pipes_and_the_standard_input() {
    let directory = tempfile::tempdir().unwrap();
    let bad = file(&directory, "bad.yaml", BAD);
    for path in ["-", "/dev/stdin"] {
        let mut command = tollgate(&["check", path]);
        command.stdin(fs::File::open(&bad).unwrap());
        let (code, _, err) = run(command);
        assert_eq!((code, err.lines().count()), (1, 5), "{err}");
    }
}

#[test]
fn check_takes_several_paths_as_one_set() {
    let directory = tempfile::tempdir().unwrap();
    let (a, b) = (
        file(&directory, "a", "domain: d\n"),
        file(&directory, "b", "domain: d\n"),
    );
    assert_eq!(run(tollgate(&["check", &a, &b])).0, 1);
    assert_eq!(run(tollgate(&["check", "--merge-domain-config", &a, &b])).0, 0);
    let mut command = tollgate(&["check", &a, &b]);
    command.env("MERGE_DOMAIN_CONFIG", "T");
    assert_eq!(run(command).0, 0);
}

fn call(time: &str, value: &str) -> String {
    format!(
        r#"{{"time": {time}, "request": {{"domain": "shop", "descriptors": [{{"entries": [{{"key": "ip", "value": "{value}"}}]}}]}}}}"#
    )
}

/// Runs `replay` on `recording` from standard input.
fn replay(recording: &str, more: &[&str]) -> (i32, String, String) {
    let directory = tempfile::tempdir().unwrap();
    let rules = file(&directory, "rules.yaml", GOOD);
    let recording_file = file(&directory, "requests.jsonl", recording);
    let mut command = tollgate(&["replay", "--config", &rules, "--requests", "-"]);
    command.args(more).stdin(fs::File::open(recording_file).unwrap());
    run(command)
}

#[test]
fn replay_answers_line_by_line_and_echoes_the_time() {
    let recording = [
        call("1700000000", "a"),
        call("1700000000.250", "a"),
        call("1700000001", "a"),
        call("1700000001", r"\\xff"),
        r#"{"time": 1700000002, "request": {"domain": ""}}"#.into(),
        r#"{"time": 1700000003, "request": {"domian": "shop"}}"#.into(),
        String::new(),
    ]
    .join("\n");
    let (code, out, err) = replay(&recording, &[]);
    assert_eq!((code, err.as_str()), (0, ""));
    let lines: Vec<Value> = out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let codes: Vec<&str> = lines[..4]
        .iter()
        .map(|line| line["response"]["overallCode"].as_str().unwrap())
        .collect();
    assert_eq!(codes, ["OK", "OK", "OVER_LIMIT", "OK"]);
    assert!(
        out.lines()
            .nth(1)
            .unwrap()
            .starts_with(r#"{"time":1700000000.250,"#),
        "{out}"
    );
    assert_eq!(lines[4]["error"]["code"], "INVALID_ARGUMENT");
    assert_eq!(
        lines[4]["error"]["message"],
        "rate limit domain must not be empty"
    );
    assert!(
        lines[5]["error"]["message"].as_str().unwrap().contains("domian"),
        "{out}"
    );
}

#[test]
fn replay_reports_lines_that_it_cannot_read_and_goes_on() {
    let recording = [
        call("1700000000", "a"),
        "{\"time\": 17".into(),
        call("\"soon\"", "a"),
        call("-1", "a"),
        call("1700000000", "a"),
    ]
    .join("\n");
    let (code, out, err) = replay(&recording, &[]);
    assert_eq!(code, 1);
    assert_eq!(out.lines().count(), 2, "{out}");
    let lines: Vec<&str> = err.lines().collect();
    assert!(lines[0].starts_with("-:2: "), "{err}");
    assert_eq!(
        lines[1],
        "-:3: time must be a number of seconds since 1970, before the year 2554, not \"soon\""
    );
    assert_eq!(
        lines[2],
        "-:4: time must be a number of seconds since 1970, before the year 2554, not -1"
    );
    assert_eq!(lines[3], "error: 3 lines of - could not be read");
}

#[test]
fn replay_sums_up_per_rule() {
    let recording = [
        call("1700000000", "a"),
        call("1700000001", "a"),
        call("1700000002", "a"),
        call("1700000003", "b"),
    ];
    let (code, out, _) = replay(&recording.join("\n"), &["--summary"]);
    assert_eq!(code, 0);
    let rows: Vec<Vec<&str>> = out
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert_eq!(rows[0], ["rule", "limit", "calls", "refused", "peak"]);
    assert_eq!(rows[1], ["shop.ip", "2", "per", "MINUTE", "4", "1", "3"]);
    assert_eq!(rows[3], ["shop.free", "unlimited", "0", "0", "0"]);
    assert_eq!(
        out.lines().last().unwrap(),
        "4 requests, 1 refused, 0 without a decision"
    );
}

#[test]
fn replay_takes_its_settings_from_the_environment() {
    let directory = tempfile::tempdir().unwrap();
    let rules = file(&directory, "rules.yaml", GOOD);
    let requests = file(&directory, "requests.jsonl", &call("1700000000", "a"));
    let mut command = tollgate(&["replay", "--config", &rules, "--requests", &requests]);
    command
        .env("LIMIT_RESPONSE_HEADERS_ENABLED", "true")
        .env("LIMIT_RESET_HEADER", "X-Reset");
    let (code, out, err) = run(command);
    assert_eq!((code, err.as_str()), (0, ""));
    let answer: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(answer["response"]["responseHeadersToAdd"][2]["key"], "X-Reset");
    assert_eq!(answer["response"]["responseHeadersToAdd"][2]["value"], "40");
}

#[test]
fn a_bad_setting_names_its_variable_and_what_to_write() {
    #[track_caller]
    fn test(variable: &str, value: &str, expected: &[&str]) {
        let mut command = tollgate(&["serve"]);
        command.env(variable, value);
        let (code, _, err) = run(command);
        assert_eq!(code, 2, "{err}");
        for part in expected.iter().chain([&variable]) {
            assert!(err.contains(part), "{part} is missing in: {err}");
        }
    }
    test("SHADOW_MODE", "maybe", &["'maybe'", "write true or false"]);
    test("SHADOW_MODE", "", &["write true or false"]);
    test("GRPC_PORT", "tcp://10.0.0.1:8081", &["Kubernetes"]);
    test("NEAR_LIMIT_RATIO", "much", &["write a number such as 0.8"]);
    test(
        "LIMIT_LIMIT_HEADER",
        "bad header",
        &["letters, digits and dashes"],
    );
    test("LOG_LEVEL", "loud", &["error, warn, info, debug or trace"]);
    test("TOLLGATE_SHUTDOWN_GRACE", "10", &["write a duration with units"]);
    test(
        "CONFIG_GRPC_XDS_SERVER_URL",
        "http://localhost:18000",
        &["write localhost:18000, without a scheme"],
    );
    test("TOLLGATE_CONFG", "rules", &["did you mean TOLLGATE_CONFIG?"]);
    test("TOLLGATE_LOG_LEVEL", "info", &["did you mean LOG_LEVEL?"]);
    test("TOLLGATE_PORT", "9000", &["did you mean PORT?"]);
}

#[test]
fn what_cannot_be_ignored_is_refused_and_the_rest_is_named_once() {
    for (variable, value, expected) in [
        (
            "GRPC_SERVER_USE_TLS",
            "true",
            "GRPC_SERVER_TLS_CERT does not say where the file is",
        ),
        ("USE_STATSD", "true", "USE_STATSD and USE_PROMETHEUS are on"),
        (
            "USE_DOG_STATSD_MOGRIFIERS",
            "a",
            "DOG_STATSD_MOGRIFIER_A_PATTERN is not set",
        ),
    ] {
        let mut command = tollgate(&["serve"]);
        command.env(variable, value);
        match variable {
            "USE_STATSD" => command.env("USE_PROMETHEUS", "true"),
            "USE_DOG_STATSD_MOGRIFIERS" => command.env("USE_DOG_STATSD", "true"),
            _ => &mut command,
        };
        let (code, _, err) = run(command);
        assert_eq!(code, 1);
        assert!(err.contains(expected), "{err}");
    }
    let mut served = Served::start_with(
        &[],
        &[
            ("REDIS_URL", "redis:6379"),
            ("USE_STATSD", "false"),
            ("CONFIG_TYPE", "FILE"),
        ],
    );
    let line = served.line_with("without effect");
    assert!(line.contains(": REDIS_URL (there is no Redis)\""), "{line}");
}

#[test]
fn without_its_certificates_it_does_not_start() {
    let mut command = tollgate(&["serve"]);
    command
        .env("GRPC_SERVER_USE_TLS", "true")
        .env("GRPC_SERVER_TLS_CERT", "/nowhere/tls.crt")
        .env("GRPC_SERVER_TLS_KEY", "/nowhere/tls.key");
    let (code, _, err) = run(command);
    assert_eq!(code, 1);
    for part in ["GRPC_SERVER_TLS_CERT", "/nowhere/tls.crt: ", "No such file"] {
        assert!(err.contains(part), "{part} is missing in: {err}");
    }
    assert!(!err.contains("listening"), "{err}");
}

#[test]
fn the_path_of_the_reference_may_be_the_first_argument() {
    let (code, out, _) = run(tollgate(&["/bin/ratelimit", "--version"]));
    assert_eq!(code, 0);
    assert!(out.starts_with("tollgate "), "{out}");
}

#[test]
fn a_path_without_rules_is_named() {
    let (code, _, err) = run(tollgate(&["serve", "--config", "/nowhere/rules"]));
    assert_eq!(code, 1);
    assert!(
        err.contains("cannot read /nowhere/rules: No such file or directory"),
        "{err}"
    );
}

#[tokio::test]
async fn without_rules_it_serves_an_example_and_says_how_to_try_it() {
    let mut served = Served::start(&[]);
    served.line_with("No rules were given");
    let hint = served.line_with("curl -s");
    let address = hint
        .split("http://")
        .nth(1)
        .unwrap()
        .split('/')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let json = hint.split("-d '").nth(1).unwrap().split('\'').next().unwrap();
    loop {
        let mut answers: Vec<Value> = Vec::new();
        for _ in 0..4 {
            answers.push(serde_json::from_str(&http(address, "POST", "/json", json).await.1).unwrap());
        }
        let reset = |answer: &Value| {
            let seconds = answer["statuses"][0]["durationUntilReset"].as_str().unwrap();
            seconds.strip_suffix('s').unwrap().parse::<u32>().unwrap()
        };
        // The real clock may have begun a new minute between them.
        if reset(&answers[3]) <= reset(&answers[0]) {
            let codes: Vec<&str> = answers
                .iter()
                .map(|answer| answer["overallCode"].as_str().unwrap())
                .collect();
            assert_eq!(codes, ["OK", "OK", "OK", "OVER_LIMIT"]);
            break;
        }
    }
    served.signal(Signal::SIGINT);
    served.line_with("stopped");
    assert_eq!(served.exit_code(), Some(0));
}

#[test]
fn the_log_has_one_line_for_each_change_of_the_rules() {
    let directory = tempfile::tempdir().unwrap();
    let rules = file(&directory, "rules.yaml", GOOD);
    let mut served = Served::start(&["--config", &directory.path().display().to_string()]);
    served.line_with("loaded 3 rules");
    file(&directory, "rules.yaml", "domain: shop\n  descriptors: [");
    let fault = served.line_with("cannot load the rules, the last good ones stay in force: ");
    assert!(fault.contains("rules.yaml:2:"), "{fault}");
    file(&directory, "rules.yaml", YEARLY);
    assert_eq!(served.lines_before("loaded 1 rules"), [""; 0]);
    fs::remove_file(rules).unwrap();
    assert_eq!(served.lines_before("there are no limits in the rules"), [""; 0]);
}

#[tokio::test]
async fn metrics_may_go_to_prometheus_alone_or_nowhere() {
    let prometheus = [("USE_PROMETHEUS", "true"), ("PROMETHEUS_ADDR", "127.0.0.1:0")];
    let mut served = Served::start_with(&[], &prometheus);
    let address = served.address_of("Prometheus");
    assert_eq!(http(address, "GET", "/metrics", "").await.0, 200);
    let mut served = Served::start_with(&[], &[("USE_PROMETHEUS", "false"), ("USE_STATSD", "false")]);
    let address = served.address_of("HTTP");
    assert_eq!(http(address, "GET", "/healthcheck", "").await.0, 200);
}

#[test]
fn every_signal_to_stop_ends_it_in_order() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut served = Served::start(&["--shutdown-linger", "0"]);
        served.line_with("listening for HTTP");
        served.signal(signal);
        served.line_with("not ready any more");
        served.line_with("stopped");
        assert_eq!(served.exit_code(), Some(0), "{signal}");
    }
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let mut served = Served::start(&["--shutdown-linger", "1h"]);
    served.line_with("listening for HTTP");
    served.signal(Signal::SIGTERM);
    served.line_with("not ready any more");
    served.signal(Signal::SIGTERM);
    served.line_with("asked a second time");
    assert_eq!(served.exit_code(), Some(0));
}

#[test]
fn a_recording_may_be_longer_than_what_its_reader_wants() {
    let directory = tempfile::tempdir().unwrap();
    let rules = file(&directory, "rules.yaml", GOOD);
    let recording = format!("{}\n", call("1700000000", "a")).repeat(10_000);
    let mut child = tollgate(&["replay", "--config", &rules, "--requests", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let _ = child.stdin.take().unwrap().write_all(recording.as_bytes());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert_eq!(output.status.code(), Some(0));
}

/// The disk below the log is full.
#[test]
fn errors_that_cannot_be_printed_change_no_exit_code() {
    let directory = tempfile::tempdir().unwrap();
    let warned = file(&directory, "warned.yaml", "domain: d\nkey: k\n");
    let bad = file(&directory, "bad.yaml", BAD);
    for (path, expected) in [(warned, 0), (bad, 1)] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let mut check = tollgate(&["check", &path]);
        assert_eq!(check.stderr(full).output().unwrap().status.code(), Some(expected));
    }
}

/// Whoever read the log is gone, or is there and does not read.
#[tokio::test]
async fn a_log_that_cannot_be_written_holds_up_nothing() {
    for is_gone in [true, false] {
        let mut served = Served::start(&["--shutdown-linger", "0", "--log-level", "debug"]);
        let address = served.address_of("HTTP");
        served.line_with("loaded ");
        if is_gone {
            served.stop_reading();
        }
        let value = "v".repeat(50_000);
        let call = format!(
            r#"{{"domain": "{value}", "descriptors": [{{"entries": [{{"key": "k", "value": "{value}"}}]}}]}}"#
        );
        for _ in 0..20 {
            assert_eq!(http(address, "POST", "/json", &call).await.0, 200);
        }
        served.signal(Signal::SIGTERM);
        assert_eq!(served.exit_code(), Some(0), "{is_gone}");
    }
}

const CALL: &str = r#"{"domain": "d", "descriptors": [{"entries": [{"key": "k", "value": "v"}]}]}"#;

const YEARLY: &str = "
domain: d
descriptors:
  - {key: k, rate_limit: {unit: year, requests_per_unit: 1000000000}}
";

/// A server that keeps snapshots, and its HTTP port.
fn with_snapshots(rules: &str, snapshot: &str) -> (Served, SocketAddr) {
    let mut served = Served::start(&[
        "--config",
        rules,
        "--snapshot",
        snapshot,
        "--snapshot-period",
        "100ms",
        "--shutdown-linger",
        "0",
    ]);
    let address = served.address_of("HTTP");
    (served, address)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_under_load_hands_nobody_a_fresh_limit() {
    let directory = tempfile::tempdir().unwrap();
    let rules = file(&directory, "rules.yaml", YEARLY);
    let snapshot = directory.path().join("counts").display().to_string();
    let (served, address) = with_snapshots(&rules, &snapshot);
    let admitted = Arc::new(AtomicU32::new(0));
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let admitted = Arc::clone(&admitted);
            tokio::spawn(async move {
                // Until the server is gone.
                while let Some((200, _)) = try_http(address, "POST", "/json", CALL).await {
                    admitted.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    while admitted.load(Ordering::Relaxed) < 100 {
        tokio::task::yield_now().await;
    }
    served.signal(Signal::SIGTERM);
    for caller in callers {
        caller.await.unwrap();
    }
    let admitted = admitted.load(Ordering::Relaxed);
    assert_eq!(served.exit_code(), Some(0));

    // Killed, it goes on with what it wrote last.
    for restart in 1..3 {
        let (served, address) = with_snapshots(&rules, &snapshot);
        let answer: Value = serde_json::from_str(&http(address, "POST", "/json", CALL).await.1).unwrap();
        assert_eq!(
            answer["statuses"][0]["limitRemaining"],
            1_000_000_000 - admitted - restart
        );
        // One that is written now may have been copied before the call; the next one is not.
        for _ in 0..2 {
            let written = || fs::metadata(&snapshot).unwrap().modified().unwrap();
            let last = written();
            while written() == last {
                tokio::task::yield_now().await;
            }
        }
        drop(served);
    }
}

#[test]
fn a_file_that_is_no_snapshot_is_kept_and_told_of() {
    let directory = tempfile::tempdir().unwrap();
    let rules = file(&directory, "rules.yaml", YEARLY);
    let whole = directory.path().join("whole").display().to_string();
    let (served, _) = with_snapshots(&rules, &whole);
    served.signal(Signal::SIGTERM);
    assert_eq!(served.exit_code(), Some(0));
    let whole = fs::read(&whole).unwrap();
    let mut damaged = whole.clone();
    damaged[60] ^= 1;
    let mut other = whole.clone();
    other[16] += 1;
    for (i, (bytes, said)) in [
        (&b"domain: d\n"[..], "it is no snapshot"),
        (b"", "it is no snapshot"),
        (&whole[..whole.len() - 1], "it is damaged"),
        (&whole[..20], "it is damaged"),
        (&damaged, "it is damaged"),
        (&other, "it is of another version of tollgate"),
    ]
    .into_iter()
    .enumerate()
    {
        let path = directory.path().join(format!("counts{i}"));
        fs::write(&path, bytes).unwrap();
        let path = path.display().to_string();
        let mut served = Served::start(&["--config", &rules, "--snapshot", &path, "--shutdown-linger", "0"]);
        served.line_with(&format!(
            "cannot go on with {path}: {said}; it is kept as {path}.unusable"
        ));
        served.line_with("listening for HTTP");
        served.signal(Signal::SIGTERM);
        assert_eq!(served.exit_code(), Some(0));
        assert_eq!(fs::read(format!("{path}.unusable")).unwrap(), bytes);
        assert_eq!(fs::read(&path).unwrap().len(), whole.len());
    }
    let directory = directory.path().display().to_string();
    let (code, _, err) = run(tollgate(&["--config", &rules, "--snapshot", &directory]));
    assert_eq!(code, 1, "{err}");
    assert!(
        err.contains(&format!("cannot read the snapshot {directory}")),
        "{err}"
    );
}

#[test]
fn env_prints_what_each_setting_comes_to_and_where_that_was_said() {
    let mut command = tollgate(&["env", "--port", "18080"]);
    command
        .env("GRPC_PORT", "0x10")
        .env("RUNTIME_SUBDIRECTORY", "")
        .env("TOLLGATE_SNAPSHOT", "")
        .env("CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", "token:secret");
    let (code, out, _) = run(command);
    assert_eq!(code, 0);
    for line in [
        "PORT=18080\t# --port",
        "GRPC_PORT=0x10\t# environment",
        "LOG_LEVEL=warn\t# default",
        "GRPC_UDS=\t# default",
        "RUNTIME_SUBDIRECTORY=\t# default",
        "TOLLGATE_SNAPSHOT=\t# default",
        "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS=***\t# environment",
    ] {
        assert!(out.lines().any(|shown| shown == line), "{line} is not in {out}");
    }
    let mut command = tollgate(&["env"]);
    command.env("GRPC_PORT", "x");
    assert_eq!(run(command).0, 2);
    let mut command = tollgate(&["env"]);
    command.env("USE_STATSD", "true").env("USE_PROMETHEUS", "true");
    let (code, _, err) = run(command);
    assert_eq!(
        (code, &*err),
        (
            1,
            "error: USE_STATSD and USE_PROMETHEUS are on; turn on one of them\n"
        )
    );
}
