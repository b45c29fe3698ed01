#!/usr/bin/env python3
"""tollgate behind a real Envoy, and asked by the official Python classes.

    suite.py --bin target/release/tollgate

Needs the packages of requirements.txt, with `envoy` and `go` on PATH. Prints a line per check and, last, 'N passed, M failed'.
"""
import argparse
import concurrent.futures
import pathlib
import re
import signal
import subprocess
import textwrap
import time
import traceback

import envoy_gateway  # has checks
import grpc
import lifecycle  # has checks
import swaps  # has checks
from checks import CHECKS, check, equal
from control_plane import ControlPlane
from lab import HERE, Lab, wait_for
from rls import OK, OVER_LIMIT, asker, call, request

SETTINGS = {"RESPONSE_DYNAMIC_METADATA": "true", "LIMIT_RESPONSE_HEADERS_ENABLED": "true",
            "TOLLGATE_SHUTDOWN_LINGER": "2s"}
# Where Debian's libfaketime is, which shows a process another wall clock.
LIBFAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"


def limit_of(reply):
    """The limit that Envoy shows: the first number of x-ratelimit-limit."""
    shown = reply.header("x-ratelimit-limit")
    return int(shown.split(",")[0]) if shown else None


# --------------------------------------------------------------- through Envoy
@check
def the_readme_shows_a_valid_filter(lab):
    readme = (pathlib.Path(__file__).parents[2] / "README.md").read_text()
    snippet = next(block for block in re.findall("```yaml\n(.*?)```", readme, re.S) if block.startswith("http_filters:"))
    config = lab.directory / "readme.yaml"
    config.write_text(f"""
static_resources:
  listeners:
  - address: {{socket_address: {{address: 127.0.0.1, port_value: 0}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: readme
          route_config: {{virtual_hosts: [{{name: all, domains: ["*"], routes: []}}]}}
          http_filters:
{textwrap.indent(snippet.split(chr(10), 1)[1], " " * 10)}
          - name: envoy.filters.http.router
            typed_config: {{"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router}}
  clusters:
  - name: ratelimit
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{http2_protocol_options: {{}}}}
""")
    validated = subprocess.run(["envoy", "--mode", "validate", "-c", config], capture_output=True, text=True)
    assert validated.returncode == 0, validated.stderr


@check
def calls_within_the_limit_reach_the_upstream_and_the_rest_get_429(lab):
    before = lab.upstream.requests
    for left in (2, 1, 0):
        reply = lab.get("/generic")
        equal(reply.status, 200)
        assert '"/generic"' in reply.body, reply.body
        equal(reply.header("x-ratelimit-limit"), '3, 3;w=31536000;name="gold"')
        equal(reply.header("x-ratelimit-remaining"), str(left))
        assert int(reply.header("x-ratelimit-reset")) >= 1
        equal((reply.header("ratelimit-limit"), reply.header("ratelimit-remaining")), ("3", str(left)))
        equal(reply.header("ratelimit-reset"), reply.header("x-ratelimit-reset"))
    for _ in range(5):
        reply = lab.get("/generic")
        equal(reply.status, 429)
        equal(reply.header("x-envoy-ratelimited"), "true")
        equal(reply.header("x-ratelimit-remaining"), "0")
        assert int(reply.header("x-ratelimit-reset")) >= 1
        equal(reply.header("ratelimit-remaining"), "0")
    equal(lab.upstream.requests - before, 3)


@check
def every_action_meets_its_rule(lab):
    alice = {"x-user": "alice", "x-forwarded-for": "10.1.2.3"}
    for path, limit, options in [
        ("/keyed", 1009, {}),
        ("/header", 1011, {"headers": alice}),
        ("/header", 1010, {"headers": {"x-user": "carol"}}),
        ("/header", 1010, {"headers": {"x-user": ""}}),
        ("/skip-header", 1002, {}),
        ("/skip-header", 1003, {"headers": alice}),
        ("/remote", 1013, {}),
        ("/remote", 1014, {"headers": alice}),
        ("/masked", 1015, {"headers": alice}),
        ("/masked", 1016, {"headers": {"x-forwarded-for": "2001:db8:1:2:3:4:5:6"}}),
        ("/addr-match", 1017, {"headers": alice}),
        ("/hvm", 1018, {"method": "POST"}),
        ("/hvm", 1019, {}),
        ("/query?q=a%20b", 1020, {}),
        ("/query?debug", 1021, {}),
        ("/clusters", 1024, {}),
        ("/composed", 1001, {"headers": alice}),
        ("/stages", 1007, {}),
        ("/vh-only", 1004, {}),
        ("/override-static", 7, {}),
    ]:
        reply = lab.get(path, **options)
        equal((path, reply.status, limit_of(reply)), (path, 200, limit))
    reply = lab.get("/meta", headers={"x-meta-user": "bob"})
    limits = {part.split(";")[0].strip() for part in reply.header("x-ratelimit-limit").split(",")[1:]}
    equal(limits, {"1012", "1022", "1023"})
    reply = lab.get("/vh-include")
    limits = {part.split(";")[0].strip() for part in reply.header("x-ratelimit-limit").split(",")[1:]}
    equal(limits, {"1004", "1005"})


@check
def without_a_rule_or_a_limit_everything_passes(lab):
    for path in ("/domain", "/route-done"):
        reply = lab.get(path)
        equal((reply.status, reply.header("x-ratelimit-limit")), (200, None))


@check
def a_rule_that_allows_nothing_refuses_the_first_call(lab):
    for listener in ("default", "strict", "custom"):
        equal(lab.get("/", listener, headers={"x-user": "strict"}).status, 429)
    reply = lab.get("/", "custom", headers={"x-user": "strict"})
    assert int(reply.header("retry-after")) >= 1


@check
def a_limit_in_the_request_beats_the_rule(lab):
    def ask(limit, unit="DAY"):
        return lab.get("/override", headers={"x-limit": limit, "x-limit-unit": unit})
    equal(ask("42").header("x-ratelimit-limit"), "42, 42;w=86400")
    equal(ask("2", "HOUR").header("x-ratelimit-remaining"), "1")
    equal(ask("0", "YEAR").status, 429)
    equal(limit_of(ask("9", "UNKNOWN")), 1008)
    equal(limit_of(lab.get("/override")), 1008)


@check
def hits_are_charged_as_envoy_says(lab):
    def left(path, **headers):
        return int(lab.get(path, headers=headers).header("x-ratelimit-remaining"))
    equal(left("/hits-number"), 95)
    equal(left("/hits-zero"), 95)
    equal(left("/hits-format", **{"x-cost": "17"}), 78)
    equal(left("/hits-negative"), 81)
    equal(left("/hits-number", **{"x-hits": "50"}), 76)
    equal(lab.get("/hits-format", headers={"x-cost": "77"}).status, 429)
    equal(lab.get("/hits-zero").status, 429)
    equal(left("/hits-negative"), 2)
    equal(left("/keyed"), left("/keyed", **{"x-hits": "9"}) + 9)


@check
def cost_reported_after_the_response_counts(lab):
    def left():
        return int(lab.get("/done").header("x-ratelimit-remaining"))
    equal(left(), 500)
    equal(lab.get("/done", headers={"x-cost": "321"}).status, 200)
    wait_for(lambda: left() == 179, "the cost of 321")
    equal(lab.get("/done", headers={"x-cost": "321"}).status, 200)
    wait_for(lambda: lab.get("/done").status == 429, "the second cost of 321")
    equal(lab.get("/resp-done", headers={"x-cost": "5"}).status, 200)


@check
def a_bucket_goes_into_debt_for_cost_reported_after_the_response(lab):
    equal(lab.get("/debt").header("x-ratelimit-remaining"), "100")
    equal(lab.get("/debt", headers={"x-cost": "350"}).status, 200)
    refused = wait_for(lambda: (reply := lab.get("/debt")).status == 429 and reply, "the debt")
    # 250 hits are owed and 100 come back in a day.
    days = int(refused.header("x-ratelimit-reset")) / 86400
    assert 2.5 <= days <= 3.6, days


@check
def a_banned_client_gets_403_until_the_ban_ends(lab):
    started = time.monotonic()
    equal([lab.get("/ban").status for _ in range(4)], [200, 429, 403, 403])
    reply = lab.get("/ban", headers={"x-lab-id": "banned"})
    equal((reply.status, reply.body), (403, "banned\n"))
    remaining = lab.access_log("banned")["rl_meta"]["tollgate"]["ban_remaining_ms"]
    assert 0 < remaining <= 4000, remaining
    assert time.monotonic() - started < 3, "the machine is too slow for this check"
    wait_for(lambda: lab.get("/ban").status == 200, "the end of the ban")
    assert time.monotonic() - started >= 4


@check
def bytes_that_are_not_text_do_not_bypass_a_limit(lab):
    def ask(target, header=b""):
        request = b"GET " + target + b" HTTP/1.1\r\nhost: lab.test\r\nconnection: close\r\n" + header + b"\r\n"
        return int(lab.raw("main", request).split(b" ")[1])
    equal([ask(b"/query?q=%ff") for _ in range(4)], [200, 200, 429, 429])
    equal([ask(b"/query?q=%fe") for _ in range(3)], [200, 200, 429])
    equal(ask(b"/header", b"x-user: \xff\xfe\r\n"), 200)
    equal(lab.envoy.stat("cluster.upstream.ratelimit.error"), 0)
    equal(lab.envoy.stat("cluster.upstream.ratelimit.failure_mode_allowed"), 0)


@check
def limits_of_the_filter_and_of_connections(lab):
    equal([lab.get("/", "filterlevel").status for _ in range(3)], [200, 200, 429])
    assert lab.raw("tcp", b"GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")


@check
def metadata_reaches_envoys_log(lab):
    lab.get("/header", headers={"x-user": "bob", "x-lab-id": "metadata"})
    metadata = lab.access_log("metadata")["rl_meta"]
    equal(metadata["domain"], "lab")
    equal(metadata["descriptors"], [{"entries": ["user=bob"]}])
    equal(metadata["metadata"], {"team": {"color": "blue"}})


@check
def a_stall_of_300_ms_costs_no_connection(lab):
    """Envoy gives up on every call of the stall; a server that takes the resets for an attack ends the connection."""
    lab.get("/", "default")
    names = ["cluster.rls.upstream_cx_total", "cluster.rls.upstream_cx_destroy",
             "cluster.rls.upstream_cx_close_notify", "cluster.rls.upstream_cx_protocol_error"]
    before = [lab.envoy.stat(name) for name in names]
    timeouts = lab.envoy.stat("cluster.rls.upstream_rq_timeout") + lab.envoy.stat("cluster.rls.upstream_rq_tx_reset")
    stop_at = time.monotonic() + 2.0

    def load():
        answers = 0
        while time.monotonic() < stop_at:
            answers += lab.get("/", "default").status == 200
        return answers

    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        loads = [pool.submit(load) for _ in range(100)]
        for _ in range(3):
            time.sleep(0.2)  # let calls get under way: the stall is to meet them
            lab.tollgate.signal(signal.SIGSTOP)
            time.sleep(0.3)  # the stall itself
            lab.tollgate.signal(signal.SIGCONT)
        assert sum(load.result() for load in loads) > 100
    resets = lab.envoy.stat("cluster.rls.upstream_rq_timeout") + lab.envoy.stat("cluster.rls.upstream_rq_tx_reset") - timeouts
    assert resets > 20, f"the stall met only {resets} calls"
    equal([lab.envoy.stat(name) for name in names], before)
    equal(lab.get("/", "strict").status, 200)


# ------------------------------------------------- the official Python classes
@check
def the_official_classes_understand_the_answer(lab):
    answer = call(lab.tollgate, request({"qkey": "python"}, {"plan": "gold"}, {"nothing": "matches"}, hits_addend=3))
    equal(answer.overall_code, OVER_LIMIT)
    equal([status.code for status in answer.statuses], [OVER_LIMIT, OK, OK])
    first, second, third = answer.statuses
    equal((first.current_limit.requests_per_unit, first.current_limit.unit, first.limit_remaining), (2, 6, 0))
    equal(second.current_limit.requests_per_unit, 1009)
    assert 1 <= first.duration_until_reset.seconds <= 31536000 and first.duration_until_reset.nanos == 0
    assert not third.HasField("current_limit") and not third.HasField("duration_until_reset")
    equal([header.key for header in answer.response_headers_to_add],
          ["RateLimit-Limit", "RateLimit-Remaining", "RateLimit-Reset"])


@check
def the_newest_fields_are_understood(lab):
    message = request({"official": "fields"})
    descriptor = message.descriptors[0]
    descriptor.limit.requests_per_unit = 10
    descriptor.limit.unit = 6
    descriptor.limit.unit_multiplier.value = 2
    descriptor.hits_addend.value = 4
    answer = call(lab.tollgate, message)
    equal(answer.statuses[0].limit_remaining, 6)
    equal(answer.statuses[0].current_limit.unit_multiplier.value, 2)
    descriptor.is_negative_hits = True
    equal(call(lab.tollgate, message).statuses[0].limit_remaining, 10)
    descriptor.is_negative_hits = False
    descriptor.hits_addend.value = 0
    equal(call(lab.tollgate, message).statuses[0].limit_remaining, 10)


@check
def bad_requests_have_a_status_and_a_reason(lab):
    for message in (request({"a": "b"}, domain=""), request()):
        try:
            call(lab.tollgate, message)
            raise AssertionError("it must fail")
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.INVALID_ARGUMENT)
            assert "must not be empty" in error.details()


# ------------------------------------------------------------------- metrics
@check
def promtool_minds_nothing_but_the_names_of_the_reference(lab):
    """Its counters have no _total, and dashboards know them so."""
    linted = subprocess.run(["promtool", "check", "metrics"], input=lab.tollgate.metrics(), capture_output=True, text=True)
    faults = {line.split(" ", 1)[1] for line in linted.stderr.splitlines()}
    names = {line.split(" ", 1)[0] for line in linted.stderr.splitlines()}
    equal(faults, {'counter metrics should have "_total" suffix'})
    assert all(name.startswith("ratelimit_service_") for name in names), names
    assert "ratelimit_service_rate_limit_over_limit" in names, "there is nothing of rules on the page"


# ----------------------------------------------------- the age of connections
@check
def connections_that_end_for_their_age_cost_no_call(lab):
    settings = {"GRPC_MAX_CONNECTION_AGE": "1s", "GRPC_MAX_CONNECTION_AGE_GRACE": "1s"}
    with (lab.another("age", HERE / "rules.yaml", settings) as tollgate,
          grpc.insecure_channel(f"127.0.0.1:{tollgate.grpc}") as channel):
        ask = asker(channel)

        def has_ended_three_times():
            for _ in range(20):
                equal(ask(request({"official": "age"}), timeout=5).overall_code, OK)
            return tollgate.metric("tollgate_grpc_connections_total") >= 4
        wait_for(has_ended_three_times, "four connections one after the other")
        equal(tollgate.metric("tollgate_grpc_connections"), 1)


# ---------------------------------------------------------- rules over xDS
@check
def go_control_plane_hands_out_rules(lab):
    """5,000 rules, then a bad set, then a good one."""
    with ControlPlane(lab) as control_plane, lab.another("of-xds", HERE / "rules.yaml", {
            "CONFIG_TYPE": "GRPC_XDS_SOTW", "CONFIG_GRPC_XDS_NODE_ID": "envoy-ratelimit",
            "CONFIG_GRPC_XDS_SERVER_URL": f"127.0.0.1:{control_plane.port}",
            "FORCE_START_WITHOUT_INITIAL_CONFIG": "true"}) as tollgate:

        def remaining():
            answer = call(tollgate, request({"k": "v4999"}))
            return answer.statuses[0].current_limit.requests_per_unit, answer.statuses[0].limit_remaining
        try:
            remaining()
            raise AssertionError("there are no rules yet")
        except grpc.RpcError as error:
            equal(error.code(), grpc.StatusCode.UNAVAILABLE)
        control_plane.push("good 5", "ack 1")
        equal(remaining(), (5, 4))
        refused = control_plane.push("bad", "nack 1 ")
        assert "lab.k_v2500.rate_limit: unit" in refused, refused
        equal(remaining(), (5, 3))
        control_plane.push("good 7", "ack 3")
        equal(remaining(), (7, 4))
        assert "loaded 5000 rules" in tollgate.log.read_text()
        equal(tollgate.log.read_text().count("cannot load the rules"), 1)


# ----------------------------------------------------------------- the clock
@check
def a_wall_clock_that_is_set_opens_no_window_again_and_freezes_none(lab):
    rules = lab.directory / "clock.yaml"
    rules.write_text("""
domain: lab
descriptors:
- {key: hour, rate_limit: {unit: hour, requests_per_unit: 3}}
- {key: bucket, rate_limit: {unit: hour, requests_per_unit: 3, algorithm: token_bucket}}
- {key: second, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: ban, rate_limit: {unit: second, requests_per_unit: 1, ban: {after: 0, for: 1h}}}
""")
    shift = lab.directory / "shift"
    shift.write_text("+0s")
    with lab.another("clock", rules, {
            "LD_PRELOAD": LIBFAKETIME, "FAKETIME_TIMESTAMP_FILE": str(shift), "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1"}) as tollgate:

        def refused(key, calls=1):
            """Which of so many calls were refused."""
            return [call(tollgate, request({key: "a"})).overall_code == OVER_LIMIT for _ in range(calls)]

        for key in ("hour", "bucket"):
            equal(refused(key, 4), [False, False, False, True])
        refused("ban", 2)
        for step in ("-70m", "+0s", "-3d", "-1h"):
            shift.write_text(step)
            equal((step, refused("hour"), refused("bucket"), refused("ban")), (step, [True], [True], [True]))
        shift.write_text("+3h")
        equal(refused("hour"), [False])
        equal((refused("bucket"), refused("ban")), ([True], [True]))
        shift.write_text("+0s")
        equal(refused("hour", 3), [False, False, True])
        # A window of a second that was used three hours ahead is over after a second.
        for step in ("+3h", "+0s", "+1h", "-1h"):
            shift.write_text(step)
            refused("second")
            wait_for(lambda: refused("second") == [False], f"a second to pass after {step}", seconds=2.5)


# ------------------------------------------------------------------- the end
@check
def after_sigterm_it_serves_on_while_it_lingers_and_exits_with_0(lab):
    """Keep this last."""
    lab.tollgate.signal(signal.SIGTERM)
    wait_for(lambda: "not ready any more" in lab.tollgate.log.read_text(), "the server to say that it stops")
    equal([lab.get("/", "strict").status for _ in range(10)], [200] * 10)
    equal(lab.tollgate.process.wait(15), 0)
    equal(lab.get("/", "default").status, 200)
    equal(lab.get("/", "strict").status, 503)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", required=True, help="the tollgate program")
    parser.add_argument("--only", action="append", help="run only the check of this name")
    arguments = parser.parse_args()
    passed = failed = 0
    with Lab(arguments.bin, SETTINGS) as lab:
        for function in CHECKS:
            name = function.__name__
            if arguments.only and name not in arguments.only:
                continue
            try:
                function(lab)
                passed += 1
                print(f"ok   {name}", flush=True)
            except Exception:
                failed += 1
                print(f"FAIL {name}\n{traceback.format_exc()}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    raise SystemExit(main())
