"""Decides the outcome of a run that has ended.

It depends on the reason of a stop, if there was one, and on the value or exception of the handler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from dataloader.actors.failure_text import error_text
from dataloader.actors.job_runs import BeginsTooLate, Run
from dataloader.actors.success import success_of
from dataloader.jobs.errors import BodyFailed, LimitReached
from dataloader.jobs.logger import get_logger
from dataloader.jobs.outcomes import Canceled, GiveUp, Outcome, Retry, Snooze, StopReason
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.stages import MoveRefused
from dataloader.jobs.states import Step
from dataloader.jobs.task import Task
from dataloader.jobs.text import storable_text

log = get_logger(__name__)


def outcome_of(
    run: Run, task: Task, value: object, error: BaseException | None, stopped: StopReason | None
) -> Outcome | None:
    """Return the outcome to write, None for nothing. Never raises, even if the handler's value or exception does."""
    try:
        outcome = _outcome(run, task, value, error, stopped)
        if outcome is None or outcome.result is not None or run.kept is None:
            return outcome
        return replace(outcome, result=run.kept)
    except Exception as fault:
        log.exception("a handler returned an invalid outcome")
        return Outcome(
            run.job.job_id, run.job.token, Step.FAIL, f"the handler returned an invalid outcome: {type(fault).__name__}"
        )


def _outcome(  # noqa: C901, PLR0911 - one branch for each way to end
    run: Run, task: Task, value: object, error: BaseException | None, stopped: StopReason | None
) -> Outcome | None:
    end = partial(Outcome, run.job.job_id, run.job.token)
    if stopped is not None:
        return _outcome_when_stopped(end, run, task, error, stopped)
    if isinstance(error, BeginsTooLate):
        return end(Step.SNOOZE, error=str(error), delay_s=error.for_s) if error.for_s else end(Step.RETURN)
    if isinstance(error, LimitReached):
        return end(Step.SNOOZE, error=storable_text(str(error)), delay_s=error.for_s)
    if isinstance(error, BodyFailed) and error.for_s is not None:
        return end(Step.SNOOZE, error=error.text, delay_s=error.for_s)
    if error is not None:
        text = error_text(error)
        is_final = error.is_final if isinstance(error, BodyFailed) else task.retry.is_final(error)
        if isinstance(error, MoveRefused) or is_final:
            return end(Step.FAIL, error=text)
        return _again(end, run, text, task.retry.delay_s(run.job.attempt))
    match value:
        case Retry():
            return _again(end, run, storable_text(mask_text(value.reason)), value.after_s)
        case Snooze():
            return end(Step.SNOOZE, error=storable_text(mask_text(value.reason)) or None, delay_s=value.for_s)
        case GiveUp():
            return end(Step.FAIL, error=storable_text(mask_text(value.reason)))
        case Canceled():
            return end(Step.CANCEL, error=storable_text(mask_text(value.reason)) or None)
        case _:
            try:
                return success_of(run.job, task, value)
            except MoveRefused as refusal:
                return end(Step.FAIL, error=storable_text(mask_text(str(refusal))))


def _outcome_when_stopped(
    end: Callable[..., Outcome], run: Run, task: Task, error: BaseException | None, stopped: StopReason
) -> Outcome | None:
    text = None if error is None else error_text(error)
    match stopped:
        case StopReason.LEASE_LOST:
            return None
        case StopReason.CANCEL:
            return end(Step.CANCEL, error=text)
        case StopReason.LEASE_ENDED:
            # If another worker has the job by now, this changes nothing; otherwise the job need not wait for the
            # reaper. Like a crash, it uses up an attempt.
            text = "no heartbeat succeeded: the lease was lost" + (f"\n{text}" if text else "")
            return _again(end, run, text, 0.0)
        case StopReason.DRAIN | StopReason.KEY_LOST:
            return end(Step.RETURN, error=text)
        case StopReason.PERIOD_END:
            return end(Step.CLOSE, error=text)
        case StopReason.TIMEOUT:
            text = f"timeout: the run took longer than {task.timeout_s:g} s" + (f"\n{text}" if text else "")
            return _again(end, run, text, task.retry.delay_s(run.job.attempt))


def _again(end: Callable[..., Outcome], run: Run, error: str, delay_s: float) -> Outcome:
    """Return a retry, or a failure if this was the last attempt."""
    if run.job.attempt >= run.job.max_attempts:
        return end(Step.FAIL, error=error)
    return end(Step.RETRY, error=error, delay_s=delay_s)
