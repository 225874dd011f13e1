"""Processes that are killed at each point of a stage (R6): each stage runs, and never twice concurrently."""

from __future__ import annotations

import signal
import sys

import pytest
import trio

from dataloader import NewJob
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.enqueue import enqueue

pytestmark = pytest.mark.full

# The argument is the point at which a process ends: in a handler, before the move is sent, after it is committed.
PROGRAM = """
import os, signal, sys
import trio
from dataloader import Settings, Tasks, Worker, open_supervisor
from dataloader.actors import recorder

dsn, point = sys.argv[1:]
tasks = Tasks()

def die():
    os.kill(os.getpid(), signal.SIGKILL)

async def stage(job):
    if point == "handler":
        die()
    return [*(job.previous or ()), job.task]

def named(name):
    return tasks.task(f"s.{name}", queue="q", max_attempts=100)(stage)

tasks.stages("s", named("a"), named("b"), named("c"))
write = recorder.aio_finish

async def finish(connection, outcomes, **options):
    if point == "before the move":
        die()
    finished = await write(connection, outcomes, **options)
    if point == "after the move":
        die()
    return finished

recorder.aio_finish = finish

async def main():
    quick = {"default_lease_s": 3, "heartbeat_s": 0.5, "reaper_period_s": 0.2}
    settings = Settings(db_dsn=dsn, workers=(Worker("q", 4),), port=0, **quick)
    async with open_supervisor(settings, tasks, with_web=False) as supervisor:
        for job in (await supervisor.jobs.find()).jobs:
            await supervisor.jobs.wait(job.job_id)

trio.run(main)
"""
POINTS = ["handler", "before the move", "after the move", "after the move", "before the move", "after the move"]


@pytest.mark.requirement("R6", "Q8")
async def test_stages_whose_processes_are_killed_at_each_point_are_all_gone_through(database, raw):
    async with open_database(DatabaseOptions(dsn=database.dsn)) as store:
        jobs = [NewJob(task="s.a", queue="q", max_attempts=100, lease_ttl_sec=3) for _ in range(3)]
        await enqueue(store, jobs)
    for point in [*POINTS, "none"]:
        with trio.fail_after(120):
            ended = await trio.run_process(
                [sys.executable, "-c", PROGRAM, database.dsn, point], check=False, capture_stderr=True
            )
        assert ended.returncode == (0 if point == "none" else -signal.SIGKILL), ended.stderr[-3000:]
    rows = await raw.fetch("SELECT status::text, moves, result FROM dl_jobs")
    assert [tuple(row) for row in rows] == [("succeeded", 2, '["s.a", "s.b", "s.c"]')] * 3
    moved = await raw.fetch(
        "SELECT job_id, array_agg(payload ->> 'to' ORDER BY event_id) AS stages FROM dl_job_events"
        " WHERE kind = 'moved' GROUP BY 1"
    )
    assert [row["stages"] for row in moved] == [["s.b", "s.c"]] * 3
    # Each run began after the former one had ended, or had lost its lease.
    kinds = await raw.fetch(
        "SELECT job_id, string_agg(kind, ' ' ORDER BY event_id) AS kinds FROM dl_job_events"
        " WHERE kind IN ('picked', 'moved', 'requeue', 'done') GROUP BY 1"
    )
    assert all("picked picked" not in row["kinds"] for row in kinds)
