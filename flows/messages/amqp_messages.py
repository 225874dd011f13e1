"""Reads a queue of RabbitMQ, and makes a job of each message.

The order is: read, enqueue, acknowledge. The server delivers what is not acknowledged again when our connection ends.
So nothing is lost, and by the idempotency key a message with an id adds nothing twice.

A message whose try has failed stays ours, unacknowledged, until its next try: the server would deliver one that it gets
back at once, and a classic queue would not count.

A quorum queue counts deliveries (`x-delivery-count`), so a message that kills its readers is found out. But its
neighbours were delivered as often as it was, and so is whatever a process has when it is killed by others. Therefore
what was delivered too often is tried alone, each message acknowledged before the next. What was delivered twice as
often is given up untried, but only the first such message of a process: the killed ones have left the guilty one first.
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
"""How long a read waits for messages: a drain waits for its end."""
SUSPICION: Final = 2
"""A message that was delivered so many times its tries is given up untried, by a process that does so once."""


MAX_TRIES: Final = 1_000
MAX_BATCH: Final = 1_000
MAX_PREFETCH: Final = 10_000
MAX_HELD_S: Final = 1_500
"""RabbitMQ takes back what is not acknowledged for half an hour, and closes the channel."""


@attrs.frozen
class AmqpMessages:
    """A queue of RabbitMQ (AMQP 0.9.1); each of its messages becomes a job.

    A message is acknowledged when its job is committed. Its `message_id` is the job's idempotency key, so that a
    message that comes again adds no second job. One without an id has the key that `request` gives the job, else none:
    if its reader dies between the commit and the acknowledgement, it becomes a second job.

    Args:
        url: the server, `amqp://user:password@host:5672/vhost`, or `amqps://` for TLS.
        queue: the queue's name. It must exist: its type and its bindings are up to those who publish.
        request: makes the job of a message, quickly and without waiting; None acknowledges the message without a job.
            What it raises fails this try.
        dead_letters: the queue for messages whose tries have all failed, which is made if it does not exist; None is
            the queue's name with `.dead`.
        most_tries: tries of one message.
        again_after_s: after so many seconds a message whose try has failed is tried again. With all tries at most
            1,500 seconds, since RabbitMQ takes back what is not acknowledged for half an hour.
        batch: messages that are made jobs in one transaction.
        prefetch: messages that the server gives to one process before they are acknowledged. Those that wait for
            their next try count.

    Raises `BadRequest`, a `ValueError`, for values that are not allowed.
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
        """Check what no value tells alone."""
        if (self.most_tries - 1) * self.again_after_s > MAX_HELD_S:
            raise BadRequest(
                "again_after_s",
                f"must be at most {MAX_HELD_S / (self.most_tries - 1):,.3g} with most_tries={self.most_tries}, "
                f"not {self.again_after_s:,.6g}: RabbitMQ takes back what is not acknowledged for half an hour",
            )
        if self.dead_queue == self.queue:
            raise BadRequest("dead_letters", f"must be another queue than {self.queue!r}")

    @property
    def name(self) -> str:
        """The queue."""
        return self.queue

    @property
    def dead_queue(self) -> str:
        """Where messages go whose tries have all failed."""
        return self.dead_letters or f"{self.queue}.dead"

    def key_of(self, message: AmqpMessage) -> str | None:
        """The idempotency key of a message's job, if the message has an id."""
        return f"message:{self.queue}:{message.message_id}" if message.message_id else None

    def is_known(self, message: AmqpMessage) -> bool:
        """Only the server can tell that a message comes again: two messages of a publisher may have one id."""
        return message.is_redelivered

    def reader(self, *, enqueue: Enqueue, consumer: str, draining: Callable[[], bool]) -> AmqpReader:
        """A reader for one process, which is called `consumer` at the server."""
        return AmqpReader(source=self, maker=JobMaker(self, enqueue), consumer=consumer, draining=draining)


@attrs.define(eq=False, kw_only=True)
class AmqpReader:
    """The reader of one queue in one process, which is `consumer` at the server."""

    source: AmqpMessages
    maker: JobMaker[AmqpMessage]
    consumer: str
    draining: Callable[[], bool]
    _has_given_up_one: bool = attrs.field(default=False, init=False)

    @property
    def state(self) -> MessageSourceState:
        """How it stands now."""
        return self.maker.state

    async def run(self) -> None:
        """Read until the process drains. Raises `ConfigError` for a bad URL, and without the extra `amqp`."""
        parameters = parameters_of(self.source.url, self.consumer)

        async def read() -> None:
            source = self.source
            async with open_session(
                parameters, queue=source.queue, dead_queue=source.dead_queue, prefetch=source.prefetch
            ) as session:
                self.maker.tell_well()
                await _Reading(self, session).run()

        try:
            await self.maker.keep_reading(read, draining=self.draining, is_of_the_server=_is_of_the_server)
        finally:
            self.maker.tell_left()

    def gives_up_one(self) -> bool:
        """Whether a message may be given up untried: true once in a process."""
        is_first, self._has_given_up_one = not self._has_given_up_one, True
        return is_first


@attrs.define(eq=False)
class _Reading:
    """What is read on one connection."""

    _reader: AmqpReader
    _session: AmqpSession
    _held: list[tuple[float, AmqpMessage]] = attrs.field(factory=list, init=False)
    """Messages that wait for their next try, and when that is; the first is due first."""

    async def run(self) -> None:
        source, draining = self._reader.source, self._reader.draining
        while not draining():
            within_s = min(BLOCK_S, max(0.0, self._held[0][0] - trio.current_time())) if self._held else BLOCK_S
            new = await self._session.next(source.batch, within_s)
            suspects = [message for message in new if message.tries > source.most_tries]
            await self._try([message for message in new if message.tries <= source.most_tries] + self._due())
            for message in suspects:
                if message.tries > SUSPICION * source.most_tries and self._reader.gives_up_one():
                    error = f"delivered {message.tries - 1} times, and each time its reader died or lost its connection"
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
        """Acknowledge what needs no further try, and keep what failed for its next one."""
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


def _is_of_the_server(error: Exception) -> bool:
    return all(isinstance(one, AmqpError) for one in single_errors(error))
