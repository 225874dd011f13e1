"""Records that handlers log with the standard library's `logging` are stored with their jobs (Q9)."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading

import pytest
import trio
from conditions import when_ended

from dataloader import JobLogHandler, Tasks
from dataloader.testing import run_task

pytestmark = pytest.mark.requirement("Q9")

tasks = Tasks()
shop = logging.getLogger("shop")


@pytest.fixture(autouse=True)
def handler(monkeypatch):
    handler = JobLogHandler()
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


def log(where):
    shop.info("%s sells %d", where, 3)
    shop.debug("not kept")
    try:
        {}["password=hunter2-hunter2"]
    except KeyError:
        shop.exception("failed")


@tasks.task("trio")
async def in_trio(job):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(log_later, "trio")


async def log_later(where):
    await trio.lowlevel.checkpoint()
    log(where)


@tasks.task("thread")
def in_thread(job):
    log("thread")


@tasks.task("asyncio", asyncio=True)
async def in_asyncio(job):
    await asyncio.create_task(aio_log("asyncio"))


async def aio_log(where):
    log(where)


@tasks.task("thread of asyncio", asyncio=True)
async def in_thread_of_asyncio(job):
    await asyncio.to_thread(log, "thread of asyncio")


@pytest.mark.parametrize("flavour", tasks)
async def test_lines_of_a_handler_are_kept_with_its_job(flavour):
    run = await run_task(tasks, flavour)
    assert [(line.level, line.message) for line in run.log] == [("info", f"{flavour} sells 3"), ("error", "failed")]
    assert run.log[0].fields == {"logger": "shop"}
    assert "KeyError: 'password=" in run.log[1].fields["exception"]
    assert "hunter2" not in run.log[1].fields["exception"]


@pytest.mark.slow
async def test_lines_beyond_the_limit_are_not_kept(open_worker, raw):
    tasks = Tasks()

    @tasks.task("loud")
    def loud(job):
        for number in range(1_000):
            shop.info("line %d", number)

    async with open_worker(tasks, log_lines_per_job=30) as supervisor:
        job = await supervisor.jobs.enqueue("loud", queue="q")
        await when_ended(supervisor, job.job_id)
        kept = await raw.fetch(
            "SELECT payload->>'message' AS line FROM dl_job_events WHERE kind = 'log' ORDER BY event_id"
        )
    assert [row["line"] for row in kept[-2:]] == ["line 29", "more than 30 lines; the rest is not stored"]
    assert len(kept) == 31


async def test_lines_from_elsewhere_are_not_kept():
    tasks = Tasks()
    outside, logged = threading.Event(), threading.Event()

    def log_outside():
        outside.wait()
        shop.info("of another thread")
        logged.set()

    @tasks.task("quiet")
    async def quiet(job):
        outside.set()
        logging.getLogger("dataloader.something").warning("of the product")
        await trio.to_thread.run_sync(logged.wait)

    threading.Thread(target=log_outside, daemon=True).start()
    run = await run_task(tasks, "quiet")
    assert (run.status, run.log) == ("succeeded", [])


async def test_a_line_whose_arguments_do_not_fit_is_kept_as_it_is(monkeypatch, handler, capsys):
    tasks = Tasks()
    # Without pytest's handlers, which raise for such a line.
    monkeypatch.setattr(shop, "propagate", False)
    monkeypatch.setattr(shop, "handlers", [handler])

    @tasks.task("wrong")
    async def wrong(job):
        shop.info("%d", "no number, password=hunter2-hunter2")

    run = await run_task(tasks, "wrong")
    assert run.status == "succeeded"
    [line] = run.log
    assert line.message.startswith("%d ('no number, password=")
    assert "hunter2" not in line.message
    assert capsys.readouterr().err == ""


def test_the_handler_has_a_lock_that_logging_can_enter(handler):
    """Python 3.13 enters it for each record, and raises from the log call if there is none."""
    with handler.lock:
        pass


@pytest.mark.slow
async def test_lines_of_a_thread_that_outlives_its_run_belong_to_no_job(open_worker, raw):
    tasks = Tasks()
    ended, threads = threading.Event(), []

    def log_later():
        ended.wait()
        for number in range(3_000):
            shop.info("later %d", number)

    @tasks.task("leaves")
    def leaves(job):
        shop.info("now")
        thread = threading.Thread(target=contextvars.copy_context().run, args=(log_later,))
        thread.start()
        threads.append(thread)

    @tasks.task("next")
    def next_(job):
        ended.set()
        threads[0].join()

    async with open_worker(tasks) as supervisor:
        for task in tasks:
            job = await supervisor.jobs.enqueue(task, queue="q")
            assert (await when_ended(supervisor, job.job_id, within_s=60)).status == "succeeded"
    kept = await raw.fetch("SELECT payload->>'message' AS line FROM dl_job_events WHERE kind = 'log'")
    assert [row["line"] for row in kept] == ["now"]
