"""`Loads`: loads, their runs and their failures, for programs, commands, pages and HTTP views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Unpack
from uuid import UUID

import attrs

from dataloader.jobs.client.client_part import ClientPart
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.load_jobs import retry_of_load, run_of_load
from dataloader.jobs.load_listings import FailurePage, LoadPage, LoadRecord, RunPage, RunTimeline
from dataloader.jobs.model import Enqueued, JobOptions
from dataloader.jobs.operations import loads as operations
from dataloader.jobs.page_cursor import After, cursor_text


@attrs.frozen
class Loads(ClientPart):
    """Loads, their runs and their failures: `client.loads` of `open_client`, or `supervisor.loads`.

    A run is a job, and has the job's ID: `client.jobs` waits for it, cancels it, and resumes it after its end. Reads
    raise `LoadNotFound` for a load that has never run in this database, and `RunNotFound` for an unknown run. All
    methods raise `BadRequest` for an invalid value, and `StoreUnavailable` if no answer came.
    """

    async def find(self, *, limit: int = 50, after: After = None) -> LoadPage:
        """Return a page of at most `limit` (1 to 200) loads by name, after `after`, the previous page's `next`."""
        return await self.performer.perform(operations.ListLoads(limit=limit, after=cursor_text(after)))

    async def get(self, name: str) -> LoadRecord:
        """Return the load: its watermark, its last run, and the number of unresolved failures."""
        return await self.performer.perform(operations.ShowLoad(name))

    async def failures(self, name: str, *, limit: int = 100, after: After = None) -> FailurePage:
        """Return a page of a load's unresolved failures, in any run, oldest first: at most `limit` (1 to 1,000).

        The page begins after `after`: the `next` of the previous page, or a `failure_id`.
        """
        return await self.performer.perform(operations.ListFailuresOfLoad(name, limit, cursor_text(after)))

    async def runs(self, name: str | None = None, *, limit: int = 50, after: After = None) -> RunPage:
        """Return a page of at most `limit` (1 to 1,000) runs, newest first: of one load or flow, or of all."""
        return await self.performer.perform(operations.ListRuns(limit=limit, after=cursor_text(after), name=name))

    async def timeline(self, run_id: UUID, *, limit: int = MAX_PAGE, after: After = None) -> RunTimeline:
        """Return a run and at most `limit` (1 to 1,000) of its tasks, with the outcome and the times of each."""
        return await self.performer.perform(operations.ShowTimeline(run_id, limit, cursor_text(after)))

    async def failures_of_run(self, run_id: UUID, *, limit: int = 100, after: After = None) -> FailurePage:
        """Return a page of a run's failures, also resolved ones, as `failures` does."""
        return await self.performer.perform(operations.ListFailuresOfRun(run_id, limit, cursor_text(after)))

    async def run(
        self,
        name: str,
        *,
        begin: date | str | None = None,
        end: date | str | None = None,
        pipeline: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """Add a job that runs a load: from its watermark to now, or a backfill of a span.

        Args:
            name: the load's name.
            begin: the first day or timestamp of a backfill, also as its ISO text; None means the watermark.
            end: the end, exclusive; None means now.
            pipeline: settings for this run, such as `{"rate_min": 1}`.
            options: those of `Jobs.enqueue`, such as `job_id`; by default the load's own `queue` and `lock_key`.

        Raises the errors of `Jobs.enqueue`.
        """
        [enqueued] = await self.performer.enqueue(
            [run_of_load(name, begin=begin, end=end, pipeline=pipeline, **options)]
        )
        return enqueued

    async def run_flow(
        self,
        name: str,
        *,
        begin: date | str | None = None,
        end: date | str | None = None,
        pipeline: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """Add a job that runs a flow, as `run` does for a load."""
        [enqueued] = await self.performer.enqueue(
            [run_of_load(name, kind="flow", begin=begin, end=end, pipeline=pipeline, **options)]
        )
        return enqueued

    async def retry(
        self,
        name: str,
        failures: Sequence[int] | None = None,
        *,
        pipeline: Mapping[str, Any] | None = None,
        **options: Unpack[JobOptions],
    ) -> Enqueued:
        """Add a job that retries failures of a load, and loads nothing else.

        Args:
            name: the load's name.
            failures: the `failure_id` of up to 1,000 failures; None means all unresolved ones.
            pipeline: settings for this run, such as `{"rate_min": 1}`.
            options: as in `run`.

        Raises the errors of `Jobs.enqueue`.
        """
        [enqueued] = await self.performer.enqueue([retry_of_load(name, failures, pipeline=pipeline, **options)])
        return enqueued
