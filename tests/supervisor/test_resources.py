"""Resources, opened once per process for its jobs, and wrappers of every run."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
import trio
from conditions import patience_s
from logged import capture_logs
from proxy import open_proxy

from dataloader import AioJob, ConfigError, Job, Settings, Tasks, ThreadJob, Worker, open_supervisor
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.reads import ping
from dataloader.supervisor import resources
from dataloader.testing import run_task


class Pool:
    """Resource that is opened and closed."""


class Session:
    """Another resource."""


def tasks_with_resources() -> tuple[Tasks, list[str]]:
    """Return a registry with a Trio and an asyncio resource and a task of each kind; and the recorded events."""
    tasks, told = Tasks(), []

    @tasks.resource
    @asynccontextmanager
    async def pool():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            told.append("pool opened")
            yield Pool()
            told.append("pool closed")
            nursery.cancel_scope.cancel()

    @tasks.resource(asyncio=True)
    @asynccontextmanager
    async def session():
        own = asyncio.create_task(asyncio.sleep(3_600))
        async with asyncio.timeout(3_600):  # noqa: ASYNC100 - yields
            told.append("session opened")
            yield Session()
            told.append("session closed")
        own.cancel()

    @tasks.task("trio")
    async def in_trio(job: Job) -> bool:
        told.append("ran")
        return job.resource(Pool) is job.resource(pool)

    @tasks.task("asyncio", asyncio=True)
    async def in_asyncio(job: AioJob) -> bool:
        told.append("ran")
        return job.resource(Session) is job.resource(session)

    @tasks.task("thread")
    def in_thread(job: ThreadJob) -> bool:
        told.append("ran")
        return job.resource(Pool) is job.resource(pool)

    return tasks, told


OPENED, CLOSED = ["pool opened", "session opened"], ["session closed", "pool closed"]


@pytest.mark.parametrize("flavour", ["trio", "asyncio", "thread"])
async def test_a_tasks_test_has_them(flavour):
    tasks, told = tasks_with_resources()
    assert (await run_task(tasks, flavour)).result is True
    assert told == [*OPENED, "ran", *CLOSED]


async def test_they_open_once_in_order_before_the_first_claim_and_close_after_the_last_run(database):
    registry, told = tasks_with_resources()
    tasks = Tasks()
    tasks.include(registry)
    settings = Settings(db_dsn=database.dsn, workers=(Worker("q", 2),))
    with trio.fail_after(patience_s()):
        async with open_supervisor(settings, tasks) as supervisor:
            assert told == OPENED
            jobs = [await supervisor.jobs.enqueue(flavour, queue="q") for flavour in ("trio", "asyncio", "thread")]
            for job in jobs:
                assert (await supervisor.jobs.wait(job.job_id)).result is True
            assert told == [*OPENED, "ran", "ran", "ran"]
    assert told == [*OPENED, "ran", "ran", "ran", *CLOSED]


def failing(*, opening: bool, is_asyncio: bool) -> Tasks:
    tasks, _ = tasks_with_resources()

    @tasks.resource(asyncio=is_asyncio)
    @asynccontextmanager
    async def broken():
        if opening:
            raise OSError("no route, password=hunter2secret")
        yield 1
        raise OSError("already gone")

    return tasks


@pytest.mark.slow
async def test_one_that_waits_for_its_database_is_opened_again(database):
    tasks, tries = Tasks(), []

    @tasks.resource
    @asynccontextmanager
    async def books():
        tries.append(1)
        if len(tries) == 2:
            proxy.mend()
        async with open_database(DatabaseOptions(dsn=proxy.dsn)) as db:
            await ping(db, 5)
            yield "books"

    @tasks.task("read", queue="q")
    async def read(job):
        return job.resource(books)

    async with open_proxy(database.dsn) as proxy:
        proxy.cut()
        async with open_supervisor(Settings(db_dsn=database.dsn, workers=(Worker("q", 2),)), tasks) as supervisor:
            job = await supervisor.jobs.enqueue("read")
            assert (await supervisor.jobs.wait(job.job_id)).result == "books"
    assert len(tries) == 2


@pytest.mark.slow
@pytest.mark.parametrize("is_asyncio", [False, True])
async def test_one_that_does_not_open_ends_the_start_with_one_line(database, is_asyncio):
    settings = Settings(db_dsn=database.dsn, workers=(Worker("q", 2),))
    with (
        trio.fail_after(patience_s()),
        pytest.raises(
            ConfigError, match=r"resource failing.*broken: could not be opened: OSError: no route"
        ) as refused,
    ):
        async with open_supervisor(settings, failing(opening=True, is_asyncio=is_asyncio)):
            raise AssertionError("it has started")
    assert "hunter2secret" not in str(refused.value)
    assert database.psql("SELECT count(*) FROM dl_workers") == "0"


@pytest.mark.parametrize("is_asyncio", [False, True])
async def test_a_resource_that_fails_to_close_is_reported_and_the_others_close(is_asyncio):
    with capture_logs() as lines:
        assert (await run_task(failing(opening=False, is_asyncio=is_asyncio), "trio")).status == "succeeded"
    [line] = [line for line in lines if line["event"] == "a resource could not be closed"]
    assert "OSError: already gone" in line["error"]


@pytest.mark.parametrize(
    ("is_asyncio", "raised"),
    [(False, SystemExit(3)), (True, SystemExit(3)), (True, asyncio.CancelledError("its own"))],
)
async def test_one_that_leaves_or_is_cancelled_ends_nothing_else(is_asyncio, raised):
    for opening in (False, True):
        tasks, told = tasks_with_resources()

        @tasks.resource(asyncio=is_asyncio)
        @asynccontextmanager
        async def leaving(opening=opening):
            if opening:
                raise raised
            yield 1
            raise raised

        with capture_logs() as lines:
            if opening:
                with pytest.raises(ConfigError, match=r"leaving: could not be opened: .*(SystemExit: 3|its own)"):
                    await run_task(tasks, "trio")
            else:
                assert (await run_task(tasks, "trio")).status == "succeeded"
        assert told[-2:] == CLOSED
        assert [line["event"] for line in lines] == [] if opening else ["a resource could not be closed"]


async def test_a_resource_that_fails_in_its_nursery_is_reported_with_the_cause():
    tasks, failed = Tasks(), trio.Event()

    @tasks.resource
    @asynccontextmanager
    async def failing():
        async def fail():
            try:
                raise OSError("no route")
            finally:
                failed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
            yield 1

    @tasks.task("it")
    async def it(job: Job) -> None:
        await failed.wait()

    with capture_logs() as lines:
        assert (await run_task(tasks, "it")).status == "succeeded"
    assert [line["error"] for line in lines] == ["OSError: no route"]


@pytest.mark.parametrize("is_asyncio", [False, True])
async def test_one_that_hangs_is_given_up_when_it_opens_and_cancelled_when_it_closes(autojump_clock, is_asyncio):
    tasks, opens_in_s = Tasks(), 30

    @tasks.resource(asyncio=is_asyncio)
    @asynccontextmanager
    async def slow():
        await (asyncio.sleep if is_asyncio else trio.sleep)(opens_in_s)
        yield 1
        await (asyncio.sleep if is_asyncio else trio.sleep)(30)

    @tasks.task("it")
    async def it(job: Job) -> None:
        """Handler that needs no resource."""

    began = trio.current_time()
    with capture_logs() as lines:
        await run_task(tasks, "it")
    assert trio.current_time() - began == pytest.approx(30 + resources.CLOSE_S, abs=1)
    assert [line["event"] for line in lines] == ["cancelling a resource that does not close"]
    opens_in_s = resources.OPEN_S + 1
    with pytest.raises(ConfigError, match="did not open within 60 s"):
        await run_task(tasks, "it")


async def test_a_drain_does_not_wait_for_one_that_opens(database):
    tasks, opening = Tasks(), trio.Event()

    @tasks.resource
    @asynccontextmanager
    async def slow():
        opening.set()
        await trio.sleep_forever()
        yield 1

    with trio.fail_after(patience_s()):
        async with resources_opening(database, tasks, opening) as supervisor:
            assert (await supervisor.drain()).is_clean


@asynccontextmanager
async def resources_opening(database, tasks, opening):
    """Open a supervisor, until it has begun to open its tasks' resources."""
    from dataloader.supervisor.supervisor import open_starting  # noqa: PLC0415 - not public

    settings = Settings(db_dsn=database.dsn, workers=(Worker("q", 2),))
    async with open_starting(settings, tasks, with_web=False) as supervisor:
        await opening.wait()
        yield supervisor


async def test_a_missing_resource_is_a_lookup_error_with_the_fix():
    tasks = Tasks()

    @tasks.resource
    @asynccontextmanager
    async def one():
        yield Pool()

    @tasks.resource
    @asynccontextmanager
    async def two():
        yield Pool()

    @tasks.task("it")
    async def it(job: Job) -> None:
        with pytest.raises(LookupError, match=r"no resource Session for jobs; declare it with @tasks\.resource"):
            job.resource(Session)
        with pytest.raises(LookupError, match="2 resources of type Pool; choose one by its function"):
            job.resource(Pool)
        assert job.resource(one) is not job.resource(two)

    assert (await run_task(tasks, "it")).error is None


current = contextvars.ContextVar("current", default="nothing")


@pytest.mark.parametrize("flavour", ["trio", "asyncio", "thread"])
async def test_every_run_is_wrapped_with_its_context_and_its_errors(flavour):
    tasks, told = Tasks(), []

    @tasks.around
    @contextmanager
    def outer(job):
        token = current.set(job.task)
        try:
            yield
        except ValueError as error:
            told.append(str(error))
            raise
        finally:
            current.reset(token)

    @tasks.around
    @contextmanager
    def inner(job):
        told.append(f"inside of {current.get()}")
        yield

    @tasks.task("trio")
    async def in_trio(job: Job) -> str:
        return said(job)

    @tasks.task("asyncio", asyncio=True)
    async def in_asyncio(job: AioJob) -> str:
        return await asyncio.create_task(asyncio.to_thread(said, job))

    @tasks.task("thread")
    def in_thread(job: ThreadJob) -> str:
        return said(job)

    def said(job):
        if job.args.get("fail"):
            raise ValueError("from the handler")
        return current.get()

    assert (await run_task(tasks, flavour)).result == flavour
    failed = await run_task(tasks, flavour, {"fail": True})
    assert failed.error.startswith("ValueError: from the handler")
    assert told == [f"inside of {flavour}", f"inside of {flavour}", "from the handler"]
    assert current.get() == "nothing"


@pytest.mark.parametrize("flavour", ["trio", "asyncio", "thread"])
async def test_an_error_that_a_wrapper_swallows_is_the_jobs_all_the_same(flavour):
    tasks, wraps = Tasks(), []

    @tasks.around
    @contextmanager
    def swallowing(job):
        with suppress(BaseException):
            yield

    @tasks.around
    @contextmanager
    def failing(job):
        if wraps:
            raise OSError("no collector")
        yield

    @tasks.task("trio", timeout_s=0.05)
    async def in_trio(job: Job) -> None:
        if not wraps:
            await trio.sleep_forever()

    @tasks.task("asyncio", asyncio=True, timeout_s=0.05)
    async def in_asyncio(job: AioJob) -> None:
        if not wraps:
            await asyncio.sleep(3_600)

    @tasks.task("thread", timeout_s=0.05)
    def in_thread(job: ThreadJob) -> None:
        while not wraps:
            job.checkpoint()

    stopped = await run_task(tasks, flavour)
    assert (stopped.status, stopped.error.partition("\n")[0]) == ("queued", "timeout: the run took longer than 0.05 s")
    wraps.append("fail")
    failed = await run_task(tasks, flavour)
    assert failed.status == "queued"
    assert failed.error.startswith("RuntimeError: a wrapper of @tasks.around swallowed the error of another wrapper")


def test_an_invalid_resource_or_wrapper_is_refused_at_the_declaration():
    tasks = Tasks()

    async def bare():
        yield 1

    with pytest.raises(ValueError, match=r"add @contextlib\.asynccontextmanager below @tasks\.resource"):
        tasks.resource(bare)
    for function in (bare, asynccontextmanager(bare)):
        with pytest.raises(ValueError, match=r"add @contextlib\.contextmanager below @tasks\.around"):
            tasks.around(function)
