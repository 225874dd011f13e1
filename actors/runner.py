"""Runs one job: opens its scope, calls the handler, and sends one outcome to the recorder.

The scope's deadline comes from the lease. Every stop of the job notes its reason and then cancels that one scope. So
the reason, not a guess from an exception, decides what is written: canceled, retried, released, or nothing. A handler
that returned before it noticed a stop has succeeded. The runner itself never uses the database.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import copy_context
from typing import Any, Final

import attrs
import structlog
import trio

from dataloader.actors.failure_text import MAX_SUMMARY, error_text
from dataloader.actors.handler_call import call_handler
from dataloader.actors.job_runs import BeginsTooLate, Run
from dataloader.actors.recorder_messages import Ended
from dataloader.actors.run_outcome import outcome_of
from dataloader.actors.run_services import RunServices
from dataloader.jobs.errors import BodyFailed, DataloaderError
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import NOT_HELD, Outcome, StopReason
from dataloader.jobs.states import Step
from dataloader.jobs.task import Task
from dataloader.jobs.text import storable_text

log = get_logger(__name__)

# structlog's own variables. Its `bind_contextvars` takes five times as long, because it looks up each one by name.
_JOB_ID, _QUEUE, _TASK, _ATTEMPT = (
    token.var
    for token in copy_context()
    .run(structlog.contextvars.bind_contextvars, job_id="", queue="", task="", attempt=0)
    .values()
)
_TOO_LATE: Final = "job released: it would start after its rate-limit reservation expires"


def release_unstarted(run: Run, services: RunServices, why: str) -> None:
    """Release a claimed job whose handler is not called; `why` is the log message."""
    job = run.job
    log.info(why, job_id=str(job.job_id), task=job.task)
    run.end_body()
    services.to_recorder.send_nowait(Ended(run, Outcome(job.job_id, job.token, Step.RETURN)))


ScopeOf = Callable[[Run], AbstractContextManager[Any]]
"""Function that returns the cancel scope of a run's body."""


async def run_claimed(
    run: Run, task: Task, services: RunServices, limiter: trio.CapacityLimiter, scope_of: ScopeOf = Run.open_scope
) -> None:
    """Run the job with `task`, a plain function in a thread of `limiter`; then send its end to the recorder."""
    job = run.job
    _bind(job)
    started = trio.current_time()
    if started > run.begin_by:
        release_unstarted(run, services, _TOO_LATE)
        return
    if task.timeout_s is not None and task.dask is None and run.former is None:  # a cluster needs a free thread first
        run.limit_to(started + task.timeout_s)
    value, error = await _run_body(run, task, services, limiter, scope_of)
    run.end_body()
    run.run_s = trio.current_time() - started
    if run.late is not None:
        await _write_late(run)
    was_caught = run.scope is not None and run.scope.cancelled_caught
    was_stopped = was_caught or (error is not None and run.stop_reason is not None)
    stopped = run.stopped_by() if was_stopped else None
    delay_s = services.retry_delays.get(task.name)
    if delay_s is not None:
        task = attrs.evolve(task, retry=task.retry.always(delay_s))
    outcome = None if run.committed else outcome_of(run, task, value, error, stopped)
    _log_end(error, outcome, stopped)
    if stopped is not None and stopped in NOT_HELD:
        services.telemetry.lease_lost()
    step = run.committed_as.value if run.committed else "void" if outcome is None else outcome.step.value
    services.telemetry.job_ended(job.queue, job.task, step, run.run_s)
    services.to_recorder.send_nowait(Ended(run, outcome))


def _bind(job: ClaimedJob) -> None:
    """Bind the names of the job to the run's log lines. They stay bound, because the context is the run's own."""
    _JOB_ID.set(str(job.job_id))
    _QUEUE.set(job.queue)
    _TASK.set(job.task)
    _ATTEMPT.set(job.attempt)


async def _wait_for_former(run: Run, task: Task) -> None:
    """Wait until the handlers of the job's former runs in this process have ended. Raises `BeginsTooLate`.

    The time does not count towards the task's timeout.
    """
    await run.former_ended()
    now = trio.current_time()
    if now > run.begin_by:
        raise BeginsTooLate(_TOO_LATE)
    if task.timeout_s is not None and task.dask is None:
        run.limit_to(now + task.timeout_s)


async def _write_late(run: Run) -> None:
    try:
        await run.write_late()
    except Exception:
        log.exception("the end of a run could not be written after its lease expired")


def _log_end(error: BaseException | None, outcome: Outcome | None, stopped: StopReason | None) -> None:
    """Log a run that failed or was stopped: as a warning if it failed or its attempt was used up."""
    step = None if outcome is None else outcome.step
    in_vain = step is Step.FAIL or step is Step.RETRY
    if stopped is not None and not in_vain:
        log.info("the job was stopped", why=stopped.value)
    elif stopped is not None:
        log.warning("the job was stopped", why=stopped.value, **_failed_outcome(error, outcome))
    elif isinstance(error, BeginsTooLate):
        log.info(str(error))
    elif error is not None or step is Step.FAIL:
        log.warning("the job failed", **_failed_outcome(error, outcome))


def _failed_outcome(error: BaseException | None, outcome: Outcome | None) -> dict[str, object]:
    """Return the fields of a failure's log line. The traceback is left out if the error is one of ours."""
    # Usually the outcome already has the error's text; formatting it again takes long.
    text = (None if outcome is None else outcome.error) or ("" if error is None else error_text(error))
    said, _, trace = (text, "", "") if error is None else text.partition("\n\n")
    step = None if outcome is None else outcome.step.value
    fields: dict[str, object] = {"error": storable_text(said, MAX_SUMMARY), "next": step}
    is_ours = isinstance(error, DataloaderError) and not isinstance(error, BodyFailed)
    return fields | ({"exception": trace} if trace and not is_ours else {})


async def _run_body(
    run: Run, task: Task, services: RunServices, limiter: trio.CapacityLimiter, scope_of: ScopeOf
) -> tuple[object, BaseException | None]:
    """Call the handler; return its value, or its exception as the job's error.

    Raises only cancellations and ^C from outside the run.
    """
    try:
        with scope_of(run):
            if run.former is not None:
                await _wait_for_former(run, task)
            return await call_handler(task, run, services, limiter), None
    except BaseException as raised:  # noqa: ASYNC103 - an error from outside the run is raised again
        if _comes_from_outside(raised):
            raise
        return None, raised  # noqa: ASYNC104 - as above
    return None, None  # the scope was cancelled


def _comes_from_outside(error: BaseException) -> bool:
    """Return whether `error` has a cancellation of this process's work, or ^C: it must never be swallowed.

    While nothing around the run is cancelled, a `trio.Cancelled` does not count: the handler has kept it and raised it
    again. Trio would end the claims of the queue by it, without an error.
    """
    kinds = KeyboardInterrupt if trio.current_effective_deadline() > -math.inf else (trio.Cancelled, KeyboardInterrupt)
    return isinstance(error, kinds) or (isinstance(error, BaseExceptionGroup) and error.subgroup(kinds) is not None)
