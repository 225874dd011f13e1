"""End of a run by its failures: a run with failures does not simply succeed (E10, E12)."""

from __future__ import annotations

import socket

import pytest
from etl_tasks import BEARS_ALL, item, items_load, with_limits

from dataloader import Tasks
from dataloader.flows.etl import Detail, Flow, Load, Request, Table, add_flows, add_loads, run_load
from dataloader.flows.etl.declare.pipeline_config import PipelineConfig
from dataloader.flows.etl.run.load_metrics import LoadMetrics
from dataloader.flows.etl.run.load_progress import LoadProgress
from dataloader.flows.etl.run.load_verdict import judge
from dataloader.store.etl.failure_rows import Failure
from dataloader.testing import drain_queue

pytestmark = pytest.mark.requirement("E10")
WITH_FAILURES = "succeeded_with_failures"


@pytest.fixture
def statuses(raw):
    """Return a function that reads the statuses of runs and of their tasks, in order."""

    async def statuses():
        runs = await raw.fetch("SELECT name, status FROM dl_etl_runs ORDER BY started_at")
        tasks = await raw.fetch("SELECT task, status FROM dl_etl_tasks ORDER BY run_id, ordinal")
        return [tuple(row) for row in (*runs, *tasks)]

    return statuses


@pytest.fixture
def days(raw):
    """Return a function that reads the cursor of the load `items`."""

    async def days():
        return await raw.fetchval(
            "SELECT to_char((state ->> 'upto')::timestamptz AT TIME ZONE 'UTC', 'DD') FROM dl_load_state"
        )

    return days


def some_bad(good, bad):
    """Return records of the first of January, of which the last ones fail."""
    return [*(item(number) for number in range(good)), *({**item(number), "id": None} for number in range(bad))]


@pytest.mark.parametrize(
    ("counts", "end"),
    [
        ({"records": 100, "rows": 100}, "succeeded"),
        ({"records": 100, "rows": 99, "records_failed": 1}, WITH_FAILURES),
        ({"records": 100, "rows": 98, "records_failed": 2}, "failed"),
        # A row that the table refuses counts like a failed record; a record may have many rows.
        ({"records": 100, "rows": 99, "records_failed": 1, "rows_failed": 1}, "failed"),
        ({"records": 10, "rows": 1_000, "rows_failed": 10}, WITH_FAILURES),
        ({"records": 10, "rows": 1_000, "rows_failed": 11}, "failed"),
        ({"details": 99, "details_failed": 1}, WITH_FAILURES),
        ({"details": 98, "details_failed": 2}, "failed"),
        ({"segments": 1, "segments_failed": 1}, WITH_FAILURES),
        ({"segments": 1, "segments_failed": 2}, "failed"),
        # Of a segment without one of its pages, the rest is written, unless none of it is accepted.
        ({"segments_failed": 1, "records": 200, "rows": 200, "inserted": 199, "rows_failed": 1}, WITH_FAILURES),
        # Rows that were rolled back with their segment are not written.
        ({"segments_failed": 1, "records": 200, "rows": 200}, "failed"),
        ({"segments_failed": 1, "records": 0}, "failed"),
    ],
)
def test_failures_are_judged_as_a_share_of_the_tries(counts, end):
    progress = LoadProgress(load="items", max_failures=10, began=0)
    progress.counts.update(counts)
    assert judge(progress, PipelineConfig(max_failed_segments=1)).end == end


def test_the_first_failure_that_is_named_matches_the_reason():
    progress = LoadProgress(load="items", max_failures=10, began=0)
    progress.counts.update(segments=9, records=100)
    # A refused row does not fail its segment.
    for phase in ("row", "detail", "request"):
        progress.failed(Failure(load="items", segment="s", phase=phase, key="1", error="bad"))
    progress.counts.update(segments_failed=1)
    told = "1 of 10 segments could not be loaded (max_failed_segments is 0); "
    assert judge(progress, PipelineConfig(max_failed_share=1)).reason.startswith(told)
    assert judge(progress, PipelineConfig()).reason.endswith("; the first failure was a request (1): bad")


@pytest.mark.parametrize("what", ["records", "details"])
@pytest.mark.parametrize(("good", "end"), [(0, "failed"), (1, WITH_FAILURES)])
def test_where_any_share_may_fail_not_all_may(what, good, end):
    progress = LoadProgress(load="items", max_failures=10, began=0)
    # A failed request for a detail does not count as a detail.
    progress.counts.update({f"{what}_failed": 9, what: good + (9 if what == "records" else 0)})
    assert judge(progress, PipelineConfig(max_failed_share=1)).end == end


async def test_a_run_of_which_little_failed_has_succeeded_with_failures(items, outcome_of, statuses, days):
    tasks, load, metrics = Tasks(), items_load(items.service.url), []

    @tasks.task(load.name)
    async def handler(job):
        metrics.append(job.resource(LoadMetrics))
        return await run_load(load, job)

    items.records = some_bad(99, 1)
    outcome = await outcome_of(tasks, to="2026-01-02")
    assert (outcome.status, outcome.error) == ("succeeded", None)
    assert (outcome.result["status"], outcome.result["reason"]) == (WITH_FAILURES, "records failed: 1")
    assert await statuses() == [("items", WITH_FAILURES)] * 2
    [(_, runs)] = [one.measures for one in metrics]
    assert runs.counts == {("items", WITH_FAILURES): 1}
    assert await days() == "02"


async def test_a_run_with_too_many_failed_records_fails_but_writes_the_good_ones(
    items, outcome_of, statuses, days, table
):
    items.records = some_bad(98, 2)
    outcome = await outcome_of(items_load(items.service.url), to="2026-01-02")
    assert outcome.status == "failed"
    assert outcome.error.startswith(
        "2 of 100 records failed (2.0%; max_failed_share is 0.01); the first failure was a record "
    )
    assert outcome.result["reason"] == outcome.error
    assert await statuses() == [("items", "failed")] * 2
    assert len(await table("id")) == 98
    # They are recorded, and can be retried separately: there is no reason to request all others again.
    assert await days() == "02"


@pytest.mark.requirement("E5")
@pytest.mark.parametrize("where", ["load", "run"])
async def test_the_share_that_may_fail_can_be_set_for_a_load_and_for_a_run(items, outcome_of, where):
    items.records = some_bad(8, 2)
    bears = {"max_failed_share": 0.2}
    load = items_load(items.service.url, windows=None, pipeline=bears if where == "load" else {})
    outcome = await outcome_of(load, **({"pipeline": bears} if where == "run" else {}))
    assert (outcome.status, outcome.result["status"]) == ("succeeded", WITH_FAILURES)


@pytest.mark.parametrize(("borne", "status"), [(0, "failed"), (1, "succeeded")])
async def test_a_segment_that_could_not_be_loaded_fails_the_run_unless_it_is_borne(
    items, outcome_of, days, table, soon, borne, status
):
    items.records = [item(number, number) for number in (1, 2, 3)]
    items.service.misbehave("from=2026-01-02", times=None, status=404)
    load = items_load(items.service.url, pipeline={"max_failed_segments": borne})
    outcome = await outcome_of(load, to="2026-01-04")
    assert outcome.status == status
    assert outcome.result["status"] == ("failed" if status == "failed" else WITH_FAILURES)
    counts = outcome.result["counts"]
    assert (counts["segments"], counts["segments_failed"], counts["inserted"]) == (2, 1, 2)
    assert (await table("id"), await days()) == (["1", "3"], "02")
    if status == "failed":
        assert outcome.error.startswith(
            "1 of 3 segments could not be loaded (max_failed_segments is 0); the first failure was a request (/items): "
        )


async def test_a_run_that_has_loaded_nothing_has_failed_whatever_is_borne(items, outcome_of, soon):
    items.service.misbehave(times=None, status=404)
    load = items_load(items.service.url, pipeline=BEARS_ALL)
    assert (await outcome_of(load, to="2026-01-04")).status == "failed"
    items.service.behave()
    items.records = some_bad(0, 3)
    assert (await outcome_of(load, to="2026-01-02")).status == "failed"


@pytest.mark.slow
@pytest.mark.requirement("E7")
@pytest.mark.parametrize(("failing", "status"), [(1, WITH_FAILURES), (3, "failed")])
async def test_details_that_fail_count_by_their_own_share(items, outcome_of, raw, failing, status):
    await raw.execute("CREATE TABLE detail (id int PRIMARY KEY)")
    items.records = [item(number) for number in range(100)]

    def request(number):
        return Request(endpoint="/items", params={"share": 1 // max(0, number - failing + 1)})

    detail = Detail(
        id=lambda record: record["id"],
        request=request,
        source=items_load(items.service.url).source,
        table=Table("detail", key="id"),
        transform=lambda number, _record: {"id": number},
    )
    outcome = await outcome_of(items_load(items.service.url, windows=None, detail=detail))
    assert outcome.result["status"] == status
    assert outcome.result["counts"]["details_failed"] == failing
    assert await raw.fetchval("SELECT count(*) FROM detail") == 100 - failing


@pytest.fixture
def closed():
    """Return the address of a source that refuses each connection."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


async def test_a_load_whose_source_is_closed_fails_for_good_and_is_not_tried_again(
    closed, database, raw, items, soon, limits
):
    tasks = Tasks()
    add_loads(tasks, items_load(closed))
    await raw.execute(
        """INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, max_attempts)
        VALUES (gen_random_uuid(), 'q', 'items', '{"to": "2026-01-09"}', 'k', 5)"""
    )
    [outcome] = await drain_queue(database.dsn, with_limits(tasks, limits.now))
    assert (outcome.status, outcome.result["counts"]["requests_failed"]) == ("failed", 8)
    assert outcome.error.startswith("8 of 8 segments could not be loaded")
    assert await raw.fetchval("SELECT attempt FROM dl_jobs") == 1


@pytest.mark.requirement("E12")
async def test_a_flow_stops_where_a_load_has_failed(closed, items, outcome_of, statuses, soon):
    second = items_load(items.service.url, name="others", windows=None)
    tasks = Tasks()
    add_flows(tasks, Flow(name="nightly", layers={"ods": [items_load(closed, windows=None)], "dwd": [second]}))
    outcome = await outcome_of(tasks)
    assert outcome.status == "failed"
    assert outcome.error.startswith("items: 1 of 1 segments could not be loaded")
    assert await statuses() == [("nightly", "failed"), ("items", "failed"), ("others", "waiting")]
    assert items.service.requests == []


@pytest.mark.requirement("E12")
async def test_a_flow_continues_after_a_load_with_failures_and_does_not_rerun_it(items, database, raw, statuses):
    items.records = some_bad(99, 1)
    there = "CREATE TABLE other (id int PRIMARY KEY, day date, value text)"
    first = items_load(items.service.url, windows=None)
    second = Load("others", first.source, Table("other", key="id"), pipeline=BEARS_ALL)
    tasks = Tasks()
    add_flows(tasks, Flow(name="nightly", layers={"ods": [first], "dwd": [second]}))
    await raw.execute(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', 'nightly', 'k')"
    )
    [outcome] = await drain_queue(database.dsn, tasks)
    assert "there is no table other" in outcome.error
    assert await statuses() == [("nightly", "failed"), ("items", WITH_FAILURES), ("others", "failed")]
    await raw.execute(there)
    await raw.execute("UPDATE dl_jobs SET status = 'queued', available_at = now(), finished_at = NULL")
    [outcome] = await drain_queue(database.dsn, tasks)
    assert (outcome.status, outcome.result["status"]) == ("succeeded", WITH_FAILURES)
    assert outcome.result["tasks"]["items"]["status"] == WITH_FAILURES
    assert len(items.service.requests) == 2
