"""A tollgate server, an upstream and a real Envoy between them, on free ports of the loopback address."""
import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import textwrap
import time

from upstream import Upstream

HERE = pathlib.Path(__file__).resolve().parent
LISTENERS = ["main", "default", "strict", "custom", "tcp", "filterlevel"]


def wait_for(condition, what, seconds=20):
    """Waits until `condition()` is true; returns it."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end:
            raise RuntimeError(f"waited {seconds} s in vain for {what}")
        time.sleep(0.02)  # between two looks at a condition of another process


def free_ports(count):
    sockets = []
    for _ in range(count):
        s = socket.socket()
        s.bind(("127.0.0.1", 0))
        sockets.append(s)
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def http_get(port, path):
    """Status and body."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()


def serving(binary, rules):
    """The command that serves these rules on free ports."""
    return [binary, "serve", "--config", rules, "--grpc-host", "127.0.0.1", "--grpc-port", "0",
            "--host", "127.0.0.1", "--port", "0", "--debug-host", "127.0.0.1", "--debug-port", "0"]


class Tollgate:
    """The program under test as a process."""

    def __init__(self, command, directory, settings):
        self.log = pathlib.Path(directory) / "tollgate.log"
        environment = {"PATH": os.environ["PATH"], **settings}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, env=environment, stderr=log)

    def wait_for_ports(self):
        self.grpc = self.port("gRPC")
        self.http = self.port("HTTP")

    def port(self, what):
        line = re.compile(rf"listening for {what} on 127\.0\.0\.1:(\d+)")

        def find():
            if self.process.poll() is not None:
                raise RuntimeError("tollgate ended: " + self.log.read_text()[-2000:])
            return line.search(self.log.read_text())
        return int(wait_for(find, f"the {what} port")[1])

    def metric(self, name):
        """The value of a metric; its labels, if it has any, are part of the name."""
        return float(re.search(rf"^{re.escape(name)} (.*)$", self.metrics(), re.M)[1])

    def metrics(self):
        """The page for Prometheus."""
        return http_get(self.http, "/metrics")[1]

    def signal(self, number):
        self.process.send_signal(number)

    def stop(self):
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(command, directory, settings):
    """A tollgate with its files in a new directory. It has its ports, and ends with the `with`."""
    directory.mkdir()
    tollgate = Tollgate(command, directory, settings)
    try:
        tollgate.wait_for_ports()
        yield tollgate
    finally:
        tollgate.stop()


class Envoy:
    """A real Envoy as a process, with a free port for each of the listeners of its configuration."""

    def __init__(self, template, listeners, directory, values):
        self.directory = directory
        *ports, self.admin_port = free_ports(len(listeners) + 1)
        self.ports = dict(zip(listeners, ports))
        values = {"ADDR": "127.0.0.1", "P_ADMIN": self.admin_port, **values,
                  **{f"P_{name.upper()}": port for name, port in self.ports.items()}}
        config = re.sub("@([A-Z_0-9]+)@", lambda m: str(values[m[1]]), (HERE / template).read_text())
        (directory / "envoy.yaml").write_text(config)
        self.process = subprocess.Popen([
            "envoy", "-c", directory / "envoy.yaml", "--concurrency", "1", "--use-dynamic-base-id",
            "--log-level", "warning", "--log-path", directory / "envoy.log",
            "--file-flush-interval-msec", "50", "--drain-time-s", "1", "--parent-shutdown-time-s", "2",
        ])

    def __enter__(self):
        try:
            wait_for(self.is_ready, "Envoy")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_):
        self.stop()

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def is_ready(self):
        if self.process.poll() is not None:
            raise RuntimeError("Envoy ended: " + (self.directory / "envoy.log").read_text()[-2000:])
        try:
            return self.admin("/ready").strip() == "LIVE"
        except OSError:
            return False

    def admin(self, path):
        return http_get(self.admin_port, path)[1]

    def stat(self, name):
        """The value of one of Envoy's counters; 0 before it was ever counted."""
        for line in self.admin(f"/stats?filter=^{re.escape(name)}$").splitlines():
            return int(line.split(": ")[1])
        return 0


class Reply:
    def __init__(self, status, headers, body):
        self.status, self.headers, self.body = status, headers, body

    def header(self, name):
        """All values of a header, joined; None if there is none."""
        values = [value for key, value in self.headers if key.lower() == name]
        return ", ".join(values) if values else None


class Lab:
    """Use it in a `with`: nothing of it outlives that, whatever fails."""

    def __init__(self, binary, settings):
        self.binary, self.settings = binary, settings
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_):
        self.stack.close()

    def start(self):
        directory = self.stack.enter_context(tempfile.TemporaryDirectory(prefix="lab-"))
        self.directory = pathlib.Path(directory)
        serves = serving(self.binary, HERE / "rules.yaml")
        self.tollgate = self.stack.enter_context(running(serves, self.directory / "tollgate", self.settings))
        self.upstream = Upstream()
        self.stack.callback(self.upstream.server_close)
        self.stack.callback(self.upstream.shutdown)
        ban_403 = (HERE.parents[1] / "deploy/envoy/ban-403.yaml").read_text()
        self.envoy = self.stack.enter_context(Envoy("envoy.yaml.in", LISTENERS, self.directory, {
            "P_RLS": self.tollgate.grpc, "P_UP": self.upstream.server_address[1],
            "LOG": self.directory / "access.log", "FORMATTER": "false", "CUSTOM_STATUS": "TooManyRequests",
            "BAN_403": textwrap.indent(ban_403, " " * 16),
        }))

    def another(self, name, rules, settings):
        """One more tollgate, for a `with`; its files are in a directory of this name."""
        return running(serving(self.binary, rules), self.directory / name, settings)

    def get(self, path, listener="main", headers=None, method="GET", host="lab.test"):
        connection = http.client.HTTPConnection("127.0.0.1", self.envoy.ports[listener], timeout=15)
        connection.request(method, path, headers={"host": host, **(headers or {})})
        response = connection.getresponse()
        reply = Reply(response.status, response.getheaders(), response.read().decode())
        connection.close()
        return reply

    def raw(self, listener, data):
        """What comes back for these bytes until the connection is closed."""
        received = b""
        with socket.create_connection(("127.0.0.1", self.envoy.ports[listener]), timeout=15) as s:
            s.sendall(data)
            try:
                while chunk := s.recv(65536):
                    received += chunk
            except ConnectionResetError:
                pass
        return received

    def access_log(self, marker):
        """The entry of the request that carried the header x-lab-id with this marker."""
        def find():
            path = self.directory / "access.log"
            lines = path.read_text().splitlines() if path.exists() else []
            return next((entry for entry in map(json.loads, lines) if entry.get("id") == marker), None)
        return wait_for(find, f"the log entry {marker}")
