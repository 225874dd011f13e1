"""XML documents: each element of a name becomes one flat record.

The standard library's expat reads them in pieces. Dangerous XML is refused: a document with an internal DTD subset (its
entities can expand without limit or name files, and its attributes can have defaults for each element), references to
external entities, and elements nested deeper than 100. Dotted names and inherited attributes can make large records of
few bytes, so there are limits for names, for a record and, relative to the document, for all records together. Rejected
alternative: defusedxml refuses the same documents, but has had no release in years, and builds a tree that we would
convert again.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import IO, Any, Final, NoReturn
from xml.parsers import expat

import attrs

from dataloader.flows.etl.declare import option_checks
from dataloader.flows.etl.formats.content import Content
from dataloader.flows.etl.sources.source import SourceError

MAX_DEPTH: Final = 100
_NIL: Final = "http://www.w3.org/2001/XMLSchema-instance}nil"
MAX_NAME: Final = 1_000
"""Maximum characters of a field's dotted name, of the name of an element or attribute, and of a namespace."""
MAX_RECORD: Final = 64 << 20
"""Maximum characters of the names and values of one record."""
MAX_GROWTH: Final = 20
"""Maximum characters of the records as a multiple of the document's, in addition to `_FREE`."""
_FREE: Final = 1 << 20
_PIECE: Final = 64 * 1024
_DECLARED: Final = re.compile(rb"""^\s*<\?xml[^>]{0,200}?\sencoding\s*=\s*["']([A-Za-z0-9._:-]{1,40})["']""")
_BOMS: Final = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def _check_item(_instance: Any, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not value or not all(value.split("/")):
        raise option_checks.refuse(
            attribute.name, value, "an element name, or several separated by /, ending with that of the items"
        )


def _as_names(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen
class Xml:
    """XML document whose elements of one name are the records.

    A record has the item's attributes and the texts of its elements, by name. Deeper elements have dotted names
    (`owner.name`, also for an attribute `name` of an element `owner`). Repeated names have a list. The item's own text,
    if it has one, is `text`. Values are texts without surrounding white space. An empty element with `xsi:nil` is None.
    Namespaces are dropped.

    Documents with an internal DTD subset (`<!DOCTYPE x [...]>`) are refused. So are names of more than 1,000
    characters, records of more than 64 Mi characters, and records that together have more than 1 Mi characters plus 20
    times those of the document.

    Args:
        item: name of the items, such as `Valute`, or the end of their path, such as `Cube/Cube`. An item within an item
            is a part of it.
        inherit: attributes of surrounding elements that each record also gets, such as a date.
        encoding: encoding of the document; None uses the one that the document declares, otherwise that of the source,
            otherwise UTF-8.
    """

    item: str = attrs.field(validator=_check_item)
    inherit: tuple[str, ...] = attrs.field(default=(), converter=_as_names)
    encoding: str | None = attrs.field(default=None, validator=option_checks.charset_or_none)

    @property
    def reports_errors(self) -> bool:
        """Return False: an XML body reports no errors."""
        return False

    @property
    def has_end(self) -> bool:
        """Return True: a truncated document is not well formed."""
        return True

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """Return the records of all items. Raises `SourceError` if it is not well formed or refused."""
        piece = stream.read(_PIECE)
        encoding = self.encoding or _encoding_of(piece) or charset or "utf-8"
        if not option_checks.is_charset(encoding):
            raise SourceError(f"the document's encoding {encoding!r} is unknown", is_retryable=False)
        decoder = codecs.getincrementaldecoder(encoding)()
        collector = _Collector(tuple(self.item.split("/")), self.inherit)
        # expat knows four encodings. It gets UTF-8, which overrides the document's declaration.
        parser = expat.ParserCreate("utf-8", "}")
        parser.buffer_text = True
        parser.StartElementHandler = collector.start
        parser.EndElementHandler = collector.end
        parser.CharacterDataHandler = collector.text
        parser.StartDoctypeDeclHandler = _refuse_internal_subset
        parser.StartNamespaceDeclHandler = _check_namespace
        parser.EntityDeclHandler = _refuse_entity
        parser.ExternalEntityRefHandler = _refuse_entity
        parser.SkippedEntityHandler = _refuse_entity
        try:
            while piece:
                text = decoder.decode(piece)
                collector.left += MAX_GROWTH * len(text)
                parser.Parse(text.encode(), False)  # noqa: FBT003 - expat accepts only a positional argument
                piece = stream.read(_PIECE)
            parser.Parse(decoder.decode(b"", final=True).encode(), True)  # noqa: FBT003 - as above
        except expat.ExpatError as error:
            raise SourceError(f"this is not well-formed XML: {error}", is_retryable=True) from error
        except UnicodeError as error:
            raise SourceError(f"the text is not {encoding}: {error}", is_retryable=True) from error
        if not collector.content.records and collector.root.lower() == "html":
            raise SourceError(f"this is an HTML page without {self.item}", is_retryable=True)
        return collector.content


class _Collector:
    """Makes records of expat's events."""

    def __init__(self, wanted: tuple[str, ...], inherit: tuple[str, ...]) -> None:
        self.content = Content()
        self.root = ""
        self.left = _FREE
        """Characters that are left for the records. It grows with the document."""
        self._wanted = wanted
        self._inherit = inherit
        self._path: list[str] = []
        self._around: list[dict[str, str]] = []
        self._item: dict[str, Any] | None = None
        self._item_depth = 0
        self._item_left = 0
        # One entry for each open element, from the item inward.
        self._texts: list[list[str]] = []
        self._is_leaf: list[bool] = []
        self._is_nil: list[bool] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._path.append(_local(name))
        self.root = self.root or self._path[0]
        if len(self._path) > MAX_DEPTH:
            raise SourceError(f"elements are nested deeper than the limit of {MAX_DEPTH} levels", is_retryable=False)
        if self._item is not None:
            self._is_leaf[-1] = False
        elif tuple(self._path[-len(self._wanted) :]) == self._wanted:
            self._item, self._item_left = {}, MAX_RECORD
            self._item_depth = len(self._path)
            for inherited in self._inherit:
                self._item[inherited] = self._counted(inherited, self._inherited(inherited))
        else:
            self._around.append({_local(attribute): value for attribute, value in attributes.items()})
            return
        self._texts.append([])
        self._is_leaf.append(True)
        self._is_nil.append(attributes.get(_NIL, "").strip() in {"true", "1"})
        for attribute, value in attributes.items():
            self._put((*self._path[self._item_depth :], _local(attribute)), value)

    def text(self, data: str) -> None:
        if self._item is not None:
            self._texts[-1].append(data)

    def end(self, _name: str) -> None:
        if self._item is None:
            self._around.pop()
        else:
            text, is_leaf = "".join(self._texts.pop()).strip(), self._is_leaf.pop()
            is_nil = self._is_nil.pop()
            if len(self._path) > self._item_depth:
                if text or is_leaf:
                    self._put(tuple(self._path[self._item_depth :]), None if is_nil and not text else text)
            else:
                if text:
                    self._put(("text",), text)
                self.content.records.append(self._item)
                self._item = None
        self._path.pop()

    def _put(self, path: tuple[str, ...], value: str | None) -> None:
        item = self._item
        assert item is not None  # noqa: S101 - for mypy: only called within an item
        name = ".".join(path)
        value = self._counted(name, value)
        if name not in item:
            item[name] = value
        elif isinstance(item[name], list):
            item[name].append(value)
        else:
            item[name] = [item[name], value]

    def _counted(self, name: str, value: str | None) -> str | None:
        """Return the value of a field after a check of the limits for it and its name."""
        _check_name(name)
        size = len(name) + len(value or "")
        self._item_left -= size
        self.left -= size
        if self._item_left < 0:
            raise SourceError(f"a record has more than the limit of {MAX_RECORD:,} characters", is_retryable=False)
        if self.left < 0:
            raise SourceError(
                f"the records have more than {MAX_GROWTH} times the characters of the document (limit)",
                is_retryable=False,
            )
        return value

    def _inherited(self, name: str) -> str:
        for attributes in reversed(self._around):
            if name in attributes:
                return attributes[name]
        raise SourceError(f"inherit: no parent of {self._path[-1]} has an attribute {name}", is_retryable=False)


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME:
        raise SourceError(
            f"a name has more than the limit of {MAX_NAME:,} characters: {name[:60]!r}…", is_retryable=False
        )


def _check_namespace(_prefix: str | None, uri: str | None) -> None:
    """Refuse a long namespace, because the parser repeats it with the name of each element."""
    _check_name(uri or "")


def _refuse_internal_subset(_name: str, _system: str | None, _public: str | None, has_subset: int) -> None:
    if has_subset:
        raise SourceError("the document has DTD declarations, which are not allowed", is_retryable=False)


def _refuse_entity(*_declaration: Any) -> NoReturn:
    raise SourceError("the document declares or uses custom entities, which are not allowed", is_retryable=False)


def _local(name: str) -> str:
    """Return a name without its namespace."""
    return name.rpartition("}")[2]


def _encoding_of(beginning: bytes) -> str | None:
    """Return the encoding that a document declares, by its byte order mark or its XML declaration."""
    for mark, encoding in _BOMS:
        if beginning.startswith(mark):
            return encoding
    declared = _DECLARED.match(beginning)
    return declared[1].decode("ascii") if declared else None
