"""The runs of this process: which jobs are ours now, until when, and who stopped them.

Owner of every run's deadline: a run's cancel scope ends at the earliest of its task's timeout, its lease and its key's
safety, less a margin in which the body can clean up. The heartbeat moves the lease, the keeper of the lock session the
key's safety. A run is here from its claim until its end is recorded, so that it gets heartbeats all that time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import Why

REMEMBERED_CANCELS: Final = 1_000


def margin_s(lease_s: float) -> float:
    """How long before its lease ends a body is stopped: a tenth of the lease, from half a second to five."""
    return min(max(lease_s / 10, 0.5), 5.0)


@attrs.define(eq=False, kw_only=True)
class Run:
    """One run of one job. Times are Trio's clock; `why` is set before the scope is cancelled."""

    job: ClaimedJob
    lease_until: float
    claimed_at: float
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    timeout_at: float = math.inf
    why: Why | None = None
    stopped_at: float = math.inf
    body_ended: bool = False
    reported_stuck: bool = False
    reported_unstoppable: bool = False
    journalled_at: float = -math.inf
    progress: str | None = None
    lines: list[tuple[object, str]] = attrs.field(factory=list)
    line_count: int = 0
    to_be_shown: bool = False

    def stop(self, why: Why) -> None:
        """Cancel the body; the first reason counts, but for a lost lease, after which nothing may be written."""
        if self.body_ended:
            return
        if self.why is None or why is Why.LEASE_LOST:
            self.why = why
        if not self.scope.cancel_called:
            self.stopped_at = trio.current_time()
            self.scope.cancel(reason=f"{self.why}")

    def stopped_by(self) -> Why:
        """Who stopped a body that was cancelled: the reason noted, or else the deadline that has passed."""
        if self.why is None:
            self.why = Why.TIMEOUT if self.timeout_at <= trio.current_time() else Why.LEASE_LOST
        return self.why


class Runs:
    """All runs of this process."""

    def __init__(self) -> None:
        """None yet."""
        self._by_token: dict[int, Run] = {}
        self._by_job: dict[UUID, Run] = {}
        self._early_cancels: OrderedDict[UUID, None] = OrderedDict()
        self._removed = trio.Event()
        self.key_safe_until = math.inf
        self.shorter_lease: Callable[[], None] = lambda: None
        self._planned_for_s = math.inf

    def __len__(self) -> int:
        """How many there are, ended but unrecorded ones included."""
        return len(self._by_token)

    def __iter__(self) -> Iterator[Run]:
        """A snapshot of them."""
        return iter(list(self._by_token.values()))

    def add(self, run: Run) -> None:
        """Take in a claimed job. If its cancellation was heard of before its claim was known, it is stopped at once."""
        self._by_token[run.job.token] = run
        if run.job.lease_s < self._planned_for_s:
            self._planned_for_s = run.job.lease_s
            self.shorter_lease()
        self._by_job[run.job.job_id] = run
        self.set_deadline(run)
        if self._early_cancels and self._early_cancels.pop(run.job.job_id, 0) is None:
            run.stop(Why.CANCEL)

    def remove(self, run: Run) -> None:
        """Let go of a run whose end is recorded."""
        self._by_token.pop(run.job.token, None)
        if self._by_job.get(run.job.job_id) is run:
            del self._by_job[run.job.job_id]
        if self._removed.statistics().tasks_waiting:
            self._removed.set()
            self._removed = trio.Event()

    async def wait_removed(self) -> None:
        """Return when a run was let go."""
        await self._removed.wait()

    def by_token(self, token: int) -> Run | None:
        """The run that has this token."""
        return self._by_token.get(token)

    def cancel(self, job_id: UUID) -> None:
        """A notification said that this job is to be canceled; its claim's reply may still be on the way."""
        run = self._by_job.get(job_id)
        if run is not None:
            run.stop(Why.CANCEL)
            return
        self._early_cancels[job_id] = None
        if len(self._early_cancels) > REMEMBERED_CANCELS:
            self._early_cancels.popitem(last=False)

    def shortest_lease_s(self) -> float:
        """The shortest lease among them, infinite when there is none.

        Whoever plans by it hears of a shorter one by `shorter_lease`, before the shorter one could lapse.
        """
        self._planned_for_s = min((run.job.lease_s for run in self._by_token.values()), default=math.inf)
        return self._planned_for_s

    def set_deadline(self, run: Run) -> None:
        """Move the scope's deadline to where timeout, lease and key put it."""
        margin = margin_s(run.job.lease_s)
        run.scope.deadline = min(run.timeout_at, run.lease_until - margin, self.key_safe_until - margin)

    def key_is_safe_until(self, until: float) -> None:
        """The lock session has answered: nobody is given our keys before `until`."""
        self.key_safe_until = until
        for run in self._by_token.values():
            self.set_deadline(run)
