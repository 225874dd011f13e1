"""Wrapper in a body's process: imports the user's function once, then calls it for one job after another.

It communicates with the service only through the socket `data`. Output that the function prints goes to two separate
pipes. The wrapper uses neither Trio nor the database, and imports nothing that does. The guard enforces everything that
must hold whatever the function does.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import attrs
import msgspec

from dataloader.actors.children import wire
from dataloader.actors.children.body_port import AioBodyPort, BodyPort
from dataloader.actors.children.channel import Channel
from dataloader.actors.children.process_bounds import leaves, limit
from dataloader.actors.failure_text import error_text
from dataloader.actors.handles import read_fields
from dataloader.actors.wrapping import inside
from dataloader.jobs.args import ArgsType, args_of
from dataloader.jobs.errors import BadRequest, JobStopped, LimitReached
from dataloader.jobs.handler_check import result_of
from dataloader.jobs.hooks import Around
from dataloader.jobs.job import AioProcessJob, ProcessJob
from dataloader.jobs.module_names import Place
from dataloader.jobs.outcomes import Canceled, Finish, GiveUp, Next, Retry, Snooze
from dataloader.jobs.retry import RetryPolicy
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.task import DEFAULT_RETRY, Task
from dataloader.jobs.text import MAX_JSON, exact_json, storable_json, storable_text


@attrs.define(eq=False)
class _Body:
    """Imported function and the state of the running job, if there is one."""

    channel: Channel
    stop_notes: int
    memory_mb: int | None
    call: Callable[[Any], object]
    around: tuple[Around, ...]
    is_asyncio: bool
    args: ArgsType[Any] | None
    retry: RetryPolicy
    port: BodyPort | None = None
    cancel: Callable[[], object] | None = None
    told_to_stop: bool = False

    def on_term(self, *_args: object) -> None:
        """Stop the job if the SIGTERM comes from the guard, which writes a note first; ignore other SIGTERMs."""
        try:
            os.read(self.stop_notes, 1)
        except BlockingIOError:
            return
        # This is never reset: a stopped process runs no other job.
        self.told_to_stop = True
        if self.port is not None:
            self._stop(self.port)

    def _stop(self, port: BodyPort) -> None:
        port.stopped = True
        if self.cancel is not None:
            self.cancel()
        elif not self.is_asyncio:
            self.channel.interrupt()

    def run(self, job: wire.RunJob) -> wire.BodyEnd:
        """Run a job and return its outcome."""
        port = (AioBodyPort if self.is_asyncio else BodyPort)(self.channel, job.max_lines)
        try:
            args = args_of(bytes(job.args), self.args)
        except BadRequest as misfit:
            return wire.BodyEnd("give_up", text=str(misfit))
        make: Callable[..., Any] = AioProcessJob if self.is_asyncio else ProcessJob
        handle = make(args=args, port=port, **read_fields(job.fields))
        try:
            self.port = port
            try:
                if self.told_to_stop:  # the stop came before the job was read
                    self._stop(port)
                with ExitStack() as stack:
                    if self.around:
                        stack.enter_context(inside(self.around, handle))
                    value = self._aio_run(handle) if self.is_asyncio else self.call(handle)
            finally:
                self.port = None
                port.end()
            return self._ended_with(result_of(value), is_stage=job.is_stage)
        except BaseException as error:  # noqa: ASYNC103, BLE001 - every exception is the job's error
            return self._failed(error, was_stopped=port.stopped)  # noqa: ASYNC104

    def _aio_run(self, handle: object) -> object:
        async def main() -> object:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None  # noqa: S101
            self.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
            if self.told_to_stop:
                self.cancel()
            try:
                called = self.call(handle)
                assert inspect.isawaitable(called)  # noqa: S101
                return await called
            finally:
                self.cancel = None

        coroutine: Coroutine[Any, Any, object] = main()
        return asyncio.run(coroutine)

    def _ended_with(self, value: object, *, is_stage: bool) -> wire.BodyEnd:  # noqa: PLR0911 - one branch for each kind
        match value:
            case Retry():
                return wire.BodyEnd("retry", text=value.reason, seconds=value.after_s)
            case Snooze():
                return wire.BodyEnd("snooze", text=value.reason, seconds=value.for_s)
            case GiveUp():
                return wire.BodyEnd("give_up", text=value.reason)
            case Canceled():
                return wire.BodyEnd("canceled", text=value.reason)
            case Next():
                return _with_value("next", value.value, value.to, is_exact=True)
            case Finish():
                return _with_value("finish", value.value, is_exact=False)
            case _:
                return _with_value("value", value, is_exact=is_stage)

    def _failed(self, error: BaseException, *, was_stopped: bool) -> wire.BodyEnd:
        if isinstance(error, LimitReached):
            return wire.BodyEnd("limit", text=storable_text(str(error)), seconds=error.for_s)
        text = error_text(error)
        if isinstance(error, MemoryError) and self.memory_mb is not None:
            text = f"used more than {self.memory_mb:,} MB (memory_mb)\n{text}"
        stopped = was_stopped and isinstance(error, JobStopped | asyncio.CancelledError)
        is_final, is_spent = self.retry.is_final(error), isinstance(error, MemoryError)
        return wire.BodyEnd("error", text=text, is_final=is_final, stopped=stopped, is_spent=is_spent)


def _with_value(kind: Any, value: object, to: str = "", *, is_exact: bool) -> wire.BodyEnd:
    if value is None:
        return wire.BodyEnd(kind, text=to)
    try:
        encoded = exact_json("value", value, MAX_JSON) if is_exact else storable_json(value)
    except BadRequest as error:
        return wire.BodyEnd("refused", text=mask_text(error.message))
    return wire.BodyEnd(kind, msgspec.Raw(encoded.encode()), text=to)


def live_in_body(data: int, stop_notes: int, declared: Mapping[str, Any]) -> None:
    """Import the function that `declared` names, then run jobs until the service closes the socket."""
    channel = Channel(data)
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr] # they are text files
    try:
        told = msgspec.convert(declared, wire.BodySetup)
        limit(told.memory_mb)
        found = Place(told.module, told.name).find()
        task = found if isinstance(found, Task) else None
        body = _Body(
            channel=channel,
            stop_notes=stop_notes,
            memory_mb=told.memory_mb,
            call=found if task is None else task.handler,
            around=tuple(Place(*place).find() for place in told.around),
            is_asyncio=told.asyncio,
            args=None if task is None else task.args,
            retry=DEFAULT_RETRY if task is None else task.retry,
        )
    except BaseException as error:  # noqa: ASYNC103, BLE001 - a module may raise anything
        channel.send(wire.Started(error_text(error)))
        return  # noqa: ASYNC104
    signal.signal(signal.SIGTERM, body.on_term)
    channel.start()
    channel.send(wire.Started())
    while (job := channel.next_job()) is not None:
        threads = set(threading.enumerate())
        ended = body.run(job)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        ended.left = leaves(threads)
        channel.send(ended)
