"""`Performer`: what performs operations, over the database or through a running service."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Self, TypeVar

from dataloader.jobs.contract import Operator
from dataloader.jobs.model import Enqueued, JobRecord, NewJob
from dataloader.jobs.operations.operation import Operation

R = TypeVar("R")


class Performer(abc.ABC):
    """A way to the system. Both ways raise the same errors.

    `BadRequest` names an invalid field. `StoreUnavailable` says that no answer came: a write may have happened or not.
    `AccessDenied` says that the address, the password or the API token is refused. Each operation declares the others.
    """

    @abc.abstractmethod
    async def perform(self, operation: Operation[R]) -> R:
        """Perform an operation and return its answer."""

    @abc.abstractmethod
    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, all or none; the answers come in their order."""

    @abc.abstractmethod
    async def changed_job(self, job: JobRecord, *, with_queue: bool) -> JobRecord:
        """Wait until the job, which has not ended, differs from `job`, and return it; it may return earlier.

        With `with_queue`, also look every few seconds whether `queue_state` has changed, which notifies nobody.
        """

    @abc.abstractmethod
    def signed(self, operator: Operator) -> Self:
        """Return the same for another operator in the audit. Raises `ConfigError` where the API token names it."""
