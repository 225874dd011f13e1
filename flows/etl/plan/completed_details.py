"""Tracking of the complete details of a segment, so that a resumed run need not request them again."""

from __future__ import annotations

from collections import Counter

import attrs


@attrs.define(eq=False)
class CompletedDetails:
    """Details of one part, by their keys. `done` are the complete ones that were not taken yet.

    A detail is complete when its walk has ended without a failure and the rows of each response are staged.
    """

    done: list[str] = attrs.field(factory=list)
    _open: Counter[str] = attrs.field(factory=Counter)
    _asked: set[str] = attrs.field(factory=set)
    _failed: set[str] = attrs.field(factory=set)

    def answered(self, key: str) -> None:
        """Note that a response has arrived."""
        self._open[key] += 1

    def dropped(self, key: str) -> bool:
        """Note an unreadable response, whose request may be sent again. Return whether this completes the detail."""
        self._open[key] -= 1
        return self._complete(key)

    def failed(self, key: str) -> None:
        """Note that a request failed for good, or that rows of its response could not be staged."""
        self._failed.add(key)

    def asked(self, key: str) -> bool:
        """Note that no more requests will be sent for the detail. Return whether this completes it."""
        self._asked.add(key)
        return self._complete(key)

    def staged(self, key: str) -> None:
        """Note that the rows of a response are staged."""
        self._open[key] -= 1
        self._complete(key)

    def take(self) -> list[str]:
        """Return the newly complete details, each once."""
        taken, self.done = self.done, []
        return taken

    def _complete(self, key: str) -> bool:
        if key not in self._asked or key in self._failed or self._open[key]:
            return False
        self._asked.discard(key)
        del self._open[key]
        self.done.append(key)
        return True
