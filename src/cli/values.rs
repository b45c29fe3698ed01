//! How the values of flags and environment variables are read: as envoyproxy/ratelimit reads its variables.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use bytesize::ByteSize;
use tracing::level_filters::LevelFilter;

use super::xds_settings::ConfigType;
use crate::config::{Protocol, go};
use crate::events::Sink;
use crate::spans;
use crate::store::memory::FullPolicy;
use crate::telemetry::LogFormat;

pub(super) fn boolean(text: &str) -> Result<bool, String> {
    go::boolean(text).ok_or_else(|| "write true or false".into())
}

pub(super) fn port(text: &str) -> Result<u16, String> {
    if text.starts_with("tcp://") {
        return Err("this looks like what Kubernetes sets for a Service of that name; write a port number here, rename the \
                    Service, or set enableServiceLinks: false in the pod"
            .into());
    }
    go::integer(text)
        .and_then(|port| u16::try_from(port).ok())
        .ok_or_else(|| "write a port number from 0 to 65535".into())
}

/// A path that may be left empty.
#[derive(Debug, Clone)]
pub(super) struct MaybePath(pub(super) Option<PathBuf>);

pub(super) fn path(text: &str) -> Result<MaybePath, String> {
    Ok(MaybePath((!text.is_empty()).then(|| text.into())))
}

/// `:9090`, `127.0.0.1:9090` or `[::1]:9090`.
pub(super) fn address_and_port(text: &str) -> Result<(String, u16), String> {
    text.rsplit_once(':')
        .and_then(|(address, port)| Some((address.to_owned(), port.parse().ok()?)))
        .ok_or_else(|| "write an address and a port, such as :9090 or 127.0.0.1:9090".into())
}

/// `localhost:18000`.
pub(super) fn xds_server(text: &str) -> Result<String, String> {
    match text.split_once("://") {
        Some(("http" | "https", rest)) => Err(format!(
            "write {rest}, without a scheme; CONFIG_GRPC_XDS_SERVER_USE_TLS says whether it has TLS"
        )),
        _ => Ok(text.to_owned()),
    }
}

pub(super) fn protocol(text: &str) -> Result<Protocol, String> {
    match text {
        "tcp" => Ok(Protocol::Tcp),
        "udp" => Ok(Protocol::Udp),
        _ => Err("write tcp or udp".into()),
    }
}

/// Names and values.
#[derive(Debug, Clone)]
pub(super) struct Pairs(pub(super) Vec<(String, String)>);

/// `name:value` with commas between them, as in Go.
pub(super) fn pairs(text: &str) -> Result<Pairs, String> {
    let pairs = text.split(',').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair
            .split_once(':')
            .filter(|(_, value)| !value.contains(':'))
            .ok_or("write name:value pairs with commas between them")?;
        Ok((name.to_owned(), value.to_owned()))
    });
    pairs.collect::<Result<_, String>>().map(Pairs)
}

/// `name=value` with commas between them.
pub(super) fn equal_pairs(text: &str) -> Result<Pairs, String> {
    let pairs = text.split(',').filter(|pair| !pair.is_empty()).map(|pair| {
        let (name, value) = pair
            .split_once('=')
            .ok_or("write name=value pairs with commas between them")?;
        Ok((name.to_owned(), value.to_owned()))
    });
    pairs.collect::<Result<_, String>>().map(Pairs)
}

pub(super) fn config_type(text: &str) -> Result<ConfigType, String> {
    match text {
        "FILE" => Ok(ConfigType::File),
        "GRPC_XDS_SOTW" => Ok(ConfigType::Xds),
        _ => Err("write FILE or GRPC_XDS_SOTW".into()),
    }
}

pub(super) fn url_path(text: &str) -> Result<String, String> {
    // Braces, colons and stars have a meaning in routes.
    let is_path = text.starts_with('/') && !text.contains(['{', '}', ':', '*', '?', '#', ' ']);
    is_path
        .then(|| text.to_owned())
        .ok_or_else(|| "write a path that starts with a slash, such as /metrics".into())
}

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    go::duration(text).ok_or_else(|| "write a duration with units, such as 300ms, 10s or 1h30m".into())
}

/// A duration that is not zero.
pub(super) fn period(text: &str) -> Result<Duration, String> {
    duration(text)
        .ok()
        .filter(|period| *period >= Duration::from_millis(100))
        .ok_or_else(|| "write a duration of at least 100ms, such as 10s".into())
}

pub(super) fn ratio(text: &str) -> Result<f32, String> {
    text.parse()
        .ok()
        .filter(|ratio: &f32| ratio.is_finite() && *ratio >= 0.0)
        .ok_or_else(|| "write a number such as 0.8".into())
}

pub(super) fn share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| "write a number from 0 to 1".into())
}

pub(super) fn span_protocol(text: &str) -> Result<spans::Protocol, String> {
    match text {
        "http" => Ok(spans::Protocol::Http),
        "grpc" => Ok(spans::Protocol::Grpc),
        _ => Err("write http or grpc".into()),
    }
}

/// The smallest budget, so that every shard has room for a few counters.
pub(super) const LEAST_BUDGET: u64 = 1 << 20;

pub(super) fn budget(text: &str) -> Result<u64, String> {
    text.parse::<ByteSize>()
        .ok()
        .map(|size| size.as_u64())
        .filter(|bytes| *bytes >= LEAST_BUDGET)
        .ok_or_else(|| "write a size of at least 1MiB, such as 256MiB or 2GiB".into())
}

pub(super) fn full_policy(text: &str) -> Result<FullPolicy, String> {
    match text {
        "evict" => Ok(FullPolicy::Evict),
        "deny" => Ok(FullPolicy::Deny),
        "allow" => Ok(FullPolicy::Allow),
        _ => Err("write evict, deny or allow".into()),
    }
}

/// Where events go, with commas between them; nowhere if there is nothing.
pub(super) fn sinks(text: &str) -> Result<BTreeSet<Sink>, String> {
    let names = text.split(',').map(str::trim);
    names
        .filter(|name| !matches!(*name, "" | "none"))
        .map(|name| match name {
            "log" => Ok(Sink::Log),
            "counter" => Ok(Sink::Counter),
            "ring" => Ok(Sink::Ring),
            _ => Err("write any of log, counter and ring, with commas between them".into()),
        })
        .collect()
}

/// The most keys of a domain that are shown.
const MOST_TOP: usize = 1_000;

pub(super) fn top(text: &str) -> Result<usize, String> {
    if text.is_empty() {
        return Ok(0);
    }
    text.parse()
        .ok()
        .filter(|keys| *keys <= MOST_TOP)
        .ok_or_else(|| format!("write a number from 0 to {MOST_TOP}"))
}

pub(super) fn header_name(text: &str) -> Result<String, String> {
    match axum::http::HeaderName::from_bytes(text.as_bytes()) {
        Ok(_) => Ok(text.to_owned()),
        Err(_) => Err("write the name of an HTTP header: letters, digits and dashes".into()),
    }
}

pub(super) fn log_level(text: &str) -> Result<LevelFilter, String> {
    match text.to_ascii_lowercase().as_str() {
        "panic" | "fatal" | "error" => Ok(LevelFilter::ERROR),
        "warn" | "warning" => Ok(LevelFilter::WARN),
        "info" => Ok(LevelFilter::INFO),
        "debug" => Ok(LevelFilter::DEBUG),
        "trace" => Ok(LevelFilter::TRACE),
        _ => Err("write error, warn, info, debug or trace".into()),
    }
}

/// `json`, or anything else for text, as envoyproxy/ratelimit has it.
pub(super) fn log_format(text: &str) -> Result<LogFormat, String> {
    Ok(if text.eq_ignore_ascii_case("json") {
        LogFormat::Json
    } else {
        LogFormat::Text
    })
}

/// Whether Kubernetes sets a variable of this name in every pod beside a Service called `tollgate` or `tollgate-…`.
pub(super) fn is_injected_by_kubernetes(name: &str, value: &str) -> bool {
    let after_port = name.rsplit_once("_PORT").map(|(_, after)| after);
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || after_port.is_some_and(|after| {
            let mut parts = after.split('_').skip(1);
            let (port, protocol) = (parts.next(), parts.next());
            (after.is_empty() && value.contains("://"))
                || port.is_some_and(|port| port.parse::<u16>().is_ok())
                    && protocol.is_some_and(|protocol| matches!(protocol, "TCP" | "UDP" | "SCTP"))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_a_service_called_tollgate_are_not_ours() {
        #[track_caller]
        fn test(name: &str, expected: bool) {
            assert_eq!(
                is_injected_by_kubernetes(name, "tcp://10.0.0.1:8081"),
                expected,
                "{name}"
            );
        }
        test("TOLLGATE_SERVICE_HOST", true);
        test("TOLLGATE_SERVICE_PORT", true);
        test("TOLLGATE_SERVICE_PORT_GRPC", true);
        test("TOLLGATE_PORT", true);
        test("TOLLGATE_PORT_8081_TCP", true);
        test("TOLLGATE_PORT_8081_TCP_ADDR", true);
        test("TOLLGATE_HEADLESS_PORT_8081_TCP_PROTO", true);
        test("TOLLGATE_CONFIG", false);
        test("TOLLGATE_SHUTDOWN_LINGER", false);
        test("TOLLGATE_PORTS", false);
        assert!(!is_injected_by_kubernetes("TOLLGATE_PORT", "9000"));
    }

    #[test]
    fn a_port_that_kubernetes_set_is_explained() {
        assert_eq!(port("8081"), Ok(8081));
        assert!(port("tcp://10.0.0.1:8081").unwrap_err().contains("Kubernetes"));
        assert!(port("65536").is_err());
        assert!(port("").is_err());
    }
}
