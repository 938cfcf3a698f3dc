"""A server that says token 7 at once, as often as it is asked to: what scripts/bench_serving.py needs of one.

As a program it takes a real server's flags and looks at --host and --port alone; and two of its own, --fail, and
--pid-file to say who it is.
"""

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 100


class StubServer(ThreadingHTTPServer):
    """refuses: says of a request's number, from 0 on, whether it is answered with 400. asked: all bodies so far.

    together: most requests that were there at a time.
    """

    daemon_threads = True
    request_queue_size = 128  # connections that may come at once

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(address, _Handler)
        self.refuses = lambda number: False
        self.breaks_off = False
        self.asked: list[dict[str, Any]] = []
        self.here = self.together = 0
        self.lock = threading.Lock()
        self.met = threading.Event()
        """Answers wait for it, if `meet` requests are to be there together first."""
        self.meet = 0

    @contextmanager
    def counted(self, body: dict[str, Any]) -> Iterator[int]:
        """The request's number."""
        with self.lock:
            self.asked.append(body)
            number = len(self.asked) - 1
            self.here += 1
            self.together = max(self.together, self.here)
            if self.here >= self.meet:
                self.met.set()
        try:
            yield number
        finally:
            with self.lock:
                self.here -= 1


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StubServer

    def do_GET(self) -> None:
        if self.path == "/health":
            self.answer(200, "")
        elif self.path == "/v1/models":
            card = {"id": "stub", "root": "nowhere", "max_model_len": MAX_MODEL_LEN}
            self.answer(200, json.dumps({"data": [card]}))
        elif self.path == "/metrics":
            self.answer(
                200,
                "# TYPE stub:requests_total counter\n"
                f'stub:requests_total{{engine="0",model_name="stub",kind="any"}} {len(self.server.asked)}\n',
            )
        else:
            self.answer(404, json.dumps({"error": {"message": f"nothing at {self.path}"}}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.counted(body) as number:
            if self.server.refuses(number):
                self.answer(400, json.dumps({"error": {"message": f"request {number} is refused"}}))
            else:
                self.stream(body)

    def stream(self, body: dict[str, Any]) -> None:
        if len(self.server.asked) > 1:  # the warm-up comes alone
            self.server.met.wait(5 if self.server.meet else 0)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self.event({"choices": [{"text": "", "token_ids": [7]}]})
            if self.server.breaks_off:
                self.event({"error": {"message": "it broke"}})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        self.event({"choices": [], "usage": usage})
        self.chunk("data: [DONE]\n\n")
        self.chunk("")

    def event(self, content: dict[str, Any]) -> None:
        self.chunk(f"data: {json.dumps(content)}\n\n")

    def chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


if __name__ == "__main__":
    if "--fail" in sys.argv:
        sys.exit("error: it cannot start")
    host, port = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--host", "--port"))
    if "--pid-file" in sys.argv:
        Path(sys.argv[sys.argv.index("--pid-file") + 1]).write_text(str(os.getpid()))
    StubServer((host, int(port))).serve_forever()
