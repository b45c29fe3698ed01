//! Variables of envoyproxy/ratelimit that mean nothing here. Who sets them is told once.

use std::env;

/// The variables, by the reason for which they have no effect. README gives the reasons.
const WITHOUT_EFFECT: [(&str, &[&str]); 6] = [
    (
        "counts are in the memory of the process",
        &[
            "BACKEND_TYPE",
            "CACHE_KEY_PREFIX",
            "EXPIRATION_JITTER_MAX_SECONDS",
            "LOCAL_CACHE_SIZE_IN_BYTES",
        ],
    ),
    (
        "there is no Redis",
        &[
            "REDIS_SOCKET_TYPE",
            "REDIS_TYPE",
            "REDIS_URL",
            "REDIS_POOL_SIZE",
            "REDIS_AUTH",
            "REDIS_SENTINEL_AUTH",
            "REDIS_TIMEOUT",
            "REDIS_TLS",
            "REDIS_TLS_CLIENT_CERT",
            "REDIS_TLS_CLIENT_KEY",
            "REDIS_TLS_CACERT",
            "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION",
            "REDIS_PIPELINE_WINDOW",
            "REDIS_PIPELINE_LIMIT",
            "REDIS_CLUSTER_PIPELINE_PARALLELISM",
            "REDIS_POOL_ON_EMPTY_BEHAVIOR",
            "REDIS_HEALTH_CHECK_ACTIVE_CONNECTION",
            "REDIS_STARTUP_INITIAL_INTERVAL",
            "REDIS_STARTUP_MAX_INTERVAL",
            "REDIS_STARTUP_MAX_ELAPSED_TIME",
            "REDIS_PERSECOND",
            "REDIS_PERSECOND_SOCKET_TYPE",
            "REDIS_PERSECOND_TYPE",
            "REDIS_PERSECOND_URL",
            "REDIS_PERSECOND_POOL_SIZE",
            "REDIS_PERSECOND_AUTH",
            "REDIS_PERSECOND_SENTINEL_AUTH",
            "REDIS_PERSECOND_TLS",
            "REDIS_PERSECOND_PIPELINE_WINDOW",
            "REDIS_PERSECOND_PIPELINE_LIMIT",
            "REDIS_PERSECOND_CLUSTER_PIPELINE_PARALLELISM",
            "REDIS_PERSECOND_TIMEOUT",
            "REDIS_PERSECOND_POOL_ON_EMPTY_BEHAVIOR",
        ],
    ),
    (
        "there is no memcached",
        &[
            "MEMCACHE_HOST_PORT",
            "MEMCACHE_SRV",
            "MEMCACHE_SRV_REFRESH",
            "MEMCACHE_MAX_IDLE_CONNS",
            "MEMCACHE_TLS",
            "MEMCACHE_TLS_CLIENT_CERT",
            "MEMCACHE_TLS_CLIENT_KEY",
            "MEMCACHE_TLS_CACERT",
            "MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION",
        ],
    ),
    (
        "the authorities of collectors are those of the system, or those in SSL_CERT_FILE",
        &[
            "OTEL_EXPORTER_OTLP_CERTIFICATE",
            "OTEL_EXPORTER_OTLP_TRACES_CERTIFICATE",
            "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE",
            "OTEL_EXPORTER_OTLP_CLIENT_KEY",
        ],
    ),
    (
        "TRACING_EXPORTER_PROTOCOL says it",
        &[
            "OTEL_EXPORTER_OTLP_PROTOCOL",
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
        ],
    ),
    (
        "waits are always jittered",
        &["XDS_CLIENT_BACKOFF_RANDOM_FACTOR", "XDS_CLIENT_BACKOFF_JITTER"],
    ),
];

/// The variables that are set and mean nothing here, with the reason.
pub(super) fn set() -> Vec<String> {
    let is_set = |variable: &&&str| env::var_os(variable).is_some_and(|value| !value.is_empty());
    let groups = WITHOUT_EFFECT.iter().filter_map(|(reason, variables)| {
        let set: Vec<&str> = variables.iter().filter(is_set).copied().collect();
        (!set.is_empty()).then(|| format!("{} ({reason})", set.join(", ")))
    });
    groups.collect()
}
