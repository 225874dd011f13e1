"""The promises of `Jobs` hold in each way to the queue: by the database, through a service, and from asyncio."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from unittest.mock import AsyncMock

import attrs
import pytest
import trio
from conditions import patience_s, until

from dataloader import (
    AccessDenied,
    BadRequest,
    Conflict,
    IdempotencyConflict,
    JobFilter,
    JobNotFound,
    NewJob,
    Status,
    StoreUnavailable,
)
from dataloader.jobs import contract
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.failures import ErrorGroupNotFound, GroupRetry
from dataloader.jobs.ids import uuid7
from dataloader.jobs.listings import AuditPage, EventPage
from dataloader.jobs.operations.jobs import Changed
from dataloader.jobs.run_stats import StatsFilter
from dataloader.jobs.states import QueueState, WaitsFor

LATER = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
ALL_OF_IT = NewJob(
    queue="load/x y",
    task="load.year",
    args={"year": 1999, "deep": [{"a": None}]},
    idempotency_key="year-1999",
    lock_key="rates:1999",
    partition_key="1999",
    priority=7,
    available_at=LATER,
    max_attempts=3,
    lease_ttl_sec=33,
    producer="airflow",
    consumer_group="dwh",
)


async def _add(way, **fields):
    return (await way.jobs.enqueue("t", **{"queue": "q"} | fields)).job_id


async def _end(way, job_id, status="succeeded"):
    await way.raw.execute(
        "UPDATE dl_jobs SET status = $2::text::dl_status, waits_for = NULL, finished_at = now(), result = '[1]' "
        "WHERE job_id = $1",
        job_id,
        status,
    )


@pytest.mark.slow
async def test_a_job_is_added_with_all_that_was_asked_for_and_once(way):
    added = await way.jobs.enqueue_many([ALL_OF_IT])
    assert [(one.job_id, one.status, one.created) for one in added] == [(ALL_OF_IT.job_id, Status.QUEUED, True)]
    assert added[0].queue_state is QueueState.NO_WORKER
    job = await way.jobs.get(ALL_OF_IT.job_id)
    for field in set(attrs.fields(NewJob)) - {attrs.fields(NewJob).when_failed}:
        assert (field.name, getattr(job, field.name)) == (field.name, getattr(ALL_OF_IT, field.name))
    assert job.waits_for is WaitsFor.TIME
    again = await way.jobs.enqueue_many([attrs.evolve(ALL_OF_IT, job_id=uuid7())])
    assert [(one.job_id, one.created) for one in again] == [(ALL_OF_IT.job_id, False)]
    with pytest.raises(IdempotencyConflict) as conflict:
        await way.jobs.enqueue_many([attrs.evolve(ALL_OF_IT, job_id=uuid7(), args={})])
    assert (conflict.value.key, conflict.value.job_id) == ("year-1999", ALL_OF_IT.job_id)
    assert await way.raw.fetchval("SELECT count(*) FROM dl_jobs") == 1


@pytest.mark.slow
async def test_enqueue_by_a_known_id_adds_no_second_job_and_no_key(way):
    new = [NewJob(queue="q", task="t", args={"n": n}) for n in range(3)]
    first, again = [await way.jobs.enqueue_many(new) for _ in range(2)]
    assert [one.job_id for one in first] == [one.job_id for one in again] == [one.job_id for one in new]
    assert [one.created for one in (*first, *again)] == [True] * 3 + [False] * 3
    assert [(await way.jobs.get(one.job_id)).lock_key for one in new] == [None] * 3
    with pytest.raises(IdempotencyConflict):
        await way.jobs.enqueue_many([attrs.evolve(new[0], args={"n": 99})])
    assert await way.jobs.enqueue_many([]) == []


@pytest.mark.slow
async def test_a_batch_of_dependent_jobs_is_added_together_and_found_by_its_root(way):
    whole = uuid7()
    first = NewJob(queue="q", task="t", root=whole, job_id=whole)
    then = NewJob(queue="q", task="t", root=whole, after=[first.job_id], when_failed="run")
    await way.jobs.enqueue_many([first, then])
    job = await way.jobs.get(then.job_id)
    assert (job.waits_for, job.after, job.when_failed) == (WaitsFor.AFTER, [first.job_id], "run")
    assert {job.job_id for job in (await way.jobs.find(JobFilter(root=whole))).jobs} == {first.job_id, then.job_id}
    with pytest.raises(Conflict):
        await way.jobs.run_now(then.job_id)
    with pytest.raises(BadRequest) as unknown:
        await way.jobs.enqueue("t", queue="q", after=[uuid7()])
    assert unknown.value.field == "after"


@pytest.mark.slow
async def test_an_invalid_value_is_refused_by_the_name_of_its_field(way):
    for field, ask in {
        "queue": lambda: way.jobs.enqueue("t", queue=""),
        "task": lambda: way.jobs.enqueue("", queue="q"),
        "priority": lambda: way.jobs.enqueue("t", queue="q", priority=-1),
        "args": lambda: way.jobs.enqueue("t", {"text": "\0"}, queue="q"),
        "limit": lambda: way.jobs.find(limit=0),
        "after": lambda: way.jobs.find(after="nonsense"),
    }.items():
        with pytest.raises(BadRequest) as refused:
            await ask()
        assert refused.value.field == field
    job_id = await _add(way)
    for field, ask in {
        "limit": lambda: way.jobs.events(job_id, limit=1_001),
        "load": lambda: way.jobs.logs(job_id, load=""),
        "priority": lambda: way.jobs.set_priority(job_id, -1),
    }.items():
        with pytest.raises(BadRequest) as refused:
            await ask()
        assert refused.value.field == field
    for field, ask in {
        "limit": lambda: way.jobs.cancel(JobFilter(queue="q"), limit=10_001),
        # An empty filter would match every job, and an ID in a text is not an ID yet.
        "which": lambda: way.jobs.cancel(JobFilter()),
        "which ": lambda: way.jobs.cancel(str(job_id)),
        "queue": lambda: way.jobs.pause("\n"),
    }.items():
        with pytest.raises(BadRequest) as refused:
            await ask()
        assert refused.value.field == field.strip()
    assert (await way.jobs.get(job_id)).status is Status.QUEUED


@pytest.mark.slow
@pytest.mark.requirement("R2", "S6")
async def test_arguments_with_a_number_that_json_does_not_have_are_refused_by_its_path(way):
    with pytest.raises(BadRequest, match=r"args\.rates\[1\]: must be a finite number, not nan"):
        await way.jobs.enqueue("hold", {"rates": [None, float("nan")]})


@pytest.mark.slow
async def test_a_group_of_errors_is_found_and_retried_and_each_error_is_in_the_log(way):
    ids = [await _add(way) for _ in range(3)]
    await way.raw.execute("UPDATE dl_jobs SET status = 'running', claimed_by = 'w', token = 1")
    await way.raw.execute(
        "UPDATE dl_jobs SET status = CASE WHEN job_id = $1 THEN 'queued' ELSE 'failed' END::dl_status,"
        " error = 'no row ' || job_id || ' at password=sesame', available_at = now() + interval '1 h'",
        ids[0],
    )
    [group] = (await way.jobs.error_groups(task="t")).groups
    assert (group.task, group.jobs, group.waiting) == ("t", 3, 1)
    assert group.error.startswith("no row # at password=")
    assert [one.jobs for one in (await way.jobs.error_groups(state="waiting")).groups] == [1]
    assert len((await way.jobs.error_groups(exact=True, limit=2)).groups) == 2
    assert {job.job_id for job in (await way.jobs.find(JobFilter(error_group=group.group))).jobs} == set(ids)
    errors = (await way.jobs.errors(group=group.group, queue="q", limit=2)).errors
    assert [(one.worker, one.group, one.error[:6]) for one in errors] == [("w", group.group, "no row")] * 2
    [error] = (await way.jobs.errors(job_id=ids[0], task="t")).errors
    assert (error.status, error.job_id) == (Status.QUEUED, ids[0])
    some = await way.jobs.retry_some_of_group(GroupRetry(group=group.group, at=LATER), limit=2)
    assert (some.changed, some.next is None) == (2, False)
    assert await way.jobs.retry_group(group.group, at=LATER, spread_s=0.5, state="failed", limit=10) == 1
    assert [(await way.jobs.get(job_id)).status for job_id in ids] == [Status.QUEUED] * 3
    assert await way.jobs.retry_group(group.group) == 1
    with pytest.raises(ErrorGroupNotFound):
        await way.jobs.retry_group("0" * 16)
    assert (await way.jobs.get(ids[0])).waits_for is None
    for field, ask in {
        "group": lambda: way.jobs.retry_group("x"),
        "error_group": lambda: way.jobs.find(JobFilter(error_group="x")),
        "spread_s": lambda: way.jobs.retry_group(group.group, spread_s=-1),
    }.items():
        with pytest.raises(BadRequest) as refused:
            await ask()
        assert refused.value.field == field


@pytest.mark.slow
async def test_an_unknown_id_gives_the_same_message_in_every_way(way):
    job_id = uuid7()
    for ask in (
        way.jobs.get,
        way.jobs.events,
        way.jobs.logs,
        way.jobs.wait,
        way.jobs.cancel,
        way.jobs.retry,
        way.jobs.run_now,
        lambda job_id: way.jobs.set_priority(job_id, 1),
    ):
        with pytest.raises(JobNotFound, match=f"^no job has the ID {job_id}$"):
            await ask(job_id)


@pytest.mark.slow
async def test_an_id_that_is_text_is_refused_by_every_way(way):
    text = str(await _add(way))
    for ask in (way.jobs.get, way.jobs.events, way.jobs.logs, way.jobs.wait, way.jobs.why):
        with pytest.raises(BadRequest, match=f"^job_id: must be a UUID, not '{text}'$"):
            await ask(text)


@pytest.mark.slow
async def test_a_status_conflict_names_the_job_and_its_status(way):
    queued, ended = [await _add(way) for _ in range(2)]
    await _end(way, ended)
    for job_id, status, ask in (
        (queued, "queued", way.jobs.retry),
        (ended, "succeeded", way.jobs.retry),
        (ended, "succeeded", way.jobs.run_now),
        (ended, "succeeded", lambda job_id: way.jobs.set_priority(job_id, 1)),
    ):
        with pytest.raises(
            Conflict, match=f"^job {job_id} is {status}; [a-z_]+ needs a job with the status "
        ) as conflict:
            await ask(job_id)
        assert (str(conflict.value.job_id), conflict.value.status) == (str(job_id), status)
    assert (await way.jobs.cancel(ended)).status is Status.SUCCEEDED


@pytest.mark.slow
async def test_one_job_is_changed_and_comes_back_as_it_stands_then(way):
    job_id = await _add(way, available_at=LATER)
    assert (await way.jobs.set_priority(job_id, 3)).priority == 3
    assert (await way.jobs.run_now(job_id)).waits_for is None
    assert (await way.jobs.cancel(job_id)).status is Status.CANCELED
    assert (await way.jobs.retry(job_id)).status is Status.QUEUED
    await way.raw.execute(
        "UPDATE dl_jobs SET status = 'running', claimed_by = 'x', lease_expires_at = 'infinity', "
        "heartbeat_at = now() - interval '1 hour'"
    )
    with pytest.raises(Conflict, match="its lease never expires"):
        await way.jobs.retry(job_id)
    assert (await way.jobs.retry(job_id, force=True)).status is Status.QUEUED
    page = await way.jobs.audit()
    assert [entry.action for entry in page.audit] == ["retry", "retry", "cancel", "run_now", "set_priority"]
    assert {(entry.actor, entry.job_id) for entry in page.audit} == {("chief", job_id)}
    latest = await way.jobs.audit(limit=2)
    rest = await way.jobs.audit(after=latest.next)
    assert latest.audit + rest.audit == page.audit
    assert rest == AuditPage(page.audit[2:], None)


@pytest.mark.parametrize(("change", "least"), [("cancel", 1), ("retry", contract.BATCH // 2)])
async def test_a_change_of_all_jobs_continues_while_enough_of_a_batch_changes(change, least):
    performer = AsyncMock()
    performer.perform.side_effect = map(Changed, [1_000, least, least - 1, 7])
    assert await getattr(Jobs(performer), change)(JobFilter(queue="q")) == 1_000 + 2 * least - 1


@pytest.mark.slow
async def test_jobs_of_a_filter_are_changed_up_to_a_limit_or_all_of_them_in_batches(way):
    await way.raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, available_at, waits_for)"
        " SELECT gen_random_uuid(), 'q', 't', i::text, false, $1, 'time' FROM generate_series(1, $2) AS i",
        LATER,
        2 + contract.BATCH + 1,
    )
    other = await _add(way, queue="other", available_at=LATER)
    of_q = JobFilter(queue="q")
    for change in (
        lambda **limit: way.jobs.set_priority(of_q, 5, **limit),
        lambda **limit: way.jobs.run_now(of_q, **limit),
        lambda **limit: way.jobs.cancel(of_q, **limit),
        lambda **limit: way.jobs.retry(JobFilter(queue="q", status=frozenset({Status.CANCELED})), **limit),
    ):
        assert [await change(limit=2), await change(), await change()] == [2, contract.BATCH + 1, 0]
    found = await way.raw.fetch(
        "SELECT status::text, priority, waits_for, count(*) FROM dl_jobs WHERE queue = 'q' GROUP BY 1, 2, 3"
    )
    assert [tuple(row) for row in found] == [("queued", 5, None, 2 + contract.BATCH + 1)]
    assert ((await way.jobs.get(other)).priority, (await way.jobs.get(other)).waits_for) == (100, WaitsFor.TIME)


@pytest.mark.slow
async def test_jobs_are_found_by_each_criterion_in_pages_newest_first(way):
    ids = [await _add(way, lock_key=f"k{n}", **({"queue": "b"} if n == 2 else {})) for n in range(5)]
    await way.raw.execute("UPDATE dl_jobs SET created_at = $2 WHERE job_id = $1", ids[0], LATER - timedelta(days=9))
    await _end(way, ids[1], "failed")
    await way.raw.execute("UPDATE dl_jobs SET schedule = 'nightly', planned_at = now() WHERE job_id = $1", ids[3])
    for criteria, expected in (
        ({}, [4, 3, 2, 1, 0]),
        ({"queue": "b"}, [2]),
        ({"task": "u"}, []),
        ({"status": frozenset({Status.FAILED, Status.LOST})}, [1]),
        ({"lock_key": "k3"}, [3]),
        ({"created_to": LATER - timedelta(days=8)}, [0]),
        ({"created_from": LATER - timedelta(days=8), "queue": "q"}, [4, 3, 1]),
        ({"finished_from": LATER - timedelta(days=8)}, [1]),
        ({"finished_to": LATER - timedelta(days=8)}, []),
        ({"worker": "host:1"}, []),
        ({"schedule": "nightly"}, [3]),
    ):
        found, after = [], None
        while True:
            page = await way.jobs.find(JobFilter(**criteria), limit=2, after=after)
            assert len(page.jobs) <= 2
            found += page.jobs
            if (after := page.next) is None:
                break
        assert (criteria, [ids.index(job.job_id) for job in found]) == (criteria, expected)
        assert found == (await way.jobs.find(JobFilter(**criteria))).jobs


@pytest.mark.slow
async def test_why_a_job_does_not_run_is_one_sentence(way):
    job_id = await _add(way, available_at=LATER)
    reason = await way.jobs.why(job_id)
    assert (reason.job_id, reason.cause, reason.until) == (job_id, "time", LATER)
    assert reason.text == f"It is not due until {LATER:%Y-%m-%d %H:%M:%S}Z."
    assert reason.also == ["No worker serves the queue q."]


@pytest.mark.slow
async def test_a_journal_and_a_log_are_read_in_pages(way):
    job_id = await _add(way)
    await way.raw.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, payload) SELECT $1, 'q', 'log', jsonb_build_object("
        "'level', CASE n % 2 WHEN 0 THEN 'info' ELSE 'error' END, 'message', 'line ' || n, 'fields', "
        "jsonb_build_object('load', 'l' || n)) FROM generate_series(1, 5) AS n",
        job_id,
    )
    whole = await way.jobs.events(job_id)
    assert [event.kind for event in whole.events] == ["queued", *["log"] * 5]
    begin = await way.jobs.events(job_id, limit=4)
    assert begin.events + (await way.jobs.events(job_id, after=begin.next)).events == whole.events
    assert await way.jobs.events(job_id, after=whole.events[-1].event_id) == EventPage([], None)
    first = await way.jobs.logs(job_id, limit=3)
    rest = await way.jobs.logs(job_id, after=first.next)
    assert [line.message for line in (*first.lines, *rest.lines)] == [f"line {n}" for n in range(1, 6)]
    assert rest.next is None
    assert [line.message for line in (await way.jobs.logs(job_id, level="error")).lines] == [
        "line 1",
        "line 3",
        "line 5",
    ]
    assert [line.fields for line in (await way.jobs.logs(job_id, load="l2")).lines] == [{"load": "l2"}]


@pytest.mark.full
async def test_a_wait_reports_changes_and_returns_the_job_when_it_has_ended(way):
    job_id = await _add(way)
    seen, ended = [], []

    async def wait():
        ended.append(await way.jobs.wait(job_id, on_change=seen.append))

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await until(lambda: _length(seen))
            await way.raw.execute("UPDATE dl_jobs SET progress = '{\"rows\": 1}'")
            await until(lambda: _length(seen), lambda length: length == 2)
            await _end(way, job_id)
    assert [(job.status, job.progress) for job in seen] == [
        ("queued", {}), ("queued", {"rows": 1}), ("succeeded", {"rows": 1}),
    ]  # fmt: skip
    assert [(job.status, job.result) for job in ended] == [("succeeded", [1])]
    assert (await way.jobs.wait(job_id)).status is Status.SUCCEEDED


@pytest.mark.slow
async def test_a_wait_ends_with_its_callers_scope_and_leaves_the_way_usable(way):
    job_id = await _add(way)
    with trio.fail_after(patience_s()):
        with trio.move_on_after(0.3) as scope:
            await way.jobs.wait(job_id)
        assert scope.cancelled_caught
        assert (await way.jobs.get(job_id)).status is Status.QUEUED


@pytest.mark.slow
async def test_queues_with_any_name_are_listed_paused_and_resumed(way):
    names = ["a/b c", "q", "ü?#"]
    for name in names:
        await _add(way, queue=name)
        await way.jobs.pause(name)
    await way.raw.execute(
        "INSERT INTO dl_workers (worker, host, pid, version, queues, tasks) VALUES ('w', 'h', 1, '1', $1, $2)",
        '{"q": 3}',
        ["t"],
    )
    assert sorted((queue.queue, queue.paused, queue.ready, queue.slots) for queue in await way.jobs.queues()) == [
        ("a/b c", True, 1, 0), ("q", True, 1, 3), ("ü?#", True, 1, 0),
    ]  # fmt: skip
    assert {job.queue_state for job in (await way.jobs.find()).jobs} == {QueueState.PAUSED}
    for name in names:
        await way.jobs.resume(name)
    assert {queue.paused for queue in await way.jobs.queues()} == {False}
    [worker] = await way.jobs.workers()
    assert (worker.worker, worker.queues, worker.tasks) == ("w", {"q": 3}, ["t"])
    assert [entry.action for entry in (await way.jobs.audit()).audit] == ["resume"] * 3 + ["pause"] * 3


@pytest.mark.slow
@pytest.mark.requirement("R3")
async def test_statistics_are_read_in_pages(way):
    await way.raw.execute(
        "INSERT INTO dl_run_stats VALUES ('2026-03-01T10:00Z', 'q', 't', 'failed', 2, 5, 4),"
        " ('2026-03-01T10:00Z', 'a/b c', 't', 'succeeded', 1, 1, 1), ('2026-03-02T10:00Z', 'q', 't', 'failed', 1, 1, 1)"
    )
    begin = datetime(2026, 3, 1, 10, 30, tzinfo=UTC)
    page = await way.jobs.stats(StatsFilter(begin=begin, end=begin + timedelta(hours=12)), limit=1)
    [first] = page.stats
    assert (first.queue, first.outcome, first.runs) == ("a/b c", "succeeded", 1)
    rest = await way.jobs.stats(StatsFilter(begin=begin, end=begin + timedelta(hours=12)), after=page.next)
    assert [(one.queue, one.mean_s, one.max_s) for one in rest.stats] == [("q", 2.5, 4.0)]
    assert rest.next is None
    days = await way.jobs.stats(StatsFilter(begin=begin, queue="q", by="day"))
    assert [(one.at.hour, one.runs) for one in days.stats] == [(0, 2), (0, 1)]
    with pytest.raises(BadRequest, match="after"):
        await way.jobs.stats(StatsFilter(begin=begin), after="nonsense")


@pytest.mark.slow
@pytest.mark.requirement("R3")
async def test_a_job_shows_when_it_changed_last(way):
    added = await way.jobs.enqueue("t", queue="q")
    job = await way.jobs.get(added.job_id)
    assert job.changed_at == job.created_at
    await way.raw.execute("UPDATE dl_jobs SET heartbeat_at = created_at + interval '1 min', started_at = created_at")
    [listed] = (await way.jobs.find()).jobs
    assert listed.changed_at == job.created_at + timedelta(minutes=1)
    await way.raw.execute(
        "INSERT INTO dl_job_events (job_id, queue, kind, ts)"
        " SELECT job_id, queue, 'requeue', created_at + interval '1 h' FROM dl_jobs"
    )
    assert (await way.jobs.get(added.job_id)).changed_at == job.created_at + timedelta(hours=1)


@pytest.mark.slow
async def test_denied_access_and_an_unreachable_queue_are_different_errors(way):
    async with way.stranger as client:
        with pytest.raises(AccessDenied):
            await client.jobs.queues()
    async with way.nowhere as client:
        jobs = client.jobs
        for ask in (jobs.queues, lambda: jobs.enqueue("t", queue="q"), lambda: jobs.wait(uuid7())):
            with pytest.raises(StoreUnavailable) as away:
                await ask()
            assert type(away.value) is StoreUnavailable


async def _length(items):
    return len(items)
