"""Operations on schedules by operators: put, pause, resume, run, backfill, delete, and list (R7)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from performers import performer_of
from web_server import TOKENS, all_tokens, open_server

from dataloader import open_client
from dataloader.jobs.client.schedules import Schedules
from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest, IdempotencyConflict
from dataloader.jobs.ids import uuid7
from dataloader.jobs.schedule_listings import MAX_BACKFILL, ScheduleNotFound
from dataloader.jobs.schedules import Schedule
from dataloader.store.schedules.rows import aio_declare_schedules
from dataloader.store.schedules.tick import tick

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)


@pytest.fixture(params=["database", "service"])
async def schedules(request, store, database):
    """Return the schedules in both ways."""
    if request.param == "database":
        yield Schedules(performer_of(store, Operator("chief", "request 7")))
        return
    async with (
        open_server(database.dsn, tokens=all_tokens()) as web,
        open_client(url=web.url, token=TOKENS["chief"]) as client,
    ):
        yield client.schedules


def hourly(**fields):
    return Schedule(**{"name": "hourly", "task": "report", "cron": "@hourly", "job": {"queue": "q"}} | fields)


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_a_put_schedule_is_due_from_now_on_and_kept_by_declarations(schedules, store):
    now = datetime.now(UTC)
    put = await schedules.put(hourly(args={"n": 1}))
    assert (put.origin, put.stored_by, put.paused, put.retired_at) == ("operator", "chief", False, None)
    assert put.schedule == hourly(args={"n": 1})
    assert now < put.next_at <= now + HOUR + timedelta(seconds=60)
    assert await schedules.get("hourly") == put
    assert await store.write(aio_declare_schedules, [hourly()], ["report"], "w") == ["hourly"]
    again = await schedules.put(hourly(args={"n": 2}))
    assert (again.next_at, again.stored_at) == (put.next_at, put.stored_at)
    [event] = (await schedules.events("hourly")).events
    assert (event.kind, event.payload) == ("changed", {"by": "chief"})


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_a_schedule_of_an_undeclared_task_is_stored_and_marked(schedules, raw):
    assert (await schedules.put(hourly())).unknown_task
    await raw.execute("INSERT INTO dl_tasks (task, layout, declared_by) VALUES ('report', 1, 'w')")
    assert not (await schedules.put(hourly())).unknown_task
    await schedules.put(hourly(name="daily", task="rpeort"))
    assert [(one.name, one.unknown_task) for one in (await schedules.find()).schedules] == [
        ("daily", True),
        ("hourly", False),
    ]
    assert (await schedules.pause("daily")).unknown_task


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_a_paused_schedule_catches_up_when_it_is_resumed(schedules, store, raw):
    await schedules.put(hourly())
    paused = await schedules.pause("hourly")
    assert (paused.paused, paused.paused_why) == (True, "by chief")
    await raw.execute("UPDATE dl_schedules SET next_at = date_trunc('hour', now()) - interval '5 h'")
    assert await tick(store) == await tick(store)
    assert [paused.next_at, (await schedules.get("hourly")).next_at] == [None, None]
    assert [one.next_at for one in (await schedules.find()).schedules] == [None]
    assert all(at > datetime.now(UTC) - timedelta(minutes=1) for at in await schedules.next_times("hourly"))
    resumed = await schedules.resume("hourly")
    assert (resumed.paused, resumed.paused_why) == (False, None)
    assert resumed.next_at == await raw.fetchval("SELECT date_trunc('hour', now()) + interval '1 h'")
    assert (await tick(store)).added == 1
    assert await raw.fetchval("SELECT planned_at = date_trunc('hour', now()) FROM dl_jobs")
    kinds = [event.kind for event in (await schedules.events("hourly")).events]
    assert kinds == ["left_out", "resumed", "paused"]


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_the_next_times_are_shown_even_for_a_paused_schedule(schedules):
    now = datetime.now(UTC).replace(microsecond=0)
    await schedules.put(hourly(end_at=now + 3 * HOUR))
    await schedules.pause("hourly")
    times = await schedules.next_times("hourly", number=100)
    assert len(times) == 3
    assert {later - earlier for earlier, later in pairwise(times)} == {HOUR}
    assert all(now < at < now + 3 * HOUR for at in times)


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_a_run_beside_the_plan_does_not_change_the_plan(schedules, raw):
    put = await schedules.put(hourly(args={"n": 1}))
    first, second = await schedules.run("hourly"), await schedules.run("hourly")
    repeated = await schedules.run("hourly", job_id=second.job_id)
    assert (repeated.job_id, repeated.created, repeated.queue) == (second.job_id, False, second.queue)
    await schedules.put(Schedule(name="another", task="t", every_s=3600))
    with pytest.raises(IdempotencyConflict):
        await schedules.run("another", job_id=second.job_id)
    assert first.job_id != second.job_id
    assert first.queue == "q"
    rows = await raw.fetch("SELECT schedule, planned_at, available_at <= now() AS due FROM dl_jobs")
    assert [tuple(row) for row in rows] == [("hourly", None, True)] * 2
    assert (await schedules.get("hourly")).next_at == put.next_at


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_a_backfill_adds_what_has_no_job(schedules, raw):
    await schedules.put(hourly())
    begin = NOW.replace(minute=0, second=0) - 5 * HOUR
    tried = await schedules.backfill("hourly", begin, begin + 3 * HOUR, dry_run=True)
    assert (tried.backfill, tried.times, tried.had_jobs) == (None, [begin, begin + HOUR, begin + 2 * HOUR], 0)
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 0
    first = await schedules.backfill("hourly", begin, begin + 2 * HOUR)
    rest = await schedules.backfill("hourly", begin, begin + 3 * HOUR)
    assert (rest.times, rest.had_jobs) == ([begin + 2 * HOUR], 2)
    again = await schedules.backfill("hourly", begin, begin + HOUR, again=True)
    repeated = await schedules.backfill("hourly", begin, begin + HOUR, again=True, backfill_id=again.backfill)
    assert repeated.times == []
    assert (again.times, again.had_jobs) == ([begin], 0)
    assert len({first.backfill, rest.backfill, again.backfill}) == 3
    rows = await raw.fetch("SELECT planned_at, backfill FROM dl_jobs ORDER BY planned_at, backfill")
    assert [tuple(row) for row in rows] == [
        (begin, first.backfill),
        (begin, again.backfill),
        (begin + HOUR, first.backfill),
        (begin + 2 * HOUR, rest.backfill),
    ]


@pytest.mark.requirement("R7")
async def test_a_backfill_adds_nothing_that_the_plan_will_add(schedules):
    put = await schedules.put(hourly())
    found = await schedules.backfill("hourly", NOW - 2 * HOUR, NOW + 5 * HOUR, dry_run=True)
    assert found.times
    assert max(found.times) < put.next_at


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_a_period_goes_on_before_it_was_stored_in_the_same_steps(schedules):
    put = await schedules.put(Schedule(name="often", task="report", every_s=600))
    found = await schedules.backfill("often", put.stored_at - HOUR, put.stored_at, dry_run=True)
    assert found.times == [put.stored_at - n * timedelta(seconds=600) for n in range(6, 0, -1)]


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_a_backfill_holds_up_no_regular_run(schedules, store, raw):
    await schedules.put(hourly(overlap="skip"))
    begin = NOW.replace(minute=0, second=0) - 5 * HOUR
    await schedules.backfill("hourly", begin, begin + 3 * HOUR)
    await raw.execute("UPDATE dl_schedules SET next_at = date_trunc('hour', now())")
    assert (await tick(store)).added == 1


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_a_deleted_schedule_is_gone_and_its_jobs_stay(schedules, raw):
    await schedules.put(hourly())
    await schedules.run("hourly")
    await schedules.delete("hourly")
    with pytest.raises(ScheduleNotFound, match="no schedule has the name 'hourly'"):
        await schedules.get("hourly")
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 1


@pytest.mark.slow
@pytest.mark.requirement("R7", "Q2")
async def test_an_id_that_another_request_uses_meanwhile_is_a_conflict(schedules, raw):
    await schedules.put(hourly())
    job_id = uuid7()
    await raw.execute(
        "CREATE FUNCTION other_request() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN"
        " INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (NEW.job_id, 'other', 't', 'k'); RETURN NEW;"
        "END$$;"
        " CREATE TRIGGER other_request BEFORE INSERT ON dl_jobs FOR EACH ROW WHEN (NEW.schedule IS NOT NULL)"
        " EXECUTE FUNCTION other_request()"
    )
    with pytest.raises(IdempotencyConflict):
        await schedules.run("hourly", job_id=job_id)
    await raw.execute("DROP TRIGGER other_request ON dl_jobs")
    assert await raw.fetchval("SELECT count(*) FROM dl_audit WHERE action = 'run_schedule'") == 0
    assert (await schedules.run("hourly", job_id=job_id)).created


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_events_with_payloads_of_another_program_are_shown(schedules, raw):
    await schedules.put(hourly())
    await raw.execute(
        "INSERT INTO dl_schedule_events (name, kind, payload)"
        " SELECT 'hourly', kind, payload::jsonb FROM unnest('{left_out,paused,odd}'::text[]) AS kind,"
        " unnest($1::text[]) WITH ORDINALITY AS p (payload, n) ORDER BY n, kind",
        ["5", "[1]", '"text"', "null", '{"why": []}'],
    )
    events = (await schedules.events("hourly")).events
    found = [event.payload for event in events if event.kind == "odd"]
    assert found == [{"why": []}, None, {"value": "text"}, {"value": [1]}, {"value": 5}]


async def test_schedules_are_listed_by_name_in_pages(schedules):
    for name in ("b", "a", "c"):
        await schedules.put(hourly(name=name))
    first = await schedules.find(limit=2)
    assert [one.name for one in first.schedules] == ["a", "b"]
    second = await schedules.find(limit=2, after=first.next)
    assert ([one.name for one in second.schedules], second.next) == (["c"], None)


@pytest.mark.slow
@pytest.mark.requirement("R7", "Q16")
async def test_a_page_of_schedules_ends_at_a_megabyte_of_args(schedules):
    for name in ("a", "b", "c"):
        await schedules.put(hourly(name=name, args={"text": "x" * 400_000}))
    first = await schedules.find()
    assert [one.name for one in first.schedules] == ["a", "b"]
    second = await schedules.find(after=first.next)
    assert ([one.name for one in second.schedules], second.next) == (["c"], None)


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_actions_of_operators_are_in_the_audit(schedules, raw):
    await schedules.put(hourly())
    await schedules.pause("hourly")
    await schedules.resume("hourly")
    await schedules.run("hourly")
    await schedules.backfill("hourly", NOW - 3 * HOUR, NOW - HOUR)
    await schedules.delete("hourly")
    rows = await raw.fetch(
        "SELECT actor, action, detail->>'schedule' AS name, detail->>'request_id' AS id FROM dl_audit"
    )
    assert {(row["actor"], row["name"]) for row in rows} == {("chief", "hourly")}
    assert all(row["id"] for row in rows)
    assert [row["action"] for row in rows] == [
        "put_schedule",
        "pause_schedule",
        "resume_schedule",
        "run_schedule",
        "backfill_schedule",
        "delete_schedule",
    ]


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_what_is_not_allowed_is_refused_by_name(schedules):
    await schedules.put(Schedule(name="often", task="report", every_s=1))
    for refused, says in (
        (schedules.backfill("often", NOW, NOW), "end: must be later than begin"),
        (schedules.backfill("often", NOW.replace(tzinfo=None), NOW), "begin: must be a timestamp with a time zone"),
        (
            schedules.backfill("often", NOW - timedelta(days=1), NOW),
            f"end: has more than {MAX_BACKFILL:,} planned times",
        ),
        (schedules.next_times("often", number=0), "number: must be an integer from 1 to 1,000"),
        (schedules.get(""), "name: must have 1 to 200 characters"),
        (schedules.put(hourly(job={"priority": "x"})), "job.priority: must be an integer or null, not a string"),
        (schedules.put(hourly(job={"status": "failed"})), "job.status: is not an option of a schedule's jobs"),
        (schedules.put(hourly(job={"lease_ttl_sec": 1})), "job.lease_ttl_sec: must be an integer from 3 to 86,400"),
        (schedules.put(hourly(task="notify.command")), "task: must not be 'notify.command'"),
    ):
        with pytest.raises(BadRequest) as error:
            await refused
        assert str(error.value).startswith(says)
    for absent in (schedules.pause("x"), schedules.resume("x"), schedules.run("x"), schedules.delete("x")):
        with pytest.raises(ScheduleNotFound):
            await absent
