"""Runs a supervisor for `dataloader serve`: signals, the log line "serving", and an end within a deadline.

The first SIGTERM, SIGINT or SIGHUP drains. The second stops the jobs. The third, or the total deadline, exits
immediately, since a thread that never returns or a shielded wait in a library could otherwise keep the process forever.
The exit code is 0 if every job has finished or was returned to the queue, else 1. Embedding programs handle signals
themselves and call `Supervisor.drain`.
"""

from __future__ import annotations

import gc
import resource
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress

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
from dataloader.supervisor.total_deadline import SIGNALS, leave, open_total_deadline

log = get_logger(__name__)


async def serve(
    settings: Settings,
    tasks: Tasks,
    guest: Callable[[Supervisor], Awaitable[None]] | None = None,
    *,
    server: EmbeddedPostgres | None = None,
) -> int:
    """Run until a signal ends the process or a part gives up, and return the exit code.

    `guest` is started when every queue claims, and cancelled when a drain has ended. `server` is the embedded
    PostgreSQL that the settings point to, if any; it is restarted if it ends.

    Raises `SchemaError`, `ConfigError` or `AddressError` if the process cannot start.
    """
    outcome: DrainReport | Exception | None = None
    # Everything loaded so far stays, so the garbage collector can skip it: each full collection would stop the loop for
    # tens of milliseconds. There is none here either: it would find almost nothing and delay the first claim.
    gc.freeze()
    _open_as_many_files_as_allowed()
    try:
        # Signals that the parent process ignores (nohup, a shell's background job) stay ignored.
        heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        with trio.open_signal_receiver(*heeded) as signals, open_total_deadline(settings.drain_timeout_s) as deadline:
            async with (
                open_starting(
                    settings, tasks, with_web=True, server=server, unstoppable=_leave_unstoppable
                ) as supervisor,
                trio.open_nursery() as nursery,
            ):
                nursery.start_soon(obey, signals, *_signal_actions(supervisor))
                nursery.start_soon(deadline.watch, supervisor)
                outcome = await _serve_until_drained(supervisor, settings, nursery, guest)
                nursery.cancel_scope.cancel()
    except ActorGaveUp as error:
        log.critical(
            "ended because a part gave up",
            cause=str(error),
            what_to_do="fix the cause, then restart the process; its jobs were released, or are recovered when their"
            " leases expire",
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
    """Return the drain's report, or the error that made serving impossible, to be raised after everything is closed."""
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
        # A thread that does not return would keep the process; its rows are left to their leases.
        leave(1, "exiting with code 1, because handlers did not stop", stuck=report.stuck)
    return report


def _signal_actions(supervisor: Supervisor) -> tuple[Callable[[str], None], ...]:
    """Return the actions for the first signal, the second, and each further one."""

    def drain(name: str) -> None:
        log.info("signal: draining; a second signal stops the jobs immediately", signal=name)
        supervisor.request_drain()

    def hurry(name: str) -> None:
        log.warning("second signal: stopping the running jobs", signal=name)
        supervisor.hurry()

    def leave_now(name: str) -> None:
        leave(1, "third signal: exiting immediately", signal=name)

    return drain, hurry, leave_now


def _open_as_many_files_as_allowed() -> None:
    """Raise the limit of open files to the hard limit. The usual 1,024 is for programs that use `select`."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # the kernel's limit may be lower
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _announce(supervisor: Supervisor, settings: Settings) -> None:
    log.info(
        "serving",
        url=supervisor.url,
        worker=supervisor.worker,
        queues={worker.queue: worker.concurrency for worker in settings.workers},
    )


def _leave_unstoppable(run: Run) -> None:
    leave(
        1,
        "a handler continues without its lease; exiting, so that the job never runs twice concurrently",
        job_id=str(run.job.job_id),
        task=run.job.task,
        stopped_by=run.stopped_by().value,
    )
