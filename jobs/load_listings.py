"""Runs, loads and failures as clients read them.

A run or a task that is stored as `running` although its job does not run shows the status of the job: `queued` if a
worker died and another one will continue, `lost` or `canceled` if none will.
"""

from __future__ import annotations

from typing import Annotated, Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import NotFound
from dataloader.jobs.model import Instant, about
from dataloader.jobs.page_cursor import Next
from dataloader.jobs.secrets.record_masks import FIXED_WORD, SENSITIVE

MAX_LOADS: Final = 200
"""Maximum number of loads of a page: each has its last run and its failures looked up."""
MAX_COUNTED: Final = 1_000
"""Maximum number of failures of a load that are counted: this number means at least this number."""


class RunNotFound(NotFound):
    """Error: no run has this job ID. The job is no load or flow, has not begun, or was deleted."""


class LoadNotFound(NotFound):
    """Error: no load of this name has run in this database, and none waits in a flow."""


@attrs.frozen(kw_only=True)
class RunRecord:
    """Run of a load or a flow, with its status, and the reason if something failed."""

    run_id: Annotated[UUID, about("ID of the run, which is the ID of its job.")]
    name: Annotated[str, about("Name of the load or flow."), SENSITIVE]
    kind: Annotated[str, about("Kind: `load` or `flow`."), FIXED_WORD]
    status: Annotated[str, about("Its status; if the run could not record one, the status of its job."), FIXED_WORD]
    started_at: Annotated[Instant, about("Start time.")]
    finished_at: Annotated[Instant | None, about("End time.")]
    reason: Annotated[str | None, about("Reason of the status: failures and their number."), SENSITIVE]
    counts: Annotated[dict[str, Any], about("Counts by name, such as requests and rows."), SENSITIVE]


@attrs.frozen
class RunPage:
    """A page of runs, newest first."""

    runs: Annotated[list[RunRecord], about("Runs.")]
    next: Next


@attrs.frozen(kw_only=True)
class RunTask:
    """Task of a run, and its results once it has ended.

    `phases` are a load's, with began_at, ended_at and busy_s (seconds, over all workers); `tables` are those of a set
    of dimensions, with status, began_at, ended_at and counts.
    """

    ordinal: Annotated[int, about("Position in the order of registration, from 1.")]
    layer: Annotated[str, about("Layer of the warehouse that it fills."), SENSITIVE]
    task: Annotated[str, about("Name of the load."), SENSITIVE]
    status: Annotated[str, about("Status; `waiting` before it starts."), FIXED_WORD]
    started_at: Annotated[Instant | None, about("Start time.")]
    finished_at: Annotated[Instant | None, about("End time.")]
    phases: Annotated[
        dict[str, Any],
        about("Phases of a load, with began_at, ended_at and busy_s (seconds, over all workers)."),
        SENSITIVE,
    ]
    tables: Annotated[
        dict[str, Any], about("Tables of a set of dimensions, with status, began_at, ended_at and counts."), SENSITIVE
    ]
    reason: Annotated[str | None, about("Reason of the status: failures and their number."), SENSITIVE]
    counts: Annotated[dict[str, Any], about("Counts by name, such as requests and rows."), SENSITIVE]


@attrs.frozen(kw_only=True)
class RunTimeline:
    """Run and its tasks, in the order of their registration."""

    run_id: Annotated[UUID, about("ID of the run, which is the ID of its job.")]
    name: Annotated[str, about("Name of the load or flow."), SENSITIVE]
    kind: Annotated[str, about("Kind: `load` or `flow`."), FIXED_WORD]
    status: Annotated[
        str,
        about(
            "`running`, `waiting` for another run of a load, then `succeeded`, `succeeded_with_failures`, "
            "`failed`, `canceled` or `interrupted`; if the run could not record one, the status of its job."
        ),
        FIXED_WORD,
    ]
    started_at: Annotated[Instant, about("Start time.")]
    finished_at: Annotated[Instant | None, about("End time.")]
    reason: (
        Annotated[str, about("Reason of the status: failures and their number. For a flow, see its tasks."), SENSITIVE]
        | None
    )
    counts: Annotated[dict[str, Any], about("Counts by name, such as requests and rows."), SENSITIVE]
    tasks: Annotated[list[RunTask], about("Tasks, in the order of registration.")]
    next: Next


@attrs.frozen(kw_only=True)
class LastRun:
    """Last run of a load, by itself or in a flow."""

    run_id: Annotated[UUID, about("ID of the run, which is the ID of its job.")]
    status: Annotated[str, about("Status of the run."), FIXED_WORD]
    started_at: Annotated[Instant, about("Start time.")]
    finished_at: Annotated[Instant | None, about("End time.")]
    reason: Annotated[str | None, about("Reason of the status: failures and their number."), SENSITIVE]
    counts: Annotated[dict[str, Any], about("Counts by name, such as requests and rows."), SENSITIVE]


@attrs.frozen(kw_only=True)
class LoadRecord:
    """Progress of a load: all data before `watermark` is in its table. `unresolved` failures, at most `MAX_COUNTED`.

    `upto` and `unsolved` are the former names of the two, for HTTP clients.
    """

    load: Annotated[str, about("Name of the load."), SENSITIVE]
    watermark: Annotated[
        Instant | None, about("Timestamp before which all data is loaded; null for a load without a watermark.")
    ]
    upto: Annotated[Instant | None, about("Former name of `watermark`.")]
    moved_at: Annotated[Instant | None, about("Last change of the watermark.")]
    unresolved: Annotated[int, about("Number of unresolved failures, counted up to 1,000.")]
    unsolved: Annotated[int, about("Former name of `unresolved`.")]
    last_run: Annotated[LastRun | None, about("Last run, alone or in a flow.")]


@attrs.frozen
class LoadPage:
    """A page of loads, by name."""

    loads: Annotated[list[LoadRecord], about("Loads.")]
    next: Next


@attrs.frozen(kw_only=True)
class FailureLine:
    """Failed item, its phase and its error, without the requests that load it again."""

    failure_id: Annotated[int, about("Number of the failure, in ascending order of time.")]
    run_id: Annotated[UUID, about("ID of the run.")]
    load: Annotated[str, about("Name of the load."), SENSITIVE]
    segment: Annotated[str, about("Segment in which it occurred."), SENSITIVE]
    phase: Annotated[str, about("Failed phase: requests, processing, writing, or a record."), FIXED_WORD]
    key: Annotated[str, about("Key of the failed item within its segment."), SENSITIVE]
    error: Annotated[str, about("Error."), SENSITIVE]
    sample: Annotated[str | None, about("Beginning of the data."), SENSITIVE]
    failed_at: Annotated[Instant, about("Time of the failure.")]
    resolved_at: Annotated[
        Instant | None, about("Time of a retry, or of a new load of its segment; see `replaced_by`.")
    ]
    solved_at: Annotated[Instant | None, about("Former name of `resolved_at`.")]
    replaced_by: Annotated[
        int | None, about("Number of the new failure, if the retry or the new load has failed on the same item again.")
    ]


@attrs.frozen
class FailurePage:
    """A page of failures, oldest first."""

    failures: Annotated[list[FailureLine], about("Failures.")]
    next: Next
