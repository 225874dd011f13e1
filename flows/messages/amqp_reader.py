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
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from dataloader.flows.messages.amqp_message import AmqpMessage
from dataloader.flows.messages.amqp_session import AmqpError, AmqpSession, open_session, parameters_of
from dataloader.flows.messages.job_maker import JobMaker
from dataloader.jobs.error_groups import single_errors
from dataloader.jobs.message_source import MessageSourceState

if TYPE_CHECKING:
    from dataloader.flows.messages.amqp_messages import AmqpMessages

BLOCK_S: Final = 1.0
"""How long a read waits for messages: a drain waits for its end."""
SUSPICION: Final = 2
"""A message that was delivered so many times its tries is given up untried, by a process that does so once."""


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
