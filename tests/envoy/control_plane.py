"""The xDS server of go-control-plane in ../xds."""
import queue
import subprocess
import threading

from lab import HERE


class ControlPlane:
    """Use it in a `with`: the process ends with that."""

    def __init__(self, lab, secret=None):
        """With the directory of a certificate it serves TLS, for clients with one of the same authority."""
        program = lab.directory / "xds"
        subprocess.run(["go", "build", "-o", program, "."], cwd=HERE.parent / "xds", check=True)
        command = [program]
        if secret:
            command += ["-certificate", secret / "tls.crt", "-key", secret / "tls.key", "-client-authority", secret / "ca.crt"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.lines = queue.SimpleQueue()
        threading.Thread(target=lambda: [self.lines.put(line) for line in self.process.stdout]).start()
        self.port = int(self.line())

    def line(self):
        """The next that it prints."""
        try:
            return self.lines.get(timeout=20)
        except queue.Empty:
            raise RuntimeError("the xDS server said nothing for 20 s") from None

    def push(self, rules, answer):
        """Hands out rules, and waits for an answer that starts so. Rules that are refused are handed out again and again."""
        print(rules, file=self.process.stdin)
        while not (line := self.line()).startswith(answer):
            assert line.startswith("nack"), line
        return line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
