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

    source: Annotated[str, about("The source's name: the stream and the consumer group, or the queue.")]
    connected: Annotated[bool, about("Whether this process reads it now.")]
    error: Annotated[str | None, about("Why it does not, or why messages wait; null if all is well.")]
    enqueued: Annotated[int, about("Messages of which this process has made jobs since its start.")]
    failed: Annotated[int, about("Tries of messages that failed in this process.")]
    dead: Annotated[int, about("Messages that this process has moved to the dead letters.")]


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
