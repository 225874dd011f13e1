"""Source of the benchmark: a process that answers with `ROWS` records for each day, after `DELAY_S` seconds.

python -m benchmarks.loads.overhead_source ROWS DELAY_S    prints its address
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit


def body(day: str, rows: int) -> bytes:
    items = [
        {"day": day, "item": f"item {n:06d}", "amount": f"{n % 997}.{n % 89:02d}", "note": f"note of {n} " * 4}
        for n in range(rows)
    ]
    return json.dumps({"items": items}).encode()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    rows = 0
    delay_s = 0.0

    def do_GET(self) -> None:
        time.sleep(self.delay_s)
        day = dict(parse_qsl(urlsplit(self.path).query))["day"]
        answer = body(day, self.rows)
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_args: object) -> None:
        """Do nothing."""


if __name__ == "__main__":
    Handler.rows, Handler.delay_s = int(sys.argv[1]), float(sys.argv[2])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
