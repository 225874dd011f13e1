"""Which details of a segment are complete, so that a resumed run need not request them again."""

from __future__ import annotations

from collections import Counter

import attrs


@attrs.define(eq=False)
class CompletedDetails:
    """The details of one part, by their keys. `done` are complete ones that were not taken yet.

    A detail is complete when its walk has ended without a failure, and the rows of each answer are staged.
    """

    done: list[str] = attrs.field(factory=list)
    _open: Counter[str] = attrs.field(factory=Counter)
    _asked: set[str] = attrs.field(factory=set)
    _failed: set[str] = attrs.field(factory=set)

    def answered(self, key: str) -> None:
        """An answer has arrived."""
        self._open[key] += 1

    def dropped(self, key: str) -> None:
        """An answer can't be read; its request may be sent again."""
        self._open[key] -= 1

    def failed(self, key: str) -> None:
        """A request failed for good, or rows of its answer could not be staged."""
        self._failed.add(key)

    def asked(self, key: str) -> None:
        """No more requests will come for it."""
        self._asked.add(key)
        self._look_at(key)

    def staged(self, key: str) -> None:
        """The rows of an answer are staged."""
        self._open[key] -= 1
        self._look_at(key)

    def take(self) -> list[str]:
        """Return the complete ones, each once."""
        taken, self.done = self.done, []
        return taken

    def _look_at(self, key: str) -> None:
        if key in self._asked and key not in self._failed and not self._open[key]:
            self._asked.discard(key)
            del self._open[key]
            self.done.append(key)
