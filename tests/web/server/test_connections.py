"""Connections: which are accepted, for how long, and which are closed to make room."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import random
import re
import resource
import socket
import struct
import time
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import h11
import hypercorn.protocol.h11
import pytest
import trio
import trio.testing
from conditions import patience_s, until
from hypercorn.protocol.http_stream import HTTPStream
from logged import capture_logs
from quart.wrappers.request import Body as QuartBody
from quart_trio.asgi import TrioASGIHTTPConnection

from dataloader.web.server import refusals
from dataloader.web.server.bodies import Body
from dataloader.web.server.connections import Connections, LongAnswers, Phase, most_connections
from dataloader.web.server.limits import STANDARD, HttpLimits
from dataloader.web.server.refusals import Refusal, Refusals

pytestmark = pytest.mark.requirement("Q5")

RESET = struct.pack("ii", 1, 0)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
TRIGGER = (
    b"POST /api/v1/jobs/trigger HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 70\r\n\r\n"
)


QUICK = HttpLimits(young_connection_s=0.05)


@contextlib.contextmanager
def files_up_to(number):
    """Let this process open files up to that number, for the duration of a block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_file_left():
    """Let this process open a file only after it has closed one."""
    with contextlib.ExitStack() as fillers:
        highest = max(int(file.name) for file in Path("/proc/self/fd").iterdir())
        number = -1
        while number < highest:
            number = os.dup(0)
            fillers.callback(os.close, number)
        with files_up_to(number + 1):
            yield


async def connect(web):
    host, port = web.url.removeprefix("http://").split(":")
    return await trio.open_tcp_stream(host, int(port))


async def answered(stream, ending=b'"ok"}'):
    received = b""
    while not received.endswith(ending):
        part = await stream.receive_some(65_536)
        assert part, received
        received += part
    return received


async def rest(stream):
    """Return all bytes until the server ends the connection."""
    received = b""
    try:
        async for part in stream:
            received += part
    except trio.BrokenResourceError:
        pass
    return received


async def ended(streams):
    """Return the number of connections that the server has ended, at least one."""
    found = []

    async def wait(stream):
        assert await rest(stream) == b""
        found.append(stream)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for stream in streams:
            nursery.start_soon(wait, stream)
    return len(found)


async def in_phase(web, phase, number):
    async def count():
        return web.services.connections.count(phase)

    await until(count, lambda count: count == number)


async def none_left(web):
    """Wait until the last connection has ended, with all work for its requests."""

    async def left():
        tasks, serving = [trio.lowlevel.current_root_task()], []
        while tasks:
            task = tasks.pop()
            tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]
            if task.name.endswith("http1.Connection.run"):
                serving.append(task)
        return len(web.services.connections), len(serving)

    await until(left, lambda left: left == (0, 0))


async def refused(web, kind, number=1):
    async def count():
        return web.services.refusals.counts[kind]

    return await until(count, lambda count: count >= number)


async def a_long_answer(web):
    """Return a request for an answer of about 900 kB; without a reader it stays in the server, not in buffers."""
    web.sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 32_768)
    web.sock.setsockopt(trio.socket.IPPROTO_TCP, trio.socket.TCP_USER_TIMEOUT, 30_000)
    job_id = await web.trigger(args={"text": "x" * 900_000})
    return f"GET /api/v1/jobs/{job_id} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


async def a_slow_reader(web):
    """Return a connection whose client reads nothing by itself."""
    stream = await connect(web)
    stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 65_536)
    return stream


async def all_of(web, sent):
    """Send it, and read only afterwards: return the head of the first answer, and the rest.

    Raises `trio.BrokenResourceError` when the connection is reset: many clients would not read at all then.
    """
    async with await connect(web) as stream:
        await stream.send_all(sent)
        head, _, body = b"".join([part async for part in stream]).partition(b"\r\n\r\n")
        return head, body


@asynccontextmanager
async def filled(web, number, head=b""):
    """Open `number` connections that have sent `head`, and are known to the server."""
    streams = []
    try:
        for _ in range(number):
            streams.append(await connect(web))
            await streams[-1].send_all(head)
            if head == HEALTH:
                await answered(streams[-1])
                await in_phase(web, Phase.IDLE, len(streams))
        yield streams
    finally:
        for stream in streams:
            stream.socket.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"", b""),
        (b"GET /health HTTP/1.1\r\nX-Slow: ", b""),
        (TRIGGER, b"{"),
        (HEALTH, b""),
    ],
    ids=["idle from the start", "slow headers", "slow bodies", "idle after an answer"],
)
async def test_when_all_connections_are_taken_the_oldest_that_waits_gives_way_to_a_probe(open_web, head, kept):
    async with open_web(max_connections=8, limits=QUICK) as web, filled(web, 8, head + kept) as streams:
        await in_phase(web, Phase.RECEIVING if kept else Phase.IDLE, 8)
        with trio.fail_after(patience_s()):
            async with await connect(web) as probe:
                await probe.send_all(HEALTH)
                assert b" 200 " in await answered(probe)
            assert web.services.refusals.counts[Refusal.GAVE_WAY] == 1
            assert await ended(streams) == 1


@pytest.mark.slow
async def test_a_request_that_is_worked_on_never_gives_way_and_leaves_room_for_probes(open_web):
    async with open_web(max_connections=8, limits=QUICK) as web:
        job_id = await web.trigger()
        wait = f"GET /api/v1/jobs/{job_id}/status?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        async with filled(web, 7, wait) as streams:
            # Six of eight may be in progress.
            await refused(web, Refusal.BUSY)
            with trio.fail_after(patience_s()):
                for _ in range(12):
                    async with await connect(web) as probe:
                        await probe.send_all(HEALTH)
                        assert b" 200 " in await answered(probe)
                assert web.services.at_work.held == 6
                await in_phase(web, Phase.WORKING, 6)
                web.services.waiting.answer_all()
                await in_phase(web, Phase.WORKING, 0)
                statuses = [(await stream.receive_some(65_536))[9:12] for stream in streams]
                assert sorted(statuses) == [b"200"] * 6 + [b"503"]


async def test_a_request_that_is_worked_on_never_gives_way_though_the_next_one_has_come(open_web):
    async with open_web(max_connections=4, limits=QUICK) as web:
        job_id = await web.trigger()
        wait = f"GET /api/v1/jobs/{job_id}/status?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        with trio.fail_after(patience_s()):
            async with await connect(web) as stream:
                await stream.send_all(wait + HEALTH)
                await in_phase(web, Phase.WORKING, 1)
                async with filled(web, 3, TRIGGER), await connect(web) as probe:
                    await probe.send_all(HEALTH)
                    assert b" 200 " in await answered(probe)
                await in_phase(web, Phase.WORKING, 1)
                web.services.waiting.answer_all()
                assert (await answered(stream)).count(b"HTTP/1.1 200") == 2


class Stub:
    def __init__(self, closed):
        self.closed = closed

    def give_way(self):
        self.closed.append(self)


async def test_idle_connections_are_closed_first_then_receiving_then_sending_ones(autojump_clock):
    del autojump_clock
    closed = []
    crowd = Connections(4, Refusals())
    clients = [Stub(closed) for _ in Phase]
    idle, receiving, sending, working = clients
    for client, phase in zip(clients, Phase, strict=True):
        crowd.enter(client)
        crowd.move(client, phase)
    newcomers = [Stub(closed) for _ in range(3)]
    for newcomer in newcomers:
        await crowd.room()
        crowd.enter(newcomer)
        crowd.move(newcomer, Phase.WORKING)
    assert closed == [idle, receiving, sending]
    # All are in use: the next one waits until one of them has finished.
    with trio.move_on_after(1_000) as waiting:
        await crowd.room()
    assert waiting.cancelled_caught
    async with trio.open_nursery() as nursery:
        nursery.start_soon(crowd.room)
        await trio.testing.wait_all_tasks_blocked()
        crowd.move(working, Phase.IDLE)
    assert closed[3:] == [working]


async def test_a_young_connection_is_not_closed_yet_and_new_ones_wait(autojump_clock):
    """Otherwise a thousand clients that connect together would displace each other, and a probe among them."""
    del autojump_clock
    closed = []
    crowd = Connections(2, Refusals())
    for _ in range(2):
        crowd.enter(Stub(closed))
    began = trio.current_time()
    assert not crowd.make_room()
    await crowd.room()
    assert trio.current_time() - began == pytest.approx(STANDARD.young_connection_s)
    assert len(closed) == 1


@attrs.define(eq=False)
class SlowlyReadClock(trio.abc.Clock):
    """Clock with readings that take `reading_s` seconds each: time passes between any two of them."""

    reading_s: float
    passed_s: float = 0

    def start_clock(self):
        pass

    def current_time(self):
        self.passed_s += self.reading_s
        return self.passed_s + time.monotonic()

    def deadline_to_sleep_time(self, deadline):
        return deadline - self.passed_s - time.monotonic()


@pytest.fixture
def slowly_read_clock():
    return SlowlyReadClock(STANDARD.young_connection_s * 0.3)


async def test_a_connection_that_grows_old_while_room_is_sought_gives_way(slowly_read_clock):
    """It was too young at the first reading of the clock, but not at the next one."""
    del slowly_read_clock
    closed = []
    crowd = Connections(1, Refusals())
    crowd.enter(Stub(closed))
    await crowd.room()
    assert len(closed) == 1


@attrs.frozen(eq=False)
class OnItsWay:
    client: Stub


async def test_a_reader_is_closed_only_if_it_is_slow_and_its_room_is_enough(autojump_clock):
    del autojump_clock
    closed = []
    counts = Refusals()
    crowd = Connections(10, counts)
    answers = LongAnswers(100, crowd)
    slow, fast, newcomer, late = (OnItsWay(Stub(closed)) for _ in range(4))
    for answer in (slow, fast):
        assert answers.take(answer, 50)
        crowd.move(answer.client, Phase.SENDING)
    assert not answers.take(newcomer, 1)
    await trio.sleep(STANDARD.young_connection_s)
    crowd.move(fast.client, Phase.SENDING)
    for length in (51, 101):
        assert not answers.take(newcomer, length)
    assert (closed, counts.counts) == ([], {})
    assert answers.take(newcomer, 50)
    assert not answers.take(late, 1)
    assert (closed, counts.counts, answers.held) == ([slow.client], {Refusal.SLOW_READER: 1}, 100)


def test_connections_leave_a_quarter_of_the_files_for_everything_else():
    with files_up_to(1024):
        assert (most_connections(500), most_connections(5_000)) == (500, 768)
    assert most_connections(5_000, resource.RLIM_INFINITY) == 5_000


@pytest.mark.slow
@pytest.mark.parametrize("head", [b"", b"GET /health HTTP/1.1\r\nX-Slow: "], ids=["nothing", "a part"])
async def test_a_header_that_does_not_come_ends_its_connection(open_web, head):
    async with open_web(limits=HttpLimits(header_s=0.3)) as web:
        with trio.fail_after(patience_s()):
            async with await connect(web) as stream:
                await stream.send_all(head)
                assert await rest(stream) == b""
            assert await refused(web, Refusal.LATE_HEADER) == 1


@pytest.mark.slow
async def test_the_header_after_an_answer_has_its_time_from_its_first_byte(open_web):
    async with open_web(limits=HttpLimits(header_s=2)) as web:
        with trio.fail_after(patience_s()):
            async with await connect(web) as stream:
                await stream.send_all(HEALTH)
                await answered(stream)
                await stream.send_all(HEALTH[:10])
                assert await rest(stream) == b""
            assert await refused(web, Refusal.LATE_HEADER) == 1


@pytest.mark.slow
async def test_an_idle_connection_is_closed_after_its_time_without_being_counted(open_web):
    async with open_web(limits=HttpLimits(idle_s=0.3)) as web:
        with trio.fail_after(patience_s()):
            async with await connect(web) as stream:
                await stream.send_all(HEALTH)
                await answered(stream)
                assert await rest(stream) == b""
        assert web.services.refusals.counts == {}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "reset", "stays"])
async def test_a_client_that_stops_reading_is_closed_even_if_its_next_request_is_there(open_web, how):
    limits = HttpLimits(taken_s=0.1) if how == "stays" else STANDARD
    async with open_web(limits=limits) as web:
        ask = await a_long_answer(web)
        await web.client.aclose()
        with trio.fail_after(60):
            for requests in (1, 3):
                async with await a_slow_reader(web) as stream:
                    await stream.send_all(ask * requests)
                    if how == "stays":
                        await none_left(web)
                    else:
                        await in_phase(web, Phase.SENDING, 1)
                    if how == "reset":
                        stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, RESET)
                await none_left(web)
                assert web.services.sending.held == 0
        assert web.services.refusals.counts == ({Refusal.SLOW_READER: 2} if how == "stays" else {})


@pytest.mark.slow
async def test_slow_readers_make_room_for_the_answers_of_others_and_the_slowest_goes_first(open_web):
    async with open_web(limits=HttpLimits(young_connection_s=0, sent_bytes=2_000_000)) as web:
        ask = await a_long_answer(web)
        with trio.fail_after(patience_s()):
            async with await a_slow_reader(web) as slowest, await a_slow_reader(web) as slow:
                await slowest.send_all(ask)
                await in_phase(web, Phase.SENDING, 1)
                [first] = web.services.connections.who_may_go(Phase.SENDING)
                await trio.sleep(0.5)  # until the kernel's buffers are full
                await slow.send_all(ask)
                await in_phase(web, Phase.SENDING, 2)
                # It reads pieces, so that the other one has waited longest.
                taken = 0
                while taken < 200_000 or next(web.services.connections.who_may_go(Phase.SENDING)) is not first:
                    taken += len(await slow.receive_some(65_536))
                async with await connect(web) as honest:
                    await honest.send_all(ask.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
                    head, _, body = (await rest(honest)).partition(b"\r\n\r\n")
                    assert (head[9:12], len(body) > 900_000) == (b"200", True)
                assert web.services.refusals.counts == {Refusal.SLOW_READER: 1}
                assert len(await rest(slowest)) < 900_000
                while taken < 900_000:
                    taken += len(await slow.receive_some(65_536))


async def test_a_process_without_files_says_so_once_and_lets_idle_connections_go(open_web):
    limits = HttpLimits(young_connection_s=0)
    async with open_web(limits=limits) as web, filled(web, 1, HEALTH) as [idle]:
        with capture_logs() as lines, trio.fail_after(patience_s()), trio.socket.socket() as client:
            with no_file_left():
                await client.connect(web.sock.getsockname())
                stream = trio.SocketStream(client)
                # The server uses the descriptor of the idle connection.
                await stream.send_all(HEALTH)
                assert b" 200 " in await answered(stream)
            assert await rest(idle) == b""
        [line] = [line for line in lines if line["log_level"] == "warning"]
        assert line["event"] == "the HTTP server reached a limit and refused clients"
        assert (line["no_file_for_connection"], "exc_info" in line) == (1, False)


async def test_refusals_make_a_line_a_minute_and_are_counted_in_the_metrics(autojump_clock):
    del autojump_clock
    counts = Refusals()
    with capture_logs() as lines:
        for _ in range(1_000):
            counts.count(Refusal.GAVE_WAY)
        await trio.sleep(refusals.QUIET_S)
        counts.count(Refusal.WAITS)
    assert [{name: line[name] for name in line if name in {*Refusal}} for line in lines] == [
        {"connection_gave_way": 1},
        {"connection_gave_way": 999, "too_many_waits": 1},
    ]
    assert counts.measure().counts[Refusal.GAVE_WAY,] == 1_000


HIDDEN = b"DELETE /hidden HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\nConnection: keep-alive\r\n",
    ],
)
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_request_with_two_ends_is_refused_and_what_follows_it_does_not_run(open_web, headers, version):
    """RFC 9112, 6.1: a proxy may use one of the two ends, and we would use the other."""
    async with open_web() as web:
        with capture_logs() as lines, trio.fail_after(patience_s()):
            async with await connect(web) as stream:
                await stream.send_all(
                    b"POST /api/v1/jobs/trigger HTTP/%s\r\nHost: localhost\r\n%s\r\n0\r\n\r\n%s"
                    % (version, headers, HIDDEN)
                )
                received = await rest(stream)
        assert re.findall(rb"HTTP/1\.1 (\d+)", received) == [b"400"]
        assert [line for line in lines if line["event"] == "request"] == []
        assert web.services.refusals.counts[Refusal.BAD_FRAMING] == 1


UPLOAD = b"POST /api/v1/jobs/trigger HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
UNREADABLE = {
    b"nonsense\r\n\r\n": 400,
    b"GET /health HTTP/1.1\r\n\r\n": 400,
    b"GET /health HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
    b"HEAD /health HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
    UPLOAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n": 400,
    HEALTH[:-2] + b"a:\r\n" * 100 + b"\r\n": 431,
    HEALTH[:-2] + b"a:\r\n" * 15_000 + b"\r\n": 431,
    HEALTH[:-2] + b"a: " + b"b" * 16_384 + b"\r\n\r\n": 431,
    HEALTH[:-2] + b"a: " + b"b" * 500_000: 431,
    UPLOAD + b"Transfer-Encoding: gzip\r\n\r\n": 501,
}


@pytest.mark.slow
async def test_an_unreadable_request_is_answered_with_a_problem(open_web):
    async with open_web(limits=HttpLimits(close_s=20)) as web:
        with capture_logs() as lines, trio.fail_after(patience_s()):
            for sent, status in UNREADABLE.items():
                head, body = await all_of(web, sent)
                assert head.startswith(b"HTTP/1.1 %d " % status), (sent[:50], head)
                headers = dict(line.split(b": ", 1) for line in head.lower().split(b"\r\n")[1:])
                assert headers[b"content-type"] == b"application/problem+json"
                assert (headers[b"connection"], headers[b"x-content-type-options"]) == (b"close", b"nosniff")
                if sent.startswith(b"HEAD"):
                    assert body == b""
                    continue
                problem = json.loads(body)
                assert (problem["status"], problem["request_id"].encode()) == (status, headers[b"x-request-id"])
            assert (await all_of(web, HEALTH[:-2] + b"a:\r\n" * 98 + b"Connection: close\r\n\r\n"))[
                1
            ] == b'{"status":"ok"}'
        assert [line for line in lines if line["log_level"] in {"error", "critical"}] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (UPLOAD.replace(b"application/json", b"text/plain") + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}", 415),
        (
            UPLOAD + b"Connection: close\r\nContent-Length: 40\r\n\r\n" + b'{"queue":"q","task":"t","lock_key":"kk"}',
            201,
        ),
        (HEALTH[:-2] + b"Content-Length: 2\r\n\r\n{}", 413),
        (UPLOAD + b"Content-Length: 2000000\r\n\r\n" + b"x" * 2_000_000, 413),
        (UPLOAD + b"Transfer-Encoding: chunked\r\n\r\n200000\r\n" + b"x" * 0x200000 + b"\r\nzz\r\n", 413),
    ],
    ids=["the client's close", "its close behind work", "our close", "unread", "broken at its end"],
)
async def test_an_answer_reaches_a_client_that_sends_too_much_and_reads_afterwards(open_web, sent, status):
    async with open_web(limits=HttpLimits(close_s=20)) as web:
        with trio.fail_after(patience_s()):
            for _ in range(5):
                head, _ = await all_of(web, sent + HEALTH * 20)
                assert head[9:12] == b"%d" % status, head
            await none_left(web)


async def test_a_client_that_goes_on_sending_after_a_refusal_has_a_moment_for_it(open_web):
    async with open_web(limits=HttpLimits(close_s=0.1)) as web:
        with trio.fail_after(patience_s()):
            async with await connect(web) as stream:
                with contextlib.suppress(trio.BrokenResourceError):
                    while True:
                        await stream.send_all(b"nonsense\r\n\r\n")


async def test_a_body_that_is_refused_by_its_length_is_not_asked_for(open_web):
    async with open_web() as web:
        ask = UPLOAD + b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        with trio.fail_after(patience_s()):
            head, _ = await all_of(web, ask % 2_000_000)
            assert head[9:12] == b"413"
            for path in (b"/api/v1/jobs/trigger", b"/nowhere"):
                async with await connect(web) as stream:
                    await stream.send_all(ask.replace(b"/api/v1/jobs/trigger", path) % 2)
                    first = await stream.receive_some(65_536)
                    await stream.send_all(b"{}")
                    assert (first + await rest(stream)).count(b" 100 ") == (path != b"/nowhere")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reset", "closed"])
async def test_uploads_that_are_cut_off_are_counted_and_nothing_else(open_web, how):
    async with open_web() as web:
        with capture_logs() as lines, trio.fail_after(60):
            for length in range(0, 750, 10):
                stream = await connect(web)
                await stream.send_all(TRIGGER.replace(b" 70\r", b" 90000\r") + b"x" * length * 100)
                if how == "reset":
                    stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_LINGER, RESET)
                    stream.socket.close()
                else:
                    await stream.aclose()
            await refused(web, Refusal.CUT_BODY, 60)
        assert [line for line in lines if line["log_level"] in {"error", "critical"}] == []


def upload_and_leave(address, chance):
    """Send a part of a body, or an invalid or too long one, and end the connection in a random way."""
    announced = chance.choice([100, 5_000, 70_000, 900_000, 1_200_000, 3_000_000])
    chunked = chance.random() < 0.5
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {announced}"
    path = chance.choice(["/api/v1/jobs/trigger", "/api/v1/jobs/trigger/batch", "/health", "/nowhere"])
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=5) as sock:
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n".encode()
        )
        left = chance.randint(0, announced)
        while left:
            piece = b"x" * min(65_536, left)
            sock.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if chunked else piece)
            left -= len(piece)
        if chunked and chance.random() < 0.3:
            sock.sendall(b"zz\r\n")
        if chance.random() < 0.3:
            sock.shutdown(socket.SHUT_WR)
        if chance.random() < 0.6:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


@pytest.mark.slow
async def test_uploads_that_end_at_any_moment_leave_no_traceback_and_no_connection(open_web):
    """An answer may be in transit when the connection is closed, which is not an error of ours."""
    async with open_web() as web:
        host, port = web.url.removeprefix("http://").split(":")
        with capture_logs() as lines, trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for seed in range(225):
                    chance = random.Random(seed)
                    nursery.start_soon(trio.to_thread.run_sync, upload_and_leave, (host, int(port)), chance)
            await none_left(web)
        assert [line for line in lines if line["log_level"] in {"error", "critical"}] == []
        assert (web.services.receiving.held, web.services.sending.held, web.services.at_work.held) == (0, 0, 0)


def test_the_private_parts_of_the_web_server_that_we_use_exist():
    """Hypercorn's are used in http1.py, quart-trio's and Quart's in asgi.py; a new version may move them."""
    protocol = hypercorn.protocol.h11.H11Protocol
    for name in ("_check_protocol", "_create_stream", "_send_error_response"):
        assert inspect.iscoroutinefunction(getattr(protocol, name)), name
    source = inspect.getsource(protocol)
    assert "self.stream is None:\n                    break" in source, "after a refused header nothing is read"
    assert "self.send(Updated(idle=False))" in source
    assert "self.send(Updated(idle=True))" in source
    assert "self.task_group.spawn_app(" in inspect.getsource(HTTPStream)
    parser = h11.Connection(h11.SERVER)
    assert (parser.their_state, parser.client_is_waiting_for_100_continue) == (h11.IDLE, False)
    assert "self.connection.they_are_waiting_for_100_continue" in source
    for name in ("__call__", "handle_messages", "handle_request", "_create_request_from_scope", "_send_response"):
        assert hasattr(TrioASGIHTTPConnection, name), name
    assert "request.body.append(" in inspect.getsource(TrioASGIHTTPConnection.__mro__[1])
    for name in ("append", "set_complete"):
        assert (
            inspect.signature(getattr(QuartBody, name)).parameters.keys()
            == inspect.signature(getattr(Body, name)).parameters.keys()
        )
