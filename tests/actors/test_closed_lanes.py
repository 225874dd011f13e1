"""A limit queue that the database cannot evaluate closes by itself and says why; all other jobs continue (S1, S4)."""

from __future__ import annotations

from functools import partial

import httpx2
import pytest
import trio
import trio.testing
from conditions import patience_s, until, when_ended
from logged import capture_logs
from queue_workers import ANY_CLAIM

from dataloader import RateLimit, Settings, Supplier, Tasks, Worker, open_supervisor

pytestmark = pytest.mark.requirement("S1", "S4")

NO_SUCH_ZONE = "UPDATE dl_tasks SET zone = 'Nowhere/Land', periods = '{[0,10080)}' WHERE task = 'bad'"
TO_UTC = "UPDATE dl_tasks SET zone = 'UTC' WHERE task = 'bad'"
TELL = "SELECT pg_notify('dl_lane', '')"
ERROR = "SELECT error FROM dl_lanes WHERE lane = $1"


async def noop(_job): ...


@pytest.fixture
def tasks():
    """Return a plain task, two tasks with separate limits, and two of a supplier."""
    tasks = Tasks()
    supplier = Supplier("s", rate_limits=(RateLimit(1_000, per_s=60),))
    tasks.task("plain", queue="q")(noop)
    for name in ("bad", "good"):
        tasks.task(name, queue="q", max_running=2)(noop)
    for name in ("supplied", "supplied too"):
        tasks.task(name, queue="q", supplier=supplier)(noop)
    tasks.task("elsewhere", queue="r", max_running=2)(noop)
    return tasks


async def ended(supervisor, *names):
    """Add a job of each task, wait for their ends, and return their statuses."""
    jobs = [await supervisor.jobs.enqueue(name) for name in names]
    return [(await when_ended(supervisor, job.job_id, within_s=patience_s())).status for job in jobs]


@pytest.mark.slow
async def test_an_error_in_one_limit_queue_stops_no_other_job(open_worker, tasks, raw):
    others = ("plain", "good", "supplied", "supplied too", "elsewhere")
    with capture_logs() as lines:
        async with open_worker(tasks, {"q": 4, "r": 2}) as supervisor:
            await raw.execute(NO_SUCH_ZONE)
            bad = await supervisor.jobs.enqueue("bad")
            for _ in range(3):
                assert await ended(supervisor, *others) == ["succeeded"] * len(others)
            error = await until(lambda: raw.fetchval(ERROR, "bad"))
            assert "Nowhere/Land" in error
            assert await raw.fetchval("SELECT count(*) FROM dl_lanes WHERE error IS NOT NULL") == 1
            assert (await supervisor.jobs.get(bad.job_id)).status == "queued"
            await raw.execute(TO_UTC)
            await raw.execute(TELL)
            assert (await when_ended(supervisor, bad.job_id)).status == "succeeded"
            await until(lambda: raw.fetchval("SELECT count(*) = 0 FROM dl_lanes WHERE error IS NOT NULL"))
    told = [line for line in lines if line["event"].startswith(("closed a limit queue", "reopened a limit queue"))]
    assert [line["event"] for line in told] == [
        "closed a limit queue: its limits cannot be evaluated",
        "reopened a limit queue",
    ]
    assert {(line["queue"], line["task"]) for line in told} == {("q", "bad")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        "zone = 'Nowhere/Land', periods = '{[0,10080)}'",
        "units = '{10}', spans_s = '{0}', zones = '{Nowhere/Land}'",
        "units = '{NULL}', spans_s = '{60}'",
        "units = '{10}', spans_s = '{}'",
        "spans_s = '{NaN}', units = '{10}'",
    ],
)
async def test_a_bad_row_of_a_supplier_closes_the_limit_queues_of_its_tasks_alone(open_worker, tasks, raw, change):
    async with open_worker(tasks, {"q": 4}) as supervisor:
        await raw.execute(f"UPDATE dl_sources SET {change} WHERE source = 's'")
        waiting = [(await supervisor.jobs.enqueue(name)).job_id for name in ("supplied", "supplied too")]
        for _ in range(2):
            assert await ended(supervisor, "plain", "bad", "good") == ["succeeded"] * 3
        await until(
            lambda: raw.fetchval("SELECT count(*) FROM dl_lanes WHERE error IS NOT NULL"), lambda number: number == 2
        )
        for job_id in waiting:
            assert (await supervisor.jobs.get(job_id)).status == "queued"


async def test_a_handler_that_takes_from_a_bad_supplier_waits_and_does_not_fail(open_worker, raw):
    tasks = Tasks()
    supplier = Supplier("s", rate_limits=(RateLimit(1_000, per_s=60),))

    @tasks.task("free", queue="q", max_attempts=1)
    async def take(job):
        await job.take(supplier, max_wait_s=0.1)

    tasks.task("limited", queue="q", supplier=supplier)(noop)
    async with open_worker(tasks, {"q": 4}) as supervisor:
        await raw.execute("UPDATE dl_sources SET zone = 'Nowhere/Land', periods = '{[0,10080)}' WHERE source = 's'")
        job = await supervisor.jobs.enqueue("free")
        await until(lambda: raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'requeue'"))
        assert (await supervisor.jobs.get(job.job_id)).status == "queued"
        await raw.execute("UPDATE dl_sources SET zone = 'UTC'")
        await supervisor.jobs.run_now(job.job_id)
        assert (await when_ended(supervisor, job.job_id)).status == "succeeded"


@pytest.mark.slow
async def test_an_error_among_ready_jobs_stops_no_limit_queue(open_worker, tasks, raw):
    await raw.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not this one'; END $$;
        CREATE TRIGGER refuse BEFORE UPDATE ON dl_jobs FOR EACH ROW WHEN (NEW.task = 'plain') EXECUTE FUNCTION refuse();
    """)
    async with open_worker(tasks, {"q": 4, "r": 2}) as supervisor:
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', 'plain', 'k')"
        )
        for _ in range(2):
            assert await ended(supervisor, "good", "supplied", "elsewhere") == ["succeeded"] * 3
        assert await raw.fetchval("SELECT count(*) FROM dl_lanes WHERE error IS NOT NULL") == 0


async def test_an_entry_of_some_tasks_alone_closes_its_bad_limit_queue_alone(database, tasks, raw):
    entry = Worker("q", 2, tasks=("bad", "good", "supplied"))
    settings = Settings(db_dsn=database.dsn, workers=(entry,), port=0, poll_s=3_600, drain_timeout_s=10)
    async with open_supervisor(settings, tasks) as supervisor:
        await raw.execute(NO_SUCH_ZONE)
        bad = (await supervisor.jobs.enqueue("bad")).job_id
        for _ in range(2):
            assert await ended(supervisor, "good", "supplied") == ["succeeded"] * 2
        assert (await supervisor.jobs.get(bad)).status == "queued"
        await until(lambda: raw.fetchval(ERROR, "bad"))
        await raw.execute(TO_UTC)
        await raw.execute(TELL)
        assert (await when_ended(supervisor, bad)).status == "succeeded"


@pytest.mark.slow
async def test_readers_show_why_a_limit_queue_is_closed(open_worker, tasks, raw):
    async with open_worker(tasks, {"q": 4}, with_web=True) as supervisor, httpx2.AsyncClient() as client:
        await raw.execute(NO_SUCH_ZONE)
        await raw.execute("UPDATE dl_sources SET units = '{10}', spans_s = '{0}', zones = '{Nowhere/Land}'")
        bad = (await supervisor.jobs.enqueue("bad")).job_id
        supplied = (await supervisor.jobs.enqueue("supplied")).job_id
        found = {one.task: one for one in (await supervisor.limits.tasks()).tasks}
        assert {name: one.closed for name, one in found.items() if one.closed is not None} == {
            "bad": "error",
            "supplied": "error",
            "supplied too": "error",
        }
        assert (found["bad"].left, "Nowhere/Land" in found["bad"].error) == (0, True)
        [supplier] = (await supervisor.limits.suppliers()).suppliers
        assert (supplier.closed, "Nowhere/Land" in supplier.error, supplier.rate_limits[0].left) == ("error", True, 0)
        for job_id, task in ((bad, "bad"), (supplied, "supplied")):
            reason = await supervisor.jobs.why(job_id)
            assert reason.cause == "limit_error"
            assert reason.text.startswith(f"The limits of the task {task} cannot be evaluated (")
            assert "Nowhere/Land" in reason.text
        for path in ("ui/tasks", "ui/task?name=bad", "ui/suppliers", "ui/supplier?name=s", f"ui/jobs/{bad}"):
            page = await client.get(f"{supervisor.url}/{path}")
            assert (page.status_code, "Nowhere/Land" in page.text) == (200, True), path
        await until(lambda: raw.fetchval("SELECT count(*) = 2 FROM dl_lanes WHERE error IS NOT NULL"))
        metrics = await client.get(f"{supervisor.url}/metrics")
        assert "dataloader_limit_queues_closed 2.0" in metrics.text.splitlines()


CLOSED_ONES = "dataloader_limit_queues_closed"


async def test_the_count_of_closed_limit_queues_falls_when_one_is_dropped(open_worker, tasks, raw, metric):
    async with open_worker(tasks, {"q": 4}, with_web=True) as supervisor:
        await raw.execute(NO_SUCH_ZONE)
        bad = await supervisor.jobs.enqueue("bad")
        await until(partial(metric, supervisor, CLOSED_ONES), lambda number: number == 1)
        await supervisor.jobs.cancel(bad.job_id)  # the pruner gives a waiting job its limit queue back
        await raw.execute("DELETE FROM dl_lanes WHERE lane = 'bad'")
        await raw.execute(TELL)
        await until(partial(metric, supervisor, CLOSED_ONES), lambda number: number == 0)


async def test_the_count_of_closed_limit_queues_falls_when_their_queue_is_removed(open_worker, tasks, raw, metric):
    async with open_worker(tasks, {"q": 4, "r": 2}, with_web=True) as supervisor:
        await raw.execute(NO_SUCH_ZONE)
        await supervisor.jobs.enqueue("bad")
        await until(partial(metric, supervisor, CLOSED_ONES), lambda number: number == 1)
        await supervisor.remove_queue("q")
        await until(partial(metric, supervisor, CLOSED_ONES), lambda number: number == 0)


@pytest.mark.slow
async def test_learning_tasks_waits_for_a_claim_from_one_lane_alone(open_worker, tasks, raw):
    async with open_worker(tasks, {"q": 4}) as supervisor, trio.open_nursery() as nursery:
        # This calls a private method: `add_tasks` calls `learn`, but would itself wait for the locked tables first.
        [dispatcher] = supervisor._parts.dispatchers
        await raw.execute(NO_SUCH_ZONE)
        await supervisor.jobs.enqueue("bad")
        await until(lambda: raw.fetchval(ERROR, "bad"))
        await raw.execute("BEGIN")
        await raw.execute("LOCK TABLE dl_lanes, dl_jobs, dl_tasks")
        await until(lambda: waiting_claims(raw), within_s=60)
        learned = trio.Event()

        async def learn():
            await dispatcher.learn()
            learned.set()

        nursery.start_soon(learn)
        await trio.testing.wait_all_tasks_blocked()
        assert not learned.is_set()
        await raw.execute("ROLLBACK")
        with trio.fail_after(patience_s()):
            await learned.wait()


async def waiting_claims(raw):
    """Return the number of claims that wait for a lock."""
    await raw.execute("SELECT pg_stat_clear_snapshot()")
    claims = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query ~ $1"
    return await raw.fetchval(claims, ANY_CLAIM)


@pytest.mark.slow
async def test_the_error_of_a_process_that_has_died_is_soon_forgotten(open_worker, tasks, raw):
    async with open_worker(tasks, {"q": 4}) as supervisor:
        failed_at = "now() - make_interval(secs => $1)"
        note = f"UPDATE dl_lanes SET error = 'of a claim', failed_at = {failed_at} WHERE lane = 'good'"
        await raw.execute(note, 10)
        found = await supervisor.limits.task("good")
        assert (found.closed, found.error) == ("error", "of a claim")
        await raw.execute(note, 200)
        found = await supervisor.limits.task("good")
        assert (found.closed, found.error) == (None, None)


@pytest.mark.slow
async def test_limits_that_this_program_cannot_read_are_shown_as_they_are_stored(open_worker, tasks, raw):
    stored = '{"zone": "Future/City", "work_periods": ["DAILY 00:00-24:00"], "max_runnings": 3}'
    async with open_worker(tasks, {"q": 4}) as supervisor:
        await raw.execute("UPDATE dl_tasks SET override = $1::text::jsonb WHERE task = 'bad'", stored)
        await raw.execute("""UPDATE dl_sources SET override = '{"zone": "Future/City"}'""")
        found = {one.task: one for one in (await supervisor.limits.tasks()).tasks}
        assert (found["bad"].closed, found["bad"].limits["zone"]) == (None, "Future/City")
        assert (found["good"].closed, found["good"].limits["max_running"]) == (None, 2)
        [supplier] = (await supervisor.limits.suppliers()).suppliers
        assert (supplier.closed, supplier.limits["zone"], supplier.rate_limits) == (None, "Future/City", [])
        assert await ended(supervisor, "bad", "supplied") == ["succeeded"] * 2


WRONG = [
    "[]",
    "7",
    "null",
    '"text"',
    '{"zone": 7}',
    '{"work_periods": [7]}',
    '{"work_periods": 7}',
    '{"work_periods": ["NEVER"]}',
    '{"max_running": "x"}',
    '{"max_running_per_partition": []}',
    '{"batch_size": {}, "supplier": 7}',
    '{"retry_delay_s": 1e999}',
    '{"retry_delay_s": "x"}',
    '{"cost": null, "at_period_end": 7}',
]


@pytest.mark.slow
async def test_limits_of_a_wrong_kind_in_one_row_stop_neither_a_start_nor_a_list(open_worker, tasks, raw):
    for number in range(len(WRONG)):
        tasks.task(f"wrong {number}", queue="q", max_running=2, supplier=Supplier(f"s {number}"))(noop)
    async with open_worker(tasks):
        pass
    for number, override in enumerate(WRONG):
        await raw.execute("UPDATE dl_tasks SET override = $2::text::jsonb WHERE task = $1", f"wrong {number}", override)
        await raw.execute("UPDATE dl_sources SET override = $2::text::jsonb WHERE source = $1", f"s {number}", override)
    await raw.execute("UPDATE dl_tasks SET limits = '[]' WHERE task = 'bad'")
    async with open_worker(tasks, with_web=True) as supervisor, httpx2.AsyncClient() as client:
        found = {one.task: one for one in (await supervisor.limits.tasks()).tasks}
        assert (found["wrong 8"].override, "max_running" in found["wrong 8"].limits) == ({"max_running": "x"}, False)
        assert (found["bad"].limits, found["bad"].closed) == ({"max_running": 2}, None)
        assert len((await supervisor.limits.suppliers()).suppliers) == len(WRONG) + 1
        for path in ("ui/tasks", "ui/suppliers", "api/v1/tasks", "api/v1/suppliers"):
            assert (await client.get(f"{supervisor.url}/{path}")).status_code == 200, path
        for number in range(len(WRONG)):
            for path in (f"ui/task?name=wrong {number}", f"ui/supplier?name=s {number}"):
                assert (await client.get(f"{supervisor.url}/{path}")).status_code == 200, path
        jobs = [f"wrong {number}" for number in range(len(WRONG))]
        assert await ended(supervisor, "good", *jobs) == ["succeeded"] * (len(WRONG) + 1)
        assert (await supervisor.limits.set_tasks({"wrong 0": {"max_running": 1}}))[0].limits["max_running"] == 1
