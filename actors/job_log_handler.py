"""`logging` handler that keeps the lines of a job's handler with the job, as `job.log` does.

A context variable names the run, so asyncio tasks and threads that a handler starts with its context belong to it. A
child process sends its output itself (`actors.children`).
"""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from dataloader.jobs.listings import Level
from dataloader.jobs.logger import ROOT, message_of, traceback_of

if TYPE_CHECKING:
    from dataloader.actors.trio_port import TrioPort


@attrs.define(eq=False)
class _Running:
    """Current run, within a block. `left` is the number of lines that other threads may still store."""

    port: TrioPort
    left: int
    token: trio.lowlevel.TrioToken = attrs.field(factory=trio.lowlevel.current_trio_token)
    thread: int = attrs.field(factory=threading.get_ident)
    _before: Token[_Running | None] = attrs.field(init=False)

    def __enter__(self) -> None:
        self._before = _running.set(self)

    def __exit__(self, *_error: object) -> None:
        _running.reset(self._before)

    def keep(self, level: Level, message: str, fields: dict[str, Any]) -> None:
        self.port.log(level, message, fields, is_logged=True)


_running: Final[ContextVar[_Running | None]] = ContextVar("dataloader_running", default=None)


def keep_lines(port: TrioPort, max_lines: int) -> AbstractContextManager[None]:
    """Return a block whose log lines are kept with the run of `port`, at most `max_lines` lines."""
    return _Running(port, max_lines + 1)


class JobLogHandler(logging.Handler):
    """Handler for the root logger: keeps lines from `info` on that a job's handler logs with the job.

    `dataloader serve` has it. In an embedding program: `logging.getLogger().addHandler(JobLogHandler())`.
    """

    def __init__(self) -> None:
        """Create the handler without a formatter: the job keeps message, level, logger and exception."""
        super().__init__(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record of the job's handler; ignore records of our own loggers."""
        run = _running.get()
        if run is None or record.name.partition(".")[0] == ROOT:
            return
        try:
            if threading.get_ident() == run.thread:
                run.keep(*_line_of_record(record))
            elif run.left > 0:
                # Do not wait for the loop, which may wait for this thread.
                run.left -= 1
                run.token.run_sync_soon(run.keep, *_line_of_record(record))
        except trio.RunFinishedError:
            pass
        except Exception:  # noqa: BLE001 - as logging's own handlers do: a log call never raises
            self.handleError(record)


def _line_of_record(record: logging.LogRecord) -> tuple[Level, str, dict[str, Any]]:
    level: Level = "info"
    if record.levelno >= logging.WARNING:
        level = "error" if record.levelno >= logging.ERROR else "warning"
    fields = {"logger": record.name}
    if record.exc_info and record.exc_info[1] is not None:
        fields["exception"] = traceback_of(record.exc_info[1])
    return level, message_of(record), fields
