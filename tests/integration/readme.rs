//! README says what is true: its rules load and do what it says of them, and it knows every setting.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::{TestLimiter, request};

fn readme() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap()
}

/// The fenced blocks of YAML.
fn yaml_blocks(readme: &str) -> Vec<&str> {
    readme
        .split("```yaml\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap())
        .collect()
}

#[test]
fn its_rules_do_what_it_says() {
    let readme = readme();
    let rules: Vec<&str> = yaml_blocks(&readme)
        .into_iter()
        .filter(|block| block.starts_with("domain:"))
        .collect();
    assert_eq!(rules.len(), 2);
    let shop = TestLimiter::new(rules[0]);
    for (descriptor, expected) in [
        ("remote_address=198.51.100.7", "OK: OK99"),
        ("remote_address=203.0.113.20", "OK: UNL"),
        ("path=/login;remote_address=198.51.100.7", "OK: OK4"),
        ("path=/login", "OK: NONE"),
    ] {
        assert_eq!(
            shop.brief(&request("shop", &[descriptor])),
            expected,
            "{descriptor}"
        );
    }
    let edge = TestLimiter::new(rules[1]);
    for (chain, expected) in [
        ("6.6.6.6, 192.0.2.1, 198.51.100.7, 10.0.0.1", "OK: OK99"),
        ("192.0.2.1, 127.0.0.1", "OK: OK98"),
        ("2001:db8:0:1::1", "OK: OK4999"),
        ("2001:db8:0:2::1", "OK: OK4998"),
        ("203.0.113.9:1234", "OK: OK4999"),
    ] {
        let call = request("edge", &[&format!("x-forwarded-for={chain}")]);
        assert_eq!(edge.brief(&call), expected, "{chain}");
    }
}

#[test]
fn it_knows_every_variable_and_flag() {
    let readme = readme();
    let help = Command::new(env!("CARGO_BIN_EXE_tollgate"))
        .env_clear()
        .args(["serve", "--help"])
        .output()
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    // The help wraps lines wherever it likes.
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    let variables: Vec<&str> = help
        .split("[env: ")
        .skip(1)
        .map(|rest| rest.split('=').next().unwrap())
        .collect();
    assert!(variables.len() > 20, "{variables:?}");
    for variable in variables {
        assert!(
            readme.contains(&format!("`{variable}`")),
            "README does not know {variable}"
        );
    }
    for flag in readme
        .split("`--")
        .skip(1)
        .map(|rest| rest.split(['`', ' ']).next().unwrap())
    {
        let known = help.contains(&format!("--{flag}")) || ["print", "metrics", "summary"].contains(&flag);
        assert!(known, "README has the flag --{flag}, which does not exist");
    }
}

/// Every setting that envoyproxy/ratelimit has is in a table of README, and the program takes it: as a setting of its own, or
/// with a word that it has no effect.
#[test]
fn every_variable_of_the_reference_has_an_effect_or_a_reason() {
    let readme = readme();
    let (settings, without_effect) = readme
        .split_once("Variables of envoyproxy/ratelimit without effect.")
        .unwrap();
    let (_, settings) = settings.split_once("## Settings").unwrap();
    let (without_effect, _) = without_effect.split_once("## Ports").unwrap();
    let named = |tables: &str| -> Vec<String> {
        let rows = tables.lines().filter(|line| line.starts_with("| `"));
        rows.flat_map(|row| {
            let cell = row.split(" | ").next().unwrap();
            let names: Vec<String> = cell.split('`').skip(1).step_by(2).map(str::to_owned).collect();
            names
        })
        .collect()
    };
    let (settings, without_effect) = (named(settings), named(without_effect));
    for variable in REFERENCE.split_whitespace() {
        let variable = variable.to_owned();
        assert!(
            settings.contains(&variable) != without_effect.contains(&variable),
            "README must say in one table what becomes of {variable}"
        );
    }

    let mut check = Command::new(env!("CARGO_BIN_EXE_tollgate"));
    check.env_clear().args(["serve", "--config", "/nowhere"]);
    for variable in &without_effect {
        check.env(variable, "x");
    }
    let output = check.output().unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    for variable in &without_effect {
        let is_named = log
            .split(|byte: char| !byte.is_ascii_alphanumeric() && byte != '_')
            .any(|word| word == variable);
        assert!(is_named, "{variable} is not named in {log}");
    }
}

/// The settings of envoyproxy/ratelimit.
const REFERENCE: &str = "
HOST PORT DEBUG_HOST DEBUG_PORT GRPC_HOST GRPC_PORT GRPC_UDS GRPC_MAX_CONNECTION_AGE GRPC_MAX_CONNECTION_AGE_GRACE
GRPC_SERVER_USE_TLS GRPC_SERVER_TLS_CERT GRPC_SERVER_TLS_KEY GRPC_CLIENT_TLS_CACERT GRPC_CLIENT_TLS_SAN LOG_LEVEL LOG_FORMAT
CONFIG_TYPE FORCE_START_WITHOUT_INITIAL_CONFIG CONFIG_GRPC_XDS_NODE_ID CONFIG_GRPC_XDS_NODE_METADATA
CONFIG_GRPC_XDS_SERVER_URL CONFIG_GRPC_XDS_SERVER_CONNECT_RETRY_INTERVAL CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS
CONFIG_GRPC_XDS_SERVER_USE_TLS CONFIG_GRPC_XDS_CLIENT_TLS_CERT CONFIG_GRPC_XDS_CLIENT_TLS_KEY
CONFIG_GRPC_XDS_SERVER_TLS_CACERT CONFIG_GRPC_XDS_SERVER_TLS_SAN XDS_CLIENT_BACKOFF_INITIAL_INTERVAL
XDS_CLIENT_BACKOFF_MAX_INTERVAL XDS_CLIENT_BACKOFF_RANDOM_FACTOR XDS_CLIENT_BACKOFF_JITTER XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES
RUNTIME_ROOT RUNTIME_SUBDIRECTORY RUNTIME_APPDIRECTORY RUNTIME_IGNOREDOTFILES RUNTIME_WATCH_ROOT MERGE_DOMAIN_CONFIG
HEALTHY_WITH_AT_LEAST_ONE_CONFIG_LOADED NEAR_LIMIT_RATIO SHADOW_MODE QUOTA_MODE RESPONSE_DYNAMIC_METADATA
LIMIT_RESPONSE_HEADERS_ENABLED LIMIT_LIMIT_HEADER LIMIT_REMAINING_HEADER LIMIT_RESET_HEADER
STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT BACKEND_TYPE CACHE_KEY_PREFIX EXPIRATION_JITTER_MAX_SECONDS LOCAL_CACHE_SIZE_IN_BYTES
USE_STATSD USE_DOG_STATSD USE_PROMETHEUS DISABLE_STATS STATSD_HOST STATSD_PORT STATSD_PROTOCOL STATS_FLUSH_INTERVAL EXTRA_TAGS
USE_DOG_STATSD_MOGRIFIERS PROMETHEUS_ADDR PROMETHEUS_PATH PROMETHEUS_MAPPER_YAML PROMETHEUS_RESPONSE_TIME_AS_MILLISECONDS
TRACING_ENABLED TRACING_EXPORTER_PROTOCOL TRACING_SERVICE_NAME TRACING_SERVICE_NAMESPACE TRACING_SERVICE_INSTANCE_ID
TRACING_SAMPLING_RATE REDIS_SOCKET_TYPE REDIS_TYPE REDIS_URL REDIS_POOL_SIZE REDIS_AUTH REDIS_SENTINEL_AUTH REDIS_TIMEOUT REDIS_TLS
REDIS_TLS_CLIENT_CERT REDIS_TLS_CLIENT_KEY REDIS_TLS_CACERT REDIS_TLS_SKIP_HOSTNAME_VERIFICATION REDIS_PIPELINE_WINDOW
REDIS_PIPELINE_LIMIT REDIS_CLUSTER_PIPELINE_PARALLELISM REDIS_POOL_ON_EMPTY_BEHAVIOR REDIS_HEALTH_CHECK_ACTIVE_CONNECTION
REDIS_STARTUP_INITIAL_INTERVAL REDIS_STARTUP_MAX_INTERVAL REDIS_STARTUP_MAX_ELAPSED_TIME REDIS_PERSECOND
REDIS_PERSECOND_SOCKET_TYPE REDIS_PERSECOND_TYPE REDIS_PERSECOND_URL REDIS_PERSECOND_POOL_SIZE REDIS_PERSECOND_AUTH
REDIS_PERSECOND_SENTINEL_AUTH REDIS_PERSECOND_TLS REDIS_PERSECOND_PIPELINE_WINDOW REDIS_PERSECOND_PIPELINE_LIMIT
REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM REDIS_PERSECOND_TIMEOUT REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR MEMCACHE_HOST_PORT
MEMCACHE_SRV MEMCACHE_SRV_REFRESH MEMCACHE_MAX_IDLE_CONNS MEMCACHE_TLS MEMCACHE_TLS_CLIENT_CERT MEMCACHE_TLS_CLIENT_KEY
MEMCACHE_TLS_CACERT MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION
";
