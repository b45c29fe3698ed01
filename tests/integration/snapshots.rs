//! Counters that outlive their process.

use std::os::unix::fs::PermissionsExt as _;
use std::time::Duration;

use bytes::BytesMut;
use prost::Message as _;
use tollgate::clock::Timestamp;
use tollgate::limiter::{Limiter, LimiterConfig};
use tollgate::proto::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use tollgate::rls::{decode, encode};
use tollgate::store::snapshot::SnapshotFile;

use crate::support::{T, request, rules};

/// One rule for each kind of counter.
const RULES: &str = "
domain: d
descriptors:
  - {key: clock, rate_limit: {unit: minute, requests_per_unit: 5}}
  - {key: calendar, rate_limit: {unit: day, time_zone: Europe/Berlin, requests_per_unit: 5}}
  - {key: first, rate_limit: {unit: 40s, requests_per_unit: 5, window_start: first_hit}}
  - {key: sliding, rate_limit: {unit: 50s, requests_per_unit: 5, algorithm: sliding_window}}
  - {key: bucket, rate_limit: {unit: minute, requests_per_unit: 7, burst_size: 3, algorithm: token_bucket}}
  - {key: burst, rate_limit: {unit: minute, requests_per_unit: 1, burst: {unit: hour, requests_per_unit: 3}}}
  - {key: ban, rate_limit: {unit: second, requests_per_unit: 1, ban: {after: 0, for: 45s}}}
";

const KEYS: [&str; 7] = ["clock", "calendar", "first", "sliding", "bucket", "burst", "ban"];

fn decide(limiter: &Limiter, request: &RateLimitRequest, now: Timestamp) -> RateLimitResponse {
    let matcher = limiter.matcher();
    let wire = request.encode_to_vec();
    let request = decode::request(&wire).unwrap();
    let mut answer = BytesMut::new();
    encode::response(
        &limiter.decide(matcher.as_deref(), &request, now).unwrap(),
        &mut answer,
    );
    RateLimitResponse::decode(answer).unwrap()
}

/// `seconds` after the first hit.
fn at(seconds: u64) -> Timestamp {
    Timestamp {
        since_epoch: Duration::from_secs(T + seconds),
        monotonic: Duration::from_secs(777 + seconds),
    }
}

#[test]
fn every_kind_of_counter_goes_on_where_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let file = SnapshotFile::new(directory.path().join("counts"));
    assert!(file.read().unwrap().is_none());
    for away in [0, 1, 30, 44, 46, 100, 90_000] {
        let limiter = Limiter::new(LimiterConfig::default());
        limiter.set_matcher(rules(RULES));
        let ask = |limiter: &Limiter, now| {
            KEYS.map(|key| {
                let mut request = request("d", &[&format!("{key}=x")]);
                request.hits_addend = 2;
                decide(limiter, &request, now)
            })
        };
        ask(&limiter, at(0));
        ask(&limiter, at(7));
        limiter.write_snapshot(&file, at(9)).unwrap();

        let snapshot = file.read().unwrap().expect("it was written");
        let later = at(9 + away);
        assert_eq!(snapshot.monotonic_at(later), later.monotonic);
        let resumed = Limiter::resume(LimiterConfig::default(), &snapshot, later).unwrap();
        resumed.set_matcher(rules(RULES));
        for more in [0, 20, 60] {
            let now = at(9 + away + more);
            assert_eq!(ask(&resumed, now), ask(&limiter, now), "{away} {more}");
        }
    }
}

#[test]
fn a_clock_set_back_meanwhile_forgets_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let file = SnapshotFile::new(directory.path().join("counts"));
    let limiter = Limiter::new(LimiterConfig::default());
    limiter.set_matcher(rules(RULES));
    let call = |key: &str| {
        let mut call = request("d", &[&format!("{key}=x")]);
        call.hits_addend = 6;
        call
    };
    for key in KEYS {
        decide(&limiter, &call(key), at(0));
    }
    let mut bucket = call("bucket");
    bucket.hits_addend = 3;
    decide(&limiter, &bucket, at(0));
    limiter.write_snapshot(&file, at(0)).unwrap();
    let snapshot = file.read().unwrap().unwrap();
    let mut set_back = Timestamp {
        since_epoch: Duration::from_secs(T - 3_600),
        monotonic: Duration::ZERO,
    };
    set_back.monotonic = snapshot.monotonic_at(set_back);
    assert_eq!(set_back.monotonic, at(0).monotonic);
    let resumed = Limiter::resume(LimiterConfig::default(), &snapshot, set_back).unwrap();
    resumed.set_matcher(rules(RULES));
    for key in KEYS {
        let once = request("d", &[&format!("{key}=x")]);
        if key != "sliding" {
            assert_eq!(decide(&resumed, &once, set_back).overall_code, 2, "{key}");
        }
    }
}

#[test]
fn one_that_cannot_be_written_leaves_the_last_one_there() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("counts");
    let file = SnapshotFile::new(path.clone());
    let limiter = Limiter::new(LimiterConfig::default());
    limiter.write_snapshot(&file, at(0)).unwrap();
    // In the way of the new one, and not empty.
    let new = directory
        .path()
        .join(format!("counts.{}.new", std::process::id()));
    std::fs::create_dir_all(new.join("x")).unwrap();
    assert!(limiter.write_snapshot(&file, at(1)).is_err());
    assert_eq!(file.read().unwrap().unwrap().monotonic_at(at(0)), at(0).monotonic);
}

#[test]
fn only_the_owner_may_read_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("counts");
    let file = SnapshotFile::new(path.clone());
    Limiter::new(LimiterConfig::default())
        .write_snapshot(&file, at(0))
        .unwrap();
    let mode = std::fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}
