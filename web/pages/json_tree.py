"""JSON values as trees of blocks that fold, without a script; of a long value, the beginning."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from dataloader.web.pages.formats import MOST_JSON, inert
from dataloader.web.pages.icons import icon

_MOST_PARTS: Final = 2_000
_MOST_DEPTH: Final = 30
"""Deeper values are shown in one line."""
_OPEN_DEPTH: Final = 2
_OPEN_PARTS: Final = 20
"""Blocks up to this depth and with at most this many parts are open at first."""
_LINE: Final = Markup("<p>{}{}</p>")
_NAME: Final = Markup("<i>{}</i> ")
_BEGIN: Final = Markup("<details{}><summary>{}{}<i>{}</i></summary><div>")
_END: Final = Markup("</div></details>")


class JsonTree(NamedTuple):
    """HTML of a value, and whether it has all of the value."""

    html: Markup
    is_whole: bool


def json_tree(value: Any) -> JsonTree:
    """Return a JSON value as HTML, up to `MOST_JSON` characters and `_MOST_PARTS` parts of it."""
    parts: list[Markup] = []
    length, open_blocks = 0, 0
    for number, part in enumerate(_tree_lines("", value, 0), 1):
        parts.append(part)
        length += len(part)
        open_blocks += (part.endswith("<div>")) - (part is _END)
        if (length > MOST_JSON or number > _MOST_PARTS) and part is not _END:
            return JsonTree(Markup("").join([*parts, _LINE.format("", "…"), *[_END] * open_blocks]), is_whole=False)
    return JsonTree(Markup("").join(parts), is_whole=True)


def _tree_lines(name: str, value: Any, depth: int) -> Iterator[Markup]:
    children, words = _children(value)
    if not children or depth >= _MOST_DEPTH:
        try:
            text = json.dumps(value, ensure_ascii=False, default=str)
        except RecursionError:
            text = "…"
        yield _LINE.format(_NAME.format(inert(name)) if name else "", inert(text[:MOST_JSON]))
        return
    if depth == 0:  # the value itself has no name, and is no block
        for key, one in children:
            yield from _tree_lines(key, one, 1)
        return
    number = len(value)
    is_open = depth <= _OPEN_DEPTH and number <= _OPEN_PARTS
    yield _BEGIN.format(
        Markup(" open") if is_open else "",
        icon("turn", "turn"),
        inert(name),
        f"{number:,} {words}{'s' * (number != 1)}",
    )
    for key, one in children:
        yield from _tree_lines(key, one, depth + 1)
    yield _END


def _children(value: Any) -> tuple[Iterable[tuple[str, Any]], str]:
    if isinstance(value, Mapping):
        return [(str(key) or '""', one) for key, one in value.items()], "key"
    if isinstance(value, list | tuple):
        return [(str(at), one) for at, one in enumerate(value)], "item"
    return (), ""
