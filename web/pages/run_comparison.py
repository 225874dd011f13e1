"""Two runs of one name side by side, task by task: status, duration, rows, failures, and the changes."""

from __future__ import annotations

from datetime import timedelta
from typing import Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.etl.run_views import MOST_FAILURES, RunViewTask, get_run_view
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

_SLOWER: Final = 1.5
"""Factor by which a duration must differ to be marked."""
_LEAST: Final = timedelta(seconds=1)
"""Durations that differ by less are treated as equal."""


@attrs.frozen
class TaskPair:
    """Task in both runs, or in one of them. `this` is the displayed run, `other` the one to compare with."""

    name: str
    this: RunViewTask | None
    other: RunViewTask | None

    @property
    def longer(self) -> timedelta | None:
        """Additional duration in this run."""
        this, other = _took(self.this), _took(self.other)
        return None if this is None or other is None else this - other

    @property
    def is_slower(self) -> bool:
        """True if it took much longer."""
        return _is_much_longer(self.this, self.other)

    @property
    def is_faster(self) -> bool:
        """True if it was much faster."""
        return _is_much_longer(self.other, self.this)

    @property
    def more_rows(self) -> int | None:
        """Additional rows written in this run."""
        return None if self.this is None or self.other is None else self.this.rows - self.other.rows

    @property
    def more_failures(self) -> int | None:
        """Additional failures in this run."""
        return None if self.this is None or self.other is None else self.this.failures - self.other.failures


def _took(task: RunViewTask | None) -> timedelta | None:
    return None if task is None else task.took


def _is_much_longer(one: RunViewTask | None, two: RunViewTask | None) -> bool:
    long, short = _took(one), _took(two)
    return long is not None and short is not None and long - short > _LEAST and long > _SLOWER * short


@pages.show("/runs/<uuid:run_id>/with/<uuid:other_id>")
async def compare_runs(visit: Visit, run_id: UUID, other_id: UUID) -> PageAnswer:
    """Compare a run with another one of the same load or flow."""
    one = await get_run_view(visit.services.database, run_id)
    two = await get_run_view(visit.services.database, other_id)
    if one.name != two.name:
        raise BadRequest("other_id", "must be a run of the same load or flow")
    this, other = masked(one), masked(two)
    there = {task.task: task for task in other.tasks}
    pairs = [TaskPair(task.task, task, there.pop(task.task, None)) for task in this.tasks]
    pairs += [TaskPair(name, None, task) for name, task in there.items()]
    values = {"this": this, "other": other, "pairs": pairs, "many": MOST_FAILURES}
    return HtmlPage("run_comparison.html", f"{this.name} · two runs", values)
