"""History of the database: it changes after a restore on another server, or when a standby is promoted.

It informs operators and lets a service declare again what it needs. No guarantee depends on it: it does not change when
a disk snapshot is restored while all services are stopped, or when tables are restored in place.
"""

from __future__ import annotations

from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.connection.bridge import Database

_NOW: Final = """
SELECT c.system_identifier AS system,
       CASE WHEN NOT pg_is_in_recovery() THEN left(pg_walfile_name(pg_current_wal_lsn()), 8) END AS timeline,
       d.oid::bigint AS database
FROM pg_control_system() AS c CROSS JOIN pg_database AS d WHERE d.datname = current_database()
"""
_READ: Final = f"""
SELECT h.id, pg_is_in_recovery() AS is_standby,
       (h.system, h.timeline, h.database) IS DISTINCT FROM (n.system, n.timeline, n.database) AS is_other
FROM ({_NOW}) AS n LEFT JOIN dl_history h ON true
"""
# The row's lock decides which service notices first; the others find the row updated.
_WRITE: Final = f"""
INSERT INTO dl_history AS h (system, timeline, database) {_NOW}
ON CONFLICT (one) DO UPDATE SET id = gen_random_uuid(), system = excluded.system, timeline = excluded.timeline,
  database = excluded.database, changed_at = now()
WHERE (h.system, h.timeline, h.database) IS DISTINCT FROM (excluded.system, excluded.timeline, excluded.database)
"""


@attrs.frozen
class DatabaseHistory:
    """The history's `id`; `is_new` if this read has found another server or database than before."""

    id: UUID
    is_new: bool


async def read_history(database: Database) -> DatabaseHistory:
    """Compare the stored history with the server; if it is another one, store that.

    Raises `StoreUnavailable` while the server is a standby that is not promoted: nothing can be stored there.
    """
    return await database.write(_aio_read_history)


async def _aio_read_history(connection: Any) -> DatabaseHistory:
    row = await connection.fetchrow(_READ)
    if row["is_standby"]:
        raise StoreUnavailable("the server is a standby that has not been promoted yet")
    if not row["is_other"]:
        return DatabaseHistory(row["id"], is_new=False)
    await connection.execute(_WRITE)
    return DatabaseHistory(await connection.fetchval("SELECT id FROM dl_history"), is_new=row["id"] is not None)
