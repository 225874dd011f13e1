"""Loads whose pages are read and transformed next to the workers of a Dask cluster (E2)."""

from __future__ import annotations

import os
import signal

import heavy
import pytest
from conditions import until, when_ended
from dask_cluster import dask_cluster
from etl_tasks import item, items_load
from processes_now import is_alive, stat_of
from rabbitmq_server import free_port

from dataloader.flows.etl import Csv, Detail, Files, Http, Json, Load, Table

pytestmark = [pytest.mark.full, pytest.mark.requirement("E2")]

LEASE_S = 4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Run a cluster with a folder in which transforms record their processes."""
    folder = tmp_path_factory.mktemp("shows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEAVY_SHOWS", str(folder))
        with dask_cluster(2, 2) as process:
            process.shows = folder
            yield process


@pytest.fixture
def shows(cluster):
    for path in cluster.shows.iterdir():
        path.unlink()
    return cluster.shows


@pytest.fixture
def seen(shows):
    return lambda: sorted(int(path.name) for path in shows.iterdir() if path.name.isdigit())


@pytest.fixture
async def numbers(raw, tmp_path, cluster):
    """Return a function that returns a load of one file for each number, into a table `numbers`."""
    await raw.execute("CREATE TABLE numbers (n int PRIMARY KEY, pid int)")

    def numbers(transform, count=4, **fields):
        for n in range(count):
            (tmp_path / f"{n}.csv").write_text(f"n\n{n}\n")
        return Load(
            "numbers",
            Files(str(tmp_path / "*.csv"), format=Csv(), record_source=False),
            Table("numbers", key="n"),
            transform=transform,
            **{"dask": cluster.address} | fields,
        )

    return numbers


@pytest.fixture
def row_of(raw):
    async def row_of(job_id):
        return await raw.fetchrow("SELECT status::text, attempt, error FROM dl_jobs WHERE job_id = $1", job_id)

    return row_of


def parent_of(pid):
    return int(stat_of(pid)[1])


async def test_a_cluster_gives_the_same_rows_as_threads(items, details, supervised, table, raw, soon, cluster):
    items.records = [item(number) for number in range(40)]
    items.service.misbehave("detail.*id=8$", status=404, times=None)
    made = []
    for dask in (None, True):
        await raw.execute("TRUNCATE item, detail")
        items.service.misbehave("detail.*id=9$", body=b"<html><body>back soon</body></html>", status=200)
        items.service.misbehave("items", body=b'{"items": [{"id', status=200)
        load = items_load(
            items.service.url,
            windows=None,
            page_size=15,
            transform=heavy.picky,
            dask=dask,
            pipeline={"max_failed_share": 1, "max_failures": 1_000, "workers": 1, "rate_min": 0, "rate_max": 0},
            detail=Detail(
                id=heavy.detail_id,
                request=heavy.detail_request,
                source=Http(items.service.url, format=Json(), params=lambda _window: {}),
                table=Table("detail", key="id"),
                transform=heavy.detail_row,
            ),
        )
        async with supervised(load, dask=cluster.address) as supervisor:
            job = await supervisor.jobs.enqueue(load.name, queue="q", max_attempts=1)
            ended = await when_ended(supervisor, job.job_id)
            assert ended.status == "succeeded", ended.error
        failures = await raw.fetch("DELETE FROM dl_etl_failures RETURNING phase, key, error")
        told = sorted(map(tuple, failures))
        made.append([ended.result["counts"], told, await table(), await table(name="detail")])
    assert made[0] == made[1]
    assert made[0][0]["records_failed"] == 4


async def test_large_pages_cross_and_processes_are_kept_for_the_next_run(numbers, supervised, raw, tmp_path):
    await raw.execute("ALTER TABLE numbers ADD text text")
    load = numbers(heavy.with_pid_and_all, count=0, pipeline={"workers": 1})
    (tmp_path / "large.csv").write_text("n,text\n" + "".join(f"{n},{n:012000d}\n" for n in range(1_000)))
    pids = []
    async with supervised(load) as supervisor:
        for _ in range(3):
            job = await supervisor.jobs.enqueue("numbers", queue="q", max_attempts=1)
            ended = await when_ended(supervisor, job.job_id)
            assert ended.status == "succeeded", ended.error
            rows = await raw.fetch("DELETE FROM numbers RETURNING n, pid, text")
            assert {row["n"]: row["text"] for row in rows} == {n: f"{n:012000d}" for n in range(1_000)}
            pids += {row["pid"] for row in rows}
    assert len(pids) == 3
    assert len(set(pids)) <= 2  # one per worker


async def test_a_cancel_kills_running_transforms_and_their_child_processes(numbers, seen, supervised):
    async with supervised(numbers(heavy.endless, pipeline={"drain_timeout": 0.1})) as supervisor:
        job = await supervisor.jobs.enqueue("numbers", queue="q", max_attempts=1)

        async def shown():
            return len(seen()) == 4

        await until(shown, within_s=30)
        await supervisor.jobs.cancel(job.job_id)
        assert (await when_ended(supervisor, job.job_id)).status == "canceled"
        assert not any(map(is_alive, seen()))


async def test_a_lost_worker_fails_the_attempt_and_the_next_one_continues(
    numbers, seen, shows, supervised, raw, row_of
):
    load = numbers(heavy.waits, pipeline={"workers": 1})
    async with supervised(load, heartbeat_s=0.5) as supervisor:
        job = await supervisor.jobs.enqueue("numbers", queue="q", lease_ttl_sec=LEASE_S, max_attempts=2)

        async def written():
            return await raw.fetchval("SELECT count(*) FROM numbers") == 2

        await until(written, within_s=40)
        [pid] = seen()
        os.kill(parent_of(parent_of(pid)), signal.SIGKILL)
        row = await until(lambda: row_of(job.job_id), lambda row: row["error"], within_s=30)
        assert "the Dask worker tcp://127.0.0.1:" in row["error"]
        assert "was lost, and its handler has ended" in row["error"]
        shows.joinpath("go").touch()
        await supervisor.jobs.run_now(job.job_id)
        ended = await when_ended(supervisor, job.job_id)
        assert (ended.status, ended.attempt) == ("succeeded", 2), ended.error
    pids = [row["pid"] for row in await raw.fetch("SELECT pid FROM numbers ORDER BY n")]
    assert [one == pid for one in pids] == [True, True, False, False]


async def test_a_scheduler_that_is_away_fails_the_attempt_and_says_so(numbers, supervised, row_of):
    address = f"tcp://127.0.0.1:{free_port()}"
    async with supervised(numbers(heavy.with_pid, dask=address)) as supervisor:
        job = await supervisor.jobs.enqueue("numbers", queue="q")
        row = await until(lambda: row_of(job.job_id), lambda row: row["error"], within_s=40)
        assert (row["status"], row["attempt"]) == ("queued", 1)
        assert row["error"] == f"the Dask cluster at {address} is unavailable"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"dask": True, "processes": True}, "load numbers: processes, dask: cannot be combined; use one of them"),
        ({"dask": "tcp://scheduler:8786"}, "load numbers: dask: must be a tls:// address: without TLS only a loopback"),
        ({"dask": 7}, "load numbers: dask: must be the address of a Dask scheduler, .* or True for DL_DASK"),
        ({"dask": True, "reads": True}, "load numbers: reads: cannot be combined with processes"),
        ({"dask": True, "transform": lambda row: row}, "load numbers: transform: must be usable in another process"),
    ],
)
def test_what_can_not_run_there_is_refused(fields, error, tmp_path):
    given = {"transform": heavy.with_pid} | fields
    with pytest.raises(ValueError, match=error):
        Load(
            "numbers",
            Files(str(tmp_path), format=Csv()),
            Table("numbers", key="n"),
            **given,
        )


async def test_without_an_address_the_job_says_what_is_missing(numbers, supervised):
    async with supervised(numbers(heavy.with_pid, dask=True)) as supervisor:
        job = await supervisor.jobs.enqueue("numbers", queue="q", max_attempts=1)
        ended = await when_ended(supervisor, job.job_id)
        assert ended.error == "task 'numbers': dask=True: needs DL_DASK, the address of the scheduler"
