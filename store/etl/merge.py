"""Merges a segment's staged rows into its target by statements over the whole set: insert, upsert, soft delete (E6).

`aio_merge` is called inside the caller's transaction, so that the watermark and the run's record change with the rows;
on a connection with the server's own planner settings (`Transactions.run`), since the queue's would read a whole table
by index. One join finds what to do: an UPDATE if rows have changed, an INSERT if some are missing; mostly only one of
them. A rerun writes no row.

Rejected: ON CONFLICT DO UPDATE for both, which locks and so writes each unchanged row, uses up numbers of sequences,
and refuses rows that fill only some columns of present ones if another column is NOT NULL; MERGE, which returns no
counts before version 17; ON CONFLICT for the missing rows, which takes twice as long for each. Instead, if another
transaction has inserted one of them first, the merge is repeated.
"""

from __future__ import annotations

import datetime as dt
import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.errors import StoreError, TargetError
from dataloader.store.connection.error_meanings import TAKEN
from dataloader.store.etl.row_shapes import MINE, aio_complete, same_key
from dataloader.store.etl.staging import REQUEST, SEQUENCE, SHAPE, StagedSegment, shape_of
from dataloader.store.etl.target_table import METADATA, TableInfo, as_names, listed, quote, told_of_targets

CONTENT_HASH: Final = "content_hash"
_LAST_FIRST: Final = f"s.{REQUEST} DESC, s.{SEQUENCE} DESC"

_SAVEPOINT: Final = "dl_before_insert"


class Mode(enum.Enum):
    """Whether rows that the target has already stay as they are, or are updated."""

    INSERT = "insert"
    UPSERT = "upsert"


@attrs.frozen
class Scope:
    """The target's rows that are marked as gone if a snapshot lacks them: all, or those of a window (without `end`)."""

    column: str | None = None
    start: dt.date | float | str | None = None
    end: dt.date | float | str | None = None


@attrs.frozen(kw_only=True)
class Merge:
    """How a segment's rows are merged.

    Attributes:
        table: the target.
        segment: the staged segment.
        rows: how many were staged; another number is an error.
        columns: the columns that the load brings, in the staging table too.
        shapes: those that rows bring, for each kind of row, where there are several: a column that a row lacks keeps
            its value in the target, and has its default in a new row.
        key: columns of a unique key of the target; without one rows can only be added.
        mode: what to do with rows that the target has already.
        deleted: the column that marks a row as gone: an instant or a boolean. A row that comes back loses the mark.
        scope: the rows of which those that are not staged are marked as gone; None marks none.

    Raises `TargetError` when the target does not fit.
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
            self._demand(set(self.key) <= set(self.columns), "the load does not bring all columns of its key")
        if self.mode is Mode.UPSERT:
            self._demand(bool(self.key), "an upsert needs a key")
        if self.deleted is not None:
            kind = self.table.column(self.deleted).type
            self._demand(
                kind == "boolean" or kind.startswith(("timestamp", "date")),
                f"column {self.deleted} is of type {kind}; what is gone is marked by a boolean, a date or a timestamp",
            )
            self._demand(self.deleted not in self.columns, f"the load brings {self.deleted} itself")
            self._demand(self.mode is Mode.UPSERT, "rows are marked as gone only by an upsert")
        if self.scope is not None:
            self._demand(self.deleted is not None, "no column marks what is gone")
            if self.scope.column is not None:
                self.table.column(self.scope.column)
            else:
                self._demand(self.scope.start is None and self.scope.end is None, "a window needs a column")

    def _demand(self, holds: bool, message: str) -> None:  # noqa: FBT001 - read as a sentence
        if not holds:
            raise TargetError(f"table {self.table.sql}: {message}")


@attrs.frozen(kw_only=True)
class Counts:
    """The counts of a merge: rows of the target written, staged rows that changed nothing, and staged duplicates."""

    inserted: int = 0
    updated: int = 0
    unchanged: int = 0
    deleted: int = 0
    duplicates: int = 0


async def aio_merge(connection: Any, merge: Merge) -> Counts:
    """Merge what is staged and empty the segment (asyncio-flavoured), inside the caller's transaction.

    Of several staged rows of one key the last one counts, in the order of the requests. Columns that it lacks keep the
    target's values; the other staged rows are not used for them. Only the columns that the load brings are written.

    Raises:
        StoreError: not as many rows are staged as the caller says; load the segment again.
        TargetError: the table or the staging table has changed or gone.
    """
    segment = merge.segment
    mine = segment.token, segment.number
    with told_of_targets():
        await aio_analyze(connection, segment)
        duplicates = await aio_drop_duplicates(connection, segment, merge.key) if merge.key else 0
        if merge.mode is Mode.UPSERT:
            await aio_complete(connection, merge)
        updated, inserted = await _aio_write(connection, merge, merge.rows - duplicates)
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


async def _aio_write(connection: Any, merge: Merge, rows: int) -> tuple[int, int]:
    """Update the target by the `rows` staged ones; return how many were updated and inserted."""
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
    """The columns of new rows, each set with the shapes of its rows; None for all shapes.

    A column that a row lacks is in the staging table, as NULL or the default, except numbers that the target generates.
    """
    numbered = {name for name in merge.columns if merge.table.column(name).numbered}
    groups: dict[tuple[str, ...], list[int]] = {}
    for shape in merge.shapes:
        columns = tuple(name for name in merge.columns if name not in numbered or name in shape)
        groups.setdefault(columns, []).append(shape_of(shape))
    return groups if len(groups) > 1 else {tuple(merge.columns): None}


async def aio_analyze(connection: Any, segment: StagedSegment) -> None:
    """Update the planner's statistics of the staged rows (asyncio-flavoured).

    With statistics of an empty staging table it would compare each row with each: minutes for a hundred thousand rows.
    The numbers of rows and of distinct values are enough, so a tenth of the usual sample does.
    """
    await connection.execute(f"SET LOCAL default_statistics_target = 10; ANALYZE {quote(segment.staging)}")


async def aio_compare_all(connection: Any, statement: str, *args: object) -> int:
    """Run a statement that looks up each row of the target in a snapshot (asyncio-flavoured); return the rows written.

    Servers before 16 can't hash the smaller side of an anti-join. If the target's statistics are older than its newest
    rows, they expect few rows, and would read the whole snapshot once for each.
    """
    await connection.execute("SET LOCAL enable_nestloop = off")
    tag = await connection.execute(statement, *args)
    await connection.execute("SET LOCAL enable_nestloop = on")
    return affected(tag)


async def aio_drop_duplicates(connection: Any, segment: StagedSegment, key: Sequence[str]) -> int:
    """Delete all but the last of staged rows with one key (asyncio-flavoured); return how many were deleted."""
    # Mostly there are none, which a hash of the keys shows without a sort.
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
    """Remove the segment's rows from its staging table (asyncio-flavoured); return their number.

    Raises `StoreError` if it is not the `expected` one.
    """
    tag = await connection.execute(
        f"DELETE FROM {quote(segment.staging)} s WHERE {MINE}", segment.token, segment.number
    )
    if (rows := affected(tag)) != expected:
        raise StoreError(
            f"staging table {segment.staging}: it has {rows} rows of segment {segment.number} instead of {expected}:"
            " a batch was lost in a crash of the database, or sent twice; load the segment again"
        )
    return rows


def affected(tag: str) -> int:
    """How many rows a command says that it wrote."""
    return int(tag.rpartition(" ")[2])


def differs(table: TableInfo, names: Iterable[str], row: str = "t") -> str:
    """The staged row `s` and the row with the alias `row` of the target differ in one of the columns."""
    casts = {name: "" if table.column(name).has_equality else "::text" for name in names}
    tests = [f"{row}.{quote(name)}{cast} IS DISTINCT FROM s.{quote(name)}{cast}" for name, cast in casts.items()]
    return f"({' OR '.join(tests) or 'false'})"


def assigned(names: Iterable[str], source: str = "s.") -> list[str]:
    """The columns set to those of `source`."""
    return [f"{quote(name)} = {source}{quote(name)}" for name in names]


def _is_gone(merge: Merge) -> str:
    if merge.deleted is None:
        return "false"
    test = "IS TRUE" if merge.table.column(merge.deleted).type == "boolean" else "IS NOT NULL"
    return f"(t.{quote(merge.deleted)} {test})"


def _values(merge: Merge) -> list[str]:
    return [name for name in merge.columns if name not in merge.key]


def _has_changed(merge: Merge) -> str:
    values = _values(merge)
    # A row's hash, where it has one, speaks for the row.
    compared = [CONTENT_HASH] if CONTENT_HASH in values else [name for name in values if name not in METADATA]
    return f"({differs(merge.table, compared)} OR {_is_gone(merge)})"


def _is_any_near(merge: Merge) -> str:
    """Whether the target has a row between the first and the last staged one, by its key's first column.

    For data that arrives day by day: one look into the index instead of a join with the whole table. ORDER BY makes the
    planner use the index; within an EXISTS it would be ignored.
    """
    leading = quote(next(key for key in merge.table.keys if set(key) == set(merge.key))[0])
    staged = f"SELECT s.{leading} FROM {quote(merge.segment.staging)} s WHERE {MINE} ORDER BY s.{leading}"
    return f"""
        SELECT (
          SELECT 1 FROM {merge.table.sql} t
          WHERE t.{leading} BETWEEN ({staged} LIMIT 1) AND ({staged} DESC LIMIT 1) ORDER BY t.{leading} LIMIT 1
        ) IS NOT NULL"""


def _compare(merge: Merge) -> str:
    """How many of the staged rows are in the target, and how many of those have changed."""
    return f"""
        SELECT count(*), count(*) FILTER (WHERE {_has_changed(merge)})
        FROM {quote(merge.segment.staging)} s JOIN {merge.table.sql} t ON {same_key(merge.key)} WHERE {MINE}"""


def _update(merge: Merge) -> str | None:
    sets = assigned(_values(merge))
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
    """The statement, and its arguments after the segment's own two."""
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
