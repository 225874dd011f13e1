"""Write outcomes, progress and log lines of runs: many jobs in one statement, each fenced by its token.

A write changes nothing, and reports it, if its token is no longer the job's or the job no longer runs. A batch may be
sent again: a job whose row already shows our token and an end is reported as written before.

A locked row does not delay the others: it is skipped, and reported for another try. Not only psql sessions lock rows: a
claim whose snapshot is older than the commit of another claim locks the rows of that claim before it sees that they are
no longer queued, and keeps them until it commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.model import DEFAULT_MAX_ATTEMPTS
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.stages import MAX_MOVES
from dataloader.jobs.states import Status, Step

MAX_REFUNDS: Final = 10_000
"""Maximum number of attempts that a job gets back by snoozing and draining.

Afterwards its attempts end a job that would otherwise run forever.
"""

_STATUS: Final = f"""
(CASE e.step
   WHEN 'succeed' THEN 'succeeded'
   WHEN 'fail' THEN 'failed'
   WHEN 'cancel' THEN 'canceled'
   ELSE CASE WHEN j.cancel_requested THEN 'canceled'
             WHEN e.step = 'retry' AND j.attempt >= j.max_attempts THEN 'failed'
             WHEN j.refunds >= {MAX_REFUNDS} AND j.attempt >= j.max_attempts THEN 'failed'
             ELSE 'queued' END
 END)::dl_status
"""
"""Status that follows a step, from the row at the time of the write.

A cancel request that arrived just before still counts.
"""

RETRY_PRIORITY: Final = "coalesce((SELECT t.retry_priority FROM dl_tasks t WHERE t.task = j.task), j.priority)"
"""Priority of a job whose run has failed or lost its worker: its task's retry priority, if it has one."""

# statement_timestamp(): in `job.transaction()`, now() is the time at which the handler began the transaction.
_FINISH: Final = f"""
WITH outcome AS MATERIALIZED (
  SELECT e.*, step IN ('snooze', 'return', 'period_end') AS refunded
  FROM unnest($1::uuid[], $2::bigint[], $3::text[], $4::text[], $5::text[], $6::float8[], $7::text[])
    AS e (job_id, token, step, error, result, delay_s, progress)
  JOIN dl_jobs j ON j.job_id = ANY (ARRAY[e.job_id])
  WHERE j.token = e.token AND (j.status = 'running') IS TRUE
  FOR NO KEY UPDATE OF j SKIP LOCKED
), written AS (
  UPDATE dl_jobs j SET
    status = {_STATUS},
    attempt = CASE WHEN e.refunded AND j.refunds < {MAX_REFUNDS} THEN greatest(j.attempt - 1, 0) ELSE j.attempt END,
    refunds = CASE WHEN e.refunded AND j.refunds < {MAX_REFUNDS} THEN j.refunds + 1 ELSE j.refunds END,
    priority = CASE WHEN e.step = 'retry' THEN {RETRY_PRIORITY} ELSE j.priority END,
    available_at = CASE WHEN {_STATUS} = 'queued' THEN now() + make_interval(secs => e.delay_s) ELSE j.available_at END,
    waits_for = CASE WHEN {_STATUS} = 'queued' AND e.delay_s > 0 THEN 'time' END,
    lease_expires_at = NULL,
    claimed_by = NULL,
    error = CASE WHEN e.refunded THEN coalesce(e.error, j.error) ELSE e.error END,
    result = e.result::jsonb,
    progress = coalesce(e.progress::jsonb, j.progress),
    finished_at = CASE WHEN {_STATUS} <> 'queued' THEN statement_timestamp() END
  FROM outcome e
  WHERE j.job_id = ANY (ARRAY[e.job_id])
  RETURNING j.job_id, j.queue, j.status, e.token, e.step, e.error, e.delay_s, j.attempt
), journal AS (
  INSERT INTO dl_job_events (job_id, queue, ts, kind, payload)
  SELECT job_id, queue, statement_timestamp(),
    CASE status WHEN 'succeeded' THEN 'done' WHEN 'queued' THEN 'requeue' ELSE status::text END,
    CASE WHEN status <> 'succeeded' THEN
      jsonb_strip_nulls(jsonb_build_object('reason', step, 'error', left(error, 1000), 'attempt', attempt,
        'delay_s', CASE WHEN status = 'queued' THEN delay_s END)) END
  FROM written
)
SELECT token, status::text AS status FROM written
"""

_FINISH_PATIENTLY: Final = _FINISH.replace("SKIP LOCKED", "")
"""For the one outcome of a transaction that cannot be repeated: it waits for the row's lock."""

# Writes the same as _FINISH for a batch of successes only, and costs less. It finds its rows again by ctid. A row that
# another session, such as the heartbeat, changes between snapshot and lock has another ctid: it is reported as locked.
_SUCCEED: Final = """
WITH outcome AS MATERIALIZED (
  SELECT j.ctid AS place, e.token, e.result, e.progress
  FROM unnest($1::uuid[], $2::bigint[], $3::text[], $4::text[]) AS e (job_id, token, result, progress)
  JOIN dl_jobs j ON j.job_id = ANY (ARRAY[e.job_id])
  WHERE j.token = e.token AND (j.status = 'running') IS TRUE
  FOR NO KEY UPDATE OF j SKIP LOCKED
), written AS (
  UPDATE dl_jobs j SET
    status = 'succeeded',
    waits_for = NULL,
    lease_expires_at = NULL,
    claimed_by = NULL,
    error = NULL,
    result = e.result::jsonb,
    progress = coalesce(e.progress::jsonb, j.progress),
    finished_at = statement_timestamp()
  FROM outcome e
  WHERE j.ctid = e.place
  RETURNING j.job_id, j.queue, e.token
), journal AS (
  INSERT INTO dl_job_events (job_id, queue, ts, kind)
  SELECT job_id, queue, statement_timestamp(), 'done' FROM written
)
SELECT token FROM written
"""

# A separate statement, so that outcomes without a move cost nothing. The row becomes that of the next stage in the
# write of the run's end. Values that the stage's task does not set stay, except the number of attempts. waits_for is
# NULL: the trigger notifies the dispatchers of the row's new queue. lane is NULL: the claim finds that of the stage.
# now(): a later timestamp would be ahead of the transaction's time.
_MOVE: Final = f"""
WITH outcome AS MATERIALIZED (
  SELECT e.*, j.task AS before, j.attempt,
         CASE WHEN j.cancel_requested THEN 'canceled'
              WHEN j.moves >= {MAX_MOVES} THEN 'failed' ELSE 'queued' END AS next
  FROM unnest($1::uuid[], $2::bigint[], $3::text[], $4::text[], $5::text[]) AS e (job_id, token, task, previous, result)
  JOIN dl_jobs j ON j.job_id = ANY (ARRAY[e.job_id])
  WHERE j.token = e.token AND (j.status = 'running') IS TRUE
  FOR NO KEY UPDATE OF j SKIP LOCKED
), ended AS (
  SELECT e.*, t.queue, t.priority, coalesce(t.max_attempts, {DEFAULT_MAX_ATTEMPTS}) AS max_attempts, t.lease_ttl_sec,
         CASE next WHEN 'failed' THEN 'the job has moved {MAX_MOVES:,} times, which is the most; its next stage was '
                                      || e.task END AS error
  FROM outcome e LEFT JOIN dl_tasks t ON t.task = e.task
), written AS (
  UPDATE dl_jobs j SET
    status = e.next::dl_status,
    task = CASE e.next WHEN 'queued' THEN e.task ELSE j.task END,
    queue = CASE e.next WHEN 'queued' THEN coalesce(e.queue, j.queue) ELSE j.queue END,
    priority = CASE e.next WHEN 'queued' THEN coalesce(e.priority, j.priority) ELSE j.priority END,
    max_attempts = CASE e.next WHEN 'queued' THEN e.max_attempts ELSE j.max_attempts END,
    lease_ttl_sec = CASE e.next WHEN 'queued' THEN coalesce(e.lease_ttl_sec, j.lease_ttl_sec) ELSE j.lease_ttl_sec END,
    attempt = CASE e.next WHEN 'queued' THEN 0 ELSE j.attempt END,
    crashes = 0,
    refunds = CASE e.next WHEN 'queued' THEN 0 ELSE j.refunds END,
    moves = CASE e.next WHEN 'queued' THEN coalesce(j.moves, 0) + 1 ELSE j.moves END,
    previous = CASE e.next WHEN 'queued' THEN e.previous::jsonb ELSE j.previous END,
    available_at = CASE e.next WHEN 'queued' THEN now() ELSE j.available_at END,
    waits_for = NULL,
    lane = CASE WHEN e.next <> 'queued' THEN j.lane END,
    lease_expires_at = NULL,
    claimed_by = NULL,
    error = e.error,
    result = e.result::jsonb,
    progress = CASE e.next WHEN 'queued' THEN '{{}}' ELSE j.progress END,
    finished_at = CASE WHEN e.next <> 'queued' THEN statement_timestamp() END
  FROM ended e
  WHERE j.job_id = ANY (ARRAY[e.job_id])
  RETURNING j.job_id, j.queue, j.status, e.token, e.before, e.task, e.attempt, e.error
), journal AS (
  INSERT INTO dl_job_events (job_id, queue, ts, kind, payload)
  SELECT job_id, queue, statement_timestamp(), CASE status WHEN 'queued' THEN 'moved' ELSE status::text END,
    CASE status WHEN 'queued' THEN jsonb_build_object('from', before, 'to', task, 'attempt', attempt, 'token', token)
                ELSE jsonb_strip_nulls(jsonb_build_object('reason', 'move', 'error', error, 'attempt', attempt)) END
  FROM written
)
SELECT token, status::text AS status FROM written
"""
_MOVE_PATIENTLY: Final = _MOVE.replace("SKIP LOCKED", "")

_REST: Final = """
SELECT e.token, (j.status = 'running') IS TRUE AS locked
FROM unnest($1::uuid[], $2::bigint[], $3::text[]) AS e (job_id, token, step)
JOIN dl_jobs j ON j.job_id = ANY (ARRAY[e.job_id])
WHERE j.token = e.token AND ((j.status = 'running') IS TRUE OR (j.status = 'succeeded') = (e.step = 'succeed'))
"""
"""For rows that were not written: those skipped as locked, and those written by an earlier send with a lost reply."""

# Both skip locked rows, because all other outcomes wait behind this statement.
_PROGRESS: Final = """
WITH shown AS MATERIALIZED (
  SELECT j.job_id, p.progress
  FROM unnest($1::uuid[], $2::bigint[], $3::text[]) AS p (job_id, token, progress)
  JOIN dl_jobs j ON j.job_id = ANY (ARRAY[p.job_id])
  WHERE j.token = p.token AND (j.status = 'running') IS TRUE
  FOR NO KEY UPDATE OF j SKIP LOCKED
)
UPDATE dl_jobs j SET progress = s.progress::jsonb FROM shown s WHERE j.job_id = ANY (ARRAY[s.job_id]) RETURNING j.token
"""

# 'succeeded': the last lines of a job whose own transaction has already committed its success.
_LOG: Final = """
WITH ours AS MATERIALIZED (
  SELECT j.job_id, j.queue, l.token
  FROM (SELECT DISTINCT u.job_id, u.token FROM unnest($1::uuid[], $2::bigint[]) AS u (job_id, token)) AS l
  JOIN dl_jobs j ON j.job_id = ANY (ARRAY[l.job_id])
  WHERE j.token = l.token AND (j.status IN ('running', 'succeeded')) IS TRUE
  FOR KEY SHARE OF j SKIP LOCKED
), written AS (
  INSERT INTO dl_job_events (job_id, queue, ts, kind, payload)
  SELECT o.job_id, o.queue, l.ts, 'log', l.payload::jsonb
  FROM unnest($2::bigint[], $3::timestamptz[], $4::text[]) WITH ORDINALITY AS l (token, ts, payload, place)
  JOIN ours o ON o.token = l.token
  ORDER BY l.place
)
SELECT token FROM ours
"""
# Lines of loads also record their position; jobs without loads skip this.
_LOG_OF_LOADS: Final = f"""
{_LOG.partition("ORDER BY l.place")[0]}
  ORDER BY l.place
  RETURNING event_id, job_id, payload ->> 'level' AS level, payload -> 'fields' ->> 'load' AS load
), noted AS (
  INSERT INTO dl_etl_logs AS known (run_id, task, token, first_event, last_event, lines, warnings, errors)
  SELECT r.run_id, w.load, o.token, min(w.event_id), max(w.event_id), count(*),
         count(*) FILTER (WHERE w.level = 'warning'), count(*) FILTER (WHERE w.level = 'error')
  FROM written w
  JOIN ours o ON o.job_id = w.job_id
  JOIN dl_etl_runs r ON r.run_id = ANY (ARRAY[w.job_id])
  WHERE w.load IS NOT NULL
  GROUP BY r.run_id, w.load, o.token
  ON CONFLICT (run_id, task, token) DO UPDATE SET last_event = greatest(known.last_event, excluded.last_event),
    lines = known.lines + excluded.lines, warnings = known.warnings + excluded.warnings,
    errors = known.errors + excluded.errors
)
SELECT token FROM ours
"""

_OURS: Final = """
SELECT m.token FROM unnest($1::uuid[], $2::bigint[]) AS m (job_id, token)
JOIN dl_jobs j ON j.job_id = ANY (ARRAY[m.job_id])
WHERE j.token = m.token AND (j.status = ANY ($3::dl_status[])) IS TRUE
"""


@attrs.frozen
class Finished:
    """Result of writing outcomes: the written status by token, and the tokens whose writes were void.

    `locked` has the tokens whose rows another session had locked: nothing was written, and they must be tried again.
    """

    written: dict[int, Status]
    void: list[int]
    locked: list[int] = attrs.field(factory=list)


async def aio_finish(connection: Any, outcomes: Sequence[Outcome], *, patient: bool = False) -> Finished:
    """Write `outcomes` in the order of their IDs (asyncio-flavored); with `patient`, wait for locked rows.

    `patient` is only for a single outcome: two batches that wait could deadlock.
    """
    ordered = sorted(outcomes, key=lambda outcome: outcome.job_id)
    if ordered and not patient and _are_plain(ordered):
        written = await _aio_succeed(connection, ordered)
    else:
        written = await _aio_write_outcomes(connection, ordered, patient=patient)
    if len(written) == len(ordered):
        return Finished(written, [])
    rest = {record["token"]: record["locked"] for record in await connection.fetch(_REST, *_columns(ordered))}
    left = [e.token for e in ordered if e.token not in written]
    return Finished(written, [t for t in left if t not in rest], [t for t in left if rest.get(t)])


def _are_plain(outcomes: Sequence[Outcome]) -> bool:
    """Return whether all outcomes are successes without an error; one that was not stored as returned has an error."""
    return all(e.step is Step.SUCCEED and e.error is None for e in outcomes)


async def _aio_succeed(connection: Any, outcomes: Sequence[Outcome]) -> dict[int, Status]:
    """Write successes without an error; return the status of the written ones by token."""
    ids, tokens, _ = _columns(outcomes)
    results, progress = [e.result for e in outcomes], [e.progress for e in outcomes]
    records = await connection.fetch(_SUCCEED, ids, tokens, results, progress)
    return {record["token"]: Status.SUCCEEDED for record in records}


async def _aio_write_outcomes(connection: Any, outcomes: Sequence[Outcome], *, patient: bool) -> dict[int, Status]:
    """Write outcomes of any kind; return the status of the written ones by token."""
    moves = [e for e in outcomes if e.step is Step.MOVE]
    ends = [e for e in outcomes if e.step is not Step.MOVE] if moves else outcomes
    records = []
    if ends:
        records = await connection.fetch(
            _FINISH_PATIENTLY if patient else _FINISH,
            *_columns(ends),
            [e.error for e in ends],
            [e.result for e in ends],
            [e.delay_s for e in ends],
            [e.progress for e in ends],
        )
    if moves:
        ids, tokens, _ = _columns(moves)
        records += await connection.fetch(
            _MOVE_PATIENTLY if patient else _MOVE,
            ids,
            tokens,
            [e.to for e in moves],
            [e.previous for e in moves],
            [e.result for e in moves],
        )
    return {record["token"]: Status(record["status"]) for record in records}


def _columns(outcomes: Sequence[Outcome]) -> tuple[list[UUID], list[int], list[str]]:
    return [e.job_id for e in outcomes], [e.token for e in outcomes], [e.step.value for e in outcomes]


async def aio_show_progress(connection: Any, shown: Sequence[tuple[UUID, int, str]]) -> set[int]:
    """Write (job_id, token, progress as JSON text) of running jobs (asyncio-flavored).

    Returns the tokens whose rows another session has locked: nothing was written, and they must be tried again.
    """
    ordered = sorted(shown)
    records = await connection.fetch(_PROGRESS, *map(list, zip(*ordered, strict=True)))
    runs = {(job_id, token) for job_id, token, _ in ordered}
    return await _aio_locked(connection, runs, {record["token"] for record in records}, [Status.RUNNING])


async def aio_keep_lines(
    connection: Any, lines: Sequence[tuple[UUID, int, Any, str]], *, of_loads: bool = False
) -> set[int]:
    """Write log lines as (job_id, token, timestamp, payload as JSON text), in order (asyncio-flavored).

    `of_loads`: some lines have the field `load`; their position is recorded. Returns the tokens whose rows another
    session has locked, as for progress.
    """
    records = await connection.fetch(_LOG_OF_LOADS if of_loads else _LOG, *map(list, zip(*lines, strict=True)))
    runs = {(job_id, token) for job_id, token, *_ in lines}
    statuses = [Status.RUNNING, Status.SUCCEEDED]
    return await _aio_locked(connection, runs, {record["token"] for record in records}, statuses)


async def _aio_locked(
    connection: Any, runs: set[tuple[UUID, int]], written: set[int], statuses: Sequence[Status]
) -> set[int]:
    """Return the tokens of the runs, given as (job_id, token), that are still ours but were not all written."""
    if len(written) == len(runs):
        return set()
    ids, tokens = zip(*sorted(runs), strict=True)
    return {record["token"] for record in await connection.fetch(_OURS, ids, tokens, statuses)} - written
