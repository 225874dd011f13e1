"""Reads a stream of Redis or Valkey as one consumer of a group, and makes a job of each message.

The order is: read, enqueue, acknowledge. A message that is not acknowledged stays pending at the server; a sweep takes
over those that have been pending for long, from consumers that have died and from this one. So nothing is lost, and by
the idempotency key nothing is added twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import trio

from dataloader.flows.messages.job_maker import JobMaker
from dataloader.jobs.error_groups import single_errors
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.message_source import MessageSourceState

if TYPE_CHECKING:
    from dataloader.flows.messages.messages import Message, Messages

T = TypeVar("T")

BLOCK_S: Final = 1.0
"""How long the server lets a read wait for messages: a drain waits for its end."""
COMMAND_S: Final = 10.0
"""For the answer to a command, what it blocks not counted."""
CONNECT_S: Final = 5.0
LEAVE_S: Final = 2.0


@attrs.define(eq=False, kw_only=True)
class StreamReader:
    """The reader of one source in one process, which is `consumer` in its group."""

    source: Messages
    maker: JobMaker[Message]
    consumer: str
    draining: Callable[[], bool]

    @property
    def state(self) -> MessageSourceState:
        """How it stands now."""
        return self.maker.state

    async def run(self) -> None:
        """Read until the process drains. Raises `ConfigError` if the extra `redis` is not installed."""
        try:
            await self.maker.keep_reading(
                self._connect_and_read, draining=self.draining, is_of_the_server=_is_of_the_server
            )
        finally:
            if self.maker.tell_left():
                # On a connection of its own: the other one ends with the scope that is cancelled.
                with trio.move_on_after(LEAVE_S, shield=True), contextlib.suppress(Exception):
                    async with _connected(self.source.url) as client:
                        await self._leave(client)

    async def _connect_and_read(self) -> None:
        async with _connected(self.source.url) as client:
            await self._join(client)
            self.maker.tell_well()
            await self._read(client)

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
        most = self.source.most_tries
        done, failed = await self.maker.make(message for message in messages if message.tries <= most)
        failed += [
            (message, f"delivered {message.tries - 1} times, and its reader has died each time")
            for message in messages
            if message.tries > most
        ]
        if done:
            ids = [message.message_id for message in done]
            await _asked(client.xack(self.source.stream, self.source.group, ids))
        for message, error in failed:
            await self._fail(client, message, error)

    async def _fail(self, client: Any, message: Message, error: str) -> None:
        source = self.source
        if not self.maker.tell_failed(message, error, source.dead_stream):
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
        self.maker.tell_dead()


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


def _is_of_the_server(error: Exception) -> bool:
    """Whether all that went wrong is between us and the server of the stream, so that a new connection may help."""
    from coredis.exceptions import RedisError  # noqa: PLC0415 - the extra

    return all(
        isinstance(one, (RedisError, OSError, trio.TooSlowError, trio.BrokenResourceError))
        for one in single_errors(error)
    )
