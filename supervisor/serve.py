"""The binary's way to run a supervisor: signals, the announcement, and an end that always comes (Q15).

First SIGTERM, SIGINT or SIGHUP: drain. Second: stop the jobs now. Third, or the total deadline: leave at once, since a
thread that never returns or a shielded wait in a library could otherwise hold the process for ever. Exit code 0 when
every row was finished or given back, else 1. Signals are touched here only; embedders call `Supervisor.drain`.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Final, NoReturn

import attrs
import trio

from dataloader.actors.job_runs import Run
from dataloader.jobs.errors import ActorGaveUp, ConfigError, Draining, SchemaError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.tasks import Tasks
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.supervisor.drain import DrainReport
from dataloader.supervisor.settings import Settings
from dataloader.supervisor.signals import obey
from dataloader.supervisor.supervisor import Supervisor, open_starting

log = get_logger(__name__)

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""The last comes from a terminal that is closed."""
LEAVE_AT: Final = 3
"""This signal ends the process at once."""
TOTAL_BOUND_S: Final = 10.0
"""After the drain's timeout: when the process ends, whatever still runs."""
LOOK_S: Final = 0.25
LAST_WORD_S: Final = 0.5
HEARD_S: Final = 1.0
"""So long after it came a loop that turns has heard of a signal."""


async def serve(
    settings: Settings,
    tasks: Tasks,
    guest: Callable[[Supervisor], Awaitable[None]] | None = None,
    *,
    server: EmbeddedPostgres | None = None,
) -> int:
    """Run until a signal ends it, or a part gives up; the exit code comes back.

    `guest` is started when every queue claims, and cancelled when a drain has ended. `server` is the embedded one that
    the settings lead to: it is started again, should it end.

    Raises `SchemaError`, `ConfigError` or `AddressError` when it can't start at all.
    """
    outcome: DrainReport | Exception | None = None
    # All that is loaded stays: a collection that walks it each time stops the loop for tens of milliseconds.
    # Before any job runs, since this one does so too.
    gc.collect()
    gc.freeze()
    _open_as_many_files_as_allowed()
    try:
        # What whoever started us has made us ignore (nohup, a shell's job in the background) stays so.
        heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        with trio.open_signal_receiver(*heeded) as signals, _open_bound(settings.drain_timeout_s) as bound:
            async with (
                open_starting(
                    settings, tasks, with_web=True, server=server, unstoppable=_leave_unstoppable
                ) as supervisor,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(obey, signals, *_steps(supervisor))
                nursery.start_soon(bound.watch, supervisor)
                outcome = await _serve_until_drained(supervisor, settings, nursery, guest)
                nursery.cancel_scope.cancel()
    except ActorGaveUp as error:
        log.critical(
            "ended because a part gave up",
            cause=str(error),
            what_to_do="mend the cause, then start the process again; its jobs went back to the queue, or wait for the"
            " end of their leases",
        )
        outcome = None
    if isinstance(outcome, Exception):
        raise outcome
    return 0 if outcome is not None and outcome.is_clean else 1


async def _serve_until_drained(
    supervisor: Supervisor,
    settings: Settings,
    nursery: trio.Nursery,
    guest: Callable[[Supervisor], Awaitable[None]] | None,
) -> DrainReport | Exception:
    """The drain's report, or what made serving impossible, to be told once all is closed."""
    try:
        await supervisor.ready()
        _announce(supervisor, settings)
        if guest is not None:
            nursery.start_soon(guest, supervisor)
    except Draining:
        pass
    except (SchemaError, ConfigError) as error:
        return error
    report = await supervisor.wait_drained()
    if report.stuck:
        # A thread that does not return would hold the process; its rows are left to their leases.
        _leave(1)
    return report


def _steps(supervisor: Supervisor) -> tuple[Callable[[str], None], ...]:
    """What the first signal does, what the second does, and what each further one does."""

    def drain(name: str) -> None:
        log.info("signal: draining; another one stops the jobs at once", signal=name)
        supervisor.request_drain()

    def hurry(name: str) -> None:
        log.warning("second signal: the running jobs are stopped now", signal=name)
        supervisor.hurry()

    def leave(name: str) -> None:
        _leave(1, "third signal: leaving at once", signal=name)

    return drain, hurry, leave


def _open_as_many_files_as_allowed() -> None:
    """The usual limit of 1,024 is there for programs that use `select`; any may raise it to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the kernel's own bound may be lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _announce(supervisor: Supervisor, settings: Settings) -> None:
    log.info(
        "serving",
        url=supervisor.url,
        worker=supervisor.worker,
        queues={worker.queue: worker.concurrency for worker in settings.workers},
    )


@attrs.define(eq=False)
class _Bound:
    """Leaves at the total deadline, from a thread: the loop itself may be what hangs.

    A drain begins with a signal, or when a part has given up. Python's handlers of signals run in the main thread, not
    before a call into native code has returned; that a signal came it tells a socket at once, which is read here and
    passed on to Trio's.
    """

    bound_s: float
    wakeups: socket.socket
    trios: int
    began: float = math.inf
    signals: int = 0
    _supervisor: Supervisor | None = None
    _ended: bool = False

    async def watch(self, supervisor: Supervisor) -> None:
        """Whatever begins the drain, the end comes."""
        self._supervisor = supervisor
        await supervisor.wait_draining()
        self.began = min(self.began, time.monotonic())

    def end(self) -> None:
        """The supervisor is gone; a drain's bound stays for what else may hold up the process."""
        self._ended = True

    def run(self) -> None:
        """In a thread."""
        third_at = math.inf
        while not self._ended or self.began < math.inf:
            self._listen()
            now = time.monotonic()
            if self.signals >= LEAVE_AT:
                third_at = min(third_at, now)
            if now - third_at > HEARD_S:
                _leave(1, "third signal: leaving at once, though the loop is blocked")
            if now - self.began > self.bound_s:
                # A client that takes no data or a connection that does not close holds us up, and no row.
                supervisor = self._supervisor
                report = None if supervisor is None or supervisor.failure is not None else supervisor.report
                code = 0 if report is not None and report.is_clean else 1
                _leave(code, "the total deadline of the drain has passed: leaving at once", after_s=self.bound_s)

    def _listen(self) -> None:
        with suppress(TimeoutError):
            numbers = self.wakeups.recv(64)
            came = sum(number in SIGNALS for number in numbers)
            self.signals += came
            if came:
                self.began = min(self.began, time.monotonic())
            if not numbers:
                time.sleep(LOOK_S)  # the other end is closed: nothing is told any more
            if self.trios >= 0 and not self._ended:
                with suppress(OSError):  # it is full, so Trio wakes anyway
                    os.write(self.trios, numbers)


@lru_cache
def _let_no_child_tell() -> None:
    """A forked child has our wake-up socket, too, and its signals are not ours. Python does so itself from 3.12 on."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


@contextmanager
def _open_bound(drain_timeout_s: float) -> Iterator[_Bound]:
    """The bound for the length of a block, within Trio's run."""
    _let_no_child_tell()
    wakeups, told = socket.socketpair()
    wakeups.settimeout(LOOK_S)
    told.settimeout(0)
    # The last word is within the bound, too, and so is the time until the next look at the clock.
    bound = _Bound(drain_timeout_s + TOTAL_BOUND_S - LAST_WORD_S - LOOK_S, wakeups, signal.set_wakeup_fd(told.fileno()))
    threading.Thread(target=bound.run, name="drain's bound", daemon=True).start()
    try:
        yield bound
    finally:
        signal.set_wakeup_fd(bound.trios)
        bound.end()
        told.close()


def _leave_unstoppable(run: Run) -> None:
    _leave(
        1,
        "a handler goes on although its lease is gone: this process ends, so that the job never runs twice at once",
        job_id=str(run.job.job_id),
        task=run.job.task,
        stopped_by=run.stopped_by().value,
    )


def _leave(code: int, why: str = "", **fields: object) -> NoReturn:
    """End the process, with a last word if it can be said: a log that nobody reads may be what holds us up."""
    at_the_latest = threading.Timer(LAST_WORD_S, os._exit, (code,))
    at_the_latest.daemon = True
    try:
        at_the_latest.start()
    except RuntimeError:  # the machine has no thread left
        os._exit(code)
    if why:
        log.critical(why, **fields)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
