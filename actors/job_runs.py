"""Runs of this process: which jobs are ours, until when, and why each was stopped.

The deadline of a run's cancel scope comes from its `Lease`. It is the earliest of its task's timeout, the end of its
work period, its lease, and the time until which its key is safe, less a margin for cleanup. A run is registered here
from its claim until its end is recorded, and gets heartbeats all that time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from typing import Final
from uuid import UUID

import attrs
import trio

from dataloader.actors.lease import Lease
from dataloader.actors.outbox import Outbox
from dataloader.actors.wake import Wake
from dataloader.jobs.logger import get_logger
from dataloader.jobs.model import DEFAULT_LEASE_S, ClaimedJob
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.states import Step
from dataloader.store.queue.lease_clock import slept_s

log = get_logger(__name__)

REMEMBERED_CANCELS: Final = 1_000


class BeginsTooLate(Exception):  # noqa: N818 - a state of the world
    """Error: a body would begin after its rate-limit reservation ends, or has nowhere to run. Its job is released.

    The job continues after `for_s` seconds, and the attempt is not counted.
    """

    def __init__(self, text: str, *, for_s: float = 0.0) -> None:
        super().__init__(text)
        self.for_s = for_s


@attrs.define(eq=False, kw_only=True)
class Run:
    """One run of one job; `stop_reason` is set before the scope is cancelled. Times are Trio's, except the lease's.

    After `begin_by` its body may not begin: its supplier's rate-limit reservation ends then.

    `when_ended` is called when the handler has ended, `when_recorded` when the run's end is recorded.

    `movers` are called when the run's lease or key is safe for longer; they belong to child processes that work for it.

    `former` is an earlier run of the same job that was registered when this one was added. Only the token tells them
    apart. `Runs.add` stops the former run, and this one's handler starts after its end.

    `scope` is None until the handler waits or begins in its own scope. The runner sets `body_ended`, and `run_s`, the
    duration in seconds. The run's port sets `kept`, the result to keep, and `committed_as`, the step that its
    transaction has written. Methods change everything else.
    """

    job: ClaimedJob
    lease: Lease
    claimed_at: float
    begin_by: float = math.inf
    scope: trio.CancelScope | None = attrs.field(default=None, init=False)
    _stop_reason: StopReason | None = attrs.field(default=None, init=False)
    _deadline_reason: StopReason = attrs.field(init=False)
    stopped_at: float = attrs.field(default=math.inf, init=False)
    committed: bool = attrs.field(default=False, init=False)
    committed_as: Step = attrs.field(default=Step.SUCCEED, init=False)
    _commit: trio.CancelScope | None = attrs.field(default=None, init=False)
    body_ended: bool = attrs.field(default=False, init=False)
    run_s: float = attrs.field(default=0.0, init=False)
    kept: str | None = attrs.field(default=None, init=False)
    late: Callable[[], Awaitable[object]] | None = attrs.field(default=None, init=False)
    """Function that writes the run's end, which a library could not write before the lease ended."""
    _late_scope: trio.CancelScope | None = attrs.field(default=None, init=False)
    _is_left: bool = attrs.field(default=False, init=False)
    outbox: Outbox = attrs.field(factory=Outbox)
    movers: set[Callable[[], None]] = attrs.field(factory=set, init=False)
    when_ended: Callable[[], None] = attrs.field(default=lambda: None, repr=False)
    when_recorded: Callable[[], None] = attrs.field(default=lambda: None, repr=False)
    former: Run | None = attrs.field(default=None, init=False, repr=False)
    _ended: trio.Event | None = attrs.field(default=None, init=False)

    @property
    def deadline(self) -> float:
        """Time by Trio's clock at which the body must stop, as known now."""
        if self.scope is not None:
            return self.scope.deadline
        deadline, _ = self._body_ends()
        return deadline

    @property
    def is_stopped(self) -> bool:
        """Return whether the body was stopped, or its deadline has passed."""
        if self.scope is not None:
            return self.scope.cancel_called
        return self._stop_reason is not None or trio.current_time() >= self.deadline

    @property
    def may_share(self) -> bool:
        """Return whether the body may begin in a scope with others: only its lease and key bound it."""
        return (
            self._stop_reason is None
            and self.former is None
            and self.lease.timeout_at == math.inf
            and self.lease.period_ends_at == math.inf
        )

    @property
    def stop_reason(self) -> StopReason | None:
        """Reason of the stop. None without a stop, and after a passed deadline until `stopped_by` is called."""
        return self._stop_reason

    def limit_to(self, timeout_at: float) -> None:
        """Set the end of the task's timeout, at which the run is stopped even if lease and key are safe for longer."""
        self.lease.timeout_at = timeout_at
        if timeout_at < self.deadline:
            self._move_deadline()

    def period_ends_at(self, at: float) -> None:
        """Set when the work period closes, as known now. A run that was stopped keeps its reason."""
        if at != self.lease.period_ends_at and not self.is_stopped:
            self.lease.period_ends_at = at
            self._move_deadline()

    def stop(self, reason: StopReason) -> None:
        """Cancel the body. The first reason counts, but a lost lease overrides it: nothing may be written then."""
        if self.body_ended:
            return
        is_first = not self.is_stopped
        self._note(reason)
        if is_first:
            self.stopped_at = trio.current_time()
            if self.scope is not None:
                self.scope.cancel(reason=f"{self._stop_reason}")
        if self._commit is not None and reason in {StopReason.KEY_LOST, StopReason.LEASE_LOST}:
            self._commit.cancel(reason=f"{reason}")

    def end_body(self) -> None:
        """Note that the handler has ended, or was never called."""
        self.body_ended = True
        self.when_ended()
        if self._ended is not None:
            self._ended.set()

    async def wait_body_ended(self) -> None:
        """Return when the handler has ended; immediately if it has."""
        while not self.body_ended:
            if self._ended is None:
                self._ended = trio.Event()
            await self._ended.wait()

    async def former_ended(self) -> None:
        """Return when the handlers of all former runs of this job have ended."""
        while self.former is not None:
            await self.former.wait_body_ended()
            self.former = self.former.former

    def returned_with_tasks_left(self) -> None:
        """Note that the handler has returned but left tasks running. Like a stopped handler, they must end."""
        self.stopped_at = min(self.stopped_at, trio.current_time())

    def shield_commit(self) -> trio.CancelScope:
        """Return the scope in which the run's transaction commits, shielded until the body must have ended.

        If that time passes, it may be unknown whether the transaction has committed; the row's token decides. From this
        call on no heartbeat renews the run's lease, because one that found the row ended would consider the job lost.
        """
        self.committed = True
        self._commit = trio.CancelScope(shield=True, deadline=self.lease.commit_ends(slept_s()))
        return self._commit

    def commit_ended(self, *, well: bool) -> None:
        """End the commit. After success (`well`) the run needs only its key, after a failure its lease again."""
        self._commit, self.committed = None, well
        self._move_deadline()

    async def write_late(self) -> None:
        """Call `late`, until `leave` is called. The run stays registered meanwhile, so that its job is not released."""
        if self.late is not None and not self._is_left:
            with trio.CancelScope() as self._late_scope:
                await self.late()

    def leave(self) -> None:
        """Write nothing more: a drain has reached its bound, and the job is left to its lease."""
        self._is_left = True
        if self._late_scope is not None:
            self._late_scope.cancel(reason="drain")

    def stopped_by(self) -> StopReason:
        """Return why a cancelled body was stopped: the reason that was noted, or that of the passed deadline.

        The latter is the reason with which the deadline was set last; a commit changes it only when it is over.
        """
        if self.scope is None:
            _, self._deadline_reason = self._body_ends()
        return self._stop_reason or self._note(self._deadline_reason)

    def _note(self, reason: StopReason) -> StopReason:
        """Set the reason, here alone: the first one counts, but a lost lease overrides it."""
        if self._stop_reason is None or reason is StopReason.LEASE_LOST:
            self._stop_reason = reason
        return self._stop_reason

    def open_scope(self) -> trio.CancelScope:
        """Return a dedicated scope to enter. It already has its deadline: moving one takes ten times as long."""
        deadline, self._deadline_reason = self._body_ends()
        self.scope = trio.CancelScope(deadline=deadline)
        if self._stop_reason is not None:
            self.scope.cancel(reason=f"{self._stop_reason}")
        return self.scope

    def waits_in(self, scope: trio.CancelScope) -> None:
        """Use `scope` as the run's own scope. The body waits in it."""
        self.scope = scope
        self._move_deadline()
        if self._stop_reason is not None:
            scope.cancel(reason=f"{self._stop_reason}")

    def renewed(self, sent_at: float) -> None:
        """Note that a heartbeat sent at `sent_at`, by the lease clock, has renewed the lease."""
        self.lease.renewed(sent_at)
        self._move_deadline()

    def key_is_safe_until(self, until: float) -> None:
        """Note until when no other session can get the key, as the keeper of the lock session has learned."""
        self.lease.key_safe_until = until
        self._move_deadline()

    def _body_ends(self) -> tuple[float, StopReason]:
        return self.lease.body_ends(committed=self.committed, slept_s=slept_s())

    def _move_deadline(self) -> None:
        if self.scope is None:
            return
        deadline, self._deadline_reason = self._body_ends()
        if deadline != self.scope.deadline:
            self.scope.deadline = deadline
        if self._commit is not None:
            self._commit.deadline = self.lease.commit_ends(slept_s())
        for mover in self.movers:
            mover()


class Runs:
    """All runs of this process.

    `period_end` returns when the work period of a task closes. It is None while no task has its runs stopped then.
    """

    def __init__(self, default_lease_s: float = DEFAULT_LEASE_S) -> None:
        """Create an empty set. `default_lease_s` is the shortest lease in seconds to plan for while there is no run."""
        self._by_token: dict[int, Run] = {}
        self._newest: dict[UUID, Run] = {}
        self._early_cancels: OrderedDict[int, None] = OrderedDict()
        self._asked: set[int] = set()
        self.asked = Wake()
        self._added: trio.Event | None = None
        self._removed: trio.Event | None = None
        self.key_safe_until = math.inf
        self.closed = False
        self.attend: Callable[[], None] = lambda: None
        self.period_end: Callable[[str], float] | None = None
        self._default_lease_s = self._planned_for_s = default_lease_s

    def __len__(self) -> int:
        """Return the number of runs, including ended ones that are not recorded yet."""
        return len(self._by_token)

    def __iter__(self) -> Iterator[Run]:
        """Iterate over a snapshot."""
        return iter(list(self._by_token.values()))

    def add(self, run: Run) -> None:
        """Add the run of a claimed job; after `closed` was set, stop it immediately.

        If the job still runs here, because another service or a restore has queued it again, its former run is stopped.
        """
        self._by_token[run.job.token] = run
        former = self._newest.get(run.job.job_id)
        self._newest[run.job.job_id] = run
        if former is not None:
            self._replace(former, run)
        if run.job.lease_s < self._planned_for_s:
            self._planned_for_s = run.job.lease_s
            self.attend()
        if self._added is not None:
            self._added.set()
            self._added = None
        if run.job.lock_hash is not None:
            run.lease.key_safe_until = self.key_safe_until
        if self.period_end is not None:
            run.lease.period_ends_at = self.period_end(run.job.task)
        if self.closed:
            run.stop(StopReason.DRAIN)
        elif self._early_cancels and self._early_cancels.pop(run.job.token, 0) is None:
            self.cancel(run.job.token)

    def remove(self, run: Run) -> None:
        """Remove a run whose end is recorded."""
        self._by_token.pop(run.job.token, None)
        if self._newest.get(run.job.job_id) is run:
            # A run that was stopped early may leave a former one whose handler has not ended.
            former = run.former
            while former is not None and former.job.token not in self._by_token:
                former = former.former
            if former is None:
                del self._newest[run.job.job_id]
            else:
                self._newest[run.job.job_id] = former
        if self._removed is not None:
            self._removed.set()
            self._removed = None

    def _replace(self, former: Run, run: Run) -> None:
        run.former = former
        if not former.body_ended:
            # A committed run may have queued its job again, as a step of a durable process does.
            say = log.debug if former.committed else log.warning
            say(
                "claimed a job that still runs here; stopping its former run first",
                job_id=str(run.job.job_id),
                attempt=run.job.attempt,
            )
            former.stop(StopReason.LEASE_LOST)

    async def wait_any(self) -> None:
        """Return when there is a run; immediately if there is one."""
        while not self._by_token:
            if self._added is None:
                self._added = trio.Event()
            await self._added.wait()

    async def wait_removed(self) -> None:
        """Return when a run was removed."""
        if self._removed is None:
            self._removed = trio.Event()
        await self._removed.wait()

    def by_token(self, token: int) -> Run | None:
        """Return the run that has this token; None without one."""
        return self._by_token.get(token)

    def cancel(self, token: int) -> None:
        """Note a notification of a cancel of this run. It may arrive before the reply of the run's claim.

        Any role can send notifications, so this stops nothing: it wakes the heartbeat (`asked`), which reads the row.
        """
        if token in self._by_token:
            self._asked.add(token)
            self.asked.set()
            return
        self._early_cancels[token] = None
        if len(self._early_cancels) > REMEMBERED_CANCELS:
            self._early_cancels.popitem(last=False)

    def take_asked(self) -> list[Run]:
        """Return the runs for which a cancel notification has arrived since the last call."""
        tokens, self._asked = self._asked, set()
        return [self._by_token[token] for token in tokens if token in self._by_token]

    def shortest_lease_s(self) -> float:
        """Return the shortest lease of the runs in seconds, or the default if that is shorter.

        When a run with a shorter one is added, `attend` is called, so that callers plan again before it could end.
        """
        shortest = min((run.job.lease_s for run in self._by_token.values()), default=math.inf)
        self._planned_for_s = min(shortest, self._default_lease_s)
        return self._planned_for_s

    def key_is_safe_until(self, until: float) -> None:
        """Note the lock session's answer: no other session can get our keys before `until` and a margin for cleanup."""
        self.key_safe_until = until
        for run in self._by_token.values():
            if run.job.lock_hash is not None:
                run.key_is_safe_until(until)
