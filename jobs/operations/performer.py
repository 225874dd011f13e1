"""`Performer`: performs operations, over the database or through a running service."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Self, TypeVar

from dataloader.jobs.contract import Operator
from dataloader.jobs.model import Enqueued, JobRecord, NewJob
from dataloader.jobs.operations.operation import Operation
from dataloader.jobs.process_listings import ProcessAnswer, ProcessRecord
from dataloader.jobs.process_requests import ProcessImport, ProcessRequest, ProcessStarted

R = TypeVar("R")


class Performer(abc.ABC):
    """Performer of operations, with the same errors over the database and through a service.

    `BadRequest` names an invalid field. `StoreUnavailable` means that no answer came: a write may or may not have
    happened. `AccessDenied` means that the address, the password or the API token is refused. Each operation declares
    its other errors.
    """

    @abc.abstractmethod
    async def perform(self, operation: Operation[R]) -> R:
        """Perform an operation and return its answer."""

    @abc.abstractmethod
    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, all or none; the answers are in their order."""

    @abc.abstractmethod
    async def changed_job(self, job: JobRecord, *, with_queue: bool) -> JobRecord:
        """Wait until the job, which has not ended, differs from `job`, and return it. It may return earlier.

        With `with_queue`, also check every few seconds if `queue_state` has changed, for which there is no
        notification.
        """

    @abc.abstractmethod
    async def ask(self, request: ProcessRequest, *, wait_s: float, withdraw: bool) -> ProcessAnswer:
        """Send a request to a process, and return its answer, or the task's status after `wait_s` seconds.

        With `withdraw`, withdraw a call that has not begun by then, or whose caller is cancelled.
        """

    @abc.abstractmethod
    async def start_many(self, requests: Sequence[ProcessRequest]) -> list[ProcessStarted]:
        """Start processes, all in one transaction; the answers come in their order."""

    @abc.abstractmethod
    async def put(self, process: ProcessImport) -> ProcessRecord:
        """Import a process of another system."""

    @abc.abstractmethod
    def signed(self, operator: Operator) -> Self:
        """Return the same performer for another operator in the audit log.

        Raises `ConfigError` if the API token names the operator.
        """
