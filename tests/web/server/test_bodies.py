"""Bodies and answers: the limit of the route while they arrive, and a limit for all of them together (Q5)."""

from __future__ import annotations

import json
import time

import pytest
import trio
import trio.testing
from conditions import patience_s, until
from databases import raw_connection
from turns import all_taken, waiting_for

from dataloader.web.problems import ProblemError
from dataloader.web.server.bodies import NOT_COUNTED, Body, LongBodies
from dataloader.web.server.limits import STANDARD, HttpLimits
from dataloader.web.server.refusals import Refusal, Refusals

pytestmark = pytest.mark.requirement("Q5")

JSON = {"Content-Type": "application/json"}
BODY = {"queue": "q", "task": "t", "lock_key": "k"}
TRIGGER = "/api/v1/jobs/trigger"
KIB = 1 << 10


BLOCKED = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'dl_jobs'::regclass"


async def chunk_by_chunk(web, path, *, method=b"POST", chunk=b" " * 4 * KIB, look=lambda: None):
    """Send chunks until the server ends the connection; return the number of accepted bytes, and its answer.

    `look` is called after each chunk.
    """
    host, port = web.url.removeprefix("http://").split(":")
    sent, received = 0, b""
    with trio.fail_after(patience_s()):
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
                            # So that it receives the answer before it has sent megabytes.
                            await trio.sleep(0.002)
                            look()
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


@pytest.mark.slow
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
async def test_a_body_over_the_limit_of_its_route_is_refused_while_it_comes(open_web, method, path, limit):
    async with open_web(max_body_bytes=200 * KIB, max_batch_body_bytes=400 * KIB) as web:
        held = []
        sent, received = await chunk_by_chunk(
            web, path, method=method, look=lambda: held.append(web.services.receiving.held)
        )
        assert b" 413 " in received
        most = max(held, default=0)
        assert most <= max(0, limit - NOT_COUNTED)
        assert (most > 0) == (limit > 0)
        assert sent < limit + 3_000 * KIB
        assert web.services.refusals.counts[Refusal.LONG_BODY] == 1
        assert (web.services.receiving.held, web.services.at_work.held) == (0, 0)


@pytest.mark.slow
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
        with trio.fail_after(patience_s()):
            assert web.services.receiving.take(100 * KIB)
            _, received = await chunk_by_chunk(web, TRIGGER)
            assert b" 503 " in received
            assert b"retry-after: 5" in received
            assert web.services.refusals.counts[Refusal.BODIES] == 1
            await web.trigger()
            web.services.receiving.give(100 * KIB)
            await web.trigger(args={"text": "x" * 80 * KIB})
            assert web.services.receiving.held == 0


async def test_the_memory_of_a_body_is_released_at_any_end():
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
    one.append(b"x" * STANDARD.body_before_route_bytes)  # it is answered, and the rest still arrives
    assert (held.held, counts.counts) == (0, {Refusal.BODIES: 1})


async def test_a_slow_unfinished_body_gives_way_to_others_and_a_complete_one_does_not(autojump_clock):
    del autojump_clock
    counts, held = Refusals(), LongBodies(100 * KIB)
    complete, slow, young, other = (Body(None, held, counts) for _ in range(4))
    for body, length in ((complete, 30), (slow, 50), (young, 60)):
        body.append(b"x" * (length * KIB))
        await trio.sleep(STANDARD.young_body_s / 2)
    complete.set_complete()
    assert counts.counts == {}
    # The oldest is not awaited any more, the next is ended, the youngest has just begun.
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
    await trio.sleep(STANDARD.young_body_s)
    alone.append(b"x" * (60 * KIB))
    assert held.held == 0


@pytest.mark.slow
async def test_a_body_that_does_not_come_in_time_is_refused(open_web):
    async with open_web(limits=HttpLimits(body_s=0.3)) as web:
        host, port = web.url.removeprefix("http://").split(":")
        with trio.fail_after(patience_s()):
            async with await trio.open_tcp_stream(host, int(port)) as stream:
                await stream.send_all(
                    b"POST /api/v1/jobs/trigger HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 70\r\n\r\n{"
                )
                received = b"".join([part async for part in stream])
        assert b" 408 " in received
        assert web.services.refusals.counts[Refusal.LATE_BODY] == 1


@pytest.mark.slow
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
        # One scan takes some milliseconds; one from each quote would block the whole process for many seconds.
        assert time.process_time() - began < 2


@pytest.mark.slow
@pytest.mark.parametrize(("priority", "status"), [(1, 201), (-1, 422)], ids=["good", "bad"])
async def test_a_long_batch_is_decoded_in_a_thread_and_a_short_one_inline(open_web, priority, status):
    async with open_web() as web:
        threads, statuses = web.services.turns.decoding, []

        async def post(number):
            jobs = [BODY | {"priority": priority}] * number
            statuses.append((number, (await web.client.post(f"{TRIGGER}/batch", json={"jobs": jobs})).status_code))

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery, all_taken(threads):
                nursery.start_soon(post, 1_000)
                await until(lambda: waiting_for(threads), lambda number: number == 1)
                await post(10)
                assert statuses == [(10, status)]
        assert statuses == [(10, status), (1_000, status)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "stored", "waiting"),
    [(100, (0, 0), (0, 0)), (100 * KIB, (2, 0), (6, 0)), (1_100 * KIB, (0, 1), (0, 7))],
)
async def test_long_requests_are_stored_two_at_a_time_and_the_longest_one_by_one(
    open_web, database, length, stored, waiting
):
    async with open_web() as web, raw_connection(database.dsn) as raw:
        turns = web.services.turns.long_bodies, web.services.turns.longest_bodies
        batch = {"jobs": [BODY | {"args": {"text": "x" * length}}]}

        async def post():
            assert (await web.client.post(f"{TRIGGER}/batch", json=batch)).status_code == 201

        async def arrived():
            waits = sum([await waiting_for(turn) for turn in turns])
            return web.services.at_work.held, await raw.fetchval(BLOCKED) > 0, waits

        with trio.fail_after(60):
            async with trio.open_nursery() as nursery:
                # The server's statement timeout is longer than all of them take to arrive.
                await raw.execute("BEGIN; LOCK TABLE dl_jobs")
                for _ in range(8):
                    nursery.start_soon(post)
                await until(arrived, lambda seen: seen == (8, True, sum(waiting)))
                assert tuple(turn.borrowed_tokens for turn in turns) == stored
                assert tuple([await waiting_for(turn) for turn in turns]) == waiting
                await raw.execute("COMMIT")
        assert database.psql("SELECT count(*) FROM dl_jobs") == "8"


class Others:
    client = None


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.requirement("Q3")
async def test_a_bounded_number_of_readers_waits(open_web):
    async with open_web(max_waits=2) as web:
        job_id = await web.trigger()
        address = f"/api/v1/jobs/{job_id}/status?wait=60"
        answers = []

        async def wait():
            answers.append(await web.client.get(address, timeout=60))

        with trio.fail_after(patience_s()):
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
                web.services.performer.waits.all_changed()
        assert [answer.json()["status"] for answer in answers] == ["canceled"] * 2
        assert web.services.refusals.counts[Refusal.WAITS] == 1
        assert await waiting() == 0


@pytest.mark.slow
@pytest.mark.requirement("Q15")
async def test_waiting_readers_are_answered_when_a_drain_begins_and_later_ones_soon(open_web):
    async with open_web(limits=HttpLimits(late_wait_s=0.05)) as web:
        job_id = await web.trigger()
        address = f"/api/v1/jobs/{job_id}/status?wait=60"
        answers = []

        async def wait():
            answers.append(await web.client.get(address, timeout=60))

        async def waiting():
            return len(web.services.waiting._readers)

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(wait)
                await until(waiting, lambda number: number == 20)
                web.services.waiting.answer_all()
            assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "queued")] * 20
            assert (await web.client.get(address, timeout=60)).json()["status"] == "queued"
