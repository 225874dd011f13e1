"""Pages of a process's own events, for its step."""

from __future__ import annotations

from typing import Final

import msgspec

from dataloader.jobs.process_listings import ProcessEvent
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.fetching import aio_fetch

_PAGE: Final = """
SELECT event_id, task_id, at, payload::text AS payload FROM dl_process_events
WHERE key = $1 AND event_id > $2 AND event_id < $3 ORDER BY key {order}, event_id {order} LIMIT $4
"""
_OLDEST: Final = _PAGE.format(order="ASC")
_NEWEST: Final = _PAGE.format(order="DESC")


async def read_own_events(
    database: Database,
    key: int,
    last_event_id: int,
    *,
    after: int = 0,
    before: int | None = None,
    limit: int = 100,
    newest_first: bool = False,
) -> list[ProcessEvent]:
    """Return up to `limit` events of a process between two numbers, without those after its step began."""
    end = last_event_id + 1 if before is None else min(before, last_event_id + 1)
    rows = await database.run(aio_fetch, _NEWEST if newest_first else _OLDEST, key, after, end, limit)
    return [
        ProcessEvent(
            event_id=row["event_id"], task_id=row["task_id"], at=row["at"], payload=msgspec.json.decode(row["payload"])
        )
        for row in rows
    ]
