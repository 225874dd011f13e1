"""Bodies and answers: the limit of the route while they come, and a bound for all of them together (Q5)."""

from __future__ import annotations

import json
import threading
import time

import pytest
import trio
import trio.testing
from conditions import until

from dataloader.web import decoding
from dataloader.web import waiting as waiting_room
from dataloader.web.problems import ProblemError
from dataloader.web.server import bodies
from dataloader.web.server.bodies import BEFORE_ITS_ROUTE, NOT_COUNTED, Body, LongBodies
from dataloader.web.server.refusals import Refusal, Refusals

pytestmark = pytest.mark.requirement("Q5")

JSON = {"Content-Type": "application/json"}
BODY = {"queue": "q", "task": "t", "lock_key": "k"}
TRIGGER = "/api/v1/jobs/trigger"
KIB = 1 << 10


async def chunk_by_chunk(web, path, *, method=b"POST", chunk=b" " * 4 * KIB):
    """Send chunks until the server ends the connection: how many bytes it took, and what it said."""
    host, port = web.url.removeprefix("http://").split(":")
    sent, received = 0, b""
    with trio.fail_after(30):
        async with await trio.open_tcp_stream(host, int(port)) as stream:
            head = b"%s %s HTTP/1.1\r\nHost: localhost\r\n" % (method, path.encode())
            await stream.send_all(head + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
            async with trio.open_nursery() as nursery:

                async def send():
                    nonlocal sent
                    try:
                        while True:
                            await stream.send_all(b"%x\r\n%s\r\n" % (len(chunk), chunk))
                            sent += len(chunk)
                            # So that it is told before it has sent megabytes.
                            await trio.sleep(0.002)
                    except (trio.BrokenResourceError, trio.ClosedResourceError):
                        pass

                nursery.start_soon(send)
                try:
                    async for part in stream:
                        received += part
                except trio.BrokenResourceError:
                    pass
                nursery.cancel_scope.cancel()
    return sent, received


@pytest.mark.parametrize(
    ("method", "path", "limit"),
    [
        (b"POST", TRIGGER, 200 * KIB),
        (b"POST", f"{TRIGGER}/batch", 400 * KIB),
        (b"GET", "/health", 0),
        (b"GET", "/api/v1/jobs/00000000-0000-7000-8000-000000000000/status?wait=60", 0),
        (b"POST", "/api/v1/jobs/00000000-0000-7000-8000-000000000000/cancel", 0),
    ],
)
async def test_a_body_over_the_limit_of_its_route_is_refused_while_it_comes(open_web, monkeypatch, method, path, limit):
    most, append = 0, Body.append

    def appending(self, data):
        nonlocal most
        append(self, data)
        most = max(most, len(self._data))

    monkeypatch.setattr(Body, "append", appending)
    async with open_web(max_body_bytes=200 * KIB, max_batch_body_bytes=400 * KIB) as web:
        sent, received = await chunk_by_chunk(web, path, method=method)
        assert b" 413 " in received
        assert most <= limit
        assert sent < limit + 3_000 * KIB
        assert web.services.refusals.counts[Refusal.LONG_BODY] == 1
        assert (web.services.receiving.held, web.services.at_work.held) == (0, 0)


async def test_an_empty_body_is_none_however_it_is_sent(open_web):
    async with open_web() as web:
        job_id = await web.trigger()

        async def nothing():
            for _ in range(0):
                yield b""

        for content in (b"", nothing()):
            answer = await web.client.post(f"/api/v1/jobs/{job_id}/cancel", content=content)
            assert answer.status_code == 200
        announced = await web.client.request("GET", "/health", content=b"{}")
        assert (announced.status_code, announced.headers["Connection"]) == (413, "close")


async def test_long_bodies_are_bounded_together_and_short_ones_are_let_in_all_the_same(open_web):
    async with open_web() as web:
        web.services.receiving.most = 100 * KIB
        with trio.fail_after(20):
            assert web.services.receiving.take(100 * KIB)
            _, received = await chunk_by_chunk(web, TRIGGER)
            assert b" 503 " in received
            assert b"retry-after: 5" in received
            assert web.services.refusals.counts[Refusal.BODIES] == 1
            await web.trigger()
            web.services.receiving.give(100 * KIB)
            await web.trigger(args={"text": "x" * 80 * KIB})
            assert web.services.receiving.held == 0


async def test_what_a_body_holds_is_given_back_however_it_ends():
    counts = Refusals()
    held = LongBodies(100 * KIB)
    one, other = Body(None, held, counts), Body(None, held, counts)
    one.append(b"x" * (60 * KIB))
    assert held.held == 60 * KIB - NOT_COUNTED
    other.append(b"x" * (60 * KIB))
    other.append(b"x" * (60 * KIB))
    assert held.held == 60 * KIB - NOT_COUNTED
    other.set_complete()
    with pytest.raises(ProblemError) as caught:
        await other.read(200 * KIB)
    assert caught.value.status == 503
    one.set_complete()
    assert await one.read(60 * KIB) == b"x" * (60 * KIB)
    one.drop()
    other.drop()
    one.append(b"x" * BEFORE_ITS_ROUTE)  # it is answered, and its rest still comes
    assert (held.held, counts.counts) == (0, {Refusal.BODIES: 1})


async def test_a_body_that_has_been_coming_for_long_gives_way_to_others_and_one_that_has_come_does_not(autojump_clock):
    del autojump_clock
    counts, held = Refusals(), LongBodies(100 * KIB)
    complete, slow, young, other = (Body(None, held, counts) for _ in range(4))
    for body, length in ((complete, 30), (slow, 50), (young, 60)):
        body.append(b"x" * (length * KIB))
        await trio.sleep(bodies.YOUNG_S / 2)
    complete.set_complete()
    assert counts.counts == {}
    # The oldest is not awaited any more, the next has to go, the youngest has just begun.
    other.append(b"x" * (40 * KIB))
    assert (held.held, counts.counts) == ((30 + 60 + 40) * KIB - 3 * NOT_COUNTED, {Refusal.BODIES: 1})
    other.append(b"x" * (40 * KIB))
    for body in (slow, other):
        with pytest.raises(ProblemError) as caught:
            await body.read(100 * KIB)
        assert (caught.value.status, caught.value.kind) == (503, "too-busy")
    for body in (complete, young):
        body.set_complete()
        assert await body.read(100 * KIB)
        body.drop()
    alone = Body(None, held, counts)
    alone.append(b"x" * (60 * KIB))
    await trio.sleep(bodies.YOUNG_S)
    alone.append(b"x" * (60 * KIB))
    assert held.held == 0


async def test_a_body_that_does_not_come_in_time_is_refused(open_web, monkeypatch):
    monkeypatch.setattr(bodies, "BODY_S", 0.3)
    async with open_web() as web:
        host, port = web.url.removeprefix("http://").split(":")
        with trio.fail_after(20):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(
                    b"POST /api/v1/jobs/trigger HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 70\r\n\r\n{"
                )
                received = b"".join([part async for part in stream])
        assert b" 408 " in received
        assert web.services.refusals.counts[Refusal.LATE_BODY] == 1


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b'{"jobs":[' + b"[]," * 1_000_000 + b"[]]}", 413),
        (b'{"jobs":[' + b'{"a":1},' * 100_000 + b"{}]}", 413),
        (json.dumps({"jobs": [BODY | {"args": {"text": "[],{}," * 100_000}}]}).encode(), 201),
        (json.dumps({"jobs": [BODY | {"args": {"text": 'a "," \\ ' * 50_000}}]}).encode(), 201),
        (json.dumps({"jobs": [BODY | {"args": {"list": list(range(90_000))}}]}).encode(), 201),
    ],
    ids=["lists", "objects", "marks in a text", "quotes in a text", "numbers"],
)
async def test_a_body_with_too_many_values_is_refused_before_they_are_made(open_web, content, status):
    async with open_web() as web:
        answer = await web.client.post(f"{TRIGGER}/batch", content=content, headers=JSON)
        assert answer.status_code == status, answer.text
        assert web.services.refusals.counts[Refusal.VALUES] == (status == 413)


async def test_a_long_text_that_does_not_end_is_read_once_however_many_quotes_it_has(open_web):
    async with open_web() as web:
        began = time.process_time()
        content = b'{"jobs":[' + b"[]," * 60_000 + b'"' + rb"\"" * 20_000
        answer = await web.client.post(f"{TRIGGER}/batch", content=content, headers=JSON)
        assert answer.status_code == 413, answer.text
        # Once is some milliseconds; once from each quote holds up the whole process for many seconds.
        assert time.process_time() - began < 2


@pytest.mark.slow
@pytest.mark.parametrize("priority", [1, -1], ids=["good", "bad"])
async def test_a_long_batch_is_decoded_in_a_thread_and_a_short_one_at_once(open_web, monkeypatch, priority):
    threads, decode = [], decoding._decode

    def looking(data, kind):
        threads.append(threading.current_thread())
        return decode(data, kind)

    monkeypatch.setattr(decoding, "_decode", looking)
    async with open_web() as web:
        for number in (1_000, 10):
            jobs = [BODY | {"priority": priority}] * number
            answer = await web.client.post(f"{TRIGGER}/batch", json={"jobs": jobs})
            assert answer.status_code == (201 if priority == 1 else 422)
    assert [thread is threading.main_thread() for thread in threads] == [False, True]


@pytest.mark.slow
@pytest.mark.parametrize(("length", "most"), [(100, 8), (100 * KIB, 2), (1_100 * KIB, 1)])
async def test_long_requests_are_stored_two_at_a_time_and_the_longest_one_by_one(open_web, monkeypatch, length, most):
    async with open_web() as web:
        at_once, seen, enqueue = 0, [], web.services.jobs.enqueuer.enqueue

        async def counting(jobs):
            nonlocal at_once
            at_once += 1
            seen.append(at_once)
            try:
                # All who may are here now.
                await trio.testing.wait_all_tasks_blocked(0.05)
                return await enqueue(jobs)
            finally:
                at_once -= 1

        monkeypatch.setattr(web.services.jobs.enqueuer, "enqueue", counting)
        batch = {"jobs": [BODY | {"args": {"text": "x" * length}}]}

        async def post():
            assert (await web.client.post(f"{TRIGGER}/batch", json=batch)).status_code == 201

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                for _ in range(8):
                    nursery.start_soon(post)
        assert (len(seen), max(seen) <= most) == (8, True)


class Others:
    client = None


async def test_long_answers_are_bounded_together_and_short_ones_go_out_all_the_same(open_web):
    async with open_web() as web:
        short, long = await web.trigger(), await web.trigger(args={"text": "x" * 100 * KIB})
        others = Others()
        assert web.services.sending.take(others, web.services.sending.most - 50 * KIB)
        assert (await web.client.get(f"/api/v1/jobs/{short}")).status_code == 200
        refused = await web.client.get(f"/api/v1/jobs/{long}")
        assert (refused.status_code, refused.json()["type"], refused.headers["Retry-After"]) == (
            503,
            "/problems/too-busy",
            "5",
        )
        assert web.services.refusals.counts[Refusal.ANSWERS] == 1
        web.services.sending.give(others)
        assert (await web.client.get(f"/api/v1/jobs/{long}")).status_code == 200

        async def held():
            return web.services.sending.held

        await until(held, lambda held: held == 0)


@pytest.mark.requirement("Q3")
async def test_a_bounded_number_of_readers_waits(open_web):
    async with open_web(max_waits=2) as web:
        job_id = await web.trigger()
        address = f"/api/v1/jobs/{job_id}/status?wait=60"
        answers = []

        async def wait():
            answers.append(await web.client.get(address, timeout=60))

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    nursery.start_soon(wait)

                async def waiting():
                    return len(web.services.waiting._readers)

                await until(waiting, lambda number: number == 2)
                refused = await web.client.get(address)
                assert (refused.status_code, refused.json()["type"]) == (429, "/problems/too-many-waits")
                assert refused.headers["Retry-After"] == "5"
                assert (await web.client.get(f"/api/v1/jobs/{job_id}/status")).status_code == 200
                await web.client.post(f"/api/v1/jobs/{job_id}/cancel")
                web.services.jobs.waits.all_changed()
        assert [answer.json()["status"] for answer in answers] == ["canceled"] * 2
        assert web.services.refusals.counts[Refusal.WAITS] == 1
        assert await waiting() == 0


@pytest.mark.requirement("Q15")
async def test_readers_who_wait_are_answered_when_a_drain_begins_and_those_who_come_later_soon(open_web, monkeypatch):
    monkeypatch.setattr(waiting_room, "LATE_WAIT_S", 0.05)
    async with open_web() as web:
        job_id = await web.trigger()
        address = f"/api/v1/jobs/{job_id}/status?wait=60"
        answers = []

        async def wait():
            answers.append(await web.client.get(address, timeout=60))

        async def waiting():
            return len(web.services.waiting._readers)

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(wait)
                await until(waiting, lambda number: number == 20)
                web.services.waiting.answer_all()
            assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "queued")] * 20
            assert (await web.client.get(address, timeout=60)).json()["status"] == "queued"
