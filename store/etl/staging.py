"""Staging table in front of a load's target, where the rows of a segment wait.

Rows arrive in batches as lines of COPY's text format (flows/etl/parse/copy_lines.py), and the database's own input
functions read them. So a value that does not fit shows in its batch: the staging table has the target's types, NOT
NULLs, checks and defaults. A segment ends with a merge (merge.py, history_merge.py) of the rows that are staged under
its fencing token and number.

It is a separate, unlogged table: a temporary one would belong to one connection, and batches come over several. A crash
of the server empties it, which the merge notices by the number of rows.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import asyncpg
import attrs

from dataloader.jobs.errors import StoreError, Unstorable
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import storable_text
from dataloader.store.connection.command_tag import row_count
from dataloader.store.connection.error_meanings import ErrorMeaning, meaning_of_error
from dataloader.store.etl.history import History
from dataloader.store.etl.target_table import TableInfo, quote, told_of_targets

# Names that hardly any target has; for a target that has one, the database refuses to create the column twice.
TOKEN: Final = '"dl:token"'  # noqa: S105 - a job's token is no secret
SEGMENT: Final = '"dl:segment"'
REQUEST: Final = '"dl:request"'
SEQUENCE: Final = '"dl:sequence"'
SHAPE: Final = '"dl:shape"'
MARKS: Final = [name.strip('"') for name in (TOKEN, SEGMENT, REQUEST, SHAPE, SEQUENCE)]
"""Additional columns of a staging table; the last one is a row's place among the rows of its request."""

_IN_LINE: Final = re.compile(r"^COPY .*?, line (?P<line>\d+)(?:, column (?P<column>.*?)(?::|$))?", re.MULTILINE)


class RowsLost(StoreError):  # noqa: N818 - says what happened to the rows
    """The staging table does not have the rows that were staged, for example because the server has crashed."""


@attrs.frozen
class StagedLines:
    """`number` rows of one request that have the same `columns`. A line has its place in the request, then the cells.

    Lines end with a newline, the only one in them. They are one object, because separate lines take twice the memory.
    """

    columns: tuple[str, ...]
    number: int
    text: bytes = attrs.field(repr=False)

    def cut(self, first: int, size: int) -> Iterator[StagedLines]:
        """Yield the same rows in pieces: `first` of them in the first piece, then `size` in each."""
        if self.number <= first:
            yield self
            return
        single = self.text.splitlines(keepends=True)
        for start, end in pairwise([0, *range(first, len(single), size), len(single)]):
            yield StagedLines(self.columns, end - start, b"".join(single[start:end]))


def shape_of(columns: Sequence[str]) -> int:
    """Return the number by which a staging table identifies the rows that have exactly these columns."""
    digest = hashlib.blake2b("\0".join(columns).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


@attrs.frozen
class StagedSegment:
    """Identification of a segment's rows: the staging table's name, the token of the running job, and a number."""

    staging: str
    token: int
    number: int


async def aio_create_staging(  # noqa: PLR0917 - the parts of a table
    connection: Any,
    table: TableInfo,
    staging: str,
    columns: Sequence[str],
    key: Sequence[str] = (),
    history: History | None = None,
) -> None:
    """Create a staging table for `columns` of `table` (asyncio-flavored); an earlier one of its name is dropped.

    Raises:
        TargetError: the table lacks one of these columns, or only the database writes one of them.
    """
    table.check_loadable(columns)
    others = [column.name for column in table.columns if column.name not in columns]
    # Dropping a column that is not loaded also drops the target's checks of it. NULL is no key.
    changes = [f"DROP COLUMN {quote(name)}" for name in others]
    # A number that the target generates for a row is not in the staging table, because rows that change nothing would
    # use it up.
    changes += [
        f"ALTER COLUMN {quote(c.name)} DROP NOT NULL, ALTER COLUMN {quote(c.name)} DROP DEFAULT"
        for c in table.columns
        if c.numbered and c.name in columns
    ]
    changes += [f"ALTER COLUMN {quote(name)} SET NOT NULL" for name in key]
    if history is not None and history.changed_at is not None:
        changes += _changes_for_times(
            table, columns, {*key, history.changed_at}, history.changed_at, history.is_current
        )
    with told_of_targets():
        await aio_drop_staging(connection, staging)
        await connection.execute(
            f"CREATE UNLOGGED TABLE {quote(staging)} (LIKE {table.sql} INCLUDING DEFAULTS INCLUDING CONSTRAINTS,"
            f" {TOKEN} bigint NOT NULL, {SEGMENT} int NOT NULL,"
            f" {REQUEST} int NOT NULL, {SHAPE} bigint NOT NULL DEFAULT 0, {SEQUENCE} bigint NOT NULL)"
        )
        if changes:
            await connection.execute(f"ALTER TABLE {quote(staging)} {', '.join(changes)}")


def _changes_for_times(
    table: TableInfo, columns: Sequence[str], needed: Collection[str], changed_at: str, is_current: str
) -> list[str]:
    """Return changes of a staging table whose rows have times: a row that closes a version needs no other values."""
    changes = [f"ALTER COLUMN {quote(changed_at)} SET NOT NULL", f"ADD CHECK (isfinite({quote(changed_at)}))"]
    if is_current not in columns:
        return changes
    changes.append(f"ALTER COLUMN {quote(is_current)} DROP NOT NULL, ALTER COLUMN {quote(is_current)} SET DEFAULT true")
    for column in table.columns:
        if column.not_null and column.name in columns and column.name not in {*needed, is_current}:
            name = quote(column.name)
            changes.append(f"ALTER COLUMN {name} DROP NOT NULL")
            changes.append(
                f"ADD CONSTRAINT {quote(f'{column.name} is missing')}"
                f" CHECK ({quote(is_current)} IS FALSE OR {name} IS NOT NULL)"
            )
    return changes


async def aio_drop_staging(connection: Any, staging: str) -> None:
    """Drop the staging table, if there is one (asyncio-flavored)."""
    await connection.execute(f"DROP TABLE IF EXISTS {quote(staging)}")


async def aio_stage(connection: Any, segment: StagedSegment, pieces: Iterable[tuple[int, StagedLines]]) -> int:
    """Put lines into the segment's staging table (asyncio-flavored), in the caller's transaction; return their number.

    `pieces` are lines of one request each, with the request's number in the segment. In whatever order they come, the
    rows of a later request are later rows. Rows that have the same columns are one COPY, and are identified by that in
    the staging table; their other columns have their defaults there.

    Raises:
        Unstorable: the database refuses one of them; the text has the line and column, if they are known.
        TargetError: there is no such staging table: another run of the load has created its own, or this one's was
            dropped.
    """
    groups: dict[tuple[str, ...], list[bytes]] = {}
    for request, lines in pieces:
        mark = b"%d\t%d\t%d\t%d\t" % (segment.token, segment.number, request, shape_of(lines.columns))
        groups.setdefault(lines.columns, []).append(_marked(mark, lines.text))
    number = 0
    try:
        with told_of_targets():
            for columns, marked in groups.items():
                tag: str = await connection.copy_to_table(
                    segment.staging,
                    # Bare bytes would be taken for a file name.
                    source=memoryview(b"".join(marked)),
                    columns=[*MARKS, *columns],
                    format="text",
                    encoding="UTF8",
                )
                number += row_count(tag)
    except asyncpg.PostgresError as error:
        if meaning_of_error(error) is not ErrorMeaning.BAD_VALUE:
            raise
        raise Unstorable(_of_line(error)) from error
    return number


async def aio_drop_staged(connection: Any, segment: StagedSegment) -> None:
    """Delete a segment's rows from its staging table (asyncio-flavored)."""
    with told_of_targets():
        await connection.execute(
            f"DELETE FROM {quote(segment.staging)} WHERE {TOKEN} = $1 AND {SEGMENT} = $2", segment.token, segment.number
        )


def _marked(mark: bytes, lines: bytes) -> bytes:
    """Return the lines with the mark before each."""
    # A line's end is the only newline in it.
    return mark + lines.removesuffix(b"\n").replace(b"\n", b"\n" + mark) + b"\n" if lines else b""


def _of_line(error: asyncpg.PostgresError) -> str:
    """Return the server's message about a line, with its place, without the context, which may quote the whole line."""
    text = storable_text(mask_text(str(error.args[0] if error.args else type(error).__name__)), 500)
    place = _IN_LINE.search(getattr(error, "context", None) or "")
    if place is None:
        return text
    column = place["column"] or getattr(error, "column_name", None)
    return f"line {place['line']}{f', column {column}' if column else ''}: {text}"
