"""Menu of the pages: each subject, its address, and its shortcut key after `g`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import attrs

from dataloader.web.pages.addresses import HOME


@attrs.frozen
class Entry:
    """Subject of the menu, and the role that its page needs."""

    path: str
    label: str
    key: str
    role: str = "read"

    def is_current(self, path: str) -> bool:
        """Return True if a page belongs to this subject: `/ui/jobs/ID` to `/ui/jobs`, `/ui/queue` to `/ui/queues`."""
        if self.path == HOME:
            return path == HOME
        if self.path == f"{HOME}/jobs" and path == f"{HOME}/key":
            return True
        one = self.path.removesuffix("es" if self.path.endswith("sses") else "s")
        return path in {self.path, one} or path.startswith((f"{self.path}/", f"{one}/"))


_ALL: Final = (
    Entry("/ui", "Overview", "o"),
    Entry("/ui/jobs", "Jobs", "j"),
    Entry("/ui/runs", "Runs", "r"),
    Entry("/ui/loads", "Loads", "l"),
    Entry("/ui/queues", "Queues", "q"),
    Entry("/ui/workers", "Workers", "w"),
    Entry("/ui/tasks", "Tasks", "t"),
    Entry("/ui/suppliers", "Suppliers", "u"),
    Entry("/ui/schedules", "Schedules", "s"),
    Entry("/ui/processes", "Processes", "p"),
    Entry("/ui/errors", "Errors", "e"),
    Entry("/ui/stats", "Statistics", "h"),
    Entry("/ui/audit", "Audit", "a", "admin"),
)


def menu_of(paths: Iterable[str]) -> tuple[Entry, ...]:
    """Return the subjects that have a page."""
    there = set(paths)
    return tuple(entry for entry in _ALL if entry.path in there)
