"""The tick: each planned time of a schedule has one job, or a recorded reason (R7)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from operator import ne

import attrs
import pytest
import trio
from conditions import until
from databases import raw_connection
from logged import capture_logs

from dataloader.actors.outage import Outage
from dataloader.actors.scheduler import Scheduler
from dataloader.jobs.errors import StoreError
from dataloader.jobs.schedules import Schedule
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.schedules import tick as ticks
from dataloader.store.schedules.rows import spec_text
from dataloader.store.schedules.tick import LOCKED_S, NAMED, SCHEDULES, tick

NOW = datetime.now(UTC).replace(microsecond=0)
HOUR = timedelta(hours=1)


@pytest.fixture
def put(raw):
    """Return a function that stores a schedule of the task `report`, due `late` before now, and every hour since."""

    async def put(name="nightly", late=timedelta(0), **fields):
        due = NOW - late
        schedule = Schedule(name=name, **{"task": "report", "every_s": 3_600, "job": {"queue": "q"}} | fields)
        await raw.execute(
            "INSERT INTO dl_schedules (name, spec, task, origin, stored_by, stored_at, next_at)"
            " VALUES ($1, $2, $3, 'code', 'test', $4, $4)",
            name,
            spec_text(schedule),
            schedule.task,
            due,
        )
        return schedule

    return put


@pytest.fixture
def planned(raw):
    """Return a function that reads the planned times of a schedule's jobs, ascending."""

    async def planned(name="nightly"):
        return [
            row["planned_at"]
            for row in await raw.fetch("SELECT planned_at FROM dl_jobs WHERE schedule = $1 ORDER BY planned_at", name)
        ]

    return planned


@pytest.fixture
def events(raw):
    """Return a function that reads the events of a schedule."""

    async def events(name="nightly"):
        rows = await raw.fetch(
            "SELECT kind, payload->>'why' AS why, (payload->>'times')::int AS times FROM dl_schedule_events"
            " WHERE name = $1 ORDER BY event_id",
            name,
        )
        return [tuple(row) for row in rows]

    return events


@pytest.mark.requirement("R7")
async def test_a_schedule_that_is_due_adds_its_job_and_knows_when_it_is_due_next(store, raw, put):
    await put(args={"region": "EU"}, job={"queue": "q", "priority": 7})
    ticked = await tick(store)
    assert ticked.added == 1
    assert 0 < ticked.next_in_s <= 3_600
    row = await raw.fetchrow("SELECT *, args::text AS text FROM dl_jobs")
    assert (row["schedule"], row["planned_at"], row["available_at"]) == ("nightly", NOW, NOW)
    assert (row["task"], row["queue"], row["priority"], row["text"]) == ("report", "q", 7, '{"region": "EU"}')
    assert (row["keyed"], row["lock_key"]) == (True, "schedule:nightly")
    stored = await raw.fetchrow("SELECT * FROM dl_schedules")
    assert (stored["next_at"], stored["last_at"], stored["last_job_id"]) == (NOW + HOUR, NOW, row["job_id"])
    assert (await tick(store)).added == 0


@pytest.mark.requirement("R7")
async def test_what_is_kept_of_a_schedule_goes_by_all_of_it(store, raw, put):
    """Schedules with the same times differ by other values, and a changed schedule is a different one."""
    alike = {
        f"s{n}": await put(f"s{n}", every_s=3_600 * (n + 1), args={"n": n}, job={"queue": f"q{n}"}) for n in range(3)
    }
    once = await put("once", job={"queue": "q", "idempotency_key": "only one"})
    twice = await put("twice", late=2 * HOUR, missed="all", overlap="buffer_all")
    assert (await tick(store)).added == 3 + 1 + 3
    nexts = await raw.fetch("SELECT next_at FROM dl_schedules WHERE name LIKE 's_' ORDER BY name")
    assert [row["next_at"] for row in nexts] == [NOW + n * HOUR for n in (1, 2, 3)]
    for name, schedule in [*alike.items(), ("once", once), ("twice", twice)]:
        changed = attrs.evolve(schedule, args={"changed": name}, overlap="allow")
        await raw.execute(
            "UPDATE dl_schedules SET spec = $2, next_at = $3 WHERE name = $1", name, spec_text(changed), NOW
        )
    await raw.execute("UPDATE dl_jobs SET planned_at = planned_at - interval '1 d'")
    assert (await tick(store)).added == 4, "the idempotency key is known"
    rows = await raw.fetch(
        "SELECT schedule, queue, args::text AS args, keyed FROM dl_jobs ORDER BY schedule, created_at"
    )
    assert [tuple(row) for row in rows if row["schedule"].startswith("s")] == [
        (f"s{n}", f"q{n}", args, keyed)
        for n in range(3)
        for args, keyed in ((f'{{"n": {n}}}', True), (f'{{"changed": "s{n}"}}', False))
    ]
    assert len({row["job_id"] for row in await raw.fetch("SELECT job_id FROM dl_jobs")}) == 11


@pytest.mark.requirement("R7")
async def test_with_nothing_stored_none_is_due(store):
    ticked = await tick(store)
    assert (ticked.added, ticked.next_in_s) == (0, None)


@pytest.mark.requirement("R7")
async def test_concurrent_ticks_add_one_job_for_each_planned_time(database, store, raw, put, planned):
    names = [f"s{n}" for n in range(60)]
    for name in names:
        await put(name, late=5 * HOUR, missed="all", overlap="buffer_all")
    ticks = []

    async def tick_often():
        async with open_database(DatabaseOptions(dsn=database.dsn)) as other:
            while (ticked := await tick(other)).next_in_s <= LOCKED_S:
                ticks.append(ticked.added)
            ticks.append(ticked.added)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(tick_often)
    for name in names:
        assert await planned(name) == [NOW - n * HOUR for n in range(5, -1, -1)]
    assert sum(ticks) == 60 * 6


@pytest.mark.requirement("R7")
async def test_a_planned_time_has_one_job_even_if_its_row_is_put_back(store, raw, put, planned):
    await put(overlap="allow")
    await tick(store)
    await raw.execute("UPDATE dl_schedules SET next_at = last_at")
    assert (await tick(store)).added == 0
    assert await planned() == [NOW]


@pytest.mark.slow
@pytest.mark.requirement("R7")
@pytest.mark.parametrize(
    ("missed", "jobs", "left_out"),
    [("once", [0], 90), ("all", [2, 1, 0], 88), ("skip", [1, 0], 89)],
)
async def test_missed_times_are_caught_up_or_recorded(store, put, planned, events, missed, jobs, left_out):
    await put(late=90 * HOUR, missed=missed, missed_limit=3, grace_s=5_400, overlap="buffer_all")
    await tick(store)
    assert await planned() == [NOW - n * HOUR for n in jobs]
    assert await events() == [("left_out", "missed", left_out)]


@pytest.mark.slow
@pytest.mark.requirement("R7")
@pytest.mark.parametrize(
    ("overlap", "former", "added", "former_after"),
    [
        ("buffer_one", "running", 1, "running"),
        ("buffer_one", "queued", 0, "queued"),
        ("buffer_one", "waits for a retry", 1, "queued"),
        ("buffer_one", "succeeded", 1, "succeeded"),
        ("skip", "running", 0, "running"),
        ("skip", "queued", 0, "queued"),
        ("skip", "succeeded", 1, "succeeded"),
        ("buffer_all", "queued", 1, "queued"),
        ("allow", "running", 1, "running"),
        ("cancel", "running", 1, "asked"),
        ("cancel", "queued", 1, "canceled"),
    ],
)
async def test_one_that_is_due_while_another_has_not_ended(
    store, raw, put, events, overlap, former, added, former_after
):
    await put(overlap=overlap)
    job_id = await raw.fetchval(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, schedule, planned_at) VALUES"
        " (gen_random_uuid(), 'q', 'report', 'schedule:nightly', 'nightly', now() - interval '1 h') RETURNING job_id"
    )
    match former:
        case "running":
            await raw.execute("UPDATE dl_jobs SET status = 'running', lease_expires_at = now() + interval '1 h'")
        case "waits for a retry":
            await raw.execute(
                "UPDATE dl_jobs SET attempt = 1, started_at = now(), available_at = now() + interval '1 h'"
            )
        case "succeeded":
            await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now()")
    assert (await tick(store)).added == added
    assert await events() == ([] if added else [("left_out", "overlap", 1)])
    status, asked = await raw.fetchrow("SELECT status::text, cancel_requested FROM dl_jobs WHERE job_id = $1", job_id)
    assert ("asked" if asked and status == "running" else status) == former_after
    if added:
        keyed = await raw.fetchval("SELECT keyed FROM dl_jobs WHERE planned_at = $1", NOW)
        assert keyed is (overlap != "allow")


@pytest.mark.full
@pytest.mark.requirement("R7")
async def test_times_that_are_left_out_one_after_the_other_are_on_record_in_one_row(store, raw, put, planned):
    """A schedule that is due each second, whose job has not ended, then has, then runs again."""
    begin = datetime.now(UTC).replace(microsecond=0)  # `NOW` is half an hour old in a long run
    await put(every_s=1, late=NOW - begin, overlap="skip", missed="all")

    async def ticked_until_written(times):
        """Tick until the newest row was written `times` times; return all rows."""
        sql = (
            "SELECT (payload->>'first')::timestamptz AS first, (payload->>'last')::timestamptz AS last,"
            " (payload->>'times')::int AS times FROM dl_schedule_events ORDER BY event_id"
        )
        before, seen = await raw.fetch(sql), []
        with trio.fail_after(60):
            while len(seen) < times:
                await tick(store)
                rows = await raw.fetch(sql)
                if rows != before and rows[-1:] != seen[-1:]:
                    seen += rows[-1:]
                await trio.sleep(0.1)
        return [tuple(row) for row in rows]

    await tick(store)  # it may have been due several times by now
    former = await raw.fetchval("SELECT count(*) FROM dl_schedule_events")
    assert len(await ticked_until_written(3)) == former + 1
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded', finished_at = now()")
    found = await ticked_until_written(2)
    assert len(found) == former + 2
    second = timedelta(seconds=1)
    ranges = {first + n * second for first, last, _ in found for n in range((last - first) // second + 1)}
    assert sum(times for *_, times in found) == len(ranges), "each of them is counted once"
    next_at = await raw.fetchval("SELECT next_at FROM dl_schedules")
    jobs = await planned()
    assert len(jobs) == 2
    assert ranges.isdisjoint(jobs)
    assert sorted(ranges.union(jobs)) == [begin + n * second for n in range((next_at - begin) // second)]


@pytest.mark.slow
@pytest.mark.requirement("R7")
async def test_a_locked_job_that_must_be_canceled_delays_no_other_schedule(database, store, raw, put, planned):
    await put("locked", overlap="cancel")
    await put("other", overlap="cancel")
    for name in ("locked", "other"):
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key, schedule, planned_at) VALUES"
            f" (gen_random_uuid(), 'q', 'report', 'schedule:{name}', '{name}', now() - interval '1 h')"
        )
    async with raw_connection(database.dsn) as other:
        await other.execute("BEGIN; SELECT FROM dl_jobs WHERE schedule = 'locked' FOR UPDATE")
        ticked = await tick(store)
        assert (ticked.added, ticked.next_in_s) == (1, LOCKED_S)
        assert (len(await planned("locked")), len(await planned("other"))) == (1, 2)
        assert (await tick(store)).added == 0
        await other.execute("ROLLBACK")
    assert (await tick(store)).added == 1
    rows = await raw.fetch("SELECT schedule, status::text FROM dl_jobs ORDER BY schedule, created_at")
    assert [tuple(row) for row in rows] == [
        (name, status) for name in ("locked", "other") for status in ("canceled", "queued")
    ]


@pytest.mark.requirement("R7")
async def test_a_schedule_whose_job_failed_is_paused_if_it_is_to_be(store, raw, put, planned, events):
    await put(pause_on_failure=True, overlap="allow")
    await put("goes on", missed="all", overlap="allow")
    await tick(store)
    job_id = await raw.fetchval("SELECT last_job_id FROM dl_schedules WHERE name = 'nightly'")
    await raw.execute("UPDATE dl_jobs SET status = 'failed', finished_at = now()")
    await raw.execute("UPDATE dl_schedules SET next_at = $1, stored_at = $1", NOW - HOUR)
    await tick(store)
    paused = await raw.fetchrow("SELECT paused, paused_why, next_at FROM dl_schedules WHERE name = 'nightly'")
    assert tuple(paused) == (True, f"its job {job_id} has ended as failed", NOW - HOUR)
    assert await events() == [("paused", paused["paused_why"], None)]
    assert await planned() == [NOW]
    assert await planned("goes on") == [NOW - HOUR, NOW]


@pytest.mark.requirement("R7")
async def test_a_schedule_whose_job_can_not_be_added_is_paused_and_holds_up_no_other(store, raw, put, planned):
    await put("no queue", job={})
    await put()
    ticked = await tick(store)
    assert ticked.added == 1
    paused, why, next_at = await raw.fetchrow(
        "SELECT paused, paused_why, next_at FROM dl_schedules WHERE name = 'no queue'"
    )
    assert (paused, next_at) == (True, NOW)
    assert why.startswith("its job cannot be enqueued: ")
    assert "queue" in why
    assert await planned() == [NOW]


WRONG_JOBS = [
    {"queue": 5},
    {"priority": "x"},
    {"priority": 2**40},
    {"lease_ttl_sec": [1]},
    {"available_at": "soon"},
    {"available_at": "2026-01-01T00:00:00"},
    {"lock_key": {}},
    {"partition_key": None},
    {"max_attempts": "5"},
    {"idempotency_key": 7},
    {"producer": []},
    {"version": "x"},
    {"job_id": "x"},
    {"after": 5},
    {"status": "succeeded"},
    {"task": "notify.command"},
    {"args": [1]},
    {"": 1},
]
"""Options that no job can have, although SQL may store them."""


@pytest.mark.requirement("R7")
async def test_an_error_of_one_schedule_pauses_it_and_the_others_add_their_jobs(store, raw, put, planned, events):
    for number, job in enumerate(WRONG_JOBS):
        await put(f"wrong {number}", job={"queue": "q"} | job)
    for name in ("a", "other", "z"):
        await put(name)
    ticked = await tick(store)
    assert (ticked.added, ticked.set_aside) == (3, len(WRONG_JOBS))
    assert ticked.next_in_s > LOCKED_S
    for name in ("a", "other", "z"):
        assert await planned(name) == [NOW]
    rows = await raw.fetch("SELECT name, paused, paused_why FROM dl_schedules WHERE name LIKE 'wrong %'")
    assert all(row["paused"] for row in rows)
    whys = {row["name"]: row["paused_why"] for row in rows}
    for number, job in enumerate(WRONG_JOBS):
        assert f"job.{next(iter(job))}" in whys[f"wrong {number}"]
        assert await events(f"wrong {number}") == [("paused", whys[f"wrong {number}"], None)]


@pytest.mark.slow
@pytest.mark.requirement("R7")
@pytest.mark.parametrize(
    ("column", "value"),
    [(column, value) for column in ("next_at", "stored_at") for value in ("-infinity", "0044-03-15 BC", "infinity")],
)
async def test_a_schedule_with_a_time_that_python_has_not_holds_up_no_other(store, raw, put, column, value):
    await put()
    await put("odd")
    await raw.execute(f"UPDATE dl_schedules SET {column} = $1::text::timestamptz WHERE name = 'odd'", value)
    ticked = await tick(store)
    assert ticked.next_in_s > LOCKED_S
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE schedule = 'nightly'") == 1
    assert (await tick(store)).added == 0


@pytest.mark.requirement("R7")
async def test_an_error_of_the_database_about_one_schedule_stops_no_other(store, raw, put, planned):
    """A trigger of another service refuses the job of one schedule, and the pause of another one."""
    await raw.execute("""
        CREATE FUNCTION no_job() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN IF NEW.schedule = 'refused' OR NEW.task = 'stuck' THEN RAISE 'not here'; END IF; RETURN NEW; END $$;
        CREATE TRIGGER no_job BEFORE INSERT ON dl_jobs FOR EACH ROW EXECUTE FUNCTION no_job();
        CREATE FUNCTION no_pause() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN IF NEW.name = 'stuck' THEN RAISE 'not this one'; END IF; RETURN NEW; END $$;
        CREATE TRIGGER no_pause BEFORE UPDATE ON dl_schedules FOR EACH ROW EXECUTE FUNCTION no_pause()""")
    names = [f"s{number}" for number in range(20)]
    for name in ("refused", *names):
        await put(name)
    await put("stuck", task="stuck")
    ticked = await tick(store)
    assert (ticked.added, ticked.set_aside) == (20, 2)
    for name in names:
        assert await planned(name) == [NOW]
    rows = await raw.fetch("SELECT name, paused_why FROM dl_schedules WHERE next_at <= now() ORDER BY name")
    assert [tuple(row) for row in rows] == [
        ("refused", "its job cannot be enqueued: RaiseError: not here"),
        ("stuck", None),
    ]


BUGS = """
CREATE FUNCTION no_job() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN IF NEW.schedule ~ '{}' THEN RAISE 'a bug' USING ERRCODE = '{}'; END IF; RETURN NEW; END $$;
CREATE TRIGGER no_job BEFORE INSERT ON dl_jobs FOR EACH ROW EXECUTE FUNCTION no_job()"""
CODES = ["42501", "XX001", "42804", "55000", "42P01", "26000"]
"""A right is missing, a page is damaged, and other errors that only a person can repair."""


@pytest.mark.slow
@pytest.mark.requirement("R7")
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("schedules", [1, 5])
async def test_a_bug_that_concerns_all_schedules_pauses_none_and_their_times_wait(
    store, raw, put, planned, code, schedules
):
    await raw.execute(BUGS.format("", code))
    for number in range(schedules):
        await put(f"s{number}")
    for _ in range(2):
        with pytest.raises(StoreError):
            await tick(store)
    assert await raw.fetchval("SELECT count(*) FROM dl_schedules WHERE paused OR next_at <> $1", NOW) == 0
    await raw.execute("DROP FUNCTION no_job CASCADE")
    assert (await tick(store)).added == schedules
    assert await planned("s0") == [NOW]


@pytest.mark.slow
@pytest.mark.requirement("R7")
@pytest.mark.parametrize("code", CODES)
async def test_a_bug_of_one_schedule_alone_pauses_it_when_others_add_their_jobs(store, raw, put, planned, code):
    await raw.execute(BUGS.format("wrong", code))
    await put("wrong")
    with pytest.raises(StoreError):
        await tick(store)
    for name in ("a", "z"):
        await put(name)
    ticked = await tick(store)
    assert (ticked.added, ticked.set_aside) == (2, 1)
    assert [await planned(name) for name in ("a", "z")] == [[NOW], [NOW]]
    paused = await raw.fetch("SELECT name, paused_why FROM dl_schedules WHERE paused")
    assert [row["name"] for row in paused] == ["wrong"]
    assert paused[0]["paused_why"].startswith("its job cannot be enqueued: ")


@pytest.mark.requirement("R7")
async def test_a_value_that_is_refused_pauses_its_schedule_while_a_bug_stops_the_others(store, raw, put):
    await raw.execute(BUGS.format("", "XX001"))
    await put("other")
    await put("no queue", job={})
    with pytest.raises(StoreError):
        await tick(store)
    assert [row["name"] for row in await raw.fetch("SELECT name FROM dl_schedules WHERE paused")] == ["no queue"]


@pytest.mark.requirement("R7")
async def test_a_schedule_that_another_process_has_is_looked_at_again_soon(store, raw, put, planned):
    await put()
    await raw.execute("BEGIN")
    await raw.execute("SELECT FROM dl_schedules FOR UPDATE")
    ticked = await tick(store)
    assert (ticked.added, ticked.next_in_s) == (0, LOCKED_S)
    await raw.execute("ROLLBACK")
    assert (await tick(store)).added == 1


@pytest.mark.requirement("R7")
async def test_a_schedule_that_this_program_can_not_read_is_left_to_others(store, raw, put, planned):
    await put("newer", late=HOUR)
    await raw.execute('UPDATE dl_schedules SET spec = spec || \'{"calendar": "TARGET2"}\'')
    for spec in ("{}", "[1]", '"text"', '{"task": "t", "cron": 7}', '{"task": "t", "cron": "* * * * *", "args": 3}'):
        await put(f"strange {spec}", late=HOUR)
        await raw.execute("UPDATE dl_schedules SET spec = $1 WHERE name = $2", spec, f"strange {spec}")
    await put()
    ticked = await tick(store)
    assert ticked.added == 1
    assert ticked.next_in_s > 1
    assert await planned("newer") == []
    assert await raw.fetchval("SELECT next_at < now() AND NOT paused FROM dl_schedules WHERE name = 'newer'")


@pytest.mark.requirement("R7")
async def test_any_number_of_schedules_that_can_not_be_read_keep_no_other_out(store, raw, put, planned):
    await raw.execute(
        "INSERT INTO dl_schedules (name, spec, task, origin, stored_by, stored_at, next_at)"
        " SELECT 'newer ' || n, '{\"calendar\": \"TARGET2\"}', 'report', 'code', 'test', $2, $2"
        " FROM generate_series(1, $1::int) AS n",
        2 * SCHEDULES + 1,
        NOW - HOUR,
    )
    await put()
    ticked = await tick(store)
    assert (ticked.added, ticked.set_aside) == (1, 2 * SCHEDULES + 1)
    assert ticked.next_in_s > 1
    assert len(await planned()) == 1
    assert len(ticked.left) == NAMED


@pytest.mark.requirement("R7", "S3")
async def test_a_planned_time_for_which_a_job_of_a_unique_task_waits_is_on_record(store, raw, put, planned, events):
    await raw.execute(
        "INSERT INTO dl_tasks (task, uniqueness, layout, declared_by)"
        """ VALUES ('report', '{"key": true, "duplicates": "waiting"}', 1, 'w')"""
    )
    await put()
    await put("other")
    assert (await tick(store)).added == 1
    assert sorted(map(len, [await planned(), await planned("other")])) == [0, 1]
    assert [*await events(), *await events("other")] == [("left_out", "unique", 1)]
    assert await raw.fetchval("SELECT lock_key FROM dl_jobs") == "report:{}"


@pytest.mark.requirement("R7")
async def test_while_none_is_due_a_tick_is_one_statement(store, put):
    await put(late=-HOUR)
    seen = []

    async def note(connection):
        connection.add_query_logger(lambda query: seen.append(query.query))

    await store.write(note)
    ticked = await tick(store)
    assert (ticked.added, len(seen)) == (0, 1), seen
    assert 0 < ticked.next_in_s <= 3_600


@pytest.mark.requirement("R7")
async def test_other_tasks_have_their_turns_while_many_schedules_are_planned(store, put):
    for number in range(60):
        await put(f"s{number}", overlap="allow", grace_s=number)
    turns, seen = 0, []

    def noted(records):
        for record in records:
            seen.append(turns)
            yield record

    async def plan(connection):
        records = await connection.fetch(ticks._DUE, ticks.SCHEDULES, NOW, [])
        return await ticks._aio_plan(noted(records), NOW, [])

    async def count(task_status):
        nonlocal turns
        task_status.started()
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        await nursery.start(count)
        planned = await store.run(plan)
        nursery.cancel_scope.cancel()
    assert len(planned) == len(seen) == 60
    assert seen[-1] > seen[0]


@pytest.mark.requirement("R7")
async def test_a_schedule_that_can_not_be_read_is_logged_once_for_each_reason(store, raw, put):
    scheduler = Scheduler(database=store, outage=Outage(), telemetry=Telemetry(), poll_s=60)

    async def due_at():
        return scheduler.due_at

    async def tick_again(spec):
        await raw.execute("UPDATE dl_schedules SET spec = $1::text::jsonb WHERE name = 'newer'", spec)
        for _ in range(2):
            seen = scheduler.due_at
            scheduler.wake.set()
            await until(due_at, partial(ne, seen))

    await raw.execute(
        "INSERT INTO dl_schedules (name, spec, task, origin, stored_by, next_at)"
        " VALUES ('newer', '{}', 't', 'code', 'test', now())"
    )
    await put("later", late=-HOUR)  # each tick sets the time until this one
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            await nursery.start(scheduler.run)
            await tick_again('{"calendar": "TARGET2"}')
            await tick_again("5")
            await tick_again('{"calendar": "TARGET2"}')
            nursery.cancel_scope.cancel()
    left = [line["error"] for line in lines if line["event"] == "skipping a schedule that this process cannot handle"]
    assert len(left) == len(set(left)) > 1
