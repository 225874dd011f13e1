"""The body of an HTTP answer, while it comes in: unpacked piece by piece, and never more than is allowed."""

from __future__ import annotations

import io
import zlib
from typing import Any, Final

_PLAIN: Final = frozenset({"", "identity"})
_GZIP: Final = frozenset({"gzip", "x-gzip"})


class Body:
    """What has come of it so far. `is_full` when there was more than the limit, `damage` says what is wrong with it."""

    def __init__(self) -> None:
        self.is_full = False
        self.damage = ""
        self._limit = 0
        self._data = io.BytesIO()
        self._unpacking: Any = None

    def begin(self, encoding: str, limit: int) -> None:
        """Prepare for the pieces.

        Args:
            encoding: the header Content-Encoding, of which gzip is known.
            limit: in bytes, unpacked.
        """
        self._limit = limit
        self._unpacking = zlib.decompressobj(16 + zlib.MAX_WBITS) if encoding.strip().lower() in _GZIP else None
        if self._unpacking is None and encoding.strip().lower() not in _PLAIN:
            self.damage = f"it is compressed by {encoding!r}, which was not asked for"

    def __len__(self) -> int:
        return self._data.tell()

    def add(self, piece: bytes) -> bool:
        """Take a piece as it came; tells whether another one is wanted."""
        if self.damage or self.is_full:
            return False
        room = self._limit - len(self)
        if self._unpacking is not None:
            try:
                piece = self._unpacking.decompress(piece, room + 1)
            except zlib.error as error:
                self.damage = f"it is no gzip: {error}"
                return False
        self.is_full = len(piece) > room
        self._data.write(piece[:room])
        return not self.is_full

    def end(self) -> None:
        """Note the damage if what was compressed ends before its end, or goes on after it."""
        if self.damage or self.is_full or self._unpacking is None:
            return
        if not self._unpacking.eof:
            self.damage = "what is compressed in it ends before its end"
        elif self._unpacking.unused_data:
            self.damage = "there is more than what is compressed in it"

    def value(self) -> bytes:
        """All that has come, unpacked."""
        return self._data.getvalue()
