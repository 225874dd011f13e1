"""Queues of a real RabbitMQ as a source of jobs (S7): nothing is lost, and a message with an ID is not added twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import attrs
import pika
import pytest
import trio
from certificates import certificate
from conditions import until
from rabbitmq_server import a_rabbitmq

from dataloader import Settings, Supervisor, Tasks, Worker, new_job, open_supervisor
from dataloader.flows.messages import AmqpMessages
from dataloader.flows.messages.amqp_session import LEAVE_S, parameters_of
from dataloader.jobs.errors import ConfigError, StoreUnavailable
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.enqueuer import Enqueuer

pytestmark = [pytest.mark.full, pytest.mark.requirement("S7")]

NO_QUEUE = 7
JOBS = "SELECT idempotency_key, args ->> 'n' AS n FROM dl_jobs ORDER BY (args ->> 'n')::int"


@pytest.fixture(scope="module")
def rabbitmq(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rabbitmq")
    with a_rabbitmq(folder, certificate(folder)) as server:
        yield server


class Broker:
    """Operations of publishers and operators, each on a separate connection."""

    def __init__(self, url):
        self.url = url

    def _with_channel(self, ask):
        with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            return ask(channel)

    def declare(self, kind="quorum", queue="orders"):
        def ask(channel):
            for name in (queue, f"{queue}.dead"):
                channel.queue_delete(name)
            channel.queue_declare(queue, durable=True, arguments={"x-queue-type": kind})

        self._with_channel(ask)

    def publish(self, *bodies, queue="orders", prefix="id", **properties):
        """Publish numbers as JSON, with an ID that contains the number; or bytes.

        With `prefix=None` they have no ID.
        """

        def ask(channel):
            for body in bodies:
                message_id = None if prefix is None else f"{prefix}{body}"
                channel.basic_publish(
                    "", queue, body if isinstance(body, bytes) else str(body).encode(),
                    pika.BasicProperties(message_id=message_id, **properties), mandatory=True,
                )  # fmt: skip

        self._with_channel(ask)

    def publish_as(self, message_id, body):
        properties = pika.BasicProperties(message_id=message_id)
        self._with_channel(lambda channel: channel.basic_publish("", "orders", str(body).encode(), properties))

    def count(self, queue="orders"):
        """Return the number of messages in a queue that no reader holds."""
        return self._with_channel(lambda channel: channel.queue_declare(queue, passive=True).method.message_count)

    def take(self, queue="orders.dead", number=1):
        def ask(channel):
            found = []
            for _method, properties, body in channel.consume(queue, inactivity_timeout=10):
                found.append((properties, body))
                if len(found) == number:
                    return found
            raise AssertionError(found)

        return self._with_channel(ask)

    def die_with(self, number, times):
        """Read `number` messages and die, `times` times."""
        for _ in range(times):
            with pika.BlockingConnection(pika.URLParameters(self.url)) as connection:
                channel = connection.channel()
                for got, _delivery in enumerate(channel.consume("orders", inactivity_timeout=10), 1):
                    if got == number:
                        break


@pytest.fixture
def broker(rabbitmq):
    broker = Broker(rabbitmq.url)
    broker.declare()
    return broker


def job_of(message):
    number = message.json()
    if number < 0:
        raise ValueError(f"not {number}")
    if number == NO_QUEUE:
        return new_job("order", {"n": number})
    return new_job("order", {"n": number}, queue="q") if number else None


def source(url, **options):
    return AmqpMessages(url, "orders", job_of, **{"again_after_s": 0.1} | options)


@pytest.fixture
async def store(database):
    async with open_database(DatabaseOptions(dsn=database.dsn)) as store:
        yield store


@attrs.frozen
class Reading:
    """The only reader of messages of a supervisor."""

    supervisor: Supervisor

    @property
    def state(self):
        return self.supervisor.state.messages[0]


@pytest.fixture
def reading(database):
    """Return a context with a supervisor that reads a source; it runs no jobs."""

    @asynccontextmanager
    async def reading(declared):
        tasks = Tasks()
        tasks.messages(declared)
        settings = Settings(db_dsn=database.dsn, workers=(Worker("none", 1),), port=0, drain_timeout_s=10)
        async with open_supervisor(settings, tasks, with_web=False) as supervisor:
            yield Reading(supervisor)

    return reading


async def counted(broker, number, queue="orders"):
    await until(lambda: trio.to_thread.run_sync(broker.count, queue), lambda found: found == number)


async def jobs(raw, number):
    rows = await until(lambda: raw.fetch(JOBS), lambda rows: len(rows) >= number)
    assert len(rows) == number
    return rows


async def stated(reader, accept):
    async def state():
        return reader.state

    return await until(state, accept)


async def test_each_message_becomes_one_job_and_is_acknowledged(rabbitmq, broker, reading, raw):
    broker.publish(1, 0, 2)  # 0 makes no job
    async with reading(source(rabbitmq.url)) as reader:
        await jobs(raw, 2)
        broker.publish(3)
        await jobs(raw, 3)
        await stated(reader, lambda now: now.enqueued == 3)
        state = reader.state
        assert (state.source, state.connected, state.error, state.failed, state.dead) == ("orders", True, None, 0, 0)
        broker.publish(3)  # again, by the publisher
        await stated(reader, lambda now: now.enqueued == 4)
    assert broker.count() == 0  # a draining process has returned nothing
    assert [tuple(row) for row in await raw.fetch(JOBS)] == [(f"message:orders:id{n}", str(n)) for n in (1, 2, 3)]
    assert not [thread for thread in threading.enumerate() if "AmqpSession" in thread.name]


async def test_messages_without_an_id_are_separate_jobs_and_may_set_their_own_key(rabbitmq, broker, reading, raw):
    def request(message):
        return new_job("order", {"n": message.json()}, queue="q", idempotency_key=message.headers.get("key"))

    broker.publish(1, 1, prefix=None)
    broker.publish(2, 2, prefix=None, headers={"key": "two"})
    async with reading(AmqpMessages(rabbitmq.url, "orders", request)) as reader:
        await stated(reader, lambda now: now.enqueued == 4)
    assert [tuple(row) for row in await raw.fetch(JOBS)] == [(None, "1"), (None, "1"), ("two", "2")]


@pytest.mark.parametrize("kind", ["quorum", "classic"])
async def test_a_poisonous_message_becomes_a_dead_letter_and_delays_no_other(rabbitmq, broker, reading, raw, kind):
    broker.declare(kind)
    broker.publish(-1, 1, NO_QUEUE, headers={"from": "shop", "CC": ["elsewhere"]}, user_id="guest", expiration="900000")
    broker.publish(b"\xff", prefix=None)
    async with reading(source(rabbitmq.url, most_tries=3, prefetch=4)) as reader:
        await jobs(raw, 1)
        now = await stated(reader, lambda now: now.dead == 3)
        assert (now.enqueued, now.failed) == (1, 9)
        await counted(broker, 3, "orders.dead")
    assert broker.count() == 0
    letters = {body: properties for properties, body in broker.take(number=3)}
    assert letters.keys() == {b"-1", b"%d" % NO_QUEUE, b"\xff"}
    poison = letters[b"-1"]
    assert (poison.message_id, poison.delivery_mode, poison.expiration) == ("id-1", 2, None)
    assert poison.headers == {"from": "shop", "dl_queue": "orders", "dl_tries": 3, "dl_error": "ValueError: not -1"}
    assert letters[b"7"].headers["dl_error"].startswith("queue: is required")


async def test_a_message_id_reused_by_a_publisher_is_an_error_except_in_a_redelivery(rabbitmq, broker, reading, raw):
    broker.publish(1)
    async with reading(source(rabbitmq.url, most_tries=1)) as reader:
        await jobs(raw, 1)
        await stated(reader, lambda now: now.enqueued == 1)
        broker.publish_as("id1", 2)
        await stated(reader, lambda now: now.dead == 1)
    [(letter, _)] = broker.take()
    assert "message:orders:id1" in letter.headers["dl_error"]
    # When redelivered, it is the first message, for which `request` makes a different job now.
    broker.publish_as("id1", 3)
    broker.die_with(1, times=1)
    async with reading(source(rabbitmq.url, most_tries=2)) as reader:
        await stated(reader, lambda now: now.enqueued == 1)
    await jobs(raw, 1)


async def test_a_message_that_kills_each_reader_is_given_up_and_its_neighbors_are_not(rabbitmq, broker, reading, raw):
    broker.publish(9, 1, 2)  # the first one "kills" before it is acknowledged, so it is first each time
    broker.die_with(3, times=10)
    broker.publish(3, 4)
    broker.die_with(5, times=1)
    async with reading(source(rabbitmq.url)) as reader:
        await stated(reader, lambda now: now.dead == 1)
        assert [row["n"] for row in await jobs(raw, 4)] == ["1", "2", "3", "4"]
    [(letter, body)] = broker.take()
    assert body == b"9"
    assert letter.headers["dl_error"] == "delivered 11 times; each time, its reader ended or lost its connection"


async def test_a_message_that_was_delivered_too_often_is_tried_once_more_alone(rabbitmq, broker, store, raw):
    broker.publish(1, 2, -1)
    broker.die_with(3, times=5)
    asked, enqueuer = [], Enqueuer(store)

    async def enqueue(jobs):
        asked.append(len(jobs))
        return await enqueuer.enqueue(jobs)

    reader = source(rabbitmq.url).reader(enqueue=enqueue, consumer="c", draining=lambda: False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)
        await stated(reader, lambda now: now.dead == 1)
        nursery.cancel_scope.cancel()
    assert asked == [1, 1]
    [(letter, _)] = broker.take()
    assert letter.headers["dl_error"] == "ValueError: not -1"


async def test_a_draining_process_returns_messages_that_wait_for_a_retry(rabbitmq, broker, reading, raw):
    broker.publish(-1)
    async with reading(source(rabbitmq.url, again_after_s=300)) as reader:
        await stated(reader, lambda now: now.failed == 1)
        assert broker.count() == 0
    await counted(broker, 1)


KILLED = """
import os, signal, sys
import trio
sys.path[:0] = {path!r}
from test_amqp import source
from pika.adapters.blocking_connection import BlockingChannel
from dataloader import Settings, Tasks, Worker, open_supervisor

def kill(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

BlockingChannel.basic_ack = kill
tasks = Tasks()
tasks.messages(source({url!r}))

async def main():
    settings = Settings(db_dsn={dsn!r}, workers=(Worker("none", 1),), port=0)
    async with open_supervisor(settings, tasks, with_web=False):
        await trio.sleep_forever()

trio.run(main)
"""


async def test_a_kill_between_commit_and_acknowledgement_loses_and_repeats_nothing(
    rabbitmq, broker, reading, raw, database
):
    broker.publish(1, 2, 3)
    here = Path(__file__)
    code = KILLED.format(path=[str(here.parent), str(here.parents[2] / "shared")], url=rabbitmq.url, dsn=database.dsn)
    died = await trio.run_process([sys.executable, "-c", code], check=False, stderr=subprocess.DEVNULL)
    assert died.returncode == -signal.SIGKILL
    assert 1 <= await raw.fetchval("SELECT count(*) FROM dl_jobs") <= 3  # those of its first batch
    await counted(broker, 3)
    async with reading(source(rabbitmq.url)) as reader:
        await stated(reader, lambda now: now.enqueued == 3)
        broker.publish(4)
        await jobs(raw, 4)
        await stated(reader, lambda now: now.enqueued == 4)
    assert broker.count() == 0


async def test_a_silent_server_is_reported_and_delays_no_drain(rabbitmq, broker, reading, raw):
    async with reading(source(f"{rabbitmq.url}/?heartbeat=1")) as reader:
        await stated(reader, lambda now: now.connected)
        with rabbitmq.silence():
            told = await stated(reader, lambda now: now.error is not None)
            assert f"127.0.0.1:{rabbitmq.port}: AMQPHeartbeatTimeout" in told.error
        broker.publish(1)
        await jobs(raw, 1)
        await stated(reader, lambda now: now.enqueued == 1)
    running = source(rabbitmq.url).reader(enqueue=None, consumer="c", draining=lambda: False)
    with trio.fail_after(60) as watchdog, ExitStack() as stack:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.run)
            await stated(running, lambda now: now.connected)
            stack.enter_context(rabbitmq.silence())
            watchdog.deadline = trio.current_time() + LEAVE_S + 5
            nursery.cancel_scope.cancel()
    assert not running.state.connected


async def test_messages_wait_for_a_database_that_is_away_and_take_no_further_ones(rabbitmq, broker, store, raw):
    broker.publish(*range(1, 6))
    asked, away, enqueuer = [], True, Enqueuer(store)

    async def enqueue(jobs):
        asked.append(len(jobs))
        if away:
            raise StoreUnavailable("gone")
        return await enqueuer.enqueue(jobs)

    # Without heartbeats during the outage of the database, the connection would be closed within these attempts.
    declared = source(f"{rabbitmq.url}/?heartbeat=1", batch=2, prefetch=2)
    reader = declared.reader(enqueue=enqueue, consumer="c", draining=lambda: False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reader.run)

        async def tries():
            return len(asked)

        await until(tries, lambda number: number >= 5)
        assert (reader.state.error, reader.state.failed, broker.count()) == ("gone", 0, 3)
        away = False
        await jobs(raw, 5)
        await stated(reader, lambda now: now.enqueued == 5)
        assert reader.state.error is None
        nursery.cancel_scope.cancel()
    assert not reader.state.connected
    await counted(broker, 0)


async def test_a_missing_or_deleted_queue_is_reported_and_read_when_it_exists(rabbitmq, broker, reading, raw):
    broker._with_channel(lambda channel: channel.queue_delete("orders"))
    async with reading(source(rabbitmq.url)) as reader:
        told = await stated(reader, lambda now: now.error is not None)
        assert f"127.0.0.1:{rabbitmq.port}: ChannelClosedByBroker: (404)" in told.error
        assert "no queue 'orders'" in told.error
        broker.declare()
        await stated(reader, lambda now: now.connected)
        broker._with_channel(lambda channel: channel.queue_delete("orders"))
        told = await stated(reader, lambda now: not now.connected)
        assert "queue 'orders' was deleted" in told.error
        broker.declare()
        broker.publish(1)
        await jobs(raw, 1)


async def test_tls_is_used_and_verified_and_no_password_is_shown(rabbitmq, broker, reading, raw, monkeypatch):
    broker.publish(1)
    host = f"127.0.0.1:{rabbitmq.tls_port}"
    async with reading(source(f"amqps://guest:guest@{host}")) as reader:
        # On a busy machine some attempts end earlier, by a timeout.
        await stated(reader, lambda now: "certificate verify failed" in (now.error or ""))
    monkeypatch.setenv("SSL_CERT_FILE", str(rabbitmq.certificate))
    async with reading(source(f"amqps://guest:hunter2@{host}")) as reader:
        told = await stated(reader, lambda now: "ACCESS_REFUSED" in (now.error or ""))
        assert "hunter2" not in told.error + repr(source(f"amqps://guest:hunter2@{host}"))
    async with reading(source(f"amqps://guest:guest@{host}")):
        await jobs(raw, 1)


async def test_a_killed_server_is_reported_and_read_again_when_it_is_back(reading, raw, tmp_path):
    with a_rabbitmq(tmp_path) as server:
        broker = Broker(server.url)
        broker.declare()
        broker.publish(1)
        async with reading(source(server.url)) as reader:
            await jobs(raw, 1)
            await stated(reader, lambda now: now.enqueued == 1)
            server.kill()
            told = await stated(reader, lambda now: now.error is not None)
            assert not told.connected
            assert f"127.0.0.1:{server.port}" in told.error
            server.start()
            broker.publish(2)
            await jobs(raw, 2)
            assert (await stated(reader, lambda now: now.connected)).error is None


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"url": "redis://localhost"}, "url: must begin with amqp:// or amqps://, not 'redis'"),
        ({"queue": ""}, "queue: must have 1 to 200 characters, not 0"),
        ({"dead_letters": "a\nb"}, "dead_letters: must be on one line"),
        ({"dead_letters": "q"}, "dead_letters: must be a different queue than 'q'"),
        ({"most_tries": 0}, "most_tries: must be an integer from 1 to 1,000, not 0"),
        ({"batch": 2.5}, "batch: must be an integer from 1 to 1,000, not 2.5"),
        ({"prefetch": 0}, "prefetch: must be an integer from 1 to 10,000, not 0"),
        ({"again_after_s": 400}, "again_after_s: must be at most 375 with most_tries=5, not 400: RabbitMQ requeues"),
    ],
)
def test_invalid_options_of_a_source_are_refused_at_the_declaration(given, error):
    with pytest.raises(ValueError, match=error):
        AmqpMessages(**{"url": "amqp://localhost", "queue": "q", "request": job_of} | given)


def test_a_url_that_can_not_be_read_is_refused_without_its_password():
    with pytest.raises(ConfigError, match=r"url: must be amqp://user:password@host:5672/vhost") as refused:
        parameters_of("amqp://user:hunter2#x@host", "c")
    assert "hunter2" not in str(refused.value)
