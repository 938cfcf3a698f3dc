"""Stands for a pair's servers and router: answers GET /health, and ends as it is told by its environment.

STUB_ENDS: "ROLE CODE", which ends by itself with this code once it has answered. STUB_STUBBORN: takes no SIGTERM.
"""

import http.server
import os
import signal
import sys
import threading

FLAGS = sys.argv[1:]
ROLE = "router" if "--prefill" in FLAGS else "prefill" if "kv_producer" in " ".join(FLAGS) else "decode"


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        dying, _, code = os.environ.get("STUB_ENDS", "").partition(" ")
        if dying == ROLE:
            threading.Timer(0.3, os._exit, (int(code),)).start()

    def log_message(self, *_: object) -> None:
        pass


def end(*_: object) -> None:
    print("ending", flush=True)
    if "STUB_STUBBORN" not in os.environ:
        os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, end)
    print("this is", ROLE, flush=True)
    port = int(FLAGS[FLAGS.index("--port") + 1])
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Health).serve_forever()
