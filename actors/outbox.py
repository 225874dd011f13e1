"""The newest progress and the log lines of a run that the recorder has not written yet.

The port of the job's handle calls `put_…`, the recorder calls `take_…`. The recorder gets one message (`Shown`) until
it has emptied the outbox.
"""

from __future__ import annotations

from datetime import datetime

import attrs


@attrs.define(eq=False)
class Outbox:
    """One run's."""

    is_told: bool = False
    """Whether the recorder knows that something is in here."""
    _progress: str | None = None
    _lines: list[tuple[datetime, str]] = attrs.field(factory=list)
    _counts: dict[str | None, int] = attrs.field(factory=dict)

    @property
    def is_of_loads(self) -> bool:
        """Whether one of the job's loads has logged anything."""
        return any(load is not None for load in self._counts)

    @property
    def has_lines(self) -> bool:
        """Whether there are log lines to be written."""
        return bool(self._lines)

    @property
    def newest_progress(self) -> str | None:
        """The newest progress if it is not written yet; it stays in here."""
        return self._progress

    def put_progress(self, progress: str) -> None:
        """Keep `progress`, JSON text, in place of a former one."""
        self._progress = progress

    def take_progress(self) -> str | None:
        """The newest progress, None if it is written already."""
        progress, self._progress = self._progress, None
        return progress

    def give_back_progress(self, progress: str) -> None:
        """It was not written: keep it for the next time, unless there is newer progress."""
        self._progress = self._progress or progress

    def count_line(self, load: str | None) -> int:
        """Count a line, and return its number among the lines of `load`, or of the job itself if that is None."""
        count = self._counts[load] = self._counts.get(load, 0) + 1
        return count

    def lines_of(self, load: str) -> int:
        """How many lines of `load` were counted."""
        return self._counts.get(load, 0)

    def put_line(self, at: datetime, line: str) -> None:
        """Keep a line, JSON text, that was logged at `at`."""
        self._lines.append((at, line))

    def take_lines(self) -> list[tuple[datetime, str]]:
        """All lines that are not written yet."""
        lines, self._lines = self._lines, []
        return lines

    def give_back_lines(self, lines: list[tuple[datetime, str]]) -> None:
        """They were not written: keep them for the next time, before the lines that came meanwhile."""
        self._lines = lines + self._lines
