"""Rules in a ConfigMap that is swapped while calls come in."""
import contextlib
import time

import grpc
from checks import check, equal
from lab import running, serving, wait_for
from load import Load
from mount import Mount
from rls import asker, request


def version(limit):
    """Two files that hold one domain together; in both the limit tells the version."""
    return {f"{key}.yaml": f"{{domain: lab, descriptors: [{{key: {key}, rate_limit: {{unit: year, requests_per_unit: {limit}}}}}]}}"
            for key in ("first", "last")}


def limits_seen(tollgate, threads=4):
    """Load whose answers are the limits of both files, as one call saw them."""
    @contextlib.contextmanager
    def open_channel():
        with grpc.insecure_channel(f"127.0.0.1:{tollgate.grpc}") as channel:
            method = asker(channel)

            def ask():
                answer = method(request({"first": "a"}, {"last": "a"}), timeout=5)
                return tuple(status.current_limit.requests_per_unit for status in answer.statuses)
            yield ask
    return Load(open_channel, threads)


@check
def no_call_fails_or_sees_two_versions_of_the_rules(lab):
    versions = range(1_000_001, 1_000_011)
    mount = Mount(lab.directory / "config-map", version(1_000_000))
    with (lab.another("swapped", mount.path, {"MERGE_DOMAIN_CONFIG": "true"}) as tollgate,
          limits_seen(tollgate) as load):
        for limit in versions:
            mount.swap(version(limit))
            wait_for(lambda: (limit, limit) in load.answers, f"version {limit}")
    equal(set(load.answers), {(limit, limit) for limit in (1_000_000, *versions)})
    assert load.total() > 1_000, load.answers


@check
def a_swap_while_rules_are_read_mixes_no_versions(lab):
    mount = Mount(lab.directory / "busy-config-map", version(1_000_000))
    # Read between the two files, it gives a swap time to happen there.
    comments = lab.directory / "comments.yaml"
    comments.write_text("domain: lab\n" + "# nothing\n" * 6_000_000)
    between = ["--config", comments, "--config", mount.path / "last.yaml"]
    with (running(serving(lab.binary, mount.path / "first.yaml") + between, lab.directory / "busy", {
            "MERGE_DOMAIN_CONFIG": "true"}) as tollgate, limits_seen(tollgate, threads=2) as load):
        # Files that do not settle are read every four seconds: here twice.
        limit, end = 1_000_000, time.monotonic() + 9
        while time.monotonic() < end:
            limit += 1
            mount.swap(version(limit))
        wait_for(lambda: (limit, limit) in load.answers, "the last version")
    equal([limits for limits in load.answers if len(set(limits)) != 1], [])
