"""Keeps a part of the tree running: restarts it after a failure and a pause, within a budget of restarts.

A part that fails more often than its budget allows will not recover: `gave_up` is called, and the process drains and
exits 1 with the cause in its last log line. Rejected: letting the error pass through the nurseries, which would cancel
running jobs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import attrs
import trio

from dataloader.jobs.error_groups import first_error
from dataloader.jobs.errors import ActorGaveUp, EmbeddedDatabaseError, StoreUnavailable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.logger import get_logger
from dataloader.jobs.text import said_by

log = get_logger(__name__)

FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 2.0


@attrs.frozen
class RestartBudget:
    """Budget of at most `restarts` within `within_s` seconds. Failures during a database outage do not count."""

    restarts: int
    within_s: float

    def __str__(self) -> str:
        """Return the budget as readable text."""
        return f"{self.restarts} restarts in {self.within_s:g} s"


async def keep_running(
    name: str, part: Callable[[], Awaitable[None]], budget: RestartBudget, gave_up: Callable[[ActorGaveUp], None]
) -> None:
    """Run `part` until it returns or is cancelled. After an error start it again, until `budget` is used up."""
    failures: deque[float] = deque()
    pauses = Pauses(FIRST_PAUSE_S, MAX_PAUSE_S)
    while True:
        began = trio.current_time()
        error: Exception | None = None
        try:
            await part()
        except* StoreUnavailable as group:
            error = first_error(group)
            log.debug("a part waits for the database", part=name, error=str(error))
        except* EmbeddedDatabaseError as group:
            error = group
            # Without our traceback: only the server's own cause matters.
            cause = str(first_error(group))
            log.error("a part failed and is restarted", part=name, budget=str(budget), cause=cause)  # noqa: TRY400
        except* Exception as group:
            error = group
            log.exception("a part failed and is restarted", part=name, budget=str(budget))
        if error is None:
            return
        now = trio.current_time()
        if now - began > MAX_PAUSE_S * 2:
            pauses.reset()
        if isinstance(error, ExceptionGroup):
            failures.append(now)
            while failures[0] < now - budget.within_s:
                failures.popleft()
            if len(failures) > budget.restarts:
                last = first_error(error)
                gave_up(ActorGaveUp(f"{name} gave up after {budget}; the last cause was {said_by(last)}"))
                return
        await trio.sleep(pauses.next())
