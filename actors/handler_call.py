"""Calls a handler in its flavor, with the handle of that flavor.

Trio handlers run in the runner's task, asyncio handlers in a task of the process's asyncio loop, and plain functions in
a thread. Functions of tasks with `process=True` run in a child process, those with `dask=` in one beside a Dask worker.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

import outcome
import trio

from dataloader.actors.aio_port import AioRunPort
from dataloader.actors.children.child_call import call_in_child
from dataloader.actors.failure_text import error_text
from dataloader.actors.handles import fields_of
from dataloader.actors.job_log_handler import keep_lines
from dataloader.actors.job_runs import Run
from dataloader.actors.run_services import RunServices
from dataloader.actors.thread_port import ThreadRunPort
from dataloader.actors.trio_port import TrioPort
from dataloader.actors.wrapping import inside
from dataloader.jobs.args import args_of
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.handler_check import result_of
from dataloader.jobs.hooks import Around
from dataloader.jobs.job import AioJob, AnyJob, Job, ThreadJob
from dataloader.jobs.json_values import MAX_VALUES, has_too_many_values
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import MAX_ARGS_BYTES
from dataloader.jobs.outcomes import GiveUp
from dataloader.jobs.task import Task
from dataloader.jobs.text import MAX_DEPTH, text_of

log = get_logger(__name__)

ASYNCIO_IN_TRIO: Final = (
    "an asyncio function cannot run in a Trio handler; declare the task with asyncio=True, or call Trio's function"
)
_SIGNS_OF_ASYNCIO: Final = ("no running event loop", "no current event loop", "received unrecognized yield message")


async def call_handler(task: Task, run: Run, services: RunServices, limiter: trio.CapacityLimiter) -> object:
    """Call the handler and return its result. Raises the handler's errors."""
    port = TrioPort(run, services, task)
    if (unfit := _unfit(task, run.job.args)) is not None:
        return unfit
    assert run.job.args is not None  # noqa: S101 - `_unfit` has refused such a job
    if task.in_child:
        # Without clusters, in tests, a function for a cluster runs in a child of this process.
        lender = services.children if task.process or services.clusters is None else services.clusters
        assert lender is not None, "a process with such tasks has children"  # noqa: S101
        return await call_in_child(task, run, lender, port, services.max_lines)
    try:
        args = args_of(run.job.args, task.args)
    except BadRequest as misfit:
        return GiveUp(str(misfit))  # the next attempt would refuse the same args
    with keep_lines(port, services.max_lines):
        if task.asyncio:
            return await _call_asyncio(task, run, args, services, port)
        if not task.is_async:
            job = _handle(ThreadJob, run, args, ThreadRunPort(port))
            call = partial(_called, task.handler, services.around, job)
            return await trio.to_thread.run_sync(call, limiter=limiter, thread_name=f"task {task.name}")
        return await _call_trio(task, services, _handle(Job, run, args, port))


def _unfit(task: Task, args: str | None) -> GiveUp | None:
    """Return the outcome of a job whose args are too long, too many, or too deep for the message to a child process."""
    if args is None:
        return GiveUp(f"args: must have at most {MAX_ARGS_BYTES:,} bytes in PostgreSQL's format")
    if len(args) > MAX_VALUES and has_too_many_values(args.encode()):
        return GiveUp(f"args: must have at most {MAX_VALUES:,} values (lists and objects count twice)")
    if task.in_child and args.count("[") + args.count("{") > MAX_DEPTH:
        try:
            args_of(args, None)
        except BadRequest as misfit:
            return GiveUp(str(misfit))
    return None


async def _call_trio(task: Task, services: RunServices, job: Job[Any]) -> object:
    try:
        return await _awaited(task.handler, services.around, job)
    except (RuntimeError, TypeError) as error:
        if not any(sign in text_of(error) for sign in _SIGNS_OF_ASYNCIO):
            raise
        error.add_note(ASYNCIO_IN_TRIO)
        return GiveUp(error_text(error))  # the next attempt would fail in the same way


async def _call_asyncio(task: Task, run: Run, args: Any, services: RunServices, port: TrioPort) -> object:
    assert services.aio is not None, "a process with such tasks has opened a loop"  # noqa: S101

    def left_behind(tasks: int) -> None:
        run.returned_with_tasks_left()
        log.warning("cancelling asyncio tasks that a handler has left running", tasks=tasks)

    async with trio.open_nursery() as nursery:
        job = _handle(AioJob, run, args, AioRunPort(port, nursery))
        call = partial(services.aio.run, _awaited, task.handler, services.around, job, left_behind=left_behind)
        # Raised outside of the nursery, which would wrap it into an exception group.
        ended = await outcome.acapture(call)
    return ended.unwrap()


async def _awaited(handler: Callable[..., Awaitable[object]], around: tuple[Around, ...], job: AnyJob) -> object:
    if not around:
        return result_of(await handler(job))
    with inside(around, job):
        return result_of(await handler(job))


def _called(handler: Callable[..., object], around: tuple[Around, ...], job: AnyJob) -> object:
    with inside(around, job):
        return result_of(handler(job))


def _handle(make: Callable[..., Any], run: Run, args: Any, port: object) -> Any:
    return make(args=args, port=port, **fields_of(run.job))
