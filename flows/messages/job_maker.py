"""Makes jobs of the messages of one source, for all kinds of sources, and keeps the state of the source.

An error of a message (its `request` raises, or the job is refused) counts as a try of the message. If the database or
the message server cannot be reached, no try is counted: the reader waits and reads no further messages.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import attrs
import trio

from dataloader.jobs.error_groups import single_errors
from dataloader.jobs.errors import BadRequest, DataloaderError, IdempotencyConflict, StoreUnavailable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.logger import get_logger
from dataloader.jobs.message_source import Enqueue, MessageSourceState
from dataloader.jobs.model import NewJob
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import said_by, storable_text

log = get_logger(__name__)

PAUSES_S: Final = (0.2, 30.0)
"""First and longest pause, in seconds, before the next try to connect or to enqueue."""
MAX_ERROR: Final = 2_000


class ReadMessage(Protocol):
    """Properties that the messages of all sources have."""

    @property
    def message_id(self) -> str | None:
        """Return the message's ID, if it has one."""

    @property
    def tries(self) -> int:
        """Return the number of this try, from 1."""


M = TypeVar("M", bound=ReadMessage)
M_contra = TypeVar("M_contra", bound=ReadMessage, contravariant=True)


class SourceDeclaration(Protocol[M_contra]):
    """Properties of a source's declaration that concern its messages."""

    @property
    def name(self) -> str:
        """Return the source's name."""

    @property
    def most_tries(self) -> int:
        """Return the maximum number of tries of a message."""

    @property
    def request(self) -> Callable[[M_contra], NewJob | None]:
        """Return the function that makes the job of a message."""

    def key_of(self, message: M_contra) -> str | None:
        """Return the idempotency key of a message's job; None keeps the key that `request` gave it."""

    def is_known(self, message: M_contra) -> bool:
        """Return whether a job with the message's key must be the message's own."""


@attrs.define(eq=False)
class JobMaker(Generic[M]):
    """Makes the jobs of a source's messages in one process."""

    _source: SourceDeclaration[M]
    _enqueue: Enqueue
    _connected: bool = attrs.field(default=False, init=False)
    _error: str | None = attrs.field(default=None, init=False)
    _enqueued: int = attrs.field(default=0, init=False)
    _failed: int = attrs.field(default=0, init=False)
    _dead: int = attrs.field(default=0, init=False)

    @property
    def state(self) -> MessageSourceState:
        """Return the current state of the source."""
        return MessageSourceState(
            self._source.name, self._connected, self._error, self._enqueued, self._failed, self._dead
        )

    async def keep_reading(
        self,
        read: Callable[[], Awaitable[None]],
        *,
        draining: Callable[[], bool],
        is_of_the_server: Callable[[Exception], bool],
    ) -> None:
        """Read until the process drains. After each error of the server, connect again after a growing pause.

        Args:
            read: connects, calls `tell_well`, and reads until the process drains.
            draining: returns whether the process drains.
            is_of_the_server: returns whether a new connection may resolve an error. Other errors are raised.
        """
        pauses = Pauses(*PAUSES_S)
        while not draining():
            try:
                await read()
            except Exception as error:
                if isinstance(error, DataloaderError) or not is_of_the_server(error):
                    raise
                if self._connected:
                    pauses.reset()
                self._connected = False
                self._tell_trouble("the message source cannot be read", said_masked(error))
                await trio.sleep(pauses.next())

    async def make(self, messages: Iterable[M]) -> tuple[list[M], list[tuple[M, str]]]:
        """Add the jobs of messages. Return the messages to acknowledge, and the failed messages with their errors."""
        done: list[M] = []
        jobs: list[tuple[M, NewJob]] = []
        failed: list[tuple[M, str]] = []
        for message in messages:
            try:
                job = self._job_of(message)
            except Exception as fault:  # noqa: BLE001 - any error of the program's function fails only this message
                failed.append((message, said_masked(fault)))
            else:
                if job is None:
                    done.append(message)
                else:
                    jobs.append((message, job))
        for message, error in await self._add(jobs):
            if error is None:
                done.append(message)
                self._enqueued += 1
            else:
                failed.append((message, error))
        return done, failed

    def _job_of(self, message: M) -> NewJob | None:
        job = self._source.request(message)
        if job is None:
            return None
        if not isinstance(job, NewJob):
            raise TypeError(f"request must return a NewJob (dataloader.new_job) or None, not {type(job).__name__}")
        key = self._source.key_of(message)
        return job if key is None else attrs.evolve(job, idempotency_key=key)

    async def _add(self, jobs: Sequence[tuple[M, NewJob]]) -> list[tuple[M, str | None]]:
        """Add the jobs; wait while the database is unavailable. Return the messages and the errors of refused jobs."""
        if not jobs:
            return []
        pauses = Pauses(*PAUSES_S)
        while True:
            try:
                await self._enqueue([job for _, job in jobs])
            except StoreUnavailable as error:
                self._tell_trouble("messages wait for the database", str(error))
                await trio.sleep(pauses.next())
            except (DataloaderError, ExceptionGroup) as error:
                if len(jobs) > 1:
                    return [answer for one in jobs for answer in await self._add([one])]
                [(message, _)] = jobs
                # The job was added before, by a request that differed slightly.
                is_added = isinstance(error, IdempotencyConflict) and self._source.is_known(message)
                return [(message, None if is_added else said_masked(error))]
            else:
                self.tell_well()
                return [(message, None) for message, _ in jobs]

    def tell_failed(self, message: M, error: str, dead_letters: str) -> bool:
        """Count and log a failed try; return whether it was the last one.

        After the last try, publish the message to the dead letters and then call `tell_dead`.
        """
        self._failed += 1
        is_last = message.tries >= self._source.most_tries
        log.warning(
            "a message failed",
            source=self._source.name,
            message_id=message.message_id,
            attempt=f"{message.tries} of {self._source.most_tries}",
            error=error,
            goes_to=dead_letters if is_last else None,
        )
        return is_last

    def tell_dead(self, messages: int = 1) -> None:
        """Count messages that were published to the dead letters."""
        self._dead += messages

    def _tell_trouble(self, event: str, error: str) -> None:
        if self._error is None:
            log.warning(event, source=self._source.name, error=error)
        self._error = error

    def tell_well(self) -> None:
        """Note that the source is connected and its messages can become jobs."""
        if self._error is not None:
            log.warning("the message source is available again", source=self._source.name)
        self._connected, self._error = True, None

    def tell_left(self) -> bool:
        """Note that reading has ended; return whether the source was connected."""
        was_connected, self._connected = self._connected, False
        return was_connected


def said_masked(error: BaseException) -> str:
    """Return the text of the first error in a group, with secrets masked."""
    first: Any = next(single_errors(error))
    text = str(first) if isinstance(first, BadRequest) else said_by(first)
    return storable_text(mask_text(text), MAX_ERROR)
