"""States of queues, for the jobs in them: read on request, from workers, pauses and running jobs."""

from __future__ import annotations

import pytest
import trio

from dataloader.jobs.listings import JobFilter
from dataloader.jobs.model import NewJob
from dataloader.jobs.states import QueueState
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue import queue_states, reads
from dataloader.store.queue.enqueue import enqueue
from dataloader.store.queue.queue_states import REMEMBERED_S, ServedQueues
from dataloader.store.queue.worker_rows import WorkerRow, aio_show

pytestmark = pytest.mark.requirement("Q3")

JOB = NewJob(queue="q", task="t")


@pytest.fixture
def show_worker(store):
    async def show_worker(name, queues, tasks=("t",)):
        await store.write(aio_show, WorkerRow(name, "h", 1, "1", queues, tasks))

    return show_worker


async def states_of(served, jobs):
    known = await served.known()
    return [None if known is None else known.state_of(job.queue, job.task) for job in jobs]


async def test_a_queued_job_says_whether_its_queue_is_paused_has_no_worker_or_is_full(store, raw, add_job, show_worker):
    await show_worker("w1", {"served": 1, "full": 1, "paused": 1})
    await show_worker("w2", {"full": 1})
    await raw.execute("INSERT INTO dl_queues (queue, paused) VALUES ('paused', true), ('served', false)")
    for worker in ("w1", "w2"):
        await add_job(queue="'full'", status="'running'", token="1", claimed_by=f"'{worker}'")
    jobs = {queue: await add_job(queue=f"'{queue}'") for queue in ("served", "full", "paused")}
    jobs["nobody"] = await add_job(queue="'nobody'", available_at="now() + interval '1 h'")
    wanted = {
        "served": None,
        "full": QueueState.FULL,
        "paused": QueueState.PAUSED,
        "nobody": QueueState.NO_WORKER,
    }
    assert {queue: (await reads.get_job(store, job_id)).queue_state for queue, job_id in jobs.items()} == wanted
    page = await reads.list_jobs(store, JobFilter())
    assert {job.queue: job.queue_state for job in page.jobs if job.status == "queued"} == wanted


async def test_only_queued_jobs_have_a_queue_state(store, add_job):
    for status in ("running", "succeeded", "failed"):
        job_id = await add_job(status=f"'{status}'")
        assert (await reads.get_job(store, job_id)).queue_state is None


async def test_jobs_of_other_services_take_no_slot_and_a_dead_worker_serves_nothing(store, raw, add_job, show_worker):
    await show_worker("w", {"q": 1})
    await add_job(status="'running'")
    job_id = await add_job()
    assert (await reads.get_job(store, job_id)).queue_state is None
    await raw.execute("UPDATE dl_workers SET seen_at = now() - interval '2 min'")
    assert (await reads.get_job(store, job_id)).queue_state is QueueState.NO_WORKER


async def test_a_task_is_unknown_only_if_no_worker_of_its_queue_reports_it(store, raw, show_worker, add_job):
    async def heard(*names):
        jobs = [NewJob(queue=queue, task=task) for queue, task in names]
        return await states_of(ServedQueues(store), jobs)

    await show_worker("w1", {"q": 1, "both": 1}, ["t"])
    await show_worker("w2", {"other": 1, "both": 1}, ["u"])
    asked = (("q", "t"), ("q", "u"), ("both", "t"), ("both", "u"), ("both", "v"), ("nobody", "v"))
    unknown, no_worker = QueueState.UNKNOWN_TASK, QueueState.NO_WORKER
    assert await heard(*asked) == [None, unknown, None, None, unknown, no_worker]
    # The jobs report the same states.
    jobs = [await add_job(queue=f"'{queue}'", task=f"'{task}'") for queue, task in asked]
    states = [(await reads.get_job(store, job_id)).queue_state for job_id in jobs]
    assert states == [None, unknown, None, None, unknown, no_worker]
    # A process of an earlier release may know it.
    await raw.execute(
        "INSERT INTO dl_workers (worker, host, pid, version, queues) VALUES ('w3', 'h', 1, '0', '{\"q\": 1}')"
    )
    assert await heard(("q", "u"), ("both", "v")) == [None, unknown]
    # A process reports tasks that it learns later with its next heartbeat.
    await show_worker("w2", {"both": 1}, ["u", "v"])
    assert await heard(("both", "v")) == [None]
    assert {w.worker: w.tasks for w in await reads.list_workers(store)} == {"w1": ["t"], "w2": ["u", "v"], "w3": None}


@pytest.mark.slow
async def test_the_state_of_a_queue_is_found_by_indexes_among_many_jobs(store, raw, show_worker):
    await show_worker("w", {"q": 10})
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, claimed_by, token)"
        " SELECT gen_random_uuid(), CASE WHEN i <= 5 THEN 'q' ELSE 'other' END, 't', i::text,"
        " (CASE WHEN i <= 10 THEN 'running' ELSE 'succeeded' END)::dl_status, 'w', i FROM generate_series(1, 20000) i"
    )
    await raw.execute("ANALYZE dl_jobs")

    async def plan(connection):
        rows = await connection.fetch(
            f"EXPLAIN (ANALYZE, COSTS OFF) {queue_states._STATES}", ["q", "nobody"], ["t", "t"], 60.0
        )
        return "\n".join(row[0] for row in rows)

    text = await store.run(plan)
    assert "Seq Scan on dl_jobs" not in text
    assert "ix_dl_jobs_status_queue" in text
    assert "rows=5 " in text or "rows=5.00 " in text


async def test_the_answers_to_many_triggers_cost_one_read_a_second(store, raw):
    served = ServedQueues(store)
    await raw.execute("INSERT INTO dl_queues (queue, paused) VALUES ('paused', true)")
    began = trio.current_time()
    for number in range(50):
        await enqueue(store, [NewJob(queue=f"q{number}", task="t")])
        states = await states_of(served, [NewJob(queue=queue, task="t") for queue in (f"q{number}", "paused")])
        assert states == [QueueState.NO_WORKER, QueueState.PAUSED]
    seconds = trio.current_time() - began

    async def flush(connection):
        await connection.execute("SELECT pg_stat_force_next_flush()")

    await store.run(flush)
    reads_of_workers = await raw.fetchval(
        "SELECT coalesce(seq_scan, 0) + coalesce(idx_scan, 0) FROM pg_stat_user_tables WHERE relname = 'dl_workers'"
    )
    assert 1 <= reads_of_workers <= seconds / REMEMBERED_S + 1


async def test_concurrent_requests_get_the_current_state_of_the_queue(store, raw):
    served, heard = ServedQueues(store, remembered_s=0.01, ask_within_s=20), []

    async def ask():
        heard.extend(await states_of(served, [JOB]))

    await ask()
    await raw.execute("INSERT INTO dl_queues (queue, paused) VALUES ('q', true)")
    await trio.sleep(served.remembered_s)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
    assert heard == [QueueState.NO_WORKER] + [QueueState.PAUSED] * 3


async def test_a_state_check_that_times_out_costs_no_connection(database, raw):
    async def pid(connection):
        return await connection.fetchval("SELECT pg_backend_pid()")

    async with open_database(DatabaseOptions(dsn=database.dsn, pool_size=1)) as store:
        before = await store.run(pid)
        await raw.execute("BEGIN; LOCK TABLE dl_queues")
        assert await states_of(ServedQueues(store), [JOB]) == [None]
        assert await store.run(pid) == before
        await raw.execute("ROLLBACK")


async def test_a_database_that_does_not_answer_says_nothing_of_queues():
    options = DatabaseOptions(dsn="postgresql://nobody@127.0.0.1:1/none", connect_timeout_s=1)
    async with open_database(options) as away:
        assert await states_of(ServedQueues(away), [JOB]) == [None]
