"""Upkeep of processes: lost wake-up jobs are replaced, old rows are deleted, and needed ones stay."""

from __future__ import annotations

import pytest
import trio
from conditions import until

from dataloader.actors.outage import Outage
from dataloader.actors.reaper import Reaper
from dataloader.actors.wake import Wake
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.processes.requests import Request, aio_act, aio_ask
from dataloader.store.processes.steps import Wakeup, aio_begin
from dataloader.store.processes.upkeep import _ENDED, _PAGE, _PLAN, mend_ended, tend
from dataloader.store.queue.table_rules import prune_tables


@pytest.fixture
def ask(store):
    async def ask(process_id="1", kind="call", **fields):
        method = "m" if kind == "call" else None
        request = Request(type="pay", process_id=process_id, kind=kind, method=method, **fields)
        return await store.run(aio_ask, request, 60)

    return ask


@pytest.fixture
def walk(store):
    """Return a function that checks all processes."""

    async def walk(**options):
        return await tend(store, 0, lease_s=60, **({"keep_events": 0, "task_days": 0} | options))

    return walk


TIMER = """
UPDATE dl_processes SET status = 'running', timer_task = 99, timer_kind = 'timeout', timer_at = now() + interval '1 h'
WHERE process_id = '2'
"""


@pytest.mark.requirement("P4", "P5")
@pytest.mark.parametrize(
    "ended_by", ["UPDATE dl_jobs SET status = 'canceled', finished_at = now()", "DELETE FROM dl_jobs"]
)
async def test_a_process_whose_wake_up_job_others_have_ended_gets_another(store, raw, ask, walk, ended_by):
    for process_id in "123":
        await ask(process_id, "init")
    await raw.execute(TIMER)
    await raw.execute("DELETE FROM dl_process_tasks t USING dl_processes p WHERE p.key = t.key AND p.process_id = '2'")
    await raw.execute("DELETE FROM dl_process_tasks t USING dl_processes p WHERE p.key = t.key AND p.process_id = '3'")
    assert await mend_ended(store, 60) == 0
    assert (await walk()).mended == 0
    await raw.execute(ended_by)
    # The third has nothing to do, and needs no job.
    mended = await mend_ended(store, 60) if "canceled" in ended_by else (await walk()).mended
    assert mended == 2
    found = await raw.fetch(
        "SELECT p.process_id, j.waits_for, j.available_at > now() AS later"
        " FROM dl_processes p JOIN dl_jobs j USING (job_id) WHERE j.status = 'queued' ORDER BY 1"
    )
    assert [tuple(row) for row in found] == [("1", None, False), ("2", "time", True)]
    assert await mend_ended(store, 60) == 0
    assert (await walk()).mended == 0


@pytest.mark.requirement("P7", "P12")
async def test_a_stopped_step_whose_worker_is_lost_fails_and_is_not_run_again(store, raw, ask):
    await ask(kind="init")
    key, job_id, token = await raw.fetchrow(
        "UPDATE dl_jobs SET status = 'running', token = 7, claimed_by = 'w', lease_expires_at = now() + interval '1 h'"
        " RETURNING (args ->> 'key')::bigint, job_id, token"
    )
    [begun] = await store.run(aio_begin, [Wakeup(key, job_id, token, 3)])
    assert begun.verdict == "step"
    assert (await store.run(aio_act, "pay", "1", "stop", 60)).verdict == "done"
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'")
    open_job = "SELECT job_id FROM dl_jobs WHERE status = 'queued'"
    reaper = Reaper(
        database=store, outage=Outage(), telemetry=Telemetry(), period_s=0.01, jumped=Wake(), default_lease_s=60
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(reaper.run)
        other = await until(lambda: raw.fetchval(open_job))
        nursery.cancel_scope.cancel()
    await raw.execute("UPDATE dl_jobs SET status = 'running', token = 8 WHERE job_id = $1", other)
    [begun] = await store.run(aio_begin, [Wakeup(key, other, 8, 3)])
    assert begun.verdict == "zombie"
    assert await raw.fetchval("SELECT status FROM dl_processes") == "error"


async def test_a_foreign_job_in_a_processes_queue_holds_up_no_sweep(store, raw, ask, add_job):
    await ask(kind="init")
    await add_job(queue="'process.pay'", status="'failed'", args='\'{"key": "x"}\'')
    assert await mend_ended(store, 60) == 0


@pytest.mark.requirement("P1")
async def test_a_process_keeps_its_newest_events_its_recent_tasks_and_the_failed_one(raw, ask, walk):
    await ask(kind="init")
    for _ in range(3):
        await ask(may_start=True)
    await raw.execute(
        "INSERT INTO dl_process_events SELECT key, n, 1, now(), '1' FROM dl_processes, generate_series(1, 10) n"
    )
    await raw.execute(
        "UPDATE dl_processes SET last_event_id = 10, corrupted_by = (SELECT max(task_id) FROM dl_process_tasks)"
    )
    await raw.execute(
        "UPDATE dl_process_tasks SET status = 'error', finished_at = now() - interval '9 days' WHERE kind = 'call'"
    )
    await raw.execute("UPDATE dl_process_tasks SET finished_at = now() - interval '6 days' WHERE task_id = 2")
    assert (await walk()).deleted == 0
    assert (await walk(keep_events=4, task_days=7)).deleted == 6 + 1
    assert await raw.fetchval("SELECT array_agg(event_id) FROM dl_process_events") == [7, 8, 9, 10]
    assert await raw.fetchval("SELECT array_agg(task_id ORDER BY task_id) FROM dl_process_tasks") == [1, 2, 4]


MANY = """
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, keyed, available_at, waits_for)
SELECT md5(i::text)::uuid, 'process.pay', 'process.pay.v1', jsonb_build_object('key', i, 'type', 'pay'), i::text, false,
       now() + interval '1 d', 'time' FROM generate_series(1, 5000) AS i;
INSERT INTO dl_processes (type, process_id, status, job_id, timer_task, timer_kind, timer_at)
SELECT 'pay', i::text, 'running', md5(i::text)::uuid, i, 'timeout', now() + interval '1 d'
FROM generate_series(1, 5000) AS i;
ANALYZE dl_jobs; ANALYZE dl_processes
"""


@pytest.mark.parametrize("statement", [_ENDED, _PAGE.replace("$1", "100").replace("$2", "1000")])
async def test_no_sweep_reads_all_jobs(raw, statement):
    await raw.execute(MANY)
    await raw.execute("BEGIN")
    await raw.execute(_PLAN)
    lines = [row[0] for row in await raw.fetch(f"EXPLAIN {statement}")]
    [at] = [number for number, line in enumerate(lines) if " on dl_jobs " in line]
    conditions = " ".join(line for line in lines[at:] if "Index Cond" in line)
    assert "(job_id = p.job_id)" in conditions or "(status = s.status) AND (queue = " in conditions
    assert not any("Seq Scan" in line for line in lines)


async def test_lines_of_a_wake_up_job_go_after_a_day_however_long_the_job_lives(raw, ask, walk):
    await ask(kind="init")
    await raw.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, ts)"
        " SELECT job_id, queue, 'picked', now() - make_interval(hours => h) FROM dl_jobs, unnest(ARRAY[1, 30, 40]) h"
    )
    assert (await walk()).deleted == 2
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'picked'") == 1


@pytest.mark.requirement("P2")
async def test_a_removed_process_is_deleted_a_day_later_and_keeps_its_keys_until_then(store, raw, ask):
    for process_id in "12":
        task = await ask(process_id, "init", key=f"key {process_id}")
        await raw.execute("INSERT INTO dl_process_events SELECT max(key), 1, 1, now(), '1' FROM dl_processes")
        await store.run(aio_act, "pay", process_id, "remove", 60)
    await raw.execute("UPDATE dl_processes SET removed_at = now() - interval '25 h' WHERE process_id = '1'")
    while await prune_tables(store, {}):
        pass
    assert (await ask("2", "init", key="key 2")).task_id == task.task_id
    assert (await ask("1", "init", key="key 1")).verdict == "added"
    for table, rows in (("dl_processes", 2), ("dl_process_tasks", 2), ("dl_process_events", 1)):
        assert await raw.fetchval(f"SELECT count(*) FROM {table}") == rows


MOVE = "SELECT dl_process_move(ARRAY(SELECT key FROM dl_processes))"
NEWER = "INSERT INTO dl_process_types (type, version, served_until) VALUES ('pay', 2, now() + interval '1 h')"
SERVED_BY = {
    "a worker of this release": """
        INSERT INTO dl_process_types (type, version, served_until) VALUES ('pay', 1, now() + interval '1 h')""",
    "a worker of the release before": """
        INSERT INTO dl_workers (worker, host, pid, version, started_at, seen_at, queues, tasks)
        VALUES ('w', 'h', 1, '1', now(), now(), '{"process.pay": 1}', '{process.pay.v1}')""",
}


@pytest.mark.requirement("P11")
@pytest.mark.parametrize("by", SERVED_BY)
async def test_an_init_process_never_moves_from_a_version_that_is_served(raw, ask, by):
    await ask(kind="init")
    await raw.execute(NEWER)
    await raw.execute(SERVED_BY[by])
    assert await raw.fetchval(MOVE) == 0
    assert await raw.fetchval("SELECT task FROM dl_jobs") == "process.pay.v1"
    await raw.execute("DELETE FROM dl_workers; DELETE FROM dl_process_types WHERE version = 1")
    assert await raw.fetchval(MOVE) == 1
    assert await raw.fetchval("SELECT task FROM dl_jobs") == "process.pay.v2"


@pytest.mark.requirement("P11")
async def test_a_moved_process_leaves_the_limit_queue_of_its_former_version(raw, ask):
    await ask(kind="init")
    await raw.execute(NEWER)
    await raw.execute("INSERT INTO dl_lanes (lane) VALUES ('process.pay.v1')")
    await raw.execute("UPDATE dl_jobs SET lane = task, waits_for = 'limit'")
    assert await raw.fetchval(MOVE) == 1
    moved = await raw.fetchrow("SELECT task, lane, waits_for FROM dl_jobs")
    assert tuple(moved) == ("process.pay.v2", None, None)
