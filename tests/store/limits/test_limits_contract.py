"""Operations on tasks and suppliers by operators: list, override, pause, resume, remove (S1, S4, S5)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from performers import performer_of
from web_server import TOKENS, all_tokens, open_server

from dataloader import RateLimit, Supplier, Tasks, open_client
from dataloader.jobs.client.limits import Limits
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest, InUse
from dataloader.jobs.supplier_listings import SupplierNotFound
from dataloader.jobs.task_listings import TaskNotFound
from dataloader.store.limits.limit_rows import aio_declare_limits
from dataloader.store.queue.task_rows import aio_declare

NOW = datetime.now(UTC)
DAY = ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")[(NOW + timedelta(days=2)).weekday()]
"""The day after tomorrow, so that it does not begin during a test."""


@pytest.fixture(params=["database", "service"])
async def limits(request, store, database):
    """Return the limits in both ways."""
    if request.param == "database":
        yield Limits(performer_of(store, Operator("chief", "request 7")))
        return
    async with (
        open_server(database.dsn, tokens=all_tokens()) as web,
        open_client(url=web.url, token=TOKENS["chief"]) as client,
    ):
        yield client.limits


@pytest.fixture
async def declare(store):
    """Return a function that declares the tasks `employee`, with the given options, and `plain`."""

    async def declare(**options):
        tasks = Tasks()

        @tasks.task("employee", queue="q", **options)
        async def employee(job): ...

        @tasks.task("plain", queue="q")
        async def plain(job): ...

        await store.write(aio_declare, tasks.values(), "w")
        await store.write(aio_declare_limits, tasks.values(), tasks.suppliers)

    await declare(max_running=3)
    return declare


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_an_override_applies_immediately_and_outlives_a_deploy_until_removed(limits, declare, raw):
    found = await limits.task("employee")
    assert (found.declared, found.override, found.limits) == ({"max_running": 3}, {}, {"max_running": 3})
    assert (found.closed, found.opens_at, found.left) == (None, None, 3)
    heard = []
    await raw._cross(raw.asyncpg.add_listener, "dl_lane", lambda *told: heard.append(told[-1]))
    [changed] = await limits.set_tasks({"employee": {"max_running": 5, "batch_size": 2, "batch_delay_s": 1}})
    assert changed.limits == {"max_running": 5, "batch_size": 2, "batch_delay_s": 1}
    await raw.fetchval("SELECT 1")
    assert heard == [""]
    await declare(max_running=4)
    again = await limits.task("employee")
    assert (again.declared, again.limits["max_running"]) == ({"max_running": 4}, 5)
    assert await raw.fetchval("SELECT max_running FROM dl_tasks WHERE task = 'employee'") == 5
    [freed] = await limits.set_tasks({"employee": {"max_running": None, "batch_delay_s": None}})
    assert (freed.override, freed.limits) == ({"batch_size": 2}, {"max_running": 4, "batch_size": 2})
    audit = await raw.fetch("SELECT actor, action, detail::text FROM dl_audit ORDER BY audit_id")
    assert [(row["actor"], row["action"]) for row in audit] == [("chief", "set_task")] * 2
    assert '"max_running": 5' in audit[0]["detail"]


@pytest.mark.requirement("S1")
async def test_a_number_of_attempts_that_is_set_is_that_of_new_jobs_and_outlives_a_deploy(limits, declare, raw):
    async def attempts(sql="SELECT max_attempts FROM dl_jobs ORDER BY created_at DESC LIMIT 1"):
        await raw.fetchval("SELECT dl_enqueue('employee')")
        return await raw.fetchval(sql)

    await declare(max_attempts=7)
    assert await attempts() == 7
    retries = {"max_attempts": 3, "retry_delay_s": 60}
    changed, _ = await limits.set_tasks({"employee": retries, "plain": retries})
    assert changed.limits == {"max_attempts": 3, "retry_delay_s": 60}
    assert not await raw.fetchval("SELECT limited FROM dl_tasks WHERE task = 'plain'"), "it takes no lane"
    assert await attempts() == 3
    declared_at = (await limits.task("employee")).declared_at
    await declare(max_attempts=7)
    assert (await limits.task("employee")).declared_at == declared_at, "what is so already is not written"
    await declare(max_attempts=9)
    assert await attempts() == 3
    await limits.set_tasks({"employee": {"max_attempts": None}})
    assert await attempts() == 9
    kept = await raw.fetch("SELECT max_attempts FROM dl_jobs ORDER BY created_at")
    assert [row["max_attempts"] for row in kept] == [7, 3, 3, 9], "a job keeps its own"


@pytest.mark.requirement("S5")
async def test_several_tasks_are_changed_all_or_none(limits, declare):
    with pytest.raises(TaskNotFound):
        await limits.set_tasks({"employee": {"max_running": 9}, "none such": {"max_running": 9}})
    assert (await limits.task("employee")).limits == {"max_running": 3}
    found = await limits.set_tasks(
        {"plain": {"max_running": 1}, "employee": {"max_running": 2, "at_period_end": "stop"}}
    )
    assert [(one.task, one.limits["max_running"]) for one in found] == [("plain", 1), ("employee", 2)]
    assert found[1].override["at_period_end"] == "stop"


@pytest.mark.slow
@pytest.mark.requirement("S5")
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"max_running": 0}, "max_running"),
        ({"batch_delay_s": 1}, "batch_delay_s"),
        ({"work_periods": ["MON 25:00-26:00"]}, "work_periods"),
        ({"zone": "Mars"}, "zone"),
        ({"retry_delay_s": -1}, "retry_delay_s"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"at_period_end": "pause"}, "at_period_end"),
        ({"max_running_per_partition": 0}, "max_running_per_partition"),
        ({"supplier": "none such"}, "supplier"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_an_invalid_limit_is_refused_with_the_name_of_the_field(limits, declare, changes, field):
    with pytest.raises(BadRequest) as refused:
        await limits.set_tasks({"employee": changes})
    assert refused.value.field.endswith(field)
    assert (await limits.task("employee")).override == {}


@pytest.mark.requirement("S5")
async def test_a_pause_gives_a_task_without_limits_a_lane_and_keeps_its_runs(limits, declare, raw, add_job):
    await add_job(task="'plain'", status="'running'", lease_expires_at="now() + interval '1 h'")
    paused = await limits.pause_task("plain")
    assert (paused.paused, paused.closed, paused.running, paused.left) == (True, "paused", 1, 0)
    assert await raw.fetchval("SELECT limited FROM dl_tasks WHERE task = 'plain'")
    assert await raw.fetchval("SELECT lane FROM dl_jobs WHERE status = 'running'") == "plain"
    assert await raw.fetchval("SELECT count(*) FROM dl_lanes WHERE lane = 'plain'") == 1
    resumed = await limits.resume_task("plain")
    assert (resumed.paused, resumed.closed, resumed.left) == (False, None, None)
    actions = await raw.fetch("SELECT action FROM dl_audit ORDER BY audit_id")
    assert [row["action"] for row in actions] == ["pause_task", "resume_task"]


@pytest.mark.slow
@pytest.mark.requirement("S1", "S4")
async def test_a_task_says_why_it_is_closed_and_until_when(limits, declare, raw, add_job):
    await declare(max_running=3, batch_size=2, batch_delay_s=60)
    waiting = {"task": "'employee'", "lane": "'employee'", "waits_for": "'limit'"}
    for _ in range(4):
        await add_job(**waiting)
    found = await limits.task("employee")
    assert (found.waiting, found.running, found.closed, found.left) == (4, 0, None, 2)

    job = await add_job(task="'employee'", lane="'employee'", status="'running'")
    await raw.execute("UPDATE dl_lanes SET batch_left = 1, idle_since = NULL WHERE lane = 'employee'")
    found = await limits.task("employee")
    assert (found.running, found.closed, found.left) == (1, None, 1)
    await raw.execute("UPDATE dl_lanes SET batch_left = 0")
    found = await limits.task("employee")
    assert (found.closed, found.opens_at, found.left) == ("batch", None, 0)
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = $1", job)
    await raw.execute("UPDATE dl_lanes SET idle_since = now() - interval '20 s'")
    found = await limits.task("employee")
    assert found.closed == "batch"
    assert timedelta(seconds=30) < found.opens_at - datetime.now(UTC) <= timedelta(seconds=40)

    await declare(max_running=1)
    job = await add_job(task="'employee'", lane="'employee'", status="'running'")
    assert (await limits.task("employee")).closed == "running"
    await raw.execute("DELETE FROM dl_jobs WHERE job_id = $1", job)
    await declare(work_periods=f"{DAY} 06:00-07:00", zone="Europe/Berlin")
    found = await limits.task("employee")
    assert found.closed == "period"
    assert timedelta(days=1) < found.opens_at - datetime.now(UTC) < timedelta(days=3)


@pytest.mark.requirement("S4")
async def test_a_supplier_says_what_is_used_and_left_and_when_the_next_unit_is_free(limits, declare, raw, add_job):
    hr = Supplier("hr", rate_limits=(RateLimit(5, per_s=60), RateLimit(100, per_s=3_600)))
    await declare(supplier=hr, cost=2)
    await raw.execute("SELECT dl_take_units('hr', 3, 4000)")
    await raw.execute("UPDATE dl_source_calls SET at = at - interval '10 s'")
    found = await limits.supplier("hr")
    assert [(one.requests, one.used, one.left, one.free_at) for one in found.rate_limits] == [
        (5, 3, 2, None),
        (100, 3, 97, None),
    ]
    assert (found.tasks, found.closed, found.slot, found.margin_s) == (["employee"], None, None, 1)
    assert (await limits.task("employee")).left == 1
    await raw.execute("SELECT dl_take_units('hr', 2, 4000)")
    found = await limits.supplier("hr")
    [small, large] = found.rate_limits
    assert (small.used, small.left, large.left) == (5, 0, 95)
    # The oldest call counts for its span and the margin.
    assert timedelta(seconds=40) < small.free_at - datetime.now(UTC) < timedelta(seconds=52)
    shut = await limits.task("employee")
    assert (shut.closed, shut.left) == ("budget", 0)
    assert abs(shut.opens_at - small.free_at) < timedelta(seconds=1)

    load = await add_job(status="'running'", token="77", lease_expires_at="now() + interval '1 h'")
    await raw.execute("UPDATE dl_sources SET holder = 77, held_until = now() + interval '1 min'")
    found = await limits.supplier("hr")
    assert found.slot.job_id == load
    assert timedelta(seconds=30) < found.slot.until - datetime.now(UTC) <= timedelta(seconds=60)


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_a_suppliers_rate_limits_are_overridden_and_it_is_paused(limits, declare, raw):
    await declare(supplier=Supplier("hr", rate_limits=(RateLimit(5, per_s=60),)), cost=2)
    changed = await limits.set_supplier("hr", {"rate_limits": [[10, 30], [50, 600]], "margin_s": 0.5})
    assert changed.limits["rate_limits"] == [[10, 30], [50, 600]]
    assert (changed.declared["rate_limits"], changed.margin_s) == ([[5, 60]], 0.5)
    in_berlin = {"requests": 1_000, "per": "day", "zone": "Europe/Berlin"}
    daily = await limits.set_supplier("hr", {"rate_limits": [[10, 30], in_berlin]})
    assert daily.limits["rate_limits"] == [[10, 30], in_berlin]
    assert [(one.per_s, one.per, one.zone, one.left) for one in daily.rate_limits] == [
        (30, None, None, 10),
        (None, "day", "Europe/Berlin", 1_000),
    ]
    await limits.set_supplier("hr", {"rate_limits": [[10, 30], [50, 600]]})
    row = await raw.fetchrow("SELECT units, spans_s FROM dl_sources WHERE source = 'hr'")
    assert (row["units"], row["spans_s"]) == ([10, 50], [30, 600])
    paused = await limits.pause_supplier("hr")
    assert (paused.paused, paused.closed) == (True, "paused")
    assert (await limits.task("employee")).closed == "supplier_paused"
    assert (await limits.resume_supplier("hr")).closed is None
    shut = await limits.set_supplier("hr", {"work_periods": [f"{DAY} 06:00-07:00"], "rate_limits": None})
    assert (shut.closed, shut.limits["rate_limits"]) == ("period", [[5, 60]])
    assert (await limits.task("employee")).closed == "supplier_period"
    for changes, field in (
        ({"budgets": [[10, 60]]}, "budgets"),
        ({"rate_limits": [[0, 1]]}, "rate_limits"),
        ({"rate_limits": [[1, 60]]}, "rate_limits"),
        ({"rate_limits": [{**in_berlin, "zone": "Mars"}]}, "rate_limits"),
        ({"rate_limits": [{**in_berlin, "requests": 0}]}, "rate_limits"),
        ({"margin_s": 100}, "margin_s"),
        ({"colour": 1}, "colour"),
    ):
        with pytest.raises(BadRequest) as refused:
            await limits.set_supplier("hr", changes)
        assert refused.value.field == field
    with pytest.raises(BadRequest, match="cost: must be at most 5"):
        await limits.set_tasks({"employee": {"cost": 6}})


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_a_supplier_that_is_made_by_hand_is_shared_and_removed_when_nobody_names_it(limits, declare):
    made = await limits.set_supplier("crm/eu", {"rate_limits": [[1, 1]]})
    assert (made.declared, made.tasks) == ({}, [])
    await limits.set_tasks({"plain": {"supplier": "crm/eu"}, "employee": {"supplier": "crm/eu"}})
    assert [one.supplier for one in (await limits.suppliers()).suppliers] == ["crm/eu"]
    with pytest.raises(InUse, match="employee, plain"):
        await limits.remove_supplier("crm/eu")
    await limits.set_tasks({"plain": {"supplier": None}, "employee": {"supplier": None}})
    await limits.remove_supplier("crm/eu")
    with pytest.raises(SupplierNotFound):
        await limits.supplier("crm/eu")


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_a_task_with_open_jobs_is_removed_only_if_it_is_said_what_becomes_of_them(limits, declare, raw, add_job):
    await limits.set_tasks({"employee": {"max_running": 7}})
    in_lane = await add_job(task="'employee'", lane="'employee'", waits_for="'limit'")
    with pytest.raises(InUse, match="1 jobs of the task 'employee' have not ended"):
        await limits.remove_task("employee")
    removed = await limits.remove_task("employee", jobs="keep")
    assert (removed.task, removed.waiting) == ("employee", 1)
    with pytest.raises(TaskNotFound):
        await limits.task("employee")
    row = await raw.fetchrow("SELECT status::text, waits_for, lane FROM dl_jobs WHERE job_id = $1", in_lane)
    assert tuple(row) == ("queued", None, None)
    assert await raw.fetchval("SELECT count(*) FROM dl_lanes WHERE lane = 'employee'") == 0

    await declare(max_running=3)
    assert (await limits.task("employee")).limits == {"max_running": 3}
    await limits.remove_task("employee", jobs="cancel")
    assert await raw.fetchval("SELECT status::text FROM dl_jobs WHERE job_id = $1", in_lane) == "canceled"
    assert [one.task for one in (await limits.tasks()).tasks] == ["plain"]


@pytest.mark.requirement("S5")
async def test_a_name_that_nothing_can_have_is_refused_by_its_field(limits):
    for refused, field in (
        (limits.task(""), "task"),
        (limits.pause_task("x" * 201), "task"),
        (limits.supplier("\0"), "supplier"),
        (limits.set_supplier("", {"margin_s": 1}), "supplier"),
    ):
        with pytest.raises(BadRequest) as error:
            await refused
        assert error.value.field == field
