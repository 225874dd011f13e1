"""Decoding of a text's encoded characters: `password%3D…`, `&lt;token&gt;…`, JSON within JSON.

Each decoding has a function that maps a place in it to the place in the original text. Takes time linear in the text.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final

_LEVELS: Final = 2
_ENCODED: Final = re.compile(
    r"(%(?:[2-7][0-9A-Fa-f]|0[9AaDd])|\\(?:u00|x)[2-7][0-9A-Fa-f]|\\[nrt/]"
    r"|&(?:quot|amp|lt|gt|apos|#\d{2,3}|#[xX][0-9A-Fa-f]{2});)"
)
_ESCAPED: Final = {"n": "\n", "r": "\r", "t": "\t", "/": "/"}


def decodings(text: str) -> Iterator[tuple[str, Callable[[int], int]]]:
    """Yield the text with its encoded characters decoded once, then twice, with a function to places in `text`."""
    originals: list[Callable[[int], int]] = []

    def original(place: int) -> int:
        for earlier in reversed(originals):
            place = earlier(place)
        return place

    for _ in range(_LEVELS):
        if "%" not in text and "\\" not in text and "&" not in text:
            return
        parts = _ENCODED.split(text)
        if len(parts) == 1:
            return
        decoded = [*parts]
        decoded[1::2] = [_CHARACTERS[encoded] for encoded in parts[1::2]]
        text = "".join(decoded)
        originals.append(_Places(parts, decoded))
        yield text, original


class _Characters(dict[str, str]):
    """Cache of encoded characters and their decodings; there are some hundreds."""

    def __missing__(self, encoded: str) -> str:
        if encoded[0] == "&":
            character = html.unescape(encoded)
        else:
            character = _ESCAPED[encoded[1]] if encoded[1] in _ESCAPED else chr(int(encoded[-2:], 16))
        self[encoded] = character
        return character


_CHARACTERS: Final = _Characters()


class _Places:
    """Map from positions in a decoded text to positions before the decoding, computed at its first use."""

    def __init__(self, parts: list[str], decoded: list[str]) -> None:
        self._lengths = parts, decoded
        self._starts: tuple[list[int], list[int]] | None = None

    def __call__(self, place: int) -> int:
        if self._starts is None:
            before, after = ([*accumulate(map(len, parts), initial=0)] for parts in self._lengths)
            self._starts = before, after
        before, after = self._starts
        part = bisect_right(after, place) - 1
        return before[part] + place - after[part]
