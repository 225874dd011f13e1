"""Start, size and time of a queue's next claim, decided from the results of the last claims.

It uses neither the database nor a clock: the dispatcher passes in results and times. In a backlog a claim begins behind
the last job of the previous one. While a transaction holds an old snapshot, the index keeps the entries of claimed
jobs, and each claim from the front would walk over all of them.
"""

from __future__ import annotations

import math
from typing import Final
from uuid import UUID

import attrs

from dataloader.jobs.growing_pauses import Pauses
from dataloader.store.queue.claim import Claim

MIN_CLAIM: Final = 64
MAX_CLAIM: Final = 250
"""Bounds of the number of jobs claimed in one statement, which is half of the slots.

So the next jobs are claimed while the former ones run and are recorded. With larger claims all slots would wait for the
database at the same time; with smaller ones fewer jobs would share the cost of a statement.
"""
MAX_LOOK: Final = 500
"""Maximum number of jobs read in one statement behind many that cannot run; the server has to park those."""
PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 5.0
LOCKED_PAUSE_S: Final = 0.01
MAX_LOCKED_PAUSE_S: Final = 1.0
LOOK_BACK_S: Final = 0.25
"""Pause in seconds between two claims from the front in a backlog, unless a job becomes ready before."""
LOOK_BACK: Final = 10
CHEAP_LOOK_S: Final = 0.002
"""Time in seconds after which a claim from the front is slow, because of dead index entries.

The next one then waits `LOOK_BACK` times the excess, at most `MAX_PAUSE_S`.
"""
DEAR: Final = 1.5
"""Factor by which a claim from the front may exceed one behind the last job, where all claims are slow."""


def largest_claim(concurrency: int) -> int:
    """Return the maximum number of jobs that a queue with `concurrency` slots claims in one statement."""
    return min(max(concurrency // 2, MIN_CLAIM), MAX_CLAIM)


@attrs.frozen
class NextClaim:
    """Claim to make: up to `slots` jobs, of up to `look` that are read, behind the job `after`, if there is one."""

    slots: int
    look: int
    after: UUID | None
    began: float


@attrs.define
class ClaimCursor:
    """Claims of one queue. Times are in seconds by any monotonic clock.

    `most` is the size of its largest claim; `more` says whether the next one is worth making immediately.
    """

    most: int = MIN_CLAIM
    more: bool = True
    _limit: int = attrs.field(default=attrs.Factory(lambda self: self.most, takes_self=True), init=False)
    _look: int = 0
    _last: UUID | None = None
    _looked_at: float = -math.inf
    _is_woken: bool = False
    _front_s: tuple[float, float] = (0, 0)
    _behind_s: tuple[float, float] = (0, 0)
    _look_again_at: float = math.inf
    _pauses: Pauses = attrs.field(factory=lambda: Pauses(PAUSE_S, MAX_PAUSE_S))
    _locked_pauses: Pauses = attrs.field(factory=lambda: Pauses(LOCKED_PAUSE_S, MAX_LOCKED_PAUSE_S))

    @property
    def found_all(self) -> bool:
        """Return whether the last claim has left no ready job behind, locked or not."""
        return not self.more and not self._is_woken and self._look_again_at == math.inf

    def wait_s(self, poll_s: float, now: float) -> float:
        """Return the seconds to wait for a notification when `more` is false; at most `poll_s`."""
        front_s = max(self._looked_at + self._pause_s - now, 0)
        return min(poll_s, max(self._look_again_at - now, front_s), front_s if self._is_woken else math.inf)

    def next(self, free: int, now: float, *, woken: bool) -> NextClaim:
        """Return the claim to make now for `free` slots. `woken`: a job became ready since the last claim."""
        self._is_woken = self._is_woken or woken
        after = None if now - self._looked_at >= self._pause_s else self._last
        if after is None:
            self._is_woken = False
        return NextClaim(min(free, self._limit), self._look, after, now)

    def to_front(self) -> None:
        """Begin the next claim at the front: jobs that former claims skipped have become claimable."""
        self._last, self._looked_at, self.more = None, -math.inf, True

    @property
    def _pause_s(self) -> float:
        """Pause between two claims from the front: none if jobs became ready, unless these claims are slow."""
        is_due = self._is_woken or self._look_again_at < math.inf
        return max(self._slow_pause_s, 0 if is_due else LOOK_BACK_S)

    @property
    def _slow_pause_s(self) -> float:
        # The faster of the last two: a single slow one may only have planned its statement, or waited for the disk.
        excess_s = min(self._front_s) - max(CHEAP_LOOK_S, DEAR * min(self._behind_s))
        return min(max(LOOK_BACK * excess_s, 0), MAX_PAUSE_S)

    def answered(self, ask: NextClaim, claim: Claim, now: float) -> None:
        """Apply `claim`, the result of `ask`."""
        self._last = claim.last or ask.after
        self.more = claim.more
        if ask.after is None:
            self._looked_at = ask.began
            _, last_s = self._front_s
            self._front_s = last_s, now - ask.began
            # A row that another session had locked was skipped. It is ready, but there is no second notification.
            # Behind a block the claim did not search for such rows, so there may be one.
            if claim.passed_over or claim.blocked:
                self._look_again_at = now + self._locked_pauses.next()
            else:
                self._locked_pauses.reset()
                self._look_again_at = math.inf
        else:
            _, last_s = self._behind_s
            self._behind_s = last_s, now - ask.began
            # The backlog is over: skipped jobs are at the front. Jobs that became ready are mostly behind; the others
            # are found from the front. If claims from there are slow, the pause comes first.
            if not claim.more and not self._is_woken:
                if (front_at := self._looked_at + self._slow_pause_s) > now:
                    self._look_again_at = front_at
                else:
                    self._last, self.more = None, True
        self._limit = min(self._limit * 2, self.most)
        self._pauses.reset()
        # While slots stay free behind many jobs that cannot run, mostly of one key, each claim reads more jobs.
        crowded = claim.more and not claim.large and len(claim.jobs) < ask.slots
        self._look = min(max(ask.look, ask.slots) * 4, MAX_LOOK) if crowded else 0

    def failed(self) -> float:
        """Note that the claim has failed; return the seconds until the next one, for half as many jobs.

        The failed one may have been too large for the server's lock table or for the statement's deadline.
        """
        self._limit = max(self._limit // 2, 1)
        self.more, self._is_woken, self._look = True, True, 0
        return self._pauses.next()
