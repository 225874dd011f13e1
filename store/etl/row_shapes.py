"""Staged rows that bring different columns, and what each of them lacks (E6).

A load writes what a row brings and nothing else, whoever its neighbours are. So a staging table knows each row by the
shape that it has, the columns that it brings. Before a merge what a row lacks is taken from the target; in a new row it
has its default.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, Protocol

from dataloader.jobs.errors import StoreError
from dataloader.store.etl.staging import SEGMENT, SHAPE, TOKEN, StagedSegment, shape_of
from dataloader.store.etl.target_table import TableInfo, quote

MINE: Final = f"s.{TOKEN} = $1 AND s.{SEGMENT} = $2"
"""Of a staging table's rows those of a segment, whose token and number are the first two arguments."""


class Shaped(Protocol):
    """A merge of rows that may bring different columns: `columns` are all of them, `shapes` those of each kind."""

    @property
    def table(self) -> TableInfo:
        """The target."""

    @property
    def segment(self) -> StagedSegment:
        """Whose rows."""

    @property
    def key(self) -> Sequence[str]:
        """What a row is known by."""

    @property
    def columns(self) -> Sequence[str]:
        """All that rows bring."""

    @property
    def shapes(self) -> Collection[tuple[str, ...]]:
        """What each kind of row brings."""


async def aio_complete(connection: Any, merge: Shaped, condition: str = "true") -> None:
    """Give staged rows the columns they lack as the target has them, where it meets `condition` (asyncio-flavoured).

    Raises `StoreError` if two shapes have the same number, by a chance of one in 10^19.
    """
    numbers = {shape: shape_of(shape) for shape in merge.shapes}
    if len(set(numbers.values())) < len(numbers):
        raise StoreError(f"table {merge.table.sql}: two kinds of rows have the same number; load them by two loads")
    lacking = [number for shape, number in numbers.items() if not set(merge.columns) <= set(shape)]
    if not lacking:
        return
    arguments: list[object] = [merge.segment.token, merge.segment.number, lacking]
    sets = []
    for name in merge.columns:
        having = [number for shape, number in numbers.items() if name in shape]
        if len(having) < len(numbers):
            arguments.append(having)
            is_there = f"s.{SHAPE} = ANY (${len(arguments)}::bigint[])"
            sets.append(f"{quote(name)} = CASE WHEN {is_there} THEN s.{quote(name)} ELSE t.{quote(name)} END")
    await connection.execute(
        f"""
        UPDATE {quote(merge.segment.staging)} s SET {", ".join(sets)} FROM {merge.table.sql} t
        WHERE {MINE} AND s.{SHAPE} = ANY ($3::bigint[]) AND {same_key(merge.key)} AND {condition}""",
        *arguments,
    )


def same_key(key: Iterable[str]) -> str:
    """The staged row `s` and the row `t` of the target have one key."""
    return " AND ".join(f"t.{quote(name)} = s.{quote(name)}" for name in key)
