//! What is decided beyond the recorded behaviour of envoyproxy/ratelimit: charging all or nothing, many threads, sharing.

use std::collections::HashSet;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use prost::Message as _;
use serde_json::Value;
use tollgate::limiter::LimiterConfig;
use tollgate::proto::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use tollgate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tollgate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate::rls::json::response;

use crate::support::{T, TestLimiter, brief, descriptor, request};

const ALL_OR_NOTHING: &str = "
domain: d
charge: all_or_nothing
descriptors:
  - {key: site, rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: team, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: soft, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: softer, quota_mode: true, rate_limit: {unit: hour, requests_per_unit: 3}}
";

#[test]
fn a_refused_call_charges_nothing() {
    let limiter = TestLimiter::new(ALL_OR_NOTHING);
    let both = request("d", &["site=a", "user=u"]);
    assert_eq!(limiter.brief(&both), "OK: OK4 OK1");
    assert_eq!(limiter.brief(&both), "OK: OK3 OK0");
    for _ in 0..5 {
        assert_eq!(limiter.brief(&both), "OVER: OK3 OVER");
    }
    assert_eq!(limiter.brief(&request("d", &["site=a"])), "OK: OK2");

    // Not even the counter that refused: what is given back at once admits the next call.
    let mut refund = request("d", &["user=u"]);
    refund.descriptors[0].is_negative_hits = true;
    assert_eq!(limiter.brief(&refund), "OK: OK1");
    assert_eq!(limiter.brief(&both), "OK: OK1 OK0");
}

#[test]
fn a_call_larger_than_what_is_left_leaves_it_for_smaller_ones() {
    let limiter = TestLimiter::new(ALL_OR_NOTHING);
    let mut large = request("d", &["site=a"]);
    large.hits_addend = 6;
    assert_eq!(limiter.brief(&large), "OVER: OVER");
    large.hits_addend = 5;
    assert_eq!(limiter.brief(&large), "OK: OK0");
}

#[test]
fn the_same_descriptor_twice_is_charged_twice_or_not_at_all() {
    let limiter = TestLimiter::new(ALL_OR_NOTHING);
    let twice = request("d", &["site=a", "site=a"]);
    assert_eq!(limiter.brief(&twice), "OK: OK4 OK3");
    assert_eq!(limiter.brief(&twice), "OK: OK2 OK1");
    assert_eq!(limiter.brief(&twice), "OVER: OK1 OVER");
    assert_eq!(limiter.brief(&request("d", &["site=a"])), "OK: OK0");
}

#[test]
fn rules_in_shadow_mode_refuse_nothing_and_are_charged_with_the_call() {
    let limiter = TestLimiter::new(ALL_OR_NOTHING);
    let call = request("d", &["user=u", "team=t"]);
    assert_eq!(limiter.brief(&call), "OK: OK1 OK0");
    assert_eq!(limiter.brief(&call), "OK: OK0 OK0");
    assert_eq!(limiter.brief(&call), "OVER: OVER OK0");
    assert_eq!(limiter.brief(&request("d", &["team=t"])), "OK: OK0");
}

#[test]
fn quotas_refuse_only_together() {
    let limiter = TestLimiter::new(ALL_OR_NOTHING);
    let call = request("d", &["soft=a", "softer=a"]);
    assert_eq!(limiter.brief(&call), "OK: OK0 OK2");
    assert_eq!(limiter.brief(&call), "OK: OVER OK1");
    assert_eq!(limiter.brief(&call), "OK: OVER OK0");
    assert_eq!(limiter.brief(&call), "OVER: OVER OVER");
    assert_eq!(limiter.brief(&request("d", &["softer=a"])), "OVER: OVER");
}

#[test]
fn global_shadow_mode_charges_what_it_lets_pass() {
    let config = LimiterConfig {
        shadow_mode: true,
        ..LimiterConfig::default()
    };
    let limiter = TestLimiter::with_config(ALL_OR_NOTHING, config);
    let both = request("d", &["site=a", "user=u"]);
    let answers: Vec<String> = (0..4).map(|_| limiter.brief(&both)).collect();
    assert_eq!(
        answers,
        ["OK: OK4 OK1", "OK: OK3 OK0", "OK: OK2 OVER", "OK: OK1 OVER"]
    );
}

#[test]
fn a_domain_that_says_each_is_not_spared_by_the_setting() {
    let config = LimiterConfig {
        charge: tollgate::rate_limit::Charge::StopWhenOverLimit,
        ..LimiterConfig::default()
    };
    let rules = "
domain: d
charge: each
descriptors:
  - {key: site, rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: user, rate_limit: {unit: hour, requests_per_unit: 1}}
";
    let limiter = TestLimiter::with_config(rules, config);
    let both = request("d", &["site=a", "user=u"]);
    assert_eq!(limiter.brief(&both), "OK: OK4 OK0");
    assert_eq!(limiter.brief(&both), "OVER: OK3 OVER");
    assert_eq!(limiter.brief(&both), "OVER: OK2 OVER");
}

#[test]
fn an_override_with_a_multiplier_has_a_longer_window() {
    let limiter = TestLimiter::new("domain: d\n");
    let mut call = request("d", &["k=v"]);
    let limit = RateLimitOverride {
        requests_per_unit: 1,
        unit: 2,
        unit_multiplier: Some(10),
    };
    call.descriptors[0].limit = Some(limit);
    let answer = limiter.ask(&call);
    let status = &answer.statuses[0];
    assert_eq!(status.duration_until_reset.unwrap().seconds, 400);
    assert_eq!(status.current_limit.as_ref().unwrap().unit_multiplier, Some(10));
    limiter.set_time(T + 399);
    assert_eq!(limiter.brief(&call), "OVER: OVER");
    limiter.set_time(T + 400);
    assert_eq!(limiter.brief(&call), "OK: OK0");
}

#[test]
fn an_override_counts_on_the_counter_of_the_rule_with_the_same_window() {
    let limiter = TestLimiter::new(
        "
domain: d
descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 5}}]
",
    );
    let plain = request("d", &["k=v"]);
    let with = |unit, unit_multiplier| {
        let mut call = plain.clone();
        call.descriptors[0].limit = Some(RateLimitOverride {
            requests_per_unit: 3,
            unit,
            unit_multiplier,
        });
        call
    };
    assert_eq!(limiter.brief(&plain), "OK: OK4");
    assert_eq!(limiter.brief(&with(3, None)), "OK: OK1");
    assert_eq!(limiter.brief(&with(2, Some(60))), "OK: OK0");
    assert_eq!(limiter.brief(&with(4, None)), "OK: OK2");
    assert_eq!(limiter.brief(&with(0, None)), "OK: OK1");
}

#[test]
fn values_that_are_not_text_are_limited_like_any_other() {
    let limiter = TestLimiter::new(
        "
domain: d
descriptors:
  - {key: q, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: p, value: 'a*', rate_limit: {unit: hour, requests_per_unit: 1}}
",
    );
    let with = |key: &str, value: &'static [u8]| {
        let mut call = request("d", &[&format!("{key}=")]);
        call.descriptors[0].entries[0].value = value.into();
        call
    };
    assert_eq!(limiter.brief(&with("q", b"\xff")), "OK: OK0");
    assert_eq!(limiter.brief(&with("q", b"\xff")), "OVER: OVER");
    assert_eq!(limiter.brief(&with("q", b"\xfe")), "OK: OK0");
    assert_eq!(limiter.brief(&with("p", b"a\xff\x00")), "OK: OK0");
    let mut other_domain = with("q", b"x");
    other_domain.domain = b"\xff"[..].into();
    assert_eq!(limiter.brief(&other_domain), "OK: NONE");
}

/// 32 threads, one key, limit 5,000: exactly 5,000 pass, and each number of hits left is given out once.
#[test]
fn exactly_the_limit_passes_on_many_threads() {
    const THREADS: usize = 32;
    const CALLS: usize = 200;
    for round in 0..100 {
        let limiter = TestLimiter::new(
            "
domain: d
descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 5000}}]
",
        );
        let call = request("d", &["k=x"]);
        let start = Barrier::new(THREADS);
        let left: Vec<u32> = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|_| {
                    scope.spawn(|| {
                        start.wait();
                        passed(&limiter, &call, CALLS)
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap())
                .collect()
        });
        assert_eq!(left.len(), 5_000, "round {round}");
        assert_eq!(
            left.into_iter().collect::<HashSet<_>>().len(),
            5_000,
            "round {round}"
        );
    }
}

/// What was left after each of the calls that passed.
fn passed(limiter: &TestLimiter, call: &RateLimitRequest, calls: usize) -> Vec<u32> {
    (0..calls)
        .map(|_| limiter.ask(call))
        .filter(|answer| answer.overall_code == 1)
        .map(|answer| answer.statuses[0].limit_remaining)
        .collect()
}

/// Three limits per call, charged all or nothing by threads that name them in different orders: the narrowest decides how
/// many calls pass, and each of the others is charged for these and no more.
#[test]
fn all_or_nothing_is_exact_on_many_threads() {
    const THREADS: usize = 16;
    let rules = "
domain: d
charge: all_or_nothing
descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 1500}}
  - {key: b, rate_limit: {unit: hour, requests_per_unit: 1000}}
  - {key: c, rate_limit: {unit: hour, requests_per_unit: 2000}}
";
    for _ in 0..20 {
        let limiter = TestLimiter::new(rules);
        let start = Barrier::new(THREADS);
        let passed: usize = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|i| {
                    let (limiter, start) = (&limiter, &start);
                    scope.spawn(move || {
                        let mut keys = ["a=x", "b=x", "c=x"];
                        keys.rotate_left(i % 3);
                        start.wait();
                        passed(limiter, &request("d", &keys), 100).len()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(passed, 1_000);
        let look = |key: &str| {
            let mut call = request("d", &[]);
            call.descriptors = vec![descriptor(key)];
            call.descriptors[0].hits_addend = Some(0);
            limiter.brief(&call)
        };
        assert_eq!(
            [look("a=x"), look("b=x"), look("c=x")],
            ["OK: OK500", "OK: OK0", "OK: OK1000"]
        );
    }
}

/// Calls of random sizes on random keys, some of which have several limits, by threads that know nothing of each other. What
/// each counter holds is what the admitted calls asked of it: no limit is exceeded and a refused call has charged nothing;
/// and what was refused is refused still, since nothing was given back.
#[test]
fn whatever_overlaps_only_what_is_admitted_is_charged() {
    const THREADS: u64 = 20;
    const KEYS: u64 = 12;
    let rules = "
domain: d
charge: all_or_nothing
descriptors:
  - {key: one, rate_limit: {unit: hour, requests_per_unit: 300}}
  - key: several
    rate_limits:
      - {unit: hour, requests_per_unit: 250, algorithm: sliding_window}
      - {unit: day, requests_per_unit: 220}
      - {unit: day, requests_per_unit: 400, algorithm: token_bucket}
";
    /// What a counter of each kind of key may hold in all.
    const MOST: [u64; 2] = [300, 220];
    for seed in 0..10 {
        let limiter = TestLimiter::new(rules);
        let start = Barrier::new(THREADS as usize);
        let calls: Vec<(Vec<(u64, u64)>, bool)> = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let (limiter, start) = (&limiter, &start);
                    scope.spawn(move || {
                        let mut random = SmallRandom(seed * THREADS + thread + 1);
                        start.wait();
                        (0..150)
                            .map(|_| {
                                let hits: Vec<(u64, u64)> = (0..1 + random.below(4))
                                    .map(|_| (random.below(KEYS), random.below(4)))
                                    .collect();
                                let passed = limiter.ask(&overlapping_call(&hits)).overall_code == 1;
                                (hits, passed)
                            })
                            .collect::<Vec<_>>()
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().unwrap())
                .collect()
        });
        let mut charged = [0; KEYS as usize];
        for (key, hits) in calls
            .iter()
            .filter(|(_, passed)| *passed)
            .flat_map(|(hits, _)| hits)
        {
            charged[*key as usize] += hits;
        }
        for (key, charged) in charged.into_iter().enumerate() {
            let most = MOST[key % 2];
            assert!(charged <= most, "{charged} hits on key {key}");
            let left = limiter.ask(&overlapping_call(&[(key as u64, 0)])).statuses[0].limit_remaining;
            assert_eq!(u64::from(left), most - charged, "key {key}");
        }
        let refused = calls.iter().filter(|(_, passed)| !passed);
        assert!(
            refused.clone().count() > 100,
            "the limits are tight enough to matter"
        );
        for (hits, _) in refused {
            assert_eq!(limiter.ask(&overlapping_call(hits)).overall_code, 2, "{hits:?}");
        }
    }
}

/// A call with a descriptor for each of these keys and hits. Keys with an even number have one limit, the others several.
fn overlapping_call(hits: &[(u64, u64)]) -> RateLimitRequest {
    let descriptor = |(key, hits): &(u64, u64)| {
        let kind = if key % 2 == 0 { "one" } else { "several" };
        let mut descriptor = descriptor(&format!("{kind}={key}"));
        descriptor.hits_addend = Some(*hits);
        descriptor
    };
    call_of(hits.iter().map(descriptor).collect())
}

/// A generator of numbers for tests: Marsaglia's xorshift.
struct SmallRandom(u64);

impl SmallRandom {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

proptest! {
    /// However calls mix hits, looks and refunds: what is charged is what passed, less what was given back.
    #[test]
    fn all_or_nothing_charges_what_passed(calls in prop::collection::vec((0u64..4, any::<bool>()), 0..60)) {
        let limiter = TestLimiter::new(ALL_OR_NOTHING);
        let mut charged = [0u64, 0];
        for (hits, is_refund) in calls {
            let mut call = request("d", &["site=a", "user=u"]);
            for descriptor in &mut call.descriptors {
                descriptor.hits_addend = Some(hits);
                descriptor.is_negative_hits = is_refund;
            }
            let answer = limiter.ask(&call);
            let after = charged.map(|hits_before| {
                if is_refund { hits_before.saturating_sub(hits) } else { hits_before + hits }
            });
            let passes = after[0] <= 5 && after[1] <= 2;
            prop_assert_eq!(answer.overall_code == 1, passes);
            if passes {
                charged = after;
                let left = format!("OK: OK{} OK{}", 5 - charged[0], 2 - charged[1]);
                prop_assert_eq!(brief(&answer), left);
            }
        }
    }
}

// === beyond the fixed window ===

#[test]
fn a_bucket_goes_into_debt_for_cost_that_is_reported_later() {
    let limiter = TestLimiter::new("
domain: d
descriptors:
  - key: llm
    rate_limit: {unit: minute, requests_per_unit: 600, algorithm: token_bucket, burst_size: 100, charge_refused: true}
");
    let with_hits = |hits| {
        let mut call = request("d", &["llm=k"]);
        call.descriptors[0].hits_addend = Some(hits);
        call
    };
    assert_eq!(limiter.brief(&with_hits(0)), "OK: OK100");
    assert_eq!(limiter.brief(&with_hits(150)), "OVER: OVER");
    let look = limiter.ask(&with_hits(0));
    assert_eq!(brief(&look), "OVER: OVER");
    assert_eq!(look.statuses[0].duration_until_reset.unwrap().seconds, 5);
    limiter.advance(Duration::from_secs(5));
    assert_eq!(limiter.brief(&with_hits(0)), "OK: OK0");
    assert_eq!(limiter.brief(&with_hits(1)), "OVER: OVER");
}

#[test]
fn a_window_that_is_no_unit_is_shown_without_one() {
    let limiter = TestLimiter::new(
        "
domain: d
descriptors:
  - {key: a, rate_limit: {unit: 500ms, requests_per_unit: 9}}
  - {key: b, rate_limit: {unit: 5h, requests_per_unit: 9}}
",
    );
    let shown = |key: &str| {
        let answer = limiter.ask(&request("d", &[key]));
        let limit = answer.statuses[0].current_limit.clone().unwrap();
        (limit.unit, limit.unit_multiplier)
    };
    assert_eq!(shown("a=1"), (0, None));
    assert_eq!(shown("b=1"), (3, Some(5)));
}

const BANNED: &str = "
domain: d
descriptors:
  - {key: w, rate_limit: {unit: hour, requests_per_unit: 2, ban: {after: 1}}}
  - {key: t, rate_limit: {unit: second, requests_per_unit: 1, ban: {after: 0, for: 10m}}}
  - {key: s, shadow_mode: true, rate_limit: {unit: hour, requests_per_unit: 0, ban: {after: 0}}}
";

/// The ban in an answer, in milliseconds.
fn ban(answer: &RateLimitResponse) -> Option<f64> {
    let json: Value = serde_json::from_str(&response(&answer.encode_to_vec())).unwrap();
    let ban = &json["dynamicMetadata"]["tollgate"];
    ban.is_object().then(|| {
        assert_eq!(ban["banned"], true);
        ban["ban_remaining_ms"].as_f64().unwrap()
    })
}

#[test]
fn a_ban_is_told_in_the_metadata() {
    let limiter = TestLimiter::new(BANNED);
    let call = request("d", &["w=x"]);
    let answers: Vec<_> = (0..5).map(|_| limiter.ask(&call)).collect();
    assert_eq!(
        answers.iter().map(brief).collect::<Vec<_>>(),
        ["OK: OK1", "OK: OK0", "OVER: OVER", "OVER: OVER", "OVER: OVER"]
    );
    let bans: Vec<_> = answers.iter().map(ban).collect();
    assert_eq!(bans, [None, None, None, Some(2_800_000.0), Some(2_800_000.0)]);
    limiter.set_time(T + 2_800);
    assert_eq!(limiter.brief(&call), "OK: OK1");
}

#[test]
fn a_ban_with_a_length_outlasts_the_window_and_says_how_long() {
    let config = LimiterConfig {
        ban_header: Some("x-banned".into()),
        ..LimiterConfig::default()
    };
    let limiter = TestLimiter::with_config(BANNED, config);
    let call = request("d", &["t=x"]);
    assert_eq!(limiter.brief(&call), "OK: OK0");
    assert_eq!(ban(&limiter.ask(&call)), Some(600_000.0));
    limiter.set_time(T + 599);
    let answer = limiter.ask(&call);
    assert_eq!(brief(&answer), "OVER: OVER");
    let header = &answer.response_headers_to_add[0];
    assert_eq!((header.key.as_str(), header.value.as_str()), ("x-banned", "1"));
    assert_eq!(answer.statuses[0].duration_until_reset.unwrap().seconds, 1);
    limiter.set_time(T + 600);
    assert_eq!(limiter.brief(&call), "OK: OK0");
}

#[test]
fn hits_during_a_ban_with_a_length_do_not_bring_on_the_next() {
    let limiter = TestLimiter::new(
        "
domain: d
descriptors:
  - {key: k, rate_limit: {unit: 10s, requests_per_unit: 1, window_start: first_hit, ban: {after: 0, for: 35s}}}
",
    );
    let call = request("d", &["k=x"]);
    assert_eq!([0; 2].map(|_| limiter.brief(&call)), ["OK: OK0", "OVER: OVER"]);
    for second in 1..35 {
        limiter.set_time(T + second);
        assert_eq!(limiter.brief(&call), "OVER: OVER", "{second}");
    }
    limiter.set_time(T + 35);
    assert_eq!([0; 2].map(|_| limiter.brief(&call)), ["OK: OK0", "OVER: OVER"]);
}

/// One descriptor with hits of its own; negative ones are given back.
fn with_hits(descriptor: &str, hits: i64) -> RateLimitDescriptor {
    let mut descriptor = request("d", &[descriptor]).descriptors.remove(0);
    descriptor.hits_addend = Some(hits.unsigned_abs());
    descriptor.is_negative_hits = hits < 0;
    descriptor
}

fn call_of(descriptors: Vec<RateLimitDescriptor>) -> RateLimitRequest {
    RateLimitRequest {
        domain: "d".into(),
        descriptors,
        hits_addend: 0,
    }
}

#[test]
fn a_call_that_was_taken_back_stays_refused_whatever_is_given_back() {
    let limiter = TestLimiter::new(
        "
domain: d
charge: all_or_nothing
descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 1, burst: {unit: hour, requests_per_unit: 5, window_start: first_hit}}}
",
    );
    let call = call_of(vec![with_hits("k=v", 4), with_hits("k=v", -1)]);
    // One that passes takes four and gives one back; a refused one gives one back all the same, so that the fourth has room.
    assert_eq!([0; 4].map(|_| limiter.ask(&call).overall_code), [1, 2, 2, 1]);
    // The limit that came along has charged; what is given back stands in the way by itself.
    let limiter = TestLimiter::new(ALL_OR_NOTHING);
    let mut over = call_of(vec![with_hits("user=v", 8), with_hits("user=v", -1)]);
    over.descriptors[0].limit = Some(RateLimitOverride {
        unit: 3,
        requests_per_unit: 10,
        unit_multiplier: None,
    });
    assert_eq!([0; 3].map(|_| limiter.ask(&over).overall_code), [2; 3]);
    assert_eq!(limiter.brief(&request("d", &["user=v"])), "OK: OK1");
}

#[test]
fn a_ban_until_the_end_of_the_window_ends_there() {
    for charge in ["each", "all_or_nothing"] {
        let limiter = TestLimiter::new(&format!(
            "
domain: d
charge: {charge}
descriptors:
  - {{key: k, rate_limit: {{unit: minute, requests_per_unit: 10, window_start: first_hit, ban: {{after: 0, for: window}}}}}}
  - {{key: b, rate_limit: {{unit: minute, requests_per_unit: 60, burst_size: 5, algorithm: token_bucket, ban: {{after: 0, for: window}}}}}}
"
        ));
        for key in ["k=x", "b=x"] {
            let hits = |hits| call_of(vec![with_hits(key, hits)]);
            limiter.set_time(T);
            assert_eq!(limiter.ask(&hits(11)).overall_code, 2);
            for second in [1, 30, 59] {
                limiter.set_time(T + second);
                assert_eq!(
                    ban(&limiter.ask(&hits(1))),
                    Some(1_000.0 * (60 - second) as f64),
                    "{key}"
                );
            }
            limiter.set_time(T + 60);
            assert_eq!(limiter.ask(&hits(5)).overall_code, 1, "{charge} {key}");
        }
    }
}

#[test]
fn an_address_that_is_refused_charges_nothing_else() {
    let limiter = TestLimiter::new(
        "
domain: d
charge: all_or_nothing
client_address: [{key: xff, trusted: [loopback], malformed: refuse}]
descriptors:
  - {key: k, rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: xff, rate_limit: {unit: hour, requests_per_unit: 2}}
",
    );
    for _ in 0..3 {
        assert_eq!(limiter.ask(&request("d", &["k=v", "xff=junk"])).overall_code, 2);
    }
    assert_eq!(limiter.brief(&request("d", &["k=v"])), "OK: OK1");
}

#[test]
fn what_is_given_back_neither_renews_a_window_nor_stops_at_the_burst() {
    let limiter = TestLimiter::new(
        "
domain: d
descriptors:
  - {key: r, rate_limit: {unit: minute, requests_per_unit: 1, window_start: first_hit, on_exceeded: renew_window}}
  - {key: b, rate_limit: {unit: hour, requests_per_unit: 1, burst: {unit: hour, requests_per_unit: 5}}}
  - {key: u, rate_limit: {unit: hour, requests_per_unit: 1, charge_refused: false, burst: {unit: hour, requests_per_unit: 5}}}
",
    );
    for _ in 0..3 {
        limiter.ask(&request("d", &["r=x"]));
    }
    limiter.set_time(T + 49);
    let answer = limiter.ask(&call_of(vec![with_hits("r=x", -1)]));
    assert_eq!(answer.statuses[0].duration_until_reset.unwrap().seconds, 11);
    for key in ["b=x", "u=x"] {
        let passing = || {
            (0..9)
                .filter(|_| limiter.ask(&request("d", &[key])).overall_code == 1)
                .count()
        };
        assert_eq!(passing(), 6, "{key}");
        limiter.ask(&call_of(vec![with_hits(key, -9)]));
        assert_eq!(passing(), 6, "{key}");
    }
}

#[test]
fn looks_do_not_count_towards_a_ban_and_shadow_mode_bans_nobody() {
    let limiter = TestLimiter::new(BANNED);
    let mut look = request("d", &["w=x"]);
    let mut hits = look.clone();
    hits.hits_addend = 3;
    assert_eq!(limiter.brief(&hits), "OVER: OVER");
    look.descriptors[0].hits_addend = Some(0);
    assert_eq!([0; 5].map(|_| ban(&limiter.ask(&look))), [None; 5]);
    let shadowed = limiter.ask(&request("d", &["s=x"]));
    assert_eq!((brief(&shadowed), ban(&shadowed)), ("OK: OK0".into(), None));
}

#[test]
fn refusals_count_towards_a_ban_also_where_a_refused_call_charges_nothing() {
    let limiter = TestLimiter::new(&BANNED.replace("domain: d", "domain: d\ncharge: all_or_nothing"));
    let mut call = request("d", &["w=x"]);
    call.hits_addend = 3;
    assert_eq!(
        [0; 3].map(|_| ban(&limiter.ask(&call)).is_some()),
        [false, true, true]
    );
}

const SEVERAL: &str = "
domain: d
descriptors:
  - key: k
    rate_limits:
      - {unit: minute, requests_per_unit: 3, name: m}
      - {unit: hour, requests_per_unit: 4, name: h}
      - {unit: day, requests_per_unit: 100, algorithm: token_bucket, name: b}
  - {key: r, rate_limit: {unit: day, requests_per_unit: 9, replaces: [{name: m}, {name: h}]}}
";

/// The name of the limit that is shown, and what is left of it.
fn shown(answer: &RateLimitResponse) -> (String, String) {
    let limit = answer.statuses[0].current_limit.as_ref().unwrap();
    (limit.name.clone(), brief(answer))
}

#[test]
fn of_several_limits_the_one_that_refuses_is_shown_or_the_closest() {
    let limiter = TestLimiter::new(SEVERAL);
    let call = request("d", &["k=x"]);
    let ask = || {
        let (name, brief) = shown(&limiter.ask(&call));
        format!("{name} {brief}")
    };
    assert_eq!(
        [0; 4].map(|_| ask()),
        ["m OK: OK2", "m OK: OK1", "m OK: OK0", "m OVER: OVER"]
    );
    limiter.set_time(T + 40);
    // The refused call was charged on the hour as well, which is at its limit now.
    assert_eq!(ask(), "h OVER: OVER");
}

#[test]
fn several_limits_are_charged_all_or_not_at_all() {
    let limiter = TestLimiter::new(&SEVERAL.replace("domain: d", "domain: d\ncharge: all_or_nothing"));
    let call = request("d", &["k=x"]);
    for _ in 0..10 {
        limiter.ask(&call);
    }
    limiter.set_time(T + 40);
    assert_eq!(shown(&limiter.ask(&call)), ("h".into(), "OK: OK0".into()));
    assert_eq!(shown(&limiter.ask(&call)), ("h".into(), "OVER: OVER".into()));
}

#[test]
fn several_limits_are_replaced_one_by_one() {
    let limiter = TestLimiter::new(SEVERAL);
    let both = request("d", &["k=x", "r=x"]);
    assert_eq!(shown(&limiter.ask(&both)), ("b".into(), "OK: OK99 OK8".into()));
    assert_eq!(
        shown(&limiter.ask(&request("d", &["k=x"]))),
        ("m".into(), "OK: OK2".into())
    );
}

#[test]
fn networks_come_between_exact_values_and_wildcards() {
    let limiter = TestLimiter::new(
        "
domain: d
descriptors:
  - {key: a, rate_limit: {unit: hour, requests_per_unit: 1}}
  - {key: a, value: '10.*', rate_limit: {unit: hour, requests_per_unit: 2}}
  - {key: a, value_cidr: [10.1.0.0/16, 10.2.0.0/16], rate_limit: {unit: hour, requests_per_unit: 3}}
  - {key: a, value_cidr: 10.1.2.0/24, share_threshold: true, rate_limit: {unit: hour, requests_per_unit: 4}}
  - {key: a, value: 10.1.2.3, rate_limit: {unit: hour, requests_per_unit: 5}}
",
    );
    for (value, expected) in [
        ("192.0.2.1", "OK: OK0"),
        ("10.9.9.9", "OK: OK1"),
        ("10.2.9.9", "OK: OK2"),
        ("10.1.9.9", "OK: OK2"),
        ("10.1.2.4", "OK: OK3"),
        ("10.1.2.5", "OK: OK2"),
        ("10.1.2.3", "OK: OK4"),
        ("10.x", "OK: OK1"),
    ] {
        assert_eq!(
            limiter.brief(&request("d", &[&format!("a={value}")])),
            expected,
            "{value}"
        );
    }
}

const CLIENTS: &str = "
domain: d
client_address:
  - {key: xff, trusted: [uniquelocal], ipv6_prefix: 48, malformed: MALFORMED}
descriptors:
  - {key: xff, rate_limit: {unit: hour, requests_per_unit: 9}}
  - {key: xff, value: '2001:db8::7', rate_limit: {unit: hour, requests_per_unit: 5}}
  - {key: raw, rate_limit: {unit: hour, requests_per_unit: 9}}
";

#[test]
fn rules_see_the_full_address_and_counters_what_tells_clients_apart() {
    let limiter = TestLimiter::new(&CLIENTS.replace("MALFORMED", "previous"));
    for (chain, expected) in [
        ("1.1.1.1, 203.0.113.9, 10.0.0.1", "OK: OK8"),
        ("2.2.2.2, 203.0.113.9:443, 10.0.0.2", "OK: OK7"),
        ("::ffff:203.0.113.9", "OK: OK6"),
        ("203.0.113.10", "OK: OK8"),
        ("2001:db8:0:1::1", "OK: OK8"),
        ("2001:DB8:0:2::2", "OK: OK7"),
        ("2001:0db8::0007", "OK: OK2"),
        ("2001:db8:1::1", "OK: OK8"),
        ("junk, 203.0.113.10", "OK: OK7"),
        ("junk", "OK: OK8"),
        ("", "OK: OK7"),
    ] {
        assert_eq!(
            limiter.brief(&request("d", &[&format!("xff={chain}")])),
            expected,
            "{chain}"
        );
    }
    assert_eq!(limiter.brief(&request("d", &["raw=1.1.1.1, 2.2.2.2"])), "OK: OK8");
}

#[test]
fn a_malformed_chain_may_be_refused() {
    let limiter = TestLimiter::new(&CLIENTS.replace("MALFORMED", "refuse"));
    let answer = limiter.ask(&request("d", &["raw=x", "xff=1.1.1.1, junk, 10.0.0.1"]));
    assert_eq!(answer.overall_code, 2);
    assert_eq!(
        (answer.statuses[1].code, answer.statuses[1].current_limit.as_ref()),
        (2, None)
    );
    assert_eq!(limiter.brief(&request("d", &["xff=junk, 1.1.1.1"])), "OK: OK8");
}
