"""Run the next batch of a bulk operation, in one transaction (U16).

The transaction locks the operation's row, so that two processes never run the same batch. It takes jobs out of the
frozen set, changes those that still qualify, and counts them, so that a process may be killed at any time. A job that
another session has locked is put back behind the others. If the database refuses the batch of an operation several
times, the operation ends with the error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.driver_errors import said
from dataloader.store.connection.error_meanings import ErrorMeaning, meaning_of_error
from dataloader.store.queue.bulk_operations import ACTS, ManyAct
from dataloader.store.queue.control import (
    TO_RUN_NOW,
    TO_SET_PRIORITY,
    aio_audit,
    aio_end,
    aio_revive_jobs,
    aio_short_transaction,
    newest_of_keys,
)
from dataloader.store.queue.leases import ENDLESS
from dataloader.store.queue.make_ready import unpark

BATCH: Final = 500
"""Number of jobs that one transaction changes; their rows stay locked until it commits."""
MAX_TURNS: Final = 30
"""Number of attempts to lock a job's row before the job is left unchanged."""
MAX_FAULTS: Final = 3
"""Number of refusals by the database after which a bulk operation ends."""

_NEXT: Final = """
SELECT bulk_id, action, priority, actor, done, changed, jobs FROM dl_bulk
WHERE ended_at IS NULL ORDER BY worked_at LIMIT 1 FOR UPDATE SKIP LOCKED
"""
_TAKE: Final = """
DELETE FROM dl_bulk_jobs WHERE ctid = ANY (ARRAY(
  SELECT ctid FROM dl_bulk_jobs WHERE bulk_id BETWEEN $1 AND $1
  ORDER BY bulk_id {way}, turn {way}, job_id {way} LIMIT $2))
RETURNING job_id, turn
"""
# The newest version of each row is checked. Names of statuses and conditions come from constants.
_TO_CHANGE: Final = """
FROM dl_jobs WHERE job_id = ANY ($1::uuid[]) AND (status = ANY ($2::dl_status[])) IS TRUE AND ({still}) IS TRUE
"""
_LOCK: Final = f"""
SELECT job_id, status, waits_for, unique_key, {ENDLESS} AS endless {_TO_CHANGE}
ORDER BY job_id FOR NO KEY UPDATE SKIP LOCKED
"""
_LOCKED_BY_OTHERS: Final = f"SELECT job_id {_TO_CHANGE}"
_BACK: Final = """
INSERT INTO dl_bulk_jobs (bulk_id, turn, job_id)
SELECT $1, turn, job_id FROM unnest($2::int[], $3::uuid[]) AS u (turn, job_id)
"""
_COUNT: Final = """
UPDATE dl_bulk SET done = done + $2, changed = changed + $3, faults = 0, error = NULL, worked_at = clock_timestamp(),
                   ended_at = CASE WHEN $4 THEN clock_timestamp() END
WHERE bulk_id = $1
"""
_FAULT: Final = f"""
UPDATE dl_bulk SET faults = least(faults, {MAX_FAULTS}) + 1, error = $2, worked_at = clock_timestamp(),
                   ended_at = CASE WHEN faults >= {MAX_FAULTS} - 1 THEN clock_timestamp() END
WHERE bulk_id = $1
"""


@attrs.frozen
class BulkBatch:
    """Result of a batch. `waits`: nothing was done, because all rows were locked or because of an error."""

    jobs: int = 0
    changed: int = 0
    waits: bool = False


async def do_batch(database: Database) -> BulkBatch | None:
    """Run the next batch of the operation that has waited longest; return None if no open operation is free."""
    batch, hashes = await database.write(_aio_batch)
    await unpark(database, hashes)
    return batch


async def _aio_batch(connection: Any) -> tuple[BulkBatch | None, list[int]]:
    async with aio_short_transaction(connection):
        act = await connection.fetchrow(_NEXT)
        if act is None:
            return None, []
        try:
            async with connection.transaction():
                return await _aio_work(connection, act)
        except Exception as error:
            if meaning_of_error(error) in {ErrorMeaning.OUTAGE, ErrorMeaning.CONFLICT}:
                raise  # temporary: the whole transaction is rolled back and repeated later
            await connection.execute(_FAULT, act["bulk_id"], said(error)[:1_000])
            return BulkBatch(waits=True), []


async def _aio_work(connection: Any, act: Any) -> tuple[BulkBatch, list[int]]:
    kind = ACTS.get(act["action"])
    if kind is None:
        raise BadRequest("action", f"must be one of {', '.join(ACTS)}, not {act['action']!r:.60}")
    work = _Work(connection, act, kind)
    turns = await work.aio_take()
    rows = await work.aio_lock(list(turns)) if turns else []
    locked = await work.aio_put_back(
        {job_id: turns[job_id] for job_id in turns.keys() - {row["job_id"] for row in rows}}
    )
    if act["action"] == "retry":
        rows = newest_of_keys(rows)
    hashes = await work.aio_change(rows) if rows else []
    done, is_last = len(turns) - locked, len(turns) < BATCH and not locked
    await connection.execute(_COUNT, act["bulk_id"], done, len(rows), is_last)
    if is_last:
        detail = {"bulk": str(act["bulk_id"]), "act": act["action"], "jobs": act["jobs"]}
        detail["changed"] = act["changed"] + len(rows)
        await aio_audit(connection, Operator(act["actor"]), "end_bulk", None, detail)
    return BulkBatch(done, len(rows), waits=locked > 0 and not done), hashes


@attrs.frozen
class _Work:
    """Statements of one batch of a bulk operation, whose row is locked."""

    connection: Any
    act: Any
    kind: ManyAct

    async def aio_take(self) -> dict[UUID, int]:
        """Take jobs out of the frozen set; return their positions in it by ID."""
        sql = _TAKE.format(way="DESC" if self.kind.newest_first else "ASC")
        return {row["job_id"]: row["turn"] for row in await self.connection.fetch(sql, self.act["bulk_id"], BATCH)}

    async def aio_lock(self, ids: list[UUID]) -> list[Any]:
        """Lock the jobs that qualify and that no other session has locked."""
        return await self._aio_of_those(_LOCK, ids)

    async def aio_put_back(self, left: Mapping[UUID, int]) -> int:
        """Put the jobs that other sessions have locked back into the frozen set; return their number."""
        step = -1 if self.kind.newest_first else 1
        # A row that has begun to qualify between the two statements is also checked again.
        found = [row["job_id"] for row in await self._aio_of_those(_LOCKED_BY_OTHERS, list(left))] if left else []
        again = {job_id: left[job_id] + step for job_id in found if abs(left[job_id]) < MAX_TURNS}
        if again:
            await self.connection.execute(_BACK, self.act["bulk_id"], list(again.values()), list(again))
        return len(again)

    async def aio_change(self, rows: list[Any]) -> list[int]:
        """Change the locked rows; return the hashes of the keys that may have lost their next job."""
        ids, operator = [row["job_id"] for row in rows], Operator(self.act["actor"])
        match self.act["action"]:
            case "cancel":
                return await aio_end(self.connection, rows, operator)
            case "retry":
                await aio_revive_jobs(self.connection, rows, operator)
            case "run_now":
                await self.connection.execute(TO_RUN_NOW.sql, ids)
            case "set_priority":
                await self.connection.execute(TO_SET_PRIORITY.sql, ids, self.act["priority"])
        return []

    async def _aio_of_those(self, sql: str, ids: list[UUID]) -> list[Any]:
        still = self.kind.still.format(value="$3::int")
        values = [self.act["priority"]] if still != self.kind.still else []
        return list(await self.connection.fetch(sql.format(still=still), ids, sorted(self.kind.allowed), *values))
