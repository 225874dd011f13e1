"""W12: triggers by HTTP from 64 keep-alive clients, compared with the same app's constant answer, `/health`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from benchmarks.peers.arena import Arena
from benchmarks.peers.contenders import Contender
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload

CLIENTS = 64


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    with arena.program(contender, arena.fresh(contender), "worker", "--no-queues") as service:
        address = urlsplit(service.wait("ready")["url"])
        host, port = str(address.hostname), int(address.port or 80)
        rates = {
            figure: asyncio.run(_rate(host, port, list(requests)))
            for figure, requests in (
                ("constant_per_s", _constant(sizes.http_requests)),
                ("trigger_per_s", _triggers(sizes.http_requests)),
            )
        }
    return rates | {"ratio": rates["trigger_per_s"] / rates["constant_per_s"]}


def _constant(count: int) -> Iterator[bytes]:
    for _ in range(count):
        yield b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def _triggers(count: int) -> Iterator[bytes]:
    head = "POST /api/v1/jobs/trigger HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for number in range(count):
        body = f'{{"queue":"bench","task":"bench","lock_key":"job-{number}","args":{{"n":{number}}}}}'
        yield f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


async def _rate(host: str, port: int, requests: list[bytes]) -> float:
    """Send all requests over the clients' connections, each its next one when its last was answered."""
    began = time.perf_counter()
    await asyncio.gather(*(_client(host, port, requests[number::CLIENTS]) for number in range(CLIENTS)))
    return len(requests) / (time.perf_counter() - began)


async def _client(host: str, port: int, requests: list[bytes]) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    for request in requests:
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith((b"http/1.1 200", b"http/1.1 201")):
            raise RuntimeError(f"answered {head[:80]!r}")
        await reader.readexactly(int(head.partition(b"content-length:")[2].partition(b"\r\n")[0]))
    writer.close()


WORKLOAD = Workload(
    name="w12",
    title="triggers by HTTP, 64 clients",
    measure=measure,
    figures={"trigger_per_s": "triggers/s", "constant_per_s": "a constant answer, requests/s", "ratio": "ratio"},
    bars=(Bar(text="≥ 0.8 × the constant answer", figure="ratio", least=0.8),),
    solo=True,
)
