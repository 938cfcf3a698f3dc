"""A server without a model, and a pair's router likewise: what scripts/pd_sweep.py needs of either.

It answers a prompt with the prompt and its length. What goes wrong is the decode server's block size: 2, it does all of
it alone; 3, its texts are other ones; 4, it refuses; 5, it does not start.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

DOES_ALL, OTHER_TEXTS, REFUSES, NO_START = 2, 3, 4, 5


def wrong() -> int:
    """What goes wrong; 0 for nothing."""
    flags = [flag for flag in sys.argv if flag.startswith("--decode=") and "--block-size" in flag]
    return int(flags[0].rpartition(" ")[2]) if flags else 0


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": "stub"}]}))
        elif self.path == "/metrics":
            count = 21 if wrong() == DOES_ALL else 0
            name = "glm_dcp_router:fallbacks_total"
            lines = f'{name}{{reason="timeout"}} {count}\n{name}{{reason="status"}} 0\n'
            self.answer(200, f"# TYPE {name} counter\n{lines}")
        else:
            self.answer(200, "")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["temperature"] == 0 and body["model"] == "stub"
        if wrong() == REFUSES:
            self.answer(500, json.dumps({"error": {"message": "its cache did not arrive"}}))
            return
        text = f"{body['prompt']} {len(body['prompt'])}"
        self.answer(200, json.dumps({"choices": [{"text": text + "!" * (wrong() == OTHER_TEXTS)}]}))

    def answer(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Nothing to say."""


if __name__ == "__main__":
    if wrong() == NO_START:
        sys.exit("error: it cannot start")
    host, port = (sys.argv[sys.argv.index(flag) + 1] for flag in ("--host", "--port"))
    ThreadingHTTPServer((host, int(port)), _Handler).serve_forever()
