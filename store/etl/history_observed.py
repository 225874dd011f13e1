"""Records the times at which the keys of a table of versions were observed, including unchanged keys.

A version's beginning shows one time at which its key was observed. A late snapshot needs all later ones, because its
values are valid only until the next of them. If a key is 1 on Monday, 2 on Tuesday and 1 on Wednesday, Monday and
Wednesday alone leave one version. A complete snapshot observes each key, an incomplete one the keys that it has.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any, Final

import attrs

from dataloader.store.etl.row_shapes import MINE
from dataloader.store.etl.staging import StagedSegment
from dataloader.store.etl.target_table import TableInfo, quote

_COMPLETE: Final = """
INSERT INTO dl_etl_observed AS o (target, as_of) VALUES ($1, $2::text::timestamptz)
ON CONFLICT (target, as_of) DO UPDATE SET keys = NULL WHERE o.keys IS NOT NULL
"""
ADD_KEYS: Final = """
ON CONFLICT (target, as_of) DO UPDATE
SET keys = o.keys || ARRAY(SELECT unnest(excluded.keys) EXCEPT SELECT unnest(o.keys))
WHERE o.keys IS NOT NULL AND EXISTS (SELECT unnest(excluded.keys) EXCEPT SELECT unnest(o.keys))
"""
"""End of a statement that inserts observed keys as `o`: each is recorded once for a time."""
_STATE: Final = """
SELECT h.last_as_of, (
  SELECT max(s.as_of) FROM dl_load_snapshots s
  WHERE s.target = h.target AND NOT EXISTS (
    SELECT FROM dl_etl_observed o WHERE o.target = s.target AND o.as_of = s.as_of)
) AS unrecorded
FROM dl_load_history h WHERE h.target = $1
"""


@attrs.frozen
class HistoryState:
    """Times of a table's newest snapshot, and of the newest whose keys were not recorded; None without one.

    Some programs from before the first release recorded no keys.
    """

    newest: dt.datetime | None = None
    unrecorded: dt.datetime | None = None


async def aio_history_state(connection: Any, table: TableInfo) -> HistoryState:
    """Return the recorded state of a table's snapshots (asyncio-flavored)."""
    row = await connection.fetchrow(_STATE, table.sql)
    return HistoryState() if row is None else HistoryState(row["last_as_of"], row["unrecorded"])


async def aio_note_complete(connection: Any, table: TableInfo, instant: str) -> None:
    """Record that a complete snapshot of a time is merged (asyncio-flavored)."""
    await connection.execute(_COMPLETE, table.sql, instant)


async def aio_note_keys(
    connection: Any, table: TableInfo, instant: str, segment: StagedSegment, key: Sequence[str], *, are_new: bool
) -> None:
    """Record the keys of an incomplete snapshot (asyncio-flavored), before its staged rows are removed.

    `are_new`: a version of each key begins at that time, which already records the key.
    """
    keys = f"SELECT DISTINCT {hash_of(table, key, 's')} FROM {quote(segment.staging)} s WHERE {MINE}"
    if are_new:
        keys += " LIMIT 0"
    await connection.execute(
        f"INSERT INTO dl_etl_observed AS o (target, as_of, keys)"
        f" VALUES ($3, $4::text::timestamptz, ARRAY({keys})) {ADD_KEYS}",
        segment.token,
        segment.number,
        table.sql,
        instant,
    )


def hash_of(table: TableInfo, key: Sequence[str], alias: str) -> str:
    """Return SQL for a row's key as a number. It is the same in all versions of the server and after a restore."""
    texts = ", ".join(_as_text(table, name, alias) for name in key)
    return f"('x' || left(md5(jsonb_build_array({texts})::text), 16))::bit(64)::bigint"


def _as_text(table: TableInfo, name: str, alias: str) -> str:
    """Return SQL for a value as a text that is the same for equal values, such as 1 and 1.0, or letters of a citext."""
    match table.column(name).type:
        case "numeric":
            return f"trim_scale({alias}.{quote(name)})::text"
        case "citext":
            return f"lower({alias}.{quote(name)}::text)"
        case _:
            return f"{alias}.{quote(name)}::text"
