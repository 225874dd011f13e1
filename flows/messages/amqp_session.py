"""Connection to RabbitMQ in a dedicated thread, with pika (the extra `amqp`).

The thread does all input and output, so heartbeats continue while Trio waits for the database. Deliveries are passed to
Trio. Acknowledgements are passed to the thread as callbacks, by the only function of pika that other threads may call.
Rejected alternatives: asyncio clients need trio-asyncio's loop, and Trio's own clients are unmaintained.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from dataloader.flows.messages.amqp_message import AmqpMessage
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.secrets.masking import mask_text

CONNECT_S: Final = 15.0
"""Seconds until the first delivery is possible: DNS, TCP, TLS, login, queues."""
TCP_S: Final = 5.0
LOGIN_S: Final = 10.0
HEARTBEAT_S: Final = 20
"""Interval of heartbeats in seconds, unless the URL has another one. pika drops a silent server within a minute."""
BLOCKED_S: Final = 30
"""Seconds that the server may block publishing because its memory or disk is full."""
SETTLE_S: Final = 60.0
"""Seconds for dead letters and acknowledgements, including the time for which the server blocks."""
LEAVE_S: Final = 2.0
NOT_FOUND: Final = 404
DELIVERIES: Final = "x-delivery-count"
"""Header in which a quorum queue counts earlier deliveries."""
OF_THE_SERVER: Final = (DELIVERIES, "CC", "BCC")
"""Headers that are removed from dead letters: the server's count, and additional destinations."""


class AmqpError(Exception):
    """The server cannot be reached or refuses a request, or the connection has ended. The text names the server."""


def parameters_of(url: str, consumer: str) -> Any:
    """Return pika's connection parameters for the URL, with deadlines and a name that the server's pages show.

    Raises `ConfigError` for an invalid URL, or if the extra `amqp` is not installed.
    """
    try:
        import pika  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise ConfigError(
            "messages of RabbitMQ need the extra amqp: pip install 'dataloader-supervisor[amqp]'"
        ) from error
    try:
        parameters = pika.URLParameters(url)
    except Exception as error:  # noqa: BLE001 - pika raises various errors, whose text may contain a part of the password
        allowed = "amqp://user:password@host:5672/vhost, each part percent-encoded"
        raise ConfigError(f"url: must be {allowed}; it is invalid ({type(error).__name__})") from None
    if parameters.heartbeat is None:
        parameters.heartbeat = HEARTBEAT_S
    if parameters.blocked_connection_timeout is None:
        parameters.blocked_connection_timeout = BLOCKED_S
    parameters.socket_timeout = min(parameters.socket_timeout, TCP_S)
    parameters.stack_timeout = min(parameters.stack_timeout, LOGIN_S)
    parameters.client_properties = {"connection_name": consumer, **(parameters.client_properties or {})}
    log = logging.getLogger("pika")
    if log.level == logging.NOTSET:
        log.setLevel(logging.CRITICAL)  # pika would log each failed connection with a stack; the reader logs it once
    return parameters


@attrs.define(eq=False, kw_only=True)
class AmqpSession:
    """Connection that consumes one queue. Trio calls its public methods."""

    _parameters: Any
    _queue: str
    _dead_queue: str
    _prefetch: int
    _token: trio.lowlevel.TrioToken = attrs.field(factory=trio.lowlevel.current_trio_token, init=False)
    _arrived: deque[AmqpMessage] = attrs.field(factory=deque, init=False)
    """Delivered messages, limited by the prefetch."""
    _news: trio.Event = attrs.field(factory=trio.Event, init=False)
    _ended: trio.Event = attrs.field(factory=trio.Event, init=False)
    _leaving: bool = attrs.field(default=False, init=False)
    _thread: trio.CancelScope = attrs.field(factory=lambda: trio.CancelScope(shield=True), init=False)
    # Used only by the thread:
    _connection: Any = attrs.field(default=None, init=False)
    _channel: Any = attrs.field(default=None, init=False)
    _properties: dict[int, Any] = attrs.field(factory=dict, init=False)
    """Properties of the unsettled messages, by delivery tag."""

    @property
    def _server(self) -> str:
        return f"{self._parameters.host}:{self._parameters.port}"

    async def next(self, most: int, within_s: float) -> list[AmqpMessage]:
        """Return the next messages, at most `most`, after a wait of at most `within_s` seconds; empty if none came."""
        with trio.move_on_after(within_s):
            await self._news.wait()
        messages = [self._arrived.popleft() for _ in range(min(most, len(self._arrived)))]
        if not self._arrived:
            self._news = trio.Event()
        return messages

    async def settle(self, done: Sequence[int], letters: Sequence[tuple[AmqpMessage, Mapping[str, Any]]]) -> None:
        """Publish dead letters, and acknowledge them and the finished messages.

        Args:
            done: delivery tags of the finished messages.
            letters: messages for the dead letters, each with the headers to add.
        """
        settled = trio.Event()

        def settle() -> None:
            for message, about in letters:
                self._bury(message, about)
            for tag in [*done, *(message.delivery_tag for message, _ in letters)]:
                self._channel.basic_ack(tag)
                del self._properties[tag]
            self._token.run_sync_soon(settled.set)

        self._call(settle)
        await self.wait_for(settled, SETTLE_S)

    async def wait_for(self, answer: trio.Event, within_s: float) -> None:
        """Wait for an answer of the server. Raises `AmqpError` after `within_s` seconds."""
        with trio.move_on_after(within_s) as scope:
            await answer.wait()
        if scope.cancelled_caught:
            raise AmqpError(f"{self._server}: no answer within {within_s:g} s")

    async def run(self, opened: Callable[[], None]) -> None:
        """Consume in a thread until `leave` is called. Raises `AmqpError` if it ends for any other reason."""
        try:
            with self._thread:
                await trio.to_thread.run_sync(
                    self._consume, opened, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1)
                )
        except Exception as error:
            raise AmqpError(f"{self._server}: {_pika_text(error)}") from error
        finally:
            self._ended.set()

    async def leave(self) -> None:
        """Close the connection. The server requeues the unacknowledged messages."""
        self._leaving = True
        if self._channel is not None:
            with contextlib.suppress(AmqpError):
                self._call(self._stop)
        await self._ended.wait()

    def abandon(self) -> None:
        """Stop waiting for the thread, which ends when the server answers it, or with the process."""
        self._thread.cancel()

    def _call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread. Raises `AmqpError` if the connection has ended."""
        from pika.exceptions import AMQPError  # noqa: PLC0415 - an optional extra

        try:
            self._connection.add_callback_threadsafe(function)
        except AMQPError as error:
            raise AmqpError(f"{self._server}: {_pika_text(error)}") from error

    # In the thread:

    def _consume(self, opened: Callable[[], None]) -> None:
        import pika  # noqa: PLC0415 - an optional extra

        self._connection = pika.BlockingConnection(self._parameters)
        try:
            self._find_dead_queue()
            channel = self._connection.channel()
            channel.confirm_delivery()
            channel.basic_qos(prefetch_count=self._prefetch)
            channel.basic_consume(self._queue, self._take)
            self._channel = channel
            if self._leaving:
                return
            self._token.run_sync_soon(opened)
            channel.start_consuming()
            if not self._leaving:
                raise EOFError(f"the server has canceled the consumer: queue {self._queue!r} was deleted or moved")
        finally:
            if self._connection.is_open:
                self._connection.close()

    def _stop(self) -> None:
        self._channel.stop_consuming()

    def _find_dead_queue(self) -> None:
        """Create the queue for dead letters if it is missing, before the first one is published."""
        from pika.exceptions import ChannelClosedByBroker  # noqa: PLC0415 - an optional extra

        try:
            self._connection.channel().queue_declare(self._dead_queue, passive=True)
        except ChannelClosedByBroker as error:
            if error.reply_code != NOT_FOUND:
                raise
            self._connection.channel().queue_declare(
                self._dead_queue, durable=True, arguments={"x-queue-type": "quorum"}
            )

    def _take(self, _channel: Any, method: Any, properties: Any, body: bytes) -> None:
        """Pass a delivery to Trio."""
        if self._leaving:
            return
        headers = properties.headers or {}
        count = headers.get(DELIVERIES, 0)
        self._properties[method.delivery_tag] = properties
        self._arrived.append(
            AmqpMessage(
                queue=self._queue,
                message_id=_short_string(properties.message_id),
                body=body,
                headers=headers,
                content_type=_short_string(properties.content_type),
                exchange=_short_string(method.exchange) or "",
                routing_key=_short_string(method.routing_key) or "",
                is_redelivered=method.redelivered,
                tries=1 + count if isinstance(count, int) else 1,
                delivery_tag=method.delivery_tag,
            )
        )
        self._token.run_sync_soon(self._tell_news, idempotent=True)

    def _tell_news(self) -> None:
        self._news.set()

    def _bury(self, message: AmqpMessage, about: Mapping[str, Any]) -> None:
        """Publish a dead letter; return when the server has stored it on disk. Raises if the queue cannot take it."""
        properties = self._properties[message.delivery_tag]
        kept = {name: value for name, value in message.headers.items() if name not in OF_THE_SERVER}
        properties.headers = {**kept, **about}
        properties.delivery_mode = 2  # persistent
        properties.expiration = None
        properties.user_id = None  # the server refuses the ID of another user
        self._channel.basic_publish("", self._dead_queue, message.body, properties, mandatory=True)


@asynccontextmanager
async def open_session(parameters: Any, *, queue: str, dead_queue: str, prefetch: int) -> AsyncIterator[AmqpSession]:
    """Open a connection that consumes a queue, for the duration of the block.

    Args:
        parameters: result of `parameters_of`.
        queue: name of the queue. It must exist.
        dead_queue: queue for dead letters. It is created if it does not exist.
        prefetch: maximum number of unacknowledged messages.

    Raises `AmqpError`, in a group, if the connection cannot be made, and in the block when it ends.
    """
    session = AmqpSession(parameters=parameters, queue=queue, dead_queue=dead_queue, prefetch=prefetch)
    opened = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.run, opened.set)
        try:
            await session.wait_for(opened, CONNECT_S)
            yield session
        finally:
            with trio.move_on_after(LEAVE_S, shield=True):
                await session.leave()
            session.abandon()


def _short_string(value: str | bytes | None) -> str | None:
    """Return a short string of the protocol as text. pika leaves it as bytes if it is not UTF-8."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def _pika_text(error: BaseException) -> str:
    """Return the text of an error. The `str` of pika's errors is often empty, so their `repr` is used."""
    return mask_text(repr(error)) if type(error).__module__.startswith("pika") else f"{type(error).__name__}: {error}"
