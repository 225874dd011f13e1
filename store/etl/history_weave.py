"""Weaves a snapshot that is older than the newest one into a table of versions, by set operations.

The values of such a snapshot are valid for a key from the snapshot's time until the next time at which the key was
observed (history_observed.py), or at which one of its versions begins or ends. The table's content for that span is
replaced: versions are cut, split, begun or removed, and joined with equal neighbors. So the result does not depend on
the order in which snapshots are merged, and a snapshot that is merged again changes nothing.

Columns that are not tracked have no history: both parts of a split version keep their values, and a snapshot updates
them only if no later one has observed the version.

Rows that have their own times (`changed_at`) are merged in the same way, each as a snapshot of its key alone. A row
that is marked as gone is like a key that a complete snapshot lacks. If a segment has several rows of a key, the oldest
row of each key is merged first, then the next one.

A work table has a row for each key of the snapshot, and for each key that a complete snapshot lacks. `w` is such a row,
`s` a staged row, `t` a version. Each statement leaves the table without overlaps and with at most one current version
of a key, so that unique indexes and exclusion constraints are satisfied between the statements.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.store.etl.history_observed import ADD_KEYS, hash_of
from dataloader.store.etl.history_snapshot import HistoryMerge
from dataloader.store.etl.merge import affected, aio_compare_all, assigned, differs
from dataloader.store.etl.row_shapes import MINE, aio_complete, same_key
from dataloader.store.etl.target_table import METADATA, listed, literal, quote

_FIRST_BATCH: Final = 4
"""Number of later snapshots whose keys are searched first; each further search takes twice as many."""

AT: Final = '"dl:at"'
UNTIL: Final = '"dl:until"'
BEGINS: Final = '"dl:begins"'
ENDS: Final = '"dl:ends"'
FORMER: Final = '"dl:former"'
IS_THERE: Final = '"dl:there"'
IS_SAME: Final = '"dl:same"'
JOINS_NEXT: Final = '"dl:next"'
BEGINS_HERE: Final = '"dl:here"'
GOES_ON: Final = '"dl:on"'
IS_LAST: Final = '"dl:last"'
HASH: Final = '"dl:hash"'
ROW: Final = '"dl:row"'

# They are stored because the planner can only guess how often a comparison of two columns is true.
_MARKS: Final = (IS_THERE, IS_SAME, JOINS_NEXT, BEGINS_HERE, GOES_ON, IS_LAST)

_NEXT_COMPLETE: Final = "SELECT min(as_of) FROM dl_etl_observed WHERE target = $1 AND as_of > $2 AND keys IS NULL"
# Some programs from before the first release recorded only the segments that they merged completely.
_NEXT_UNRECORDED: Final = """
SELECT min(s.as_of) FROM dl_load_snapshots s WHERE s.target = $1 AND s.as_of > $2
AND NOT EXISTS (SELECT FROM dl_etl_observed o WHERE o.target = s.target AND o.as_of = s.as_of)
"""
_WITH_KEYS: Final = """
SELECT as_of FROM dl_etl_observed WHERE target = $1 AND as_of > $2 AND keys <> '{}'
AND ($3::timestamptz IS NULL OR as_of < $3) ORDER BY as_of
"""


@attrs.frozen(kw_only=True)
class Woven:
    """Counts of an older snapshot's merge.

    * `woven`: keys of the snapshot whose versions were changed.
    * `closed`: keys that it lacks and whose versions were cut.
    * `filled`: versions whose other columns were updated.
    * `unchanged`: its other keys.
    """

    woven: int
    closed: int
    filled: int
    unchanged: int
    inserted: int = 0
    changed: int = 0


async def aio_weave(connection: Any, merge: HistoryMerge, known: Sequence[str]) -> Woven:
    """Merge the staged snapshot, which has each key once (asyncio-flavored), in the caller's transaction.

    `known` are the columns by which the versions were compared so far. The staged rows stay.
    """
    sql = _WeaveStatements.of(merge, known)
    await aio_complete(connection, merge, sql.is_valid)
    await connection.execute(sql.create)
    arguments = merge.segment.token, merge.segment.number, str(merge.as_of)
    await _aio_spans(connection, merge, sql, arguments)
    return await _aio_apply_work(connection, merge, sql)


async def aio_weave_changes(connection: Any, merge: HistoryMerge, known: Sequence[str]) -> Woven:
    """Merge staged rows that have their own times, each key and time once (asyncio-flavored), as `aio_weave` does.

    `inserted` are versions of keys that had none at the time, `changed` those that follow another one, `woven` those
    whose key was already observed at a later time.
    """
    sql = _WeaveStatements.of(merge, known)
    mine = merge.segment.token, merge.segment.number
    counts: Counter[str] = Counter({field.name: 0 for field in attrs.fields(Woven)})
    for place in range(1, (await connection.fetchval(sql.rounds, *mine)) + 1):
        await aio_complete(connection, merge, sql.is_valid)
        await connection.execute(sql.create)
        await aio_compare_all(connection, sql.span, *mine, place, merge.table.sql)
        await connection.execute(f"ANALYZE {sql.work}")
        since = await connection.fetchval(f"SELECT min({sql.at_of_work}) FROM {sql.work} w")
        await _aio_search_later(connection, merge, sql, since, None)
        counts.update(attrs.asdict(await _aio_apply_work(connection, merge, sql)))
    return Woven(**counts)


async def aio_note_times(connection: Any, merge: HistoryMerge) -> dt.datetime | None:
    """Record the times of staged rows at which no version begins or ends (asyncio-flavored); return the newest."""
    sql = _WeaveStatements.of(merge, ())
    mine = merge.segment.token, merge.segment.number
    await aio_compare_all(connection, sql.note_times, *mine, merge.table.sql)
    newest: dt.datetime | None = await connection.fetchval(sql.newest, *mine)
    return newest


async def _aio_apply_work(connection: Any, merge: HistoryMerge, sql: _WeaveStatements) -> Woven:
    """Change the versions as the work table requires, and drop it."""
    await connection.execute(sql.compare)
    # Without new statistics the planner would take each mark to be false, and each beginning to be NULL.
    await connection.execute(f"ANALYZE {sql.work}")
    [counts] = await connection.fetch(sql.count)
    for statement in sql.of_former:
        await connection.execute(statement, merge.table.sql, [*merge.key, merge.history.valid_from])
    filled = 0
    if counts["unchanged"]:
        filled = affected(await connection.execute(sql.fill))
    if any(counts[name] for name in ("woven", "closed", "inserted", "changed")):
        await connection.execute(sql.keep_joined, merge.table.sql)
        for statement in sql.of_versions:
            await connection.execute(statement)
    await connection.execute(f"DROP TABLE {sql.work}")
    done = {name: counts[name] for name in ("woven", "closed", "inserted", "changed")}
    return Woven(**done, filled=filled, unchanged=counts["unchanged"] + counts["gone"] - filled)


async def _aio_spans(
    connection: Any, merge: HistoryMerge, sql: _WeaveStatements, arguments: tuple[int, int, str]
) -> None:
    """Find the time until which the snapshot's values are valid, for each key."""
    instant = dt.datetime.fromisoformat(merge.instant)
    target = merge.table.sql
    if merge.history.complete:
        *_, as_of = arguments
        await connection.execute(sql.keep_boundaries, target, as_of)
    complete = await connection.fetchval(_NEXT_COMPLETE, target, instant)
    if merge.history.complete:
        found = [complete, await connection.fetchval(_NEXT_UNRECORDED, target, instant)]
        complete = min((one for one in found if one is not None), default=None)
    bound = None if complete is None else complete.isoformat()
    if merge.closes_missing:
        await aio_compare_all(connection, sql.span, *arguments, bound)
    else:
        await connection.execute(sql.span, *arguments, bound)
    await connection.execute(f"ANALYZE {sql.work}")
    await _aio_search_later(connection, merge, sql, instant, complete)


async def _aio_search_later(
    connection: Any, merge: HistoryMerge, sql: _WeaveStatements, since: dt.datetime, until: dt.datetime | None
) -> None:
    """End the spans at later times, after `since` and before `until`, at which their keys were observed."""
    target = merge.table.sql
    later = [row["as_of"] for row in await connection.fetch(_WITH_KEYS, target, since, until)]
    size = _FIRST_BATCH
    while later:
        batch, later = later[:size], later[size:]
        # The planner expects a few keys of a snapshot, and would read the work table once for each.
        await aio_compare_all(connection, sql.search, target, batch[0], batch[-1])
        if later and not await connection.fetchval(sql.is_open, later[0]):
            return
        size *= 2


@attrs.frozen(kw_only=True)
class _WeaveStatements:
    """SQL of a merge; `$1` and `$2` name the segment in `span`, `$3` is the snapshot's time.

    Attributes:
        work: the work table.
        is_valid: `t` is the version that is valid at that time.
        rounds: the maximum number of rows of one key; `$3` in `span` is the number of the round, if rows have their own
            times.
        note_times: record the times of rows that no version shows.
        of_former: keep the values that versions had before the newest snapshot with their versions.
        of_versions: change the versions.
    """

    work: str
    is_valid: str
    create: str
    keep_boundaries: str
    span: str
    search: str
    is_open: str
    compare: str
    count: str
    keep_joined: str
    fill: str
    of_former: tuple[str, ...]
    of_versions: tuple[str, ...]
    rounds: str
    at_of_work: str
    note_times: str
    newest: str

    @classmethod
    def of(cls, merge: HistoryMerge, known: Sequence[str]) -> _WeaveStatements:
        """Return the statements for a target whose versions were compared by the columns `known` so far."""
        table, key, staging = merge.table, merge.key, quote(merge.segment.staging)
        work = quote(f"{merge.segment.staging}w")
        begins, ends, current = (quote(name) for name in merge.history.columns)
        kind = table.column(merge.history.valid_from).type
        names = _Names(merge, known)

        def of_kind(instant: str) -> str:
            return f"({instant} AT TIME ZONE 'UTC')::date" if kind == "date" else instant

        def same(one: str, other: str) -> str:
            return " AND ".join(f"{one}.{quote(name)} = {other}.{quote(name)}" for name in key)

        def version_of_w(beginning: str) -> str:
            texts = [f"w.{quote(name)}::text" for name in key]
            return f"jsonb_object($2::text[], ARRAY[{', '.join([*texts, f'({beginning})::text'])}])"

        is_valid = f"(t.{begins} <= {{at}} AND (t.{ends} IS NULL OR t.{ends} > {{at}}))"
        now = f"$3::text::{kind}"
        missing = f"""
            UNION ALL
            SELECT DISTINCT {listed(key, "t.")}, {now}, NULL::tid, {hash_of(table, key, "t")} FROM {table.sql} t
            WHERE {is_valid.format(at=now)}
              AND NOT EXISTS (SELECT FROM {staging} s WHERE {MINE} AND {same_key(key)})"""
        of_c = f"{same('t', 'w')} AND t.{begins} = w.{BEGINS}"
        changes = f"NOT w.{IS_SAME}"
        begins_here, goes_on, is_last = f"w.{BEGINS_HERE}", f"w.{GOES_ON}", f"w.{IS_LAST}"
        is_covered = f"({begins_here} AND {is_last})"
        is_alone = f"w.{IS_THERE} AND w.{FORMER} IS NULL AND NOT w.{JOINS_NEXT}"
        moved_to = f"CASE WHEN w.{JOINS_NEXT} THEN coalesce(w.{FORMER}, w.{AT}) ELSE w.{UNTIL} END"
        is_moved = f"(w.{JOINS_NEXT} OR {goes_on})"
        until_of_w = names.as_instant(UNTIL, "w")
        is_recorded = ""
        if merge.history.complete:
            is_recorded = f"""
                AND EXISTS (SELECT FROM dl_etl_observed r WHERE r.target = $1 AND r.as_of = {until_of_w})"""
        # By its ctid: the staging table has no index, and may be full of dead rows of earlier segments.
        row_of_w = f"s.ctid = w.{ROW}"
        instants = ", ".join(f"t.{begins} AS {name}" for name in (AT, UNTIL, BEGINS, ENDS, FORMER))
        marks = ", ".join(f"false AS {name}" for name in _MARKS)
        values = (*merge.tracked, *merge.others)
        extended = ", ".join([f"{ends} = w.{UNTIL}", f"{current} = (w.{UNTIL} IS NULL)", *assigned(values)])
        copied = [
            column.name
            for column in table.columns
            if not column.generated
            and (not column.numbered or column.name in merge.columns)
            and column.name not in merge.history.columns
        ]
        span = f"""
                INSERT INTO {work} ({listed(key)}, {AT}, {UNTIL}, {IS_THERE}, {HASH}, {ROW})
                SELECT {listed(key, "k.")}, k.at, least({of_kind("$4::text::timestamptz")},
                  min(t.{begins}) FILTER (WHERE t.{begins} > k.at), min(t.{ends}) FILTER (WHERE t.{ends} > k.at)),
                  k.place IS NOT NULL, k.hash, k.place
                FROM (
                  SELECT {listed(key, "s.")}, {now} AS at, s.ctid AS place, {hash_of(table, key, "s")} AS hash
                  FROM {staging} s WHERE {MINE}
                  {missing if merge.closes_missing else ""}) AS k
                LEFT JOIN {table.sql} t ON {same("t", "k")} GROUP BY {listed(key, "k.")}, k.at, k.place, k.hash"""
        search = f"""
                UPDATE {work} w SET {UNTIL} = {of_kind("m.at")}
                FROM (
                  SELECT k.hash, min(o.as_of) AS at FROM dl_etl_observed o CROSS JOIN LATERAL unnest(o.keys) AS k (hash)
                  WHERE o.target = $1 AND o.as_of BETWEEN $2 AND $3 GROUP BY k.hash) AS m
                WHERE w.{HASH} = m.hash AND (w.{UNTIL} IS NULL OR w.{UNTIL} > {of_kind("m.at")})"""
        count = f"""
                SELECT count(*) FILTER (WHERE {IS_SAME}) AS unchanged,
                  count(*) FILTER (WHERE {IS_THERE} AND NOT {IS_SAME}) AS woven,
                  count(*) FILTER (WHERE NOT {IS_THERE}) AS closed,
                  0 AS inserted, 0 AS changed, 0 AS gone
                FROM {work}"""
        staged_at = ""
        if merge.history.changed_at is not None:
            staged_at = quote(merge.history.changed_at)
            is_there = f"s.{current} IS NOT FALSE" if merge.is_marked else "true"
            # A complete snapshot, of another load, observes each key.
            complete = f"""(
                SELECT min(o.as_of) FROM dl_etl_observed o
                WHERE o.target = $4 AND o.keys IS NULL AND o.as_of > {names.as_instant("at", "k")})"""
            span = f"""
                INSERT INTO {work} ({listed(key)}, {AT}, {UNTIL}, {IS_THERE}, {HASH}, {ROW})
                SELECT {listed(key, "k.")}, k.at, least({of_kind(complete)},
                  min(t.{begins}) FILTER (WHERE t.{begins} > k.at), min(t.{ends}) FILTER (WHERE t.{ends} > k.at)),
                  k.is_there, k.hash, CASE WHEN k.is_there THEN k.place END
                FROM (
                  SELECT {listed(key, "s.")}, s.{staged_at} AS at, s.ctid AS place, {is_there} AS is_there,
                    {hash_of(table, key, "s")} AS hash,
                    row_number() OVER (PARTITION BY {listed(key, "s.")} ORDER BY s.{staged_at}) AS number
                  FROM {staging} s WHERE {MINE}) AS k
                LEFT JOIN {table.sql} t ON {same("t", "k")}
                WHERE k.number = $3::bigint GROUP BY {listed(key, "k.")}, k.at, k.place, k.is_there, k.hash"""
            search = f"""
                UPDATE {work} w SET {UNTIL} = {of_kind("m.at")}
                FROM (
                  SELECT v.ctid AS place, min(o.as_of) AS at
                  FROM {work} v JOIN (
                    SELECT o.as_of, k.hash FROM dl_etl_observed o CROSS JOIN LATERAL unnest(o.keys) AS k (hash)
                    WHERE o.target = $1 AND o.as_of BETWEEN $2 AND $3) AS o
                  ON o.hash = v.{HASH} AND o.as_of > {names.as_instant(AT, "v")} GROUP BY v.ctid) AS m
                WHERE w.ctid = m.place AND (w.{UNTIL} IS NULL OR w.{UNTIL} > {of_kind("m.at")})"""
            is_new = f"{IS_THERE} AND NOT {IS_SAME} AND {UNTIL} IS NULL"
            count = f"""
                SELECT count(*) FILTER (WHERE {IS_SAME}) AS unchanged,
                  count(*) FILTER (WHERE {IS_THERE} AND NOT {IS_SAME} AND {UNTIL} IS NOT NULL) AS woven,
                  count(*) FILTER (WHERE {is_new} AND {BEGINS} IS NULL) AS inserted,
                  count(*) FILTER (WHERE {is_new} AND {BEGINS} IS NOT NULL) AS changed,
                  count(*) FILTER (WHERE NOT {IS_THERE} AND {BEGINS} IS NOT NULL) AS closed,
                  count(*) FILTER (WHERE NOT {IS_THERE} AND {BEGINS} IS NULL) AS gone
                FROM {work}"""
        staged_instant = names.as_instant(staged_at, "s")
        return cls(
            work=work,
            is_valid=is_valid.format(at=f"s.{staged_at}" if staged_at else f"'{merge.as_of}'::{kind}"),
            create=f"""
                CREATE UNLOGGED TABLE {work} AS
                SELECT {listed(key, "t.")}, {instants}, {marks}, 0::bigint AS {HASH}, t.ctid AS {ROW}
                FROM {table.sql} t WITH NO DATA""",
            # In a complete history each version begins and ends at a snapshot, even if another program has written it.
            # This snapshot and the next boundary are recorded, because weaving may remove the boundary from the table.
            keep_boundaries=f"""
                INSERT INTO dl_etl_observed (target, as_of)
                SELECT $1, found.boundary FROM (
                  SELECT {names.as_instant(begins)} AS boundary FROM {table.sql} t WHERE t.{begins} >= $2::text::{kind}
                  UNION SELECT {names.as_instant(ends)} FROM {table.sql} t WHERE t.{ends} >= $2::text::{kind}
                ) AS found
                WHERE NOT EXISTS (SELECT FROM dl_etl_observed o WHERE o.target = $1 AND o.as_of = found.boundary)
                  AND NOT EXISTS (SELECT FROM dl_load_snapshots s WHERE s.target = $1 AND s.as_of = found.boundary)
                ORDER BY found.boundary LIMIT 2 ON CONFLICT DO NOTHING""",
            span=span,
            search=search,
            is_open=f"""
                SELECT EXISTS (
                  SELECT FROM {work} WHERE {UNTIL} IS NULL OR {UNTIL} > {of_kind("$1::timestamptz")})""",
            # Find the version that is valid at the time, and its neighbors that are equal to the staged row.
            compare=f"""
                UPDATE {work} w SET {BEGINS} = f.begins, {ENDS} = f.ends, {IS_SAME} = f.is_same, {FORMER} = f.former,
                  {JOINS_NEXT} = f.joins_next, {BEGINS_HERE} = f.begins_here, {GOES_ON} = f.goes_on,
                  {IS_LAST} = f.is_last
                FROM (
                  SELECT o.ctid AS place, t.{begins} AS begins, t.{ends} AS ends, p.{begins} AS former,
                    o.{IS_THERE} AND t.{begins} IS NOT NULL AND NOT {names.changed("t")} AS is_same,
                    n.{begins} IS NOT NULL AS joins_next,
                    t.{begins} IS NOT NULL AND t.{begins} = o.{AT} AS begins_here,
                    t.{begins} IS NOT NULL AND o.{UNTIL} IS NOT NULL
                      AND (t.{ends} IS NULL OR t.{ends} > o.{UNTIL}) AS goes_on,
                    t.{begins} IS NOT NULL AND t.{ends} IS NOT DISTINCT FROM o.{UNTIL} AS is_last
                  FROM {work} o LEFT JOIN {staging} s ON s.ctid = o.{ROW}
                  LEFT JOIN {table.sql} t ON {same("t", "o")} AND {is_valid.format(at=f"o.{AT}")}
                  LEFT JOIN {table.sql} p ON {same("p", "o")} AND p.{ends} = o.{AT} AND o.{IS_THERE}
                    AND NOT {names.changed("p")}
                  LEFT JOIN {table.sql} n ON {same("n", "o")} AND n.{begins} = o.{UNTIL} AND o.{IS_THERE}
                    AND NOT {names.changed("n")}) AS f
                WHERE w.ctid = f.place""",
            count=count,
            # The beginning of a version shows that its key was observed. Joining moves it to an earlier time. In a
            # complete history a time without recorded keys is in dl_load_snapshots, and stays without them.
            keep_joined=f"""
                INSERT INTO dl_etl_observed AS o (target, as_of, keys)
                SELECT $1, {until_of_w}, array_agg(DISTINCT w.{HASH}) FROM {work} w
                WHERE {changes} AND w.{JOINS_NEXT} {is_recorded} GROUP BY w.{UNTIL} {ADD_KEYS}""",
            fill=f"""
                UPDATE {table.sql} t SET {", ".join(assigned(values or key))} FROM {work} w, {staging} s
                WHERE {of_c} AND {row_of_w} AND w.{IS_SAME} AND {is_last}
                  AND {differs(table, names.filled)}""",
            of_former=(
                # A version that is replaced, or that this snapshot observes last, has no other values to return to. A
                # version that begins now has none either: the kept ones are of a version that was deleted by SQL.
                f"""
                DELETE FROM dl_etl_former f USING (
                  SELECT {version_of_w(f"w.{BEGINS}")} AS version FROM {work} w
                  WHERE CASE WHEN {changes} THEN {is_covered} ELSE {is_last} END
                  UNION SELECT {version_of_w(moved_to)} FROM {work} w WHERE {changes} AND {is_moved}
                  UNION SELECT {version_of_w(f"w.{AT}")} FROM {work} w
                  WHERE {changes} AND w.{IS_THERE} AND NOT {begins_here}) AS gone
                WHERE f.target = $1 AND f.version = gone.version""",
                # The part after the span, or the next version, is the one that the newest snapshot has filled.
                f"""
                UPDATE dl_etl_former f SET version = f.version
                  || jsonb_build_object({literal(merge.history.valid_from)}, ({moved_to})::text)
                FROM {work} w WHERE f.target = $1 AND {changes} AND {is_moved}
                  AND f.version = {version_of_w(f"CASE WHEN w.{JOINS_NEXT} THEN w.{UNTIL} ELSE w.{BEGINS} END")}""",
            ),
            of_versions=(
                # The valid version keeps the part before the time ...
                f"""
                UPDATE {table.sql} t SET {ends} = w.{AT}, {current} = false FROM {work} w
                WHERE {changes} AND {of_c} AND w.{BEGINS} < w.{AT}""",
                # ... and the part after the span, as a separate version or with a later beginning.
                f"""
                INSERT INTO {table.sql} ({listed(copied)}, {begins}, {ends}, {current})
                SELECT {listed(copied, "t.")}, w.{UNTIL}, w.{ENDS}, w.{ENDS} IS NULL
                FROM {work} w JOIN {table.sql} t ON {of_c} WHERE {changes} AND w.{BEGINS} < w.{AT} AND {goes_on}""",
                f"""
                UPDATE {table.sql} t SET {begins} = w.{UNTIL} FROM {work} w
                WHERE {changes} AND {of_c} AND {begins_here} AND {goes_on}""",
                f"""
                DELETE FROM {table.sql} t USING {work} w
                WHERE {changes} AND {of_c} AND {is_covered} AND NOT ({is_alone})""",
                # Equal neighbors become one version with the later one's row and values.
                f"""
                DELETE FROM {table.sql} t USING {work} w
                WHERE {changes} AND {same("t", "w")} AND t.{begins} = w.{FORMER} AND w.{JOINS_NEXT}""",
                f"""
                UPDATE {table.sql} t SET {begins} = coalesce(w.{FORMER}, w.{AT}) FROM {work} w
                WHERE {changes} AND {same("t", "w")} AND t.{begins} = w.{UNTIL} AND w.{JOINS_NEXT}""",
                f"""
                UPDATE {table.sql} t SET {extended} FROM {work} w, {staging} s
                WHERE {changes} AND {row_of_w} AND {same("t", "w")} AND t.{begins} = w.{FORMER}
                  AND NOT w.{JOINS_NEXT}""",
                f"""
                UPDATE {table.sql} t SET {", ".join(assigned(values or key))} FROM {work} w, {staging} s
                WHERE {changes} AND {row_of_w} AND {of_c} AND {is_covered} AND {is_alone}""",
                f"""
                INSERT INTO {table.sql} ({listed(merge.columns)}, {begins}, {ends}, {current})
                SELECT {listed(merge.columns, "s.")}, w.{AT}, w.{UNTIL}, w.{UNTIL} IS NULL
                FROM {work} w JOIN {staging} s ON {row_of_w}
                WHERE {changes} AND {is_alone} AND NOT {is_covered}""",
            ),
            rounds=f"""
                SELECT coalesce(max(of_key.number), 0) FROM (
                  SELECT count(*) AS number FROM {staging} s WHERE {MINE} GROUP BY {listed(key, "s.")}) AS of_key""",
            at_of_work=names.as_instant(AT, "w"),
            # A version that begins at a row's time already records it; one that ends there may be removed.
            note_times=f"""
                INSERT INTO dl_etl_observed AS o (target, as_of, keys)
                SELECT $3, {staged_instant}, array_agg(DISTINCT {hash_of(table, key, "s")}) FROM {staging} s
                WHERE {MINE} AND NOT EXISTS (
                  SELECT FROM {table.sql} t WHERE {same_key(key)} AND t.{begins} = s.{staged_at})
                GROUP BY {staged_instant} {ADD_KEYS}""",
            newest=f"SELECT max({staged_instant}) FROM {staging} s WHERE {MINE}",
        )


@attrs.frozen
class _Names:
    """Columns of a merge that distinguish versions, and columns that are filled in place."""

    merge: HistoryMerge
    known: Sequence[str]

    @property
    def added(self) -> list[str]:
        """Tracked columns in which not all versions have a value yet."""
        return [name for name in self.merge.tracked if name not in self.known]

    @property
    def filled(self) -> list[str]:
        """Columns whose values are updated in place."""
        return [*self.added, *(name for name in self.merge.others if name not in METADATA)]

    def changed(self, version: str) -> str:
        """Return SQL for: the staged row `s` has other tracked values than the version with this alias."""
        table = self.merge.table
        changed = differs(table, [name for name in self.merge.tracked if name in self.known], version)
        if not self.merge.closes_missing and self.added:
            there = (f"({version}.{quote(one)} IS NOT NULL AND {differs(table, [one], version)})" for one in self.added)
            return f"({changed} OR {' OR '.join(there)})"
        return changed

    def as_instant(self, column: str, alias: str = "t") -> str:
        """Return SQL for a boundary of versions as a timestamp: of a day, midnight in UTC."""
        if self.merge.table.column(self.merge.history.valid_from).type == "date":
            return f"{alias}.{column}::timestamp AT TIME ZONE 'UTC'"
        return f"{alias}.{column}"
