"""Merges a snapshot into a table of versions by set operations: slowly changing dimensions of type 2.

A version is valid from `valid_from` (inclusive) to `valid_to` (exclusive; NULL while it is open), and `is_current`
marks the open one. The values of a snapshot are valid from its `as_of` on. A second snapshot of the same time corrects
the first: the history becomes as it would be without the first one's values of those keys. Versions that stay are
changed in place, because facts may refer to them. So no version has length zero, and nothing before that time changes.
Values that the first snapshot updated in place are kept as they were in `dl_etl_former` until a later snapshot: a
version that the second one ends gets them back.

`dl_load_history` has a row for each target: the newest snapshot's time, and the columns by which versions were
compared. A new column is filled in place. The row's lock makes merges of one target wait for each other.
history_weave.py merges a snapshot that is older than the newest one.

The order of the statements never violates a unique index on the current version of each key. All run in the caller's
transaction, on a connection with the server's own planner settings.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.jobs.errors import TargetError
from dataloader.store.etl.history_observed import aio_note_complete, aio_note_keys
from dataloader.store.etl.history_snapshot import HistoryMerge
from dataloader.store.etl.history_weave import aio_note_times, aio_weave, aio_weave_changes
from dataloader.store.etl.merge import (
    Merge,
    affected,
    aio_analyze,
    aio_compare_all,
    aio_drop_duplicates,
    aio_empty,
    aio_merge,
    assigned,
    differs,
)
from dataloader.store.etl.row_shapes import MINE, aio_complete, same_key
from dataloader.store.etl.target_table import METADATA, TableInfo, listed, literal, quote, told_of_targets

_NEVER: Final = "9999-01-01"
"""Versions that end later, also at infinity, are probably meant to be open."""
# dl_etl_former has values as texts, which other sessions must find; a pooler may ignore the settings of a connection.
_TEXTS: Final = """
SET LOCAL timezone = 'UTC'; SET LOCAL datestyle = 'ISO'; SET LOCAL intervalstyle = 'postgres';
SET LOCAL extra_float_digits = 1; SET LOCAL bytea_output = 'hex'
"""
_OPEN: Final = "INSERT INTO dl_load_history (target) VALUES ($1) ON CONFLICT DO NOTHING"
_LOCK: Final = "SELECT last_as_of, columns FROM dl_load_history WHERE target = $1 FOR UPDATE"
_CLOSE: Final = """
UPDATE dl_load_history SET last_as_of = $2::text::timestamptz, columns = $3::text[]
WHERE target = $1 AND (last_as_of, columns) IS DISTINCT FROM ($2::text::timestamptz, $3::text[])
"""
_BEGIN_AFTER: Final = "UPDATE dl_load_history SET last_as_of = $2::text::timestamptz WHERE target = $1"
_FORGET: Final = "DELETE FROM dl_etl_former WHERE target = $1"
_TAKEN: Final = """
INSERT INTO dl_load_snapshots (target, load, segment, as_of) VALUES ($1, $2, $3, $4::text::timestamptz)
ON CONFLICT (target, load, segment) DO UPDATE SET as_of = excluded.as_of
"""
_BEHIND: Final = """
SELECT s.segment, s.as_of FROM dl_load_snapshots s JOIN dl_load_history h USING (target)
WHERE s.target = $1 AND s.load = $2 AND s.as_of < h.last_as_of AND EXISTS (SELECT FROM {table})
"""


@attrs.frozen(kw_only=True)
class HistoryCounts:
    """Counts of a snapshot's merge.

    * `inserted`: first versions of new keys.
    * `changed`: versions that follow one with other values.
    * `closed`: versions of keys that are gone.
    * `reappeared`: versions of keys that had been gone.
    * `filled`: current versions whose other or added columns were updated.
    * `corrected`: versions of an earlier snapshot of the same time that were changed, removed or opened again.
    * `woven`: keys of an older snapshot whose versions were changed, split, begun or joined.
    * `duplicates`: rows of the snapshot that a later row of their key replaced.
    * `unchanged`: the rest of the snapshot.
    """

    inserted: int = 0
    changed: int = 0
    closed: int = 0
    reappeared: int = 0
    filled: int = 0
    corrected: int = 0
    woven: int = 0
    unchanged: int = 0
    duplicates: int = 0


async def aio_merge_history(connection: Any, merge: HistoryMerge) -> HistoryCounts:
    """Merge the staged snapshot and empty the segment (asyncio-flavored), in the caller's transaction.

    If a key is staged more than once, its last row wins. Sources that are read page by page repeat rows that moved to a
    later page meanwhile, and the row that was read last is the newest.

    Raises:
        TargetError: the table or the staging table has changed or is gone, or its open versions have an end.
        RowsLost: the number of staged rows is not the caller's; load the segment again.
    """
    await connection.execute(_TEXTS)
    last, known = await _aio_lock_target(connection, merge)
    if merge.history.is_of_changes:
        return await _aio_merge_changes(connection, merge, last, known)
    instant = dt.datetime.fromisoformat(merge.instant)
    if last is not None and instant < last:
        return await _aio_merge_older(connection, merge, merge.tracked if known is None else known)
    statements = _MergeStatements.of(merge, merge.tracked if known is None else known)
    with told_of_targets():
        await aio_analyze(connection, merge.segment)
        duplicates = await aio_drop_duplicates(connection, merge.segment, merge.key)
        await aio_complete(connection, merge, f"t.{quote(merge.history.is_current)}")
        withdrawn = mended = closed = 0
        is_correction = instant == last
        if not is_correction:
            await connection.execute(_FORGET, merge.table.sql)
        if is_correction:
            if merge.closes_missing:
                withdrawn = await aio_compare_all(connection, statements.withdraw, *statements.arguments)
            await statements.aio_run(connection, statements.revert)
            await statements.aio_keep(connection, statements.keep_reopened)
            mended = await statements.aio_run(connection, statements.reopen)
            mended += await statements.aio_run(connection, statements.replace)
        await statements.aio_keep(connection, statements.keep_filled)
        filled = affected(await connection.execute(statements.fill, *statements.arguments[:2]))
        await statements.aio_run(connection, statements.end_changed)
        if merge.closes_missing:
            closed = await aio_compare_all(connection, statements.end_missing, *statements.arguments)
        if is_correction and statements.filled:
            await connection.execute(statements.restore, *statements.arguments[2:], *statements.versions)
        [born] = await connection.fetch(statements.begin, *statements.arguments)
        await _aio_note_observed(connection, merge, are_new=sum(born) == merge.rows - duplicates)
        rows = await aio_empty(connection, merge.segment, merge.rows - duplicates)
    # Without a complete snapshot not all current versions have a value in an added column yet.
    columns = [name for name in merge.tracked if merge.closes_missing or known is None or name in known]
    await connection.execute(_CLOSE, merge.table.sql, merge.instant, columns)
    return HistoryCounts(
        inserted=born["inserted"],
        changed=born["changed"],
        reappeared=born["reappeared"],
        closed=closed,
        filled=filled,
        corrected=withdrawn + mended,
        unchanged=rows - sum(born) - filled - mended,
        duplicates=duplicates,
    )


async def _aio_merge_older(connection: Any, merge: HistoryMerge, known: Sequence[str]) -> HistoryCounts:
    """Merge a snapshot that is older than the newest one: it changes the past and its consequences."""
    with told_of_targets():
        await aio_analyze(connection, merge.segment)
        duplicates = await aio_drop_duplicates(connection, merge.segment, merge.key)
        woven = await aio_weave(connection, merge, known)
        await _aio_note_observed(connection, merge, are_new=False)
        await aio_empty(connection, merge.segment, merge.rows - duplicates)
    return HistoryCounts(**attrs.asdict(woven), duplicates=duplicates)


async def _aio_merge_changes(
    connection: Any, merge: HistoryMerge, last: dt.datetime | None, known: Sequence[str] | None
) -> HistoryCounts:
    """Merge rows that each have their own time, in whatever order they arrive."""
    changed_at = merge.history.changed_at or ""
    compared = merge.tracked if known is None else known
    with told_of_targets():
        await aio_analyze(connection, merge.segment)
        duplicates = await aio_drop_duplicates(connection, merge.segment, (*merge.key, changed_at))
        woven = await aio_weave_changes(connection, merge, compared)
        newest = await aio_note_times(connection, merge)
        await aio_empty(connection, merge.segment, merge.rows - duplicates)
    newest = max((one for one in (last, newest) if one is not None), default=None)
    columns = [name for name in merge.tracked if known is None or name in known]
    await connection.execute(_CLOSE, merge.table.sql, newest and newest.isoformat(), columns)
    return HistoryCounts(**attrs.asdict(woven), duplicates=duplicates)


async def _aio_note_observed(connection: Any, merge: HistoryMerge, *, are_new: bool) -> None:
    if merge.closes_missing:
        await aio_note_complete(connection, merge.table, merge.instant)
    else:
        await aio_note_keys(connection, merge.table, merge.instant, merge.segment, merge.key, are_new=are_new)


async def aio_note_snapshot(connection: Any, merge: HistoryMerge, load: str, segment: str) -> None:
    """Record after its merge that a load's segment is merged completely (asyncio-flavored)."""
    if merge.history.is_of_changes:
        return  # it is no snapshot
    await connection.execute(_TAKEN, merge.table.sql, load, segment, merge.instant)


async def aio_snapshots_behind(connection: Any, table: TableInfo, load: str) -> frozenset[tuple[str, dt.datetime]]:
    """Return a load's segments, with their times, that were completely merged before the last one (asyncio-flavored).

    None if the table is empty: it was truncated since, because versions are never deleted.
    """
    rows = await connection.fetch(_BEHIND.format(table=table.sql), table.sql, load)
    return frozenset((row["segment"], row["as_of"]) for row in rows)


async def aio_merge_any(connection: Any, merge: Merge | HistoryMerge) -> dict[str, int]:
    """Merge the staged rows into a table of versions or of rows (asyncio-flavored); return the counts by name."""
    merged = await (aio_merge(connection, merge) if isinstance(merge, Merge) else aio_merge_history(connection, merge))
    counts: dict[str, int] = attrs.asdict(merged)
    return counts


async def _aio_lock_target(connection: Any, merge: HistoryMerge) -> tuple[dt.datetime | None, Sequence[str] | None]:
    """Wait for other merges of the target; return its last time and its compared columns, None if unknown."""
    target = merge.table.sql
    await connection.execute(_OPEN, target)
    state = await connection.fetchrow(_LOCK, target)
    if state["last_as_of"] is not None:
        return state["last_as_of"], state["columns"]
    # This is the first merge; versions that another program has written count as snapshots.
    begins, ends, current = (quote(name) for name in merge.history.columns)
    zone = "::timestamp AT TIME ZONE 'UTC'" if merge.table.column(merge.history.valid_from).type == "date" else ""
    with told_of_targets():
        found = await connection.fetchrow(
            f"SELECT max(greatest({begins}, {ends})){zone} AS newest,"
            f" max({ends}::text) FILTER (WHERE {ends} >= '{_NEVER}') AS never,"
            f" max({ends}::text) FILTER (WHERE {current}) AS until FROM {merge.table.sql}"
        )
    name = merge.history.valid_to
    if found["never"] is not None:
        raise TargetError(
            f"table {target}: {name} of some versions is {found['never']}; loads mark an open version by NULL alone."
            f" Load into a separate table, or convert this one, after all that reads it: UPDATE {target}"
            f" SET {ends} = NULL WHERE {ends} >= '{_NEVER}'"
        )
    if found["until"] is not None:
        current_column = merge.history.is_current
        raise TargetError(
            f"table {target}: {name} of some versions with {current_column} is {found['until']}, but must be NULL;"
            f" set {current_column} to false for versions that have an end"
        )
    newest = found["newest"]
    if newest is not None:
        # It is recorded because an older snapshot may join or remove the newest version.
        await connection.execute(_BEGIN_AFTER, target, newest.isoformat())
        if merge.history.complete:
            # An incomplete snapshot of the same time would otherwise hide that this one counts as complete.
            await aio_note_complete(connection, merge.table, newest.isoformat())
    return newest, None


@attrs.frozen(kw_only=True)
class _MergeStatements:
    """SQL of a merge. `s` is a staged row, `t` a version; `$1` and `$2` name the segment, `$3` is the snapshot's time.

    `filled` are the columns that are updated in place; `versions` are the arguments that keep their values.
    """

    arguments: tuple[object, ...]
    versions: tuple[object, ...]
    filled: Sequence[str]
    withdraw: str
    revert: str
    reopen: str
    replace: str
    fill: str
    end_changed: str
    end_missing: str
    begin: str
    keep_reopened: str
    keep_filled: str
    restore: str

    async def aio_run(self, connection: Any, statement: str) -> int:
        """Run one of the statements (asyncio-flavored); return the number of versions it wrote or removed."""
        return affected(await connection.execute(statement, *self.arguments))

    async def aio_keep(self, connection: Any, statement: str) -> None:
        """Save the values of versions before they are updated in place (asyncio-flavored)."""
        if self.filled:
            await connection.execute(statement, *self.arguments, *self.versions)

    @classmethod
    def of(cls, merge: HistoryMerge, known: Sequence[str]) -> _MergeStatements:
        """Return the statements for a target whose versions were compared by the columns `known` so far."""
        table, key = merge.table, merge.key
        staging = quote(merge.segment.staging)
        begins, ends, current = (
            quote(merge.history.valid_from),
            quote(merge.history.valid_to),
            quote(merge.history.is_current),
        )
        now = f"$3::text::{table.column(merge.history.valid_from).type}"
        added = [name for name in merge.tracked if name not in known]
        values = (*merge.tracked, *merge.others)

        changed = differs(table, [name for name in merge.tracked if name in known])
        stale = differs(table, [*added, *(name for name in merge.others if name not in METADATA)])
        if not merge.closes_missing and added:
            # Some versions have no value in an added column yet; the others are compared by it.
            there = " OR ".join(f"(t.{quote(name)} IS NOT NULL AND {differs(table, [name])})" for name in added)
            changed = f"({changed} OR {there})"
        match = f"{MINE} AND {same_key(key)}"
        missing = f"NOT EXISTS (SELECT FROM {staging} s WHERE {match})"
        # The version that an earlier snapshot of this time ended, of the key of `s`.
        reverted = f"t.{ends} = {now} AND NOT {changed}"
        key_of_c = " AND ".join(f"c.{quote(name)} = s.{quote(name)}" for name in key)
        update = f"UPDATE {table.sql} t SET"
        sets = assigned(values or key)
        filled = [*added, *merge.others]
        of_version = f"ARRAY[{', '.join(f't.{quote(name)}::text' for name in (*key, merge.history.valid_from))}]"
        of_columns = f"ARRAY[{', '.join(f't.{quote(name)}::text' for name in filled)}]::text[]"
        keep = f"""
            INSERT INTO dl_etl_former (target, version, columns)
            SELECT $4, jsonb_object($5::text[], {of_version}), jsonb_object($6::text[], {of_columns})
            FROM {table.sql} t JOIN {staging} s ON {match} WHERE """
        restored = [
            f"{quote(name)} = CASE WHEN f.columns ? {literal(name)} THEN (f.columns ->> {literal(name)})"
            f"::{table.column(name).type} ELSE t.{quote(name)} END"
            for name in filled
        ]
        is_filled = f"t.{current} AND NOT {changed} AND {stale}"
        return cls(
            arguments=(merge.segment.token, merge.segment.number, str(merge.as_of)),
            versions=(table.sql, [*key, merge.history.valid_from], filled),
            filled=filled,
            # A key that began at this time is gone again.
            withdraw=f"DELETE FROM {table.sql} t WHERE t.{current} AND t.{begins} = {now} AND {missing}",
            # A key has its former values again: delete the version in between, and open the former one.
            revert=f"""
                DELETE FROM {table.sql} c USING {table.sql} t, {staging} s
                WHERE {match} AND {key_of_c} AND c.{current} AND c.{begins} = {now} AND {reverted}""",
            reopen=f"""
                {update} {", ".join([f"{ends} = NULL", f"{current} = true", *sets])} FROM {staging} s
                WHERE {match} AND {reverted}""",
            # A key has other values than in an earlier snapshot.
            replace=f"""
                {update} {", ".join(sets)} FROM {staging} s
                WHERE {match} AND t.{current} AND t.{begins} = {now} AND {changed}""",
            fill=f"""
                {update} {", ".join(sets)} FROM {staging} s
                WHERE {match} AND {is_filled}""",
            keep_reopened=f"{keep} {reverted} ON CONFLICT DO NOTHING",
            keep_filled=f"{keep} {is_filled} AND t.{begins} < {now} ON CONFLICT DO NOTHING",
            # Versions that this correction has ended, except for unchanged ones.
            restore=f"""
                {update} {", ".join(restored)} FROM dl_etl_former f
                WHERE f.target = $2 AND t.{ends} = {now.replace("$3", "$1")}
                  AND f.version = jsonb_object($3::text[], {of_version})
                  AND f.columns <> jsonb_object($4::text[], {of_columns})""",
            end_changed=f"""
                {update} {ends} = {now}, {current} = false FROM {staging} s
                WHERE {match} AND t.{current} AND {changed}""",
            end_missing=f"{update} {ends} = {now}, {current} = false WHERE t.{current} AND {missing}",
            begin=f"""
                WITH born AS (
                  INSERT INTO {table.sql} ({listed(merge.columns)}, {begins}, {ends}, {current})
                  SELECT {listed(merge.columns, "s.")}, {now}, NULL, true FROM {staging} s
                  WHERE {MINE} AND NOT EXISTS (SELECT FROM {table.sql} t WHERE {same_key(key)} AND t.{current})
                  RETURNING {listed(key)}
                ), former AS (
                  SELECT max(t.{ends}) AS ended FROM born s LEFT JOIN {table.sql} t ON {same_key(key)}
                  GROUP BY {listed(key, "s.")}
                )
                SELECT count(*) FILTER (WHERE ended IS NULL) AS inserted,
                       count(*) FILTER (WHERE ended = {now}) AS changed,
                       count(*) FILTER (WHERE ended < {now}) AS reappeared
                FROM former""",
        )
