"""Interface of a source of messages that become jobs; flows/messages has the sources."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Protocol

import attrs

from dataloader.jobs.model import Enqueued, NewJob, about

Enqueue = Callable[[Sequence[NewJob]], Awaitable[list[Enqueued]]]
"""Adds jobs, all or none. Raises the errors of `Jobs.enqueue_many`."""


@attrs.frozen
class MessageSourceState:
    """State of a source of messages in this process."""

    source: Annotated[str, about("Name of the source: stream and consumer group, or queue.")]
    connected: Annotated[bool, about("True if this process reads it now.")]
    error: Annotated[str | None, about("Reason why it does not, or why messages wait; null if there is none.")]
    enqueued: Annotated[int, about("Messages that this process has turned into jobs since its start.")]
    failed: Annotated[int, about("Failed tries of messages in this process.")]
    dead: Annotated[int, about("Messages that this process has moved to the dead-letter queue.")]


class MessageReader(Protocol):
    """Reader of a source for one process."""

    @property
    def state(self) -> MessageSourceState:
        """Current state."""

    async def run(self) -> None:
        """Read until the process drains, connecting again after each failure."""


class MessageSource(Protocol):
    """Source as declared by `tasks.messages`."""

    @property
    def name(self) -> str:
        """Name in logs and in `/status`."""

    def reader(self, *, enqueue: Enqueue, consumer: str, draining: Callable[[], bool]) -> MessageReader:
        """Return a reader for the process called `consumer`."""
