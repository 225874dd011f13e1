"""Body of an HTTP response while it arrives, unpacked in pieces and up to a limit."""

from __future__ import annotations

import io
import zlib
from typing import Any, Final

import trio

STEP: Final = 1 << 18
"""Maximum bytes that are unpacked in one step."""
_PLAIN: Final = frozenset({"", "identity"})
_BEGINNING: Final = b"\x1f\x8b"
_GZIP: Final = frozenset({"gzip", "x-gzip"})


def _gunzip() -> Any:
    return zlib.decompressobj(16 + zlib.MAX_WBITS)


def is_compressed(encoding: str) -> bool:
    """Return whether a body with this Content-Encoding is unpacked as it arrives."""
    return encoding.strip().lower() in _GZIP


class HttpBody:
    """Body that has arrived until now. `is_full` if it exceeds the limit. `damage` is the error in it, or empty.

    An empty body is complete with any Content-Encoding, because a response with status 204 may have that header.
    """

    def __init__(self) -> None:
        self.is_full = False
        self.damage = ""
        self._limit = 0
        self._encoding = ""
        self._has_begun = False
        self._data = io.BytesIO()
        self._unpacking: Any = None

    def begin(self, encoding: str, limit: int) -> None:
        """Prepare for the pieces.

        Args:
            encoding: the header Content-Encoding; only gzip is supported.
            limit: maximum bytes, unpacked.
        """
        self._limit, self._encoding = limit, encoding

    def __len__(self) -> int:
        return self._data.tell()

    async def add(self, piece: bytes) -> bool:
        """Add a received piece; return whether another one is wanted.

        A piece may be a thousand times as long when it is unpacked, so other tasks run after each `STEP` bytes.
        """
        if piece and not self._has_begun:
            self._begin()
        if self._unpacking is None:
            self._write(piece)
        is_longer = False
        while self._unpacking is not None and (piece or is_longer) and not self.damage and not self.is_full:
            # Compressed data may have several members, one after the other (RFC 1952, 2.2).
            if self._unpacking.eof and not _BEGINNING.startswith(piece[: len(_BEGINNING)]):
                self.damage = "there are data after the compressed part"
                break
            if self._unpacking.eof:
                self._unpacking = _gunzip()
            before = len(self)
            try:
                self._write(self._unpacking.decompress(piece, STEP))
            except zlib.error as error:
                self.damage = f"it is not gzip: {error}"
            is_longer = not self._unpacking.eof and len(self) - before == STEP
            piece = self._unpacking.unconsumed_tail or self._unpacking.unused_data
            if is_longer:
                await trio.lowlevel.checkpoint()
        return not self.damage and not self.is_full

    def _begin(self) -> None:
        self._has_begun = True
        self._unpacking = _gunzip() if is_compressed(self._encoding) else None
        if self._unpacking is None and self._encoding.strip().lower() not in _PLAIN:
            self.damage = f"it is compressed with {self._encoding!r}, which was not requested"

    def _write(self, piece: bytes) -> None:
        if not self.damage and not self.is_full:
            room = self._limit - len(self)
            self.is_full = len(piece) > room
            self._data.write(piece[:room])

    @property
    def has_end(self) -> bool:
        """Return whether a missing part would be noticed, because the body is compressed."""
        return self._unpacking is not None

    def end(self) -> None:
        """Note the damage if the compressed data is incomplete."""
        if not self.damage and not self.is_full and self._unpacking is not None and not self._unpacking.eof:
            self.damage = "the compressed data are truncated"

    def value(self) -> bytes:
        """Return the data that has arrived, unpacked."""
        return self._data.getvalue()
