"""Recorded reasons of planned times without a job.

A row has the times that were left out for one reason without a job between them, for at most one day. So a schedule
that is due each second and cannot start for weeks adds one row per day.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Final, Literal

import attrs
import msgspec

_FORMER: Final = """
SELECT e.*, s.last_at FROM dl_schedules s CROSS JOIN LATERAL (
  SELECT name, event_id, kind, payload::text AS payload, at > now() - interval '1 day' AS is_young
  FROM dl_schedule_events WHERE name = s.name ORDER BY event_id DESC LIMIT 3
) AS e WHERE s.name = ANY ($1::text[]) ORDER BY e.event_id DESC
"""
"""Newest rows of each schedule, one for each reason: all of these may be extended alternately."""
_EXTEND: Final = """
UPDATE dl_schedule_events e SET payload = u.payload::jsonb
FROM unnest($1::bigint[], $2::text[]) AS u (event_id, payload) WHERE e.event_id = u.event_id RETURNING e.event_id
"""
_ADD: Final = """
INSERT INTO dl_schedule_events (name, kind, payload)
SELECT u.name, 'left_out', u.payload::jsonb FROM unnest($1::text[], $2::text[]) AS u (name, payload)
"""


@attrs.frozen
class LeftOut:
    """`times` planned times of a schedule without a job, from `first` to `last`. `after_job`: after a new job."""

    name: str
    why: Literal["missed", "unique", "overlap"]
    times: int
    first: datetime
    last: datetime
    after_job: bool = False


class _Range(msgspec.Struct):
    """Content of a row."""

    why: str
    times: int
    first: Annotated[datetime, msgspec.Meta(tz=True)]
    last: Annotated[datetime, msgspec.Meta(tz=True)]


async def aio_record_left_out(connection: Any, found: Sequence[LeftOut]) -> None:
    """Record the times (asyncio-flavored) in the transaction that locked their schedules, before it writes those."""
    former: dict[str, list[Any]] = {}
    for record in await connection.fetch(_FORMER, sorted({one.name for one in found})):
        former.setdefault(record["name"], []).append(record)
    new, extended = [], {}
    for one in found:
        row = _row_to_extend(former.get(one.name, ()), one)
        if row is None:
            new.append(one)
        else:
            event_id, told = row
            extended[event_id] = one, _text(told.why, told.times + one.times, told.first, one.last)
    if extended:
        texts = [text for _, text in extended.values()]
        written = {record["event_id"] for record in await connection.fetch(_EXTEND, list(extended), texts)}
        # Other rows were deleted in the meantime.
        new += [one for event_id, (one, _) in extended.items() if event_id not in written]
    if new:
        texts = [_text(one.why, one.times, one.first, one.last) for one in new]
        await connection.execute(_ADD, [one.name for one in new], texts)


def _row_to_extend(newest_first: Sequence[Any], one: LeftOut) -> tuple[int, _Range] | None:
    """Return the row that these times extend; None if a job or another event of the schedule is between them."""
    for row in newest_first:
        told = _range_of(row)
        if told is None:
            return None
        if told.why == one.why:
            has_job = one.after_job or (row["last_at"] is not None and row["last_at"] > told.last)
            return (row["event_id"], told) if row["is_young"] and not has_job and told.last < one.first else None
    return None


def _range_of(row: Any) -> _Range | None:
    """Return the content of a row; None if it has another kind or format."""
    if row["kind"] != "left_out" or row["payload"] is None:
        return None
    try:
        return msgspec.json.decode(row["payload"], type=_Range)
    except msgspec.ValidationError:
        return None


def _text(why: str, times: int, first: datetime, last: datetime) -> str:
    return msgspec.json.encode(_Range(why, times, first, last)).decode()
