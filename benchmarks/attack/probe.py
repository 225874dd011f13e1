"""Asks for /health again and again, on a new connection each time, until its standard input ends; then tells.

    python -m benchmarks.attack.probe HOST PORT

Prints a JSON object: `took_ms`, of each request that was answered, and `lost`, how many were not. A process of its own:
an attacker who is busy would measure itself.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time

EVERY_S = 0.02
WITHIN_S = 5.0
REQUEST = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


def main() -> None:
    address = sys.argv[1], int(sys.argv[2])
    took_ms, lost = [], 0
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        began = time.perf_counter()
        try:
            answer = ask(address)
        except OSError:
            answer = b""
        if answer.startswith(b"HTTP/1.1 200 "):
            took_ms.append((time.perf_counter() - began) * 1_000)
        else:
            lost += 1
    print(json.dumps({"took_ms": took_ms, "lost": lost}))


def ask(address: tuple[str, int]) -> bytes:
    """All that is answered."""
    received = b""
    with socket.create_connection(address, timeout=WITHIN_S) as connection:
        connection.sendall(REQUEST)
        while part := connection.recv(4_096):
            received += part
    return received


if __name__ == "__main__":
    main()
