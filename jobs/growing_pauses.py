"""Pauses between tries: each twice as long as the previous one, and never the same in two processes.

Replicas that were started together, or that have lost the same database, must not retry at the same time.
"""

from __future__ import annotations

import random

import attrs

_GENERATOR = random.Random()  # noqa: S311 - spreads load, not for security


def jittered(seconds: float) -> float:
    """Return `seconds`, changed randomly by up to a fifth."""
    return seconds * _GENERATOR.uniform(0.8, 1.2)


@attrs.define
class Pauses:
    """Pauses between tries, from `first_s` to `most_s` seconds, each changed randomly by up to a fifth."""

    first_s: float
    most_s: float
    _next_s: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with the shortest pause."""
        self.reset()

    def reset(self) -> None:
        """Begin with the shortest pause again, after a successful try."""
        self._next_s = self.first_s

    def next(self) -> float:
        """Return the seconds until the next try."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self.most_s)
        return jittered(pause_s)
