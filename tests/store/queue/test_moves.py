"""Moves of a job from stage to stage (R6) with deaths at every point: each stage runs, and never twice concurrently."""

from __future__ import annotations

import random

import pytest

from dataloader.jobs.errors import LeaseLost, StoreUnavailable
from dataloader.jobs.ids import uuid7
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.store.queue.finish import aio_finish
from dataloader.store.queue.job_logs import list_log
from dataloader.store.queue.leases import reap
from dataloader.store.queue.transaction import Transactions

pytestmark = pytest.mark.requirement("R6", "Q8", "Q12")

STAGES = ("s.a", "s.b", "s.c", "s.d")
DEATHS = ("none", "in the handler", "before the reply", "fenced")
EXPIRE = "UPDATE dl_jobs SET lease_expires_at = now() - interval '1 s' WHERE job_id = $1"


def end_of(job):
    """Return the outcome of a run of one of the four stages, which passes the number of its place to the next one."""
    place = STAGES.index(job.task)
    if place == len(STAGES) - 1:
        return Outcome(job.job_id, job.token, Step.SUCCEED, result=str(place))
    return Outcome(job.job_id, job.token, Step.MOVE, to=STAGES[place + 1], previous=str(place))


@pytest.fixture
async def stages(raw):
    """Declare stages: two have a separate queue, and one its own number of attempts."""
    await raw.execute(
        "INSERT INTO dl_tasks (task, queue, max_attempts, lease_ttl_sec, layout, declared_by) VALUES"
        " ('s.b', 'other', 3, 33, 1, 't'), ('s.c', 'q', NULL, NULL, 1, 't'), ('s.d', 'other', NULL, NULL, 1, 't')"
    )


async def test_a_move_makes_the_row_the_next_stage_s(stages, store, start_worker, add_job, row_of, journal_of):
    job_id = await add_job(
        task="'s.a'", keyed="false", attempt="2", refunds="1", crashes="1", max_attempts="9", priority="7"
    )
    worker = start_worker()
    [job] = await worker.claim(tasks=STAGES)
    await worker.record(Outcome(job_id, job.token, Step.MOVE, to="s.b", previous='{"n": 1}', result="1", progress="{}"))
    row = await row_of(job_id)
    named = ("status", "task", "queue", "attempt", "refunds", "crashes", "max_attempts")
    assert [row[name] for name in named] == ["queued", "s.b", "other", 0, 0, 0, 3]
    assert (row["priority"], row["lease_ttl_sec"], row["previous"], row["moves"]) == (7, 33, '{"n": 1}', 1)
    assert (row["claimed_by"], row["lease_expires_at"], row["waits_for"], row["finished_at"]) == (None,) * 4
    assert await journal_of(job_id) == ["picked", "moved"]
    said = (await list_log(store, job_id)).lines[-1]
    assert (said.level, said.message) == ("info", "attempt 3 succeeded; the job goes on with its next stage")
    assert await worker.claim(tasks=STAGES) == []
    [again] = await worker.claim("other", tasks=STAGES)
    assert (again.task, again.attempt, again.max_attempts, again.lease_s) == ("s.b", 1, 3, 33)


async def test_a_move_whose_reply_was_lost_is_written_once(stages, raw, start_worker, add_job, row_of, journal_of):
    job_id = await add_job(task="'s.a'", keyed="false")
    worker, other = start_worker(), start_worker()
    [job] = await worker.claim(tasks=STAGES)
    assert (await worker.record(end_of(job))).written == {job.token: "queued"}
    again = await worker.record(end_of(job))
    assert (again.written, again.void) == ({}, [])
    [_] = await other.claim("other", tasks=STAGES)
    again = await worker.record(end_of(job))
    assert (again.written, again.void) == ({}, [job.token])
    assert await row_of(job_id, "moves") == 1
    assert await journal_of(job_id) == ["picked", "moved", "picked"]


async def test_moves_and_outcomes_of_a_batch_are_written_and_a_locked_row_is_skipped(
    stages, raw, start_worker, add_job, row_of
):
    ids = [await add_job(task="'s.a'", keyed="false") for _ in range(3)]
    worker = start_worker()
    jobs = {job.job_id: job for job in await worker.claim(tasks=STAGES)}
    outcomes = [*map(end_of, [jobs[ids[0]], jobs[ids[1]]]), Outcome(ids[2], jobs[ids[2]].token, Step.SUCCEED)]
    await raw.execute("BEGIN")
    await raw.fetch("SELECT FROM dl_jobs WHERE job_id = $1 FOR UPDATE", ids[1])
    finished = await worker.store.write(aio_finish, outcomes)
    await raw.execute("COMMIT")
    assert finished.written == {jobs[ids[0]].token: "queued", jobs[ids[2]].token: "succeeded"}
    assert (finished.void, finished.locked) == ([], [jobs[ids[1]].token])
    await worker.record(outcomes[1])
    assert [await row_of(job_id, "task") for job_id in ids] == ["s.b", "s.b", "s.a"]


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [True, False])
async def test_every_stage_runs_and_never_twice_concurrently_although_workers_die(
    stages, raw, store, start_worker, add_job, row_of, keyed, request
):
    """Twelve jobs, workers that die at random: the histories of their runs, by tokens."""
    chance = random.Random(request.node.name)
    jobs = [
        await add_job(task="'s.a'", max_attempts="1000", **({} if keyed else {"keyed": "false"})) for _ in range(12)
    ]
    await raw.execute("UPDATE dl_tasks SET max_attempts = 1000")
    done: dict = {job_id: [] for job_id in jobs}
    running: dict = {}
    worker = start_worker()
    for _ in range(400):
        claimed = [job for queue in ("q", "other") for job in await worker.claim(queue, 2, STAGES)]
        if not claimed and not await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'running'"):
            break
        for job in claimed:
            live = running.get(job.job_id)
            assert live is None, f"{job.task} of {job.job_id} begins while {live} runs"
            running[job.job_id] = job.task
            death = chance.choice(DEATHS)
            if death in {"none", "before the reply"}:
                await worker.record(end_of(job))
                done[job.job_id].append(job.task)
            # A dead worker frees its keys with its session, and its leases end.
            if death != "none":
                await raw.execute(EXPIRE, job.job_id)
                await reap(store, 100)
                if death == "fenced":
                    assert (await worker.record(end_of(job))).written == {}
            running.pop(job.job_id)
            worker.locks.forget(job.token)
        await worker.locks.release()
    assert {tuple(stages) for stages in done.values()} == {STAGES}
    for job_id in jobs:
        row = await row_of(job_id)
        assert (row["status"], row["task"], row["moves"], row["previous"], row["result"]) == (
            "succeeded", "s.d", 3, "2", "3",
        )  # fmt: skip
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'moved'") == 3 * len(jobs)


async def test_a_transaction_that_moved_its_job_is_known_though_the_next_stage_has_begun(
    stages, raw, store, start_worker, add_job, row_of
):
    await raw.execute("CREATE TABLE target (n int)")
    job_id = await add_job(task="'s.a'", keyed="false")
    worker, other = start_worker(), start_worker()
    [job] = await worker.claim(tasks=STAGES)
    transactions = Transactions(store)
    async with transactions.open(lambda _: end_of(job)) as transaction:
        await transaction.execute("INSERT INTO target VALUES (1)")
    [next_run] = await other.claim("other", tasks=STAGES)
    assert next_run.token != job.token
    await transactions._resolve(end_of(job))  # as after a commit with a lost reply
    with pytest.raises(StoreUnavailable, match="not committed"):
        await transactions._resolve(Outcome(uuid7(), job.token, Step.MOVE, to="s.b"))
    with pytest.raises(LeaseLost):
        async with transactions.open(lambda _: end_of(job)) as transaction:
            await transaction.execute("INSERT INTO target VALUES (2)")
    assert await raw.fetchval("SELECT array_agg(n) FROM target") == [1]
    assert await row_of(job_id, "task") == "s.b"
    transactions.close()
