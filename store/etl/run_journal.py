"""Records of the runs of loads: their tasks, their failures, and what a resumed run continues with.

A run has the ID of its job: when the job runs again, after a crash or a retry, it resumes after the committed segments
(segment_commit.py). What it writes is committed only while the job still belongs to its worker: the fence is the last
statement. The caller runs these operations in a transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import LeaseLost
from dataloader.jobs.text import storable_json
from dataloader.store.connection.error_meanings import LOCKED
from dataloader.store.etl.failure_rows import Failure, aio_keep_failures
from dataloader.store.etl.load_holders import aio_hold_load, aio_release_load

SUCCEEDED_WITH_FAILURES: Final = "succeeded_with_failures"
"""Status of a task or run that was completed, with failures that are few enough to continue."""
GONE_THROUGH: Final = frozenset({"succeeded", SUCCEEDED_WITH_FAILURES})
"""Statuses of a task after which a flow continues, and does not run it again."""

_FENCE: Final = """
SELECT FROM dl_jobs WHERE job_id = $1 AND (token = $2 AND status = 'running') IS TRUE FOR NO KEY UPDATE
"""
# The staging tables of runs that were killed and that no worker has resumed.
_LEFT: Final = """
SELECT c.oid::regclass::text AS staging FROM pg_class c
WHERE c.relkind = 'r' AND c.relname ~ '^dl_stage_[0-9a-f]{32}' AND pg_table_is_visible(c.oid) AND NOT EXISTS (
  SELECT FROM dl_jobs j WHERE j.job_id = substr(c.relname, 10, 32)::uuid AND j.status = 'running' AND
  j.token::text = split_part(c.relname, '_', 4))
ORDER BY c.relname LIMIT 100
"""
_BEGIN: Final = """
INSERT INTO dl_etl_runs (run_id, name, kind) VALUES ($1, $2, $3)
ON CONFLICT (run_id) DO UPDATE SET status = 'running', finished_at = NULL
RETURNING started_at
"""
_TASKS: Final = """
INSERT INTO dl_etl_tasks (run_id, ordinal, layer, task)
SELECT $1, ordinal, layer, task FROM unnest($2::text[], $3::text[]) WITH ORDINALITY AS t (layer, task, ordinal)
ON CONFLICT (run_id, ordinal) DO UPDATE SET status = 'waiting', layer = excluded.layer, task = excluded.task,
  summary = CASE WHEN dl_etl_tasks.task = excluded.task THEN dl_etl_tasks.summary END
WHERE dl_etl_tasks.status NOT IN ('succeeded', 'succeeded_with_failures') OR dl_etl_tasks.task <> excluded.task
"""
# A flow may have been changed while its run waited to continue.
_NOT_TASKS: Final = "DELETE FROM dl_etl_tasks WHERE run_id = $1 AND ordinal > $2"
_STATUSES: Final = "SELECT task, status, summary FROM dl_etl_tasks WHERE run_id = $1 ORDER BY ordinal"
_SEGMENTS: Final = "SELECT task, segment, counts FROM dl_etl_segments WHERE run_id = $1"
_TASK: Final = """
UPDATE dl_etl_tasks SET status = $3, summary = coalesce($4::text::jsonb, summary),
  started_at = coalesce(started_at, clock_timestamp()),
  finished_at = CASE WHEN $3 <> 'running' THEN clock_timestamp() END
WHERE run_id = $1 AND task = $2
"""
_END: Final = """
UPDATE dl_etl_runs SET status = $2, summary = $3::text::jsonb,
  finished_at = CASE WHEN $2 <> 'waiting' THEN clock_timestamp() END
WHERE run_id = $1
"""
_DETAILS: Final = "SELECT task, segment, details, counts FROM dl_etl_details WHERE run_id = $1"
# The failures of data that this attempt does not request again: committed segments, and completed details.
_STILL_FAILED: Final = """
SELECT f.load, f.phase, sum(f.times)::int AS times FROM dl_etl_failures f
WHERE f.run_id = $1 AND f.solved_at IS NULL AND (
  EXISTS (SELECT FROM dl_etl_segments s WHERE s.run_id = $1 AND s.task = f.load AND
    s.segment = coalesce(f.requests -> 0 ->> 'tried_by', f.segment)) OR
  EXISTS (SELECT FROM dl_etl_details d WHERE d.run_id = $1 AND d.task = f.load AND d.segment = f.segment AND
    f.requests -> 0 ->> 'of' = 'detail' AND f.requests -> 0 ->> 'key' = ANY (d.details)))
GROUP BY f.load, f.phase
"""
_LAST_FAILURE: Final = "SELECT coalesce(max(failure_id), 0) FROM dl_etl_failures WHERE run_id = $1"
_OPEN: Final = """
SELECT failure_id, segment, requests FROM dl_etl_failures
WHERE load = $1 AND solved_at IS NULL AND failure_id = ANY ($2)
"""
# A run does not retry the failures that it has recorded itself.
_NEXT_OPEN: Final = """
SELECT failure_id, segment, requests FROM dl_etl_failures
WHERE load = $1 AND solved_at IS NULL AND failure_id > $2 AND run_id <> $3
  AND jsonb_typeof(requests) = 'array' AND requests -> 0 ->> 'endpoint' IS NOT NULL
ORDER BY failure_id LIMIT $4
"""


@attrs.define
class DetailsDone:
    """Details of a segment that an earlier attempt has completed, and their counts."""

    keys: set[str] = attrs.field(factory=set)
    counts: Counter[str] = attrs.field(factory=Counter)


@attrs.frozen
class RunState:
    """Earlier work of a run: the statuses and summaries of its tasks, and the counts of each committed segment.

    Also by task: `details` has the completed details of segments that are not committed; `failed` counts, by phase, the
    unresolved failures of what is committed or completed. `last_failure` is the number of the last recorded failure.
    """

    started_at: datetime
    statuses: Mapping[str, str]
    summaries: Mapping[str, Any]
    segments: Mapping[str, Mapping[str, Any]]
    details: Mapping[str, Mapping[str, DetailsDone]] = attrs.field(factory=dict)
    failed: Mapping[str, Mapping[str, int]] = attrs.field(factory=dict)
    last_failure: int = 0


def staging_name(run_id: UUID, token: int, number: int) -> str:
    """Return the name of one of a run's staging tables, which identifies the run.

    It contains the token, so that a worker that has lost the job drops its own table, not that of the job's next
    worker.
    """
    return f"dl_stage_{run_id.hex}_{token}_{number}"


async def aio_begin_run(  # noqa: PLR0917 - the columns of a record
    connection: Any, run_id: UUID, token: int, name: str, kind: str, tasks: Sequence[tuple[str, str]]
) -> RunState:
    """Begin a run, or resume it. `tasks` are (layer, task), in their order. A run of the kind `load` holds its load.

    Raises `LeaseLost` if the job no longer belongs to this worker, and `LoadIsHeld` if another run holds the load.
    """
    if kind == "load":
        for _, task in tasks:
            await aio_hold_load(connection, task, run_id, token)
    await _aio_drop_left(connection)
    started_at = await connection.fetchval(_BEGIN, run_id, name, kind)
    await connection.execute(_TASKS, run_id, [layer for layer, _ in tasks], [task for _, task in tasks])
    await connection.execute(_NOT_TASKS, run_id, len(tasks))
    rows = await connection.fetch(_STATUSES, run_id)
    segments: dict[str, dict[str, Any]] = {task: {} for _, task in tasks}
    for row in await connection.fetch(_SEGMENTS, run_id):
        segments.setdefault(row["task"], {})[row["segment"]] = row["counts"]
    details: dict[str, dict[str, DetailsDone]] = {task: {} for _, task in tasks}
    for row in await connection.fetch(_DETAILS, run_id):
        done = details.setdefault(row["task"], {}).setdefault(row["segment"], DetailsDone())
        done.keys.update(row["details"])
        done.counts.update(row["counts"])
    failed: dict[str, dict[str, int]] = {task: {} for _, task in tasks}
    for row in await connection.fetch(_STILL_FAILED, run_id):
        failed.setdefault(row["load"], {})[row["phase"]] = row["times"]
    last_failure = await connection.fetchval(_LAST_FAILURE, run_id)
    await aio_fence(connection, run_id, token)
    return RunState(
        started_at,
        {row["task"]: row["status"] for row in rows},
        {row["task"]: row["summary"] for row in rows},
        segments,
        details,
        failed,
        last_failure,
    )


async def _aio_drop_left(connection: Any) -> None:
    """Drop the staging tables of ended runs, except tables that are being read, for example by pg_dump."""
    for row in await connection.fetch(_LEFT):
        await connection.execute("SAVEPOINT dl_stage; SET LOCAL lock_timeout = '100ms'")
        try:
            await connection.execute(f"DROP TABLE IF EXISTS {row['staging']}")
        except LOCKED:
            # This also resets lock_timeout.
            await connection.execute("ROLLBACK TO dl_stage")
        else:
            await connection.execute("SET LOCAL lock_timeout = DEFAULT")
        await connection.execute("RELEASE dl_stage")


async def aio_note_task(  # noqa: PLR0917 - the columns of a record
    connection: Any, run_id: UUID, token: int, task: str, status: str, summary: Mapping[str, Any] | None = None
) -> None:
    """Record the status of one of a run's tasks, `running` or its end, with its summary.

    The run holds the load while its status is `running`. Raises `LoadIsHeld` if another run holds it.
    """
    if status == "running":
        await aio_hold_load(connection, task, run_id, token)
    await connection.execute(_TASK, run_id, task, status, None if summary is None else storable_json(summary))
    await aio_fence(connection, run_id, token)
    if status != "running":
        await aio_release_load(connection, task, run_id, token)


async def aio_end_run(connection: Any, run_id: UUID, token: int, status: str, summary: Mapping[str, Any]) -> None:
    """Record the end of a run, with its summary. A run that waits for a load's other run has the status `waiting`."""
    await connection.execute(_END, run_id, status, storable_json(summary))
    await aio_fence(connection, run_id, token)


async def aio_fence(connection: Any, run_id: UUID, token: int) -> None:
    """Fence a transaction that may commit only if the job still belongs to this worker, as its last statement.

    Raises `LeaseLost` if it does not.
    """
    if await connection.fetchrow(_FENCE, run_id, token) is None:
        raise LeaseLost(f"another worker has job {run_id}: the write was rolled back")


async def aio_note_failures(connection: Any, run_id: UUID, token: int, failures: Sequence[Failure]) -> None:
    """Record failures of a run, in a transaction. Raises `LeaseLost` if the job belongs to another worker by now."""
    await aio_keep_failures(connection, run_id, failures)
    await aio_fence(connection, run_id, token)


async def aio_open_failures(connection: Any, load: str, failures: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the requests of a load's unresolved `failures`, with their segments, by number."""
    return _requests_of(await connection.fetch(_OPEN, load, list(failures)))


async def aio_next_failures(
    connection: Any, load: str, run_id: UUID, after: int, limit: int
) -> dict[int, list[dict[str, Any]]]:
    """Return the requests of a load's next unresolved failures, after the one with the number `after`, at most `limit`.

    They are by the failures' numbers, with their segments, without failures of this run and those that have no request.
    """
    return _requests_of(await connection.fetch(_NEXT_OPEN, load, after, run_id, limit))


def _requests_of(rows: Sequence[Mapping[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    # An earlier release has stored requests that were too long as an object that has only their beginning.
    kept = [(row, row["requests"] if isinstance(row["requests"], list) else []) for row in rows]
    return {row["failure_id"]: [{**one, "segment": row["segment"]} for one in requests] for row, requests in kept}
