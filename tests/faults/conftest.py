"""Fixtures of the fault tests: a steady load, what a service says meanwhile, a server that a test may break."""

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
    """A job every `period_s` seconds, each asked for with an idempotency key, again and again until it was taken.

    `jobs` are the ids by key as they were answered, `refusals` the details of the 503s, `slowest_s` is how long the
    slowest answer took. Any other answer, and none within the client's timeout, ends the test.
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
        """Return when so many more jobs were taken."""
        wanted = len(self.jobs) + number

        async def taken():
            return len(self.jobs)

        await until(taken, lambda count: count >= wanted, within_s=within_s)

    async def succeeded(self, fetch, *, within_s=40):
        """Each key has exactly the job that its answer named, and all jobs succeed."""
        await until(lambda: fetch(UNFINISHED), lambda rows: not rows, within_s=within_s)
        rows = await fetch(KEYS)
        assert len(rows) == self.asked
        assert {row["idempotency_key"]: str(row["job_id"]) for row in rows} == self.jobs


@pytest.fixture
def load(client_of):
    """A steady load on a service for the length of a block, whose end waits until every job was taken."""

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
    """What a service says of itself and answers, over HTTP."""

    client: httpx2.AsyncClient

    async def ready(self, status, *, within_s):
        """Return when /ready has this status; each answer alone comes within the bound, too."""

        async def answer():
            with trio.fail_after(within_s):
                return (await self.client.get("/ready")).status_code

        await until(answer, lambda answered: answered == status, within_s=within_s)

    async def metric(self, name):
        """The value of a metric without labels, which must be there."""
        [value] = metrics_in((await self.client.get("/metrics")).text, f"dataloader_{name}")
        return value

    async def shows(self, name, value, *, within_s):
        """Return when a metric has this value."""
        await until(partial(self.metric, name), lambda shown: shown == value, within_s=within_s)

    async def healthy(self):
        """/health answers, and at once."""
        with trio.fail_after(patience_s()):
            assert (await self.client.get("/health")).status_code == 200

    async def trigger(self, task, *, queue="q", **fields):
        """Ask for a job; the answer comes back."""
        body = {"queue": queue, "task": task, "lock_key": fields.pop("lock_key", os.urandom(8).hex())} | fields
        return await self.client.post("/api/v1/jobs/trigger", json=body)

    async def added(self, task, **fields):
        """Ask for a job that must be taken; its id comes back."""
        answer = await self.trigger(task, **fields)
        assert answer.status_code == 201, answer.text
        return answer.json()["job_id"]

    async def refused(self, *, within_s, **fields):
        """A trigger gets a clear 503 in time. It is for a queue that nobody serves, should it have been added."""
        with trio.fail_after(within_s):
            answer = await self.trigger("quick", queue="elsewhere", **fields)
        assert (answer.status_code, answer.json()["type"]) == (503, "/problems/store-unavailable"), answer.text
        assert "try again" in answer.json()["detail"]
        assert int(answer.headers["retry-after"]) > 0


@pytest.fixture
def asking(client_of):
    """Asks a service for the length of a block."""

    @contextlib.asynccontextmanager
    async def asking(service):
        async with client_of(service) as client:
            yield Asking(client)

    return asking


@pytest.fixture
def calm():
    """Checks that a service never ended, that no part of it failed, and that it saw nothing it does not know."""

    def calm(service):
        assert service.process.poll() is None
        # A loop that is held up for half a second may be the machine's fault.
        wrong = [line for line in service.lines if line["level"] in {"error", "critical", "no JSON"}]
        assert [line for line in wrong if line["event"] != "the event loop is blocked"] == []

    return calm


@pytest.fixture
def own_server(request):
    """A server of the test's own; its parameter are settings."""
    with (
        TemporaryDirectory(prefix="dataloader-tests-") as data_dir,
        server_in(Path(data_dir), **getattr(request, "param", {})) as server,
    ):
        yield server


@pytest.fixture
def small_disk():
    """A file system of its own, of 240 MB."""
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
    """A server that can fill its disk. No checkpoint comes by itself: without room for its files it ends the server."""
    with server_in(small_disk, checkpoint_timeout="1h") as server:
        yield server


@attrs.define(eq=False)
class Crowd:
    """Takes a server's connections away from others."""

    _dsn: str
    _loop: object
    _connections: list[object] = attrs.field(factory=list)

    async def come(self):
        """Take all that are free."""
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                self._connections.append(await self._loop.run(partial(asyncpg.connect, self._dsn, timeout=10)))

    async def push_out(self):
        """End the sessions of our services, and take their places before they do.

        Until all places are ours: a session that is about to begin has one, and isn't seen by anybody yet.
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
        """Leave."""
        while self._connections:
            await self._loop.run(partial(self._connections.pop().close, timeout=3))


@pytest.fixture
def crowd():
    """Those who take all connections of a server, for the length of a block."""

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
