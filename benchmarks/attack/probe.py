"""Asks for /health again and again, on a new connection each time, until its standard input ends; then tells.

    python -m benchmarks.attack.probe HOST PORT [PATH]

Prints a JSON object: `took_ms`, of each request that was answered, and `lost`, how many were not. With PATH it asks for
that, too, each time, which must be answered as well, but is not timed. A process of its own: an attacker who is busy
would measure itself.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

EVERY_S = 0.02
WITHIN_S = 5.0
HEALTH = "/health"
REQUEST = "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


def main() -> None:
    address = sys.argv[1], int(sys.argv[2])
    took_ms, lost = [], 0
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        for path in HEALTH, *sys.argv[3:]:
            began = time.perf_counter()
            if not is_answered(address, path):
                lost += 1
            elif path == HEALTH:
                took_ms.append((time.perf_counter() - began) * 1_000)
    print(json.dumps({"took_ms": took_ms, "lost": lost}))


def is_answered(address: tuple[str, int], path: str) -> bool:
    """Whether what is asked for comes, and all of it."""
    received = b""
    try:
        with socket.create_connection(address, timeout=WITHIN_S) as connection:
            connection.sendall(REQUEST.format(path).encode())
            while part := connection.recv(4_096):
                received += part
    except OSError:
        return False
    return received.startswith(b"HTTP/1.1 200 ") and received.endswith(b"}")


if __name__ == "__main__":
    main()
