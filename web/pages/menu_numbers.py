"""Numbers beside the subjects of the menu, cached for a few seconds for all pages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs
import trio

from dataloader.jobs.errors import StoreError
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.menu_counts import MenuCounts, read_menu_counts
from dataloader.store.queue.overview import MOST
from dataloader.web.pages.formats import at_least

REMEMBERED_S: Final = 5.0
_WAIT_S: Final = 0.5
"""Seconds for which a page waits for its menu's numbers."""


@attrs.define
class MenuNumbers:
    """Texts of the menu's numbers, by the address of the subject, at most five seconds old. One for each app."""

    _database: Database
    _texts: Mapping[str, str] = attrs.field(factory=dict)
    _asked_at: float = float("-inf")

    @property
    def last(self) -> Mapping[str, str]:
        """The numbers as last read."""
        return self._texts

    async def latest(self) -> Mapping[str, str]:
        """Return the numbers; those last read while another page reads them or if the database does not answer."""
        if trio.current_time() - self._asked_at >= REMEMBERED_S:
            self._asked_at = trio.current_time()
            try:
                with trio.move_on_after(_WAIT_S):
                    self._texts = _texts_of(await read_menu_counts(self._database))
            except StoreError:
                self._texts = {}
        return self._texts


def _texts_of(counts: MenuCounts) -> dict[str, str]:
    given = {
        "/ui/jobs": counts.jobs,
        "/ui/errors": counts.errors,
        "/ui/runs": counts.runs,
        "/ui/workers": counts.workers,
    }
    texts = {path: f"{number:,}" for path, number in given.items() if number}
    if counts.processes:
        texts["/ui/processes"] = at_least(counts.processes, MOST)
    return texts
