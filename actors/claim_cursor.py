"""Where the next claim of a queue looks, how many jobs it asks for, and when: decided from what the last ones brought.

Knows neither the database nor the clock: the dispatcher tells it both. In a backlog a claim goes on behind the last
one: while somebody holds an old snapshot the entries of jobs that were claimed stay in the index, and each claim from
the front would walk over all of them.
"""

from __future__ import annotations

import math
from typing import Final
from uuid import UUID

import attrs

from dataloader.jobs.growing_pauses import Pauses
from dataloader.store.queue.lock_session import Claim

MAX_CLAIM: Final = 64
"""Jobs claimed in one statement at the most: the next ones are claimed while these run and former ones are recorded.

Larger ones hold up the event loop, and all slots wait for the database at the same time.
"""
MAX_LOOK: Final = 500
"""Jobs looked at in one statement at the most, behind a crowd that can't run: parking is the server's work."""
PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 5.0
LOCKED_PAUSE_S: Final = 0.01
MAX_LOCKED_PAUSE_S: Final = 1.0
LOOK_BACK_S: Final = 0.25
"""In a backlog, so long after a look at its front the next one is due, unless something becomes ready before."""
LOOK_BACK: Final = 10
CHEAP_LOOK_S: Final = 0.02
"""Looks at the front that take longer, by dead entries there, are so many times their excess apart."""


@attrs.frozen
class Ask:
    """A claim to be made: up to `slots` jobs, of up to `look` that are looked at, behind the job `after`, if any."""

    slots: int
    look: int
    after: UUID | None
    began: float


@attrs.define
class ClaimCursor:
    """The claims of one queue. Times are of any clock that only goes on.

    `more` tells whether the next claim is worth making at once.
    """

    more: bool = True
    _limit: int = MAX_CLAIM
    _look: int = 0
    _last: UUID | None = None
    _looked_at: float = -math.inf
    _took_s: tuple[float, float] = (0, 0)
    _look_again_s: float = math.inf
    _pauses: Pauses = attrs.field(factory=lambda: Pauses(PAUSE_S, MAX_PAUSE_S))
    _locked_pauses: Pauses = attrs.field(factory=lambda: Pauses(LOCKED_PAUSE_S, MAX_LOCKED_PAUSE_S))

    def wait_s(self, poll_s: float) -> float:
        """For how long to wait for a notification when there is not `more`; `poll_s` at the most."""
        return min(poll_s, self._look_again_s)

    def next(self, free: int, now: float, *, woken: bool) -> Ask:
        """The claim to make now for `free` slots. `woken`: something became ready since the last look at the front."""
        # One look that was held up, by the plan it had to make or by the disk, says nothing of the next.
        excess_s = max(min(self._took_s) - CHEAP_LOOK_S, 0)
        pause_s = max(LOOK_BACK * excess_s, 0 if woken else LOOK_BACK_S)
        from_the_front = now - self._looked_at >= pause_s
        return Ask(min(free, self._limit), self._look, None if from_the_front else self._last, now)

    def answered(self, ask: Ask, claim: Claim, now: float) -> None:
        """`ask` has brought `claim`."""
        self._last = claim.last
        if ask.after is None:
            self._looked_at = ask.began
            self._took_s = (self._took_s[1], now - ask.began)
        self._limit = min(self._limit * 2, MAX_CLAIM)
        self._pauses.reset()
        self.more = claim.more
        # While slots stay free behind a crowd that can't run, jobs of one key mostly, look further and further.
        crowded = claim.more and len(claim.jobs) < ask.slots
        self._look = min(max(ask.look, ask.slots) * 4, MAX_LOOK) if crowded else 0
        # A row that was locked while we looked, by whoever writes to it, is ready without another notification.
        if claim.passed_over:
            self._look_again_s = self._locked_pauses.next()
        else:
            self._locked_pauses.reset()
            self._look_again_s = math.inf

    def failed(self) -> float:
        """The claim failed: the next one is due in so many seconds, and asks for less.

        What was too much for the server, its locks or its time, is not asked for again in that size.
        """
        self._limit = max(self._limit // 2, 1)
        self.more, self._look = True, 0
        return self._pauses.next()
