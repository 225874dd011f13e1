"""Attacks. Each bounds the number of its connections and bytes; the caller bounds its duration."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import attrs
import trio

FILES = 2_600
"""Maximum number of files of an attack: two thousand connections, and some more."""
KIB, MIB = 1 << 10, 1 << 20
TRIGGER = "/api/v1/jobs/trigger"
JSON = "Content-Type: application/json"
JOB = {"queue": "q", "task": "t", "lock_key": "k"}
GONE = (OSError, trio.BrokenResourceError, trio.ClosedResourceError)
PATIENCE_S = 15.0


@attrs.frozen
class Target:
    """Attacked service."""

    host: str
    port: int

    async def connect(self, *, receive_buffer: int | None = None) -> trio.SocketStream:
        sock = trio.socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, receive_buffer)
        await sock.connect((self.host, self.port))
        return trio.SocketStream(sock)

    async def ask(self, path: str, *, body: bytes | None = None) -> bytes:
        """Return an answer with its head, or the part that arrived before the service closed the connection."""
        received = b""
        try:
            async with await self.connect() as stream, trio.open_nursery() as nursery:
                nursery.start_soon(_send, stream, request(path, body=body))
                async for part in stream:
                    received += part
                nursery.cancel_scope.cancel()
        except* GONE:
            pass
        return received

    async def ask_well(self, path: str, body: object) -> Any:
        """Return the answer to a request that must be served."""
        head, _, answer = (await self.ask(path, body=json.dumps(body).encode())).partition(b"\r\n\r\n")
        if not head.startswith((b"HTTP/1.1 200 ", b"HTTP/1.1 201 ")):
            raise RuntimeError(f"{path}: {head!r} {answer[:300]!r}")
        return json.loads(answer)


@attrs.frozen
class Attack:
    """Preparation in peace, and the attack itself, which gets the prepared value.

    `also_asked`: an address that must be answered meanwhile, like `/health`, but may take longer.
    """

    run: Callable[[Target, Any], Awaitable[None]]
    prepare: Callable[[Target], Awaitable[Any]] | None = None
    also_asked: Callable[[Any], str] | None = None


def request(path: str, *headers: str, body: bytes | None = None) -> bytes:
    """Return a request that ends its connection."""
    more = [] if body is None else [JSON, f"Content-Length: {len(body)}"]
    method = "GET" if body is None else "POST"
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close", *more, *headers, "", ""]
    return "\r\n".join(lines).encode() + (body or b"")


async def _send(stream: trio.SocketStream, data: bytes) -> None:
    with suppress(*GONE):
        await stream.send_all(data)


async def _together(number: int, client: Callable[[], Awaitable[None]]) -> None:
    """Run `number` clients concurrently, ignoring connection errors."""

    async def one() -> None:
        try:
            await client()
        except* GONE:
            pass

    async with trio.open_nursery() as nursery:
        for _ in range(number):
            nursery.start_soon(one)


async def idle_sockets(target: Target, _: object) -> None:
    async def client() -> None:
        async with await target.connect() as stream:
            await stream.receive_some(1)

    await _together(1_200, client)


async def slow_headers(target: Target, _: object) -> None:
    async def client() -> None:
        async with await target.connect() as stream:
            await stream.send_all(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
            while True:
                await stream.send_all(b"x")
                await trio.sleep(0.5)

    await _together(300, client)


async def slow_bodies(target: Target, _: object) -> None:
    async def client() -> None:
        async with await target.connect() as stream:
            await stream.send_all(request(TRIGGER, JSON, f"Content-Length: {MIB}").replace(b"GET", b"POST", 1))
            while True:
                await stream.send_all(b" ")
                await trio.sleep(0.5)

    await _together(200, client)


async def chunked_bodies(target: Target, _: object, *, length: int = 16 * MIB) -> None:
    piece = b"x" * 64 * KIB
    chunk = b"%x\r\n%s\r\n" % (len(piece), piece)
    begin = json.dumps({"jobs": [JOB | {"args": {"text": ""}}]}).encode().partition(b'""')
    first, last = begin[0] + b'"', b'"' + begin[2]

    async def client() -> None:
        async with await target.connect() as stream, trio.open_nursery() as nursery:

            async def send() -> None:
                head = request(f"{TRIGGER}/batch", JSON, "Transfer-Encoding: chunked").replace(b"GET", b"POST", 1)
                await _send(stream, head + b"%x\r\n%s\r\n" % (len(first), first))
                for _ in range(length // len(piece)):
                    await _send(stream, chunk)
                await _send(stream, b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last))

            nursery.start_soon(send)
            while await stream.receive_some(64 * KIB):
                pass
            nursery.cancel_scope.cancel()

    await _together(40, client)


async def lists(target: Target, _: object) -> None:
    body = b'{"jobs":[' + b"[]," * (14 * MIB // 3) + b"[]]}"
    await _repeat(target, 4, body)


async def full_batches(target: Target, _: object) -> None:
    """Send batches of the maximum length."""
    length = 7 * MIB + 900 * KIB
    text = "й" * (length // 1_000 // 2 - 60)
    body = json.dumps({"jobs": [JOB | {"args": {"text": text}}] * 1_000}, ensure_ascii=False).encode()
    await _repeat(target, 4, body)


async def invalid_jobs(target: Target, _: object) -> None:
    job = JOB | dict.fromkeys(("idempotency_key", "partition_key", "producer", "consumer_group"), "x" * 512)
    body = json.dumps({"jobs": [job] * 999 + [job | {"priority": "high"}]}).encode()
    await _repeat(target, 4, body)


async def _repeat(target: Target, number: int, body: bytes) -> None:
    async def client() -> None:
        for _ in range(50):
            await target.ask(f"{TRIGGER}/batch", body=body)

    await _together(number, client)


async def a_large_job(target: Target) -> str:
    return str((await target.ask_well(TRIGGER, JOB | {"args": {"list": ["ab" * 50] * 9_000}}))["job_id"])


async def slow_readers(target: Target, job_id: str) -> None:
    ask = request(f"/api/v1/jobs/{job_id}").replace(b"Connection: close\r\n", b"")
    await _together(12, partial(_slow_reader, target, ask * 20, length=512))


async def two_jobs(target: Target) -> list[str]:
    """Add a large job, and a smaller one, which is still counted."""
    smaller = await target.ask_well(TRIGGER, JOB | {"args": {"list": ["ab" * 50] * 3_000}})
    return [await a_large_job(target), smaller["job_id"]]


async def slow_readers_who_come_again(target: Target, job_ids: list[str]) -> None:
    """Read slowly; together these readers would hold everything that answers may hold."""

    async def client() -> None:
        while True:
            with suppress(*GONE):
                await _slow_reader(target, request(f"/api/v1/jobs/{job_ids[0]}"), length=12 * KIB)

    await _together(60, client)


async def _slow_reader(target: Target, ask: bytes, *, length: int) -> None:
    """Send a request, and receive `length` bytes of the answer per second."""
    async with await target.connect(receive_buffer=4 * KIB) as stream:
        await stream.send_all(ask)
        part = b"-"
        while part:
            part = await stream.receive_some(length)
            await trio.sleep(1)


async def some_jobs(target: Target, number: int = 200) -> list[str]:
    answer = await target.ask_well(f"{TRIGGER}/batch", {"jobs": [JOB] * number})
    return [job["job_id"] for job in answer["jobs"]]


async def waits(target: Target, job_ids: list[str]) -> None:
    left = iter(job_ids * 10)

    async def client() -> None:
        await target.ask(f"/api/v1/jobs/{next(left)}/status?wait=60")

    await _together(2_000, client)


async def many_queues(target: Target) -> None:
    for batch in range(10):
        jobs = [JOB | {"queue": f"{batch:02d}{number:03d}" + '"\\{}' * 40} for number in range(1_000)]
        await target.ask_well(f"{TRIGGER}/batch", {"jobs": jobs})


async def scrapes(target: Target, _: object) -> None:
    paths = iter(["/metrics", "/status", "/api/v1/queues", "/api/v1/queues?limit=1000"] * 5)

    async def client() -> None:
        path = next(paths)
        while True:
            await target.ask(path)
            await trio.sleep(0.5)

    await _together(20, client)


ATTACKS: dict[str, Attack] = {
    "1,200 idle sockets": Attack(idle_sockets),
    "300 slow headers": Attack(slow_headers),
    "200 slow bodies": Attack(slow_bodies),
    "40 chunked bodies of 16 MiB": Attack(chunked_bodies),
    "40 chunked bodies of 7 MiB": Attack(partial(chunked_bodies, length=7 * MIB)),
    "14 MiB of [],[],…": Attack(lists),
    "batches as long as they may be": Attack(full_batches),
    "1,000 jobs, one of them invalid": Attack(invalid_jobs),
    "12 readers at 512 B/s": Attack(slow_readers, a_large_job),
    "60 readers at 12 KiB/s, again": Attack(
        slow_readers_who_come_again, two_jobs, also_asked=lambda job_ids: f"/api/v1/jobs/{job_ids[1]}"
    ),
    "2,000 waits": Attack(waits, some_jobs),
    "10,000 queue names, 20 scrapes": Attack(scrapes, many_queues),
}
