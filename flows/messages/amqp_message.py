"""A message of a queue of RabbitMQ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import msgspec


@attrs.frozen(kw_only=True)
class AmqpMessage:
    """A message of a queue.

    Attributes:
        queue: the queue's name.
        message_id: what its publisher calls it; None if it has no `message_id`.
        body: its content.
        headers: its headers, those of the server too.
        content_type: what its publisher says of the content, such as `application/json`.
        exchange: where it was published; empty for the default exchange.
        routing_key: under which key.
        is_redelivered: whether the server has delivered it before, here or elsewhere.
        tries: the number of this try, from 1.
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
        """The body as text. Raises `UnicodeDecodeError` if it is no UTF-8."""
        return self.body.decode()

    def json(self) -> Any:
        """The body that is JSON. Raises `msgspec.DecodeError` if it is no JSON."""
        return msgspec.json.decode(self.body)
