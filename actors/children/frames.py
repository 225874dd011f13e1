"""Frames of calls: a kind, the lengths of head and body, then both. Used by the service and the child process."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import Final

HEADER: Final = struct.Struct("!BQQ")
MAX_FRAME: Final = 2**30
"""Maximum length of a head or body in bytes: far more than a page's rows, and less than most random bytes declare."""


class FrameKind(IntEnum):
    """Kind of a frame. The service sends `CALL` and `OVER`; the process sends `ANSWER`, `FAILED` and `OVER`.

    `CALL` is a call, `OVER` the end of its user. The head of `FAILED` is the error's text. `OVER` is answered by
    `OVER`, whose head names what was left behind.
    """

    CALL = 0
    OVER = 1
    ANSWER = 2
    FAILED = 3


def header_of(kind: FrameKind, head: int, body: int) -> bytes:
    """Return the header of a frame with these lengths."""
    return HEADER.pack(kind, head, body)


def read_header(header: bytes) -> tuple[FrameKind, int, int]:
    """Return the kind and both lengths. Raises `ValueError` for an unknown kind or a length over `MAX_FRAME`."""
    kind, head, body = HEADER.unpack(header)
    if max(head, body) > MAX_FRAME:
        raise ValueError(f"a frame of {max(head, body)} bytes; the maximum is {MAX_FRAME}")
    return FrameKind(kind), head, body


async def read_frame(exactly: Callable[[int], Awaitable[bytes]]) -> tuple[FrameKind, bytes, bytes]:
    """Read the next frame with `exactly`, which reads a number of bytes.

    Raises `ValueError` for an invalid header, and the errors of `exactly`.
    """
    kind, head, body = read_header(await exactly(HEADER.size))
    return kind, await exactly(head), await exactly(body)
