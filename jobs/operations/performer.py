"""`Performer`: performs operations, over the database or through a running service."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Self, TypeVar

from dataloader.jobs.contract import Operator
from dataloader.jobs.model import Enqueued, JobRecord, NewJob
from dataloader.jobs.operations.operation import Operation

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
    def signed(self, operator: Operator) -> Self:
        """Return the same performer for another operator in the audit log.

        Raises `ConfigError` if the API token names the operator.
        """
