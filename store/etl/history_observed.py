"""Records at which instants the keys of a table of versions were observed, also those that had not changed (E8).

A version's beginning shows one instant at which its key was observed. A snapshot that comes late must know all later
ones, since its values hold until the next of them only: of 1 on Monday, 2 on Tuesday and 1 on Wednesday, Monday and
Wednesday alone leave one version. A complete snapshot observes each key; an incomplete one the keys that it has.
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
"""The end of a statement that inserts observed keys as `o`: each is recorded once for an instant."""
_STATE: Final = """
SELECT h.last_as_of, (
  SELECT max(s.as_of) FROM dl_etl_snapshots s
  WHERE s.target = h.target AND NOT EXISTS (
    SELECT FROM dl_etl_observed o WHERE o.target = s.target AND o.as_of = s.as_of)
) AS unrecorded
FROM dl_etl_history h WHERE h.target = $1
"""


@attrs.frozen
class HistoryState:
    """The instant of a table's newest snapshot, and of the newest whose keys were not recorded; None: there is none.

    Some programs from before the first release recorded no keys.
    """

    newest: dt.datetime | None = None
    unrecorded: dt.datetime | None = None


async def aio_history_state(connection: Any, table: TableInfo) -> HistoryState:
    """Return the recorded state of the snapshots of a table (asyncio-flavoured)."""
    row = await connection.fetchrow(_STATE, table.sql)
    return HistoryState() if row is None else HistoryState(row["last_as_of"], row["unrecorded"])


async def aio_note_complete(connection: Any, table: TableInfo, instant: str) -> None:
    """Record that a complete snapshot of an instant is merged (asyncio-flavoured)."""
    await connection.execute(_COMPLETE, table.sql, instant)


async def aio_note_keys(
    connection: Any, table: TableInfo, instant: str, segment: StagedSegment, key: Sequence[str], *, are_new: bool
) -> None:
    """Record the keys of an incomplete snapshot (asyncio-flavoured), before its staged rows are removed.

    `are_new`: a version of each begins at the instant, which says as much.
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
    """A row's key as a number, which stays the same over versions of the server and dumps."""
    texts = ", ".join(_as_text(table, name, alias) for name in key)
    return f"('x' || left(md5(jsonb_build_array({texts})::text), 16))::bit(64)::bigint"


def _as_text(table: TableInfo, name: str, alias: str) -> str:
    """A value as a text that is the same for equal values: 1 and 1.0 of a numeric are, and letters of a citext."""
    match table.column(name).type:
        case "numeric":
            return f"trim_scale({alias}.{quote(name)})::text"
        case "citext":
            return f"lower({alias}.{quote(name)}::text)"
        case _:
            return f"{alias}.{quote(name)}::text"
