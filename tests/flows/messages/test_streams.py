"""Streams of a real Valkey as a source of jobs (S7): nothing is lost, nothing is added twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trio
from conditions import until
from coredis import Redis
from valkey_server import a_valkey

from dataloader import Settings, Tasks, Worker, new_job, open_supervisor
from dataloader.flows.messages import Messages
from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.enqueuer import Enqueuer

pytestmark = pytest.mark.requirement("S7")

NO_QUEUE = 7
JOBS = "SELECT idempotency_key, args ->> 'n' AS n FROM dl_jobs ORDER BY (args ->> 'n')::int"


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    with a_valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture
async def redis(valkey):
    async with Redis.from_url(valkey) as client:
        await client.flushall()
        yield client


def job_of(message):
    number = message.json("n")
    if number < 0:
        raise ValueError(f"not {number}")
    if number == NO_QUEUE:
        return new_job("order", {"n": number})
    return new_job("order", {"n": number}, queue="q") if number else None


def source(url, **options):
    return Messages(url, "orders", job_of, **{"group": "g", "again_after_s": 0.2} | options)


@pytest.fixture
async def store(database):
    async with open_database(DatabaseOptions(dsn=database.dsn)) as store:
        yield store


@pytest.fixture
def reading(database):
    """Return a context with a supervisor that reads a source; it runs no jobs."""

    @asynccontextmanager
    async def reading(declared, dsn=None):
        tasks = Tasks()
        tasks.messages(declared)
        settings = Settings(db_dsn=dsn or database.dsn, workers=(Worker("none", 1),), port=0, drain_timeout_s=10)
        async with open_supervisor(settings, tasks, with_web=False) as supervisor:
            yield supervisor

    return reading


async def pending(redis, stream="orders"):
    return (await redis.xpending(stream, "g")).pending


async def add(redis, *numbers):
    return [await redis.xadd("orders", {"n": str(number)}) for number in numbers]


@pytest.mark.slow
async def test_each_message_becomes_one_job_and_is_acknowledged(redis, valkey, reading, raw):
    ids = await add(redis, 1, 0, 2)  # 0 makes no job
    async with reading(source(valkey)) as supervisor:
        await until(lambda: raw.fetch(JOBS), lambda rows: len(rows) == 2)
        ids += await add(redis, 3)
        await until(lambda: raw.fetch(JOBS), lambda rows: len(rows) == 3)
        await until(lambda: pending(redis), lambda number: number == 0)
        [state] = supervisor.state.messages
        assert (state.source, state.connected, state.error) == ("orders:g", True, None)
        assert (state.enqueued, state.failed, state.dead) == (3, 0, 0)
    keys = [f"message:orders:g:{ids[n].decode()}" for n in (0, 2, 3)]
    assert [tuple(row) for row in await raw.fetch(JOBS)] == [(key, str(n)) for n, key in enumerate(keys, 1)]
    assert await redis.xinfo_consumers("orders", "g") == ()  # a draining process leaves the group


async def test_a_poisonous_message_becomes_a_dead_letter_and_delays_no_other(redis, valkey, reading, raw):
    poison, _, refused = await add(redis, -1, 1, NO_QUEUE)
    broken = await redis.xadd("orders", {"n": b"\xff", "other": b"\xfe"})
    async with reading(source(valkey, most_tries=3, again_after_s=0.05)):
        await until(lambda: raw.fetch(JOBS), lambda rows: len(rows) == 1)
        await until(lambda: redis.xlen("orders:dead"), lambda number: number == 3)
        await until(lambda: pending(redis), lambda number: number == 0)
    letters = {entry.field_values[b"dl_message_id"]: entry.field_values for entry in await redis.xrange("orders:dead")}
    assert letters.keys() == {poison, refused, broken}
    assert letters[poison] == {
        b"n": b"-1", b"dl_stream": b"orders", b"dl_message_id": poison, b"dl_tries": b"3",
        b"dl_error": b"ValueError: not -1",
    }  # fmt: skip
    assert letters[refused][b"dl_error"].startswith(b"queue: is required")
    assert letters[broken][b"other"] == b"\xfe"
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 1


async def test_a_draining_process_leaves_a_message_due_for_retry_to_the_others(redis, valkey, reading, raw):
    await add(redis, -1)
    async with reading(source(valkey, again_after_s=600)) as supervisor:

        async def failed():
            return supervisor.state.messages[0].failed

        await until(failed)
    assert await pending(redis) == 1


async def test_messages_of_a_dead_consumer_are_taken_over_unless_they_kill_each_reader(redis, valkey, reading, raw):
    await redis.xgroup_create("orders", "g", identifier="0", mkstream=True)
    ids = await add(redis, 1, 2)
    await redis.xreadgroup("g", "dead reader", {"orders": ">"})
    for _ in range(5):
        await redis.xclaim("orders", "g", "dead reader", 0, [ids[1]])
    async with reading(source(valkey)) as supervisor:
        await until(lambda: raw.fetch(JOBS), lambda rows: len(rows) == 1)
        await until(lambda: pending(redis), lambda number: number == 0)
        await until(lambda: redis.xlen("orders:dead"), lambda number: number == 1)
        assert supervisor.state.messages[0].dead == 1
    [letter] = await redis.xrange("orders:dead")
    assert letter.field_values[b"dl_message_id"] == ids[1]
    assert b"each time, its reader ended" in letter.field_values[b"dl_error"]


KILLED = """
import os, signal, sys
import trio
from coredis import Redis
sys.path[:0] = {path!r}
from test_streams import source
from dataloader import Settings, Tasks, Worker, open_supervisor

def kill(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

Redis.xack = kill
tasks = Tasks()
tasks.messages(source({url!r}))

async def main():
    settings = Settings(db_dsn={dsn!r}, workers=(Worker("none", 1),), port=0)
    async with open_supervisor(settings, tasks, with_web=False):
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.slow
async def test_a_kill_between_commit_and_acknowledgement_loses_and_repeats_nothing(
    redis, valkey, reading, raw, database
):
    await add(redis, 1, 2, 3)
    here = Path(__file__)
    code = KILLED.format(path=[str(here.parent), str(here.parents[2] / "shared")], url=valkey, dsn=database.dsn)
    died = await trio.run_process([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL)
    assert died.returncode == -signal.SIGKILL
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 3
    assert await pending(redis) == 3
    async with reading(source(valkey)):
        await until(lambda: pending(redis), lambda number: number == 0)
        await add(redis, 4)
        await until(lambda: raw.fetch(JOBS), lambda rows: len(rows) == 4)
        await until(lambda: pending(redis), lambda number: number == 0)
    assert [row["n"] for row in await raw.fetch(JOBS)] == ["1", "2", "3", "4"]


@pytest.mark.slow
async def test_a_missing_stream_server_is_reported_and_read_again_when_it_is_back(reading, raw, tmp_path):
    with a_valkey(tmp_path) as url:
        port = urlsplit(url).port
        async with Redis.from_url(url) as client:
            await client.xadd("orders", {"n": "1"})
            async with reading(source(url)):
                await until(lambda: raw.fetch(JOBS), lambda rows: len(rows) == 1)
                await client.xadd("orders", {"n": "2"})
                await until(lambda: raw.fetch(JOBS), lambda rows: len(rows) == 2)
    async with reading(source(url)) as supervisor:

        async def state():
            return supervisor.state.messages[0]

        told = await until(state, lambda now: now.error is not None)
        assert not told.connected
        assert f"127.0.0.1:{port}" in told.error
        with a_valkey(tmp_path, port) as again:
            async with Redis.from_url(again) as client:
                await client.xadd("orders", {"n": "3"})
                await until(lambda: raw.fetch(JOBS), lambda rows: len(rows) == 3)
            assert (await until(state, lambda now: now.connected)).error is None


@pytest.mark.slow
async def test_messages_wait_for_a_database_that_is_away_and_take_no_further_ones(redis, valkey, store, raw):
    await add(redis, *range(1, 6))
    asked, away, enqueuer = [], True, Enqueuer(store)

    async def enqueue(jobs):
        asked.append(len(jobs))
        if away:
            raise StoreUnavailable("gone")
        return await enqueuer.enqueue(jobs)

    reader = source(valkey, batch=2).reader(enqueue=enqueue, consumer="c", draining=lambda: False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)

        async def tries():
            return len(asked)

        await until(tries, lambda number: number >= 3)
        assert set(asked) == {2}
        assert (reader.state.error, reader.state.failed, await pending(redis)) == ("gone", 0, 2)
        away = False
        await until(lambda: raw.fetch(JOBS), lambda rows: len(rows) == 5)
        await until(lambda: pending(redis), lambda number: number == 0)
        assert (reader.state.error, reader.state.dead) == (None, 0)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"url": "http://localhost"}, "url: must begin with redis:// or rediss://, not 'http'"),
        ({"url": 5}, "url: must begin with redis:// or rediss://, not 'int'"),
        ({"stream": ""}, "stream: must have 1 to 200 characters, not 0"),
        ({"group": "a\nb"}, "group: must be on one line"),
        ({"most_tries": 0}, "most_tries: must be an integer from 1 to 1,000, not 0"),
        ({"again_after_s": "1"}, "again_after_s: must be a number from 0.01 to 86,400, not '1'"),
        ({"batch": 1_001}, "batch: must be an integer from 1 to 1,000, not 1001"),
    ],
)
def test_invalid_options_of_a_source_are_refused_at_the_declaration(given, error):
    with pytest.raises(ValueError, match=error.replace("(", r"\(")):
        Messages(**{"url": "redis://localhost", "stream": "s", "request": job_of} | given)


def test_two_sources_of_one_name_are_refused():
    tasks, other = Tasks(), Tasks()
    tasks.messages(source("redis://a"))
    other.messages(source("redis://b"))
    with pytest.raises(ValueError, match="the source 'orders:g' is already declared"):
        tasks.include(other)
