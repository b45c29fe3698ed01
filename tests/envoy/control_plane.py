"""The xDS server of go-control-plane in ../xds."""
import subprocess

from lab import HERE


class ControlPlane:
    """Use it in a `with`: the process ends with that."""

    def __init__(self, lab):
        program = lab.directory / "xds"
        subprocess.run(["go", "build", "-o", program, "."], cwd=HERE.parent / "xds", check=True)
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.port = int(self.process.stdout.readline())

    def push(self, rules, answer):
        """Hands out rules, and waits for an answer that starts so. Rules that are refused are handed out again and again."""
        print(rules, file=self.process.stdin)
        while not (line := self.process.stdout.readline()).startswith(answer):
            assert line.startswith("nack"), line
        return line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
