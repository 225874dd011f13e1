"""`Performer` over the database."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import attrs

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import Draining
from dataloader.jobs.model import Enqueued, JobRecord, NewJob
from dataloader.jobs.operations.operation import Operation
from dataloader.jobs.operations.performer import Performer
from dataloader.jobs.process_listings import ProcessAnswer, ProcessRecord
from dataloader.jobs.process_requests import ProcessImport, ProcessRequest, ProcessStarted
from dataloader.store.etl import load_operations as load_operations  # noqa: PLC0414 - it registers implementations
from dataloader.store.implementations import IMPLEMENTATIONS, Store
from dataloader.store.limits import limit_operations as limit_operations  # noqa: PLC0414 - the same
from dataloader.store.processes import process_operations as process_operations  # noqa: PLC0414 - the same
from dataloader.store.processes import sending
from dataloader.store.processes.operations import aio_import
from dataloader.store.queue import bulk_operations as bulk_operations  # noqa: PLC0414 - the same
from dataloader.store.queue import job_operations as job_operations  # noqa: PLC0414 - the same
from dataloader.store.queue.queue_states import ServedQueues
from dataloader.store.queue.waits import Waits
from dataloader.store.schedules import schedule_operations as schedule_operations  # noqa: PLC0414 - the same

R = TypeVar("R")

STATE_S: Final = 5.0
"""Seconds between two reads of a queued job for its `queue_state`, whose changes send no notification."""


@attrs.frozen(kw_only=True)
class DatabasePerformer(Store, Performer):
    """Performer of operations on the tables, on Trio. While `draining` returns True, no new jobs are accepted."""

    served: ServedQueues
    waits: Waits
    draining: Callable[[], bool] = lambda: False

    def signed(self, operator: Operator) -> DatabasePerformer:
        """Return the same for another operator."""
        return attrs.evolve(self, operator=operator)

    async def perform(self, operation: Operation[R]) -> R:
        """Perform an operation, as `Performer.perform` describes."""
        declaration = operation.declaration
        declaration.check(operation)
        if Draining in declaration.errors:
            self._check_open()
        answer: R = await IMPLEMENTATIONS[type(operation)](self, operation)
        return answer

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, as `Performer.enqueue` describes.

        A cancellation takes effect only before the jobs are added; adding them takes at most 12 s.
        """
        self._check_open()
        return await self.served.enqueue(self.enqueuer, jobs)

    async def changed_job(self, job: JobRecord, *, with_queue: bool) -> JobRecord:
        """Wait as `Performer.changed_job` describes."""
        return await self.waits.wait(job.job_id, timeout_s=STATE_S if with_queue else math.inf, seen=job)

    async def ask(self, request: ProcessRequest, *, wait_s: float, withdraw: bool) -> ProcessAnswer:
        """Send a request, as `Performer.ask` describes."""
        self._check_open("requests")
        return await sending.send_and_wait(self, request, wait_s=wait_s, withdraw=withdraw)

    async def start_many(self, requests: Sequence[ProcessRequest]) -> list[ProcessStarted]:
        """Start processes, as `Performer.start_many` describes."""
        self._check_open("requests")
        return await sending.send_starts(self, requests)

    async def put(self, process: ProcessImport) -> ProcessRecord:
        """Import a process, as `Performer.put` describes."""
        self._check_open("requests")
        return await self.database.write(aio_import, process, self.operator, self.enqueuer.default_lease_s)

    def _check_open(self, refused: str = "jobs") -> None:
        if self.draining():
            raise Draining(f"this process is shutting down and takes no new {refused}")
