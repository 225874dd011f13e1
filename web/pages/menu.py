"""Menu of the pages: groups of subjects, each with its address, icon, and shortcut key after `g`."""

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
    icon: str
    role: str = "read"

    def is_current(self, path: str) -> bool:
        """Return True if a page belongs to this subject: `/ui/jobs/ID` to `/ui/jobs`, `/ui/queue` to `/ui/queues`."""
        if self.path == HOME:
            return path == HOME
        if self.path == f"{HOME}/jobs" and path.startswith((f"{HOME}/key", f"{HOME}/bulk")):
            return True
        one = self.path.removesuffix("es" if self.path.endswith("sses") else "s")
        return path in {self.path, one} or path.startswith((f"{self.path}/", f"{one}/"))


@attrs.frozen
class MenuGroup:
    """Subjects of the menu under one heading."""

    label: str
    entries: tuple[Entry, ...]


_ALL: Final = (
    MenuGroup(
        "Work",
        (
            Entry("/ui", "Overview", "o", "home"),
            Entry("/ui/jobs", "Jobs", "j", "jobs"),
            Entry("/ui/queues", "Queues", "q", "queues"),
            Entry("/ui/errors", "Errors", "e", "errors"),
        ),
    ),
    MenuGroup(
        "Plans",
        (
            Entry("/ui/schedules", "Schedules", "s", "sched"),
            Entry("/ui/tasks", "Tasks and limits", "t", "limits"),
            Entry("/ui/suppliers", "Suppliers", "u", "supply"),
        ),
    ),
    MenuGroup(
        "Loads",
        (Entry("/ui/loads", "Loads", "l", "loads"), Entry("/ui/runs", "Runs", "r", "runs")),
    ),
    MenuGroup("Processes", (Entry("/ui/processes", "Processes", "p", "proc"),)),
    MenuGroup(
        "System",
        (
            Entry("/ui/workers", "Workers", "w", "workers"),
            Entry("/ui/stats", "Statistics", "h", "stats"),
            Entry("/ui/audit", "Audit", "a", "audit", "admin"),
        ),
    ),
)


def menu_of(paths: Iterable[str]) -> tuple[MenuGroup, ...]:
    """Return the groups with the subjects that have a page."""
    there = set(paths)
    groups = (attrs.evolve(group, entries=tuple(one for one in group.entries if one.path in there)) for group in _ALL)
    return tuple(group for group in groups if group.entries)
