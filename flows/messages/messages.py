"""The declaration of a stream whose messages become jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import attrs
import msgspec

from dataloader.flows.messages import source_options
from dataloader.flows.messages.job_maker import JobMaker
from dataloader.flows.messages.stream_reader import StreamReader
from dataloader.jobs.message_source import Enqueue
from dataloader.jobs.model import NewJob

MAX_TRIES: Final = 1_000
MAX_BATCH: Final = 1_000
MAX_AGAIN_S: Final = 86_400


@attrs.frozen(kw_only=True)
class Message:
    """A message of a stream: its id, and its fields as bytes. `tries` is the number of this delivery, from 1."""

    stream: str
    message_id: str
    fields: Mapping[str, bytes]
    tries: int = 1

    def text(self, field: str) -> str:
        """A field as text. Raises `KeyError` if there is none, `UnicodeDecodeError` if it is no UTF-8."""
        return self.fields[field].decode()

    def json(self, field: str) -> Any:
        """A field that is JSON. Raises `KeyError` if there is none, `msgspec.DecodeError` if it is no JSON."""
        return msgspec.json.decode(self.fields[field])


@attrs.frozen
class Messages:
    """A stream of Redis or Valkey, read as one of a consumer group; each message becomes a job.

    A message is acknowledged when its job is committed. Its id is the job's idempotency key, so that a message that
    comes again adds no second job.

    Args:
        url: the server, `redis://user:password@host:6379/0`, or `rediss://` for TLS.
        stream: the stream's name. It need not exist yet.
        request: makes the job of a message, quickly and without waiting; None acknowledges the message without a job.
            What it raises fails this try.
        group: the consumer group, which is made if it does not exist, and then begins with the first message.
        dead_letters: the stream for messages whose tries have all failed; None is the stream's name with `:dead`.
        most_tries: tries of one message.
        again_after_s: after so many seconds a message that is not acknowledged is delivered again, here or elsewhere:
            its try has failed, or its reader has died.
        batch: messages that are read at once.

    Raises `BadRequest`, a `ValueError`, for values that are not allowed.
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
        """The stream and the group."""
        return f"{self.stream}:{self.group}"

    @property
    def dead_stream(self) -> str:
        """Where messages go whose tries have all failed."""
        return self.dead_letters or f"{self.stream}:dead"

    def message(self, message_id: bytes, fields: Mapping[bytes, bytes], tries: int) -> Message:
        """A message as it was read."""
        named = {name.decode("utf-8", "backslashreplace"): value for name, value in fields.items()}
        return Message(stream=self.stream, message_id=message_id.decode(), fields=named, tries=tries)

    def key_of(self, message: Message) -> str:
        """The idempotency key of a message's job: ids repeat across streams."""
        return f"message:{self.stream}:{self.group}:{message.message_id}"

    def is_known(self, _message: Message) -> bool:
        """The server makes the ids: whatever has a message's key was made of it."""
        return True

    def reader(self, *, enqueue: Enqueue, consumer: str, draining: Callable[[], bool]) -> StreamReader:
        """A reader for one process, which is `consumer` in the group."""
        return StreamReader(source=self, maker=JobMaker(self, enqueue), consumer=consumer, draining=draining)
