//! What is decided beyond the recorded behaviour of envoyproxy/ratelimit: charging all or nothing, many threads, sharing.

use std::collections::HashSet;
use std::sync::Barrier;
use std::thread;

use proptest::prelude::*;
use tollgate::limiter::LimiterConfig;
use tollgate::proto::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::RateLimitOverride;
use tollgate::proto::envoy::service::ratelimit::v3::RateLimitRequest;

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
