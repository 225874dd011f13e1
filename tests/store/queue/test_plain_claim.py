"""The plain claim (Q6): it claims and writes the same as the general claim, and loses no row that changes meanwhile."""

from __future__ import annotations

import json

import msgspec
import pytest
import trio
from databases import raw_connection

from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.store.queue import plain_claim
from dataloader.store.queue.claim import ClaimRequest
from dataloader.store.queue.plain_claim import GENERAL_CLAIMS, PlainClaims

pytestmark = pytest.mark.requirement("Q6")

VARIED = "(SELECT jsonb_agg(md5(n::text || random()::text)) FROM generate_series(1, 3000) AS n)"
"""100 kB that cannot be compressed to less than 64 kB."""
NOT_PLAIN = {
    "a key": {"keyed": "true", "lock_key": "'k'"},
    "a cancel request": {"cancel_requested": "true"},
    "an unknown task": {"task": "'unknown'"},
    "an unknown task with a cancel request": {"task": "'unknown'", "cancel_requested": "true"},
    "a task with limits": {"task": "'limited'"},
    "a schedule": {"schedule": "'daily'"},
    "a value of the stage before": {"previous": "'[1]'"},
    "a version": {"requested_version": "2"},
    "an infinite time": {"available_at": "'-infinity'"},
    "long args": {"args": VARIED},
}
WRITTEN = """
SELECT to_jsonb(j) - '{job_id,queue,lock_key,claimed_by,token,args}'::text[] || jsonb_build_object(
         'args', md5(j.args::text), 'claimed_by', j.claimed_by IS NOT NULL, 'token', j.token > 0,
         'events', (SELECT jsonb_agg(to_jsonb(e) - '{event_id,job_id,queue,ts,payload}'::text[] || e.payload - 'worker')
                    FROM dl_job_events e WHERE e.job_id = j.job_id)) AS row
FROM dl_jobs j WHERE j.queue = $1 ORDER BY j.priority
"""
"""Values that claims have written, except IDs, tokens and names. Timestamps are compared only within a transaction."""


@pytest.fixture
def add_plain(add_job):
    """Return a function that adds a job that is plain except for the given columns."""

    async def add(**columns):
        return await add_job(**{"keyed": "false"} | columns)

    return add


@pytest.fixture
def statements(monkeypatch):
    """Return the results of the plain claims: the number of claimed jobs, or None if the general claim followed."""
    answers = []
    claim = plain_claim.aio_claim_plain

    async def aio_claim_plain(connection, worker, request):
        answer = await claim(connection, worker, request)
        answers.append(None if answer is None else len(answer.jobs))
        return answer

    monkeypatch.setattr("dataloader.store.queue.lock_session.aio_claim_plain", aio_claim_plain)
    return answers


async def claim_all(worker, queue, limit):
    """Claim until no job is found; return the jobs without IDs and tokens, and the number of jobs of each claim."""
    brought, numbers = [], []
    while True:
        claim = await worker.locks.claim(queue, limit, ["t", "limited"], 30.0, limited=["limited"])
        for job in claim.jobs:
            fields = msgspec.structs.asdict(job)
            brought.append({name: fields[name] for name in fields if name not in {"job_id", "token", "queue"}})
        numbers.append(len(claim.jobs))
        if not claim.jobs and not claim.more:
            return brought, numbers


@pytest.mark.parametrize("kind", NOT_PLAIN)
async def test_jobs_between_plain_ones_are_claimed_as_by_the_general_claim(
    add_plain, start_worker, raw, general_claims_only, statements, kind
):
    await raw.execute("BEGIN")  # so that all have the same now()
    for queue in ("one", "other"):
        for number in range(9):
            columns = NOT_PLAIN[kind] if number == 4 else {"args": f"'[{number}]'", "partition_key": f"'{number}'"}
            if columns.get("lock_key"):
                columns |= {"lock_key": f"'{queue}'"}
            await add_plain(queue=f"'{queue}'", priority=str(number), **columns)
    await raw.execute("COMMIT")
    found = await claim_all(start_worker(), "one", 3)
    is_skipped = kind == "an unknown task"
    assert statements == ([3, 3, 2, 0] if is_skipped else [3, None])
    general_claims_only()
    expected = await claim_all(start_worker(), "other", 3)
    for job in (*found[0], *expected[0]):
        job |= {"lock_key": job["lock_key"] is None, "lock_hash": job["lock_hash"] is None, "args": len(job["args"])}
    assert found == expected
    assert len(statements) <= 4, "general claims alone"
    rows = [[json.loads(record["row"]) for record in await raw.fetch(WRITTEN, queue)] for queue in ("one", "other")]
    for row in (*rows[0], *rows[1]):
        for name in [name for name in row if name.endswith("_at") and name != "available_at"]:
            row[name] = row[name] is not None
    if kind != "long args":  # random ones
        assert rows[0] == rows[1]


@pytest.mark.parametrize("change", ["cancel_requested = true", "priority = 200", "status = 'running'", "keyed = true"])
@pytest.mark.parametrize("limit", [2, 10])
async def test_a_row_that_changes_between_snapshot_and_lock_is_left_for_the_next_claim(
    add_plain, start_worker, barrier, until_blocked, database, raw, row_of, change, limit
):
    changed, other = await add_plain(), await add_plain()
    worker, claims = start_worker("slow"), []

    async def claim():
        claims.append(await worker.ask(limit=limit))

    async with raw_connection(database.dsn) as session, trio.open_nursery() as nursery:
        await barrier.in_plain_claim(has_locked=False)
        nursery.start_soon(claim)
        await until_blocked()
        await session.execute(f"UPDATE dl_jobs SET {change} WHERE job_id = $1", changed)
        token = await row_of(changed, "token")
        await barrier.lift()
    is_not_plain = change in {"cancel_requested = true", "keyed = true"}
    assert await row_of(changed, "attempt") == int(change == "keyed = true")
    if is_not_plain:
        # The general claim has followed, and claimed all.
        assert [job.job_id for job in claims[0].jobs] == ([other] if "cancel" in change else [changed, other])
        assert await row_of(changed, "status") == ("canceled" if "cancel" in change else "running")
        return
    assert [job.job_id for job in claims[0].jobs] == [other]
    assert claims[0].passed_over == (limit > 1)
    again = await worker.ask(limit=limit)
    assert [job.job_id for job in again.jobs] == ([] if "running" in change else [changed])
    assert (await row_of(changed, "token") == token) == ("running" in change)


async def test_claims_of_two_workers_take_no_job_twice(add_plain, start_worker):
    jobs = [await add_plain() for _ in range(60)]
    claimed = []

    async def claim(worker):
        while found := (await worker.ask(limit=7)).jobs:
            claimed.extend(job.job_id for job in found)

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(claim, start_worker())
    # A worker that has found none has encountered jobs that another one had locked.
    claimed.extend(job.job_id for job in (await start_worker().ask(limit=60)).jobs)
    assert sorted(claimed) == sorted(jobs)


async def test_a_job_that_another_session_has_locked_is_passed_over(add_plain, start_worker, raw, database):
    locked, free = await add_plain(), await add_plain()
    worker = start_worker()
    async with raw_connection(database.dsn) as session:
        await session.execute("BEGIN")
        await session.execute("SELECT FROM dl_jobs WHERE job_id = $1 FOR NO KEY UPDATE", locked)
        claim = await worker.ask()
        assert ([job.job_id for job in claim.jobs], claim.passed_over) == ([free], True)
        await session.execute("ROLLBACK")
    claim = await worker.ask()
    assert ([job.job_id for job in claim.jobs], claim.passed_over) == ([locked], False)


async def test_keys_that_are_released_are_freed_by_the_next_claim(add_plain, start_worker, statements):
    await add_plain(keyed="true", lock_key="'k'")
    worker = start_worker()
    [first] = await worker.claim()
    second = await add_plain(keyed="true", lock_key="'k'")
    await add_plain(queue="'r'")
    assert not await worker.claim()
    assert statements == [None]
    await worker.record(Outcome(first.job_id, first.token, Step.SUCCEED))
    worker.locks.forget(first.token)
    assert len(await worker.claim("r")) == 1
    assert statements == [None]
    assert [job.job_id for job in await start_worker().claim()] == [second]


def request_of(queue="q", look=1, tasks=("t",), lanes=()):
    return ClaimRequest(queue, 1, look, None if tasks is None else list(tasks), 30.0, None, [], list(lanes))


def test_a_queue_with_jobs_that_are_not_plain_has_fifty_general_claims():
    claims = PlainClaims()
    assert claims.may_serve(request_of())
    claims.put_off("q")
    assert claims.may_serve(request_of("r"))
    assert [claims.may_serve(request_of()) for _ in range(GENERAL_CLAIMS + 1)] == [False] * GENERAL_CLAIMS + [True]


def test_claims_of_limit_queues_or_that_look_further_are_general():
    claims = PlainClaims()
    for request in (request_of(lanes=["t"]), request_of(tasks=None), request_of(look=2)):
        assert not claims.may_serve(request)
