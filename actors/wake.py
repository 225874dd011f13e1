"""Flag that wakes an actor.

It is a flag rather than a queue of messages, because ten notifications need only one check of the database.
"""

from __future__ import annotations

import trio


class Wake:
    """Flag that one actor waits for and any code sets. Setting it twice before it is seen is one wake-up."""

    def __init__(self) -> None:
        """Create the flag, not set."""
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the actor, now or when it next waits."""
        self._event.set()

    def lower(self) -> None:
        """Clear the flag without waiting."""
        self._event = trio.Event()

    @property
    def is_set(self) -> bool:
        """Return whether the flag is set and not cleared yet."""
        return self._event.is_set()

    async def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for the flag and clear it. Return whether it was set."""
        with trio.move_on_after(timeout_s):
            await self._event.wait()
        was_set = self.is_set
        if was_set:
            self.lower()
        return was_set


def set_all(*wakes: Wake) -> None:
    """Set several flags."""
    for wake in wakes:
        wake.set()
