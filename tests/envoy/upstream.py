"""An upstream that answers with what it was asked, as JSON, and counts its requests.

It copies the request header x-cost to the response, for costs that are known only there.
"""
import http.server
import json
import threading


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one write per response; else Nagle's algorithm adds 40 ms

    def answer(self):
        self.server.requests += 1
        self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.dumps({"method": self.command, "path": self.path}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        if self.headers.get("x-cost"):
            self.send_header("x-cost", self.headers["x-cost"])
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer

    def log_message(self, *_):
        pass


class Upstream(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address):
        pass  # clients that reset the connection are of no interest
