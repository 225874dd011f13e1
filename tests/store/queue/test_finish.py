"""Ends of runs (Q9, Q12): every outcome, fenced by its token, in batches that can be sent again."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
import trio
from attempts import USES_ATTEMPT
from conditions import patience_s
from databases import raw_connection

from dataloader.actors.job_runs import Runs
from dataloader.actors.outage import Outage
from dataloader.actors.recorder import UNSTORABLE, Recorder
from dataloader.actors.run_sums import RunSums
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import StoreError
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import TRANSITIONS, Status, Step
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Session
from dataloader.store.queue.finish import (
    MAX_REFUNDS,
    _aio_write_outcomes,
    aio_finish,
    aio_keep_lines,
    aio_show_progress,
)
from dataloader.store.queue.leases import reap

STEPS = [Step.SUCCEED, Step.FAIL, Step.RETRY, Step.SNOOZE, Step.RETURN, Step.CLOSE, Step.CANCEL]
EVENTS = {
    Step.SUCCEED: "done",
    Step.FAIL: "failed: fail",
    Step.RETRY: "requeue: retry",
    Step.SNOOZE: "requeue: snooze",
    Step.RETURN: "requeue: return",
    Step.CLOSE: "requeue: period_end",
    Step.CANCEL: "canceled: cancel",
}


def all_rows(raw):
    return raw.fetch("SELECT j::text FROM dl_jobs j ORDER BY job_id")


def all_events(raw):
    return raw.fetch("SELECT e::text FROM dl_job_events e ORDER BY event_id")


@pytest.fixture
def claim_one(start_worker, add_job):
    """Return a function that adds a job with the given columns, and lets a worker claim it."""

    async def claim_one(**columns):
        job_id = await add_job(**columns)
        worker = start_worker()
        [job] = [job for job in await worker.claim() if job.job_id == job_id]
        return worker, job

    return claim_one


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("step", STEPS)
async def test_every_outcome_follows_the_table_of_transitions(claim_one, row_of, journal_of, step):
    worker, job = await claim_one()
    finished = await worker.end(job, step, error=None if step is Step.SUCCEED else "why", result='{"n": 1}')
    row = await row_of(job.job_id)
    status = TRANSITIONS[Status.RUNNING, step]
    assert row["status"] == status
    assert (finished.written, finished.void) == ({job.token: status}, [])
    assert row["attempt"] == (1 if USES_ATTEMPT[step] else 0)
    assert row["refunds"] == 1 - row["attempt"]
    assert row["error"] == (None if step is Step.SUCCEED else "why")
    assert (row["claimed_by"], row["lease_expires_at"], row["waits_for"]) == (None, None, None)
    assert (row["finished_at"] is not None) == status.is_final
    assert await journal_of(job.job_id) == ["picked", EVENTS[step]]


@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("step", [Step.RETRY, Step.SNOOZE])
async def test_a_delayed_job_waits_for_its_time(claim_one, row_of, raw, step):
    worker, job = await claim_one()
    await worker.end(job, step, delay_s=45.5)
    row = await row_of(job.job_id)
    assert (row["status"], row["waits_for"]) == ("queued", "time")
    assert 40 < await raw.fetchval("SELECT extract(epoch FROM $1 - now())::float8", row["available_at"]) <= 45.5
    assert await worker.finds_nothing()


@pytest.mark.requirement("Q9")
async def test_a_retry_with_no_attempt_left_fails(claim_one, row_of, journal_of):
    worker, job = await claim_one(max_attempts="1")
    finished = await worker.end(job, Step.RETRY, error="no", delay_s=30.0)
    assert finished.written == {job.token: Status.FAILED}
    assert (await row_of(job.job_id, "error"), await row_of(job.job_id, "waits_for")) == ("no", None)
    assert await journal_of(job.job_id) == ["picked", "failed: retry"]


@pytest.mark.slow
@pytest.mark.requirement("Q4")
@pytest.mark.parametrize("step", STEPS)
async def test_a_job_that_is_to_be_canceled_never_goes_back_to_the_queue(claim_one, raw, row_of, step):
    worker, job = await claim_one()
    await raw.execute("UPDATE dl_jobs SET cancel_requested = true")
    await worker.end(job, step)
    # A handler that returned or failed before the cancel has that outcome.
    expected = {Step.SUCCEED: "succeeded", Step.FAIL: "failed"}.get(step, "canceled")
    assert (await row_of(job.job_id, "status"), await row_of(job.job_id, "finished_at") is None) == (expected, False)


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("step", STEPS)
async def test_an_outcome_with_an_old_token_changes_nothing(claim_one, start_worker, store, raw, step):
    worker, job = await claim_one()
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'")
    await reap(store, 10)
    worker.locks.forget(job.token)
    await worker.locks.release()
    [_again] = await start_worker().claim()
    before = await all_rows(raw), await all_events(raw)
    finished = await worker.record(
        Outcome(
            job.job_id,
            job.token,
            step,
            error=None if step is Step.SUCCEED else "late",
            result="1",
            progress='{"late": 1}',
        )
    )
    assert (finished.written, finished.void) == ({}, [job.token])
    await store.write(aio_show_progress, [(job.job_id, job.token, '{"late": 1}')])
    await store.write(aio_keep_lines, [(job.job_id, job.token, datetime.now(UTC), '{"late": 1}')])
    assert (await all_rows(raw), await all_events(raw)) == before


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("step", [Step.SUCCEED, Step.FAIL, Step.RETRY])
async def test_an_outcome_after_the_reaper_is_void(claim_one, store, raw, step):
    worker, job = await claim_one(max_attempts="1" if step is Step.SUCCEED else "5")
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s'")
    await reap(store, 10)
    before = await all_rows(raw), await all_events(raw)
    finished = await worker.record(Outcome(job.job_id, job.token, step))
    assert finished.written == {}
    if step is Step.SUCCEED:  # failed runs are treated like reclaimed ones: neither is lost work
        assert finished.void == [job.token]
    assert (await all_rows(raw), await all_events(raw)) == before


@pytest.mark.requirement("Q9")
@pytest.mark.requirement("Q12")
async def test_a_batch_that_is_sent_again_changes_nothing_and_is_not_void(start_worker, add_job, raw):
    for _ in STEPS:
        await add_job()
    worker = start_worker()
    outcomes = [
        Outcome(job.job_id, job.token, step, error="e") for job, step in zip(await worker.claim(), STEPS, strict=True)
    ]
    first = await worker.record(*outcomes)
    assert len(first.written) == len(STEPS)
    before = await all_rows(raw), await all_events(raw)
    second = await worker.record(*outcomes)
    assert (second.written, second.void) == ({}, [])
    assert (await all_rows(raw), await all_events(raw)) == before


@pytest.mark.requirement("Q9")
async def test_in_one_batch_the_void_and_the_unknown_do_not_disturb_the_others(start_worker, add_job, raw, row_of):
    jobs = [await add_job() for _ in range(3)]
    worker = start_worker()
    claimed = {job.job_id: job for job in await worker.claim()}
    good, foreign, deleted = (claimed[job_id] for job_id in jobs)
    await raw.execute("UPDATE dl_jobs SET status = 'failed' WHERE job_id = $1", foreign.job_id)
    await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", deleted.job_id)
    finished = await worker.record(*(Outcome(job.job_id, job.token, Step.SUCCEED) for job in claimed.values()))
    assert finished.written == {good.token: Status.SUCCEEDED}
    assert sorted(finished.void) == sorted([foreign.token, deleted.token])
    assert await row_of(foreign.job_id, "status") == "failed"


@pytest.mark.requirement("Q9")
@pytest.mark.parametrize(("step", "status"), [(Step.SUCCEED, Status.SUCCEEDED), (Step.FAIL, Status.FAILED)])
async def test_a_row_that_is_locked_holds_up_no_other_and_is_written_by_a_later_try(
    start_worker, add_job, store, raw, row_of, step, status
):
    for _ in range(3):
        await add_job()
    worker = start_worker()
    locked, *others = await worker.claim()
    outcomes = [Outcome(job.job_id, job.token, step) for job in (locked, *others)]
    await raw.execute("BEGIN")
    await raw.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR NO KEY UPDATE", locked.job_id)
    with trio.fail_after(patience_s()):
        finished = await store.write(aio_finish, outcomes)
    assert finished.written == {job.token: status for job in others}
    assert (finished.void, finished.locked) == ([], [locked.token])
    await raw.execute("ROLLBACK")
    assert await row_of(locked.job_id, "status") == "running"
    finished = await store.write(aio_finish, outcomes)
    assert (finished.written, finished.void, finished.locked) == ({locked.token: status}, [], [])


@pytest.mark.requirement("Q9")
async def test_an_outcome_skipped_for_a_lock_is_void_if_the_job_has_ended_since(claim_one, store, raw, row_of):
    _worker, job = await claim_one()
    outcomes = [Outcome(job.job_id, job.token, Step.SUCCEED)]
    await raw.execute("BEGIN")
    await raw.execute("UPDATE dl_jobs SET status = 'failed' WHERE job_id = $1", job.job_id)
    with trio.fail_after(patience_s()):
        finished = await store.write(aio_finish, outcomes)
    assert (finished.written, finished.void, finished.locked) == ({}, [], [job.token])
    await raw.execute("COMMIT")
    finished = await store.write(aio_finish, outcomes)
    assert (finished.written, finished.void, finished.locked) == ({}, [job.token], [])
    assert await row_of(job.job_id, "status") == "failed"


SUCCESSES = [(None, None), ('{"n": 1}', None), (None, '{"rows": 7}'), ("null", "{}")]
"""Results and progress of succeeded jobs."""


@pytest.mark.requirement("Q9")
async def test_a_batch_of_successes_writes_what_the_general_statement_writes(start_worker, add_job, store, raw):
    for _ in range(2):
        for number in range(len(SUCCESSES)):
            await add_job(priority=str(number), progress="'{\"rows\": 1}'", error="'before'")
    worker = start_worker()
    jobs = sorted(await worker.claim(), key=lambda job: job.job_id)
    outcomes = [
        Outcome(job.job_id, job.token, Step.SUCCEED, result=result, progress=progress)
        for job, (result, progress) in zip(jobs, SUCCESSES * 2, strict=True)
    ]
    plain, general = outcomes[: len(SUCCESSES)], outcomes[len(SUCCESSES) :]
    assert (await store.write(aio_finish, plain)).written == {e.token: Status.SUCCEEDED for e in plain}
    assert await store.write(_aio_write_outcomes, general, patient=False) == {
        e.token: Status.SUCCEEDED for e in general
    }
    rows = [
        record["row"]
        for record in await raw.fetch(
            "SELECT (to_jsonb(j) - '{job_id,lock_key,token,created_at,available_at,finished_at}'::text[])"
            " || jsonb_build_object('is_finished', j.finished_at >= j.started_at, 'events',"
            " (SELECT jsonb_agg(to_jsonb(e) - '{event_id,job_id,ts}'::text[]) FROM dl_job_events e"
            " WHERE e.job_id = j.job_id)) AS row FROM dl_jobs j ORDER BY j.job_id"
        )
    ]
    assert rows[: len(plain)] == rows[len(plain) :]
    assert [row.count('"kind": "done"') for row in rows] == [1] * len(rows)


@pytest.mark.requirement("Q9")
async def test_a_row_that_changes_between_snapshot_and_lock_is_written_by_a_later_try(
    start_worker, add_job, store, barrier, until_blocked, database, row_of
):
    """A heartbeat or a cancel request changes it. A run that another service has ended is void."""
    changes = ["heartbeat_at = now()", "cancel_requested = true", "status = 'failed'"]
    jobs = [await add_job() for _ in (*changes, "unchanged")]
    worker, finished = start_worker(), []
    claimed = {job.job_id: job for job in await worker.claim()}
    *changed, unchanged = [Outcome(job_id, claimed[job_id].token, Step.SUCCEED) for job_id in jobs]

    async def finish():
        finished.append(await store.write(aio_finish, [*changed, unchanged]))

    async with raw_connection(database.dsn) as session, trio.open_nursery() as nursery:
        await barrier.in_finish()
        nursery.start_soon(finish)
        await until_blocked()
        for outcome, change in zip(changed, changes, strict=True):
            await session.execute(f"UPDATE dl_jobs SET {change} WHERE job_id = $1", outcome.job_id)
        await barrier.lift()
    *locked, void = [outcome.token for outcome in changed]
    assert finished[0].written == {unchanged.token: Status.SUCCEEDED}
    assert (sorted(finished[0].locked), finished[0].void) == (sorted(locked), [void])
    again = await store.write(aio_finish, [outcome for outcome in changed if outcome.token in locked])
    assert (again.written, again.void, again.locked) == (dict.fromkeys(locked, Status.SUCCEEDED), [], [])
    assert await row_of(changed[2].job_id, "status") == "failed"


@pytest.mark.requirement("Q9")
async def test_a_patient_outcome_waits_for_the_row(claim_one, raw, store, until_blocked):
    _worker, job = await claim_one()
    finished = []

    async def finish():
        finished.append(await store.write(aio_finish, [Outcome(job.job_id, job.token, Step.SUCCEED)], patient=True))

    async with trio.open_nursery() as nursery:
        await raw.execute("BEGIN")
        await raw.execute("UPDATE dl_jobs SET heartbeat_at = now() WHERE job_id = $1", job.job_id)
        nursery.start_soon(finish)
        await until_blocked()
        await raw.execute("COMMIT")
    assert finished[0].written == {job.token: Status.SUCCEEDED}


@pytest.mark.requirement("Q9")
async def test_refunds_are_bounded(claim_one, raw, row_of):
    worker, job = await claim_one(max_attempts="2")
    await raw.execute("UPDATE dl_jobs SET refunds = $1", MAX_REFUNDS - 1)
    outcomes = []
    for _ in range(3):
        finished = await worker.end(job, Step.SNOOZE)
        outcomes.append((finished.written[job.token], await row_of(job.job_id, "attempt")))
        [job] = await worker.claim() or [job]
    assert outcomes == [(Status.QUEUED, 0), (Status.QUEUED, 1), (Status.FAILED, 2)]
    assert await row_of(job.job_id, "refunds") == MAX_REFUNDS


@pytest.mark.requirement("Q9")
async def test_a_snooze_without_a_reason_keeps_the_last_error(claim_one, row_of):
    worker, job = await claim_one()
    await worker.end(job, Step.RETRY, error="first")
    [job] = await worker.claim()
    await worker.end(job, Step.SNOOZE)
    assert await row_of(job.job_id, "error") == "first"
    [job] = await worker.claim()
    await worker.end(job, Step.SUCCEED)
    assert await row_of(job.job_id, "error") is None


@pytest.mark.requirement("Q3")
async def test_progress_and_log_lines_of_a_running_job_are_kept(claim_one, store, row_of, raw):
    worker, job = await claim_one()
    await store.write(aio_show_progress, [(job.job_id, job.token, '{"rows": 7}')])
    assert await row_of(job.job_id, "progress") == '{"rows": 7}'
    lines = [(job.job_id, job.token, datetime(2026, 1, day, tzinfo=UTC), f'{{"day": {day}}}') for day in (2, 1)]
    await store.write(aio_keep_lines, lines)
    kept = await raw.fetch("SELECT ts, payload::text FROM dl_job_events WHERE kind = 'log' ORDER BY event_id")
    assert [(row["ts"].day, row["payload"]) for row in kept] == [(2, '{"day": 2}'), (1, '{"day": 1}')]
    await worker.end(job, progress='{"rows": 9}')
    assert await row_of(job.job_id, "progress") == '{"rows": 9}'


@pytest.mark.requirement("Q9")
async def test_progress_and_lines_with_an_old_token_change_nothing(claim_one, store, row_of, raw):
    worker, old = await claim_one()
    await worker.end(old, Step.RETURN)
    [job] = await worker.claim()
    assert (job.job_id, job.token != old.token) == (old.job_id, True)
    for run, rows in ((job, 7), (old, 8)):
        await store.write(aio_show_progress, [(run.job_id, run.token, f'{{"rows": {rows}}}')])
        await store.write(aio_keep_lines, [(run.job_id, run.token, datetime(2026, 1, rows, tzinfo=UTC), "{}")])
    assert await row_of(job.job_id, "progress") == '{"rows": 7}'
    assert [row["ts"].day for row in await raw.fetch("SELECT ts FROM dl_job_events WHERE kind = 'log'")] == [7]


@pytest.mark.requirement("Q9")
async def test_batches_that_meet_in_any_order_do_not_deadlock(database, start_worker, add_job, store):
    for _ in range(40):
        await add_job()
    worker = start_worker()
    outcomes = [Outcome(job.job_id, job.token, Step.SUCCEED) for job in await worker.claim(limit=40)]
    written = []

    async def record(outcomes):
        written.extend((await worker.record(*outcomes)).written)

    async with raw_connection(database.dsn) as raw:
        before = await raw.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(record, outcomes)
            nursery.start_soon(record, outcomes[::-1])
        assert len(written) == 40
        await raw.execute("SELECT pg_stat_clear_snapshot()")
        after = await raw.fetchval("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    assert after == before


@pytest.mark.requirement("Q9")
async def test_one_unstorable_row_neither_stops_the_others_nor_runs_again(start_worker, add_job, store, row_of):
    jobs = [await add_job() for _ in range(3)]
    worker = start_worker()
    claimed = {job.job_id: job for job in await worker.claim()}
    outcomes = [
        Outcome(job_id, claimed[job_id].token, Step.SUCCEED, result='"\\u0000"' if job_id == jobs[1] else '"fine"')
        for job_id in jobs
    ]
    with pytest.raises(StoreError):
        await worker.record(*outcomes)
    assert [await row_of(job_id, "status") for job_id in jobs] == ["running"] * 3
    session = Session(store, "recorder")
    sums = RunSums(session, Outage())
    recorder = Recorder(session, worker.locks, Runs(), Outage(), Telemetry(), lambda *_: None, Wake(), sums)
    finished = await recorder._insist(outcomes)
    assert (len(finished.written), finished.void) == (3, [])
    assert [await row_of(job_id, "status") for job_id in jobs] == ["succeeded"] * 3
    assert [await row_of(job_id, "result") for job_id in jobs] == ['"fine"', None, '"fine"']
    assert await row_of(jobs[1], "error") == UNSTORABLE
    await session.close()


async def test_an_empty_batch_is_nothing(store):
    finished = await store.write(aio_finish, [])
    assert (finished.written, finished.void) == ({}, [])
