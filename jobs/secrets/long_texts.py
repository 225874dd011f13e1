"""Cache of the positions of secrets in long texts, so that a text is searched only once.

A search of a megabyte takes up to seconds if the text is full of names of secrets; its digest takes milliseconds. The
key of an entry is a keyed digest of the text, its value the positions of the secrets. The cache has neither texts nor
secrets, and a leaked digest confirms no guess of a text. Rejected: caching masked texts; eight of them fill the memory.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

import attrs

from dataloader.jobs.secrets.values_in_text import Span

LONG: Final = 16 << 10
"""Number of characters above which a text is looked up here."""
MOST_BYTES: Final = 8 << 20
_ENTRY_BYTES: Final = 400
"""Size of an entry without its places: the digest, the array, the entry of the dictionary."""
_LONGEST: Final = 1 << 32
"""Length of a text whose places do not fit into the arrays."""


@attrs.define(eq=False)
class LongTexts:
    """Positions of the secrets that `find` has found in the most recently used texts. Thread-safe."""

    find: Callable[[str], Sequence[Span]]
    most_bytes: int = MOST_BYTES
    held_bytes: int = attrs.field(default=0, init=False)
    _found: OrderedDict[bytes, array[int]] = attrs.field(factory=OrderedDict, init=False, repr=False)
    """Begin and end of each secret by the text's digest, the most recently used text at the end."""
    _key: bytes = attrs.field(factory=lambda: secrets.token_bytes(hashlib.blake2b.MAX_KEY_SIZE), init=False, repr=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False, repr=False)

    def secrets_in(self, text: str) -> Sequence[Span]:
        """Return what `find` returns. Several threads may search one text at the same time; all find the same."""
        if len(text) >= _LONGEST:
            return self.find(text)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=self._key, digest_size=32).digest()
        with self._lock:
            places = self._found.get(digest)
            if places is not None:
                self._found.move_to_end(digest)
        if places is not None:
            return [*zip(places[::2], places[1::2], strict=True)]
        spans = self.find(text)
        self._keep(digest, array("I", [place for span in spans for place in span]))
        return spans

    def _keep(self, digest: bytes, places: array[int]) -> None:
        size = _size_of_entry(places)
        with self._lock:
            if size > self.most_bytes or digest in self._found:
                return
            self._found[digest] = places
            self.held_bytes += size
            while self.held_bytes > self.most_bytes:
                _, oldest = self._found.popitem(last=False)
                self.held_bytes -= _size_of_entry(oldest)


def _size_of_entry(places: array[int]) -> int:
    return len(places) * places.itemsize + _ENTRY_BYTES
