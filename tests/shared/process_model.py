"""Durable processes in plain Python, for comparison with the database. Time is an argument, in seconds."""

from __future__ import annotations

from typing import Any

import attrs


@attrs.define(eq=False)
class ModelTask:
    """Request, or a timer; the ID of a timer is learned after the database has generated it."""

    kind: str
    id: int | None = None
    method: str | None = None
    args: Any = None
    expires: float | None = None
    status: str = "waiting"
    response: Any = None
    error: str | None = None
    attempt: int = 0
    first: ModelTask | None = None
    context: Any = None
    at: float = 0

    def end(self, status: str, *, response: Any = None, error: str | None = None) -> None:
        self.status, self.response, self.error = status, response, error


@attrs.define(eq=False)
class ModelJob:
    """Wake-up job: it is queued until `at`, then ready."""

    id: str
    at: float
    token: int = 0
    status: str = "queued"
    stop: bool = False


@attrs.define(eq=False)
class ModelRun:
    """Claimed wake-up job, and the step that its worker runs."""

    process: ModelProcess
    job: ModelJob
    token: int
    task: ModelTask | None = None


@attrs.define(eq=False)
class ModelProcess:
    """Process. `waiting` are open requests, oldest first; one of them may run: the mark."""

    id: str
    crashes_allowed: int
    metadata: Any = attrs.field(factory=dict)
    key: int | None = None
    status: str = "init"
    previous: str | None = None
    detail: str | None = None
    corrupted: ModelTask | None = None
    state: Any = None
    events: list[tuple[ModelTask, Any]] = attrs.field(factory=list)
    tasks: list[ModelTask] = attrs.field(factory=list)
    timer: ModelTask | None = None
    mark: ModelTask | None = None
    token: int | None = None
    crashes: int = 0
    job: ModelJob | None = None
    removed: bool = False

    @property
    def waiting(self) -> list[ModelTask]:
        return [task for task in self.tasks if task.status == "waiting"]

    @property
    def busy(self) -> bool:
        return bool(self.mark or self.timer or self.waiting)

    def becomes(self, status: str) -> None:
        if status != self.status:
            self.previous, self.status = self.status, status
        if status != "error":
            self.detail = self.corrupted = None

    def end_timer(self, status: str, error: str | None = None) -> None:
        if self.timer is not None:
            self.timer.end(status, error=error)
            self.timer = None

    def set_timer(self, kind: str, at: float, **fields: Any) -> None:
        self.timer = ModelTask(kind, at=at, status="timer", **fields)
        self.tasks.append(self.timer)

    def expire(self, now: float) -> list[ModelTask]:
        """Cancel requests that should have begun by now."""
        late = [task for task in self.waiting if task.expires is not None and task.expires <= now]
        expired = [task for task in late if task is not self.mark]
        for task in expired:
            task.end("cancelled", error="expired")
        return expired

    def cancel(self, error: str, *, but: ModelTask | None = None) -> list[ModelTask]:
        cancelled = [task for task in self.waiting if task is not but]
        for task in cancelled:
            task.end("cancelled", error=error)
        return cancelled

    def unmark(self) -> None:
        self.mark, self.token, self.crashes = None, None, 0

    def rest(self, at: float | None) -> None:
        """Let the job wait until `at`, or delete it if there is nothing to wait for."""
        assert self.job is not None
        if at is None:
            self.job.status = "deleted"
            self.job = None
        else:
            self.job.status, self.job.at, self.job.stop = "queued", at, False


@attrs.define
class ModelOutcome:
    """Result of a step."""

    outcome: str
    response: Any = None
    error: str | None = None
    state: Any = None
    metadata: Any = None
    events: tuple[Any, ...] = ()
    following: str = "keep"
    after_s: float | None = None
    context: Any = None
    go_on: bool = False


@attrs.define
class ProcessModel:
    """All processes of one type."""

    processes: list[ModelProcess] = attrs.field(factory=list)
    keys: dict[str, tuple[Any, ModelTask]] = attrs.field(factory=dict)

    def find(self, process_id: str) -> ModelProcess | None:
        return next((one for one in self.processes if one.id == process_id and not one.removed), None)

    def ask(
        self, request: Any, now: float, crashes: int, expires: float | None
    ) -> tuple[str, str | None, ModelTask | None, ModelProcess | None]:
        """Return the verdict, the process's status if it forbids the request, and the request's task."""
        said = (request.process_id, request.kind, request.method, request.args, request.may_start, request.start)
        if request.key in self.keys:
            known, task = self.keys[request.key]
            return ("again" if known == said else "conflict"), None, task, None
        process = self.find(request.process_id)
        if request.kind == "init" and process:
            return "exists", process.status, None, None
        if process is None:
            if request.kind != "init" and not request.may_start:
                return "missing", None, None, None
            process = ModelProcess(request.process_id, crashes)
            self.processes.append(process)
            if request.kind != "init":
                process.tasks.append(ModelTask("init", args=request.start))
        elif (
            process.status
            not in {
                "call": {"running", "init"} if request.may_start else {"running"},
                "repair": {"error"},
            }[request.kind]
        ):
            return "status", process.status, None, None
        elif request.kind == "repair" and process.busy:
            return "busy", None, None, None
        task = ModelTask(request.kind, method=request.method, args=request.args, expires=expires)
        process.tasks.append(task)
        if request.key is not None:
            self.keys[request.key] = (said, task)
        self.wake(process, now)
        return "added", None, task, process

    def wake(self, process: ModelProcess, now: float) -> None:
        """Ensure a ready wake-up job; the database generates its ID."""
        if process.job is None or process.job.status == "ended":
            process.job = ModelJob("", now)
        elif process.job.status == "queued":
            process.job.at = min(process.job.at, now)

    def act(  # noqa: PLR0911 - a verdict each
        self, process_id: str, act: str, now: float
    ) -> tuple[str, list[ModelTask]]:
        process = self.find(process_id)
        if process is None:
            return "missing", []
        if act == "remove":
            told = process.cancel("the process was removed")
            process.removed = True
            if process.job and process.job.status == "queued":
                process.job.status = "deleted"
            process.job = None
            return "done", told
        if act == "stop":
            job = process.job
            if process.mark is None or job is None or (job.status, job.token) != ("running", process.token):
                return "status", []
            job.stop = True
            return "done", []
        if process.status != "error":
            return "status", []
        if process.busy:
            return "busy", []
        if process.corrupted and process.corrupted.kind in {"timeout", "remove"}:
            process.set_timer(process.corrupted.kind, now, context=process.corrupted.context)
            self.wake(process, now)
        else:
            process.becomes("running")
        return "done", []

    def _is_ours(self, run: ModelRun) -> bool:
        process, job = run.process, run.job
        return not process.removed and process.job is job and job.status == "running" and job.token == run.token

    def begin(self, run: ModelRun, now: float) -> tuple[str, list[ModelTask]]:
        process = run.process
        if not self._is_ours(run):
            return "void", []
        told = process.expire(now)
        crashed = process.mark is not None and process.token != run.token
        if crashed and process.crashes >= process.crashes_allowed:
            return "zombie", told + self._bury(process)
        [call, *_] = process.waiting or [None]
        if crashed and process.mark is process.timer:
            call = None
        work = None
        if call and (process.status != "error" or call.kind == "repair"):
            work = call
        elif process.timer and process.timer.at <= now and (process.status != "error" or process.corrupted):
            work = process.timer
        if work is None:
            process.unmark()
            process.rest(process.timer and process.timer.at)
            return "rest", told
        process.crashes = process.crashes + 1 if crashed else 0
        process.mark, process.token, run.task = work, run.token, work
        return "step", told

    def _bury(self, process: ModelProcess) -> list[ModelTask]:
        dead = process.mark
        assert dead is not None
        told = []
        if dead is process.timer:
            process.end_timer("error", "zombie detected")
        else:
            dead.end("error", error="zombie detected")
            told.append(dead)
            process.end_timer("cancelled")
        told += process.cancel("the process failed: zombie detected")
        process.becomes("error")
        process.detail, process.corrupted = "zombie detected", dead
        process.unmark()
        process.rest(None)
        return told

    def commit(  # noqa: C901 - the rules of a step's end, in their order
        self, run: ModelRun, task: ModelTask, end: ModelOutcome, now: float
    ) -> tuple[str, list[ModelTask]]:
        process = run.process
        if not self._is_ours(run) or process.token != run.token or process.mark is not task:
            return "void", []
        stop = run.job.stop
        if end.outcome == "returned":
            told = process.expire(now)
            process.unmark()
            process.rest(now)
            return "rest", told
        kind, of_timer, before = task.kind, task is process.timer, process.status
        done = end.outcome == "done"
        goes = (done and (end.following == "gone" or kind == "remove")) or (kind == "init" and end.outcome == "refused")
        status = {"done": "finished", "refused": "finished", "retry": "error", "failed": "error"}[end.outcome]
        if goes:
            told = process.cancel("the process was removed", but=task)
        elif end.outcome == "failed":
            told = process.cancel(f"the process failed: {end.error}", but=task)
        else:
            told = process.expire(now)
        if not of_timer:
            task.end(status, response=end.response, error=end.error)
        if end.outcome == "done":
            process.events += [(task, event) for event in end.events]
            process.state = process.state if end.state is None else end.state
            process.metadata = process.metadata if end.metadata is None else end.metadata
        failed = process.corrupted
        if end.outcome == "done":
            process.becomes("running")
        elif end.outcome == "failed" and kind != "repair":
            process.becomes("error")
            process.detail, process.corrupted = end.error, task if of_timer else None
        self._time(process, task, end, failed if before == "error" else None, status, now, goes=goes)
        process.unmark()
        if goes:
            process.removed = True
            process.rest(None)
            return "gone", told
        [call, *_] = process.waiting if process.status == "running" and process.waiting else [None]
        timer = process.timer
        due = timer is not None and timer.at <= now
        if end.go_on and not stop and (call or due):
            work = call or timer
            process.mark, process.token, run.task = work, run.token, work
            return "next", told
        process.rest(now if call else timer and timer.at)
        return "rest", told

    def _time(
        self,
        process: ModelProcess,
        task: ModelTask,
        end: ModelOutcome,
        failed: ModelTask | None,
        status: str,
        now: float,
        *,
        goes: bool,
    ) -> None:
        """Apply the effect on the timer."""
        of_timer, timer = task is process.timer, process.timer
        ended = (status, end.error) if of_timer else ("cancelled", None)
        at = now + (end.after_s or 0)
        if goes or end.outcome == "failed":
            process.end_timer(*ended)
        elif end.outcome == "retry":
            assert timer is not None
            process.end_timer(*ended)
            first = timer.first or timer
            process.set_timer(timer.kind, at, attempt=timer.attempt + 1, first=first, context=timer.context)
        elif end.outcome == "done" and end.following in {"timeout", "remove"}:
            process.end_timer(*ended)
            process.set_timer(end.following, at, context=end.context)
        elif end.outcome == "done" and (end.following == "suspend" or of_timer):
            process.end_timer(*ended)
        elif end.outcome == "done" and task.kind == "repair" and failed and failed.kind in {"timeout", "remove"}:
            process.set_timer(failed.kind, now, context=failed.context)

    def check_work(self, now: float) -> None:
        """Check that a wake-up job exists exactly where work is, and is ready when the work can run."""
        for process in self.processes:
            if process.removed:
                assert process.job is None
                continue
            job = process.job
            assert (job is not None) == process.busy, (process, job)
            if job is not None and job.status == "queued":
                work = [now] if process.waiting else []
                work += [process.timer.at] if process.timer else []
                assert job.at <= max(now, min(work, default=now)), (process, job)
