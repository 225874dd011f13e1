"""Runs, loads and failures as clients read them.

A run or a task that is stored as `running` although its job does not run shows the status of the job: `queued` if a
worker died and another one will continue, `lost` or `canceled` if none will.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Self
from uuid import UUID

import attrs

from dataloader.jobs.errors import NotFound
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import Next
from dataloader.jobs.secrets.masking import mask_text

MAX_LOADS: Final = 200
"""Maximum number of loads of a page: each has its last run and its failures looked up."""
MAX_COUNTED: Final = 1_000
"""Maximum number of failures of a load that are counted: this number means at least this number."""


class RunNotFound(NotFound):
    """Error: no run has this ID, which is its job's. The job is no load or flow, has not begun, or was deleted."""


class LoadNotFound(NotFound):
    """Error: no load of this name has run in this database, and none waits in a flow."""


@attrs.frozen(kw_only=True)
class RunRecord:
    """Run of a load or a flow, with its status, and the reason if something failed."""

    run_id: Annotated[UUID, about("The run's id, which is its job's.")]
    name: Annotated[str, about("The load or the flow that ran.")]
    kind: Annotated[str, about("`load` or `flow`.")]
    status: Annotated[str, about("Its status; if the run could not record one, its job's status.")]
    started_at: Annotated[Instant, about("When it began.")]
    finished_at: Annotated[Instant | None, about("When it ended.")]
    reason: Annotated[str | None, about("The reason for its status: its failures and their number.")]
    counts: Annotated[dict[str, Any], about("Its counts: requests, rows and more, by name.")]


@attrs.frozen
class RunPage:
    """A page of runs, newest first."""

    runs: Annotated[list[RunRecord], about("The runs.")]
    next: Next


@attrs.frozen(kw_only=True)
class RunTask:
    """Task of a run, and its results once it has ended.

    `phases` are a load's, with began_at, ended_at and busy_s (seconds, over all workers); `tables` are those of a set
    of dimensions, with status, began_at, ended_at and counts.
    """

    ordinal: Annotated[int, about("Its place in the order of registration, from 1.")]
    layer: Annotated[str, about("The layer of the warehouse that it fills.")]
    task: Annotated[str, about("The load's name.")]
    status: Annotated[str, about("Its status; `waiting` before it begins.")]
    started_at: Annotated[Instant | None, about("When it began.")]
    finished_at: Annotated[Instant | None, about("When it ended.")]
    phases: Annotated[
        dict[str, Any], about("A load's phases, with began_at, ended_at and busy_s (seconds, over all workers).")
    ]
    tables: Annotated[
        dict[str, Any], about("The tables of a set of dimensions, with status, began_at, ended_at and counts.")
    ]
    reason: Annotated[str | None, about("The reason for its status: its failures and their number.")]
    counts: Annotated[dict[str, Any], about("Its counts: requests, rows and more, by name.")]


@attrs.frozen(kw_only=True)
class RunTimeline:
    """Run and its tasks, in the order of their registration."""

    run_id: Annotated[UUID, about("The run's id, which is its job's.")]
    name: Annotated[str, about("The load or the flow that ran.")]
    kind: Annotated[str, about("`load` or `flow`.")]
    status: Annotated[
        str,
        about(
            "`running`, `waiting` for another run of a load, then `succeeded`, `succeeded_with_failures`, "
            "`failed`, `canceled` or `interrupted`; if the run could not record one, its job's status."
        ),
    ]
    started_at: Annotated[Instant, about("When it began.")]
    finished_at: Annotated[Instant | None, about("When it ended.")]
    reason: (
        Annotated[str, about("The reason for its status: its failures and their number; for a flow see its tasks.")]
        | None
    )
    counts: Annotated[dict[str, Any], about("Its counts: requests, rows and more, by name.")]
    tasks: Annotated[list[RunTask], about("Its tasks, in the order of their registration.")]
    next: Next


@attrs.frozen(kw_only=True)
class LastRun:
    """Last run of a load, by itself or in a flow."""

    run_id: Annotated[UUID, about("The run's id, which is its job's.")]
    status: Annotated[str, about("Its status.")]
    started_at: Annotated[Instant, about("When it began.")]
    finished_at: Annotated[Instant | None, about("When it ended.")]
    reason: Annotated[str | None, about("The reason for its status: its failures and their number.")]
    counts: Annotated[dict[str, Any], about("Its counts: requests, rows and more, by name.")]


@attrs.frozen(kw_only=True)
class LoadRecord:
    """Progress of a load: all data before `watermark` is in its table. `unresolved` failures, at most `MAX_COUNTED`.

    `upto` and `unsolved` are the former names of the two, for HTTP clients.
    """

    load: Annotated[str, about("The load's name.")]
    watermark: Annotated[
        Instant | None, about("The instant before which all data is loaded; null for a load without one.")
    ]
    upto: Annotated[Instant | None, about("The former name of `watermark`.")]
    moved_at: Annotated[Instant | None, about("When the watermark moved last.")]
    unresolved: Annotated[int, about("The number of unresolved failures, counted up to 1,000.")]
    unsolved: Annotated[int, about("The former name of `unresolved`.")]
    last_run: Annotated[LastRun | None, about("Its last run, by itself or in a flow.")]


@attrs.frozen
class LoadPage:
    """A page of loads, by name."""

    loads: Annotated[list[LoadRecord], about("The loads.")]
    next: Next


@attrs.frozen(kw_only=True)
class FailureLine:
    """Failed item, its phase and its error, without the requests that load it again."""

    failure_id: Annotated[int, about("The failure's number; later ones have larger ones.")]
    run_id: Annotated[UUID, about("The run in which it failed.")]
    load: Annotated[str, about("The load that failed.")]
    segment: Annotated[str, about("The part of the load in which it failed.")]
    phase: Annotated[str, about("What failed: requests, processing, writing, or a record.")]
    key: Annotated[str, about("What identifies the failed item within its segment.")]
    error: Annotated[str, about("Why it failed.")]
    sample: Annotated[str | None, about("The beginning of the data.")]
    failed_at: Annotated[Instant, about("When it failed.")]
    resolved_at: Annotated[
        Instant | None, about("When it was tried again with success, or its segment was loaded again.")
    ]
    solved_at: Annotated[Instant | None, about("The former name of `resolved_at`.")]

    def masked(self) -> Self:
        """Return the failure without the secrets in data that sources have sent."""
        return attrs.evolve(
            self,
            segment=mask_text(self.segment),
            key=mask_text(self.key),
            error=mask_text(self.error),
            sample=None if self.sample is None else mask_text(self.sample),
        )


@attrs.frozen
class FailurePage:
    """A page of failures, oldest first."""

    failures: Annotated[list[FailureLine], about("The failures.")]
    next: Next
