"""Reads a RabbitMQ queue and makes a job of each message.

The order is: read, enqueue, acknowledge. When our connection ends, the server delivers the unacknowledged messages
again. So no message is lost, and because of the idempotency key, a message with an ID adds only one job.

After a failed try, the reader keeps the message unacknowledged until the next try. If it returned the message, the
server would deliver it again immediately, and a classic queue would not count the tries.

A quorum queue counts deliveries (`x-delivery-count`), which reveals a message that kills its readers. But the count of
the messages that were delivered with it grows as well, and so does the count of all messages of a process that is
killed for another reason. Therefore messages with too many deliveries are tried one at a time, each acknowledged before
the next. A message with twice too many is sent to the dead letters without a try, but only the first one of each
process: the earlier deaths have left the harmful message first in the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import attrs
import trio

from dataloader.flows.messages import source_options
from dataloader.flows.messages.amqp_message import AmqpMessage
from dataloader.flows.messages.amqp_session import AmqpError, AmqpSession, open_session, parameters_of
from dataloader.flows.messages.job_maker import JobMaker
from dataloader.jobs.error_groups import single_errors
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.message_source import Enqueue, MessageSourceState
from dataloader.jobs.model import NewJob

BLOCK_S: Final = 1.0
"""Seconds that a read waits for messages. A drain waits for its end."""
SUSPICION: Final = 2
"""Factor of the maximum tries above which a message goes to the dead letters without a try, once per process."""


MAX_TRIES: Final = 1_000
MAX_BATCH: Final = 1_000
MAX_PREFETCH: Final = 10_000
MAX_HELD_S: Final = 1_500
"""Maximum seconds for all tries together: after 30 minutes RabbitMQ requeues unacknowledged messages and closes the
channel."""


@attrs.frozen
class AmqpMessages:
    """RabbitMQ queue (AMQP 0.9.1) whose messages become jobs.

    A message is acknowledged when its job is committed. Its `message_id` is the job's idempotency key, so a repeated
    message adds no second job. A message without an ID has the key that `request` gives the job, if any. Without a key,
    it becomes a second job if its reader dies between the commit and the acknowledgement.

    Args:
        url: URL of the server, `amqp://user:password@host:5672/vhost`, or `amqps://` for TLS.
        queue: name of the queue. It must exist, because the publishers decide on its type and bindings.
        request: function that makes the job of a message, without blocking. If it returns None, the message is
            acknowledged without a job. If it raises an error, this try fails.
        dead_letters: queue for messages whose tries have all failed, by default the queue's name with `.dead`. It is
            created if it does not exist.
        most_tries: maximum number of tries of a message, 1 to 1,000.
        again_after_s: seconds until the next try of a message after a failed one. The pauses of all tries together are
            at most 1,500 seconds, because RabbitMQ requeues messages that are not acknowledged for 30 minutes.
        batch: maximum number of messages that become jobs in one transaction, 1 to 1,000.
        prefetch: maximum number of unacknowledged messages of one process, 1 to 10,000. Messages that wait for their
            next try count.

    Raises `BadRequest`, a `ValueError`, for invalid values.
    """

    url: str = attrs.field(validator=source_options.url_of("amqp", "amqps"), repr=False)
    queue: str = attrs.field(validator=source_options.name)
    request: Callable[[AmqpMessage], NewJob | None]
    dead_letters: str | None = attrs.field(default=None, kw_only=True, validator=source_options.name_or_none)
    most_tries: int = attrs.field(default=5, kw_only=True, validator=source_options.whole_between(1, MAX_TRIES))
    again_after_s: float = attrs.field(default=30.0, kw_only=True, validator=source_options.between(0.01, MAX_HELD_S))
    batch: int = attrs.field(default=100, kw_only=True, validator=source_options.whole_between(1, MAX_BATCH))
    prefetch: int = attrs.field(default=500, kw_only=True, validator=source_options.whole_between(1, MAX_PREFETCH))

    def __attrs_post_init__(self) -> None:
        """Check the values that depend on each other."""
        if (self.most_tries - 1) * self.again_after_s > MAX_HELD_S:
            raise BadRequest(
                "again_after_s",
                f"must be at most {MAX_HELD_S / (self.most_tries - 1):,.3g} with most_tries={self.most_tries}, "
                f"not {self.again_after_s:,.6g}: RabbitMQ requeues messages that are unacknowledged for half an hour",
            )
        if self.dead_queue == self.queue:
            raise BadRequest("dead_letters", f"must be a different queue than {self.queue!r}")

    @property
    def name(self) -> str:
        """Return the name of the queue."""
        return self.queue

    @property
    def dead_queue(self) -> str:
        """Return the queue for messages whose tries have all failed."""
        return self.dead_letters or f"{self.queue}.dead"

    def key_of(self, message: AmqpMessage) -> str | None:
        """Return the idempotency key of a message's job, if the message has an ID."""
        return f"message:{self.queue}:{message.message_id}" if message.message_id else None

    def is_known(self, message: AmqpMessage) -> bool:
        """Return whether the server has delivered the message before. A publisher may use an ID twice."""
        return message.is_redelivered

    def reader(self, *, enqueue: Enqueue, consumer: str, draining: Callable[[], bool]) -> AmqpReader:
        """Return a reader for one process, whose connection has the name `consumer` at the server."""
        return AmqpReader(source=self, maker=JobMaker(self, enqueue), consumer=consumer, draining=draining)


@attrs.define(eq=False, kw_only=True)
class AmqpReader:
    """Reader of one queue in one process. `consumer` is the name of its connection at the server."""

    source: AmqpMessages
    maker: JobMaker[AmqpMessage]
    consumer: str
    draining: Callable[[], bool]
    _has_given_up_one: bool = attrs.field(default=False, init=False)

    @property
    def state(self) -> MessageSourceState:
        """Return the current state of the source."""
        return self.maker.state

    async def run(self) -> None:
        """Read until the process drains. Raises `ConfigError` for an invalid URL, or if the extra `amqp` is missing."""
        parameters = parameters_of(self.source.url, self.consumer)

        async def read() -> None:
            source = self.source
            async with open_session(
                parameters, queue=source.queue, dead_queue=source.dead_queue, prefetch=source.prefetch
            ) as session:
                self.maker.tell_well()
                await _Reading(self, session).run()

        try:
            await self.maker.keep_reading(read, draining=self.draining, is_of_the_server=_is_amqp_failure)
        finally:
            self.maker.tell_left()

    def gives_up_one(self) -> bool:
        """Return whether a message may go to the dead letters without a try: true once per process."""
        is_first, self._has_given_up_one = not self._has_given_up_one, True
        return is_first


@attrs.define(eq=False)
class _Reading:
    """Reading of one connection."""

    _reader: AmqpReader
    _session: AmqpSession
    _held: list[tuple[float, AmqpMessage]] = attrs.field(factory=list, init=False)
    """Messages that wait for their next try, with its time, soonest first."""

    async def run(self) -> None:
        source, draining = self._reader.source, self._reader.draining
        while not draining():
            within_s = min(BLOCK_S, max(0.0, self._held[0][0] - trio.current_time())) if self._held else BLOCK_S
            new = await self._session.next(source.batch, within_s)
            suspects = [message for message in new if message.tries > source.most_tries]
            await self._try([message for message in new if message.tries <= source.most_tries] + self._due())
            for message in suspects:
                if message.tries > SUSPICION * source.most_tries and self._reader.gives_up_one():
                    error = f"delivered {message.tries - 1} times; each time, its reader ended or lost its connection"
                    await self._settle([], [(message, error)])
                else:
                    await self._try([message])

    def _due(self) -> list[AmqpMessage]:
        now = trio.current_time()
        due = [message for at, message in self._held if at <= now]
        del self._held[: len(due)]
        return due

    async def _try(self, messages: Sequence[AmqpMessage]) -> None:
        if messages:
            await self._settle(*await self._reader.maker.make(messages))

    async def _settle(self, done: Sequence[AmqpMessage], failed: Sequence[tuple[AmqpMessage, str]]) -> None:
        """Acknowledge the messages that need no further try, and keep the failed ones for their next try."""
        source, maker = self._reader.source, self._reader.maker
        letters: list[tuple[AmqpMessage, dict[str, Any]]] = []
        for message, error in failed:
            if maker.tell_failed(message, error, source.dead_queue):
                about = {"dl_queue": source.queue, "dl_tries": message.tries, "dl_error": error}
                letters.append((message, about))
            else:
                again = attrs.evolve(message, tries=message.tries + 1)
                self._held.append((trio.current_time() + source.again_after_s, again))
        if done or letters:
            await self._session.settle([message.delivery_tag for message in done], letters)
            maker.tell_dead(len(letters))


def _is_amqp_failure(error: Exception) -> bool:
    return all(isinstance(one, AmqpError) for one in single_errors(error))
