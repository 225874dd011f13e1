"""Frames of calls: a kind, the lengths of head and body, then both. The service and the process read and write them."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Final

HEADER: Final = struct.Struct("!BQQ")
MAX_FRAME: Final = 2**30
"""The longest head or body, in bytes. A page's rows are far less; what a process writes at random soon says more."""


class Kind(IntEnum):
    """What a frame is: from the service a call, or the end of its user; from the process one of the others.

    `FAILED` has the error's text as its head. `OVER` is answered by `OVER`, whose head says what was left behind.
    """

    CALL = 0
    OVER = 1
    ANSWER = 2
    FAILED = 3


def header_of(kind: Kind, head: int, body: int) -> bytes:
    """The beginning of a frame with these lengths."""
    return HEADER.pack(kind, head, body)


def read_header(header: bytes) -> tuple[Kind, int, int]:
    """The kind and the lengths. Raises `ValueError`."""
    kind, head, body = HEADER.unpack(header)
    if max(head, body) > MAX_FRAME:
        raise ValueError(f"a frame of {max(head, body)} bytes; {MAX_FRAME} are the most")
    return Kind(kind), head, body


async def read_frame(exactly: Callable[[int], Awaitable[bytes]]) -> tuple[Kind, bytes, bytes]:
    """The next frame of what `exactly` so many bytes are read from. Raises `ValueError`, and what that raises."""
    kind, head, body = read_header(await exactly(HEADER.size))
    return kind, await exactly(head), await exactly(body)
