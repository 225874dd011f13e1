"""`Schedules`: schedules for programs, commands, pages and HTTP views."""

from __future__ import annotations

from datetime import datetime
from uuid import UUID

import attrs

from dataloader.jobs.client.client_part import ClientPart
from dataloader.jobs.model import Enqueued
from dataloader.jobs.operations import schedules as operations
from dataloader.jobs.page_cursor import After, cursor_text
from dataloader.jobs.schedule_listings import Backfilled, ScheduleEventPage, SchedulePage, ScheduleRecord
from dataloader.jobs.schedules import Schedule


@attrs.frozen
class Schedules(ClientPart):
    """Schedules: `client.schedules` of `open_client`, or `supervisor.schedules`.

    All methods raise `ScheduleNotFound` for an unknown name, `BadRequest` for an invalid value, and `StoreUnavailable`
    if no answer came.
    """

    async def find(self, *, limit: int = 200, after: After = None) -> SchedulePage:
        """Return a page of at most `limit` (1 to 1,000) schedules by name.

        `after` is the `next` of the previous page.
        """
        return await self.performer.perform(operations.ListSchedules(limit=limit, after=cursor_text(after)))

    async def get(self, name: str) -> ScheduleRecord:
        """Return the schedule."""
        return await self.performer.perform(operations.GetSchedule(name))

    async def events(self, name: str, *, limit: int = 100, after: After = None) -> ScheduleEventPage:
        """Return a page of the schedule's events, latest first: at most `limit` (1 to 1,000)."""
        return await self.performer.perform(operations.ListScheduleEvents(name, limit, cursor_text(after)))

    async def next_times(self, name: str, *, number: int = 10) -> list[datetime]:
        """Return its next planned times, at most `number` (1 to 1,000), whether it is paused or not."""
        return (await self.performer.perform(operations.ListNextTimes(name, number))).times

    async def put(self, schedule: Schedule) -> ScheduleRecord:
        """Store a schedule, replacing one with that name. From now on programs do not change it.

        If its times have changed, it is due from now on.
        """
        return await self.performer.perform(operations.PutSchedule.of(schedule))

    async def delete(self, name: str) -> ScheduleRecord:
        """Delete a schedule, and return it as it was; its jobs stay.

        A schedule that programs declare is stored again when the next of them starts.
        """
        return await self.performer.perform(operations.DeleteSchedule(name))

    async def pause(self, name: str) -> ScheduleRecord:
        """Pause a schedule: it adds no jobs. Jobs that it has added continue."""
        return await self.performer.perform(operations.PauseSchedule(name))

    async def resume(self, name: str) -> ScheduleRecord:
        """End the pause of a schedule. Its catch-up policy (`missed`) decides about the times that passed meanwhile.

        The returned record has the next planned time after now.
        """
        return await self.performer.perform(operations.ResumeSchedule(name))

    async def run(self, name: str, *, job_id: UUID | None = None) -> Enqueued:
        """Add a job of the schedule now, in addition to its plan.

        A repeated `job_id` adds no second job. Raises `IdempotencyConflict` if it belongs to another job.
        """
        return await self.performer.perform(operations.RunSchedule(name, job_id))

    async def backfill(
        self,
        name: str,
        begin: datetime,
        end: datetime,
        *,
        again: bool = False,
        dry_run: bool = False,
        backfill_id: UUID | None = None,
    ) -> Backfilled:
        """Add the jobs of its planned times from `begin` to `end` (exclusive), at most 10,000.

        Args:
            name: the schedule's name.
            begin: the first timestamp.
            end: the end, exclusive.
            again: add jobs also for times that have one.
            dry_run: add nothing; return the times only.
            backfill_id: the backfill's ID; a repeated one adds no duplicates.
        """
        wanted = operations.BackfillSchedule(
            name=name, begin=begin, end=end, again=again, dry_run=dry_run, backfill_id=backfill_id
        )
        return await self.performer.perform(wanted)
