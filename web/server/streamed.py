"""Answers that are sent while they are made, piece by piece: none of them is whole in memory.

Their length is not known, so they are sent in chunks; what fails on the way, or takes longer than `deadline_s`, ends
the connection before the last chunk, by which every client sees that something is missing.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Final, Self

from quart import Response

STREAM_S: Final = 600.0
"""The seconds that such an answer may take in all, however its client reads."""


class StreamedResponse(Response):
    """An answer whose `pieces` follow its header. Whoever sends it closes them."""

    pieces: AsyncGenerator[bytes]
    deadline_s: float = STREAM_S

    @classmethod
    def of(cls, pieces: AsyncGenerator[bytes], headers: dict[str, str], media_type: str) -> Self:
        """The answer with these pieces."""
        response = cls(b"", 200, headers, content_type=media_type)
        response.headers.pop("Content-Length", None)
        response.pieces = pieces
        return response
