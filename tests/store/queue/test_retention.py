from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import trio
from conditions import patience_s

from dataloader.jobs.errors import JobNotFound
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.states import FINAL, Status
from dataloader.store.queue import control, reads, retention
from dataloader.store.queue.retention import prune
from dataloader.store.queue.table_rules import ALWAYS, BY_DAYS, prune_tables

OLD = "now() - interval '8 days'"
RECENT = "now() - interval '6 days'"
WEEK = dict.fromkeys(FINAL, 7)


async def left(store):
    return {job.job_id for job in (await reads.list_jobs(store, JobFilter())).jobs}


@pytest.mark.requirement("R4")
async def test_old_ended_jobs_go_with_their_journals_and_recent_ones_stay(store, raw, add_job):
    for status in FINAL:
        await add_job(status=f"'{status}'", finished_at=OLD)
    recent = {await add_job(status=f"'{status}'", finished_at=RECENT) for status in FINAL}
    await raw.execute("INSERT INTO dl_job_events (job_id, queue, kind) SELECT job_id, queue, 'done' FROM dl_jobs")
    assert await prune(store, WEEK) == 4
    assert await left(store) == recent
    assert {row["job_id"] for row in await raw.fetch("SELECT job_id FROM dl_job_events")} == recent
    assert await prune(store, WEEK) == 0


@pytest.mark.requirement("R4")
async def test_each_status_has_its_own_time_and_zero_keeps(store, add_job):
    await add_job(status="'succeeded'", finished_at=RECENT)
    kept = {await add_job(status=f"'{status}'", finished_at=OLD) for status in ("failed", "canceled", "lost")}
    assert await prune(store, {Status.SUCCEEDED: 1, Status.FAILED: 30, Status.CANCELED: 0}) == 1
    assert await left(store) == kept


async def test_jobs_that_have_not_ended_are_never_deleted(store, add_job):
    kept = {await add_job(status=f"'{status}'", finished_at=OLD, created_at=OLD) for status in ("queued", "running")}
    assert await prune(store, WEEK) == 0
    assert await left(store) == kept
    with pytest.raises(ValueError, match="queued is not final"):
        await prune(store, {Status.QUEUED: 1})


async def test_jobs_go_in_batches_oldest_first(store, add_job):
    young = await add_job(status="'failed'", finished_at=OLD)
    for _ in range(4):
        await add_job(status="'failed'", finished_at="now() - interval '9 days'")
    assert await prune(store, WEEK, batch=4) == 4
    assert await left(store) == {young}
    assert await prune(store, WEEK, batch=4) == 1


async def test_a_locked_row_is_skipped(store, raw, add_job):
    held = await add_job(status="'failed'", finished_at="now() - interval '9 days'")
    await add_job(status="'failed'", finished_at=OLD)
    await raw.execute("BEGIN")
    await raw.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", held)
    with trio.fail_after(patience_s()):
        assert await prune(store, WEEK) == 1
    await raw.execute("COMMIT")
    assert await left(store) == {held}


async def test_jobs_that_a_waiting_one_runs_after_are_passed_by_one_look_each(store, raw):
    waited_for, old = 2_000, 1_000
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at)"
        f" SELECT gen_random_uuid(), 'q', 't', '', 'succeeded', {OLD} + make_interval(secs => i)"
        f" FROM generate_series(1, {waited_for + old}) AS i"
    )
    await raw.execute(
        "WITH waiting AS (INSERT INTO dl_jobs (job_id, queue, task, lock_key, waits_for)"
        " VALUES (gen_random_uuid(), 'q', 't', '', 'lock') RETURNING job_id)"
        " INSERT INTO dl_job_after (job_id, after_id) SELECT w.job_id, j.job_id"
        f" FROM waiting w, (SELECT job_id FROM dl_jobs ORDER BY finished_at LIMIT {waited_for}) AS j"
    )
    await raw.execute("ANALYZE dl_jobs, dl_job_after")

    async def rows_looked_at(connection):
        explained = await connection.fetchval(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {retention._DELETE_JOBS}", Status.SUCCEEDED, 7, old
        )
        return _rows(json.loads(explained)[0]["Plan"])

    assert await store.run(rows_looked_at) < 10 * (waited_for + old)
    assert await prune(store, WEEK) == 0
    assert len(await raw.fetch("SELECT FROM dl_jobs WHERE status = 'succeeded'")) == waited_for


def _rows(node):
    """Return the number of rows that a plan's nodes have read."""
    looked = node["Actual Rows"] + sum(number for name, number in node.items() if name.startswith("Rows Removed"))
    return looked * node["Actual Loops"] + sum(map(_rows, node.get("Plans", ())))


@pytest.mark.requirement("R4")
async def test_a_retry_and_a_deletion_that_race_leave_a_queued_job_or_none(store, add_job):
    jobs = [await add_job(status="'failed'", finished_at=OLD) for _ in range(30)]
    retried = set()

    async def retry_all():
        for job_id in reversed(jobs):
            try:
                retried.add((await control.retry(store, job_id, control.Operator("a"))).job_id)
            except JobNotFound:
                return

    async with trio.open_nursery() as nursery:
        nursery.start_soon(retry_all)
        while await prune(store, WEEK, batch=2):
            pass
    assert await left(store) == retried


async def test_workers_that_are_long_gone_are_forgotten(store, raw):
    await raw.execute(
        "INSERT INTO dl_workers (worker, host, pid, version, queues, seen_at) VALUES"
        " ('gone', 'h', 1, '1', '{}', now() - interval '25 h'), ('here', 'h', 2, '1', '{}', now() - interval '23 h')"
    )
    assert await prune_tables(store, {}) == 1
    assert [row["worker"] for row in await raw.fetch("SELECT worker FROM dl_workers")] == ["here"]


@pytest.mark.slow
async def test_old_jobs_are_found_without_reading_the_others(store, raw):
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at)"
        " SELECT gen_random_uuid(), 'q', 't', 'k', 'succeeded', now() - i * interval '1 minute'"
        " FROM generate_series(1, 20000) i"
    )
    await raw.execute("ANALYZE dl_jobs")
    before = await raw.fetchrow("SELECT seq_scan, idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'dl_jobs'")
    assert await prune(store, WEEK, batch=100) == 100
    await store.run(aio_flush)
    await raw.execute("SELECT pg_stat_clear_snapshot()")
    after = await raw.fetchrow("SELECT seq_scan, idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'dl_jobs'")
    assert after["seq_scan"] == before["seq_scan"]
    assert 200 <= after["idx_tup_fetch"] - before["idx_tup_fetch"] < 1_000


async def aio_flush(connection):
    await connection.execute("SELECT pg_stat_force_next_flush()")


async def test_a_run_whose_failures_are_not_solved_stays_with_them(store, raw, add_job):
    job_id = await add_job(status="'succeeded'", finished_at="now() - interval '9 days'")
    await raw.execute("INSERT INTO dl_etl_runs (run_id, name, kind) VALUES ($1, 'items', 'load')", job_id)
    await raw.execute(
        "INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error)"
        " VALUES ($1, 'items', 's', 'record', 'k', 'e')",
        job_id,
    )
    assert await prune(store, {Status.SUCCEEDED: 7}) == 0
    await raw.execute("UPDATE dl_etl_failures SET solved_at = now()")
    assert await prune(store, {Status.SUCCEEDED: 7}) == 1


RULES = (Path(__file__).parents[3] / "docs" / "retention.md").read_text().partition("## Retention")[2]


@pytest.mark.requirement("R4", "S6")
async def test_each_table_of_ours_has_a_rule_or_a_reason(raw):
    rows = re.findall(r"^\| (`dl_.*?) \| (.+?) \| (.*?) ?\|$", RULES.partition("\n## ")[0], re.MULTILINE)
    told = {table: (rule, setting) for tables, rule, setting in rows for table in re.findall(r"`(\w+)`", tables)}
    there = await raw.fetch(
        "SELECT table_name AS name FROM information_schema.tables"
        " WHERE table_schema = current_schema() AND table_name LIKE 'dl\\_%' AND table_type = 'BASE TABLE'"
    )
    assert {row["name"] for row in there} == told.keys()
    assert all(rule for rule, _ in told.values())
    # Old rows of live processes are deleted by a scan over the processes.
    elsewhere = {"dl_jobs", "dl_process_tasks", "dl_process_events"}
    by_setting = {table for table, (_, setting) in told.items() if setting} - elsewhere
    assert by_setting == BY_DAYS.keys()
    assert all("none" not in told[table][0] for table in (*BY_DAYS, *ALWAYS))


AGED = """
INSERT INTO dl_audit (ts, actor, action) SELECT now() - make_interval(days => 11 - d), 'a', 'x'
  FROM generate_series(1, 10) AS d;
INSERT INTO dl_schedule_events (at, name, kind) SELECT now() - make_interval(days => 11 - d), 's', 'changed'
  FROM generate_series(1, 10) AS d;
INSERT INTO dl_errors (at, job_id, task, queue, attempt, status, error_group, error)
  SELECT now() - make_interval(days => 11 - d), gen_random_uuid(), 't', 'q', 1, 'failed', 1, 'e'
  FROM generate_series(1, 10) AS d;
INSERT INTO dl_run_stats SELECT date_trunc('hour', now()) - make_interval(days => 11 - d), 'q', 't', 'failed', 1, 1, 1
  FROM generate_series(1, 10) AS d;
INSERT INTO dl_sources (source) VALUES ('s');
INSERT INTO dl_source_calls (source, n, at) SELECT 's', d, now() - make_interval(days => 11 - d)
  FROM generate_series(1, 10) AS d;
"""


@pytest.mark.requirement("R4", "S6")
async def test_old_rows_of_other_tables_go_in_batches_and_what_has_no_days_stays(store, raw):
    await raw.execute(AGED)
    days = {"dl_audit": 5, "dl_errors": 5, "dl_schedule_events": 5, "dl_run_stats": 5}
    assert await prune_tables(store, days, batch=2) == 4 * 2 + 3
    while await prune_tables(store, days, batch=2):
        pass
    left = {
        table: await raw.fetchval(f"SELECT count(*) FROM {table}")
        for table in (*days, "dl_run_stats_days", "dl_source_calls")
    }
    # Rows of exactly five days ago are older than that by now; their day has later hours.
    assert left == dict.fromkeys(days, 4) | {"dl_run_stats_days": 5, "dl_source_calls": 7}
    assert await prune_tables(store, {"dl_audit": 0}) == 0
