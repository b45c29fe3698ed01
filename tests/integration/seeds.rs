//! The limiters that this project sets out to replace, as recorded steps with their answers, in `tests/seeds/`:
//! `rate-limiter-flexible`, `hyacinth`, `@fastify/rate-limit` and `proxy-addr`.
//!
//! Each test runs every scenario that has a meaning here. Those that have none are listed with the reason, and so are the
//! steps at which this server differs on purpose; a scenario that is in neither list fails the test.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tollgate::algorithm::Outcome;
use tollgate::client_address::{Client, ClientAddress};
use tollgate::clock::ManualClock;
use tollgate::config::file;
use tollgate::descriptor::{Entry, Hits};
use tollgate::key::KeyMaker;
use tollgate::matcher::Matcher;
use tollgate::rate_limit::{Charge, RateLimit};
use tollgate::store::Hit;
use tollgate::store::memory::MemoryStore;

use crate::support::{rules, source};

fn load(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/seeds")
        .join(name);
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

/// One limit with keys of its own, on a clock in milliseconds.
struct Limited {
    matcher: Matcher,
    store: MemoryStore,
    keys: KeyMaker,
    clock: Option<ManualClock>,
}

impl Limited {
    /// By a `rate_limit` as a rule file has it.
    fn by(rate_limit: &str) -> Self {
        Limited {
            matcher: rules(&format!(
                "domain: d\ndescriptors: [{{key: k, rate_limit: {rate_limit}}}]\n"
            )),
            store: MemoryStore::default(),
            keys: KeyMaker::default(),
            clock: None,
        }
    }

    fn limit(&self) -> &RateLimit {
        let domain = self.matcher.domain(b"d").unwrap();
        &domain
            .find(&[Entry {
                key: b"k",
                value: b"",
            }])
            .unwrap()
            .limits()[0]
    }

    fn ask(&mut self, milliseconds: u64, key: &str, cost: u64) -> Outcome {
        // So that steps back stay behind the epoch.
        let time = Duration::from_millis(1_000_000 + milliseconds);
        self.clock.get_or_insert_with(|| ManualClock::new(time)).set(time);
        let limit = self.limit();
        let entries = [Entry {
            key: b"k",
            value: key.as_bytes(),
        }];
        let hit = Hit {
            key: self.keys.key("d", &entries, None, limit),
            limit,
            hits: Hits::Charge(cost),
            descriptor: 0,
            shadow_mode: false,
            quota_mode: false,
        };
        let now = self.clock.as_ref().unwrap().now();
        self.store.hit(&[hit], Charge::Each, now)[0]
    }
}

/// What has no meaning here, or another one, with the reason.
fn reasons(list: &[(&'static str, &'static str)]) -> BTreeMap<&'static str, &'static str> {
    let reasons: BTreeMap<_, _> = list.iter().copied().collect();
    assert_eq!(reasons.len(), list.len(), "a name is listed twice");
    reasons
}

/// Runs `check` on the scenarios that are not left out, and makes sure that those that are exist.
fn each_scenario(
    scenarios: &Value,
    left_out: &BTreeMap<&'static str, &'static str>,
    mut check: impl FnMut(&str, &Value),
) {
    let mut seen = 0;
    let mut run = 0;
    for scenario in scenarios.as_array().unwrap() {
        let id = scenario["id"].as_str().unwrap();
        if left_out.contains_key(id) {
            seen += 1;
        } else {
            check(id, scenario);
            run += 1;
        }
    }
    assert_eq!(seen, left_out.len(), "a scenario that is left out does not exist");
    assert!(run > 0);
}

// === rate-limiter-flexible ===

#[test]
fn rate_limiter_flexible() {
    let left_out = reasons(&[
        (
            "mem-block-duration",
            "blockDuration is `ban: {after: 0, for: ...}` here, which counts refusals and not points",
        ),
        ("mem-block-duration-cost", "the same"),
        (
            "mem-penalty-reward",
            "points cannot be given or taken without a verdict; refunds never exceed what was taken",
        ),
        ("mem-block-api", "there is no call that blocks a key"),
        ("mem-set-api", "there is no call that sets a counter"),
        (
            "mem-duration-zero",
            "a window without an end is no window: 0 is refused",
        ),
        (
            "mem-custom-duration",
            "a call cannot bring a window of its own for a rule's counter",
        ),
        ("mem-zero-cost", "a look opens no window"),
        ("mem-exec-evenly-min", "answers are not delayed"),
        ("black-white", "lists are rules: unlimited, or with 0 requests"),
        ("black-white-run-anyway", "the same"),
        ("queue-fifo", "nobody is kept waiting"),
    ]);
    let vectors = load("rlf-memory-bursty.json");
    each_scenario(&vectors["scenarios"], &left_out, |id, scenario| {
        let config = &scenario["config"];
        let fixed = |config: &Value| {
            let seconds = config["duration"].as_u64().unwrap();
            let unit = if seconds == 1 {
                "second".to_owned()
            } else {
                format!("{seconds}s")
            };
            format!(
                "unit: {unit}, requests_per_unit: {}, window_start: first_hit",
                config["points"]
            )
        };
        let rate_limit = match config["type"].as_str().unwrap() {
            "memory" => format!("{{{}}}", fixed(config)),
            "bursty" => format!(
                "{{{}, burst: {{{}}}}}",
                fixed(&config["rate"]),
                fixed(&config["burst"])
            ),
            other => panic!("{id} has the type {other}"),
        };
        let mut limited = Limited::by(&rate_limit);
        for step in scenario["steps"].as_array().unwrap() {
            let args = step["args"].as_array().unwrap();
            let cost = args.get(1).map_or(1, |cost| cost.as_u64().unwrap());
            let time = step["t_ms"].as_u64().unwrap();
            let outcome = limited.ask(time, args[0].as_str().unwrap(), cost);
            let result = &step["result"];
            let expected = (
                step["allowed"].as_bool().unwrap(),
                result["remaining"].as_u64().unwrap(),
                u128::from(result["ms_before_next"].as_u64().unwrap()),
                result["consumed"].as_u64().unwrap(),
            );
            let got = (
                !outcome.over_limit,
                u64::from(outcome.remaining),
                outcome.until_reset.as_millis(),
                outcome.after,
            );
            assert_eq!(got, expected, "{id} at {time}");
        }
    });
}

// === hyacinth ===

#[test]
fn hyacinth() {
    let left_out = reasons(&[
        ("cost-fractions", "hits are whole numbers"),
        (
            "clock-backwards",
            "buckets are filled by the monotonic clock, which no caller can set back",
        ),
    ]);
    let vectors = load("hyacinth-token-bucket.json");
    each_scenario(&vectors["scenarios"], &left_out, |id, scenario| {
        let config = &scenario["config"];
        let mut limited = Limited::by(&format!(
            "{{unit: {}, requests_per_unit: 1, algorithm: token_bucket, burst_size: {}}}",
            match config["fill_ms"].as_u64().unwrap() {
                1_000 => "second".to_owned(),
                fill => format!("{fill}ms"),
            },
            config["pool_max"]
        ));
        for step in scenario["steps"].as_array().unwrap() {
            let time = step["t_ms"].as_u64().unwrap();
            let outcome = limited.ask(
                time,
                step["key"].as_str().unwrap(),
                step["cost"].as_u64().unwrap(),
            );
            let allowed = step["exact_allowed"].as_bool().unwrap();
            assert_eq!(!outcome.over_limit, allowed, "{id} at {time}");
            if allowed {
                let pool = step["exact_pool"].as_f64().unwrap().floor();
                assert_eq!(f64::from(outcome.remaining), pool, "{id} at {time}");
            } else if let Some(wait) = step["exact_ms_until_cost"].as_f64() {
                let got = outcome.until_reset.as_secs_f64() * 1_000.0;
                assert!(
                    (got - wait).abs() < 1e-6,
                    "{id} at {time}: {got} instead of {wait}"
                );
            }
        }
    });
}

// === @fastify/rate-limit ===

#[test]
fn fastify_rate_limit() {
    let left_out = reasons(&[
        (
            "backoff-local",
            "its local store advertises one wait and keeps another; here as in its Redis store both are the same",
        ),
        ("backoff-local-cap", "the same"),
        ("backoff-ban", "the same"),
        ("skip-on-error-true", "counters in memory do not fail"),
        ("skip-on-error-false", "the same"),
        ("skip-on-error-max0", "the same"),
        ("allow-list", "a list is a rule: unlimited"),
        ("allow-list-fn", "the same"),
        ("group-id", "routes are the proxy's business"),
        ("route-override", "the same"),
        ("namespace-redis", "a key in Redis"),
        ("ip-subnet-128", "addresses are `client_address`, tested there"),
        ("draft-headers", "names of headers"),
        ("header-switches", "the same"),
        ("defaults", "a wrong number is refused and not replaced"),
        (
            "dynamic-window",
            "a call cannot bring a window of its own for a rule's counter",
        ),
        (
            "clock-backwards",
            "windows from the first hit are measured by the monotonic clock, which cannot step back",
        ),
        (
            "window-0-local",
            "a window of no length is no window: 0 is refused",
        ),
        ("ban-negative", "a ban that is off is not written"),
    ]);
    let vectors = load("fastify-rate-limit.json");
    each_scenario(&vectors["scenarios"], &left_out, |id, scenario| {
        let config = &scenario["config"];
        let unit = match &config["timeWindow"] {
            Value::String(text) => text.clone(),
            milliseconds if *milliseconds == 1_000 => "second".to_owned(),
            milliseconds => format!("{milliseconds}ms"),
        };
        let mut rate_limit = format!(
            "unit: {unit}, requests_per_unit: {}, window_start: first_hit",
            config["max"]
        );
        if config["continueExceeding"] == true {
            rate_limit.push_str(", on_exceeded: renew_window");
        } else if config["exponentialBackoff"] == true {
            rate_limit.push_str(", on_exceeded: {backoff: {factor: 2}}");
        }
        if let Some(after) = config["ban"].as_u64() {
            rate_limit.push_str(&format!(", ban: {{after: {after}}}"));
        }
        // Steps on a real clock were answered by a real Redis, to the millisecond or not.
        let is_exact = scenario["real_clock"].is_null();
        let mut limited = Limited::by(&format!("{{{rate_limit}}}"));
        for step in scenario["steps"].as_array().unwrap() {
            let time = step["t_ms"].as_u64().unwrap();
            let key = step["ip"].as_str().unwrap();
            let status = |outcome: &Outcome| match (outcome.over_limit, outcome.ban) {
                (false, _) => 200,
                (true, None) => 429,
                (true, Some(_)) => 403,
            };
            if let Some(tally) = step["tally"].as_object() {
                let mut got: BTreeMap<u64, u64> = BTreeMap::new();
                for _ in 0..step["n"].as_u64().unwrap() {
                    *got.entry(status(&limited.ask(time, key, 1))).or_default() += 1;
                }
                let mut expected: BTreeMap<u64, u64> = BTreeMap::new();
                for (status, count) in tally {
                    let status = status.split(' ').next().unwrap().parse().unwrap();
                    *expected.entry(status).or_default() += count.as_u64().unwrap();
                }
                assert_eq!(got, expected, "{id} at {time}");
                continue;
            }
            let outcome = limited.ask(time, key, 1);
            assert_eq!(
                status(&outcome),
                step["status"].as_u64().unwrap(),
                "{id} at {time}"
            );
            let header = |name: &str| {
                step["resp_headers"][name]
                    .as_str()
                    .map(|text| text.parse::<u64>().unwrap())
            };
            assert_eq!(
                header("x-ratelimit-remaining"),
                Some(u64::from(outcome.remaining)),
                "{id} at {time}"
            );
            if is_exact {
                assert_eq!(
                    header("x-ratelimit-reset"),
                    Some(outcome.seconds_until_reset()),
                    "{id} at {time}"
                );
            }
        }
    });
}

// === proxy-addr ===

/// The rule for one key, as a rule file has it.
fn client_address(yaml: &str) -> Result<ClientAddress, String> {
    let file = format!("domain: d\nclient_address: [{{key: xff, {yaml}}}]\n");
    let loaded = file::load(&[source("r.yaml", &file)], false);
    let loaded = loaded.map_err(|errors| errors.errors().map(ToString::to_string).collect::<String>())?;
    let domain = loaded.matcher.domain(b"d").unwrap();
    Ok(domain.client_address(b"xff").unwrap().clone())
}

#[test]
fn proxy_addr() {
    let left_out = reasons(&[
        ("all-no-trust", "there is no list of all addresses"),
        ("chain-11-no-trust", "the same"),
        (
            "trust-comma-string",
            "a list is written as a list; this text is refused here as well, see below",
        ),
        ("trust-number", "hops are written {hops: 1}"),
        (
            "trust-bad-cidr-0",
            "0.0.0.0/0 may be written: it trusts every IPv4 address",
        ),
        ("unix-socket", "the peer is an item of the chain"),
        ("header-array", "a value is one text"),
    ]);
    // A malformed item is never the client here; ports and brackets are taken off; IPv4 is four decimal numbers.
    let differs: BTreeMap<&str, &str> = reasons(&[
        ("inner-space", "10.0.0.1"),
        ("malformed-middle", "10.0.0.1"),
        ("tabs", "1.1.1.1"),
        ("port-v4", "203.0.113.9"),
        ("port-v4-trusted-hop", "203.0.113.9"),
        ("bracket-v6-port", "203.0.113.9"),
        ("bracket-v6", "203.0.113.9"),
        ("hex-v4", "127.0.0.1"),
        ("decimal-v4", "127.0.0.1"),
        ("short-v4", "127.0.0.1"),
    ]);
    let vectors = load("proxy-addr.json");
    let mut differed = 0;
    each_scenario(&vectors["vectors"], &left_out, |id, vector| {
        let trusted = match &vector["trust"] {
            Value::Object(function) if function["fn"] == "trust everything" => "trusted: all".to_owned(),
            Value::Object(function) => {
                let hops = function["fn"].as_str().unwrap().strip_prefix("i < ").unwrap();
                format!("trusted: {{hops: {hops}, peer: all}}")
            }
            trust => format!("trusted: {trust}"),
        };
        let rule = client_address(&trusted);
        if vector["expect"]["error"].is_string() {
            assert!(rule.is_err(), "{id} must be refused");
            return;
        }
        let rule = rule.unwrap_or_else(|errors| panic!("{id}: {errors}"));
        let socket = vector["socket"].as_str().unwrap();
        let chain = match vector["xff"].as_str() {
            Some(forwarded) => format!("{forwarded}, {socket}"),
            None => socket.to_owned(),
        };
        let Client::Address(got) = rule.resolve(chain.as_bytes()) else {
            panic!("{id} has no client");
        };
        let expected = match differs.get(id) {
            Some(expected) => {
                differed += 1;
                (*expected).to_owned()
            }
            None => vector["expect"]["ip"].as_str().unwrap().to_owned(),
        };
        assert_eq!(got.to_string(), expected.to_lowercase(), "{id}");
    });
    assert_eq!(differed, differs.len());
    assert!(client_address("trusted: 'loopback, uniquelocal'").is_err());
}

// === the workload of random users ===

/// `SplitMix64`, by which the users were chosen.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }
}

#[test]
fn random_users() {
    let models = [
        (
            "bursty_2_1s_5_10s",
            "{unit: second, requests_per_unit: 2, window_start: first_hit,
              burst: {unit: 10s, requests_per_unit: 5, window_start: first_hit}}",
        ),
        (
            "fixed_2_1s",
            "{unit: second, requests_per_unit: 2, window_start: first_hit}",
        ),
        (
            "token_bucket_7_one_per_500ms",
            "{unit: 500ms, requests_per_unit: 1, algorithm: token_bucket, burst_size: 7}",
        ),
    ];
    let vectors = load("workload3-traces.json");
    let traces = vectors["traces"].as_array().unwrap();
    assert_eq!(traces.len(), 7);
    for trace in traces {
        let users = trace["N"].as_u64().unwrap();
        for (model, rate_limit) in &models {
            let mut limited = Limited::by(rate_limit);
            let mut random = SplitMix64(42);
            let (mut allowed, mut hash) = (0u64, 0xcbf2_9ce4_8422_2325u64);
            for i in 0..30_000 {
                let user = (random.next() >> 11) % users;
                let passes = !limited.ask(i, &user.to_string(), 1).over_limit;
                allowed += u64::from(passes);
                hash = (hash ^ u64::from(passes)).wrapping_mul(0x0000_0100_0000_01b3);
            }
            let expected = &trace[*model];
            assert_eq!(
                expected["allowed"].as_u64(),
                Some(allowed),
                "{model} with {users} users"
            );
            assert_eq!(
                expected["fnv1a64"].as_str(),
                Some(&*format!("{hash:016x}")),
                "{model} with {users} users"
            );
        }
    }
}
