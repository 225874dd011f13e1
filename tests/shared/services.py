"""Fixtures for the tests of whole processes: `dataloader serve` on the test's database, real signals, real sockets.

This is a plugin of tests/conftest.py. Running processes are observed from outside: by the job rows, by the ledger that
the handlers of service_tasks.py write on separate connections, and by the processes' logs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import httpx2
import pytest
import trio
from conditions import until
from databases import RawConnection, raw_connection

FOLDER = Path(__file__).parent

FAST = {"default_lease_ttl_sec": 5, "reaper_period_sec": 1, "heartbeat_sec": 1, "claim_backoff_sec": 2}
"""Settings with which a dead process's jobs are taken over within six seconds."""
LEASE_S, SWEEP_S = FAST["default_lease_ttl_sec"], FAST["reaper_period_sec"]
PATIENT = FAST | {"default_lease_ttl_sec": 15}
PATIENT_LEASE_S = PATIENT["default_lease_ttl_sec"]
"""Settings with leases that a healthy process keeps even on a machine that gives it no time for some seconds."""
LISTENER_BOUND_S = 5 + 5
"""Ping interval of the listener, in seconds, and the timeout of each ping."""


@attrs.define(eq=False)
class Service:
    """Running `dataloader serve`: `lines` are its log lines so far."""

    process: subprocess.Popen
    lines: list[dict] = attrs.field(factory=list)
    is_read: threading.Event = attrs.field(factory=threading.Event)
    _reader: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self):
        self.is_read.set()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.is_read.wait()
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.lines.append({"event": line, "level": "no JSON"})

    async def logged(self, event, *, within_s=None):
        """Return the first line whose event contains `event`, as soon as it exists."""

        async def line():
            return next((line for line in [*self.lines] if event in line["event"]), None)

        try:
            return await until(line, within_s=within_s)
        except AssertionError:
            raise AssertionError(f"no line {event!r} in {[line['event'] for line in self.lines]}") from None

    @property
    def url(self):
        return next(line["url"] for line in self.lines if line["event"] == "serving")

    def signal(self, number):
        self.process.send_signal(number)

    async def exit_code(self, *, within_s):
        """Return the exit code; fail if it has not ended within `within_s` seconds."""

        async def code():
            return self.process.poll()

        ended = await until(code, lambda code: code is not None, within_s=within_s)
        self.is_read.set()
        await trio.to_thread.run_sync(self._reader.join, 5)
        return ended

    def close(self):
        """Kill it, and close the reader of its log."""
        self.process.kill()
        self.process.wait(timeout=20)
        self.is_read.set()
        self._reader.join(5)
        self.process.stderr.close()


@pytest.fixture
def unmeasured(monkeypatch):
    """Disable the coverage tracer in services, for tests that are about load."""
    for name in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"):
        monkeypatch.delenv(name, raising=False)


def start_service(
    dsn,
    queues,
    folder,
    *,
    tasks="service_tasks:tasks",
    environment=None,
    launcher=(),
    ledger_dsn=None,
    **settings,
):
    """Start a service for `queues` (queue: slots) in a folder; other keywords are settings."""
    workers = json.dumps([{"queue": queue, "concurrency": slots} for queue, slots in queues.items()])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DL_", "PG"))}
    process = subprocess.Popen(
        [*launcher, sys.executable, "-m", "dataloader", "serve", "--tasks", tasks, "--port", "0"],
        cwd=folder,
        env=inherited
        | {"PYTHONPATH": f"{FOLDER}:{FOLDER.parent}", "DL_DB_DSN": dsn, "WORKERS_JSON": workers}
        | {"LEDGER_DSN": ledger_dsn or dsn}
        | {"DL_LOG_FORMAT": "json"}
        | {f"DL_{name.upper()}": str(value) for name, value in settings.items()}
        | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    return Service(process)


@pytest.fixture
def serve(database, tmp_path):
    """Return a function that starts a service for `queues` (queue: slots) and waits until it serves."""
    services = []

    async def serve(queues=None, *, dsn=None, ready="serving", **options):
        service = start_service(dsn or database.dsn, queues or {"q": 4}, tmp_path, ledger_dsn=database.dsn, **options)
        services.append(service)
        if ready:
            await service.logged(ready)
        return service

    yield serve
    for service in services:
        service.close()
        # Pytest shows them if the test has failed.
        print(f"the last lines of service {service.process.pid}:", *service.lines[-15:], sep="\n")  # noqa: T201


@pytest.fixture
async def raw(database):
    """Return a connection outside the store."""
    async with raw_connection(database.dsn) as connection:
        yield connection


@pytest.fixture
def add(raw):
    """Return a function that adds a job by SQL, as another service would, or one without a key; returns its ID."""

    async def add(task, args=None, *, queue="q", lock_key=None, keyed=True, lease_ttl_sec=60, max_attempts=5):
        return await raw.fetchval(
            "INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, keyed, lease_ttl_sec, max_attempts)"
            " VALUES (gen_random_uuid(), $1, $2, $3, coalesce($4, gen_random_uuid()::text), $5, $6, $7)"
            " RETURNING job_id",
            queue,
            task,
            json.dumps(args or {}),
            lock_key,
            keyed,
            lease_ttl_sec,
            max_attempts,
        )

    return add


@pytest.fixture
def row_when(raw):
    """Return a function that returns a job's row as soon as it has a status."""

    async def row_when(job_id, status, *, within_s=None):
        return await until(
            lambda: raw.fetchrow("SELECT * FROM dl_jobs WHERE job_id = $1", job_id),
            lambda row: row["status"] == status,
            within_s=within_s,
        )

    return row_when


@attrs.frozen
class Ledger:
    """Times of handlers by the database's clock, which they write themselves (the task `visit`) outside the queue."""

    raw: RawConnection

    async def create(self):
        await self.raw.execute("""
            CREATE TABLE ledger (visit bigserial PRIMARY KEY, job_id uuid, lock_key text, attempt int, pid int,
                                 began_at timestamptz DEFAULT clock_timestamp(), ended_at timestamptz, how text);
            CREATE INDEX ON ledger (job_id)""")

    async def visits(self, job_id=None):
        """Return all visits, or those of one job, in the order in which they began."""
        sql = "SELECT * FROM ledger WHERE $1::uuid IS NULL OR job_id = $1 ORDER BY began_at"
        return await self.raw.fetch(sql, job_id)

    async def died(self, pid):
        """End the visits of a killed process, after everything that it had sent was written."""
        sessions = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"
        await until(lambda: self.raw.fetchval(sessions, f"ledger {pid}"), lambda count: count == 0)
        await self.raw.execute(
            "UPDATE ledger SET ended_at = clock_timestamp(), how = 'killed' WHERE pid = $1 AND ended_at IS NULL", pid
        )

    async def overlaps(self):
        """Return pairs of concurrent visits of one job or of one key."""
        return await self.raw.fetch("""
            SELECT a.job_id, a.lock_key, a.attempt, a.pid, a.began_at, a.ended_at, b.job_id AS other_id,
                   b.attempt AS other_attempt, b.pid AS other_pid, b.began_at AS other_began_at
            FROM ledger a JOIN ledger b ON a.visit < b.visit AND (a.job_id = b.job_id OR a.lock_key = b.lock_key)
            WHERE a.began_at < coalesce(b.ended_at, 'infinity') AND b.began_at < coalesce(a.ended_at, 'infinity')""")


@pytest.fixture
async def ledger(raw):
    """Return the ledger that the handlers of `visit` write."""
    ledger = Ledger(raw)
    await ledger.create()
    return ledger


@pytest.fixture
def kill(ledger):
    """Return a function that kills a service, and notes in the ledger that its handlers have ended."""

    async def kill(service):
        service.process.kill()
        await trio.to_thread.run_sync(service.process.wait, 20)
        await ledger.died(service.process.pid)

    return kill


@pytest.fixture
def counts(raw):
    """Return a function that returns the number of jobs for each status."""

    async def counts():
        rows = await raw.fetch("SELECT status::text, count(*) FROM dl_jobs GROUP BY status")
        return {row["status"]: row["count"] for row in rows}

    return counts


@pytest.fixture
def client_of():
    """Return a function that opens an HTTP client of a service."""

    @asynccontextmanager
    async def client_of(service):
        async with httpx2.AsyncClient(base_url=service.url, timeout=20, verify=False) as client:
            yield client

    return client_of


def metrics_in(text, name):
    """Return the values of a metric, one for each set of labels."""
    return [float(line.rpartition(" ")[2]) for line in text.splitlines() if re.match(rf"{name}[ {{]", line)]


@pytest.fixture
def metric(client_of):
    """Return a function that reads a value of a service's /metrics: the sum over its labels, 0 if it is missing."""

    async def metric(service, name):
        async with client_of(service) as client:
            return sum(metrics_in((await client.get("/metrics")).text, name))

    return metric


@pytest.fixture
def no_claim_is_due(metric):
    """Return a check that a service with rare polls has made the claims of its start; the last follows the listener's.

    The proxy is the one of its lock session. An answer that has come through may lead to the next request in the next
    turns of the loop: the service needs some for two requests of ours.
    """

    async def no_claim_is_due(service, proxy):
        listens = await metric(service, "dataloader_listener_connected")
        before = proxy.asked("locks")
        for _ in range(2):
            await metric(service, "dataloader_listener_connected")
        return listens and before is not None and proxy.asked("locks") == before

    return no_claim_is_due


async def all_at_once(*starts):
    """Run the async functions concurrently, and return their results in order."""
    results = [None] * len(starts)

    async def start(place):
        results[place] = await starts[place]()

    async with trio.open_nursery() as nursery:
        for place in range(len(starts)):
            nursery.start_soon(start, place)
    return results
