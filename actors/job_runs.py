"""The runs of this process: which jobs are ours now, until when, and who stopped them.

A run's cancel scope ends when its `Lease` says so: at the earliest of its task's timeout, its lease and its key's
safety, less a margin in which the body can clean up. A run is here from its claim until its end is recorded, so that it
gets heartbeats all that time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

import attrs
import trio

from dataloader.actors.lease import Lease
from dataloader.actors.outbox import Outbox
from dataloader.actors.wake import Wake
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import StopReason

REMEMBERED_CANCELS: Final = 1_000


@attrs.define(eq=False, kw_only=True)
class Run:
    """One run of one job. Times are Trio's clock; `stop_reason` is set before the scope is cancelled.

    `Runs.add` opens the scope. The runner sets `body_ended`, the run's port the result that it has `kept`; all else is
    changed by methods.
    """

    job: ClaimedJob
    lease: Lease
    claimed_at: float
    scope: trio.CancelScope = attrs.field(init=False)
    _stop_reason: StopReason | None = attrs.field(default=None, init=False)
    _deadline_reason: StopReason = attrs.field(init=False)
    stopped_at: float = attrs.field(default=math.inf, init=False)
    committed: bool = attrs.field(default=False, init=False)
    _commit: trio.CancelScope | None = attrs.field(default=None, init=False)
    body_ended: bool = attrs.field(default=False, init=False)
    kept: str | None = attrs.field(default=None, init=False)
    outbox: Outbox = attrs.field(factory=Outbox)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it was stopped; None while nobody has, and until somebody asks `stopped_by` after a deadline."""
        return self._stop_reason

    def limit_to(self, timeout_at: float) -> None:
        """Its task's own bound: it is stopped then, whatever becomes of lease and key."""
        self.lease.timeout_at = timeout_at
        if timeout_at < self.scope.deadline:
            self._move_deadline()

    def stop(self, reason: StopReason) -> None:
        """Cancel the body; the first reason counts, but for a lost lease, after which nothing may be written."""
        if self.body_ended:
            return
        self._note(reason)
        if not self.scope.cancel_called:
            self.stopped_at = trio.current_time()
            self.scope.cancel(reason=f"{self._stop_reason}")
        if self._commit is not None and reason in {StopReason.KEY_LOST, StopReason.LEASE_LOST}:
            self._commit.cancel(reason=f"{reason}")

    def returned_with_tasks_left(self) -> None:
        """The handler has returned, and something of it goes on: from now on it has to end, as after a stop."""
        self.stopped_at = min(self.stopped_at, trio.current_time())

    def shield_commit(self) -> trio.CancelScope:
        """The scope in which the run's transaction commits: shielded until the body has to have ended, and no longer.

        Whether the transaction has committed may be unknown then; the row's token decides. From this call on
        no heartbeat renews the run's lease: one that found the row ended would take the job for lost.
        """
        self.committed = True
        self._commit = trio.CancelScope(shield=True, deadline=self.lease.commit_ends())
        return self._commit

    def commit_ended(self, *, well: bool) -> None:
        """The commit is over. A run that has committed (`well`) needs its key alone; another needs its lease again."""
        self._commit, self.committed = None, well
        self._move_deadline()

    def stopped_by(self) -> StopReason:
        """Who stopped a body that was cancelled: the reason noted, or else the deadline that has passed.

        That is the one that was set last: a commit that waits has none of its own, and moves it only when it is over.
        """
        return self._stop_reason or self._note(self._deadline_reason)

    def _note(self, reason: StopReason) -> StopReason:
        """The one who sets the reason: the first one counts, but for a lost lease."""
        if self._stop_reason is None or reason is StopReason.LEASE_LOST:
            self._stop_reason = reason
        return self._stop_reason

    def open_scope(self) -> None:
        """A new scope that has its deadline; to move one is some ten times as dear."""
        deadline, self._deadline_reason = self.lease.body_ends(committed=self.committed)
        self.scope = trio.CancelScope(deadline=deadline)

    def renewed(self, sent_at: float) -> None:
        """A heartbeat that was sent at `sent_at` has renewed the lease."""
        self.lease.renewed(sent_at)
        self._move_deadline()

    def key_is_safe_until(self, until: float) -> None:
        """The keeper of the lock session has learned until when nobody is given the key."""
        self.lease.key_safe_until = until
        self._move_deadline()

    def _move_deadline(self) -> None:
        self.scope.deadline, self._deadline_reason = self.lease.body_ends(committed=self.committed)
        if self._commit is not None:
            self._commit.deadline = self.lease.commit_ends()


class Runs:
    """All runs of this process."""

    def __init__(self, default_lease_s: float = 60.0) -> None:
        """None yet; `default_lease_s` is planned for while none runs."""
        self._by_token: dict[int, Run] = {}
        self._early_cancels: OrderedDict[int, None] = OrderedDict()
        self._asked: set[int] = set()
        self.asked = Wake()
        self._added: trio.Event | None = None
        self._removed: trio.Event | None = None
        self.key_safe_until = math.inf
        self.closed = False
        self.attend: Callable[[], None] = lambda: None
        self._default_lease_s = self._planned_for_s = default_lease_s

    def __len__(self) -> int:
        """How many there are, ended but unrecorded ones included."""
        return len(self._by_token)

    def __iter__(self) -> Iterator[Run]:
        """A snapshot of them."""
        return iter(list(self._by_token.values()))

    def add(self, run: Run) -> None:
        """Take in a claimed job; when no more are wanted (`closed`) it is stopped at once."""
        self._by_token[run.job.token] = run
        if run.job.lease_s < self._planned_for_s:
            self._planned_for_s = run.job.lease_s
            self.attend()
        if self._added is not None:
            self._added.set()
            self._added = None
        if run.job.lock_hash is not None:
            run.lease.key_safe_until = self.key_safe_until
        run.open_scope()
        if self.closed:
            run.stop(StopReason.DRAIN)
        elif self._early_cancels and self._early_cancels.pop(run.job.token, 0) is None:
            self.cancel(run.job.token)

    def remove(self, run: Run) -> None:
        """Let go of a run whose end is recorded."""
        self._by_token.pop(run.job.token, None)
        if self._removed is not None:
            self._removed.set()
            self._removed = None

    async def wait_any(self) -> None:
        """Return when there is one; at once if there is."""
        while not self._by_token:
            if self._added is None:
                self._added = trio.Event()
            await self._added.wait()

    async def wait_removed(self) -> None:
        """Return when a run was let go."""
        if self._removed is None:
            self._removed = trio.Event()
        await self._removed.wait()

    def by_token(self, token: int) -> Run | None:
        """The run that has this token."""
        return self._by_token.get(token)

    def cancel(self, token: int) -> None:
        """A notification said that this run is to be canceled; its claim's reply may still be on the way.

        Anybody may notify: the heartbeat, which waits until runs are `asked` for, looks at the row of this one.
        """
        if token in self._by_token:
            self._asked.add(token)
            self.asked.set()
            return
        self._early_cancels[token] = None
        if len(self._early_cancels) > REMEMBERED_CANCELS:
            self._early_cancels.popitem(last=False)

    def take_asked(self) -> list[Run]:
        """The runs whose cancel was told of since the last call."""
        tokens, self._asked = self._asked, set()
        return [self._by_token[token] for token in tokens if token in self._by_token]

    def shortest_lease_s(self) -> float:
        """The shortest lease among them, or the default if that is shorter.

        Whoever plans by it is told to `attend` when there is a shorter one, before the shorter one could lapse.
        """
        shortest = min((run.job.lease_s for run in self._by_token.values()), default=math.inf)
        self._planned_for_s = min(shortest, self._default_lease_s)
        return self._planned_for_s

    def key_is_safe_until(self, until: float) -> None:
        """The lock session has answered: nobody is given our keys before `until` and some time in which to clean up."""
        self.key_safe_until = until
        for run in self._by_token.values():
            if run.job.lock_hash is not None:
                run.key_is_safe_until(until)
