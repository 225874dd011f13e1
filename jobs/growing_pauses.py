"""Pauses between tries: each twice as long as the one before, and never the same in two processes.

Replicas that were started together, or that have lost the same database, must not come back together.
"""

from __future__ import annotations

import random

import attrs

_GENERATOR = random.Random()  # noqa: S311 - spreads load, guards nothing


def jittered(seconds: float) -> float:
    """`seconds`, up to a fifth more or less."""
    return seconds * _GENERATOR.uniform(0.8, 1.2)


@attrs.define
class Pauses:
    """The pauses of somebody who tries again, from `first_s` to `most_s` seconds, each up to a fifth more or less."""

    first_s: float
    most_s: float
    _next_s: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with the shortest."""
        self.reset()

    def reset(self) -> None:
        """A try has succeeded: the next pause is the shortest again."""
        self._next_s = self.first_s

    def next(self) -> float:
        """Seconds until the next try."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self.most_s)
        return jittered(pause_s)
