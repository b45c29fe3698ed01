"""Servers that come and go, and certificates that change, while Envoy has calls under way."""
import contextlib
import json
import signal

from checks import check, equal
from lab import HERE, Envoy, wait_for
from load import Load, keep_alive

CALLS = 'ratelimit_service_total_requests{grpc_method="ShouldRateLimit"}'
CLEARTEXT = {"name": "envoy.transport_sockets.raw_buffer", "typed_config": {
    "@type": "type.googleapis.com/envoy.extensions.transport_sockets.raw_buffer.v3.RawBuffer"}}
# What Envoy counts when a call fails, is late or is made again. Not upstream_cx_protocol_error: it counts also when Envoy itself closes
# a connection of its health checks while it reads the GOAWAY that it closes it for.
FAULTS = ["cluster.upstream.ratelimit." + name for name in ("error", "failure_mode_allowed", "over_limit")]
FAULTS += ["cluster.ratelimit." + name for name in (
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


def load_through(envoy, threads=8):
    return Load(lambda: keep_alive(envoy.ports["main"]), threads)


def no_call_failed(load, envoy):
    equal(load.answers, {200: load.total()})
    equal(envoy.stat("cluster.upstream.ratelimit.ok"), load.total())
    equal({name: count for name in FAULTS if (count := envoy.stat(name))}, {})


@check
def one_of_two_instances_ends_under_load_and_none_of_10_000_calls_fails(lab):
    rules = HERE / "rules.yaml"
    with (lab.another("ending", rules, {}) as ending, lab.another("staying", rules, {}) as staying,
          envoy_in_front_of([ending, staying], lab.directory / "two") as envoy):
        with load_through(envoy) as load:
            load.wait_for(2_500)
            served = [tollgate.metric(CALLS) for tollgate in (ending, staying)]
            assert min(served) > 500, served
            ending.signal(signal.SIGTERM)
            wait_for(lambda: envoy.stat("cluster.ratelimit.membership_healthy") == 1, "Envoy to leave it alone")
            assert ending.process.poll() is None, "it ended before Envoy knew"
            equal(ending.process.wait(15), 0)
            load.wait_for_more(2_500)
            load.wait_for(10_000)
        no_call_failed(load, envoy)
        assert staying.metric(CALLS) > served[1] + 2_500
