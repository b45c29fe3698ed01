//! Rules that change while calls come in.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use tempfile::TempDir;
use tokio_stream::StreamExt as _;
use tollgate::config::{RulesConfig, RulesSource, RuntimeDirectory};
use tollgate::health::Health;
use tollgate::limiter::{Limiter, LimiterConfig};
use tollgate::metrics::SampleValue;
use tollgate::reload::Reloader;
use tollgate::server::{Parts, RulesFrom};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;

use crate::support::{TestServer, brief, http, parts, request, server_config, wait_until};

fn rules_of(limit: u32) -> String {
    format!(
        "{{domain: d, descriptors: [{{key: k, rate_limit: {{unit: hour, requests_per_unit: {limit}}}}}]}}"
    )
}

/// A server with the rules of `source`, as far as they can be used.
async fn serve(source: RulesSource, needs_rules: bool) -> TestServer {
    let reloader = Reloader::new(RulesConfig {
        source,
        merge_domains: false,
        ignore_dotfiles: true,
    });
    let parts = Parts {
        health: Health::new(needs_rules),
        ..parts(Limiter::new(LimiterConfig::default()))
    };
    match reloader.load() {
        Ok(loaded) => parts.in_force().put(loaded),
        Err(fault) => parts.in_force().refuse(&fault),
    }
    let parts = Parts {
        rules: Some(RulesFrom::Files(reloader)),
        ..parts
    };
    TestServer::start_parts(server_config(), parts).await
}

fn paths(path: &Path) -> RulesSource {
    RulesSource::Paths(vec![path.to_owned()])
}

/// Waits until the metric has this value.
async fn wait_for(server: &TestServer, metric: &str, value: u64) {
    let what = format!("{metric} to become {value}");
    wait_until(&what, async || self::metric(server, metric).await == value).await;
}

async fn metric(server: &TestServer, metric: &str) -> u64 {
    let (_, page) = http(server.http, "GET", "/metrics", "").await;
    let prefix = format!("ratelimit_service_{metric} ");
    page.lines()
        .find_map(|line| line.strip_prefix(&prefix)?.parse().ok())
        .unwrap_or_else(|| panic!("{metric} is not in {page}"))
}

async fn ask(server: &TestServer, descriptor: &str) -> String {
    let mut client = server.client().await;
    let answer = client.should_rate_limit(request("d", &[descriptor])).await;
    brief(&answer.unwrap().into_inner())
}

/// A mounted `ConfigMap`: the file is a link into `..data`, a link that is swapped.
struct ConfigMap(TempDir, u32);

impl ConfigMap {
    fn new(text: &str) -> Self {
        let mut mount = ConfigMap(tempfile::tempdir().unwrap(), 0);
        mount.swap(text);
        symlink("..data/rules.yaml", mount.0.path().join("rules.yaml")).unwrap();
        mount
    }

    fn swap(&mut self, text: &str) {
        let path = self.0.path();
        let old = path.join(format!("..v{}", self.1));
        self.1 += 1;
        let new = format!("..v{}", self.1);
        fs::create_dir(path.join(&new)).unwrap();
        fs::write(path.join(&new).join("rules.yaml"), text).unwrap();
        symlink(&new, path.join("..data_tmp")).unwrap();
        fs::rename(path.join("..data_tmp"), path.join("..data")).unwrap();
        // There is none before the first.
        let _ = fs::remove_dir_all(old);
    }
}

#[tokio::test]
async fn every_swap_of_a_config_map_is_taken_up_once() {
    let mut mount = ConfigMap::new(&rules_of(100));
    let server = serve(paths(mount.0.path()), false).await;
    for limit in 1..=5 {
        mount.swap(&rules_of(limit));
        wait_for(&server, "config_load_success", u64::from(limit) + 1).await;
        assert_eq!(
            ask(&server, &format!("k=v{limit}")).await,
            format!("OK: OK{}", limit - 1)
        );
    }
    assert_eq!(metric(&server, "config_load_error").await, 0);
}

#[tokio::test]
async fn bad_rules_do_not_replace_good_ones_and_are_told_once() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rules.yaml");
    fs::write(&file, rules_of(3)).unwrap();
    let server = serve(paths(&file), false).await;
    assert_eq!(ask(&server, "k=1").await, "OK: OK2");
    fs::write(&file, "domain: d\n  descriptors: [").unwrap();
    wait_for(&server, "config_load_error", 1).await;
    assert_eq!(ask(&server, "k=1").await, "OK: OK1");
    assert_eq!(http(server.http, "GET", "/healthcheck", "").await.0, 200);
    fs::write(&file, rules_of(5)).unwrap();
    wait_for(&server, "config_load_success", 2).await;
    assert_eq!(ask(&server, "k=1").await, "OK: OK2", "two of five are used");
    assert_eq!(metric(&server, "config_load_error").await, 1);
}

#[test]
fn files_that_do_not_change_are_not_read_again() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rules.yaml");
    fs::write(&file, rules_of(3)).unwrap();
    let parts = parts(Limiter::new(LimiterConfig::default()));
    let mut reloader = Reloader::new(RulesConfig {
        source: paths(&file),
        merge_domains: false,
        ignore_dotfiles: false,
    });
    let mut loads = |looks: usize| {
        let before = loads_of(&parts);
        (0..looks).for_each(|_| reloader.look(&parts.in_force()));
        let after = loads_of(&parts);
        [after[0] - before[0], after[1] - before[1]]
    };
    assert_eq!(loads(10), [0, 0]);
    fs::write(&file, "domain: [").unwrap();
    assert_eq!(loads(10), [0, 1]);
    fs::write(&file, rules_of(10)).unwrap();
    assert_eq!(loads(10), [1, 0]);
}

/// How often rules were loaded, and could not be.
fn loads_of(parts: &Parts) -> [u64; 2] {
    let samples = parts.metrics.samples(&parts.limiter, None);
    ["config_load_success", "config_load_error"].map(|name| {
        let sample = samples.iter().find(|sample| sample.name.ends_with(name)).unwrap();
        match sample.value {
            SampleValue::Counter(count) => count,
            _ => panic!("{name} is a counter"),
        }
    })
}

#[test]
fn files_that_cannot_be_read_are_tried_again_without_a_change_and_told_once() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rules.yaml");
    fs::write(&file, rules_of(3)).unwrap();
    let parts = parts(Limiter::new(LimiterConfig::default()));
    let mut reloader = Reloader::new(RulesConfig {
        source: paths(directory.path()),
        merge_domains: false,
        ignore_dotfiles: false,
    });
    // A link that leads nowhere, and then somewhere that looks the same.
    symlink(directory.path().join("gone"), directory.path().join("more.yaml")).unwrap();
    (0..10).for_each(|_| reloader.look(&parts.in_force()));
    assert_eq!(loads_of(&parts), [0, 1]);
    fs::write(directory.path().join("gone"), "domain: e").unwrap();
    fs::remove_file(directory.path().join("more.yaml")).unwrap();
    (0..10).for_each(|_| reloader.look(&parts.in_force()));
    assert_eq!(loads_of(&parts), [1, 1]);
}

#[tokio::test]
async fn rules_that_are_bad_at_the_start_are_taken_up_when_they_are_mended() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("ratelimit/config");
    fs::create_dir_all(&directory).unwrap();
    fs::write(directory.join("a.yaml"), "domain: d\n  descriptors: [").unwrap();
    let runtime = RulesSource::Runtime(RuntimeDirectory {
        root: root.path().to_owned(),
        subdirectory: "ratelimit".into(),
        appdirectory: "config".into(),
        watch_root: false,
    });
    let server = serve(runtime, true).await;
    let mut client = server.client().await;
    let error = client
        .should_rate_limit(request("d", &["k=1"]))
        .await
        .unwrap_err();
    assert_eq!(error.message(), "no rate limit configuration loaded");
    let (status, reason) = http(server.http, "GET", "/readyz", "").await;
    assert_eq!((status, reason.trim()), (503, "no rules are loaded"));
    fs::write(directory.join("a.yaml"), rules_of(3)).unwrap();
    wait_for(&server, "config_load_success", 1).await;
    assert_eq!(ask(&server, "k=1").await, "OK: OK2");
    assert_eq!(http(server.http, "GET", "/readyz", "").await.0, 200);
}

#[tokio::test]
async fn health_may_depend_on_rules_and_counts_survive_their_absence() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rules.yaml");
    fs::write(&file, rules_of(1)).unwrap();
    let server = serve(paths(directory.path()), true).await;
    let mut health = HealthClient::new(server.channel().await);
    let service = "ratelimit".into();
    let mut watch = health
        .watch(HealthCheckRequest { service })
        .await
        .unwrap()
        .into_inner();
    let mut told = async || watch.next().await.unwrap().unwrap().status();
    assert_eq!(told().await, ServingStatus::Serving);
    assert_eq!(ask(&server, "k=1").await, "OK: OK0");
    fs::remove_file(&file).unwrap();
    assert_eq!(told().await, ServingStatus::NotServing);
    assert_eq!(ask(&server, "k=1").await, "OK: NONE");
    assert_eq!(http(server.http, "GET", "/healthcheck", "").await.0, 500);
    fs::write(&file, rules_of(1)).unwrap();
    assert_eq!(told().await, ServingStatus::Serving);
    assert_eq!(ask(&server, "k=1").await, "OVER: OVER");
    assert_eq!(http(server.http, "GET", "/healthcheck", "").await.0, 200);
}

#[tokio::test]
async fn health_need_not_depend_on_rules() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rules.yaml");
    fs::write(&file, rules_of(1)).unwrap();
    let server = serve(paths(directory.path()), false).await;
    fs::remove_file(&file).unwrap();
    wait_for(&server, "config_load_success", 2).await;
    assert_eq!(ask(&server, "k=1").await, "OK: NONE");
    assert_eq!(http(server.http, "GET", "/healthcheck", "").await.0, 200);
}

#[tokio::test]
async fn what_is_in_force_is_shown_while_bad_rules_wait_to_be_mended() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("rules.yaml");
    fs::write(&file, rules_of(10)).unwrap();
    let server = serve(paths(&file), false).await;
    let shown = async |page: &str| http(server.debug.unwrap(), "GET", page, "").await.1;
    for _ in 0..7 {
        ask(&server, "k=1").await;
    }
    // Fewer than were charged.
    fs::write(&file, rules_of(5)).unwrap();
    wait_for(&server, "config_load_success", 2).await;
    assert_eq!(ask(&server, "k=1").await, "OVER: OVER");
    let in_force = shown("/rlconfig").await;
    assert!(
        in_force.contains("d.k: unit=HOUR requests_per_unit=5,"),
        "{in_force}"
    );
    fs::write(&file, "domain: [").unwrap();
    wait_for(&server, "config_load_error", 1).await;
    assert_eq!(shown("/rlconfig").await, in_force);
    let stats = shown("/stats").await;
    for line in [
        "rate_limit.d.k.total_hits: 8\n",
        "rate_limit.d.k.over_limit: 1\n",
        "config_load_error: 1\n",
    ] {
        assert!(stats.contains(line), "{line} is not in {stats}");
    }
}

#[tokio::test]
async fn a_swap_of_the_root_is_taken_up_with_all_that_belongs_to_it() {
    let root = tempfile::tempdir().unwrap();
    for (version, limit) in [("v1", 1), ("v2", 2)] {
        let directory = root.path().join(version).join("ratelimit");
        fs::create_dir_all(directory.join("config")).unwrap();
        fs::create_dir_all(directory.join("other")).unwrap();
        fs::write(directory.join("config/a.yaml"), rules_of(limit)).unwrap();
        fs::write(directory.join("other/b.yaml"), "domain: other").unwrap();
        fs::write(directory.join("config.c.yaml"), "domain: c").unwrap();
    }
    let current = root.path().join("current");
    symlink("v1", &current).unwrap();
    let runtime = RulesSource::Runtime(RuntimeDirectory {
        root: current.clone(),
        subdirectory: "ratelimit".into(),
        appdirectory: "config".into(),
        watch_root: true,
    });
    let server = serve(runtime, false).await;
    assert_eq!(ask(&server, "k=1").await, "OK: OK0");
    symlink("v2", root.path().join("next")).unwrap();
    fs::rename(root.path().join("next"), &current).unwrap();
    wait_for(&server, "config_load_success", 2).await;
    assert_eq!(ask(&server, "k=2").await, "OK: OK1");
    let domains: Vec<_> = {
        let matcher = server.limiter.matcher();
        let mut domains: Vec<String> = matcher
            .as_deref()
            .unwrap()
            .domains()
            .map(|domain| domain.name().to_owned())
            .collect();
        domains.sort();
        domains
    };
    assert_eq!(domains, ["c", "d"]);
}

/// Two rules that always have the same limit: a call that sees different ones has seen two sets of rules.
#[tokio::test(flavor = "multi_thread")]
async fn no_call_sees_an_error_or_two_sets_of_rules() {
    let both = |limit: u32| {
        format!(
            "{{domain: d, descriptors: [{{key: a, rate_limit: {{unit: hour, requests_per_unit: {limit}}}}}, \
             {{key: b, rate_limit: {{unit: hour, requests_per_unit: {limit}}}}}]}}"
        )
    };
    let mut mount = ConfigMap::new(&both(1_000_000));
    let server = serve(paths(mount.0.path()), false).await;
    let (done, is_done) = tokio::sync::watch::channel(false);
    let mut callers = Vec::new();
    for _ in 0..4 {
        let (mut client, is_done) = (server.client().await, is_done.clone());
        callers.push(tokio::spawn(async move {
            let mut calls = 0u64;
            while !*is_done.borrow() {
                let answer = client.should_rate_limit(request("d", &["a=x", "b=x"])).await;
                let answer = answer.expect("a swap fails no call").into_inner();
                let limit = |i: usize| {
                    answer.statuses[i]
                        .current_limit
                        .as_ref()
                        .unwrap()
                        .requests_per_unit
                };
                assert_eq!(limit(0), limit(1));
                calls += 1;
            }
            calls
        }));
    }
    for swap in 1..=4 {
        mount.swap(&both(1_000_000 + swap));
        wait_for(&server, "config_load_success", u64::from(swap) + 1).await;
    }
    done.send_replace(true);
    for caller in callers {
        assert!(caller.await.unwrap() > 10, "there was load");
    }
}
