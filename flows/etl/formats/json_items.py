"""Separate items of a list in a JSON document that cannot be read as a whole.

One value that is not JSON (NaN, half of a surrogate pair, bytes that are not UTF-8) makes a document of ten thousand
records unreadable. So this splits the document by its brackets, commas and strings only. A document that was truncated,
or whose brackets do not match, stays unreadable, because the missing part is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import attrs
import msgspec

from dataloader.jobs.text import JSON_TEXT

# An unterminated string extends to the end of the document, which is then incomplete as well.
_STRING: Final = re.compile(JSON_TEXT, re.DOTALL)
_SCALAR: Final = re.compile(rb'[^\s\[\]{},:"]+')
_BRACKET: Final = re.compile(JSON_TEXT + rb"|[\[\]{}]", re.DOTALL)
_CLOSING: Final = {b"{": b"}", b"[": b"]"}


@attrs.frozen
class Items:
    """Texts of a list's items, and the document around them with an empty list in their place."""

    texts: list[bytes] = attrs.field(repr=False)
    around: bytes = attrs.field(repr=False)


def items_at(body: bytes, path: Sequence[str]) -> Items | None:
    """Return the items of the list at `path`; None if there is no list or the document was truncated."""
    try:
        return _Cutting(body).items(path)
    except _NoDocument:
        return None


class _NoDocument(Exception):  # noqa: N818 - caught above
    """The text cannot be a JSON document at this position."""


@attrs.define
class _Cutting:
    """Document with the current position in it."""

    body: bytes
    at: int = 0

    def items(self, path: Sequence[str]) -> Items:
        for name in path:
            self._enter(name)
        first = self._skip_space()
        self._take(b"[")
        texts = []
        if not self._is_next(b"]"):
            texts.append(self._value())
            while self._is_next(b","):
                self._take(b",")
                texts.append(self._value())
        self._take(b"]")
        return Items(texts, self.body[:first] + b"[]" + self.body[self.at :])

    def _enter(self, name: str) -> None:
        """Move to the value of an object's member."""
        self._take(b"{")
        while True:
            key = self._value()
            self._take(b":")
            if _is_name(key, name):
                return
            self._value()
            self._take(b",")

    def _value(self) -> bytes:
        """Return the text of the next value and move behind it."""
        first = self._skip_space()
        if self.body[first : first + 1] in _CLOSING:
            self.at = self._end_of_brackets(first)
        elif found := _STRING.match(self.body, first) or _SCALAR.match(self.body, first):
            self.at = found.end()
        else:
            raise _NoDocument
        return self.body[first : self.at]

    def _end_of_brackets(self, first: int) -> int:
        expected: list[bytes] = []
        for found in _BRACKET.finditer(self.body, first):
            if (bracket := found[0]) in _CLOSING:
                expected.append(_CLOSING[bracket])
            elif bracket in {b"]", b"}"}:
                if expected.pop() != bracket:
                    raise _NoDocument
                if not expected:
                    return found.end()
        raise _NoDocument

    def _skip_space(self) -> int:
        while self.body[self.at : self.at + 1].isspace():
            self.at += 1
        return self.at

    def _is_next(self, mark: bytes) -> bool:
        return self.body.startswith(mark, self._skip_space())

    def _take(self, mark: bytes) -> None:
        if not self._is_next(mark):
            raise _NoDocument
        self.at += len(mark)


def _is_name(key: bytes, name: str) -> bool:
    try:
        return bool(msgspec.json.decode(key) == name)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
