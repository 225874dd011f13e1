"""A run stops immediately; received rows are written, and nothing is wrongly recorded as done or gone (E4)."""

from __future__ import annotations

import json
import signal
import threading
import time
from functools import partial
from uuid import UUID

import pytest
import trio
from conditions import until, when_ended
from etl_tasks import item, items_load

from dataloader import Tasks
from dataloader.flows.etl import CancellationToken, Table, run_load
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import LeaseLost
from dataloader.store.etl.run_journal import staging_name
from dataloader.store.etl.run_views import get_run_view
from dataloader.store.queue.control import cancel

pytestmark = pytest.mark.requirement("E4")
OPERATOR = Operator("test", None)
NEVER_S = 3_600
AT_ONCE_S = 1e-9
"""Expires before anything else is done."""
DELETING = Table("item", key="id", delete_missing="deleted_at")


@pytest.fixture
def cancelled_by():
    """Return a function that returns a registry with a load that the token stops."""

    def cancelled_by(token, load):
        tasks = Tasks()
        tasks.task(load.name)(partial(run_load, load, cancel=token))
        return tasks

    return cancelled_by


@pytest.fixture
def record(raw):
    """Return a function that reads the rows' IDs, the cursor's day, the statuses, and whether all slots are free."""

    async def record():
        ids = [row["id"] for row in await raw.fetch("SELECT id FROM item ORDER BY id")]
        cursor = await raw.fetchval(
            "SELECT to_char((state ->> 'upto')::timestamptz AT TIME ZONE 'UTC', 'DD') FROM dl_load_state"
        )
        run = await raw.fetchrow(
            "SELECT r.status, t.status AS task FROM dl_etl_runs r JOIN dl_etl_tasks t USING (run_id)"
        )
        assert await raw.fetchval("SELECT count(*) FROM dl_sources WHERE holder IS NOT NULL") == 0
        return ids, cursor, tuple(run)

    return record


@pytest.fixture
def progress_of(raw):
    """Return a function that reads the progress of the job."""

    async def progress_of():
        return json.loads(await raw.fetchval("SELECT progress FROM dl_jobs") or "{}")

    return progress_of


def test_a_token_can_be_cancelled_from_any_thread_or_by_its_timeout():
    token, brief, long = CancellationToken(), CancellationToken(timeout=AT_ONCE_S), CancellationToken(timeout=NEVER_S)
    assert not token.is_cancelled
    threads = [threading.Thread(target=token.cancel) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert token.is_cancelled
    assert (brief.is_cancelled, long.is_cancelled) == (True, False)


async def test_a_token_s_timeout_stops_what_is_under_way(autojump_clock):
    with CancellationToken(timeout=NEVER_S).scope() as scope:
        await trio.sleep_forever()
    assert scope.cancelled_caught


async def test_a_token_that_was_cancelled_before_the_start_sends_no_request(items, cancelled_by, outcome_of, record):
    token = CancellationToken()
    token.cancel()
    outcome = await outcome_of(cancelled_by(token, items_load(items.service.url)))
    assert (outcome.status, outcome.result["status"], outcome.result["counts"]) == ("canceled", "canceled", {})
    assert items.service.requests == []
    assert await record() == ([], None, ("canceled", "canceled"))


async def test_a_token_whose_time_was_over_before_the_start_sends_no_request(items, cancelled_by, outcome_of):
    token = CancellationToken(timeout=AT_ONCE_S)
    assert (await outcome_of(cancelled_by(token, items_load(items.service.url)))).status == "canceled"
    assert items.service.requests == []


def _wait_for_a_segment(database):
    for _ in range(1_000):
        if database.psql("SELECT count(*) FROM dl_etl_segments") != "0":
            return
        time.sleep(0.02)


async def test_another_thread_s_cancel_stops_a_run_in_its_pause(items, cancelled_by, outcome_of, record, database):
    items.records = [item(1, 1), item(2, 2)]
    token = CancellationToken()
    threads = []

    def cancel_later():
        _wait_for_a_segment(database)
        token.cancel()

    def transform(record):
        # By a thread that Trio does not know.
        threads.append(threading.Thread(target=cancel_later))
        threads[-1].start()
        return record

    load = items_load(items.service.url, transform=transform, pipeline={"rate_min": NEVER_S, "rate_max": NEVER_S})
    outcome = await outcome_of(cancelled_by(token, load), to="2026-01-03")
    threads[0].join()
    assert (outcome.status, outcome.result["status"]) == ("canceled", "canceled")
    assert len(items.service.requests) == 1
    counts = {"requests": 1, "records": 1, "inserted": 1, "segments": 1}
    assert outcome.result["counts"].items() >= counts.items()
    # The first day was done; the run does not wait any more.
    assert await record() == ([1], "02", ("canceled", "canceled"))
    assert "waiting" not in outcome.progress[-1]


@pytest.mark.slow
async def test_a_token_stops_a_run_in_a_response_and_what_was_queued_is_written(
    items, cancelled_by, outcome_of, record, raw
):
    await raw.execute("ALTER TABLE item ADD deleted_at timestamptz")
    await raw.execute("INSERT INTO item VALUES (9, '2026-01-02', 'old')")
    items.records = [item(1, 1), item(2, 2), item(3, 2), item(4, 2)]
    token, ended = CancellationToken(), threading.Event()
    # There is no answer before the run has ended.
    items.before = lambda _seen: items.asked()[-1] == "2026-01-02/2" and (token.cancel(), ended.wait(20))
    load = items_load(items.service.url, page_size=2, table=DELETING)
    outcome = await outcome_of(cancelled_by(token, load), to="2026-01-04")
    ended.set()
    assert outcome.status == "canceled"
    assert items.asked() == ["2026-01-01/1", "2026-01-02/1", "2026-01-02/2"]
    # Received rows of the second day are written; none is marked as gone, and the day is not done.
    assert await record() == ([1, 2, 3, 9], "02", ("canceled", "canceled"))
    assert await raw.fetchval("SELECT count(*) FROM item WHERE deleted_at IS NOT NULL") == 0
    assert (outcome.result["counts"]["inserted"], outcome.result["counts"]["segments"]) == (3, 1)


@pytest.mark.slow
async def test_a_cancelled_run_resumes_after_its_last_segment(items, cancelled_by, outcome_of, record):
    items.records = [item(number, number) for number in range(1, 4)]
    token = CancellationToken()
    stopped = threading.Event()
    # There is no answer before the run has ended.
    items.before = lambda seen: seen.query["from"] == "2026-01-02" and (token.cancel(), stopped.wait(20))
    load = items_load(items.service.url)
    assert (await outcome_of(cancelled_by(token, load), to="2026-01-04")).status == "canceled"
    stopped.set()
    ids, cursor, _ = await record()
    assert (ids, cursor) == ([1], "02")
    asked = len(items.service.requests)
    items.before = lambda _seen: None
    outcome = await outcome_of(load, to="2026-01-04")
    assert outcome.status == "succeeded"
    assert items.asked()[asked:] == ["2026-01-02", "2026-01-03"]


async def test_rows_that_are_not_written_by_the_deadline_are_given_up(items, cancelled_by, outcome_of, raw):
    items.records = [item(1)]
    token, release = CancellationToken(), threading.Event()

    def transform(record):
        token.cancel()
        release.wait(20)
        return record

    load = items_load(items.service.url, transform=transform, pipeline={"drain_timeout": 0.2})
    try:
        outcome = await outcome_of(cancelled_by(token, load), to="2026-01-04")
    finally:
        release.set()
    assert outcome.status == "canceled"
    assert await raw.fetchval("SELECT count(*) FROM item") == 0


@pytest.mark.slow
async def test_a_job_cancelled_in_a_pause_writes_its_rows_and_sends_no_more_requests(
    items, supervised, record, progress_of
):
    items.records = [item(1, 1), item(2, 2)]
    load = items_load(items.service.url, pipeline={"rate_min": NEVER_S, "rate_max": NEVER_S})
    async with supervised(load) as supervisor:
        job = await supervisor.jobs.enqueue("items", {"to": "2026-01-03"}, queue="q")

        progress = await until(progress_of, lambda progress: "waiting" in progress and progress.get("inserted"))
        assert (progress["waiting"]["for"], progress["waiting"]["source"]) == ("pause", "127.0.0.1")
        await cancel(supervisor.database, job.job_id, OPERATOR)
        ended = await when_ended(supervisor, job.job_id)
        view = await get_run_view(supervisor.database, job.job_id)
    assert (ended.status, ended.result["status"]) == ("canceled", "canceled")
    assert (view.status, view.rows, view.tasks[0].counts["requests"]) == ("canceled", 1, 1)
    assert ended.result["counts"]["inserted"] == 1
    assert "waiting" not in ended.progress
    assert await record() == ([1], "02", ("canceled", "canceled"))
    assert len(items.service.requests) == 1


@pytest.mark.slow
async def test_a_canceled_job_that_is_retried_requests_no_committed_segment(items, supervised):
    items.records = [item(1, 1), item(2, 2)]
    items.service.misbehave("from=2026-01-02", delay_s=NEVER_S)
    async with supervised(items_load(items.service.url)) as supervisor:
        job = await supervisor.jobs.enqueue("items", {"from": "2026-01-01", "to": "2026-01-03"}, queue="q")

        async def asked():
            return len(items.service.requests)

        await until(asked, lambda number: number == 2)
        await cancel(supervisor.database, job.job_id, OPERATOR)
        assert (await when_ended(supervisor, job.job_id)).status == "canceled"
        await supervisor.jobs.retry(job.job_id)
        assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
    assert items.asked() == ["2026-01-01", "2026-01-02", "2026-01-02"]


@pytest.mark.slow
async def test_a_job_that_is_cancelled_in_a_response_with_rows_queued_writes_them(items, supervised, record, raw):
    await raw.execute("ALTER TABLE item ADD deleted_at timestamptz")
    await raw.execute("INSERT INTO item VALUES (9, '2026-01-01', 'old')")
    items.records = [item(number, 1) for number in range(1, 6)]
    processing, release = threading.Event(), threading.Event()

    def transform(record):
        if record["id"] == 1:
            processing.set()
            release.wait(20)
        return record

    # The first page's records are in a worker, the second page's behind them; the third page never arrives.
    items.service.misbehave("page=3", delay_s=NEVER_S)
    load = items_load(items.service.url, page_size=2, table=DELETING, transform=transform, pipeline={"workers": 2})
    async with supervised(load) as supervisor:
        job = await supervisor.jobs.enqueue("items", {"to": "2026-01-03"}, queue="q")

        async def asked():
            return len(items.service.requests)

        await until(asked, lambda number: number == 3)
        await cancel(supervisor.database, job.job_id, OPERATOR)
        # The slot is returned: the request has ended, while the record is still being processed.
        await until(partial(raw.fetchval, "SELECT holder IS NULL FROM dl_sources"))
        assert processing.is_set()
        assert await raw.fetchval("SELECT status::text FROM dl_jobs") == "running"
        release.set()
        ended = await when_ended(supervisor, job.job_id)
    assert ended.status == "canceled"
    assert ended.result["counts"].items() >= {"requests": 3, "records": 4, "inserted": 4}.items()
    assert await record() == ([1, 2, 3, 4, 9], None, ("canceled", "canceled"))
    assert await raw.fetchval("SELECT count(*) FROM item WHERE deleted_at IS NOT NULL") == 0
    assert len(items.service.requests) == 3


@pytest.mark.slow
async def test_a_job_that_is_cancelled_in_a_wait_for_a_place_in_the_queue_ends(items, supervised, record, progress_of):
    items.records = [item(number, number) for number in range(1, 5)]
    release = threading.Event()

    def transform(record):
        release.wait(20)
        return record

    load = items_load(items.service.url, transform=transform, pipeline={"workers": 1, "queue_size": 1})
    async with supervised(load) as supervisor:
        job = await supervisor.jobs.enqueue("items", {"to": "2026-01-05"}, queue="q")

        full = {"for": "a place in the processing queue"}
        await until(progress_of, lambda progress: progress.get("waiting") == full)
        await cancel(supervisor.database, job.job_id, OPERATOR)
        await supervisor.signals.cancel_requested.wait()
        release.set()
        ended = await when_ended(supervisor, job.job_id)
    assert (ended.status, ended.result["counts"]["inserted"]) == ("canceled", 2)
    assert len(items.service.requests) == 2
    assert (await record())[:2] == ([1, 2], "03")


@pytest.mark.slow
async def test_a_task_timeout_writes_received_rows_and_the_next_attempt_continues(items, supervised, raw, record):
    items.records = [item(number, number) for number in range(1, 4)]
    items.service.misbehave("from=2026-01-02", delay_s=NEVER_S)
    async with supervised(items_load(items.service.url, timeout_s=5), claim_backoff_s=1, poll_s=1) as supervisor:
        job = await supervisor.jobs.enqueue("items", {"to": "2026-01-04"}, queue="q")
        row = await until(partial(raw.fetchrow, "SELECT status::text, error FROM dl_jobs"), lambda row: row["error"])
        assert row["status"] == "queued"
        assert row["error"].startswith("timeout: the run took longer than 5 s")
        assert (await record())[:2] == ([1], "02")
        await raw.execute("UPDATE dl_jobs SET available_at = now()")
        ended = await when_ended(supervisor, job.job_id)
    assert ended.status == "succeeded"
    assert items.asked() == ["2026-01-01", "2026-01-02", "2026-01-02", "2026-01-03"]
    assert await record() == ([1, 2, 3], "04", ("succeeded", "succeeded"))


@pytest.mark.slow
async def test_a_drain_releases_the_job_and_the_next_attempt_continues(items, supervised, raw, record):
    items.records = [item(number, number) for number in range(1, 4)]
    items.service.misbehave("from=2026-01-02", delay_s=NEVER_S)
    load = items_load(items.service.url)
    async with supervised(load, drain_timeout_s=0.1) as supervisor:
        job = await supervisor.jobs.enqueue("items", {"to": "2026-01-04"}, queue="q")
        await until(partial(raw.fetchval, "SELECT count(*) FROM dl_etl_segments"))
        report = await supervisor.drain()
    assert (report.finished, report.returned, report.is_clean) == (0, 1, True)
    assert await record() == ([1], "02", ("interrupted", "interrupted"))
    row = await raw.fetchrow("SELECT status::text, attempt FROM dl_jobs")
    assert tuple(row) == ("queued", 0)
    async with supervised(load) as supervisor:
        ended = await when_ended(supervisor, job.job_id)
    assert (ended.status, ended.result["counts"]["segments"]) == ("succeeded", 3)
    assert items.asked() == ["2026-01-01", "2026-01-02", "2026-01-02", "2026-01-03"]
    assert await record() == ([1, 2, 3], "04", ("succeeded", "succeeded"))


@pytest.mark.slow
async def test_a_run_whose_job_is_another_worker_s_by_now_writes_nothing_more(items, outcome_of, raw, database):
    items.records = [item(number, number) for number in range(1, 4)]

    def stolen(seen):
        if seen.query["from"] == "2026-01-02":
            _wait_for_a_segment(database)
            job_id = database.psql("SELECT job_id FROM dl_jobs")
            token = int(database.psql("UPDATE dl_jobs SET token = token + 1000 RETURNING token"))
            database.psql(f"CREATE TABLE {staging_name(UUID(job_id), token, 0)} ()")

    items.before = stolen
    outcome = await outcome_of(items_load(items.service.url), to="2026-01-04")
    assert LeaseLost.__name__ in outcome.error
    assert await raw.fetchval("SELECT array_agg(id) FROM item") == [1]
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_segments") == 1
    # Its own stage is gone, the other worker's is not.
    assert await raw.fetchval("SELECT count(*) FROM pg_class WHERE relname LIKE 'dl_stage%'") == 1


@pytest.mark.full
@pytest.mark.requirement("E4", "Q15")
async def test_a_sigterm_releases_the_job_and_another_process_continues_it(items, serve, add, row_when, raw, record):
    items.records = [item(number, number) for number in range(1, 8)]
    environment = {"ITEMS_URL": items.service.url}
    service = await serve(tasks="etl_tasks:tasks", environment=environment, drain_timeout_sec=0.1)
    items.service.misbehave("from=2026-01-04", delay_s=NEVER_S)
    job_id = await add("items", {"to": "2026-01-08"})

    async def asked():
        return items.service.asked("from=2026-01-04")

    await until(asked)
    service.signal(signal.SIGTERM)
    assert await service.exit_code(within_s=20) == 0
    assert (await record())[:2] == ([1, 2, 3], "04")
    await serve(tasks="etl_tasks:tasks", environment=environment)
    row = await row_when(job_id, "succeeded", within_s=30)
    assert row["attempt"] == 1
    assert items.asked() == [f"2026-01-{number:02}" for number in (1, 2, 3, 4, 4, 5, 6, 7)]
    assert await record() == ([1, 2, 3, 4, 5, 6, 7], "08", ("succeeded", "succeeded"))


@pytest.mark.slow
async def test_a_cancel_by_http_ends_a_job_with_its_counts(items, serve, add, row_when, raw, client_of, record):
    items.records = [item(1, 1), item(2, 2)]
    environment = {"ITEMS_URL": items.service.url}
    service = await serve(tasks="etl_tasks:tasks", environment=environment)
    items.service.misbehave("from=2026-01-02", delay_s=NEVER_S)
    job_id = await add("items", {"to": "2026-01-04"})
    await until(partial(raw.fetchval, "SELECT count(*) FROM dl_etl_segments"))
    async with client_of(service) as client:
        answer = await client.post(f"/api/v1/jobs/{job_id}/cancel")
        assert answer.is_success, answer.text
        await row_when(job_id, "canceled")
        shown = (await client.get(f"/api/v1/jobs/{job_id}")).json()
    assert (shown["status"], shown["result"]["status"]) == ("canceled", "canceled")
    assert shown["result"]["counts"]["inserted"] == 1
    assert await record() == ([1], "02", ("canceled", "canceled"))
    assert len(items.service.requests) == 2
