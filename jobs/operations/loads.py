"""Operations on loads: reading them, their runs and their failures.

A load runs as a job, so a run is started, canceled and retried by the operations on jobs.
"""

from __future__ import annotations

from typing import Annotated, Final
from uuid import UUID

from msgspec import Meta, Struct

from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.load_listings import (
    MAX_LOADS,
    FailurePage,
    LoadNotFound,
    LoadPage,
    LoadRecord,
    RunNotFound,
    RunPage,
    RunTimeline,
)
from dataloader.jobs.model import MAX_NAME, check_text
from dataloader.jobs.operations.fields import AfterPage, Limit, LoadName
from dataloader.jobs.operations.operation import Operation, Operations
from dataloader.jobs.roles import Role

loads: Final = Operations()

AfterFailure = Annotated[AfterPage, Meta(description="`next` of the previous page, or a `failure_id`.")]


@loads.declare("GET", "/runs", role=Role.READ)
class ListRuns(Operation[RunPage], kw_only=True):
    """List runs of loads and flows, newest first."""

    limit: Limit = 50
    after: AfterPage | None = None
    name: Annotated[LoadName, Meta(description="Only runs of this load or flow.")] | None = None


@loads.declare("GET", "/runs/{run_id}/timeline", role=Role.READ, errors=(RunNotFound,))
class ShowTimeline(Operation[RunTimeline]):
    """Show the beginning, end and outcome of each task of a run, and the times of its phases.

    A run's ID is its job's. A run whose job has ended without a recorded outcome shows the job's status. Phases appear
    when the task has ended.
    """

    run_id: UUID
    limit: Limit = MAX_PAGE
    after: AfterPage | None = None


@loads.declare("GET", "/runs/{run_id}/failures", role=Role.READ, errors=(RunNotFound,))
class ListFailuresOfRun(Operation[FailurePage]):
    """List the failures of a run, oldest first."""

    run_id: UUID
    limit: Limit = 100
    after: AfterFailure | None = None


@loads.declare("GET", "/loads", role=Role.READ)
class ListLoads(Operation[LoadPage], kw_only=True):
    """List the loads of this database, by name."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LOADS, description="Maximum number of rows.")] = 50
    after: AfterPage | None = None


class NamedLoad(Struct, forbid_unknown_fields=True):
    """Name of the load of an operation. Raises `BadRequest` for a name that no load can have."""

    load: str

    def __post_init__(self) -> None:
        """Check the name."""
        check_text("load", self.load, MAX_NAME)


@loads.declare("GET", "/loads/{load}", role=Role.READ, errors=(LoadNotFound,))
class ShowLoad(NamedLoad, Operation[LoadRecord]):
    """Show a load's progress, its last run, and the number of unresolved failures (counted up to 1,000)."""


@loads.declare("GET", "/loads/{load}/failures", role=Role.READ, errors=(LoadNotFound,))
class ListFailuresOfLoad(NamedLoad, Operation[FailurePage]):
    """List the failures of a load, in any run, that are not resolved yet, oldest first."""

    limit: Limit = 100
    after: AfterFailure | None = None
