"""Answers that are sent while they are created, piece by piece: none of them is whole in memory.

Their length is not known, so they are sent in chunks. An error, or more than `deadline_s` seconds, ends the connection
before the last chunk, by which every client sees that something is missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final, Self

from quart import Response

STREAM_S: Final = 600.0
"""Maximum time in seconds for such an answer, however its client reads."""


class StreamedResponse(Response):
    """Answer whose `pieces` follow its header. Its sender closes them."""

    pieces: AsyncGenerator[bytes]
    deadline_s: float = STREAM_S

    @classmethod
    def of(cls, pieces: AsyncGenerator[bytes], headers: dict[str, str], media_type: str) -> Self:
        """Return the answer with these pieces."""
        response = cls(b"", 200, headers, content_type=media_type)
        response.headers.pop("Content-Length", None)
        response.pieces = pieces
        return response
