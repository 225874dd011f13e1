"""Fixtures for tests of a running process inside the test's process: supervisors on the test's database, and its rows.

Polls and sweeps are an hour apart unless a test sets another time, so prompt effects are effects of notifications.
"""

from __future__ import annotations

import functools
import json
from contextlib import asynccontextmanager

import httpx2
import pytest
import trio
import trio.testing
from conditions import patience_s, until, when_ended
from proxy import open_proxy

from dataloader import Settings, Tasks, Worker, open_supervisor
from dataloader.store.connection import bridge
from dataloader.testing import Signals

NEVER_S = 3_600


@pytest.fixture
def open_worker(database):
    """Return a function that opens a supervisor for `queues` (queue: slots) and `tasks`; keywords are settings."""

    @asynccontextmanager
    async def open_worker(tasks, queues=None, *, dsn=None, with_web=False, **settings):
        quiet = {"poll_s": NEVER_S, "reaper_period_s": NEVER_S, "claim_backoff_s": NEVER_S, "drain_timeout_s": 10}
        workers = tuple(Worker(queue, slots) for queue, slots in (queues or {"q": 4}).items())
        ready = Settings(db_dsn=dsn or database.dsn, workers=workers, port=0, **(quiet | settings))
        async with open_supervisor(ready, tasks, with_web=with_web, signals=Signals()) as supervisor:
            yield supervisor

    return open_worker


@pytest.fixture
def stopped_without(open_worker, database, raw):
    """Return a context that cuts a connection under a waiting job; it yields a supervisor and `question`'s answer.

    At the end of the block the connection works again; then the job runs again and succeeds.
    """

    @asynccontextmanager
    async def stopped_without(role, question):
        tasks, started, answers = Tasks(), trio.Event(), []

        @tasks.task("wait")
        async def wait(job):
            if answers:
                return
            started.set()
            try:
                await trio.sleep_forever()
            finally:
                with trio.CancelScope(shield=True):
                    answers.append(await raw.fetchrow(question))

        async def answered():
            return answers

        async with (
            open_proxy(database.dsn) as proxy,
            open_worker(tasks, dsn=proxy.dsn, heartbeat_s=0.5, default_lease_s=4, statement_timeout_s=2) as supervisor,
        ):
            job = await supervisor.jobs.enqueue("wait", queue="q", lock_key="k")
            await started.wait()
            proxy.freeze(role)
            [answer] = await until(answered)
            yield supervisor, answer
            proxy.thaw()
            assert (await when_ended(supervisor, job.job_id)).status == "succeeded"

    return stopped_without


@pytest.fixture
def settled():
    """Return a function that waits until a supervisor is up and has done the polls after the listener's start."""

    async def settled(supervisor):
        signals = supervisor.signals
        await signals.listening.wait(timeout_s=patience_s())
        # The heartbeat is woken together with all other parts. Only its next round may be far away.
        listening = signals.listening.last
        await signals.heartbeat.wait_until(lambda began: began >= listening, timeout_s=patience_s())

    return settled


@pytest.fixture
def resting(settled):
    """Return a function that waits until a supervisor only runs `running` jobs, and no claim is in progress."""

    async def resting(supervisor, *, running=0):
        await settled(supervisor)

        async def all_rest():
            # When all tasks wait, a queue has processed a notification that arrived just before.
            await trio.testing.wait_all_tasks_blocked()
            queues = supervisor.state.queues
            used = sum(queue.running for queue in queues.values())
            return sorted(supervisor.signals.resting.last or ()) == sorted(queues) and used == running

        await until(all_rest)

    return resting


@pytest.fixture
def sent(monkeypatch):
    """Return the statements that this process sends, on all its connections."""
    statements, connect = [], bridge.connect

    async def logged(*args, **options):
        connection = await connect(*args, **options)
        connection.add_query_logger(lambda query: statements.append(query.query))
        return connection

    monkeypatch.setattr(bridge, "connect", logged)
    return statements


@pytest.fixture
def metric():
    """Return a function that reads the value of a metric of a supervisor with a web server."""

    async def metric(supervisor, name):
        async with httpx2.AsyncClient(timeout=30) as client:
            lines = (await client.get(f"{supervisor.url}/metrics")).text.splitlines()
        [value] = [line.split()[1] for line in lines if line.split()[0] == name]
        return float(value)

    return metric


@pytest.fixture
def row_of(raw):
    """Return a function that reads a job's row."""
    return functools.partial(raw.fetchrow, "SELECT * FROM dl_jobs WHERE job_id = $1")


@pytest.fixture
def journal_of(raw):
    """Return a function that reads the kinds of a job's events, in order, with the reason where there is one."""

    async def journal_of(job_id):
        rows = await raw.fetch("SELECT kind, payload FROM dl_job_events WHERE job_id = $1 ORDER BY event_id", job_id)
        reasons = [(row["kind"], json.loads(row["payload"] or "{}").get("reason")) for row in rows]
        return [kind if reason is None else f"{kind}: {reason}" for kind, reason in reasons]

    return journal_of
