"""Load: threads that ask without pause."""
import collections
import concurrent.futures
import contextlib
import http.client
import threading

from lab import wait_for


class Load:
    """Asks as long as its `with` lasts. `answers` says how often each answer came; a failure is one, too."""

    def __init__(self, asker, threads=8):
        """`asker()` is the context manager of what one thread asks with, a function."""
        self.answers = collections.Counter()
        self.lock = threading.Lock()
        self.ended = threading.Event()
        self.asker, self.threads = asker, threads

    def __enter__(self):
        self.pool = concurrent.futures.ThreadPoolExecutor(self.threads)
        self.asking = [self.pool.submit(self.ask) for _ in range(self.threads)]
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.pool.shutdown()
        for thread in self.asking:
            thread.result()

    def ask(self):
        with self.asker() as ask:
            while not self.ended.is_set():
                try:
                    answer = ask()
                except Exception as failure:
                    answer = repr(failure)
                with self.lock:
                    self.answers[answer] += 1

    def total(self):
        with self.lock:
            return self.answers.total()

    def wait_for(self, total):
        wait_for(lambda: self.total() >= total, f"{total} answers")

    def wait_for_more(self, count):
        self.wait_for(self.total() + count)


@contextlib.contextmanager
def keep_alive(port):
    """Asks an HTTP server for / again and again, over one connection; answers are statuses."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=15)) as connection:
        def ask():
            connection.request("GET", "/")
            response = connection.getresponse()
            response.read()
            return response.status
        yield ask
