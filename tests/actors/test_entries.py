"""Entries that take only jobs of some tasks, and changes of a running supervisor by its program (S5)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager

import pytest
import trio
from conditions import until, when_ended
from logged import capture_logs
from proxy import open_proxy

from dataloader import NewJob, RateLimit, Settings, Supplier, Tasks, Worker, open_supervisor
from dataloader.actors import filer
from dataloader.jobs.errors import BadRequest, ConfigError, Draining
from dataloader.testing import Signals
from dataloader.web.services import QueueLoad

ADD_FOREIGN = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key)
SELECT gen_random_uuid(), 'q', $1, 'k' || random() FROM generate_series(1, $2)
"""


def tasks_named(*names, ran=None, **options):
    tasks = Tasks()
    for name in names:

        @tasks.task(name, **options)
        async def run(job):
            if ran is not None:
                ran.append((job.task, job.args.get("n")))

    return tasks


@pytest.fixture
def open_with(database):
    """Return a function that opens a supervisor with signals and these entries; polls and sweeps are an hour apart."""

    def open_with(tasks, *entries, dsn=None, **settings):
        quiet = {"poll_s": 3_600, "reaper_period_s": 3_600, "claim_backoff_s": 3_600, "drain_timeout_s": 10}
        ready = Settings(db_dsn=dsn or database.dsn, workers=entries, port=0, **(quiet | settings))
        return open_supervisor(ready, tasks, signals=Signals())

    return open_with


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_an_entry_with_tasks_does_not_touch_or_read_other_jobs_of_its_queue(open_with, raw, monkeypatch):
    monkeypatch.setattr(filer, "REST_S", 0)
    ran = []
    both = tasks_named("ours", "theirs", ran=ran)
    # Before the task has its lane: a job is found among those of other tasks.
    await raw.execute(ADD_FOREIGN, "theirs", 300)
    await raw.execute(ADD_FOREIGN, "ours", 1)
    async with open_with(both, Worker("q", 2, ("ours",))) as supervisor:
        await until(lambda: _count(ran, 1))
        # A job that we enqueue, among others that are more urgent, and then one of another service.
        await supervisor.jobs.enqueue_many([NewJob(queue="q", task="theirs", priority=1) for _ in range(300)])
        added = await supervisor.jobs.enqueue("ours", {"n": 1}, queue="q")
        await when_ended(supervisor, added.job_id)
        await raw.execute(ADD_FOREIGN, "ours", 1)
        await until(lambda: _count(ran, 3))
        waiting = "task = 'theirs' AND status = 'queued' AND waits_for IS NULL"
        assert await raw.fetchval(f"SELECT count(*) FROM dl_jobs WHERE {waiting}") == 600
        kinds = "SELECT DISTINCT kind FROM dl_job_events JOIN dl_jobs USING (job_id) WHERE task = 'theirs'"
        assert [row["kind"] for row in await raw.fetch(kinds)] == ["queued"]
        asked = [NewJob(queue="q", task=task) for task in ("ours", "theirs")]
        assert [one.queue_state for one in await supervisor.jobs.enqueue_many(asked)] == [None, "unknown_task"]
        [worker] = await supervisor.jobs.workers()
        assert (worker.queues, worker.only_tasks) == ({"q": 2}, {"q": ["ours"]})
        # A queue that is paused and resumed continues immediately.
        await supervisor.jobs.pause("q")
        claims = supervisor.signals.claimed.count
        paused = await supervisor.jobs.enqueue("ours", queue="q")
        await supervisor.signals.claimed.wait(claims + 1)
        await supervisor.jobs.resume("q")
        await when_ended(supervisor, paused.job_id)
        # Another process, without a restriction, takes the other jobs of the tasks that it knows.
        async with open_with(tasks_named("theirs", ran=ran), Worker("q", 100)):
            await until(lambda: _none_left(raw))
    assert {task for task, _ in ran} == {"ours", "theirs"}


async def _count(ran, number):
    return len(ran) == number


async def _none_left(raw):
    return await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'queued'") == 0


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_entries_of_one_queue_have_separate_slots_and_name_existing_tasks(open_with, raw):
    tasks, open_now, running = Tasks(), trio.Event(), []

    for name in ("a", "b", "c"):

        @tasks.task(name, queue="q")
        async def run(job):
            running.append(job.task)
            await open_now.wait()

    with pytest.raises(ConfigError, match=r"\[1\].tasks must be names of tasks of the program, not 'd'; its tasks: a,"):
        async with open_with(tasks, Worker("q", 1), Worker("p", 1, ("a", "d"))):
            pass
    async with open_with(tasks, Worker("q", 1, ("a",)), Worker("q", 2, ("b", "c"))) as supervisor:
        await supervisor.jobs.enqueue_many([NewJob(task=task) for task in "aaabbbccc"])
        await until(lambda: _count(running, 3))
        assert sorted(running) == ["a", "b", "b"]
        assert supervisor.state.queues["q"] == QueueLoad(concurrency=3, running=3)
        open_now.set()
        await until(lambda: _none_left(raw))
        await supervisor.signals.recorded.wait(9)
        assert supervisor.state.queues["q"].running == 0
    assert sorted(running) == sorted("aaabbbccc")


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_tasks_and_queues_can_be_added_to_a_running_supervisor(open_with, raw):
    events, ran = [], []
    more = tasks_named("new", ran=ran, max_running=1, queue="added")
    more.schedule("nightly", task="new", cron="@daily")

    @more.resource
    @asynccontextmanager
    async def pool():
        events.append("opened")
        yield "a pool"
        events.append("closed")

    @more.task("asks", queue="added", asyncio=True)
    async def asks(job):
        assert job.resource(pool) == "a pool"
        await asyncio.sleep(0)
        ran.append(job.task)

    @more.around
    @contextmanager
    def around(job):
        events.append(f"around {job.task}")
        yield

    async with open_with(tasks_named("old", ran=ran), Worker("q", 1)) as supervisor:
        [unknown] = await supervisor.jobs.enqueue_many([NewJob(queue="q", task="asks")])
        assert unknown.queue_state in {"unknown_task", None}  # None: the database has not answered in time
        await supervisor.add_tasks(more)
        # A job that has waited for the task, and one that is added now.
        await when_ended(supervisor, unknown.job_id)
        await when_ended(supervisor, (await supervisor.jobs.enqueue("new", {"n": 1}, queue="q")).job_id)
        assert ran == ["asks", ("new", 1)]
        assert events == ["opened", "around asks", "around new"]
        assert (await supervisor.limits.task("new")).limits == {"max_running": 1}
        assert (await supervisor.schedules.get("nightly")).task == "new"
        assert [sorted(one.tasks) for one in await supervisor.jobs.workers()] == [["asks", "new", "old"]]

        await supervisor.add_queue("added", 2, tasks=["asks"])
        await when_ended(supervisor, (await supervisor.jobs.enqueue("asks")).job_id)
        await supervisor.add_queue("plain", 1)
        await when_ended(supervisor, (await supervisor.jobs.enqueue("old", queue="plain")).job_id)
    assert events[-1] == "closed"


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_a_refused_addition_changes_nothing(open_with, raw):
    async with open_with(tasks_named("old"), Worker("q", 1), Worker("p", 1, ("old",))) as supervisor:
        with pytest.raises(ValueError, match="tasks registered in both registries: old"):
            await supervisor.add_tasks(tasks_named("fine", "old"))
        dear = tasks_named("fine", supplier=Supplier("hr", rate_limits=(RateLimit(1, 60),)), cost=2)
        closed = []

        @dear.resource
        @asynccontextmanager
        async def pool():
            yield
            closed.append(True)

        with pytest.raises(BadRequest, match="cost: must be at most 1, a rate limit of the supplier 'hr', not 2"):
            await supervisor.add_tasks(dear)
        await until(lambda: _count(closed, 1))

        broken = tasks_named("fine")

        @broken.resource
        @asynccontextmanager
        async def breaks():
            raise OSError("no such file")
            yield

        with pytest.raises(ConfigError, match="could not be opened: OSError: no such file"):
            await supervisor.add_tasks(broken)
        for entry, options, refusal in (
            (("q", 1), {}, r"^queue: must be different in each entry, not 'q'"),
            (("n", 0), {}, r"^concurrency: must be an integer from 1 to 1000, not '0'"),
            (("n", 1), {"tasks": ["none such"]}, r"^tasks: must be names of tasks of the program, not 'none"),
            (
                ("p", 1),
                {"tasks": ["old"]},
                r"^tasks: must be names that are in no other entry of the queue, not 'old'",
            ),
        ):
            with pytest.raises(ConfigError, match=refusal):
                await supervisor.add_queue(*entry, **options)
        with pytest.raises(BadRequest, match=r"queue: must be one that this process serves \(q, p\), not 'none such'"):
            await supervisor.remove_queue("none such")
        assert await raw.fetchval("SELECT array_agg(task) FROM dl_tasks") == ["old"]
        assert await raw.fetchval("SELECT count(*) FROM dl_sources") == 0
        assert list(supervisor.state.queues) == ["q", "p"]
        await supervisor.add_tasks(tasks_named("fine"))  # no task has its name
        await supervisor.drain()
        for change in (supervisor.add_tasks(Tasks()), supervisor.add_queue("n", 1), supervisor.remove_queue("q")):
            with pytest.raises(Draining):
                await change


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_a_removed_queue_waits_for_its_runs_and_releases_unfinished_ones(open_with, raw):
    tasks, may_end, running = Tasks(), trio.Event(), []

    @tasks.task("ends")
    async def ends(job):
        running.append(job.task)
        await may_end.wait()

    @tasks.task("goes on")
    async def goes_on(job):
        running.append(job.task)
        await trio.sleep_forever()

    async with open_with(tasks, Worker("q", 2), Worker("stays", 1), drain_timeout_s=1) as supervisor:
        added = []
        for task, to_run in (("ends", 1), ("goes on", 2), ("ends", 2)):
            added.append(await supervisor.jobs.enqueue(task, queue="q"))
            await until(lambda to_run=to_run: _count(running, to_run))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.remove_queue, "q")
            await until(lambda: _shows(raw, ["stays"]))
            with pytest.raises(BadRequest, match="queue: must differ until 'q' is removed"):
                await supervisor.add_queue("q", 1)
            may_end.set()
        rows = [await supervisor.jobs.get(one.job_id) for one in added]
        assert [(row.status, row.attempt) for row in rows] == [("succeeded", 1), ("queued", 0), ("queued", 0)]
        assert list(supervisor.state.queues) == ["stays"]
        assert (await supervisor.jobs.enqueue("ends", queue="q")).queue_state == "no_worker"
        # The other queues continue, and this one can be served again.
        await when_ended(supervisor, (await supervisor.jobs.enqueue("ends", queue="stays")).job_id)
        await supervisor.add_queue("q", 4)
        await when_ended(supervisor, added[2].job_id)


async def _waits(raw, job_id, for_what):
    return await raw.fetchval("SELECT waits_for FROM dl_jobs WHERE job_id = $1", job_id) == for_what


async def _shows(raw, queues):
    return (
        await raw.fetchval("SELECT array_agg(q ORDER BY q) FROM dl_workers, jsonb_object_keys(queues) AS q") == queues
    )


@pytest.mark.requirement("S5")
async def test_a_process_without_queues_is_notified_of_jobs_when_one_is_added(open_with, raw):
    ran = []
    async with open_with(tasks_named("a", ran=ran)) as supervisor:
        await supervisor.signals.listening.wait()
        await supervisor.add_queue("q", 1)
        await supervisor.signals.resting.wait_until(lambda queues: queues == ("q",))
        await raw.execute(ADD_FOREIGN, "a", 1)
        await until(lambda: _count(ran, 1))


@pytest.mark.requirement("S5")
async def test_a_job_added_before_the_first_queue_listens_is_found_afterwards(open_with, raw, database):
    ran = []
    async with (
        open_proxy(database.dsn) as proxy,
        open_with(tasks_named("a", ran=ran), dsn=proxy.dsn) as supervisor,
        trio.open_nursery() as nursery,
    ):
        await supervisor.signals.listening.wait()
        # Its LISTEN is in progress until the job is there.
        proxy.freeze("listener")
        nursery.start_soon(supervisor.add_queue, "q", 1)
        await supervisor.signals.resting.wait_until(lambda queues: queues == ("q",))
        await raw.execute(ADD_FOREIGN, "a", 1)
        proxy.thaw()
        await until(lambda: _count(ran, 1))
    assert supervisor.signals.listening.count == 1


@pytest.mark.requirement("S5")
async def test_a_job_whose_task_is_added_while_a_claim_asks_for_limits_is_found(open_with, raw, database):
    """The claim that follows has asked for the tasks that there were before."""
    ran = []
    async with (
        open_proxy(database.dsn) as proxy,
        open_with(tasks_named("old"), Worker("q", 1), dsn=proxy.dsn) as supervisor,
    ):
        signals = supervisor.signals
        await signals.listening.wait()
        claims = signals.claimed.count
        added = await supervisor.jobs.enqueue("new", queue="q")
        await signals.claimed.wait(claims + 1)
        await signals.resting.wait_until(lambda queues: queues == ("q",))
        known = signals.known_tasks.count
        # The next statement with the task's name reads which tasks are known.
        proxy.freeze_at("locks", b"old")
        await raw.execute("SELECT pg_notify('dl_lane', '')")  # as when any process declares limits

        async def requests():
            return proxy.asked("locks")

        await until(requests, lambda number: number is None)
        with trio.fail_after(60):
            await supervisor.add_tasks(tasks_named("new", ran=ran))
        assert signals.known_tasks.count == known
        proxy.thaw()
        assert (await when_ended(supervisor, added.job_id)).status == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_a_slow_look_at_a_few_ready_jobs_does_not_put_off_the_next_one(open_with, raw, database):
    ran = []
    async with (
        open_proxy(database.dsn) as proxy,
        open_with(tasks_named("a", ran=ran), Worker("q", 1, ("a",)), dsn=proxy.dsn) as supervisor,
    ):
        await supervisor.signals.listening.wait()
        proxy.delay_s = (
            0.15  # a poll takes a request for its transaction, its statement, and its end, and three answers
        )
        # With pauses of thirty seconds this would take two minutes.
        with trio.fail_after(60):
            for number in range(1, 5):
                await raw.execute(ADD_FOREIGN, "a", 1)
                await until(lambda number=number: _count(ran, number))


@pytest.mark.requirement("R7")
async def test_a_schedule_of_an_undeclared_task_is_reported_at_the_start(open_with):
    tasks = tasks_named("report")
    tasks.schedule("nightly", task="report", cron="@daily")
    tasks.schedule("weekly", task="rpeort", cron="@weekly")
    with capture_logs() as lines:
        async with open_with(tasks) as supervisor:
            assert (await supervisor.schedules.get("weekly")).unknown_task
    found = [line for line in lines if line.get("log_level") == "warning" and "schedule" in line]
    assert [(line["schedule"], line["task"]) for line in found] == [("weekly", "rpeort")]
    assert found[0]["event"].startswith("a schedule has a task that no process has declared")


@pytest.mark.slow
@pytest.mark.requirement("S4", "S5")
async def test_an_added_task_with_known_limits_is_stopped_at_its_period_end(open_with, raw):
    """No notification announces limits that another process has declared with the same values."""
    stops = tasks_named("nightly", work_periods="DAILY 00:00-24:00", at_period_end="stop")
    async with open_with(stops, Worker("other", 1)), open_with(tasks_named("old"), Worker("q", 1)) as supervisor:
        await supervisor.signals.listening.wait()
        assert not supervisor.signals.period_ends.last
        await supervisor.add_tasks(stops)
        await supervisor.signals.period_ends.wait_until(lambda tasks: tasks == ("nightly",))


@pytest.mark.slow
@pytest.mark.requirement("S5")
async def test_a_refused_addition_leaves_no_asyncio_loop_and_resources_close_in_reverse(open_with):
    """Of three additions the first is refused; the others share one asyncio loop."""
    events = []

    def asking(name, **limits):
        tasks = Tasks()

        @tasks.resource(asyncio=True)
        @asynccontextmanager
        async def pool():
            yield name
            await asyncio.sleep(0.1)
            events.append(f"{name} closed")

        @tasks.task(name, asyncio=True, **limits)
        async def asks(job):
            events.append(f"{job.resource(pool)} ran")
            await asyncio.sleep(0)

        return tasks

    with capture_logs() as lines:
        async with open_with(tasks_named("old"), Worker("q", 1)) as supervisor:
            with pytest.raises(BadRequest, match="cost: must be at most 1"):
                await supervisor.add_tasks(
                    asking("dear", supplier=Supplier("hr", rate_limits=(RateLimit(1, 60),)), cost=2)
                )
            await until(lambda: _count(events, 1))
            for name in ("first", "second"):
                await supervisor.add_tasks(asking(name))
                added = await supervisor.jobs.enqueue(name, queue="q")
                assert (await when_ended(supervisor, added.job_id)).status == "succeeded"
    assert events == ["dear closed", "first ran", "second ran", "second closed", "first closed"]
    assert not [line for line in lines if "could not be closed" in line["event"]]
