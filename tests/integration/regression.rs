//! Faults that were reported on rate-limit services, as tests. The links lead to the reports.

use std::collections::HashSet;

use tonic::Code;

use crate::support::{TestLimiter, TestServer, brief, request, rules};

/// Load tests that let more, or fewer, through than configured.
///
/// <https://github.com/envoyproxy/ratelimit/issues/313>, <https://github.com/envoyproxy/ratelimit/issues/821>,
/// <https://github.com/envoyproxy/gateway/issues/4292>
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn exactly_the_limit_passes_over_several_connections() {
    let server = TestServer::start(
        "
domain: d
descriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 1000}}]
",
    )
    .await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(server.client().await);
    }
    let calls: Vec<_> = (0..64)
        .map(|i| {
            let mut client = clients[i % 4].clone();
            tokio::spawn(async move {
                let mut answers = Vec::new();
                for _ in 0..50 {
                    answers.push(
                        client
                            .should_rate_limit(request("d", &["k=x"]))
                            .await
                            .unwrap()
                            .into_inner(),
                    );
                }
                answers
            })
        })
        .collect();
    let mut left = Vec::new();
    let mut refused = 0;
    for calls in calls {
        for answer in calls.await.unwrap() {
            match answer.overall_code {
                1 => left.push(answer.statuses[0].limit_remaining),
                _ => refused += 1,
            }
        }
    }
    assert_eq!((left.len(), refused), (1_000, 2_200));
    assert_eq!(left.into_iter().collect::<HashSet<_>>(), (0..1_000).collect());
}

/// After a reload the old maximum was enforced, what is left underflowed, or everybody started from zero.
///
/// <https://github.com/Kuadrant/limitador/issues/522>, <https://github.com/letsencrypt/boulder/issues/8785>
#[test]
fn counters_survive_a_changed_limit() {
    let with = |limit: u32| {
        format!(
            "domain: d\ndescriptors: [{{key: k, rate_limit: {{unit: hour, requests_per_unit: {limit}}}}}]\n"
        )
    };
    let limiter = TestLimiter::new(&with(10));
    let call = request("d", &["k=1"]);
    let before: Vec<String> = (0..7).map(|_| limiter.brief(&call)).collect();
    assert_eq!(before.last().unwrap(), "OK: OK3");
    limiter.limiter.set_matcher(rules(&with(5)));
    assert_eq!(limiter.brief(&call), "OVER: OVER");
    limiter.limiter.set_matcher(rules(&with(20)));
    assert_eq!(limiter.brief(&call), "OK: OK11");
}

/// Long keys were skipped, cut, or an error; and a message that is too large took the server with it.
///
/// <https://github.com/nginx/nginx/pull/1583>, <https://github.com/kubernetes/ingress-nginx/issues/8683>
#[tokio::test]
async fn long_values_count_and_too_large_messages_do_not() {
    let server = TestServer::start(
        "
domain: d
descriptors: [{key: uri, rate_limit: {unit: hour, requests_per_unit: 2}}]
",
    )
    .await;
    let mut client = server.client().await;
    for length in [300, 70_000, 300_000] {
        for last in ["a", "b"] {
            let call = request("d", &[&format!("uri={}{last}", "u".repeat(length - 1))]);
            for expected in ["OK: OK1", "OK: OK0", "OVER: OVER"] {
                let answer = client.should_rate_limit(call.clone()).await.unwrap();
                assert_eq!(brief(answer.get_ref()), expected, "{length} {last}");
            }
        }
    }
    let counters = server.limiter.store().len();
    let too_large = request("d", &[&format!("uri={}", "u".repeat(5 << 20))]);
    let status = client.should_rate_limit(too_large).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status}");
    assert_eq!(server.limiter.store().len(), counters);
    assert!(client.should_rate_limit(request("d", &["uri=x"])).await.is_ok());
}
