"""Message of a RabbitMQ queue."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import msgspec


@attrs.frozen(kw_only=True)
class AmqpMessage:
    """Message of a RabbitMQ queue.

    Attributes:
        queue: name of the queue.
        message_id: ID that the publisher gave it, or None.
        body: its content.
        headers: its headers, including those that the server adds.
        content_type: content type that the publisher declares, such as `application/json`.
        exchange: exchange to which it was published; empty for the default exchange.
        routing_key: routing key with which it was published.
        is_redelivered: true if the server has delivered it before, to this or another consumer.
        tries: number of this try, from 1.
        delivery_tag: the server's number of this delivery.
    """

    queue: str
    message_id: str | None
    body: bytes
    headers: Mapping[str, Any] = attrs.field(factory=dict)
    content_type: str | None = None
    exchange: str = ""
    routing_key: str = ""
    is_redelivered: bool = False
    tries: int = 1
    delivery_tag: int = attrs.field(default=0, repr=False)

    def text(self) -> str:
        """Return the body as text. Raises `UnicodeDecodeError` if it is not UTF-8."""
        return self.body.decode()

    def json(self) -> Any:
        """Decode the body from JSON. Raises `msgspec.DecodeError` if it is not JSON."""
        return msgspec.json.decode(self.body)
