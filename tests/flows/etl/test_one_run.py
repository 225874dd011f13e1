"""Only one run of a load at a time, however it is started; a load declares its queue and its schedule (E6, R7)."""

from __future__ import annotations

import itertools
import threading

import attrs
import pytest
import trio
from conditions import until, when_ended
from etl_tasks import item, items_load

from dataloader import Tasks
from dataloader.flows.etl import (
    Dimension,
    Dimensions,
    Flow,
    History,
    Table,
    add_dimensions,
    add_flows,
    add_loads,
)

pytestmark = pytest.mark.requirement("E6")

NIGHTLY = {"cron": "30 3 * * *", "zone": "Europe/Berlin"}
VERSIONS = """
CREATE TABLE versions (id int, day date, value text, valid_from timestamptz NOT NULL, valid_to timestamptz,
  is_current boolean NOT NULL, PRIMARY KEY (id, valid_from))"""


@pytest.fixture
def looks_often(limits):
    """Make a waiting run check often whether the other one has ended."""
    limits.set(wait_s=(0.05, 0.05))


@pytest.fixture
def gate(items):
    """Return an event without which the service does not answer."""
    gate = threading.Event()
    items.before = lambda _seen: gate.wait(60)
    items.records = [item(number, number) for number in (1, 2, 3)]
    yield gate
    gate.set()


async def spans(raw):
    """Return the begins and ends of runs of the load, in order."""
    rows = await raw.fetch("SELECT started_at, finished_at FROM dl_etl_tasks WHERE task = 'items' ORDER BY started_at")
    return [(row["started_at"], row["finished_at"]) for row in rows]


@pytest.mark.slow
async def test_runs_of_a_load_wait_for_each_other_with_any_keys(items, gate, supervised, raw, looks_often):
    tasks, load = Tasks(), items_load(items.service.url)
    add_loads(tasks, load)
    add_flows(tasks, Flow(name="nightly", layers={"ods": [load]}))
    window = {"from": "2026-01-01", "to": "2026-01-04"}
    async with supervised(tasks) as supervisor:
        jobs = supervisor.jobs
        first = await jobs.enqueue("items", window, queue="q", lock_key="a key of my own")
        await until(lambda: trio.to_thread.run_sync(items.asked))
        others = [
            await jobs.enqueue("items", window, queue="q", lock_key="schedule:items"),
            await jobs.enqueue("nightly", window, queue="q"),
        ]

        async def reasons():
            return [(await jobs.why(other.job_id)).text for other in others]

        waits = f"the run {first.job_id} of the load items has not ended"
        await until(reasons, lambda texts: all(waits in text and text.startswith("It is snoozed") for text in texts))
        flow_run = "SELECT status || ': ' || (summary ->> 'reason') FROM dl_etl_runs WHERE kind = 'flow'"
        assert (await raw.fetchval(flow_run)).startswith(f"waiting: {waits}")
        assert len(items.asked()) == 1
        gate.set()
        for job in (first, *others):
            ended = await when_ended(supervisor, job.job_id)
            assert (ended.status, ended.attempt) == ("succeeded", 1), ended.error
    runs = await spans(raw)
    assert len(runs) == 3
    assert all(ended <= begun for (_, ended), (begun, _) in itertools.pairwise(runs))
    assert await raw.fetchval("SELECT count(*) FROM dl_load_holders") == 0


async def test_plain_runs_of_a_load_wait_for_their_key_without_a_slot(items, gate, supervised):
    async with supervised(items_load(items.service.url, queue="q")) as supervisor:
        first = await supervisor.jobs.enqueue("items", {"to": "2026-01-04"})
        await until(lambda: trio.to_thread.run_sync(items.asked))
        second = await supervisor.jobs.enqueue("items", {"to": "2026-01-04"})

        async def why():
            return await supervisor.jobs.why(second.job_id)

        reason = await until(why, lambda reason: reason.cause == "key")
        assert reason.jobs == [first.job_id]
        gate.set()
        for job in (first, second):
            assert (await when_ended(supervisor, job.job_id)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("E8")
async def test_concurrent_starts_of_a_load_with_history_commit_every_segment(items, supervised, raw, looks_often):
    await raw.execute(VERSIONS)
    items.records = [item(number, number) for number in range(1, 8)]
    table = Table("versions", key="id", history=History(tracked=("value",), complete=False))
    load = items_load(items.service.url, table=table, queue="q", schedule={"every_s": 86_400})
    async with supervised(load) as supervisor:
        window = {"from": "2026-01-01", "to": "2026-01-08"}
        jobs = [
            await supervisor.jobs.enqueue("items", window, lock_key=key)
            for key in (None, "schedule:items", "load:items", "flow:nightly")
        ]
        for job in jobs:
            ended = await when_ended(supervisor, job.job_id)
            assert (ended.status, ended.result["status"]) == ("succeeded", "succeeded"), ended.error
    assert await raw.fetchval("SELECT count(*) FROM versions WHERE is_current") == 7
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_failures") == 0


@pytest.mark.requirement("E12")
async def test_a_set_of_dimensions_is_merged_by_one_run_at_a_time(supervised, raw, looks_often):
    await raw.execute("CREATE TABLE total (n int PRIMARY KEY); CREATE TABLE gate (n int); SELECT pg_advisory_lock(7)")
    query = "SELECT 1 AS n FROM (SELECT pg_advisory_lock_shared(7), pg_advisory_unlock_shared(7)) AS waits"
    tasks, tables = Tasks(), (Dimension(table="total", query=query, key=("n",)),)
    add_dimensions(tasks, Dimensions(name="dwd", tables=tables, queue="q"))
    async with supervised(tasks) as supervisor:
        first = await supervisor.jobs.enqueue("dwd", {}, lock_key="a")
        running = "SELECT EXISTS (SELECT FROM dl_load_holders WHERE load = 'dwd')"
        await until(lambda: raw.fetchval(running))
        second = await supervisor.jobs.enqueue("dwd", {}, lock_key="b")

        async def why():
            return (await supervisor.jobs.why(second.job_id)).text

        await until(why, lambda text: f"the run {first.job_id} of the load dwd has not ended" in text)
        await raw.execute("SELECT pg_advisory_unlock(7)")
        for job in (first, second):
            assert (await when_ended(supervisor, job.job_id)).status == "succeeded"


def test_a_load_declares_its_queue_its_key_and_its_schedule():
    tasks = Tasks()
    load = items_load("http://127.0.0.1:1", schedule={**NIGHTLY, "args": {"to": "2026-01-04"}}, queue="night")
    add_loads(tasks, load, attrs.evolve(load, name="plain", schedule=None, queue="default"))
    add_flows(tasks, Flow(name="nightly", layers={"ods": [load]}, schedule={"every_s": 60}))
    assert [(name, task.queue, task.lock_key) for name, task in tasks.items()] == [
        ("items", "night", "load:items"),
        ("plain", "default", "load:plain"),
        ("nightly", "default", "flow:nightly"),
    ]
    first, second = tasks.schedules
    assert (first.name, first.task, first.cron, first.zone, first.args) == (
        "items", "items", "30 3 * * *", "Europe/Berlin", {"to": "2026-01-04"},
    )  # fmt: skip
    assert (second.name, second.task, second.every_s) == ("nightly", "nightly", 60)


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        ("30 3 * * *", r"schedule: must be a dictionary, such as {'cron': '30 3 \* \* \*'}, not '30 3 \* \* \*'"),
        ({"cron": "30 3 * *"}, "schedule.cron: "),
        ({"cron": "30 3 * * *", "zone": "Mars"}, "schedule.zone: "),
        ({}, "schedule.every_s: must have either cron or every_s"),
        ({**NIGHTLY, "when": 1}, "schedule.when: is not a field of a schedule"),
        ({**NIGHTLY, "task": "other"}, "schedule.task: is not allowed"),
        ({**NIGHTLY, "name": "other"}, "schedule.name: is not allowed"),
    ],
)
def test_a_schedule_that_is_not_valid_is_refused_where_it_is_declared(schedule, refused):
    with pytest.raises(ValueError, match=refused):
        items_load("http://127.0.0.1:1", schedule=schedule)


def test_a_schedule_with_args_that_the_load_refuses_is_not_registered():
    load = items_load("http://127.0.0.1:1", schedule={**NIGHTLY, "args": {"form": "2026-01-01"}})
    with pytest.raises(ValueError, match=r"load items: schedule.args.form: must be one of from, to"):
        add_loads(Tasks(), load)


def test_two_schedules_of_one_name_are_refused():
    tasks = Tasks()
    tasks.schedule("items", task="items", cron="@daily")
    with pytest.raises(ValueError, match="schedule 'items' is declared twice"):
        add_loads(tasks, items_load("http://127.0.0.1:1", schedule=NIGHTLY))


def test_a_name_with_braces_has_no_key_since_they_stand_for_fields_of_args():
    tasks = Tasks()
    add_loads(tasks, items_load("http://127.0.0.1:1", name="a{b}"))
    assert tasks["a{b}"].lock_key is None
