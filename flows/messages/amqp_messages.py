"""The declaration of a queue of RabbitMQ whose messages become jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import attrs

from dataloader.flows.messages import source_options
from dataloader.flows.messages.amqp_message import AmqpMessage
from dataloader.flows.messages.amqp_reader import AmqpReader
from dataloader.flows.messages.job_maker import JobMaker
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.message_source import Enqueue
from dataloader.jobs.model import NewJob

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
