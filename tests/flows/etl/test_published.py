"""All parts of a service on a database with a publication for all tables, as for a replica or Debezium."""

from __future__ import annotations

import pytest
import trio
from conditions import until, when_ended
from etl_tasks import detailed_load
from logged import capture_logs
from payment_processes import payments

from dataloader import RateLimit, Settings, Supplier, Tasks, Worker, open_supervisor
from dataloader.flows.etl import add_loads
from dataloader.flows.processes import add_processes
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.run_stats import fold_run_stats
from dataloader.store.queue.table_rules import BY_DAYS, prune_tables

pytestmark = pytest.mark.slow

SCHEDULED = "SELECT count(*) FROM dl_jobs WHERE schedule = 'often' AND status = 'succeeded'"


def everything(url):
    """Return tasks with and without limits, a schedule, a load with rate limits and details, a type of processes."""
    tasks = Tasks()
    supplier = Supplier("s", rate_limits=(RateLimit(1_000, per_s=60), RateLimit(1_000, per="day")))

    @tasks.task("plain", queue="q")
    async def plain(job): ...

    @tasks.task("wrong", queue="q", max_attempts=1)
    async def wrong(job):
        raise ValueError("as it is meant to")

    @tasks.task("limited", queue="q", supplier=supplier, batch_size=2, max_running=2, max_running_per_partition=1)
    async def limited(job):
        await job.take("s", 2)

    tasks.schedule("often", task="plain", every_s=1)
    add_loads(tasks, detailed_load(url, rate_limits=(RateLimit(1_000, per_s=60),)))
    add_processes(tasks, payments())
    return tasks


@pytest.mark.requirement("Q1")
async def test_every_part_of_a_service_works_on_a_published_database(items, details, raw, database):
    await raw.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    items.records = [{"id": n, "day": "2026-01-01"} for n in range(3)]
    workers = (Worker("q", 4), Worker("process.payment", 4))
    settings = Settings(db_dsn=database.dsn, workers=workers, port=0, drain_timeout_s=10)
    with capture_logs() as lines, trio.fail_after(120):
        async with open_supervisor(settings, everything(items.service.url)) as supervisor:
            assert await supervisor.processes.start("payment", "1", 5) == "reserved"
            jobs = {}
            for name in ("plain", "limited", "limited", "limited", "wrong"):
                jobs[(await supervisor.jobs.enqueue(name, partition_key="p")).job_id] = name
            load = (await supervisor.jobs.enqueue("detailed", queue="q")).job_id
            ended = {name: (await when_ended(supervisor, job_id)).status for job_id, name in jobs.items()}
            assert ended == {"plain": "succeeded", "limited": "succeeded", "wrong": "failed"}
            assert (await when_ended(supervisor, load)).status == "succeeded"
            await until(lambda: raw.fetchval(SCHEDULED))
        async with open_database(DatabaseOptions(dsn=database.dsn)) as store:
            assert await fold_run_stats(store) > 0
            await raw.execute("UPDATE dl_source_calls SET at = at - interval '9 days'")
            assert await prune_tables(store, dict.fromkeys(BY_DAYS, 1)) > 0
    assert await raw.fetchval("SELECT count(*) FROM dl_source_calls") == 0
    assert [line for line in lines if "replica identity" in str(line)] == []
