"""Tables on a terminal: one line per row at any width, so that columns stay readable.

Columns without room are left out or cut, the least important first. A line on stderr names the missing ones.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, Literal

import attrs
import click
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dataloader.cli.cells import Column, cell

GAP: Final = 2
"""Spaces between two columns."""
_FOLDED: Final = 20
"""Minimum characters of a column whose texts are wrapped."""


@attrs.define
class _Drawn:
    """Column with its texts. `width` is its final width."""

    column: Column
    texts: list[str]
    width: int = 0

    @property
    def whole(self) -> int:
        """Return the width at which nothing is cut."""
        return max(map(cell_len, (self.column.name, *self.texts)))

    @property
    def least(self) -> int:
        """Return the minimum useful width."""
        least = _FOLDED if self.column.folds else self.column.least
        return self.whole if least is None else min(self.whole, max(least, cell_len(self.column.name)))


def draw(columns: Sequence[Column], rows: Sequence[Sequence[object]]) -> None:
    """Draw a table up to the width of the terminal; wider only if the mandatory columns have no room."""
    now = datetime.now(UTC)
    all_drawn = [
        _Drawn(column, _column_texts(values, now))
        for column, values in zip(columns, zip(*rows, strict=True), strict=True)
    ]
    room = shutil.get_terminal_size().columns
    drawn, missing = _columns_that_fit(all_drawn, room)
    _share(drawn, room)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
    for one in drawn:
        overflow: Literal["fold", "ellipsis"] = "fold" if one.column.folds else "ellipsis"
        table.add_column(one.column.name, width=one.width, no_wrap=not one.column.folds, overflow=overflow)
    for texts in zip(*(one.texts for one in drawn), strict=True):
        table.add_row(*map(Text, texts))
    Console(width=max(room, sum(one.width + GAP for one in drawn)), highlight=False).print(table)
    if missing:
        click.echo(f"hidden: {', '.join(missing)}; use a pipe or --json", err=True)


def _column_texts(values: Sequence[object], now: datetime) -> list[str]:
    """Return a column's texts. Timestamps omit the year or the day if all of them share it with the current time."""
    instants = [value.astimezone(UTC) for value in values if isinstance(value, datetime)]
    if instants and all(value is None or isinstance(value, datetime) for value in values):
        if all(instant.date() == now.date() for instant in instants):
            return ["" if value is None else f"{value.astimezone(UTC):%H:%M:%S}Z" for value in values]  # type: ignore[attr-defined]
        if all(instant.year == now.year for instant in instants):
            return ["" if value is None else f"{value.astimezone(UTC):%m-%d %H:%M}Z" for value in values]  # type: ignore[attr-defined]
    return [cell(value) for value in values]


def _columns_that_fit(columns: list[_Drawn], room: int) -> tuple[list[_Drawn], list[str]]:
    """Return the columns that have room, and the names of the others, except columns with only empty texts or 0."""
    left = list(columns)
    if _width(left) > room:
        left = [one for one in left if one.column.rank == 0 or {*one.texts} - {"", "0"}]
    missing = []
    while _width(left) > room and (ranked := [one for one in left if one.column.rank > 0]):
        least_needed = max(ranked, key=lambda one: one.column.rank)
        left.remove(least_needed)
        missing.append(least_needed.column.name)
    return left, missing


def _width(columns: list[_Drawn]) -> int:
    return sum(one.least + GAP for one in columns) - GAP


def _share(columns: list[_Drawn], room: int) -> None:
    """Give each column its minimum, and share the remaining width among those that can be cut, the narrowest first."""
    spare = room - _width(columns)
    for one in columns:
        one.width = one.least
    wanting = sorted((one for one in columns if one.whole > one.least), key=lambda one: one.whole - one.least)
    for number, one in enumerate(wanting):
        more = min(one.whole - one.least, max(spare, 0) // (len(wanting) - number))
        one.width += more
        spare -= more
