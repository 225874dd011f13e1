"""Fixtures for the tests of whole processes: `dataloader serve` on the test's database, real signals, real sockets."""

from __future__ import annotations

import json
import os
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
from databases import raw_connection

FOLDER = Path(__file__).parent


@attrs.define(eq=False)
class Service:
    """A running `dataloader serve`: `lines` are what it has logged so far."""

    process: subprocess.Popen
    lines: list[dict] = attrs.field(factory=list)
    _reader: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self):
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                self.lines.append({"event": line, "level": "no JSON"})

    async def logged(self, event, *, within_s=20):
        """The first line whose event contains `event`, as soon as it is there."""

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
        """How it ended, `within_s` from now at the latest."""

        async def code():
            return self.process.poll()

        ended = await until(code, lambda code: code is not None, within_s=within_s)
        await trio.to_thread.run_sync(self._reader.join, 5)
        return ended


@pytest.fixture
def unmeasured(monkeypatch):
    """Services that no coverage tracer slows down, for tests that are about load."""
    for name in ("COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def serve(database, tmp_path):
    """Starts a service for `queues` (queue: slots) and waits until it serves; keywords are settings."""
    services = []

    async def serve(queues=None, *, dsn=None, ready="serving", **settings):
        workers = json.dumps([{"queue": queue, "concurrency": slots} for queue, slots in (queues or {"q": 4}).items()])
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("DL_", "PG"))}
        process = subprocess.Popen(  # noqa: ASYNC220 - it outlives this call
            [sys.executable, "-m", "dataloader", "serve", "--tasks", "service_tasks:tasks", "--port", "0"],
            cwd=tmp_path,
            env=inherited
            | {"PYTHONPATH": str(FOLDER), "DL_DB_DSN": dsn or database.dsn, "WORKERS_JSON": workers}
            | {"DL_LOG_FORMAT": "json"}
            | {f"DL_{name.upper()}": str(value) for name, value in settings.items()},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        service = Service(process)
        services.append(service)
        if ready:
            await service.logged(ready)
        return service

    yield serve
    for service in services:
        service.process.kill()
        service.process.wait(timeout=20)
        service._reader.join(5)
        service.process.stderr.close()


@pytest.fixture
async def raw(database):
    """A connection past the store."""
    async with raw_connection(database.dsn) as connection:
        yield connection


@pytest.fixture
def add(raw):
    """Puts a job into the queue as another service would; its id comes back."""

    async def add(task, args=None, *, queue="q", lock_key=None, lease_ttl_sec=60):
        return await raw.fetchval(
            "INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, lease_ttl_sec)"
            " VALUES (gen_random_uuid(), $1, $2, $3, coalesce($4, gen_random_uuid()::text), $5) RETURNING job_id",
            queue,
            task,
            json.dumps(args or {}),
            lock_key,
            lease_ttl_sec,
        )

    return add


@pytest.fixture
def row_when(raw):
    """A job's row as soon as it has a status."""

    async def row_when(job_id, status, *, within_s=15):
        return await until(
            lambda: raw.fetchrow("SELECT * FROM dl_jobs WHERE job_id = $1", job_id),
            lambda row: row["status"] == status,
            within_s=within_s,
        )

    return row_when


@pytest.fixture
def client_of():
    """An HTTP client of a service."""

    @asynccontextmanager
    async def client_of(service):
        async with httpx2.AsyncClient(base_url=service.url, timeout=20, verify=False) as client:
            yield client

    return client_of
