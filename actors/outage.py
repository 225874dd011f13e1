"""Logs the outages of all parts in one place: when one begins, once a minute, and when it ends.

A part that retries reports under its own name: `failed` after a failed attempt, `worked` after a successful one, `left`
when the part has ended. A single attempt is logged at level debug only, because 30 seconds without a database cause
hundreds of them. A database that cannot be used is one problem that all parts share. Any other refusal is a problem of
that part alone, and shows that the database can be used. A problem ends when the first of its parts works again. The
other parts may fail a little longer, which is logged only if it lasts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import attrs
import trio

from dataloader.jobs.errors import StoreError, StoreUnavailable
from dataloader.jobs.logger import get_logger

log = get_logger(__name__)

TELL_EVERY_S: Final = 60.0


@attrs.define
class _Trouble:
    """One problem: since when it lasts, and which parts have not worked since."""

    began: float
    told: float
    is_over: bool = False
    parts: set[str] = attrs.field(factory=set)
    tries: int = 0


@attrs.define(eq=False)
class Outage:
    """Problems of all actors of a process."""

    _troubles: dict[str | None, _Trouble] = attrs.field(factory=dict, init=False)
    """Problems by part; the key None is for a database that cannot be used."""

    @property
    def lasts(self) -> bool:
        """Return whether the database cannot be used, which the log already says."""
        trouble = self._troubles.get(None)
        return trouble is not None and not trouble.is_over

    def lasts_for(self, parts: Collection[str]) -> bool:
        """Return whether the database cannot be used by one of these parts."""
        return self.lasts and not self._troubles[None].parts.isdisjoint(parts)

    def failed(self, part: str, error: StoreError, **fields: object) -> None:
        """Report a failed attempt of `part`, which must try again within a minute."""
        log.debug("an attempt failed", part=part, error=str(error), **fields)
        now = trio.current_time()
        whose = None if isinstance(error, StoreUnavailable) else part
        if whose is not None:
            self._over(None, part)  # a database that refuses something can be used
        trouble = self._troubles.get(whose)
        # If a part has worked since the problem was over, it has a new one.
        if trouble is None or (trouble.is_over and part not in trouble.parts):
            trouble = self._troubles[whose] = _Trouble(now, now)
            what = "the database is unavailable" if whose is None else "a part cannot do its work"
            log.warning(what, part=part, error=str(error))
        trouble.parts.add(part)
        trouble.tries += 1
        if now - trouble.told >= TELL_EVERY_S:
            trouble.told, trouble.is_over = now, False
            log.warning(
                "the database is still unavailable" if whose is None else "a part still cannot do its work",
                for_s=round(now - trouble.began, 1),
                parts=sorted(trouble.parts),
                tries=trouble.tries,
                error=str(error),
            )

    def worked(self, part: str) -> None:
        """Report a successful attempt of `part`."""
        if self._troubles:
            self._over(None, part)
            self._over(part, part)

    def left(self, part: str) -> None:
        """Report that `part` has ended and will not try again."""
        for whose in (None, part):
            if whose in self._troubles:
                self._leave(whose, part)

    def _over(self, whose: str | None, part: str) -> None:
        """End this problem for `part`; log it if this is the first part that works again."""
        trouble = self._troubles.get(whose)
        if trouble is None or part not in trouble.parts:
            return
        if not trouble.is_over:
            trouble.is_over = True
            what = "the database is available again" if whose is None else "a part has recovered"
            after_s = round(trio.current_time() - trouble.began, 1)
            log.warning(what, part=part, after_s=after_s, tries=trouble.tries)
        self._leave(whose, part)

    def _leave(self, whose: str | None, part: str) -> None:
        parts = self._troubles[whose].parts
        parts.discard(part)
        if not parts:
            del self._troubles[whose]
