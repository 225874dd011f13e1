"""Requests /health fifty times a second, each on a new connection, until its standard input ends; then reports.

    python -m benchmarks.attack.probe HOST PORT [PATH]

Prints a JSON object: `took_ms`, for each answered request, counted from the time at which it was due, and `lost`, the
number of others. It never waits for an answer before the next request: a service that hangs for a second affects fifty
requests, as it would fifty clients, and not one. With PATH it also requests that twice a second; it must be answered
within 15 s, since many requests may precede it. It is a separate process, since a busy attacker would measure itself.
"""

from __future__ import annotations

import json
import select
import sys

import attrs
import trio

EVERY_S = 0.02
ALSO_EVERY_S = 0.5
WITHIN_S = 5.0
ALSO_WITHIN_S = 15.0
HEALTH = "/health"
REQUEST = "GET {} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"


@attrs.define
class Probe:
    """Sends requests to one service, and counts."""

    host: str
    port: int
    took_ms: list[float] = attrs.field(factory=list)
    lost: int = 0

    async def ask_again_and_again(self, path: str, every_s: float, over: trio.Event) -> None:
        """Send requests at fixed times, until `over`, then wait for their answers."""
        async with trio.open_nursery() as asked:
            due = trio.current_time()
            while not over.is_set():
                asked.start_soon(self._ask, path, due)
                due += every_s
                with trio.move_on_at(due):
                    await over.wait()

    async def _ask(self, path: str, due: float) -> None:
        if not await self._is_answered(path, WITHIN_S if path == HEALTH else ALSO_WITHIN_S):
            self.lost += 1
        elif path == HEALTH:
            self.took_ms.append((trio.current_time() - due) * 1_000)

    async def _is_answered(self, path: str, within_s: float) -> bool:
        """Return True if the whole answer arrives in time."""
        received = b""
        try:
            with trio.fail_after(within_s):
                async with await trio.open_tcp_stream(self.host, self.port) as stream:
                    await stream.send_all(REQUEST.format(path).encode())
                    async for part in stream:
                        received += part
        except (OSError, trio.BrokenResourceError, trio.TooSlowError):
            return False
        return received.startswith(b"HTTP/1.1 200 ") and received.endswith(b"}")


async def main() -> None:
    probe = Probe(sys.argv[1], int(sys.argv[2]))
    over = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(probe.ask_again_and_again, HEALTH, EVERY_S, over)
        for path in sys.argv[3:]:
            nursery.start_soon(probe.ask_again_and_again, path, ALSO_EVERY_S, over)
        await trio.to_thread.run_sync(select.select, [sys.stdin], [], [])
        over.set()
    print(json.dumps({"took_ms": probe.took_ms, "lost": probe.lost}))


if __name__ == "__main__":
    trio.run(main)
