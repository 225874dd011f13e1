from __future__ import annotations

import itertools

import pytest
import trio
from conditions import patience_s
from databases import raw_connection

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest, Conflict, JobNotFound
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.states import TRANSITIONS, Status, Step, WaitsFor
from dataloader.store.queue import control, failures, reads
from dataloader.store.queue.leases import Beat, reap
from dataloader.store.queue.look_back import search_audit

ALICE = Operator("alice", "req-1")
BY_ALICE = {"reason": "operator", "by": "alice"}
LATER = "now() + interval '1 hour'"
ACTIONS = {
    "cancel": control.cancel,
    "retry": control.retry,
    "run_now": control.run_now,
    "set_priority": lambda store, job_id, actor: control.set_priority(store, job_id, 7, actor),
}


async def journal(store, job_id):
    return [(event.kind, event.payload) for event in (await reads.list_events(store, job_id)).events]


@pytest.mark.requirement("Q4")
@pytest.mark.parametrize("waits_for", ["NULL", "'time'", "'lock'"])
async def test_a_queued_job_with_any_waiting_reason_is_canceled_immediately(store, add_job, waits_for):
    job_id = await add_job(waits_for=waits_for, available_at=LATER if waits_for == "'time'" else "now()")
    job = await control.cancel(store, job_id, ALICE)
    assert (job.status, job.cancel_requested, job.waits_for) == (Status.CANCELED, True, None)
    assert job.finished_at >= job.created_at
    assert await journal(store, job_id) == [("canceled", BY_ALICE)]


@pytest.mark.requirement("Q4")
async def test_a_running_job_is_asked_to_end_also_a_foreign_one(store, raw, add_job):
    ours, foreign = await add_job(status="'running'", claimed_by="'w'", token="5"), await add_job(status="'running'")
    before = await raw.fetch("SELECT token, claimed_by FROM dl_jobs ORDER BY job_id")
    for job_id in (ours, foreign):
        job = await control.cancel(store, job_id, ALICE)
        assert (job.status, job.cancel_requested, job.finished_at) == (Status.RUNNING, True, None)
        assert await journal(store, job_id) == []
    assert await raw.fetch("SELECT token, claimed_by FROM dl_jobs ORDER BY job_id") == before


@pytest.mark.requirement("Q4")
@pytest.mark.parametrize("status", ["succeeded", "failed", "canceled", "lost"])
async def test_an_ended_job_is_left_as_it_is_by_a_cancel(store, add_job, status):
    job_id = await add_job(status=f"'{status}'", finished_at="now()")
    before = await reads.get_job(store, job_id)
    assert await control.cancel(store, job_id, ALICE) == before
    assert await journal(store, job_id) == []


@pytest.mark.parametrize("act", ACTIONS.values(), ids=ACTIONS)
async def test_an_unknown_job_is_refused_and_nothing_is_logged(store, act):
    with pytest.raises(JobNotFound):
        await act(store, uuid7(), ALICE)
    assert (await reads.list_audit(store)).audit == []


@pytest.mark.slow
@pytest.mark.parametrize("status", list(Status))
@pytest.mark.parametrize("action", ACTIONS)
async def test_every_action_follows_the_table_of_transitions(store, add_job, action, status):
    step = {"cancel": Step.CANCEL, "retry": Step.REVIVE, "run_now": Step.READY, "set_priority": Step.READY}[action]
    expected = TRANSITIONS.get((status, step))
    job_id = await add_job(status=f"'{status}'", lease_expires_at=LATER)
    if action == "cancel" and status is Status.RUNNING:
        expected = Status.RUNNING  # requested; the worker writes the step
    if expected is None and action != "cancel":
        with pytest.raises(Conflict, match=status):
            await ACTIONS[action](store, job_id, ALICE)
        assert (await reads.list_audit(store)).audit == []
        assert (await reads.get_job(store, job_id)).status is status
        return
    assert (await ACTIONS[action](store, job_id, ALICE)).status is (expected or status)
    [record] = (await reads.list_audit(store)).audit
    assert (record.actor, record.action, record.job_id) == ("alice", action, job_id)
    assert (record.detail["was"], record.detail["request_id"]) == (status, "req-1")


@pytest.mark.requirement("R2")
async def test_a_retried_job_is_as_new_but_keeps_its_progress(store, raw, add_job):
    job_id = await add_job(
        status="'lost'", attempt="5", crashes="5", refunds="2", cancel_requested="true", error="'x'", result="'1'",
        progress="""'{"rows": 3}'""", claimed_by="'w'", lease_expires_at="now()", heartbeat_at="now()",
        started_at="now()", finished_at="now()", available_at="timestamptz '2020-01-01Z'",
    )  # fmt: skip
    job = await control.retry(store, job_id, ALICE)
    assert (job.status, job.waits_for, job.attempt, job.crashes, job.cancel_requested) == ("queued", None, 0, 0, False)
    assert (job.error, job.result, job.claimed_by, job.lease_expires_at, job.heartbeat_at) == (None,) * 5
    assert (job.started_at, job.finished_at, job.progress) == (None, None, {"rows": 3})
    assert job.available_at >= job.created_at
    assert await raw.fetchval("SELECT refunds FROM dl_jobs") == 0
    assert await journal(store, job_id) == [("requeue", BY_ALICE)]


# Running only by their rows, which another service has written.
ENDLESS = {"null": "NULL", "infinite": "'infinity'"}
LONG_AGO = {"status": "'running'", "heartbeat_at": "now() - interval '61 s'", "lease_ttl_sec": "60"}
# The workers of these have renewed them recently, or may have.
HELD = {
    "renewed lately": {"lease_expires_at": "NULL", "heartbeat_at": "now() - interval '50 s'"},
    "started lately": {"lease_expires_at": "'infinity'", "heartbeat_at": "NULL", "started_at": "now()"},
    "a lease that ends": {"lease_expires_at": "now() + interval '9 years'"},
    "a lease that has ended": {"lease_expires_at": "now() - interval '1 s'"},
}


@pytest.mark.requirement("Q4")
@pytest.mark.parametrize("lease", ENDLESS.values(), ids=ENDLESS)
@pytest.mark.parametrize("requested", ["true", "false"])
async def test_canceling_a_job_with_an_endless_lease_frees_its_key_immediately(store, add_job, lease, requested):
    endless = LONG_AGO | {"lease_expires_at": lease, "lock_key": "'k'", "cancel_requested": requested}
    job_id = await add_job(**endless)
    next_id = await add_job(lock_key="'k'", waits_for="'lock'")
    job = await control.cancel(store, job_id, ALICE)
    assert (job.status, job.lease_expires_at) == ("canceled", None)
    assert (await reads.get_job(store, next_id)).waits_for is None
    assert await journal(store, job_id) == [("canceled", BY_ALICE)]
    assert (await reads.list_audit(store)).audit[0].detail["was"] == "running"


@pytest.mark.requirement("Q4")
@pytest.mark.parametrize("lease", ENDLESS.values(), ids=ENDLESS)
async def test_a_running_job_with_an_endless_lease_is_queued_again_by_force_alone(store, add_job, start_worker, lease):
    job_id = await add_job(**LONG_AGO | {"lease_expires_at": lease, "lock_key": "'k'", "attempt": "3"})
    with pytest.raises(Conflict, match="its lease never expires; cancel it, or retry it with force"):
        await control.retry(store, job_id, ALICE)
    job = await control.retry(store, job_id, ALICE, force=True)
    assert (job.status, job.waits_for, job.attempt, job.lease_expires_at) == ("queued", None, 0, None)
    assert [kind for kind, _ in await journal(store, job_id)] == ["canceled", "requeue"]
    [record] = (await reads.list_audit(store)).audit
    assert (record.action, record.detail["was"], record.detail["force"]) == ("retry", "running", True)
    assert [claimed.job_id for claimed in await start_worker().claim()] == [job_id]


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
async def test_a_running_job_that_somebody_may_run_is_asked_to_end_whatever_force_is_used(store, raw, add_job, held):
    job_id = await add_job(**LONG_AGO | held)
    with pytest.raises(Conflict, match="retry needs a job with the status canceled or failed or lost"):
        await control.retry(store, job_id, ALICE, force=True)
    assert (await control.cancel(store, job_id, ALICE)).status is Status.RUNNING
    assert await raw.fetchval("SELECT cancel_requested FROM dl_jobs")


@pytest.mark.requirement("Q8")
@pytest.mark.parametrize("lease", ENDLESS.values(), ids=ENDLESS)
async def test_a_job_of_a_live_worker_with_an_endless_lease_is_not_ended(store, raw, add_job, start_worker, lease):
    job_id, worker = await add_job(), start_worker()
    [claimed] = await worker.claim()
    await raw.execute(f"UPDATE dl_jobs SET lease_expires_at = {lease}")
    assert (await reap(store, 9)).endless == []
    assert (await control.cancel(store, job_id, ALICE)).status is Status.RUNNING
    with pytest.raises(Conflict):
        await control.retry(store, job_id, ALICE, force=True)
    # The next heartbeat gives an infinite lease an end. A row without a lease has no owner, and its handler is stopped.
    assert await worker.beat(claimed) == [Beat.LOST if lease == "NULL" else Beat.RENEWED]


async def test_a_bulk_cancel_ends_those_with_endless_leases_and_asks_the_others(store, add_job):
    asked = await add_job(status="'running'", lease_expires_at=LATER)
    for lease in ENDLESS.values():
        await add_job(**LONG_AGO | {"lease_expires_at": lease, "cancel_requested": "true"})
    assert await control.cancel_many(store, JobFilter(queue="q"), ALICE) == 3
    assert await control.cancel_many(store, JobFilter(queue="q"), ALICE) == 0
    assert (await reads.get_job(store, asked)).status is Status.RUNNING
    assert (await reads.list_audit(store)).audit[1].detail["canceled"] == 2


@pytest.mark.requirement("Q10")
async def test_jobs_with_endless_leases_are_found_and_no_other(store, add_job):
    for held in HELD.values():
        await add_job(**LONG_AGO | held)
    await add_job()
    endless = {await add_job(**LONG_AGO | {"lease_expires_at": lease}) for lease in ENDLESS.values()}
    # Jobs that are renewed come first, and do not use up the limit.
    assert set((await reap(store, 9, most_endless=1)).endless) == endless


async def test_one_of_two_concurrent_retries_is_refused(store, add_job):
    job_id = await add_job(status="'failed'")
    outcomes = []

    async def retry():
        try:
            outcomes.append((await control.retry(store, job_id, ALICE)).status)
        except Conflict as error:
            outcomes.append(f"refused: {error.status}")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(retry)
        nursery.start_soon(retry)
    assert sorted(outcomes) == ["queued", "refused: queued"]
    assert len(await journal(store, job_id)) == 1


@pytest.mark.requirement("R1")
async def test_priorities_can_be_changed_with_any_waiting_reason(store, raw, add_job):
    before = await add_job(queue="'other'")
    reasons = {"time": {"available_at": LATER}, "after": {"waits_on": f"'{before}'", "when_failed": "'cancel'"}}
    ids = {}
    for reason in (None, WaitsFor.TIME, WaitsFor.LOCK, WaitsFor.AFTER):
        waits_for = "NULL" if reason in (None, "time", "after") else f"'{reason}'"
        ids[reason] = await add_job(waits_for=waits_for, error="'before'", **reasons.get(reason, {}))
    for reason, job_id in ids.items():
        job = await control.set_priority(store, job_id, 3, ALICE)
        assert (job.priority, job.waits_for) == (3, reason)
    [group] = (await failures.list_error_groups(store)).groups
    wanted = JobFilter(error_group=group.group)
    assert [await control.set_priority_many(store, wanted, 4, ALICE, limit=n) for n in (3, 3, 3)] == [3, 1, 0]
    for reason, job_id in ids.items():
        job = await reads.get_job(store, job_id)
        assert (job.priority, job.waits_for) == (4, reason)
    assert (await reads.get_job(store, before)).priority == 100


@pytest.mark.requirement("R1")
async def test_a_waiting_jobs_priority_can_be_changed(store, add_job):
    job_id = await add_job(waits_for="'lock'", available_at=LATER)
    job = await control.set_priority(store, job_id, 3, ALICE)
    assert (job.priority, job.waits_for) == (3, WaitsFor.LOCK)
    assert (await reads.list_audit(store)).audit[0].detail["priority"] == 3
    for priority in (-1, 2**31):
        with pytest.raises(BadRequest, match="priority"):
            await control.set_priority(store, job_id, priority, ALICE)


async def test_run_now_starts_a_delayed_job_and_leaves_one_blocked_by_its_key_waiting(store, raw, add_job):
    waiting = [await add_job(waits_for=waits_for, available_at=LATER) for waits_for in ("'time'", "'lock'")]
    jobs = [await control.run_now(store, job_id, ALICE) for job_id in waiting]
    assert [job.waits_for for job in jobs] == [None, WaitsFor.LOCK]
    assert await raw.fetchval("SELECT bool_and(available_at <= now()) FROM dl_jobs")


async def test_run_now_makes_no_ready_job_younger(store, add_job):
    job_id = await add_job(available_at="timestamptz '2020-01-01Z'")
    assert (await control.run_now(store, job_id, ALICE)).available_at.year == 2020


@pytest.mark.requirement("Q4")
async def test_a_cancel_that_waits_for_a_finish_leaves_the_finished_job_alone(store, raw, add_job, until_blocked):
    job_id = await add_job(status="'running'")
    await raw.execute("BEGIN")
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now() WHERE job_id = $1", job_id)
    async with trio.open_nursery() as nursery:

        async def cancel():
            assert (await control.cancel(store, job_id, ALICE)).status is Status.SUCCEEDED

        nursery.start_soon(cancel)
        await until_blocked()
        await raw.execute("COMMIT")
    assert (await reads.get_job(store, job_id)).cancel_requested is False


@pytest.mark.requirement("Q4")
async def test_a_cancel_that_waits_for_a_claim_reaches_the_claimed_job(store, raw, add_job, until_blocked):
    job_id = await add_job()
    await raw.execute("BEGIN")
    await raw.execute("UPDATE dl_jobs SET status = 'running' WHERE job_id = $1", job_id)
    async with trio.open_nursery() as nursery:

        async def cancel():
            job = await control.cancel(store, job_id, ALICE)
            assert (job.status, job.cancel_requested) == (Status.RUNNING, True)

        nursery.start_soon(cancel)
        await until_blocked()
        await raw.execute("COMMIT")
    assert await journal(store, job_id) == []


@pytest.mark.requirement("Q4")
async def test_cancels_and_finishes_that_race_leave_each_job_with_one_end(store, database, add_job):
    jobs = [await add_job(status="'running'" if i % 2 else "'queued'") for i in range(40)]

    async def finish_all():
        async with raw_connection(database.dsn) as connection:
            for job_id in jobs:
                await connection.execute(
                    "UPDATE dl_jobs"
                    " SET status = CASE status WHEN 'queued' THEN 'running'::dl_status ELSE 'succeeded' END"
                    " WHERE job_id = $1 AND status IN ('queued', 'running')",
                    job_id,
                )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(finish_all)
        for job_id in reversed(jobs):
            await control.cancel(store, job_id, ALICE)
    for job_id in jobs:
        job = await reads.get_job(store, job_id)
        canceled = job.status is Status.CANCELED
        assert await journal(store, job_id) == ([("canceled", BY_ALICE)] if canceled else [])
        assert job.status in {Status.CANCELED, Status.SUCCEEDED} or (
            job.status is Status.RUNNING and job.cancel_requested
        )
    assert len((await reads.list_audit(store)).audit) == 40


@pytest.mark.requirement("Q16")
async def test_a_page_of_the_audit_ends_at_a_megabyte_of_details(store, raw):
    await raw.execute("INSERT INTO dl_audit (actor, action, detail) SELECT 'ann', 'odd', '[1]'")
    await raw.execute(
        "INSERT INTO dl_audit (actor, action, detail)"
        " SELECT 'ann', 'put_schedule', jsonb_build_object('text', repeat('x', 400000)) FROM generate_series(1, 3)"
    )
    first = await reads.list_audit(store)
    rest = await reads.list_audit(store, after=first.next)
    assert [record.action for record in first.audit] == ["put_schedule"] * 2
    assert [(record.action, len(str(record.detail)) > 1_000) for record in rest.audit] == [
        ("put_schedule", True),
        ("odd", False),
    ]
    assert (rest.audit[1].detail, rest.next) == ({"value": [1]}, None)
    searched = await search_audit(store, actor="ann")
    further = await search_audit(store, actor="ann", after=searched.next)
    assert (searched.rows, further.rows, further.next) == (first.audit, rest.audit, None)


@pytest.mark.requirement("Q7")
async def test_canceling_the_job_that_was_to_follow_wakes_the_next_of_its_key(store, add_job):
    ready = await add_job(lock_key="'k'")
    first = await add_job(lock_key="'k'", waits_for="'lock'", available_at=LATER, priority="1")
    second = await add_job(lock_key="'k'", waits_for="'lock'", available_at=LATER)
    other = await add_job(lock_key="'l'", waits_for="'lock'", available_at=LATER)
    await control.cancel(store, ready, ALICE)
    waits = [(await reads.get_job(store, job_id)).waits_for for job_id in (first, second, other)]
    assert waits == [None, WaitsFor.LOCK, WaitsFor.LOCK]


@pytest.mark.requirement("Q7")
async def test_canceling_a_ready_job_wakes_no_other_while_its_key_is_held(store, raw, add_job):
    ready = await add_job(lock_key="'k'")
    parked = await add_job(lock_key="'k'", waits_for="'lock'", available_at=LATER)
    await raw.execute("SELECT pg_advisory_lock(hashtext('k'))")
    await control.cancel(store, ready, ALICE)
    assert (await reads.get_job(store, parked)).waits_for is WaitsFor.LOCK


async def test_bulk_cancel_ends_the_queued_and_asks_the_running_until_none_is_left(store, raw, add_job):
    queued = [await add_job(queue="'a'") for _ in range(3)]
    running = [await add_job(queue="'a'", status="'running'") for _ in range(2)]
    other, ended = await add_job(queue="'b'"), await add_job(queue="'a'", status="'failed'")
    counts = [await control.cancel_many(store, JobFilter(queue="a"), ALICE, limit=2) for _ in range(4)]
    assert counts == [2, 2, 1, 0]
    assert {(await reads.get_job(store, job_id)).status for job_id in queued} == {Status.CANCELED}
    for job_id in running:
        job = await reads.get_job(store, job_id)
        assert (job.status, job.cancel_requested) == (Status.RUNNING, True)
    assert (await reads.get_job(store, other)).status is Status.QUEUED
    assert (await reads.get_job(store, ended)).status is Status.FAILED
    log = (await reads.list_audit(store)).audit
    assert sum(record.detail["canceled"] for record in log) == 3
    assert sum(record.detail["cancel_requested"] for record in log) == 2
    assert log[0].detail["filter"] == {"queue": "a"}
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'canceled'") == 3


async def test_bulk_cancel_touches_only_the_statuses_that_the_filter_names(store, add_job):
    queued, running = await add_job(), await add_job(status="'running'")
    assert await control.cancel_many(store, JobFilter(status=frozenset({Status.RUNNING})), ALICE) == 1
    assert await control.cancel_many(store, JobFilter(status=frozenset({Status.FAILED})), ALICE) == 0
    assert (await reads.get_job(store, queued)).status is Status.QUEUED
    assert (await reads.get_job(store, running)).cancel_requested


async def test_bulk_cancel_judges_a_row_again_that_changed_while_it_waited(store, raw, add_job, until_blocked):
    finished, moved, waiting = await add_job(status="'running'"), await add_job(queue="'a'"), await add_job()
    await raw.execute("BEGIN")
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = $1", finished)
    await raw.execute("UPDATE dl_jobs SET status = 'running' WHERE job_id = $1", moved)
    async with trio.open_nursery() as nursery:

        async def cancel():
            assert await control.cancel_many(store, JobFilter(task="t"), ALICE) == 2

        nursery.start_soon(cancel)
        await until_blocked()
        await raw.execute("COMMIT")
    jobs = [await reads.get_job(store, job_id) for job_id in (finished, moved, waiting)]
    assert [job.status for job in jobs] == [Status.SUCCEEDED, Status.RUNNING, Status.CANCELED]
    assert [job.cancel_requested for job in jobs] == [False, True, True]


async def test_bulk_cancels_of_the_same_jobs_do_not_block_each_other_for_good(store, raw, add_job):
    for _ in range(200):
        await add_job()
    counts = []

    async def cancel(job_filter):
        counts.append(await control.cancel_many(store, job_filter, ALICE, limit=150))

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            for job_filter in (JobFilter(queue="q"), JobFilter(task="t"), JobFilter(), JobFilter(queue="q")):
                nursery.start_soon(cancel, job_filter)
    while await control.cancel_many(store, JobFilter(), ALICE):
        pass
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'canceled'") == 200
    assert await raw.fetchval("SELECT sum((detail ->> 'canceled')::int) FROM dl_audit") == 200


async def test_bulk_cancel_wakes_the_parked_jobs_of_the_keys_it_frees(store, add_job):
    await add_job(queue="'a'", lock_key="'k'")
    parked = await add_job(queue="'b'", lock_key="'k'", waits_for="'lock'", available_at=LATER)
    assert await control.cancel_many(store, JobFilter(queue="a"), ALICE) == 1
    assert (await reads.get_job(store, parked)).waits_for is None


@pytest.mark.requirement("R2")
async def test_bulk_retry_takes_the_failed_canceled_and_lost_and_never_the_succeeded(store, raw, add_job):
    jobs = {status: await add_job(status=f"'{status}'", attempt="3") for status in Status}
    counts = [await control.retry_many(store, JobFilter(queue="q"), ALICE, limit=2) for _ in range(3)]
    assert counts == [2, 1, 0]
    after = {status: (await reads.get_job(store, job_id)) for status, job_id in jobs.items()}
    assert [after[status].status for status in ("failed", "canceled", "lost")] == [Status.QUEUED] * 3
    assert [after[status].attempt for status in ("failed", "canceled", "lost")] == [0] * 3
    assert [after[status].status for status in ("running", "succeeded")] == [Status.RUNNING, Status.SUCCEEDED]
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'requeue'") == 3
    assert [record.detail["retried"] for record in (await reads.list_audit(store)).audit] == [0, 1, 2]


@pytest.mark.requirement("R1")
async def test_bulk_changes_of_waiting_jobs_count_only_the_jobs_they_changed(store, raw, add_job):
    due = await add_job()
    for waits_for in ("'time'", "'time'", "'lock'"):
        await add_job(waits_for=waits_for, available_at=LATER if waits_for == "'time'" else "now()")
    await add_job(status="'running'", claimed_by="'w'", token="5")
    await add_job(status="'failed'", finished_at="now()")
    a_few = JobFilter(queue="q")
    counts = [await control.set_priority_many(store, a_few, 7, ALICE, limit=3) for _ in range(3)]
    assert counts == [3, 1, 0]
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'queued' AND priority = 7") == 4
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE priority = 7") == 4
    before = (await reads.get_job(store, due)).available_at
    assert [await control.run_now_many(store, a_few, ALICE) for _ in range(2)] == [2, 0]
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE waits_for IS NULL AND status = 'queued'") == 3
    assert (await reads.get_job(store, due)).available_at == before
    log = (await reads.list_audit(store)).audit
    assert [(record.action, record.detail["changed"]) for record in log][:2] == [("run_now_many", n) for n in (0, 2)]
    assert log[2].detail == {
        "filter": {"queue": "q"}, "limit": 3, "priority": 7, "changed": 0, "request_id": "req-1"
    }  # fmt: skip


async def test_bulk_actions_log_the_whole_filter(store):
    job_filter = JobFilter(status=frozenset({Status.LOST}), lock_key="k", created_to=None)
    assert await control.retry_many(store, job_filter, Operator("bob")) == 0
    [record] = (await reads.list_audit(store)).audit
    assert record.detail == {"filter": {"status": ["lost"], "lock_key": "k"}, "limit": 1000, "retried": 0}


async def test_a_bulk_limit_out_of_bounds_is_refused(store):
    for act, limit in itertools.product([control.cancel_many, control.retry_many, control.run_now_many], [0, 10_001]):
        with pytest.raises(BadRequest, match="limit"):
            await act(store, JobFilter(), ALICE, limit=limit)


async def test_pause_and_resume_are_kept_and_resume_wakes_the_queues_workers(store, raw):
    send, receive = trio.open_memory_channel(10)
    await raw._cross(raw.asyncpg.add_listener, "dl_jobs", lambda *event: send.send_nowait(event[3]))
    await control.pause(store, "a", ALICE)
    await control.pause(store, "a", ALICE)
    assert [queue.queue for queue in await reads.list_queues(store) if queue.paused] == ["a"]
    await control.resume(store, "a", ALICE)
    with trio.fail_after(patience_s()):
        assert await receive.receive() == "a"
    assert await reads.list_queues(store) == []
    log = (await reads.list_audit(store)).audit
    assert [record.action for record in log] == ["resume", "pause", "pause"]
    assert log[0].detail == {"queue": "a", "request_id": "req-1"}


async def test_a_queue_that_can_not_be_is_not_paused(store):
    for act, queue in itertools.product([control.pause, control.resume], ["", "a\x00", "a" * 201]):
        with pytest.raises(BadRequest, match="queue"):
            await act(store, queue, ALICE)
