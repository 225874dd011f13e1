"""Open pages as plain HTTP clients: each requests its live part when the last answer says so, until stdin is closed."""

from __future__ import annotations

import json
import re
import statistics
import sys
import time

import trio

from benchmarks.pages.site import connected, get


async def main(url: str, pages: int, paths: list[str]) -> None:
    waits: list[float] = []
    parts = {path: await trio.to_thread.run_sync(_part_of, url, path) for path in set(paths)}
    async with trio.open_nursery() as nursery:
        for number in range(pages):
            nursery.start_soon(_page, url, parts[paths[number % len(paths)]], waits)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()
    print(json.dumps({"clients_cpu_s": time.process_time(), "came_again_s": statistics.median(waits or [0])}))


def _part_of(url: str, path: str) -> str:
    _, body, _ = get(connected(url), path)
    live = re.search(rb'data-part="(\w+)" data-live', body)
    assert live, f"{path} has no live part"
    return f"{path}{'&' if '?' in path else '?'}part={live[1].decode()}"


async def _page(url: str, path: str, waits: list[float]) -> None:
    connection, tag = connected(url), ""
    limiter = trio.CapacityLimiter(1)
    while True:
        headers = {"If-None-Match": tag} if tag else {}
        _, _, answered = await trio.to_thread.run_sync(
            get, connection, path, headers, limiter=limiter, abandon_on_cancel=True
        )
        tag = answered["ETag"] or ""
        waits.append(float(answered["Refresh-In"]))
        await trio.sleep(waits[-1])


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), sys.argv[3:])
