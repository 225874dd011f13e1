"""XML documents: each element of a name becomes one flat record.

Read by the standard library's expat, piece by piece. What makes XML dangerous is refused: a document that declares
entities (they can expand without bound, or name files), refers to some outside of it, or nests deeper than 100
elements. Rejected: defusedxml, which makes the same refusals around ElementTree, but has had no release in years, and
still builds a tree that we would take apart again.
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
_PIECE: Final = 64 * 1024
_DECLARED: Final = re.compile(rb"""^\s*<\?xml[^>]{0,200}?\sencoding\s*=\s*["']([A-Za-z0-9._:-]{1,40})["']""")
_BOMS: Final = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


def _check_item(_instance: Any, attribute: attrs.Attribute[str], value: str) -> None:
    if not isinstance(value, str) or not value or not all(value.split("/")):
        raise option_checks.refuse(
            attribute.name, value, "an element's name, or some with / between them, the item's last"
        )


def _as_names(value: str | Iterable[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


@attrs.frozen
class Xml:
    """An XML document whose elements of one name are the records.

    A record has the item's attributes, and the texts of the elements in it, by name; what is deeper has a dotted name
    (`owner.name`, also for an attribute `name` of an element `owner`). What comes several times is a list. The item's
    own text, if it has one, is `text`. Values are texts without the white space around them. Namespaces are dropped.

    Args:
        item: the items' name, such as `Valute`, or the end of their path, such as `Cube/Cube`. An item within an item
            is a part of it.
        inherit: names of attributes of the elements around the items that each record has, too, such as a date.
        encoding: None takes the document's own word, else the one that the source names, else UTF-8.
    """

    item: str = attrs.field(validator=_check_item)
    inherit: tuple[str, ...] = attrs.field(default=(), converter=_as_names)
    encoding: str | None = attrs.field(default=None, validator=option_checks.charset_or_none)

    @property
    def reports_errors(self) -> bool:
        """Never."""
        return False

    @property
    def has_end(self) -> bool:
        """True: a document that was cut off is not well formed."""
        return True

    def parse(self, stream: IO[bytes], charset: str | None) -> Content:
        """The records of all items. Raises `SourceError` for what is not well formed, or refused."""
        piece = stream.read(_PIECE)
        encoding = self.encoding or _encoding_of(piece) or charset or "utf-8"
        if not option_checks.is_charset(encoding):
            raise SourceError(f"the document's encoding {encoding!r} is unknown", is_retryable=False)
        decoder = codecs.getincrementaldecoder(encoding)()
        collector = _Collector(tuple(self.item.split("/")), self.inherit)
        # expat knows four encodings; everything reaches it as UTF-8, which goes before what the document declares.
        parser = expat.ParserCreate("utf-8", "}")
        parser.buffer_text = True
        parser.StartElementHandler = collector.start
        parser.EndElementHandler = collector.end
        parser.CharacterDataHandler = collector.text
        parser.EntityDeclHandler = _refuse_entity
        parser.ExternalEntityRefHandler = _refuse_entity
        parser.SkippedEntityHandler = _refuse_entity
        try:
            while piece:
                parser.Parse(decoder.decode(piece).encode(), False)  # noqa: FBT003 - expat takes it by place only
                piece = stream.read(_PIECE)
            parser.Parse(decoder.decode(b"", final=True).encode(), True)  # noqa: FBT003 - as above
        except expat.ExpatError as error:
            raise SourceError(f"this is not well-formed XML: {error}", is_retryable=True) from error
        except UnicodeError as error:
            raise SourceError(f"the text is not {encoding}: {error}", is_retryable=True) from error
        if not collector.content.records and collector.root.lower() == "html":
            raise SourceError(f"this is a page of HTML, without {self.item}", is_retryable=True)
        return collector.content


class _Collector:
    """Builds records from expat's events."""

    def __init__(self, wanted: tuple[str, ...], inherit: tuple[str, ...]) -> None:
        self.content = Content()
        self.root = ""
        self._wanted = wanted
        self._inherit = inherit
        self._path: list[str] = []
        self._around: list[dict[str, str]] = []
        self._item: dict[str, Any] | None = None
        self._item_depth = 0
        # One of each for every element that is open, from the item inwards.
        self._texts: list[list[str]] = []
        self._is_leaf: list[bool] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self._path.append(_local(name))
        self.root = self.root or self._path[0]
        if len(self._path) > MAX_DEPTH:
            raise SourceError(f"elements are nested deeper than the {MAX_DEPTH} allowed", is_retryable=False)
        if self._item is not None:
            self._is_leaf[-1] = False
            self._texts.append([])
            self._is_leaf.append(True)
            for attribute, value in attributes.items():
                self._put((*self._path[self._item_depth :], _local(attribute)), value)
        elif tuple(self._path[-len(self._wanted) :]) == self._wanted:
            self._item = {name: self._inherited(name) for name in self._inherit}
            self._item_depth = len(self._path)
            self._texts.append([])
            self._is_leaf.append(True)
            for attribute, value in attributes.items():
                self._put((_local(attribute),), value)
        else:
            self._around.append({_local(attribute): value for attribute, value in attributes.items()})

    def text(self, data: str) -> None:
        if self._item is not None:
            self._texts[-1].append(data)

    def end(self, _name: str) -> None:
        if self._item is None:
            self._around.pop()
        else:
            text, is_leaf = "".join(self._texts.pop()).strip(), self._is_leaf.pop()
            if len(self._path) > self._item_depth:
                if text or is_leaf:
                    self._put(tuple(self._path[self._item_depth :]), text)
            else:
                if text:
                    self._put(("text",), text)
                self.content.records.append(self._item)
                self._item = None
        self._path.pop()

    def _put(self, path: tuple[str, ...], value: str) -> None:
        item = self._item
        assert item is not None  # noqa: S101 - for mypy: only called within an item
        name = ".".join(path)
        if name not in item:
            item[name] = value
        elif isinstance(item[name], list):
            item[name].append(value)
        else:
            item[name] = [item[name], value]

    def _inherited(self, name: str) -> str:
        for attributes in reversed(self._around):
            if name in attributes:
                return attributes[name]
        raise SourceError(f"inherit: no element around {self._path[-1]} has an attribute {name}", is_retryable=False)


def _refuse_entity(*_declaration: Any) -> NoReturn:
    raise SourceError("the document declares or uses entities of its own, which is not allowed", is_retryable=False)


def _local(name: str) -> str:
    """A name without its namespace."""
    return name.rpartition("}")[2]


def _encoding_of(beginning: bytes) -> str | None:
    """The encoding that a document says it has, by its byte order mark or its declaration."""
    for mark, encoding in _BOMS:
        if beginning.startswith(mark):
            return encoding
    declared = _DECLARED.match(beginning)
    return declared[1].decode("ascii") if declared else None
