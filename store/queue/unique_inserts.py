"""Add jobs of unique tasks, or find the jobs that replace them (S3, R5); `dl_add_unique` decides for each.

The statements for all other jobs skip such rows, so that unique tasks add no overhead to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import Did
from dataloader.jobs.states import Status
from dataloader.store.connection.error_meanings import TAKEN
from dataloader.store.queue.job_inserts import GIVEN, JOB_ID, ROW_COLUMNS, TASK, WHEN_FAILED, Row, aio_insert_planned

# In the order of their keys, which OFFSET 0 keeps, so that two lists with the same keys do not deadlock.
_ADD: Final = f"""
SELECT r.job_id AS requested, u.job_id, u.did, u.status, u.queue
FROM (
  SELECT r.*
  FROM unnest({", ".join(f"${n}::{kind}[]" for n, kind in enumerate(ROW_COLUMNS.values(), 1))}) WITH ORDINALITY
    AS r ({", ".join(ROW_COLUMNS)}, number)
  LEFT JOIN dl_tasks t ON t.task = r.task
  ORDER BY CASE WHEN t.uniqueness IS NOT NULL THEN dl_unique_key(t.uniqueness, r.task, r.args::jsonb) END, r.number
  OFFSET 0
) AS r
CROSS JOIN LATERAL dl_add_unique(
  r.job_id, r.queue, r.task, r.args::jsonb, r.idempotency_key, r.lock_key, r.partition_key, r.priority, r.available_at,
  r.max_attempts, r.lease_ttl_sec, r.lease_s, {GIVEN}, r.request_hash, r.root_id, r.version) AS u
"""
_ADD_ONE: Final = f"""
SELECT $1::uuid AS requested, u.* FROM dl_add_unique(
  $1, $2, $3, $4::text::jsonb, {", ".join(f"${n}" for n in range(5, len(ROW_COLUMNS)))}) AS u
"""
_WAIT: Final = "SELECT task FROM dl_tasks WHERE task = ANY ($1::text[]) AND uniqueness IS NOT NULL"

_HAS_JOB: Final = """
SELECT EXISTS (
  SELECT FROM dl_jobs WHERE schedule = $1 AND planned_at = $2 AND backfill IS NOT DISTINCT FROM $3::uuid)
"""
_PLANNED: Final = "UPDATE dl_jobs SET schedule = $2, planned_at = $3, backfill = $4 WHERE job_id = $1"


@attrs.frozen
class Stand:
    """Job that results from a request to a unique task, in its state then, and the effect of the request."""

    job_id: UUID
    status: Status
    queue: str
    did: Did


class KeyTaken(Exception):  # noqa: N818 - not an error: everything is read again
    """A job with the idempotency key or the ID of a job to add has been added meanwhile."""


async def aio_add_unique(connection: Any, rows: Sequence[Row]) -> dict[UUID, Stand]:
    """Return, by the IDs of `rows`, the resulting jobs of those whose task is unique (asyncio-flavored).

    Leaves out rows whose task is not unique, or whose idempotency key or ID another job has got meanwhile. Raises
    `BadRequest` for a version that the task's jobs do not have, and for a job that runs after others; `KeyTaken`.
    """
    waiting = sorted({row[TASK] for row in rows if row[WHEN_FAILED] is not None})
    if waiting and (found := await connection.fetch(_WAIT, waiting)):
        task = found[0]["task"]
        raise BadRequest(
            "after", f"is not supported, because one job of the unique task {task!r} can cover several requests"
        )
    try:
        if len(rows) == 1:
            [row] = rows
            records = await connection.fetch(_ADD_ONE, *row[:WHEN_FAILED], *row[WHEN_FAILED + 1 :])
        else:
            records = await connection.fetch(_ADD, *zip(*rows, strict=True))
    except TAKEN as error:
        raise KeyTaken from error
    return {
        record["requested"]: Stand(record["job_id"], Status(record["status"]), record["queue"], record["did"])
        for record in records
        if record["did"] is not None
    }


async def aio_add_planned(
    connection: Any, rows: list[Row], planned: list[tuple[str, datetime | None, UUID | None]]
) -> tuple[dict[UUID, str], dict[UUID, Stand]]:
    """Do the same as `aio_insert_planned`, also for unique tasks; also return, by ID, the jobs that replace others."""
    added = await aio_insert_planned(connection, rows, planned)
    left = [(row, plan) for row, plan in zip(rows, planned, strict=True) if row[JOB_ID] not in added]
    stands: dict[UUID, Stand] = {}
    if not left:
        return added, stands
    unique = {record["task"] for record in await connection.fetch(_WAIT, sorted({row[TASK] for row, _ in left}))}
    for row, plan in left:
        if row[TASK] in unique and not await connection.fetchval(_HAS_JOB, *plan):
            stand = (await aio_add_unique(connection, [row])).get(row[JOB_ID])
            if stand is not None and stand.did == "added":
                await connection.execute(_PLANNED, row[JOB_ID], *plan)
                added[row[JOB_ID]] = stand.queue
            elif stand is not None:
                stands[row[JOB_ID]] = stand
    return added, stands
