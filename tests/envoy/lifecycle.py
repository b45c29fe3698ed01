"""Servers that come and go, and certificates that change, while Envoy has calls under way."""
import contextlib
import json
import signal

from certificates import Authority, Client, serial
from checks import check, equal
from lab import HERE, Envoy, wait_for
from load import Load, keep_alive
from mount import Mount
from rls import OK, asker, channel_over_tls, request

CALLS = 'ratelimit_service_total_requests{grpc_method="ShouldRateLimit"}'
SERVER, CLIENT = "ratelimit.test", "envoy.test"
CLEARTEXT = {"name": "envoy.transport_sockets.raw_buffer", "typed_config": {
    "@type": "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"}}
# What Envoy counts when a call fails, is late or is made again. Not upstream_cx_protocol_error: it counts also when Envoy itself closes
# a connection of its health checks while it reads the GOAWAY that it closes it for.
FAULTS = ["cluster.upstream.ratelimit." + name for name in ("error", "failure_mode_allowed", "over_limit")]
FAULTS += ["cluster.ratelimit." + name for name in (
    "ssl.connection_error", "ssl.fail_verify_error", "ssl.fail_verify_san",
    "upstream_cx_connect_fail", "upstream_cx_connect_timeout", "upstream_cx_destroy_remote_with_active_rq",
    "upstream_rq_cancelled", "upstream_rq_pending_failure_eject", "upstream_rq_pending_overflow", "upstream_rq_retry",
    "upstream_rq_rx_reset", "upstream_rq_timeout", "upstream_rq_tx_reset")]


@contextlib.contextmanager
def envoy_in_front_of(tollgates, directory, transport_socket=CLEARTEXT):
    """An Envoy that has found them all healthy."""
    endpoints = [{"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": tollgate.grpc}}}}
                 for tollgate in tollgates]
    directory.mkdir()
    with Envoy("ratelimit.yaml.in", ["main", "upstream"], directory, {
            "ENDPOINTS": json.dumps(endpoints), "TRANSPORT_SOCKET": json.dumps(transport_socket)}) as envoy:
        wait_for(lambda: envoy.stat("cluster.ratelimit.membership_healthy") == len(tollgates), "health checks")
        yield envoy


@contextlib.contextmanager
def load_without_a_failure(envoy, threads=8):
    """Load through this Envoy; in the end no call may have failed, for the callers or for Envoy."""
    with Load(lambda: keep_alive(envoy.ports["main"]), threads) as load:
        yield load
    equal(load.answers, {200: load.total()})
    equal(envoy.stat("cluster.upstream.ratelimit.ok"), load.total())
    equal({name: count for name in FAULTS if (count := envoy.stat(name))}, {})


@check
def one_of_two_instances_ends_under_load_and_none_of_10_000_calls_fails(lab):
    rules = HERE / "rules.yaml"
    with (lab.another("ending", rules, {}) as ending, lab.another("staying", rules, {}) as staying,
          envoy_in_front_of([ending, staying], lab.directory / "two") as envoy,
          load_without_a_failure(envoy) as load):
        load.wait_for(2_500)
        served = [tollgate.metric(CALLS) for tollgate in (ending, staying)]
        assert min(served) > 500, served
        ending.signal(signal.SIGTERM)
        wait_for(lambda: envoy.stat("cluster.ratelimit.membership_healthy") == 1, "Envoy to leave it alone")
        assert ending.process.poll() is None, "it ended before Envoy knew"
        equal(ending.process.wait(15), 0)
        load.wait_for_more(2_500)
        load.wait_for(10_000)
        assert staying.metric(CALLS) > served[1] + 2_500


# --------------------------------------------------------------- mutual TLS
def mutual_tls(secret):
    """Settings of a server with a certificate for SERVER in this directory, that wants one for CLIENT of the same authority."""
    return {
        "GRPC_SERVER_USE_TLS": "true", "GRPC_SERVER_TLS_CERT": f"{secret}/tls.crt", "GRPC_SERVER_TLS_KEY": f"{secret}/tls.key",
        "GRPC_CLIENT_TLS_CACERT": f"{secret}/ca.crt", "GRPC_CLIENT_TLS_SAN": CLIENT}


def tls_of_envoy(secret):
    """The other side of that: Envoy's transport socket, with the certificate for CLIENT in this directory."""
    def file(name):
        return {"filename": f"{secret}/{name}"}
    return {"name": "envoy.transport_sockets.tls", "typed_config": {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "sni": SERVER,
        "common_tls_context": {
            "tls_certificates": [{"certificate_chain": file("tls.crt"), "private_key": file("tls.key")}],
            "validation_context": {
                "trusted_ca": file("ca.crt"),
                "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": SERVER}}]}}}}


@check
def certificates_change_under_load_and_no_call_over_mutual_tls_fails(lab):
    authority = Authority("authority")
    first, second, third = (authority.issue(SERVER) for _ in range(3))
    secret = Mount(lab.directory / "server-secret", first)
    shown = Mount(lab.directory / "envoy-secret", authority.issue(CLIENT)).path
    client = Client(authority, SERVER, shown)
    age = {"GRPC_MAX_CONNECTION_AGE": "1s", "GRPC_MAX_CONNECTION_AGE_GRACE": "5s"}
    with (lab.another("rotated", HERE / "rules.yaml", {**mutual_tls(secret.path), **age}) as tollgate,
          envoy_in_front_of([tollgate], lab.directory / "over-tls", tls_of_envoy(shown)) as envoy,
          load_without_a_failure(envoy, threads=4) as load):

        def is_shown(files):
            return client.serial_shown(tollgate.grpc) == serial(files)

        def verified():
            """How often Envoy has looked at a certificate: with each handshake that resumed no session."""
            handshakes = envoy.stat("cluster.ratelimit.ssl.handshake")
            return handshakes - envoy.stat("cluster.ratelimit.ssl.session_reused")

        def is_taken_up(files):
            before, connections = verified(), envoy.stat("cluster.ratelimit.upstream_cx_total")
            secret.swap(files)
            wait_for(lambda: is_shown(files), "the new certificate")
            wait_for(lambda: verified() > before, "Envoy to verify it")
            wait_for(lambda: envoy.stat("cluster.ratelimit.upstream_cx_total") >= connections + 2, "new connections")

        def is_refused(half, faults):
            secret.swap(half)
            wait_for(lambda: tollgate.metric('tollgate_certificate_load_errors_total{port="grpc"}') == faults, "a fault")
            equal(tollgate.log.read_text().count("the last good ones stay in use"), faults)

        assert is_shown(first)
        is_taken_up(second)
        is_refused({**third, "tls.key": second["tls.key"]}, faults=1)
        assert is_shown(second)
        is_refused({**third, "tls.crt": third["tls.crt"][:200]}, faults=2)
        assert is_shown(second)
        is_taken_up(third)
        load.wait_for_more(1_000)


@check
def only_certificates_of_the_authority_and_for_the_name_are_served(lab):
    authority, other = Authority("authority"), Authority("other")
    secret = Mount(lab.directory / "server", authority.issue(SERVER)).path
    with lab.another("mutual", HERE / "rules.yaml", mutual_tls(secret)) as tollgate:

        def refusal(name, shown):
            shows = shown and Mount(lab.directory / name, shown).path
            return Client(authority, SERVER, shows).refusal(tollgate.grpc)

        equal(refusal("nothing", None), "TLSV13_ALERT_CERTIFICATE_REQUIRED")
        equal(refusal("other-authority", other.issue(CLIENT)), "TLSV1_ALERT_UNKNOWN_CA")
        equal(refusal("other-name", authority.issue("stranger.test")), "SSLV3_ALERT_BAD_CERTIFICATE")
        equal(tollgate.metric('tollgate_tls_handshake_errors_total{port="grpc"}'), 3)
        with channel_over_tls(tollgate, SERVER, authority, authority.issue(CLIENT)) as channel:
            equal(asker(channel)(request({"generic_key": "simple"}), timeout=5).overall_code, OK)
