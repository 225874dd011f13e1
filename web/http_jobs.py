"""`Jobs` through a running service, by its HTTP API: on asyncio as well as on Trio, and without a database's driver.

What a service shows has no secrets: in names, args, results and errors they are masked. It adds at most 1,000 jobs at
once, and none whose body is longer than its settings allow (`BadRequest`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import quote
from uuid import UUID

import anyio
import attrs
import msgspec

from dataloader.jobs.contract import Change, Jobs, check_id, told_of_changes
from dataloader.jobs.duplicates import DuplicateGroup, DuplicateGroups
from dataloader.jobs.failures import (
    ErrorGroupNotFound,
    ErrorGroupPage,
    ErrorPage,
    FailureState,
    GroupRetried,
    GroupRetry,
)
from dataloader.jobs.listings import (
    EVERY_JOB,
    MAX_PAGE,
    AuditPage,
    EventPage,
    JobFilter,
    JobPage,
    Level,
    LogPage,
    QueuePage,
    WorkerPage,
)
from dataloader.jobs.model import MAX_ARGS_BYTES, Enqueued, JobRecord, NewJob, QueueRecord, WorkerRecord
from dataloader.jobs.page_cursor import After
from dataloader.jobs.run_stats import RunStatsPage, StatsFilter
from dataloader.jobs.states import Status
from dataloader.jobs.text import exact_json
from dataloader.jobs.wait_reasons import WaitReason
from dataloader.web.service_connection import ANSWER_S, ServiceBusy, ServiceConnection, open_service

LONG_POLL_S: Final = 25.0
"""Seconds that the service may hold a question for a change: below what proxies cut off."""
QUEUED_POLL_S: Final = 5.0
"""The same for a queued job: how its queue stands is no change of the job that the service would tell."""


@attrs.frozen
class HttpJobs(Jobs):
    """The queue, by a service that serves it."""

    service: ServiceConnection

    async def enqueue_many(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """As in `Jobs`; at most 1,000 jobs."""
        if not jobs:
            return []
        requests = [
            _request(job, f"jobs[{number}].args" if len(jobs) > 1 else "args") for number, job in enumerate(jobs)
        ]
        if len(requests) == 1:
            return [await self.service.ask(Enqueued, "POST", "/jobs/trigger", body=requests[0])]
        body = {"jobs": requests}
        return (await self.service.ask(_Triggered, "POST", "/jobs/trigger/batch", body=body)).jobs

    async def get(self, job_id: UUID) -> JobRecord:
        """As in `Jobs`."""
        check_id(job_id)
        return await self.service.ask(JobRecord, "GET", f"/jobs/{job_id}")

    async def why(self, job_id: UUID) -> WaitReason:
        """As in `Jobs`."""
        check_id(job_id)
        return await self.service.ask(WaitReason, "GET", f"/jobs/{job_id}/why")

    async def find(self, wanted: JobFilter = EVERY_JOB, *, limit: int = 50, after: After = None) -> JobPage:
        """As in `Jobs`."""
        page = {"limit": limit, "after": after}
        return await self.service.ask(JobPage, "GET", "/jobs", params=_criteria(wanted) | page)

    async def events(self, job_id: UUID, *, limit: int = 200, after: After = None) -> EventPage:
        """As in `Jobs`."""
        check_id(job_id)
        return await self.service.ask(
            EventPage, "GET", f"/jobs/{job_id}/events", params={"limit": limit, "after": after}
        )

    async def logs(
        self,
        job_id: UUID,
        *,
        limit: int = 200,
        after: After = None,
        level: Level | None = None,
        load: str | None = None,
    ) -> LogPage:
        """As in `Jobs`."""
        check_id(job_id)
        wanted = {"limit": limit, "after": after, "level": level, "load": load}
        return await self.service.ask(LogPage, "GET", f"/jobs/{job_id}/logs", params=wanted)

    async def wait(self, job_id: UUID, *, on_change: Callable[[JobRecord], object] | None = None) -> JobRecord:
        """As in `Jobs`. Where the service has too many who wait, the job is looked at every few seconds."""
        tell = told_of_changes(on_change)
        while True:
            job = await self.get(job_id)
            tell(job)
            if job.status.is_final:
                return job
            looks_at_queue = on_change is not None and job.status is Status.QUEUED
            hold_s = QUEUED_POLL_S if looks_at_queue else LONG_POLL_S
            try:
                await self.service.ask(
                    dict, "GET", f"/jobs/{job_id}/status", params={"wait": hold_s}, timeout_s=hold_s + ANSWER_S
                )
            except ServiceBusy as busy:
                await anyio.sleep(busy.again_s)

    async def error_groups(
        self,
        *,
        task: str | None = None,
        state: FailureState | None = None,
        exact: bool = False,
        limit: int = 50,
        after: After = None,
    ) -> ErrorGroupPage:
        """As in `Jobs`."""
        wanted = {"task": task, "state": state, "exact": str(exact).lower(), "limit": limit, "after": after}
        return await self.service.ask(ErrorGroupPage, "GET", "/errors", params=wanted)

    async def duplicates(
        self, *, task: str | None = None, queue: str | None = None, limit: int = 50
    ) -> list[DuplicateGroup]:
        """As in `Jobs`."""
        wanted = {"task": task, "queue": queue, "limit": limit}
        return (await self.service.ask(DuplicateGroups, "GET", "/duplicates", params=wanted)).groups

    async def cancel_duplicates(self, task: str, *, queue: str | None = None, limit: int = 1_000) -> int:
        """As in `Jobs`."""
        body = {"task": task, "queue": queue, "limit": limit}
        return (await self.service.ask(_Changed, "POST", "/duplicates/cancel", body=body)).changed

    async def errors(
        self,
        *,
        task: str | None = None,
        queue: str | None = None,
        group: str | None = None,
        job_id: UUID | None = None,
        limit: int = 100,
        after: After = None,
    ) -> ErrorPage:
        """As in `Jobs`."""
        wanted = {"task": task, "queue": queue, "group": group, "job_id": job_id, "limit": limit, "after": after}
        return await self.service.ask(ErrorPage, "GET", "/errors/log", params=wanted)

    async def queues(self) -> list[QueueRecord]:
        """As in `Jobs`."""
        found: list[QueueRecord] = []
        after: After = None
        while True:
            page = await self.service.ask(QueuePage, "GET", "/queues", params={"limit": MAX_PAGE, "after": after})
            found += page.queues
            after = page.next
            if after is None:
                return found

    async def pause(self, queue: str) -> None:
        """As in `Jobs`."""
        await self.service.ask(dict, "POST", f"/queues/{quote(queue, safe='')}/pause")

    async def resume(self, queue: str) -> None:
        """As in `Jobs`."""
        await self.service.ask(dict, "POST", f"/queues/{quote(queue, safe='')}/resume")

    async def workers(self) -> list[WorkerRecord]:
        """As in `Jobs`."""
        found: list[WorkerRecord] = []
        after: After = None
        while True:
            page = await self.service.ask(WorkerPage, "GET", "/workers", params={"limit": MAX_PAGE, "after": after})
            found += page.workers
            after = page.next
            if after is None:
                return found

    async def audit(self, *, limit: int = 100, after: After = None) -> AuditPage:
        """As in `Jobs`."""
        return await self.service.ask(AuditPage, "GET", "/audit", params={"limit": limit, "after": after})

    async def stats(self, wanted: StatsFilter, *, limit: int = 1_000, after: After = None) -> RunStatsPage:
        """As in `Jobs`."""
        asked = {"from": wanted.begin, "to": wanted.end, "queue": wanted.queue, "task": wanted.task, "by": wanted.by}
        params = msgspec.to_builtins(asked) | {"limit": limit, "after": after}
        return await self.service.ask(RunStatsPage, "GET", "/stats", params=params)

    async def _change(self, change: Change, job_id: UUID) -> JobRecord:
        path = f"/jobs/{job_id}"
        match change.action:
            case "set_priority":
                return await self.service.ask(JobRecord, "PATCH", path, body={"priority": change.priority})
            case "retry":
                await self.service.ask(dict, "POST", f"{path}/retry", params={"force": "true"} if change.force else {})
            case action:
                await self.service.ask(dict, "POST", f"{path}/{_ADDRESSES[action]}")
        return await self.get(job_id)

    async def _change_many(self, change: Change, wanted: JobFilter, limit: int) -> int:
        body = _criteria(wanted) | {"limit": limit}
        if change.action == "set_priority":
            body["priority"] = change.priority
        return (await self.service.ask(_Changed, "POST", f"/jobs/{_ADDRESSES[change.action]}", body=body)).changed

    async def retry_some_of_group(self, wanted: GroupRetry, *, limit: int, after: After = None) -> GroupRetried:
        """As in `Jobs`."""
        body = attrs.asdict(wanted) | {"limit": limit, "after": after}
        path = f"/errors/{quote(body.pop('group'), safe='')}/retry"
        return await self.service.ask(GroupRetried, "POST", path, body=body, missing=ErrorGroupNotFound)


_ADDRESSES: Final = {"cancel": "cancel", "retry": "retry", "run_now": "run-now", "set_priority": "reprioritize"}


class _Triggered(msgspec.Struct):
    jobs: list[Enqueued]


class _Changed(msgspec.Struct):
    changed: int


def _request(job: NewJob, field: str) -> dict[str, Any]:
    """The job as the API takes it; `field` is the path of its arguments."""
    given = {name: value for name, value in attrs.asdict(job, recurse=False).items() if value not in (None, "", {})}
    args = msgspec.Raw(exact_json(field, job.args, MAX_ARGS_BYTES).encode())
    if job.after is None:
        del given["when_failed"]
    return {"lock_key": None} | given | {"args": args}


def _criteria(wanted: JobFilter) -> dict[str, Any]:
    """The filter as the API takes it, in a query and in a body."""
    return msgspec.to_builtins(wanted.criteria())  # type: ignore[no-any-return]


@asynccontextmanager
async def open_http_jobs(url: str, token: str | None = None) -> AsyncIterator[HttpJobs]:
    """The queue of the service at `url` for the length of a block. Raises `ConfigError` for another kind of address."""
    async with open_service(url, token) as service:
        yield HttpJobs(service)
