"""Logs the outages of all parts in one place: when one begins, once a minute, and when it is over.

A part that retries reports under a name of its own: `failed` after a failed try, `worked` after a successful one,
`left` when the part has ended. A single try is logged at level debug only: thirty seconds without a database are
hundreds of them. A database that can't be used is one trouble that all parts share. Any other refusal is a trouble of
that part alone, and shows that the database can be used. A trouble is over when the first of its parts works again; the
other parts may fail a little longer, and that is logged only if it lasts.
"""

from __future__ import annotations

from typing import Final

import attrs
import trio

from dataloader.jobs.errors import StoreError, StoreUnavailable
from dataloader.jobs.logger import get_logger

log = get_logger(__name__)

TELL_EVERY_S: Final = 60.0


@attrs.define
class _Trouble:
    """Since when, and which parts have not worked since."""

    began: float
    told: float
    is_over: bool = False
    parts: set[str] = attrs.field(factory=set)
    tries: int = 0


@attrs.define(eq=False)
class Outage:
    """The troubles of all actors of a process."""

    _troubles: dict[str | None, _Trouble] = attrs.field(factory=dict, init=False)
    """By part; the key None is the database that can't be used."""

    @property
    def lasts(self) -> bool:
        """Whether the database can't be used; the log says so already."""
        trouble = self._troubles.get(None)
        return trouble is not None and not trouble.is_over

    def failed(self, part: str, error: StoreError, **fields: object) -> None:
        """A try of `part` has failed, and it is going to try again within a minute."""
        log.debug("a try failed", part=part, error=str(error), **fields)
        now = trio.current_time()
        whose = None if isinstance(error, StoreUnavailable) else part
        if whose is not None:
            self._over(None, part)  # a database that refuses something is there
        trouble = self._troubles.get(whose)
        # A part that has worked since the trouble was over is in a new one.
        if trouble is None or (trouble.is_over and part not in trouble.parts):
            trouble = self._troubles[whose] = _Trouble(now, now)
            what = "the database can't be used" if whose is None else "a part can't do its work"
            log.warning(what, part=part, error=str(error))
        trouble.parts.add(part)
        trouble.tries += 1
        if now - trouble.told >= TELL_EVERY_S:
            trouble.told, trouble.is_over = now, False
            log.warning(
                "the database still can't be used" if whose is None else "a part still can't do its work",
                for_s=round(now - trouble.began, 1),
                parts=sorted(trouble.parts),
                tries=trouble.tries,
                error=str(error),
            )

    def worked(self, part: str) -> None:
        """A try of `part` has succeeded."""
        if self._troubles:
            self._over(None, part)
            self._over(part, part)

    def left(self, part: str) -> None:
        """`part` has ended and will not try again."""
        for whose in (None, part):
            if whose in self._troubles:
                self._leave(whose, part)

    def _over(self, whose: str | None, part: str) -> None:
        """This trouble is over for `part`; the first part that works again has it logged."""
        trouble = self._troubles.get(whose)
        if trouble is None or part not in trouble.parts:
            return
        if not trouble.is_over:
            trouble.is_over = True
            what = "the database can be used again" if whose is None else "a part does its work again"
            after_s = round(trio.current_time() - trouble.began, 1)
            log.warning(what, part=part, after_s=after_s, tries=trouble.tries)
        self._leave(whose, part)

    def _leave(self, whose: str | None, part: str) -> None:
        parts = self._troubles[whose].parts
        parts.discard(part)
        if not parts:
            del self._troubles[whose]
