"""Merges a segment's staged rows into its target by set operations: insert, upsert, soft delete.

`aio_merge` is called in the caller's transaction, so that the load's state and the run's record change with the rows.
The connection must have the server's own planner settings (`Transactions.run`), because with the queue's settings it
would read a whole table by index. One join finds the needed statements: an UPDATE if rows have changed, an INSERT if
some are missing; usually only one of them. A rerun writes no row.

Rejected: ON CONFLICT DO UPDATE for both, which locks and so writes each unchanged row, uses up numbers of sequences,
and refuses rows that fill only some columns of existing rows if another column is NOT NULL; MERGE, which returns no
counts before version 17; ON CONFLICT for the missing rows, which takes twice as long for each. Instead, if another
transaction has inserted one of them first, the merge is repeated.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.errors import TargetError
from dataloader.store.connection.error_meanings import TAKEN
from dataloader.store.etl.row_shapes import MINE, aio_complete, same_key
from dataloader.store.etl.staging import REQUEST, SEQUENCE, SHAPE, RowsLost, StagedSegment, shape_of
from dataloader.store.etl.target_table import METADATA, TableInfo, as_names, listed, quote, told_of_targets

CONTENT_HASH: Final = "content_hash"
_LAST_FIRST: Final = f"s.{REQUEST} DESC, s.{SEQUENCE} DESC"

_SAVEPOINT: Final = "dl_before_insert"


class Mode(enum.Enum):
    """Treatment of rows that the target already has: unchanged, or updated."""

    INSERT = "insert"
    UPSERT = "upsert"


@attrs.frozen
class Scope:
    """Rows of the target that are marked as gone if a snapshot lacks them: all, or a window's (`end` excluded)."""

    column: str | None = None
    start: dt.date | float | str | None = None
    end: dt.date | float | str | None = None


@attrs.frozen(kw_only=True)
class Merge:
    """Merge of a segment's rows.

    Attributes:
        table: the target.
        segment: the staged segment.
        rows: the number of staged rows; another number is an error.
        columns: the columns that the load has, in the staging table too.
        shapes: the columns of each kind of row, if there are several: a column that a row lacks keeps its value in the
            target, and has its default in a new row.
        key: columns of a unique key of the target; without one, rows can only be added.
        mode: the treatment of rows that the target already has.
        deleted: the column that marks a row as gone: a timestamp or a boolean. A row that reappears loses the mark.
        scope: the rows among which those that are not staged are marked as gone; None marks none.

    Raises `TargetError` if the target does not fit.
    """

    table: TableInfo
    segment: StagedSegment
    rows: int
    columns: Sequence[str] = attrs.field(converter=as_names)
    shapes: Collection[tuple[str, ...]] = ()
    key: Sequence[str] = attrs.field(converter=as_names, default=())
    mode: Mode = Mode.UPSERT
    deleted: str | None = None
    scope: Scope | None = None

    def __attrs_post_init__(self) -> None:
        self.table.check_loadable(self.columns)
        if self.key:
            self.table.check_key(self.key)
            self._demand(set(self.key) <= set(self.columns), "the load does not have all columns of its key")
        if self.mode is Mode.UPSERT:
            self._demand(bool(self.key), "an upsert needs a key")
        if self.deleted is not None:
            kind = self.table.column(self.deleted).type
            self._demand(
                kind == "boolean" or kind.startswith(("timestamp", "date")),
                f"column {self.deleted} has the type {kind}; a deletion mark must be a boolean, date or timestamp",
            )
            self._demand(self.deleted not in self.columns, f"the load itself has the column {self.deleted}")
            self._demand(self.mode is Mode.UPSERT, "rows can only be marked as deleted by an upsert")
        if self.scope is not None:
            self._demand(self.deleted is not None, "there is no column for the mark of deleted rows")
            if self.scope.column is not None:
                self.table.column(self.scope.column)
            else:
                self._demand(self.scope.start is None and self.scope.end is None, "a window needs a column")

    def _demand(self, holds: bool, message: str) -> None:  # noqa: FBT001 - read as a sentence
        if not holds:
            raise TargetError(f"table {self.table.sql}: {message}")


@attrs.frozen(kw_only=True)
class Counts:
    """Counts of a merge: rows of the target written, staged rows that changed nothing, and staged duplicates."""

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    deleted: int = 0
    duplicates: int = 0


async def aio_merge(connection: Any, merge: Merge) -> Counts:
    """Merge the staged rows and empty the segment (asyncio-flavored), in the caller's transaction.

    If a key is staged more than once, its last row wins, in the order of the requests. Columns that it lacks keep the
    target's values; the other staged rows are not used for them. Only the columns that the load has are written.

    Raises:
        RowsLost: the number of staged rows is not the caller's; load the segment again.
        TargetError: the table or the staging table has changed or is gone.
    """
    segment = merge.segment
    mine = segment.token, segment.number
    with told_of_targets():
        await aio_analyze(connection, segment)
        duplicates = await aio_drop_duplicates(connection, segment, merge.key) if merge.key else 0
        if merge.mode is Mode.UPSERT:
            await aio_complete(connection, merge)
        updated, inserted = await _aio_write_staged(connection, merge, merge.rows - duplicates)
        deleted = 0
        if merge.scope is not None and merge.deleted is not None:
            mark, bounds = _mark(merge, merge.deleted, merge.scope)
            deleted = await aio_compare_all(connection, mark, *mine, *bounds)
        rows = await aio_empty(connection, segment, merge.rows - duplicates)
    return Counts(
        inserted=inserted,
        updated=updated,
        unchanged=rows - inserted - updated,
        deleted=deleted,
        duplicates=duplicates,
    )


async def _aio_write_staged(connection: Any, merge: Merge, rows: int) -> tuple[int, int]:
    """Write the `rows` staged rows into the table; return the numbers of updated and of inserted rows."""
    for has_tries in (True, True, False):
        await connection.execute(f"SAVEPOINT {_SAVEPOINT}")
        try:
            written = await _aio_update_and_insert(connection, merge, rows)
        except TAKEN:
            # Another transaction has added a row meanwhile, which is visible now. Or another unique key is violated.
            if not has_tries:
                raise
            await connection.execute(f"ROLLBACK TO {_SAVEPOINT}")
        else:
            break
    await connection.execute(f"RELEASE {_SAVEPOINT}")
    return written


async def _aio_update_and_insert(connection: Any, merge: Merge, rows: int) -> tuple[int, int]:
    mine = merge.segment.token, merge.segment.number
    updated = inserted = found = 0
    if merge.key:
        update = _update(merge) if merge.mode is Mode.UPSERT else None
        changed = 0
        if await connection.fetchval(_is_any_near(merge), *mine):
            found, changed = await connection.fetchrow(_compare(merge), *mine)
        if update is not None and changed:
            updated = affected(await connection.execute(update, *mine))
    if found < rows:
        for columns, shapes in _inserted(merge).items():
            statement = _insert(merge, columns, are_some_there=found > 0, is_of_shapes=shapes is not None)
            inserted += affected(await connection.execute(statement, *mine, *([] if shapes is None else [shapes])))
    return updated, inserted


def _inserted(merge: Merge) -> Mapping[tuple[str, ...], list[int] | None]:
    """Return the columns of new rows, each set with the shapes of its rows; None for all shapes.

    A column that a row lacks is in the staging table, as NULL or the default, except numbers that the target generates.
    """
    numbered = {name for name in merge.columns if merge.table.column(name).numbered}
    groups: dict[tuple[str, ...], list[int]] = {}
    for shape in merge.shapes:
        columns = tuple(name for name in merge.columns if name not in numbered or name in shape)
        groups.setdefault(columns, []).append(shape_of(shape))
    return groups if len(groups) > 1 else {tuple(merge.columns): None}


async def aio_analyze(connection: Any, segment: StagedSegment) -> None:
    """Update the planner's statistics of the staged rows (asyncio-flavored).

    With statistics of an empty staging table it would compare each row with each other: minutes for 100,000 rows. The
    numbers of rows and of distinct values suffice, so a tenth of the usual sample is enough.
    """
    await connection.execute(f"SET LOCAL default_statistics_target = 10; ANALYZE {quote(segment.staging)}")


async def aio_compare_all(connection: Any, statement: str, *args: object) -> int:
    """Run a statement that looks up each row of the target in a snapshot (asyncio-flavored); return the rows written.

    Servers before 16 cannot hash the smaller side of an anti-join. If the target's statistics are older than its newest
    rows, such servers expect few rows, and would read the whole snapshot once for each.
    """
    await connection.execute("SET LOCAL enable_nestloop = off")
    tag = await connection.execute(statement, *args)
    await connection.execute("SET LOCAL enable_nestloop = on")
    return affected(tag)


async def aio_drop_duplicates(connection: Any, segment: StagedSegment, key: Sequence[str]) -> int:
    """Delete all but the last of the staged rows with one key (asyncio-flavored); return the number of deleted rows."""
    # Usually there are none, which a hash of the keys shows without a sort.
    if not await connection.fetchval(
        f"""
        SELECT EXISTS (
          SELECT FROM {quote(segment.staging)} s WHERE {MINE} GROUP BY {listed(key, "s.")} HAVING count(*) > 1)""",
        segment.token,
        segment.number,
    ):
        return 0
    tag = await connection.execute(
        f"""
        DELETE FROM {quote(segment.staging)} WHERE ctid IN (
          SELECT place FROM (
            SELECT s.ctid AS place, row_number() OVER (PARTITION BY {listed(key, "s.")} ORDER BY {_LAST_FIRST}) AS n
            FROM {quote(segment.staging)} s WHERE {MINE}) AS numbered
          WHERE n > 1)""",
        segment.token,
        segment.number,
    )
    return affected(tag)


async def aio_empty(connection: Any, segment: StagedSegment, expected: int) -> int:
    """Remove the segment's rows from its staging table (asyncio-flavored); return their number.

    Raises `RowsLost` if the number is not `expected`.
    """
    tag = await connection.execute(
        f"DELETE FROM {quote(segment.staging)} s WHERE {MINE}", segment.token, segment.number
    )
    if (rows := affected(tag)) != expected:
        raise RowsLost(
            f"staging table {segment.staging}: it has {rows} rows of segment {segment.number} instead of {expected}:"
            " a batch was lost in a crash of the database, or was sent twice; load the segment again"
        )
    return rows


def affected(tag: str) -> int:
    """Return the number of rows that a command has written, by its tag."""
    return int(tag.rpartition(" ")[2])


def differs(table: TableInfo, names: Iterable[str], row: str = "t") -> str:
    """Return SQL for: the staged row `s` and the target's row with the alias `row` differ in one of the columns."""
    casts = {name: "" if table.column(name).has_equality else "::text" for name in names}
    tests = [f"{row}.{quote(name)}{cast} IS DISTINCT FROM s.{quote(name)}{cast}" for name, cast in casts.items()]
    return f"({' OR '.join(tests) or 'false'})"


def assigned(names: Iterable[str], source: str = "s.") -> list[str]:
    """Return SQL that sets the columns to those of `source`."""
    return [f"{quote(name)} = {source}{quote(name)}" for name in names]


def _is_gone(merge: Merge) -> str:
    if merge.deleted is None:
        return "false"
    test = "IS TRUE" if merge.table.column(merge.deleted).type == "boolean" else "IS NOT NULL"
    return f"(t.{quote(merge.deleted)} {test})"


def _value_columns(merge: Merge) -> list[str]:
    return [name for name in merge.columns if name not in merge.key]


def _has_changed(merge: Merge) -> str:
    values = _value_columns(merge)
    # A row's hash, if it has one, represents the row.
    compared = [CONTENT_HASH] if CONTENT_HASH in values else [name for name in values if name not in METADATA]
    return f"({differs(merge.table, compared)} OR {_is_gone(merge)})"


def _is_any_near(merge: Merge) -> str:
    """Return SQL for whether the target has a row between the first and last staged one, by its key's first column.

    For data that arrives day by day, this is one index lookup instead of a join with the whole table. ORDER BY makes
    the planner use the index; within an EXISTS it would be ignored.
    """
    leading = quote(next(key for key in merge.table.keys if set(key) == set(merge.key))[0])
    staged = f"SELECT s.{leading} FROM {quote(merge.segment.staging)} s WHERE {MINE} ORDER BY s.{leading}"
    return f"""
        SELECT (
          SELECT 1 FROM {merge.table.sql} t
          WHERE t.{leading} BETWEEN ({staged} LIMIT 1) AND ({staged} DESC LIMIT 1) ORDER BY t.{leading} LIMIT 1
        ) IS NOT NULL"""


def _compare(merge: Merge) -> str:
    """Return SQL for the numbers of staged rows that the target has, and of those that have changed."""
    return f"""
        SELECT count(*), count(*) FILTER (WHERE {_has_changed(merge)})
        FROM {quote(merge.segment.staging)} s JOIN {merge.table.sql} t ON {same_key(merge.key)} WHERE {MINE}"""


def _update(merge: Merge) -> str | None:
    sets = assigned(_value_columns(merge))
    if merge.deleted is not None:
        absent = "false" if merge.table.column(merge.deleted).type == "boolean" else "NULL"
        sets.append(f"{quote(merge.deleted)} = {absent}")
    if not sets:
        return None
    return f"""
        UPDATE {merge.table.sql} t SET {", ".join(sets)}
        FROM {quote(merge.segment.staging)} s WHERE {MINE} AND {same_key(merge.key)} AND {_has_changed(merge)}"""


def _insert(merge: Merge, columns: Sequence[str], *, are_some_there: bool, is_of_shapes: bool) -> str:
    of_shapes = f"AND s.{SHAPE} = ANY ($3::bigint[])" if is_of_shapes else ""
    absent = f"AND NOT EXISTS (SELECT FROM {merge.table.sql} t WHERE {same_key(merge.key)})" if are_some_there else ""
    return f"""
        INSERT INTO {merge.table.sql} AS t ({listed(columns)})
        SELECT {listed(columns, "s.")} FROM {quote(merge.segment.staging)} s
        WHERE {MINE} {of_shapes} {absent} ORDER BY s.{REQUEST}, s.{SEQUENCE}"""


def _mark(merge: Merge, deleted: str, scope: Scope) -> tuple[str, list[str]]:
    """Return the statement, and its arguments after the two of the segment."""
    gone = "true" if merge.table.column(deleted).type == "boolean" else "now()"
    within, bounds = "", []
    for operator, bound in ((">=", scope.start), ("<", scope.end)):
        if scope.column is not None and bound is not None:
            bounds.append(str(bound))
            kind = merge.table.column(scope.column).type
            within += f" AND t.{quote(scope.column)} {operator} ${2 + len(bounds)}::text::{kind}"
    statement = f"""
        UPDATE {merge.table.sql} t SET {quote(deleted)} = {gone}
        WHERE NOT {_is_gone(merge)} {within}
          AND NOT EXISTS (SELECT FROM {quote(merge.segment.staging)} s WHERE {MINE} AND {same_key(merge.key)})"""
    return statement, bounds
