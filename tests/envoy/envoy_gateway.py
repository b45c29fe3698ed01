"""What Envoy Gateway gives the container of its rate-limit service."""
import contextlib
import pathlib

from certificates import Authority, Client, serial
from checks import check, equal
from control_plane import ControlPlane
from lab import http_get, running, wait_for
from mount import Mount
from rls import OK, asker, channel_over_tls, request

SERVER, CONTROL_PLANE, ENVOY = "envoy-ratelimit.test", "localhost", "envoy.test"
# Of the kind that it mounts at /etc/statsd-exporter.
MAPPER = """
mappings:
- match: ratelimit.service.rate_limit.*.*.over_limit
  name: ratelimit_over_limit
  labels: {domain: $1, key1: $2}
- match: ratelimit.service.rate_limit.*.*.*.over_limit
  name: ratelimit_over_limit
  labels: {domain: $1, key1: $2, key2: $3}
- match: ratelimit.service.config_load_success
  name: ratelimit_config_load_success
  match_metric_type: counter
"""
# Not of Envoy Gateway: without them the ports are fixed ones, on all addresses.
PORTS = {"HOST": "127.0.0.1", "PORT": "0", "GRPC_HOST": "127.0.0.1", "GRPC_PORT": "0", "DEBUG_HOST": "127.0.0.1", "DEBUG_PORT": "0"}


def environment(certs, mapper, xds_port):
    """All that Envoy Gateway sets, with Prometheus on and with directories and addresses of the suite."""
    return {
        "RUNTIME_ROOT": "/data", "RUNTIME_SUBDIRECTORY": "ratelimit", "RUNTIME_IGNOREDOTFILES": "true",
        "RUNTIME_WATCH_ROOT": "false", "LOG_LEVEL": "info", "USE_STATSD": "false",
        "CONFIG_TYPE": "GRPC_XDS_SOTW", "CONFIG_GRPC_XDS_SERVER_URL": f"{CONTROL_PLANE}:{xds_port}",
        "CONFIG_GRPC_XDS_NODE_ID": "envoy-ratelimit",
        "GRPC_SERVER_USE_TLS": "true", "GRPC_SERVER_TLS_CERT": f"{certs}/tls.crt", "GRPC_SERVER_TLS_KEY": f"{certs}/tls.key",
        "GRPC_SERVER_TLS_CA_CERT": f"{certs}/ca.crt",
        "CONFIG_GRPC_XDS_SERVER_USE_TLS": "true", "CONFIG_GRPC_XDS_CLIENT_TLS_CERT": f"{certs}/tls.crt",
        "CONFIG_GRPC_XDS_CLIENT_TLS_KEY": f"{certs}/tls.key", "CONFIG_GRPC_XDS_SERVER_TLS_CACERT": f"{certs}/ca.crt",
        "FORCE_START_WITHOUT_INITIAL_CONFIG": "true",
        "REDIS_SOCKET_TYPE": "tcp", "REDIS_URL": "redis.redis-system.svc.cluster.local:6379",
        "USE_PROMETHEUS": "true", "PROMETHEUS_ADDR": "127.0.0.1:0", "PROMETHEUS_MAPPER_YAML": str(mapper),
        "TRACING_ENABLED": "false", "TRACING_SERVICE_NAME": "envoy-ratelimit",
        "TRACING_SERVICE_NAMESPACE": "envoy-gateway-system", "TRACING_SERVICE_INSTANCE_ID": "envoy-ratelimit-0",
        "TRACING_SAMPLING_RATE": "1.0", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317"}


@contextlib.contextmanager
def container(lab, name, authority, certificate):
    """The process in the container and its control plane, which the same authority knows; with files in a directory of this name."""
    directory = lab.directory / name
    directory.mkdir()
    certs = Mount(directory / "certs", certificate).path
    certs_of_control_plane = Mount(directory / "certs-of-control-plane", authority.issue(CONTROL_PLANE)).path
    mapper, program = directory / "conf.yaml", directory / "ratelimit"
    mapper.write_text(MAPPER)
    program.symlink_to(pathlib.Path(lab.binary).resolve())
    with ControlPlane(lab, certs_of_control_plane) as control_plane:
        settings = {**environment(certs, mapper, control_plane.port), **PORTS}
        with running([program], directory / "ratelimit.d", settings) as tollgate:
            yield tollgate, control_plane


@check
def the_environment_of_envoy_gateway_starts_it(lab):
    authority = Authority("envoy-gateway")
    certificate = authority.issue(SERVER)
    with container(lab, "envoy-gateway", authority, certificate) as (tollgate, control_plane):
        wait_for(lambda: http_get(tollgate.http, "/healthcheck") == (200, "OK"), "the probe to succeed")
        equal(Client(authority, SERVER).serial_shown(tollgate.grpc), serial(certificate))
        control_plane.push("good 5", "ack 1")
        with channel_over_tls(tollgate, SERVER, authority, authority.issue(ENVOY)) as channel:
            status = asker(channel)(request({"k": "v4999"}), timeout=5).statuses[0]
            equal((status.current_limit.requests_per_unit, status.limit_remaining), (5, 4))
            equal(asker(channel)(request({"k": "v"}, domain="default/eg/http"), timeout=5).overall_code, OK)
        status, page = http_get(tollgate.port("Prometheus"), "/metrics")
        equal(status, 200)
        assert "tollgate_decision_seconds_count 2\n" in page, page
        assert "\nratelimit_config_load_success 1\n" in page, page


@check
def only_clients_of_the_authority_that_envoy_gateway_names_are_served(lab):
    """Unlike by envoyproxy/ratelimit, which does not read GRPC_SERVER_TLS_CA_CERT. Envoy Gateway's Envoys show a certificate."""
    authority = Authority("envoy-gateway")
    with container(lab, "anonymous", authority, authority.issue(SERVER)) as (tollgate, _):
        equal(Client(authority, SERVER).refusal(tollgate.grpc), "TLSV13_ALERT_CERTIFICATE_REQUIRED")
