"""Reads a stream of Redis or Valkey as one consumer of a group, and makes a job of each message.

The order is: read, enqueue, acknowledge. A message that is not acknowledged stays pending at the server; a sweep takes
over those that have been pending for long, from consumers that have died and from this one. So nothing is lost, and by
the idempotency key nothing is added twice.

What fails with a message (its `request` raises, or the queue refuses the job) counts as a try of it. A database or a
Redis that can't be reached is no fault of a message: the reader waits, and takes no further ones meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import trio

from dataloader.jobs.errors import BadRequest, ConfigError, DataloaderError, IdempotencyConflict, StoreUnavailable
from dataloader.jobs.growing_pauses import Pauses
from dataloader.jobs.logger import get_logger
from dataloader.jobs.message_source import Enqueue, MessageSourceState
from dataloader.jobs.model import NewJob
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import storable_text

if TYPE_CHECKING:
    from dataloader.flows.messages.messages import Message, Messages

log = get_logger(__name__)
T = TypeVar("T")

BLOCK_S: Final = 1.0
"""How long the server lets a read wait for messages: a drain waits for its end."""
COMMAND_S: Final = 10.0
"""For the answer to a command, what it blocks not counted."""
CONNECT_S: Final = 5.0
LEAVE_S: Final = 2.0
PAUSES_S: Final = (0.2, 30.0)
"""Before the first and the last try to connect again, or to enqueue."""
MAX_ERROR: Final = 2_000


@attrs.define(eq=False, kw_only=True)
class StreamReader:
    """The reader of one source in one process, which is `consumer` in its group."""

    source: Messages
    enqueue: Enqueue
    consumer: str
    draining: Callable[[], bool]
    _connected: bool = attrs.field(default=False, init=False)
    _error: str | None = attrs.field(default=None, init=False)
    _enqueued: int = attrs.field(default=0, init=False)
    _failed: int = attrs.field(default=0, init=False)
    _dead: int = attrs.field(default=0, init=False)

    @property
    def state(self) -> MessageSourceState:
        """How it stands now."""
        return MessageSourceState(
            self.source.name, self._connected, self._error, self._enqueued, self._failed, self._dead
        )

    async def run(self) -> None:
        """Read until the process drains. Raises `ConfigError` if the extra `redis` is not installed."""
        pauses = Pauses(*PAUSES_S)
        try:
            while not self.draining():
                try:
                    async with _connected(self.source.url) as client:
                        await self._join(client)
                        self._tell_well()
                        pauses.reset()
                        await self._read(client)
                except Exception as error:
                    if not _is_of_the_server(error):
                        raise
                    self._connected = False
                    self._tell_trouble("the stream can't be read", _said(error))
                    await trio.sleep(pauses.next())
        finally:
            was_connected, self._connected = self._connected, False
            if was_connected:
                # On a connection of its own: the other one ends with the scope that is cancelled.
                with trio.move_on_after(LEAVE_S, shield=True), contextlib.suppress(Exception):
                    async with _connected(self.source.url) as client:
                        await self._leave(client)

    async def _read(self, client: Any) -> None:
        source = self.source
        sweep_at = trio.current_time()
        while not self.draining():
            if trio.current_time() >= sweep_at:
                await self._sweep(client)
                sweep_at = trio.current_time() + source.again_after_s / 2
            block_s = max(0.001, min(BLOCK_S, sweep_at - trio.current_time()))
            answer: Any = await _asked(
                client.xreadgroup(
                    source.group,
                    self.consumer,
                    {source.stream: ">"},
                    count=source.batch,
                    block=max(1, int(block_s * 1000)),
                )
            )
            for entries in (answer or {}).values():
                await self._handle(client, [source.message(e.identifier, e.field_values, 1) for e in entries])

    async def _join(self, client: Any) -> None:
        from coredis.exceptions import StreamDuplicateConsumerGroupError  # noqa: PLC0415 - the extra

        with contextlib.suppress(StreamDuplicateConsumerGroupError):
            await _asked(client.xgroup_create(self.source.stream, self.source.group, identifier="0", mkstream=True))

    async def _leave(self, client: Any) -> None:
        """Take our name from the group, unless messages are pending for it: they would be lost with it."""
        source = self.source
        pending = await client.xpending(
            source.stream, source.group, start="-", end="+", count=1, consumer=self.consumer
        )
        if not pending:
            await client.xgroup_delconsumer(source.stream, source.group, self.consumer)

    async def _sweep(self, client: Any) -> None:
        """Take over what has been pending for long, whoever had it."""
        source, cursor = self.source, b"0-0"
        idle_ms = max(1, int(source.again_after_s * 1000))
        while not self.draining():
            cursor, entries, *_ = await _asked(
                client.xautoclaim(source.stream, source.group, self.consumer, idle_ms, cursor, count=source.batch)
            )
            if entries:
                tries = await self._deliveries(client, entries)
                await self._handle(
                    client, [source.message(e.identifier, e.field_values, tries.get(e.identifier, 1)) for e in entries]
                )
            if cursor == b"0-0":
                return

    async def _deliveries(self, client: Any, entries: Sequence[Any]) -> Mapping[bytes, int]:
        """How often each of the messages that are ours now was delivered."""
        found: dict[bytes, int] = {}
        start = entries[0].identifier
        while True:
            pending = await _asked(
                client.xpending(
                    self.source.stream,
                    self.source.group,
                    start=start,
                    end=entries[-1].identifier,
                    count=self.source.batch,
                    consumer=self.consumer,
                )
            )
            found |= {one.identifier: one.delivered for one in pending}
            if len(pending) < self.source.batch:
                return found
            start = b"(" + pending[-1].identifier

    async def _handle(self, client: Any, messages: Sequence[Message]) -> None:
        """Make jobs of the messages, and acknowledge those that need no further try."""
        done: list[Message] = []
        jobs: list[tuple[Message, NewJob]] = []
        failed: list[tuple[Message, str]] = []
        for message in messages:
            try:
                job = self._job_of(message)
            except Exception as fault:  # noqa: BLE001 - whatever the program's function raises fails this message alone
                failed.append((message, _said(fault)))
            else:
                if job is None:
                    done.append(message)
                else:
                    jobs.append((message, job))
        refused = await self._add(jobs)
        failed += refused
        bad = {message.message_id for message, _ in refused}
        added = [message for message, _ in jobs if message.message_id not in bad]
        self._enqueued += len(added)
        done += added
        if done:
            ids = [message.message_id for message in done]
            await _asked(client.xack(self.source.stream, self.source.group, ids))
        for message, error in failed:
            await self._fail(client, message, error)

    def _job_of(self, message: Message) -> NewJob | None:
        if message.tries > self.source.most_tries:
            raise RuntimeError(f"delivered {message.tries - 1} times, and its reader has died each time")
        job = self.source.request(message)
        if job is None:
            return None
        if not isinstance(job, NewJob):
            raise TypeError(f"request must return a NewJob (dataloader.new_job) or None, not {type(job).__name__}")
        return attrs.evolve(job, idempotency_key=self.source.key_of(message))

    async def _add(self, jobs: Sequence[tuple[Message, NewJob]]) -> list[tuple[Message, str]]:
        """Add the jobs, however long the database is away; those that the queue refuses come back."""
        if not jobs:
            return []
        pauses = Pauses(*PAUSES_S)
        while True:
            try:
                await self.enqueue([job for _, job in jobs])
            except StoreUnavailable as error:
                self._tell_trouble("messages wait for the database", str(error))
                await trio.sleep(pauses.next())
            except (DataloaderError, ExceptionGroup) as error:
                if len(jobs) > 1:
                    return [refused for one in jobs for refused in await self._add([one])]
                # The key is this message's alone: its job was added, by a request that was not quite the same.
                return [] if isinstance(error, IdempotencyConflict) else [(jobs[0][0], _said(error))]
            else:
                self._tell_well()
                return []

    async def _fail(self, client: Any, message: Message, error: str) -> None:
        source = self.source
        self._failed += 1
        is_last = message.tries >= source.most_tries
        log.warning(
            "a message failed",
            source=source.name,
            message_id=message.message_id,
            attempt=f"{message.tries} of {source.most_tries}",
            error=error,
            goes_to=source.dead_stream if is_last else None,
        )
        if not is_last:
            return
        letter = {
            **message.fields,
            "dl_stream": source.stream,
            "dl_message_id": message.message_id,
            "dl_tries": str(message.tries),
            "dl_error": error,
        }
        with trio.fail_after(COMMAND_S):
            async with client.pipeline(transaction=True) as pipeline:
                pipeline.xadd(source.dead_stream, letter)
                pipeline.xack(source.stream, source.group, [message.message_id])
        self._dead += 1

    def _tell_trouble(self, event: str, error: str) -> None:
        if self._error is None:
            log.warning(event, source=self.source.name, error=error)
        self._error = error

    def _tell_well(self) -> None:
        if self._error is not None:
            log.warning("the source is read again", source=self.source.name)
        self._connected, self._error = True, None


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Any]:
    try:
        from coredis import Redis  # noqa: PLC0415 - the extra
        from coredis.retry import NoRetryPolicy  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ConfigError("messages of Redis need the extra redis: install dataloader-supervisor[redis]") from error
    client: Any = Redis.from_url(
        url, connect_timeout=CONNECT_S, stream_timeout=BLOCK_S + COMMAND_S, retry_policy=NoRetryPolicy()
    )
    async with client:
        yield client


async def _asked(command: Awaitable[T]) -> T:
    with trio.fail_after(BLOCK_S + COMMAND_S):
        return await command


def _errors(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [one for member in error.exceptions for one in _errors(member)]
    return [error]


def _is_of_the_server(error: Exception) -> bool:
    """Whether all that went wrong is between us and the server of the stream, so that a new connection may help."""
    from coredis.exceptions import RedisError  # noqa: PLC0415 - the extra

    return all(
        isinstance(one, (RedisError, OSError, trio.TooSlowError, trio.BrokenResourceError)) for one in _errors(error)
    )


def _said(error: BaseException) -> str:
    first = _errors(error)[0]
    text = str(first) if isinstance(first, BadRequest) else f"{type(first).__name__}: {first}"
    return storable_text(mask_text(text), MAX_ERROR)
