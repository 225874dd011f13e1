from __future__ import annotations

import json
import math
import os
import signal
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
import trio

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest, JobNotFound, StoreUnavailable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import EventPage, JobFilter
from dataloader.jobs.page_cursor import BY_NUMBER
from dataloader.jobs.states import Status, Step, WaitsFor
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue import control, job_logs, reads
from dataloader.store.queue.finish import aio_keep_lines
from dataloader.store.queue.leases import reap

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)
ENDED = datetime(2021, 1, 1, tzinfo=UTC)
LATER = "now() + interval '1 hour'"

FILTERS = {
    "nothing": JobFilter(),
    "queue": JobFilter(queue="common"),
    "rare queue": JobFilter(queue="rare"),
    "task": JobFilter(task="t"),
    "status": JobFilter(status=frozenset({Status.SUCCEEDED, Status.QUEUED})),
    "rare status": JobFilter(status=frozenset({Status.LOST})),
    "lock_key": JobFilter(lock_key="k7"),
    "rare root": JobFilter(root=UUID(int=7)),
    "created_from": JobFilter(created_from=LONG_AGO),
    "created_to": JobFilter(created_to=LONG_AGO + timedelta(days=365_00)),
    "finished": JobFilter(finished_from=LONG_AGO),
    "everything": JobFilter(
        queue="common",
        task="t",
        status=frozenset({Status.SUCCEEDED}),
        lock_key="k7",
        created_from=LONG_AGO,
        created_to=LONG_AGO + timedelta(days=365_00),
    ),
}


async def all_pages(store, job_filter, limit, pages=None):
    jobs, after = [], None
    while True:
        page = await reads.list_jobs(store, job_filter, limit=limit, after=after)
        assert len(page.jobs) <= limit
        jobs += page.jobs
        if pages is not None:
            pages.append(page)
        if page.next is None:
            return jobs
        after = page.next


def scans(plan):
    yield plan
    for child in plan.get("Plans", []):
        yield from scans(child)


async def explain(store, sql, values):
    async def aio_explain(connection):
        async with connection.transaction():
            await connection.execute("SET LOCAL plan_cache_mode = force_custom_plan; SET LOCAL enable_sort = on")
            text = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", *values)
        return list(scans(json.loads(text)[0]["Plan"]))

    return await store.run(aio_explain)


@pytest.mark.requirement("Q3")
async def test_a_job_is_read_with_all_its_columns(store, add_job):
    job_id = await add_job(
        args="""'{"year": 2026}'""", status="'running'", attempt="2", claimed_by="'w'", token="7", result="'[1]'"
    )
    job = await reads.get_job(store, job_id)
    assert (job.job_id, job.status, job.attempt, job.claimed_by) == (job_id, Status.RUNNING, 2, "w")
    assert (job.args, job.progress, job.result, job.waits_for) == ({"year": 2026}, {}, [1], None)
    assert job.created_at.tzinfo is not None


async def test_reading_an_unknown_job_says_so(store):
    with pytest.raises(JobNotFound):
        await reads.get_job(store, uuid7())


@pytest.mark.slow
@pytest.mark.requirement("Q1")
@pytest.mark.parametrize(
    ("stored", "seen"),
    [("[1]", [1]), ('"a"', "a"), ("7", 7), ("null", None), ("1e400", 10**400), ("1e5000", math.inf)],
    ids=["list", "text", "number", "null", "large", "beyond a float"],
)
async def test_a_foreign_row_may_have_any_json(store, add_job, stored, seen):
    job_id = await add_job(args=f"'{stored}'", progress=f"'{stored}'")
    [job] = (await reads.list_jobs(store, JobFilter())).jobs
    assert (job.job_id, job.args, job.progress) == (job_id, seen, seen)


@pytest.mark.requirement("Q1")
async def test_a_foreign_row_may_be_due_never(store, add_job):
    job_id = await add_job(available_at="'infinity'", created_at="'-infinity'")
    await add_job()
    first = await reads.list_jobs(store, JobFilter(), limit=1)
    second = await reads.list_jobs(store, JobFilter(), limit=1, after=first.next)
    assert [job.job_id for job in second.jobs] == [job_id]
    assert second.jobs[0].waits_for is WaitsFor.TIME


async def test_pages_hold_every_job_once_newest_first_also_with_equal_instants(store, raw):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, created_at) SELECT gen_random_uuid(), 'q', 't', i::text,"
        " timestamptz '2026-01-01' + (i / 5) * interval '1 microsecond' FROM generate_series(0, 24) i"
    )
    jobs = await all_pages(store, JobFilter(), 7)
    keys = [(job.created_at, job.job_id) for job in jobs]
    assert len(set(keys)) == 25
    assert keys == sorted(keys, reverse=True)


async def test_a_page_that_is_just_full_is_the_last(store, add_job):
    await add_job()
    assert (await reads.list_jobs(store, JobFilter(), limit=1)).next is None


@pytest.mark.slow
async def test_a_page_of_long_jobs_ends_early_and_they_all_come(store, raw):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, created_at, args, result)"
        " SELECT gen_random_uuid(), 'q', 't', i::text, timestamptz '2026-01-01' + i * interval '1 second',"
        " jsonb_build_object('text', repeat('a', CASE WHEN i = 3 THEN 9000000 WHEN i < 12 THEN 200000 ELSE 1 END)),"
        " jsonb_build_object('text', repeat('b', CASE WHEN i < 12 THEN 200000 ELSE 1 END))"
        " FROM generate_series(0, 39) i"
    )
    pages = []
    jobs = await all_pages(store, JobFilter(), 1_000, pages)
    assert [job.lock_key for job in jobs] == [str(i) for i in reversed(range(40))]
    assert [len(page.jobs) for page in pages] == [30, 2, 2, 2, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("column", ["args", "progress", "result"])
async def test_a_value_that_grew_in_the_database_is_truncated(store, raw, add_job, column):
    """A megabyte of numbers that PostgreSQL writes with 309 digits each has fifty as text."""
    job_id = await add_job()
    await raw.execute(
        f"UPDATE dl_jobs SET {column} = (SELECT jsonb_build_object('list', jsonb_agg('1e308'::jsonb))"
        " FROM generate_series(1, 20000)), error = repeat('e', 1000000)"
    )
    [listed] = (await reads.list_jobs(store, JobFilter())).jobs
    for job in (await reads.get_job(store, job_id), listed):
        shown = getattr(job, column)
        assert shown["bytes"] == 20_000 * 311 + len('{"list": []}') - 2
        assert shown["truncated"].startswith('{"list": [1000000000')
        assert len(shown["truncated"]) == 10_000
        assert len(job.error) == 65_536


async def test_jobs_that_arrive_between_pages_move_nothing(store, add_job):
    old = [await add_job() for _ in range(3)]
    first = await reads.list_jobs(store, JobFilter(), limit=2)
    await add_job()
    second = await reads.list_jobs(store, JobFilter(), limit=2, after=first.next)
    assert [job.job_id for job in first.jobs + second.jobs] == old[::-1]


MEANT = [
    JobFilter(queue="a"),
    JobFilter(task="a"),
    JobFilter(lock_key="a"),
    JobFilter(status=frozenset({Status.FAILED, Status.LOST})),
    JobFilter(created_to=LONG_AGO + timedelta(microseconds=1)),
    JobFilter(finished_from=ENDED, finished_to=ENDED + timedelta(microseconds=1)),
    JobFilter(queue="a", finished_to=ENDED + timedelta(microseconds=1), status=frozenset(Status)),
    JobFilter(queue="a", task="a", lock_key="a", status=frozenset({Status.FAILED}), created_from=LONG_AGO),
]


async def test_a_filter_finds_what_it_means_and_nothing_else(store, add_job):
    then = {"created_at": "'2020-01-01Z'", "finished_at": f"'{ENDED}'"}
    wanted = await add_job(queue="'a'", task="'a'", lock_key="'a'", status="'failed'", **then)
    await add_job(created_at="'2020-01-01 00:00:00.000001Z'")
    await add_job(status="'succeeded'", finished_at=f"timestamptz '{ENDED}' + interval '1 microsecond'")
    await add_job(finished_at=f"'{ENDED}'")  # of a service that does not keep the former status
    for job_filter in MEANT:
        assert [job.job_id for job in (await reads.list_jobs(store, job_filter)).jobs] == [wanted], job_filter


async def test_no_status_at_all_means_no_job(store, add_job):
    await add_job()
    assert (await reads.list_jobs(store, JobFilter(status=frozenset()))).jobs == []


async def test_the_bounds_of_a_time_filter_are_from_included_to_excluded(store, add_job):
    job_id = await add_job(created_at="'2020-01-01Z'")
    [job] = (await reads.list_jobs(store, JobFilter(created_from=LONG_AGO))).jobs
    assert job.job_id == job_id
    assert (await reads.list_jobs(store, JobFilter(created_to=LONG_AGO))).jobs == []


async def test_a_value_is_never_read_as_sql(store, add_job):
    await add_job()
    assert (await reads.list_jobs(store, JobFilter(queue="q' OR true --"))).jobs == []


@pytest.mark.parametrize("values", [{"queue": "a\x00"}, {"task": "\ud800"}, {"created_from": datetime(2026, 1, 1)}])  # noqa: DTZ001
def test_a_filter_that_no_row_can_match_is_refused(values):
    with pytest.raises(BadRequest, match=next(iter(values))):
        JobFilter(**values)


@pytest.mark.parametrize("limit", [0, -1, 1_001])
async def test_a_limit_out_of_bounds_is_refused(store, limit):
    with pytest.raises(BadRequest, match="limit"):
        await reads.list_jobs(store, JobFilter(), limit=limit)


@pytest.mark.slow
async def test_no_filter_scans_the_table_and_a_rare_queue_or_status_is_found_at_once(store, raw):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, created_at, finished_at, root_id)"
        " SELECT gen_random_uuid(), CASE WHEN i = 40 THEN 'rare' ELSE 'common' END, 't', 'k' || i % 50,"
        " (CASE WHEN i = 40 THEN 'lost' WHEN i % 10 = 0 THEN 'queued' ELSE 'succeeded' END)::dl_status,"
        " timestamptz '2026-01-01' + i * interval '1 second', CASE WHEN i % 10 > 0 THEN now() END,"
        f" CASE WHEN i % 2 = 0 THEN CASE WHEN i % 5000 = 0 THEN '{UUID(int=7)}'::uuid ELSE gen_random_uuid() END END"
        " FROM generate_series(1, 20000) i"
    )
    await raw.execute("ANALYZE dl_jobs")
    for name, job_filter in FILTERS.items():
        for after in (None, (datetime(2026, 1, 1, 3, tzinfo=UTC), UUID(int=0))):
            plan = await explain(store, *reads.list_statement(reads._SELECT_JOB, job_filter, 51, after))
            assert not [node for node in plan if node["Node Type"] == "Seq Scan"], (name, plan)
            if name.startswith("rare"):
                visited = sum(node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in plan)
                assert visited < 100, (name, plan)
                assert name != "rare root" or "ix_dl_jobs_root" in {node.get("Index Name") for node in plan}, plan
            elif name == "lock_key":
                assert "ix_dl_jobs_ended_keys" in {node.get("Index Name") for node in plan}
            elif job_filter.lock_key is None:
                assert not [node for node in plan if node["Node Type"] == "Sort"], (name, plan)
        for _ in range(8):
            await reads.list_jobs(store, job_filter)
    await raw.execute("SELECT pg_stat_force_next_flush()")
    await store.run(aio_flush)
    await raw.execute("SELECT pg_stat_clear_snapshot()")
    scanned = await raw.fetchval("SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'dl_jobs'")
    # ANALYZE does not count, nor does a planner that probes the ends of an index.
    assert scanned == 0


@pytest.mark.slow
async def test_jobs_that_ended_in_a_short_span_are_found_by_the_index_on_it(store, raw):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, created_at, finished_at)"
        " SELECT gen_random_uuid(), 'q', 't', 'k', (CASE WHEN i % 7 = 0 THEN 'failed' ELSE 'succeeded' END)::dl_status,"
        " timestamptz '2026-01-01' + hashint4(i) % 1000 * interval '1 minute',"
        " timestamptz '2026-02-01' + i * interval '1 minute' FROM generate_series(1, 20000) i"
    )
    await raw.execute("ANALYZE dl_jobs")
    begin = datetime(2026, 2, 2, tzinfo=UTC)
    for statuses, found in ((None, 30), (frozenset({Status.FAILED}), 4)):
        span = JobFilter(status=statuses, finished_from=begin, finished_to=begin + timedelta(minutes=30))
        plan = await explain(store, *reads.list_statement(reads._SELECT_JOB, span, 51, None))
        assert "ix_dl_jobs_finished" in {node.get("Index Name") for node in plan}
        assert sum(node["Actual Rows"] + node.get("Rows Removed by Filter", 0) for node in plan) <= 4 * found + 10, plan
        assert len((await reads.list_jobs(store, span)).jobs) in {found, found + 1}


async def aio_flush(connection):
    await connection.execute("SELECT pg_stat_force_next_flush()")


@pytest.mark.requirement("Q11")
async def test_a_journal_is_read_in_order_and_in_parts(store, raw, add_job):
    job_id, other = await add_job(), await add_job()
    await raw.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, payload) SELECT j, 'q', 'log', to_jsonb(i)"
        " FROM generate_series(1, 5) i, unnest($1::uuid[]) j ORDER BY i",
        [job_id, other],
    )
    page = await reads.list_events(store, job_id, limit=3)
    first = page.events
    second = (await reads.list_events(store, job_id, after=page.next)).events
    assert [event.payload for event in first + second] == [1, 2, 3, 4, 5]
    assert (await reads.list_events(store, job_id, after=first[-1].event_id)).events == second
    assert {event.job_id for event in first + second} == {job_id}
    assert await reads.list_events(store, job_id, after=second[-1].event_id) == EventPage([], None)


@pytest.mark.requirement("Q11", "E11")
async def test_long_events_of_another_service_are_truncated_and_fewer_fill_a_page(store, raw, add_job):
    job_id = await add_job()
    # As jsonb, 1e100000 is nine bytes; as text, a hundred thousand. The first and the last are longer than any of ours.
    await raw.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, payload) SELECT $1, 'q', 'log', payload::jsonb"
        " FROM (VALUES ('[1e100000, 1e100000]'), ('1e100000'), ('1e100000'), ('1e100000'), ('[1e100000, 1e100000]'))"
        " AS foreign_rows (payload)",
        job_id,
    )
    most = 250_000
    begin, *_, end = events = (await reads.list_events(store, job_id, most_text=most)).events
    assert [event.payload for event in events[1:]] == [float("inf")] * 2
    assert (begin.payload.keys(), begin.payload["bytes"]) == ({"truncated", "bytes"}, 200_006)
    rest = (await reads.list_events(store, job_id, after=end.event_id, most_text=most)).events
    assert [len(str(event.payload)) > 1_000 for event in rest] == [False, True]
    lines = await job_logs.list_log(store, job_id, most_text=most)
    assert (len(lines.lines), lines.next) == (3, BY_NUMBER.text(end.event_id))
    assert lines.lines[0].fields == {"payload": begin.payload}
    assert len((await job_logs.list_log(store, job_id, after=lines.next, most_text=most)).lines) == 2


@pytest.mark.requirement("E11")
async def test_a_log_has_where_each_attempt_began_and_how_it_ended_between_its_lines(
    store, raw, add_job, start_worker, journal_of
):
    job_id = await add_job(max_attempts="4", lock_key="'k'")
    parked = await add_job(lock_key="'k'")
    worker = start_worker("w")

    async def attempt(step=None, **ending):
        [job] = await worker.claim()
        await worker.store.write(aio_keep_lines, [(job_id, job.token, datetime.now(UTC), '{"message": "trying"}')])
        if step is None:
            worker.locks.forget(job.token)
            await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1", job_id)
            await reap(store, 10)
        else:
            await worker.end(job, step, **ending)
        await raw.execute("UPDATE dl_jobs SET waits_for = NULL, available_at = now() WHERE job_id = $1", job_id)

    await attempt(Step.RETRY, error="RuntimeError: boom\n\nTraceback", delay_s=3.25)
    await attempt()
    await attempt(Step.SNOOZE, delay_s=60.0)
    await attempt(Step.RETURN)
    await attempt(Step.CLOSE)
    await attempt(Step.FAIL, error="gave up")
    await control.retry(store, job_id, Operator("me"))
    await attempt(Step.SUCCEED, result="{}")
    lines = (await job_logs.list_log(store, job_id)).lines
    assert [(line.level, line.message) for line in lines if line.kind != "log"] == [
        ("info", "attempt 1 began"),
        ("error", "attempt 1 failed"),
        ("info", "attempt 2 began"),
        ("error", "attempt 2 ended: worker lost"),
        ("info", "attempt 3 began"),
        ("info", "the attempt was snoozed"),
        ("info", "attempt 3 began"),
        ("info", "the attempt was released"),
        ("info", "attempt 3 began"),
        ("info", "the attempt was stopped at the end of a work period"),
        ("info", "attempt 3 began"),
        ("error", "attempt 3 failed for good"),
        ("info", "an operator queued the job again"),
        ("info", "attempt 1 began"),
        ("info", "the job succeeded"),
    ]
    assert [line.kind for line in lines[:4]] == ["picked", "log", "requeue", "picked"]
    assert lines[0].fields == {"attempt": 1, "worker": "w"}
    assert lines[2].fields == {
        "attempt": 1,
        "reason": "retry",
        "error": "RuntimeError: boom\n\nTraceback",
        "delay_s": 3.25,
    }
    serious = (await job_logs.list_log(store, job_id, level="warning")).lines
    assert [line.kind for line in serious] == ["requeue", "requeue", "failed"]
    assert len((await job_logs.list_log(store, job_id, load="x")).lines) == 15
    assert "requeue: lock_key" in await journal_of(parked)
    assert (await job_logs.list_log(store, parked)).lines == []


async def test_the_journal_of_an_unknown_job_is_not_just_empty(store):
    with pytest.raises(JobNotFound):
        await reads.list_events(store, uuid7())


@pytest.mark.requirement("Q5")
async def test_queues_count_open_jobs_by_reason_and_never_finished_ones(store, raw, add_job):
    await add_job(queue="'a'", available_at="timestamptz '2026-01-01Z'")
    await add_job(queue="'a'")
    await add_job(queue="'a'", available_at=LATER)
    await add_job(queue="'a'", waits_for="'lock'", available_at=LATER)
    await add_job(queue="'a'", task="'unknown'")
    await add_job(queue="'a'", status="'running'")
    for status in ("succeeded", "failed", "canceled", "lost"):
        await add_job(queue="'done'", status=f"'{status}'")
    await add_job(queue="'b'", status="'running'")
    await raw.execute("INSERT INTO dl_queues (queue, paused) VALUES ('b', true), ('empty', true), ('resumed', false)")
    await raw.execute(
        "INSERT INTO dl_workers (worker, host, pid, version, queues, tasks, seen_at) VALUES"
        " ('w1', 'h', 1, '1', '{\"a\": 2, \"idle\": 5}', '{t}', now()),"
        " ('w2', 'h', 2, '1', '{\"a\": 1}', '{t}', now()),"
        " ('dead', 'h', 3, '1', '{\"gone\": 1}', NULL, now() - interval '2 min')"
    )
    a, b, empty, idle = await reads.list_queues(store)
    assert (a.queue, a.ready, a.delayed, a.blocked, a.unknown_task, a.running, a.paused) == ("a", 2, 1, 1, 1, 1, False)
    assert a.oldest_ready_at == datetime(2026, 1, 1, tzinfo=UTC)
    assert (b.queue, b.running, b.paused, b.oldest_ready_at) == ("b", 1, True, None)
    assert (empty.queue, empty.paused, empty.ready + empty.running) == ("empty", True, 0)
    assert [(q.workers, q.slots) for q in (a, b, empty, idle)] == [(2, 3), (0, 0), (0, 0), (1, 5)]
    assert (idle.queue, idle.paused, idle.ready + idle.running, idle.oldest_ready_at) == ("idle", False, 0, None)


async def test_workers_are_those_seen_lately(store, raw):
    await raw.execute(
        "INSERT INTO dl_workers (worker, host, pid, version, queues, seen_at) VALUES"
        " ('new', 'h', 1, '1', '{\"q\": 2}', now() - interval '5 s'),"
        " ('old', 'h', 2, '1', '{}', now() - interval '61 s')"
    )
    [worker] = await reads.list_workers(store)
    assert (worker.worker, worker.queues) == ("new", {"q": 2})


async def test_the_operators_log_is_read_latest_first_in_parts(store, raw):
    await raw.execute(
        "INSERT INTO dl_audit (actor, action, detail) SELECT 'a', 'x' || i, '{}' FROM generate_series(1, 3) i"
    )
    first = await reads.list_audit(store, limit=2)
    rest = await reads.list_audit(store, limit=2, after=first.next)
    assert [record.action for record in first.audit + rest.audit] == ["x3", "x2", "x1"]
    assert rest.next is None
    assert await reads.list_audit(store, limit=2, after=first.audit[-1].audit_id) == rest


@pytest.mark.slow
@pytest.mark.requirement("Q5")
async def test_ping_answers_or_reports_an_unreachable_database_in_time(database):
    options = DatabaseOptions(dsn=database.dsn, connect_timeout_s=1, pool_size=1)
    async with open_database(options) as store:
        await reads.ping(store, 5)

        async def aio_pid(connection):
            return await connection.fetchval("SELECT pg_backend_pid()")

        backend = await store.run(aio_pid)
        os.kill(backend, signal.SIGSTOP)
        try:
            started_at = trio.current_time()
            with pytest.raises(StoreUnavailable):
                await reads.ping(store, 0.2)
            assert trio.current_time() - started_at < 15
        finally:
            os.kill(backend, signal.SIGCONT)
        await reads.ping(store, 5)
