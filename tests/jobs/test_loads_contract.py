"""The guarantees of `Loads`, by the database, through a service, and from asyncio."""

from __future__ import annotations

from datetime import UTC, date, datetime
from uuid import uuid4

import pytest
from etl_runs import BEGAN, NIGHTLY, RunMaker

from dataloader import BadRequest, IdempotencyConflict
from dataloader.jobs.ids import uuid7
from dataloader.jobs.load_listings import LoadNotFound, RunNotFound
from dataloader.store.etl.load_state import window_state

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(database):
    return RunMaker(database)


@pytest.mark.requirement("E11", "E12")
async def test_runs_are_listed_by_name_and_a_timeline_has_their_tasks(way, runs):
    ids = [runs.run([("ods.rates", "succeeded")], name=name) for name in ("rates", "names", "rates")]
    nightly = runs.run(NIGHTLY, status="failed")
    runs.send()
    assert {run.run_id for run in (await way.loads.runs()).runs} == {*ids, nightly}
    page = await way.loads.runs("rates", limit=1)
    rest = await way.loads.runs("rates", after=page.next)
    assert {run.run_id for run in (*page.runs, *rest.runs)} == {ids[0], ids[2]}
    assert (len(page.runs), rest.next) == (1, None)

    timeline = await way.loads.timeline(nightly)
    assert (timeline.name, timeline.status, timeline.started_at, timeline.next) == ("nightly", "failed", BEGAN, None)
    assert [(task.task, task.status) for task in timeline.tasks] == NIGHTLY
    part = await way.loads.timeline(nightly, limit=2)
    assert part.tasks == timeline.tasks[:2]
    assert (await way.loads.timeline(nightly, after=part.next)).tasks == timeline.tasks[2:]


@pytest.mark.requirement("E6", "E10")
async def test_a_load_has_its_watermark_its_last_run_and_its_failures(way, runs):
    last = runs.run([("a/b ü", "failed"), ("names", "succeeded")], status="failed")
    runs.failures(last, "a/b ü", 3)
    runs.insert("dl_load_state", load="names", state=window_state(datetime(2026, 11, 20, tzinfo=UTC)), run_id=last)
    runs.send()
    await way.raw.execute("UPDATE dl_etl_failures SET solved_at = now() WHERE failure_id = $1", 1)

    loads = (await way.loads.find()).loads
    assert [(load.load, load.watermark, load.unresolved) for load in loads] == [
        ("a/b ü", None, 2),
        ("names", datetime(2026, 11, 20, tzinfo=UTC), 0),
    ]
    assert [await way.loads.get(load.load) for load in loads] == loads
    assert (loads[0].last_run.run_id, loads[0].last_run.status) == (last, "failed")
    first = await way.loads.find(limit=1)
    assert first.loads + (await way.loads.find(limit=1, after=first.next)).loads == loads

    of_run = (await way.loads.failures_of_run(last)).failures
    assert [failure.resolved_at is None for failure in of_run] == [False, True, True]
    unresolved = await way.loads.failures("a/b ü", limit=1)
    assert unresolved.failures == of_run[1:2]
    for after in (unresolved.next, of_run[1].failure_id):
        assert (await way.loads.failures("a/b ü", after=after)).failures == of_run[2:]
    assert (await way.loads.failures_of_run(last, after=of_run[2].failure_id)).failures == []


async def test_an_unknown_load_or_run_and_an_invalid_value_are_refused(way):
    for ask in (way.loads.get, way.loads.failures):
        with pytest.raises(LoadNotFound, match="no load 'none' has run in this database"):
            await ask("none")
        with pytest.raises(BadRequest) as refused:
            await ask("a\x00b")
        assert refused.value.field == "load"
    run_id = uuid4()
    for ask in (way.loads.timeline, way.loads.failures_of_run):
        with pytest.raises(RunNotFound, match=f"no run has the ID {run_id}"):
            await ask(run_id)
        with pytest.raises(BadRequest) as refused:
            await ask(str(run_id))
        assert refused.value.field == "run_id"
    for values, field in (
        ({"limit": 201}, "limit"),
        ({"limit": 0}, "limit"),
        ({"after": "?"}, "after"),
    ):
        with pytest.raises(BadRequest) as refused:
            await way.loads.find(**values)
        assert refused.value.field == field


@pytest.mark.requirement("E10", "E12")
async def test_a_run_and_a_retry_are_jobs_with_the_key_of_their_load(way):
    job_id = uuid7()
    for created in (True, False):
        added = await way.loads.run("rates", begin=date(2026, 11, 1), end="2026-11-02T06:00Z", queue="q", job_id=job_id)
        assert (added.job_id, added.created, added.queue) == (job_id, created, "q")
    with pytest.raises(IdempotencyConflict):
        await way.loads.run("rates", queue="q", job_id=job_id)
    await way.loads.run_flow("nightly", pipeline={"rate_min": 1}, queue="q", lock_key="mine")
    await way.loads.run_flow("nightly", queue="q")
    await way.loads.retry("rates", queue="q")
    await way.loads.retry("rates", [7, 8], queue="q")
    jobs = (await way.jobs.find()).jobs
    assert [(job.task, job.lock_key, job.args) for job in reversed(jobs)] == [
        ("rates", "load:rates", {"from": "2026-11-01", "to": "2026-11-02T06:00Z"}),
        ("nightly", "mine", {"pipeline": {"rate_min": 1}}),
        ("nightly", "flow:nightly", {}),
        ("rates", "load:rates", {"failures": "all"}),
        ("rates", "load:rates", {"failures": [7, 8]}),
    ]
    for refused, values in (("task", {"name": ""}), ("queue", {"name": "rates"})):
        with pytest.raises(BadRequest) as error:
            await way.loads.run(**values)
        assert error.value.field == refused
