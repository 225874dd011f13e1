"""Planned times without a job, on record with the reason (R7).

A row has those that were left out for one reason with no job in between, for a day at most. So a schedule that is due
each second and can't start for weeks makes a row a day.
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
"""Of each schedule as many as there are reasons: so many rows may be extended in turns."""
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
    """So many `times` of a schedule from `first` to `last` have no job; `after_job`: behind one that was just added."""

    name: str
    why: Literal["missed", "unique", "overlap"]
    times: int
    first: datetime
    last: datetime
    after_job: bool = False


class _Range(msgspec.Struct):
    """What a row says."""

    why: str
    times: int
    first: Annotated[datetime, msgspec.Meta(tz=True)]
    last: Annotated[datetime, msgspec.Meta(tz=True)]


async def aio_record_left_out(connection: Any, found: Sequence[LeftOut]) -> None:
    """Record them (asyncio-flavoured), in the transaction that has their schedules locked, before it writes those."""
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
        # Others were deleted meanwhile.
        new += [one for event_id, (one, _) in extended.items() if event_id not in written]
    if new:
        texts = [_text(one.why, one.times, one.first, one.last) for one in new]
        await connection.execute(_ADD, [one.name for one in new], texts)


def _row_to_extend(newest_first: Sequence[Any], one: LeftOut) -> tuple[int, _Range] | None:
    """The row that goes on with these: no job stands between, nor anything else that became of the schedule."""
    for row in newest_first:
        told = _range_of(row)
        if told is None:
            return None
        if told.why == one.why:
            has_job = one.after_job or (row["last_at"] is not None and row["last_at"] > told.last)
            return (row["event_id"], told) if row["is_young"] and not has_job and told.last < one.first else None
    return None


def _range_of(row: Any) -> _Range | None:
    """What it says; None if it is about something else, or not as we write it."""
    if row["kind"] != "left_out" or row["payload"] is None:
        return None
    try:
        return msgspec.json.decode(row["payload"], type=_Range)
    except msgspec.ValidationError:
        return None


def _text(why: str, times: int, first: datetime, last: datetime) -> str:
    return msgspec.json.encode(_Range(why, times, first, last)).decode()
