"""Newest progress and log lines of a run that the recorder has not written yet.

The port of the job's handle calls `put_…`, the recorder calls `take_…`. The recorder gets one message (`Shown`) until
it has emptied the outbox.
"""

from __future__ import annotations

from datetime import datetime

import attrs


@attrs.define(eq=False)
class Outbox:
    """Outbox of one run."""

    is_told: bool = False
    """True if the recorder was notified that the outbox has something."""
    _progress: str | None = None
    _lines: list[tuple[datetime, str]] = attrs.field(factory=list)
    _counts: dict[str | None, int] = attrs.field(factory=dict)

    @property
    def is_of_loads(self) -> bool:
        """Return whether one of the job's loads has logged a line."""
        return any(load is not None for load in self._counts)

    @property
    def has_lines(self) -> bool:
        """Return whether there are log lines to write."""
        return bool(self._lines)

    @property
    def newest_progress(self) -> str | None:
        """Newest progress if it is not written yet; it stays in the outbox."""
        return self._progress

    def put_progress(self, progress: str) -> None:
        """Keep `progress`, JSON text, instead of a former one."""
        self._progress = progress

    def take_progress(self) -> str | None:
        """Take out the newest progress; None if it is already written."""
        progress, self._progress = self._progress, None
        return progress

    def give_back_progress(self, progress: str) -> None:
        """Put back progress that was not written, unless there is newer progress."""
        self._progress = self._progress or progress

    def count_line(self, load: str | None) -> int:
        """Count a line; return its number among the lines of `load`, or of the job itself if `load` is None."""
        count = self._counts[load] = self._counts.get(load, 0) + 1
        return count

    def lines_of(self, load: str) -> int:
        """Return the number of counted lines of `load`."""
        return self._counts.get(load, 0)

    def put_line(self, at: datetime, line: str) -> None:
        """Keep a line, JSON text, that was logged at `at`."""
        self._lines.append((at, line))

    def take_lines(self) -> list[tuple[datetime, str]]:
        """Take out all lines that are not written yet."""
        lines, self._lines = self._lines, []
        return lines

    def give_back_lines(self, lines: list[tuple[datetime, str]]) -> None:
        """Put back lines that were not written, before the lines that were added meanwhile."""
        self._lines = lines + self._lines
