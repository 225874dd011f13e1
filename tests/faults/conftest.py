"""Fixtures of the fault tests: a steady load, answers of a service meanwhile, a server that a test may break."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import asyncpg
import attrs
import httpx2
import pytest
import trio
from conditions import patience_s, until
from own_server import server_in
from services import metrics_in

from dataloader.store.connection.loop import open_loop

UNFINISHED = (
    "SELECT job_id, task, status::text, attempt, error FROM dl_jobs WHERE status <> 'succeeded' AND queue = 'q'"
)
KEYS = "SELECT idempotency_key, job_id FROM dl_jobs WHERE idempotency_key IS NOT NULL"


@attrs.define(eq=False, kw_only=True)
class Load:
    """A job every `period_s` seconds, each sent with an idempotency key until it is accepted.

    `jobs` has the IDs of the answers by key, `refusals` the details of the 503s, `slowest_s` the duration of the
    slowest answer. Any other answer, and none within the client's timeout, ends the test.
    """

    client: httpx2.AsyncClient
    period_s: float = 0.15
    s: float = 0.2
    tasks: tuple[str, ...] = ("visit",)
    keys: int = 4
    ballast: int = 0
    asked: int = 0
    over: bool = False
    slowest_s: float = 0
    jobs: dict[str, str] = attrs.field(factory=dict)
    refusals: list[str] = attrs.field(factory=list)

    async def run(self, nursery):
        while not self.over:
            nursery.start_soon(self._ask, self.asked)
            self.asked += 1
            await trio.sleep(self.period_s)

    async def _ask(self, number):
        body = {
            "queue": "q",
            "task": self.tasks[number % len(self.tasks)],
            "lock_key": f"k{number % self.keys}",
            "args": {"s": self.s, "ballast": os.urandom(self.ballast).hex()},
            "idempotency_key": f"job {number}",
        }
        while True:
            began = trio.current_time()
            answer = await self.client.post("/api/v1/jobs/trigger", json=body)
            self.slowest_s = max(self.slowest_s, trio.current_time() - began)
            if answer.status_code in {200, 201}:
                self.jobs[body["idempotency_key"]] = answer.json()["job_id"]
                return
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/store-unavailable"), answer.text
            self.refusals.append(answer.json()["detail"])
            await trio.sleep(0.2)

    async def more(self, number=3, *, within_s=60):
        """Wait until `number` more jobs were accepted."""
        wanted = len(self.jobs) + number

        async def taken():
            return len(self.jobs)

        await until(taken, lambda count: count >= wanted, within_s=within_s)

    async def succeeded(self, fetch, *, within_s=40):
        """Check that each key has exactly the job of its answer, and that all jobs succeed."""
        await until(lambda: fetch(UNFINISHED), lambda rows: not rows, within_s=within_s)
        rows = await fetch(KEYS)
        assert len(rows) == self.asked
        assert {row["idempotency_key"]: str(row["job_id"]) for row in rows} == self.jobs


@pytest.fixture
def load(client_of):
    """Return a context with a steady load on a service; its end waits until every job was accepted."""

    @contextlib.asynccontextmanager
    async def load(service, **options):
        async with client_of(service) as client, trio.open_nursery() as nursery:
            load = Load(client=client, **options)
            nursery.start_soon(load.run, nursery)
            yield load
            load.over = True
            nursery.cancel_scope.deadline = trio.current_time() + 45
        assert len(load.jobs) == load.asked, "jobs were not taken in 45 s"

    return load


@attrs.frozen
class Asking:
    """State and answers of a service, over HTTP."""

    client: httpx2.AsyncClient

    async def ready(self, status, *, within_s):
        """Wait until /ready has this status; each single answer must also arrive within the bound."""

        async def answer():
            with trio.fail_after(within_s):
                return (await self.client.get("/ready")).status_code

        await until(answer, lambda answered: answered == status, within_s=within_s)

    async def metric(self, name):
        """Return the value of a metric without labels, which must exist."""
        [value] = metrics_in((await self.client.get("/metrics")).text, f"dataloader_{name}")
        return value

    async def shows(self, name, value, *, within_s):
        """Wait until a metric has this value."""
        await until(partial(self.metric, name), lambda shown: shown == value, within_s=within_s)

    async def healthy(self):
        """Check that /health answers immediately."""
        with trio.fail_after(patience_s()):
            assert (await self.client.get("/health")).status_code == 200

    async def trigger(self, task, *, queue="q", **fields):
        """Trigger a job; return the answer."""
        body = {"queue": queue, "task": task, "lock_key": fields.pop("lock_key", os.urandom(8).hex())} | fields
        return await self.client.post("/api/v1/jobs/trigger", json=body)

    async def added(self, task, **fields):
        """Trigger a job, which must be accepted; return its ID."""
        answer = await self.trigger(task, **fields)
        assert answer.status_code == 201, answer.text
        return answer.json()["job_id"]

    async def refused(self, *, within_s, **fields):
        """Check that a trigger gets a clear 503 in time. Its queue has no workers, in case the job was added."""
        with trio.fail_after(within_s):
            answer = await self.trigger("quick", queue="elsewhere", **fields)
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/store-unavailable"), answer.text
        assert "try again" in answer.json()["detail"]
        assert int(answer.headers["retry-after"]) > 0


@pytest.fixture
def asking(client_of):
    """Return a context that sends requests to a service."""

    @contextlib.asynccontextmanager
    async def asking(service):
        async with client_of(service) as client:
            yield Asking(client)

    return asking


@pytest.fixture
def calm():
    """Return a function that checks that a service never ended, no part of it failed, and it logged no error."""

    def calm(service):
        assert service.process.poll() is None
        # A loop that is blocked for half a second may be the machine's fault.
        wrong = [line for line in service.lines if line["level"] in {"error", "critical", "no JSON"}]
        assert [line for line in wrong if line["event"] != "the event loop is blocked"] == []

    return calm


@pytest.fixture
def own_server(request):
    """Run a separate server for the test; the fixture's parameter has settings."""
    with (
        TemporaryDirectory(prefix="dataloader-tests-") as data_dir,
        server_in(Path(data_dir), **getattr(request, "param", {})) as server,
    ):
        yield server


@pytest.fixture
def small_disk():
    """Mount a separate file system of 240 MB."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("only root can mount a file system")
    with TemporaryDirectory(prefix="dataloader-tests-") as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=240m,mode=755", "tmpfs", folder]
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
        if mounted.returncode != 0:
            pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture
def server_on_a_small_disk(small_disk):
    """Run a server that can fill its disk.

    No checkpoint starts by itself: without space for its files it ends the server.
    """
    with server_in(small_disk, checkpoint_timeout="1h") as server:
        yield server


@attrs.define(eq=False)
class Crowd:
    """Occupies all connections of a server."""

    _dsn: str
    _loop: object
    _connections: list[object] = attrs.field(factory=list)

    async def come(self):
        """Occupy all free connections."""
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                self._connections.append(await self._loop.run(partial(asyncpg.connect, self._dsn, timeout=10)))

    async def push_out(self):
        """End the sessions of our services, and occupy their places before the services reconnect.

        Continue until all places are ours: a session that is about to begin has one, but is not visible yet.
        """
        places = await self._fetchval("SELECT setting::int FROM pg_settings WHERE name = 'max_connections'")
        await until(self._taken, lambda taken: taken == places, within_s=20)

    async def _taken(self):
        ours = "FROM pg_stat_activity WHERE application_name LIKE 'dataloader%'"
        await self._fetchval(f"SELECT count(pg_terminate_backend(pid)) {ours}")
        await self.come()
        return len(self._connections)

    async def _fetchval(self, sql):
        return await self._loop.run(partial(self._connections[0].fetchval, timeout=10), sql)

    async def go(self):
        """Close all connections."""
        while self._connections:
            await self._loop.run(partial(self._connections.pop().close, timeout=3))


@pytest.fixture
def crowd():
    """Return a context in which all connections of a server are occupied."""

    @contextlib.asynccontextmanager
    async def crowd(dsn):
        async with open_loop() as loop:
            crowd = Crowd(dsn, loop)
            try:
                await crowd.come()
                yield crowd
            finally:
                with trio.move_on_after(10, shield=True):
                    await crowd.go()

    return crowd
