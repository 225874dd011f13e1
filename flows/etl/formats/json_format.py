"""JSON documents and JSON lines.

Nothing is lost or guessed: numbers with a fraction become `Decimal`. An item that is not a record is recorded as
broken, and reading continues.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import IO, Any, Final

import attrs
import msgspec

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.formats.content import (
    MISSING,
    Content,
    describe_document,
    look_up,
    names_in_path,
    refuse_html,
)
from dataloader.flows.etl.formats.json_items import items_at
from dataloader.flows.etl.sources.source import SAMPLE, Record, SourceError
from dataloader.jobs.secrets.masking import mask_text

_BOM: Final = b"\xef\xbb\xbf"
_DECODER: Final = msgspec.json.Decoder(float_hook=Decimal)


def _check_path(_instance: Any, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or (value and not all(value.split("."))):
        raise option_checks.refuse(attribute.name, value, "names separated by dots, such as data.items, or empty")


@attrs.frozen
class Json:
    """JSON document.

    Args:
        path: path of the list of records, as names separated by dots (`data.items`); empty if the document is the list.
            A single object instead of the list is one record, and null is no record.
        errors: function that takes the document. It returns a text if the document reports that the request failed in
            spite of its HTTP status, otherwise None. The text becomes a retryable `SourceError`.

    An item of the list that is not an object, or not JSON, is broken. The others are read. Numbers with a fraction or
    an exponent are `Decimal`, others `int`.
    """

    path: str = attrs.field(default="", validator=_check_path)
    errors: Callable[[Any], str | None] | None = None

    @property
    def reports_errors(self) -> bool:
        """Return True if there is a function that finds errors in documents."""
        return self.errors is not None

    @property
    def has_end(self) -> bool:
        """Return True: a truncated document cannot be parsed."""
        return True

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """Return the records at `path`. Raises `SourceError` if it is not JSON, lacks the path, or reports an error."""
        document = _decode_document(_as_utf8(stream.read(), charset), names_in_path(self.path))
        if self.errors is not None and (error := self.errors(document)) is not None:
            raise SourceError(f"the answer reports an error: {mask_text(str(error))[:SAMPLE]}", is_retryable=True)
        found = look_up(document, self.path)
        if found is MISSING:
            raise SourceError(f"path: there is no {self.path} in {describe_document(document)}", is_retryable=False)
        content = Content(document=document)
        if isinstance(found, dict):
            content.records.append(found)
        elif isinstance(found, list):
            for position, item in enumerate(found, 1):
                if isinstance(item, dict):
                    content.records.append(item)
                elif isinstance(item, _Unreadable):
                    content.add_broken(f"item {position}", item.error, item.sample)
                else:
                    content.add_broken(f"item {position}", *_no_object(item))
        elif found is not None:
            where = self.path or "the document"
            raise SourceError(
                f"path: {where} is {describe_document(found)}, not a list or an object", is_retryable=False
            )
        return content


@attrs.frozen
class JsonLines:
    """One JSON object on each line. Empty lines are ignored. A line that is not an object is broken.

    If the last line is not JSON and has no line end, the body was truncated, which is a retryable `SourceError`.
    """

    @property
    def reports_errors(self) -> bool:
        """Return False: JSON lines report no errors."""
        return False

    @property
    def has_end(self) -> bool:
        """Return False: a body that is truncated between two lines looks complete."""
        return False

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """Return the records of all lines. Raises `SourceError` for a truncated body or an HTML page."""
        content = Content()
        body = _as_utf8(stream.read(), charset)
        refuse_html(body[:SAMPLE].decode("utf-8", "replace"))
        _check_last_line(body)
        content.rest = _of_lines(content, body)
        return content


def _check_last_line(body: bytes) -> None:
    last = body[body.rfind(b"\n") + 1 :].strip()
    if last:
        try:
            _DECODER.decode(last)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            told = f"the last line is incomplete, so the body was truncated: {_sample_of_bytes(last)!r} ({error})"
            raise SourceError(told, is_retryable=True) from error


def _of_lines(content: Content, body: bytes) -> Iterator[Record]:
    for number, raw in enumerate(io.BytesIO(body), 1):
        if not (line := raw.strip()):
            continue
        item = _decode_or_unreadable(line)
        if isinstance(item, dict):
            yield item
        elif isinstance(item, _Unreadable):
            content.add_broken(f"line {number}", item.error, item.sample)
        else:
            content.add_broken(f"line {number}", *_no_object(item))


def _as_utf8(body: bytes, charset: str | None) -> bytes:
    """Return the body in UTF-8, without a byte order mark."""
    if charset and charset.lower().replace("_", "-") not in {"utf-8", "utf8", "us-ascii", "ascii"}:
        try:
            body = body.decode(charset).encode()
        except UnicodeError as error:
            raise SourceError(f"the text is not {charset}: {error}", is_retryable=True) from error
    return body.removeprefix(_BOM)


@attrs.frozen
class _Unreadable:
    """Item of a list that is not JSON."""

    error: str
    sample: str


def _decode_document(body: bytes, path: Sequence[str]) -> Any:
    """Return the document. Unreadable items of the list at `path` become `_Unreadable`.

    Raises `SourceError` if any other part is unreadable.
    """
    document = _decode_or_unreadable(body)
    if not isinstance(document, _Unreadable):
        return document
    if (items := items_at(body, path)) is not None and not isinstance(
        around := _decode_or_unreadable(items.around), _Unreadable
    ):
        found = [_decode_or_unreadable(text) for text in items.texts]
        if not path:
            return found
        look_up(around, ".".join(path[:-1]))[path[-1]] = found
        return around
    raise SourceError(f"this is not JSON: {document.error}; it begins with {document.sample!r}", is_retryable=True)


def _decode_or_unreadable(text: bytes) -> Any:
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ArithmeticError) as error:
        return _Unreadable(str(error) or type(error).__name__, _sample_of_bytes(text))


def _no_object(item: Any) -> tuple[str, str]:
    """Return the error of an item that is not an object, and the beginning of the item."""
    return f"{describe_document(item)}, not an object", _sample_of_bytes(msgspec.json.encode(item))


def _sample_of_bytes(data: bytes) -> str:
    return mask_text(data[:SAMPLE].decode("utf-8", "replace"))
