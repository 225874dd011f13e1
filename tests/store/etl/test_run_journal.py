"""Runs of loads: recorded, continued after a crash, and fenced by the job's token (E6, E10, E12)."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

import attrs
import pytest
from etl_loads import open_load

from dataloader.jobs.errors import LeaseLost
from dataloader.jobs.states import Step
from dataloader.store.etl.load_state import LoadState, aio_load_state, window_state
from dataloader.store.etl.merge import Merge
from dataloader.store.etl.run_journal import (
    Failure,
    aio_begin_run,
    aio_end_run,
    aio_next_failures,
    aio_note_failures,
    aio_note_task,
    aio_open_failures,
    staging_name,
)
from dataloader.store.etl.segment_commit import SegmentCommit, aio_commit_segment

DAY = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
async def start(start_worker, add_job):
    """Return a function that claims a new job."""
    worker = start_worker()

    async def start():
        await add_job()
        [job] = await worker.claim()
        return job

    start.worker = worker
    return start


@pytest.fixture
def begin(transactions):
    """Return a function that begins a job's run of loads."""

    async def begin(job, *tasks, token=None):
        named = [("", task) for task in tasks or ("rates",)]
        return await transactions.run(aio_begin_run, job.job_id, token or job.token, "run", "load", named)

    return begin


@pytest.mark.requirement("E10")
async def test_tables_left_by_killed_runs_are_dropped_when_the_next_run_begins(start, begin, raw):
    dead, alive, job = await start(), await start(), await start()
    for one in (dead, alive):
        await raw.execute(f"CREATE TABLE {staging_name(one.job_id, one.token, 0)} ()")
    await raw.execute(f"CREATE TABLE {staging_name(alive.job_id, alive.token - 1, 0)} ()")
    await raw.execute(f"CREATE TABLE {staging_name(uuid4(), 7, 1)} (); CREATE TABLE dl_stage_of_mine ()")
    await start.worker.end(dead, Step.RETURN)
    await begin(job)
    stages = await raw.fetch("SELECT relname FROM pg_class WHERE relname LIKE 'dl_stage%' ORDER BY relname")
    assert {row["relname"] for row in stages} == {staging_name(alive.job_id, alive.token, 0), "dl_stage_of_mine"}


@pytest.mark.requirement("E12")
async def test_succeeded_tasks_keep_their_status_when_a_run_is_continued(start, begin, transactions):
    job = await start()
    first = await begin(job, "rates", "names")
    assert first.statuses == {"rates": "waiting", "names": "waiting"}
    await transactions.run(aio_note_task, job.job_id, job.token, "rates", "succeeded", {"rows": 7})
    await transactions.run(aio_note_task, job.job_id, job.token, "names", "running", {})
    again = await begin(job, "rates", "names")
    assert again.statuses == {"rates": "succeeded", "names": "waiting"}
    assert again.summaries["rates"] == {"rows": 7}
    assert again.started_at == first.started_at


@pytest.mark.requirement("E6")
async def test_a_job_that_has_another_token_by_now_can_begin_and_note_nothing(start, begin, transactions, raw):
    job = await start()
    with pytest.raises(LeaseLost):
        await begin(job, token=job.token + 1)
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_runs") == 0
    await begin(job)
    await raw.execute("UPDATE dl_jobs SET token = token + 100 WHERE job_id = $1", job.job_id)
    stale = job.job_id, job.token
    for operation, *args in ((aio_note_task, "rates", "succeeded", {}), (aio_end_run, "succeeded", {})):
        with pytest.raises(LeaseLost):
            await transactions.run(operation, *stale, *args)
    assert await raw.fetchval("SELECT status FROM dl_etl_runs") == "running"
    assert await raw.fetchval("SELECT status FROM dl_etl_tasks") == "waiting"


@pytest.fixture
async def staged(transactions, raw):
    """Return a function that stages one row, and returns its merge."""
    load = await open_load(transactions, raw, "id int PRIMARY KEY, a text", key="id")

    async def staged(number):
        rows = await load.stage([(number, "a")])
        return Merge(table=load.table, segment=load.segment, columns=load.columns, key=load.key, rows=rows)

    return staged


def commit_of(job, merge, *, segment="day 1", upto=DAY, token=None):
    return SegmentCommit(
        run_id=job.job_id,
        token=token or job.token,
        task="rates",
        segment=segment,
        merges=[merge],
        state=None if upto is None else window_state(upto),
    )


@pytest.mark.requirement("E10")
async def test_rows_record_and_state_of_a_segment_are_committed_together(
    start, begin, transactions, staged, raw, store
):
    job = await start()
    await begin(job)
    counts = await transactions.run(aio_commit_segment, commit_of(job, await staged(1)))
    assert counts["inserted"] == 1
    assert await raw.fetchval("SELECT count(*) FROM target") == 1
    assert (await begin(job)).segments == {"rates": {"day 1": {"inserted": 1}}}
    assert await store.run(aio_load_state, "rates") == LoadState(window_state(DAY), job.job_id)


@pytest.mark.slow
@pytest.mark.requirement("E10", "Q8")
@pytest.mark.parametrize("how", ["another's token", "not running", "gone"])
async def test_a_stale_token_commits_nothing_of_a_segment(start, begin, transactions, staged, raw, store, how):
    job = await start()
    await begin(job)
    merge = await staged(1)
    if how == "another's token":
        await raw.execute("UPDATE dl_jobs SET token = token + 1 WHERE job_id = $1", job.job_id)
    elif how == "not running":
        await start.worker.end(job, Step.RETURN)
    else:
        await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", job.job_id)
    commit = commit_of(job, merge, segment=None if how == "gone" else "day 1", upto=DAY)
    with pytest.raises(LeaseLost, match=f"another worker has job {job.job_id}, or another run holds the load"):
        await transactions.run(aio_commit_segment, commit)
    assert await raw.fetchval("SELECT count(*) FROM target") == 0
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_segments") == 0
    assert await store.run(aio_load_state, "rates") is None


@pytest.mark.requirement("E4")
async def test_rows_of_a_cancelled_run_are_written_without_a_segment(start, begin, transactions, staged, raw):
    job = await start()
    await begin(job)
    await transactions.run(aio_commit_segment, commit_of(job, await staged(1), segment=None, upto=None))
    assert await raw.fetchval("SELECT count(*) FROM target") == 1
    assert (await begin(job)).segments == {"rates": {}}


@pytest.mark.requirement("E6")
async def test_a_window_state_only_moves_forward(start, begin, transactions, staged, store):
    job, other = await start(), await start()
    await begin(job)
    await transactions.run(aio_commit_segment, commit_of(job, await staged(1)))
    await transactions.run(aio_note_task, job.job_id, job.token, "rates", "succeeded", {})
    await begin(other)
    earlier = commit_of(other, await staged(2), upto=datetime(2025, 1, 1, tzinfo=UTC), segment=None)
    await transactions.run(aio_commit_segment, earlier)
    assert await store.run(aio_load_state, "rates") == LoadState(window_state(DAY), job.job_id)


def failure(number, **fields):
    request = {"of": "list", "endpoint": f"/{number}"}
    known = {"load": "rates", "segment": "day 1", "phase": "request", "key": f"{number}", "error": "no"}
    return Failure(**known | {"requests": [request]} | fields)


@pytest.mark.requirement("E10")
async def test_failures_are_kept_listed_and_solved(start, begin, store, transactions, loads):
    job, other = await start(), await start()
    await begin(other)
    await transactions.run(aio_note_task, other.job_id, other.token, "rates", "interrupted", {})
    await begin(job)
    noted = [failure(1), failure(2, phase="record", sample="2"), failure(3, load="names")]
    last = failure(4)
    await transactions.run(aio_note_failures, job.job_id, job.token, noted)
    await transactions.run(aio_note_failures, job.job_id, job.token, [last])
    found = (await loads.failures_of_run(job.job_id)).failures
    assert [(one.key, one.phase, one.load, one.resolved_at) for one in found] == [
        ("1", "request", "rates", None),
        ("2", "record", "rates", None),
        ("3", "request", "names", None),
        ("4", "request", "rates", None),
    ]
    page = await loads.failures_of_run(job.job_id, after=found[0].failure_id, limit=2)
    assert [one.key for one in page.failures] == ["2", "3"]
    first, second, third, fourth = (one.failure_id for one in found)
    opened = await store.run(aio_next_failures, "rates", other.job_id, 0, 2)
    assert list(opened) == [first, second]
    assert opened[first] == [{"of": "list", "endpoint": "/1", "segment": found[0].segment}]
    assert list(await store.run(aio_next_failures, "rates", other.job_id, second, 2)) == [fourth]
    assert list(await store.run(aio_next_failures, "rates", job.job_id, 0, 2)) == []
    await transactions.run(aio_note_task, job.job_id, job.token, "rates", "succeeded", {})
    await begin(other)
    # Failures that the other run tries again: an earlier attempt of it has recorded one once more, and a later one as
    # well.
    retried = "failures from 1"
    of_it, of_another = ([{"of": "list", "tried_by": name}] for name in (retried, "failures from 2"))
    failed_again = [
        failure(5, requests=of_it),
        failure(6, requests=of_another),
        failure(7, requests=of_it),
        failure(8, requests=[]),
    ]
    for again in failed_again:
        await transactions.run(aio_note_failures, other.job_id, other.token, [again])
    *_, fifth, _, _, eighth = (one.failure_id for one in (await loads.failures("rates")).failures)
    commit = commit_of(other, None, segment=retried, upto=None)
    commit = attrs.evolve(commit, merges=[], resolves=[first], again_until=fifth)
    await transactions.run(aio_commit_segment, commit)
    assert [one.key for one in (await loads.failures("rates")).failures] == ["2", "4", "6", "7", "8"]
    assert list(await store.run(aio_open_failures, "rates", [first, second, third])) == [second]
    # A whole segment that failed cannot be retried alone.
    assert eighth not in await store.run(aio_next_failures, "rates", uuid4(), 0, 10)


@pytest.mark.requirement("E10", "Q10")
async def test_a_stale_token_notes_no_failure(start, begin, transactions, loads):
    job = await start()
    await begin(job)
    await transactions.run(aio_note_failures, job.job_id, job.token, [failure(1)])
    noted = await loads.failures_of_run(job.job_id)
    with pytest.raises(LeaseLost):
        await transactions.run(aio_note_failures, job.job_id, job.token + 1, [failure(2)])
    assert [one.key for one in noted.failures] == ["1"]
    assert await loads.failures_of_run(job.job_id) == noted


@pytest.mark.requirement("E10")
async def test_a_run_goes_with_its_job(start, begin, raw, transactions):
    job = await start()
    await begin(job)
    await transactions.run(aio_note_failures, job.job_id, job.token, [failure(1)])
    await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", job.job_id)
    for table in ("dl_etl_runs", "dl_etl_tasks", "dl_etl_failures"):
        assert await raw.fetchval(f"SELECT count(*) FROM {table}") == 0
