"""Handlers next to Dask workers: at most one lives for a job, whatever process is killed, frozen or disconnected.

A handler writes rows continuously while it lives: rows of two handlers of a job never alternate.
"""

from __future__ import annotations

import os
import signal
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from conditions import until
from dask_cluster import dask_cluster
from processes_now import is_alive
from rabbitmq_server import free_port
from services import FAST, LEASE_S

pytestmark = pytest.mark.full


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


class Line:
    """Connection to the scheduler that can be cut: sent data is neither lost nor delivered until it is restored."""

    def __init__(self, port):
        self.to = port
        self.whole = trio.Event()
        self.whole.set()

    async def serve(self, *, task_status):
        async with trio.open_nursery() as nursery:
            [listener] = await nursery.start(partial(trio.serve_tcp, self._link, 0, host="127.0.0.1"))
            task_status.started(listener.socket.getsockname()[1])

    async def _link(self, near):
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            async with await trio.open_tcp_stream("127.0.0.1", self.to) as far, trio.open_nursery() as nursery:
                nursery.start_soon(self._pump, near, far, nursery)
                nursery.start_soon(self._pump, far, near, nursery)

    async def _pump(self, source, sink, nursery):
        with suppress(OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            async for data in source:
                await self.whole.wait()
                await sink.send_all(data)
        nursery.cancel_scope.cancel()

    def cut(self):
        self.whole = trio.Event()

    def mend(self):
        self.whole.set()


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def cluster(port):
    with dask_cluster(2, 1, port=port) as process:
        yield process


@pytest.fixture
def beating(serve, add, raw, database):
    """Return a context with a service whose job writes.

    Afterwards its second run writes, and no two of them overlapped.
    """

    @asynccontextmanager
    async def beating(dask, *, another=None):
        await raw.execute(
            "CREATE TABLE beats (n bigserial, job text, pid int, at timestamptz NOT NULL DEFAULT clock_timestamp())"
        )
        service = await serve({"q": 1}, tasks="dask_tasks:tasks", dask=dask, **FAST)
        await add("beats", args={"dsn": database.dsn}, lease_ttl_sec=LEASE_S)

        async def bodies():
            return [row["pid"] for row in await raw.fetch("SELECT pid FROM beats GROUP BY pid ORDER BY min(n)")]

        [first] = await until(bodies)
        yield service, first
        if another is not None:
            await serve({"q": 1}, tasks="dask_tasks:tasks", dask=another, **FAST)
        [_, second] = await until(bodies, lambda pids: len(pids) == 2, within_s=150)
        assert not is_alive(first)
        overlaps = await raw.fetchval(
            "SELECT count(*) FROM beats WHERE pid = $1 AND n > (SELECT min(n) FROM beats WHERE pid = $2)", first, second
        )
        assert overlaps == 0

    return beating


async def test_a_body_whose_worker_is_killed_dies_with_it_and_the_job_runs_again(beating, cluster):
    async with beating(cluster.address) as (service, first):
        os.kill(parent_of(parent_of(first)), signal.SIGKILL)
        await service.logged("Dask has lost a worker and repeats its task; the repetition is refused")

        async def is_gone():
            return not is_alive(first)

        await until(is_gone, within_s=LEASE_S / 2)


async def test_a_handler_on_a_suspended_worker_dies_before_its_job_runs_again(beating, cluster):
    async with beating(cluster.address) as (_, first):
        worker = parent_of(parent_of(first))
        os.kill(worker, signal.SIGSTOP)
    os.kill(worker, signal.SIGCONT)


async def test_a_body_whose_scheduler_is_killed_dies_and_the_job_runs_on_the_next_one(beating, cluster):
    """The next scheduler has another address: at the same one, Dask may wait minutes for a former worker."""
    with dask_cluster(1, 1) as following:
        async with beating(cluster.address, another=following.address) as (_, first):
            cluster.kill()
            cluster.wait()

            async def is_gone():
                return not is_alive(first)

            await until(is_gone)


@pytest.mark.long
async def test_a_dask_handler_whose_service_is_cut_off_dies_before_its_job_runs_again(beating, cluster, port, nursery):
    line = Line(port)
    near = await nursery.start(line.serve)
    async with beating(f"tcp://127.0.0.1:{near}", another=cluster.address) as (service, _):
        line.cut()
        await service.logged("the job failed")
    line.mend()


async def test_a_handler_of_a_suspended_service_dies_before_another_runs_its_job(beating, cluster):
    async with beating(cluster.address, another=cluster.address) as (service, _):
        service.signal(signal.SIGSTOP)
    service.signal(signal.SIGCONT)


async def test_a_short_cut_of_the_line_costs_no_attempt(beating, cluster, port, nursery, serve, add, raw):
    line = Line(port)
    near = await nursery.start(line.serve)
    await serve({"q": 1}, tasks="dask_tasks:tasks", dask=f"tcp://127.0.0.1:{near}")
    job = await add("sleeps", args={"s": 6})
    await until(lambda: raw.fetchval("SELECT progress->>'pid' FROM dl_jobs WHERE job_id = $1", job))
    line.cut()
    await trio.sleep(2)
    line.mend()
    ended = await until(
        lambda: raw.fetchrow("SELECT status::text, attempt FROM dl_jobs WHERE job_id = $1", job),
        lambda row: row["status"] != "running",
    )
    assert tuple(ended) == ("succeeded", 1)
