"""Reads a stream of Redis or Valkey as one consumer of a group, and makes a job of each message.

The order is: read, enqueue, acknowledge. An unacknowledged message stays pending at the server. A sweep claims messages
that have been pending for too long, from dead consumers and from this one. So no message is lost, and because of the
idempotency key none adds two jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import attrs
import msgspec
import trio

from dataloader.flows.messages import source_options
from dataloader.flows.messages.job_maker import JobMaker
from dataloader.jobs.error_groups import single_errors
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.message_source import Enqueue, MessageSourceState
from dataloader.jobs.model import NewJob

T = TypeVar("T")

BLOCK_S: Final = 1.0
"""Seconds that a read waits for messages at the server. A drain waits for its end."""
COMMAND_S: Final = 10.0
"""Seconds for the answer to a command, in addition to the time that the command blocks."""
CONNECT_S: Final = 5.0
LEAVE_S: Final = 2.0


MAX_TRIES: Final = 1_000
MAX_BATCH: Final = 1_000
MAX_AGAIN_S: Final = 86_400


@attrs.frozen(kw_only=True)
class Message:
    """Message of a stream: its ID, and its fields as bytes. `tries` is the number of this delivery, from 1."""

    stream: str
    message_id: str
    fields: Mapping[str, bytes]
    tries: int = 1

    def text(self, field: str) -> str:
        """Return a field as text. Raises `KeyError` if it is missing, `UnicodeDecodeError` if it is not UTF-8."""
        return self.fields[field].decode()

    def json(self, field: str) -> Any:
        """Decode a field from JSON. Raises `KeyError` if it is missing, `msgspec.DecodeError` if it is not JSON."""
        return msgspec.json.decode(self.fields[field])


@attrs.frozen
class Messages:
    """Stream of Redis or Valkey whose messages become jobs, read by a consumer group.

    A message is acknowledged when its job is committed. Its ID is the job's idempotency key, so a repeated message adds
    no second job.

    Args:
        url: URL of the server, `redis://user:password@host:6379/0`, or `rediss://` for TLS.
        stream: name of the stream, which may not exist yet.
        request: function that makes the job of a message, without blocking. If it returns None, the message is
            acknowledged without a job. If it raises an error, this try fails.
        group: name of the consumer group. If it does not exist, it is created and begins with the first message.
        dead_letters: stream for messages whose tries have all failed, by default the stream's name with `:dead`.
        most_tries: maximum number of tries of a message, 1 to 1,000.
        again_after_s: seconds until an unacknowledged message, whose try failed or whose reader died, is delivered
            again, to this or another process. At most 86,400.
        batch: maximum number of messages in one read, 1 to 1,000.

    Raises `BadRequest`, a `ValueError`, for invalid values.
    """

    url: str = attrs.field(validator=source_options.url_of("redis", "rediss"), repr=False)
    stream: str = attrs.field(validator=source_options.name)
    request: Callable[[Message], NewJob | None]
    group: str = attrs.field(default="dataloader", kw_only=True, validator=source_options.name)
    dead_letters: str | None = attrs.field(default=None, kw_only=True, validator=source_options.name_or_none)
    most_tries: int = attrs.field(default=5, kw_only=True, validator=source_options.whole_between(1, MAX_TRIES))
    again_after_s: float = attrs.field(default=30.0, kw_only=True, validator=source_options.between(0.01, MAX_AGAIN_S))
    batch: int = attrs.field(default=100, kw_only=True, validator=source_options.whole_between(1, MAX_BATCH))

    @property
    def name(self) -> str:
        """Return the names of the stream and the group."""
        return f"{self.stream}:{self.group}"

    @property
    def dead_stream(self) -> str:
        """Return the stream for messages whose tries have all failed."""
        return self.dead_letters or f"{self.stream}:dead"

    def message(self, message_id: bytes, fields: Mapping[bytes, bytes], tries: int) -> Message:
        """Make a message from an entry of the stream."""
        named = {name.decode("utf-8", "backslashreplace"): value for name, value in fields.items()}
        return Message(stream=self.stream, message_id=message_id.decode(), fields=named, tries=tries)

    def key_of(self, message: Message) -> str:
        """Return the idempotency key of a message's job. It has the stream's name, because streams may share IDs."""
        return f"message:{self.stream}:{self.group}:{message.message_id}"

    def is_known(self, _message: Message) -> bool:
        """Return True: the server makes the IDs, so a job with the message's key was made from this message."""
        return True

    def reader(self, *, enqueue: Enqueue, consumer: str, draining: Callable[[], bool]) -> StreamReader:
        """Return a reader for one process, whose name in the group is `consumer`."""
        return StreamReader(source=self, maker=JobMaker(self, enqueue), consumer=consumer, draining=draining)


@attrs.define(eq=False, kw_only=True)
class StreamReader:
    """Reader of one stream in one process. `consumer` is its name in the group."""

    source: Messages
    maker: JobMaker[Message]
    consumer: str
    draining: Callable[[], bool]

    @property
    def state(self) -> MessageSourceState:
        """Return the current state of the source."""
        return self.maker.state

    async def run(self) -> None:
        """Read until the process drains. Raises `ConfigError` if the extra `redis` is not installed."""
        try:
            await self.maker.keep_reading(
                self._connect_and_read, draining=self.draining, is_of_the_server=_is_redis_failure
            )
        finally:
            if self.maker.tell_left():
                # On a separate connection: the other one ends with the canceled scope.
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
        from coredis.exceptions import StreamDuplicateConsumerGroupError  # noqa: PLC0415 - an optional extra

        with contextlib.suppress(StreamDuplicateConsumerGroupError):
            await _asked(client.xgroup_create(self.source.stream, self.source.group, identifier="0", mkstream=True))

    async def _leave(self, client: Any) -> None:
        """Remove our consumer from the group, unless it has pending messages, which would be lost with it."""
        source = self.source
        pending = await client.xpending(
            source.stream, source.group, start="-", end="+", count=1, consumer=self.consumer
        )
        if not pending:
            await client.xgroup_delconsumer(source.stream, source.group, self.consumer)

    async def _sweep(self, client: Any) -> None:
        """Claim messages that have been pending for `again_after_s`, from any consumer."""
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
        """Return the number of deliveries of each of the claimed messages."""
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
            (message, f"delivered {message.tries - 1} times; each time, its reader ended")
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
        from coredis import Redis  # noqa: PLC0415 - an optional extra
        from coredis.retry import NoRetryPolicy  # noqa: PLC0415 - as above
    except ImportError as error:
        raise ConfigError(
            "messages of Redis need the extra redis: pip install 'dataloader-supervisor[redis]'"
        ) from error
    client: Any = Redis.from_url(
        url, connect_timeout=CONNECT_S, stream_timeout=BLOCK_S + COMMAND_S, retry_policy=NoRetryPolicy()
    )
    async with client:
        yield client


async def _asked(command: Awaitable[T]) -> T:
    with trio.fail_after(BLOCK_S + COMMAND_S):
        return await command


def _is_redis_failure(error: Exception) -> bool:
    """Return whether all errors concern the connection to the server, so that a new connection may resolve them."""
    from coredis.exceptions import RedisError  # noqa: PLC0415 - an optional extra

    return all(
        isinstance(one, (RedisError, OSError, trio.TooSlowError, trio.BrokenResourceError))
        for one in single_errors(error)
    )
