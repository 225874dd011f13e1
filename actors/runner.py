"""Runs one job: opens its scope, calls the handler, and turns whatever happened into one outcome for the recorder.

The scope's deadline is the lease (Q8). Everything that stops the job cancels that one scope with its reason noted
first, so the reason, and not a guess from an exception, decides what is written: canceled, retried, given back, or
nothing. The runner never touches the database itself; a body that returned before it noticed a stop has succeeded.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, TypeVar, cast

import attrs
import structlog
import trio

from dataloader.actors.job_runs import Run
from dataloader.actors.to_record import Ended, Shown, ToRecord
from dataloader.jobs.errors import BadRequest, DataloaderError, StoreUnavailable
from dataloader.jobs.job import Job, ThreadJob, Transaction
from dataloader.jobs.listings import LEVELS, Level
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import Canceled, GiveUp, Outcome, Retry, Snooze, StopReason
from dataloader.jobs.secrets.masking import mask, mask_text
from dataloader.jobs.states import Step
from dataloader.jobs.tasks import Task
from dataloader.jobs.telemetry import Telemetry
from dataloader.jobs.text import MAX_MASKED, cut_texts, read_json, storable_json, storable_text
from dataloader.store.queue.enqueue import MAX_ARGS_BYTES
from dataloader.store.queue.transaction import Transactions

log = get_logger(__name__)
job_log = get_logger("dataloader.job")

T = TypeVar("T")

MAX_LINE: Final = 8_192
"""Bytes kept of one log line."""
_MAX_SUMMARY: Final = 2_100
_CALLER: Final = re.compile(rf"{re.escape(__name__)}\Z|(?:trio|outcome)(?:\.|\Z)")
"""The modules that stand between the runner and a handler, in its task or in a thread."""
LogLevel = Literal["info", "warning", "error", "off"]


@attrs.frozen(kw_only=True)
class RunServices:
    """What every run of this process shares. `resources` are for libraries on top of the queue, by their kind.

    The jobs' own lines go to the process's log too if they are as serious as `logged_from`.
    """

    to_recorder: trio.MemorySendChannel[ToRecord]
    transactions: Transactions
    telemetry: Telemetry
    max_lines: int
    logged_from: LogLevel = "off"
    resources: Mapping[type, Any] = attrs.field(factory=dict)


async def run(run: Run, task: Task, services: RunServices, limiter: trio.CapacityLimiter) -> None:
    """Run the job with `task`, a plain function in a thread of `limiter`; ends with a message to the recorder."""
    job = run.job
    # The task has a context of its own, which its children inherit and nobody else sees: nothing to undo.
    structlog.contextvars.bind_contextvars(job_id=str(job.job_id), queue=job.queue, task=job.task, attempt=job.attempt)
    port = _Port(run, services)
    started = trio.current_time()
    if task.timeout_s is not None:
        run.timeout_at = started + task.timeout_s
        if run.timeout_at < run.scope.deadline:
            run.scope.deadline, run.deadline_reason = run.timeout_at, StopReason.TIMEOUT
    value, error = await _run_body(run, task, port, limiter)
    run.body_ended = True
    stopped = (
        run.stopped_by() if run.scope.cancelled_caught or (error is not None and run.stop_reason is not None) else None
    )
    outcome = None if run.committed else _safe_outcome(run, task, value, error, stopped)
    _log_end(error, outcome, stopped)
    if stopped in {StopReason.LEASE_LOST, StopReason.LEASE_ENDED, StopReason.KEY_LOST}:
        services.telemetry.lease_lost()
    step = "succeed" if run.committed else "void" if outcome is None else outcome.step.value
    services.telemetry.job_ended(job.queue, job.task, step, trio.current_time() - started)
    services.to_recorder.send_nowait(Ended(run, outcome))


def _log_end(error: BaseException | None, outcome: Outcome | None, stopped: StopReason | None) -> None:
    """One line about a run that failed or was stopped: a warning if it failed, or its attempt was in vain."""
    step = None if outcome is None else outcome.step
    in_vain = step is Step.FAIL or step is Step.RETRY
    if stopped is not None and not in_vain:
        log.info("the job was stopped", why=stopped.value)
    elif stopped is not None:
        log.warning("the job was stopped", why=stopped.value, **_failure(error, outcome))
    elif error is not None or step is Step.FAIL:
        log.warning("the job failed", **_failure(error, outcome))


def _failure(error: BaseException | None, outcome: Outcome | None) -> dict[str, object]:
    """What is said of a failure: with the traceback, unless the error is one of ours, which says all by itself."""
    # The outcome mostly has the error's text already; its making takes long.
    text = (None if outcome is None else outcome.error) or ("" if error is None else error_text(error))
    said, _, trace = (text, "", "") if error is None else text.partition("\n\n")
    step = None if outcome is None else outcome.step.value
    fields: dict[str, object] = {"error": storable_text(said, _MAX_SUMMARY), "next": step}
    return fields | ({"exception": trace} if trace and not isinstance(error, DataloaderError) else {})


async def _run_body(
    run: Run, task: Task, port: _Port, limiter: trio.CapacityLimiter
) -> tuple[object, BaseException | None]:
    """What the handler returned or raised; whatever it raises is the job's error, not ours."""
    try:
        with run.scope:
            return await _call(task, run, port, limiter), None
    except (trio.Cancelled, KeyboardInterrupt):
        raise  # somebody else's cancellation, or ^C, is never swallowed, also when it comes in company
    except BaseException as raised:
        if isinstance(raised, BaseExceptionGroup) and raised.subgroup((trio.Cancelled, KeyboardInterrupt)) is not None:
            raise
        return None, raised
    return None, None  # the scope was cancelled


async def _call(task: Task, run: Run, port: _Port, limiter: trio.CapacityLimiter) -> object:
    claimed = run.job
    if claimed.args is None:
        return GiveUp(f"args: must have at most {MAX_ARGS_BYTES:,} bytes as PostgreSQL writes them; these have more")
    try:
        args = read_json(claimed.args) if task.args is None else task.args.decode(claimed.args)
    except BadRequest as misfit:
        return GiveUp(str(misfit))  # they would not fit the next time either
    make: Callable[..., Job | ThreadJob] = Job if task.is_async else ThreadJob
    job = make(
        job_id=claimed.job_id,
        queue=claimed.queue,
        task=claimed.task,
        args=args,
        lock_key=claimed.lock_key,
        partition_key=claimed.partition_key,
        attempt=claimed.attempt,
        max_attempts=claimed.max_attempts,
        port=port,
    )
    if task.is_async:
        return await task.handler(job)
    return await trio.to_thread.run_sync(partial(task.handler, job), limiter=limiter, thread_name=f"task {task.name}")


def _safe_outcome(
    run: Run, task: Task, value: object, error: BaseException | None, stopped: StopReason | None
) -> Outcome | None:
    """The outcome, whatever the handler's values and exceptions do when they are looked at."""
    try:
        outcome = _outcome(run, task, value, error, stopped)
        return outcome if outcome is None or outcome.result is not None else attrs.evolve(outcome, result=run.kept)
    except Exception as fault:
        log.exception("a handler's outcome could not be understood")
        return Outcome(
            run.job.job_id, run.job.token, Step.FAIL, f"the outcome could not be understood: {type(fault).__name__}"
        )


def _outcome(  # noqa: PLR0911 - one for each way to end
    run: Run, task: Task, value: object, error: BaseException | None, stopped: StopReason | None
) -> Outcome | None:
    end = partial(Outcome, run.job.job_id, run.job.token)
    if stopped is not None:
        return _outcome_when_stopped(end, run, task, error, stopped)
    if error is not None:
        text = error_text(error)
        if task.retry.is_final(error):
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
            return end(Step.SUCCEED, result=None if value is None else storable_json(value))


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
            # Void if somebody else has it by now; else it need not wait for the reaper. As a crash, it uses up an
            # attempt.
            text = "no heartbeat got through: the lease could not be held" + (f"\n{text}" if text else "")
            return _again(end, run, text, 0.0)
        case StopReason.DRAIN | StopReason.KEY_LOST:
            return end(Step.RETURN, error=text)
        case StopReason.TIMEOUT:
            text = f"timeout: the run took longer than {task.timeout_s:g} s" + (f"\n{text}" if text else "")
            return _again(end, run, text, task.retry.delay_s(run.job.attempt))


def _again(end: Callable[..., Outcome], run: Run, error: str, delay_s: float) -> Outcome:
    """A retry, or the end when this was the last attempt."""
    if run.job.attempt >= run.job.max_attempts:
        return end(Step.FAIL, error=error)
    return end(Step.RETRY, error=error, delay_s=delay_s)


def error_text(error: BaseException) -> str:
    """An exception as the job's error: its last line first, then the traceback; masked and bounded."""
    summary = _summary(error)
    try:
        frames = _users_frames(error.__traceback__)
        trace = "".join(traceback.format_exception(type(error), error, frames, limit=-30))
    except Exception:  # noqa: BLE001 - an exception whose own formatting raises still ends its job
        trace = ""
    # Cut twice: masking takes time, and a cut right before the end could part a secret from its name.
    return storable_text(f"{summary}\n\n{mask_text(storable_text(trace, MAX_MASKED))}".rstrip())


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    """A traceback without what calls a handler: our own frames, and those of Trio's threads; all, if that is all."""
    users = frames
    while users is not None and _CALLER.match(users.tb_frame.f_globals.get("__name__", "")):
        users = users.tb_next
    return users or frames


def _summary(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - see above
        text = "(its text could not be made)"
    # Masked before it is cut: of a secret that a cut goes through, the beginning would stay.
    return storable_text(
        mask_text(f"{type(error).__name__}: {mask_text(text[:20_000])[:2_000]}".rstrip(": ")), _MAX_SUMMARY
    )


def _log_line(level: Level, line: str) -> None:
    """Send a line of a job to the process's log as it is kept: masked, bounded and readable by all."""
    kept = read_json(line)
    fields = {name: value for name, value in kept.items() if name not in {"level", "message"}}
    getattr(job_log, level)(kept.get("message", "a line too long to be kept"), **fields)


class _Port:
    """The job handle's way out: progress and lines are kept on the run, and the recorder is told once."""

    def __init__(self, run: Run, services: RunServices) -> None:
        self._run = run
        self._services = services
        self._in_transaction = False

    def progress(self, progress: Mapping[str, Any]) -> None:
        """Keep the newest progress; the recorder writes it within a second."""
        self._run.progress = storable_json(progress)
        self._tell()

    def log(self, level: Level, message: str, fields: Mapping[str, Any], load: str | None = None) -> None:
        """Keep a line, up to the setting's number a run, or a load of it; then one line that says so."""
        run = self._run
        count = run.line_counts[load] = run.line_counts.get(load, 0) + 1
        if count > self._services.max_lines + 1:
            return
        if count > self._services.max_lines:
            level, message, fields = "warning", f"more than {self._services.max_lines} lines; the rest is not kept", {}
        if load is not None:
            fields = {"load": load, **fields}
        payload = {
            "level": level,
            "message": mask_text(storable_text(str(message), MAX_MASKED)),
            **({"fields": mask(cut_texts(fields))} if fields else {}),
        }
        line = storable_json(payload, MAX_LINE)
        run.lines.append((datetime.now(UTC), line))
        self._tell()
        if self._services.logged_from in LEVELS[: LEVELS.index(level) + 1]:
            _log_line(level, line)

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Transaction]:
        """See `dataloader.jobs.job.Job.transaction`."""
        run = self._run
        # It could not commit together with the success, and its end would take the success back.
        if self._in_transaction:
            raise RuntimeError("the job has a transaction open: a handler has one job.transaction() at a time")
        if run.committed:
            raise RuntimeError("the job has succeeded with its transaction: write all its rows in that one block")

        def success(result: object) -> Outcome:
            # The recorder writes nothing about this run any more, so what was shown last goes along.
            encoded = None if result is None else storable_json(result)
            return Outcome(run.job.job_id, run.job.token, Step.SUCCEED, result=encoded, progress=run.progress)

        failure: StoreUnavailable | None = None
        self._in_transaction = True
        try:
            async with self._services.transactions.open(success, run.shield_commit) as transaction:
                yield transaction
        except StoreUnavailable as error:
            failure = error
        except BaseException:
            run.commit_ended(well=False)
            raise
        finally:
            self._in_transaction = False
        run.commit_ended(well=failure is None)
        if failure is not None:
            # A body whose lease has ended meanwhile was stopped by that, and hears of nothing else.
            await trio.lowlevel.checkpoint()
            raise failure

    def deadline(self) -> float:
        """The scope's deadline as it stands."""
        return self._run.scope.deadline

    def stopped_by(self) -> StopReason | None:
        """Who stopped the run: a reason is noted before its scope is cancelled, or its deadline has passed."""
        return self._run.stopped_by() if self._run.scope.cancel_called else None

    def keep(self, result: object) -> None:
        """Keep a result for whatever outcome comes."""
        self._run.kept = None if result is None else storable_json(result)

    def resource(self, kind: type[T]) -> T:
        """The job itself as it was claimed, or what the process has for all."""
        if kind is ClaimedJob:
            return cast("T", self._run.job)
        try:
            return cast("T", self._services.resources[kind])
        except KeyError:
            raise LookupError(f"this process has no {kind.__name__} for jobs: it needs a database") from None

    def _tell(self) -> None:
        if not self._run.to_be_shown and not self._run.body_ended:
            self._run.to_be_shown = True
            self._services.to_recorder.send_nowait(Shown(self._run))
