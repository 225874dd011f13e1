"""Reason why a job does not run now, by the rules of the claim. It is read on request; nothing is locked or written.

The reason may be outdated when it is read. The job's row has the immediate cause (`FACTS`). One more statement, for any
cause, reads the details, such as the holder of its key or the time at which its task's limits open.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.errors import JobNotFound
from dataloader.jobs.states import Status, WaitsFor
from dataloader.jobs.wait_reasons import MOST_NAMED, Cause, LockingSession, WaitReason, at
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.limit_reads import one_task, task_state
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

MOST_AHEAD: Final = 10_000

FACTS: Final = f"""
SELECT j.job_id, j.queue, j.task, j.status::text AS status, j.waits_for, j.priority, j.created_at, j.lane,
       j.partition_key, CASE WHEN j.keyed THEN hashtext(j.lock_key) END AS hash, j.cancel_requested, j.superseded_by,
       CASE WHEN isfinite(j.available_at) THEN j.available_at END AS available_at,
       CASE WHEN isfinite(j.lease_expires_at) THEN j.lease_expires_at END AS lease_expires_at,
       coalesce(j.run_started_at, j.started_at) AS started_at, j.finished_at, j.claimed_by, j.attempt, j.max_attempts,
       j.error IS NOT NULL AS has_failed, now() AS now, q.paused AS queue_paused, q.changed_at AS queue_changed_at,
       coalesce(t.paused, false) AS task_paused, w.workers, w.slots, w.knowing, w.taking, w.names
FROM dl_jobs j
LEFT JOIN dl_queues q ON q.queue = j.queue
LEFT JOIN dl_tasks t ON t.task = j.task
CROSS JOIN LATERAL (
  SELECT count(*) AS workers, count(*) FILTER (WHERE k.knows) AS knowing, count(*) FILTER (WHERE k.takes) AS taking,
         coalesce(sum((s.queues ->> j.queue)::int) FILTER (WHERE k.takes), 0) AS slots,
         coalesce(array_agg(s.worker) FILTER (WHERE k.takes), '{{}}') AS names
  FROM dl_workers s
  CROSS JOIN LATERAL (SELECT coalesce(j.task = ANY (s.tasks), true) AS knows) AS n
  CROSS JOIN LATERAL (SELECT n.knows, n.knows AND coalesce(s.only_tasks -> j.queue ? j.task, true) AS takes) AS k
  WHERE s.seen_at > now() - make_interval(secs => {ALIVE_WITHIN_S}) AND s.queues ? j.queue
) AS w
WHERE j.job_id = $1
"""
# Condition for jobs ahead; $1 to $3 are the position of the job.
_BEFORE: Final = "(j.priority, j.created_at, j.job_id) < ($1, $2, $3)"
_AHEAD_READY: Final = f"""
SELECT (SELECT count(*) FROM (
          SELECT FROM dl_jobs j
          WHERE j.queue = $4 AND j.status = 'queued' AND j.waits_for IS NULL AND {_BEFORE} LIMIT {MOST_AHEAD}) AS a) AS ahead,
       (SELECT count(*) FROM (
          SELECT FROM dl_jobs j
          WHERE j.queue = $4 AND j.status = 'running' AND j.claimed_by = ANY ($5) LIMIT {MOST_AHEAD}) AS r) AS running
"""  # noqa: E501 - one line a part
# Partitions are served round-robin: if a task has a limit for each, the jobs of other partitions are not counted.
_IN_LANE: Final = f"""
SELECT t.*, l.ahead AS ahead_in_lane, l.ahead_in_partition, r.ahead AS ahead, r.running AS running_in_queue,
       (SELECT count(*) FROM dl_jobs j WHERE j.lane = $6 AND j.status = 'running' AND j.partition_key = $7) AS in_partition
FROM ({one_task("$6")}) AS t
CROSS JOIN LATERAL (
  SELECT count(*) AS ahead, count(*) FILTER (WHERE a.partition_key = $7) AS ahead_in_partition FROM (
    SELECT j.partition_key FROM dl_jobs j
    WHERE j.lane = $6 AND j.status = 'queued' AND j.waits_for = 'limit' AND {_BEFORE} LIMIT {MOST_AHEAD}) AS a
) AS l
CROSS JOIN LATERAL ({_AHEAD_READY}) AS r
"""  # noqa: E501 - one line a part
# pg_advisory_lock(bigint): the number's halves are classid and objid. A check of a key holds a shared lock briefly.
SESSION_OF: Final = """
SELECT l.pid, nullif(a.application_name, '') AS application, a.usename::text AS user, host(a.client_addr) AS address,
       a.backend_start AS connected_at
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND (l.classid::bigint << 32 | l.objid::bigint) = ({hash})::bigint AND l.mode = 'ExclusiveLock' AND {when}
ORDER BY l.pid LIMIT 1
"""
"""Query for the session that holds the key of a hash; the locks are read only if the condition `when` is true."""
_OF_KEY: Final = f"""
SELECT h.job_id, h.claimed_by, h.started_at, h.superseded_by, s.*,
       ARRAY(SELECT j.job_id FROM dl_jobs j WHERE j.status = 'running' AND j.keyed AND hashtext(j.lock_key) = $4
             ORDER BY hashtext(j.lock_key), j.job_id LIMIT {MOST_NAMED}) AS holders,
       (SELECT count(*) FROM (
          SELECT FROM dl_jobs j
          WHERE hashtext(j.lock_key) = $4 AND j.status = 'queued' AND j.waits_for = 'lock' AND {_BEFORE} LIMIT {MOST_AHEAD}
        ) AS a) AS ahead
FROM (SELECT) AS one
LEFT JOIN LATERAL (
  SELECT j.job_id, j.claimed_by, coalesce(j.run_started_at, j.started_at) AS started_at, j.superseded_by FROM dl_jobs j
  WHERE j.status = 'running' AND j.keyed AND hashtext(j.lock_key) = $4 ORDER BY hashtext(j.lock_key), j.job_id LIMIT 1
) AS h ON true
LEFT JOIN LATERAL ({SESSION_OF.format(hash="$4::int", when="h.job_id IS NULL")}) AS s ON true
"""  # noqa: E501 - one line a part
# Last event of a snoozing job, with the reason that its handler gave.
_SNOOZED: Final = """
SELECT payload ->> 'error' FROM (
  SELECT payload FROM dl_job_events WHERE job_id = $1 AND kind = 'requeue' ORDER BY event_id DESC LIMIT 1
) AS last WHERE payload ->> 'reason' = 'snooze'
"""
_AFTER: Final = f"""
SELECT j.job_id, count(*) OVER () AS open
FROM dl_job_after a JOIN dl_jobs j ON j.job_id = a.after_id
WHERE a.job_id = $1 AND j.status IN ('queued', 'running') ORDER BY j.created_at, j.job_id LIMIT {MOST_NAMED}
"""


async def why_waits(database: Database, job_id: UUID) -> WaitReason:
    """Return the reason why the job does not run now. Raises `JobNotFound`."""
    return await database.run(_aio_why, job_id)


async def _aio_why(connection: Any, job_id: UUID) -> WaitReason:
    job = await connection.fetchrow(FACTS, job_id)
    if job is None:
        raise JobNotFound(f"no job has the ID {job_id}")
    return await aio_reason(connection, job)


async def aio_reason(connection: Any, job: Mapping[str, Any]) -> WaitReason:
    """Return the reason why the job of these `FACTS` does not run, with at most one statement (asyncio-flavored)."""
    return _of_started(job) or await _aio_of_queued(connection, job)


async def _aio_of_queued(connection: Any, job: Mapping[str, Any]) -> WaitReason:
    match job["waits_for"]:
        case WaitsFor.TIME:
            reason = await _aio_of_time(connection, job)
        case WaitsFor.AFTER:
            reason = await _aio_of_after(connection, job)
        case WaitsFor.LOCK:
            reason = await _aio_of_key(connection, job)
        case WaitsFor.LIMIT:
            return await _aio_of_lane(connection, job)
        case _:
            return await _aio_of_queue(connection, job)
    if job["task_paused"]:
        reason.also.append(f"The task {job['task']} is paused.")
    elsewhere = _closed_queue(job)
    if elsewhere is not None:
        reason.also.append(elsewhere.text)
    return reason


def _reason(job: Mapping[str, Any], cause: Cause, text: str, **more: Any) -> WaitReason:
    return WaitReason(job_id=job["job_id"], cause=cause, text=text, **more)


def _of_started(job: Mapping[str, Any]) -> WaitReason | None:
    """Return the reason for a job that does not wait; None for a job that waits."""
    status = Status(job["status"])
    if status.is_final:
        return _of_ended(job, status)
    if status is Status.RUNNING:
        return _of_running(job)
    if job["cancel_requested"]:
        return _reason(job, "canceling", "A cancel was requested. The next worker that claims the job cancels it.")
    return None


def _of_ended(job: Mapping[str, Any], status: Status) -> WaitReason:
    newer = job["superseded_by"]
    if newer is not None and status is not Status.SUCCEEDED:
        text = f"It is superseded by the newer job {newer} of its unique key."
        return _reason(job, "superseded", text, since=job["finished_at"], jobs=[newer])
    when = "" if job["finished_at"] is None else f" at {at(job['finished_at'])}"
    return _reason(job, "ended", f"It has ended{when}: {status}.", since=job["finished_at"])


def _of_running(job: Mapping[str, Any]) -> WaitReason:
    where = f" on {job['claimed_by']}" if job["claimed_by"] else " in another service"
    since, ends_at = job["started_at"], job["lease_expires_at"]
    if ends_at is not None and ends_at < job["now"]:
        text = (
            f"Its worker sends no heartbeats. The lease expired at {at(ends_at)}, and the next sweep recovers the job."
        )
        return _reason(job, "lease_ended", text, since=ends_at)
    begun = "" if since is None else f" since {at(since)}"
    if job["cancel_requested"]:
        return _reason(job, "running", f"It is running{where}{begun}, and a cancel was requested.", since=since)
    return _reason(job, "running", f"It is running{where}{begun}.", since=since)


async def _aio_of_time(connection: Any, job: Mapping[str, Any]) -> WaitReason:
    due = job["available_at"]
    if job["has_failed"] and due is not None and due > job["now"]:
        snoozed = await connection.fetchval(_SNOOZED, job["job_id"])
        if snoozed is not None:
            return _reason(job, "time", f"It is snoozed until {at(due)}: {snoozed}.", until=due)
    attempt = f"attempt {job['attempt'] + 1} of {job['max_attempts']}"
    if due is None or due > job["now"]:
        when = "forever" if due is None else f"until {at(due)}"
        text = f"It failed, and {attempt} is delayed {when}." if job["has_failed"] else f"It is not due {when}."
        return _reason(job, "time", text.replace("not due forever", "never due"), until=due)
    text = f"It has been due since {at(due)}, and becomes ready at the next poll."
    return _reason(job, "time", text, since=due)


async def _aio_of_after(connection: Any, job: Mapping[str, Any]) -> WaitReason:
    rows = await connection.fetch(_AFTER, job["job_id"])
    if not rows:
        return _reason(job, "after", "The jobs that it depends on have ended. It becomes ready at the next poll.")
    ids, number = [row["job_id"] for row in rows], rows[0]["open"]
    names = ", ".join(map(str, ids)) + (" and others" if number > len(ids) else "")
    text = f"It depends on {number:,} {'job that has' if number == 1 else 'jobs that have'} not ended: {names}."
    return _reason(job, "after", text, jobs=ids)


async def _aio_of_key(connection: Any, job: Mapping[str, Any]) -> WaitReason:
    holder = await connection.fetchrow(_OF_KEY, *_place_in_queue(job), job["hash"])
    ahead = holder["ahead"]
    place = _in_line(ahead)
    if holder["job_id"] is not None:
        who = f"job {holder['job_id']} on {holder['claimed_by'] or 'another service'}"
        since = holder["started_at"]
        begun = "" if since is None else f" since {at(since)}"
        older = ", which it supersedes" if holder["superseded_by"] == job["job_id"] else ""
        text = f"Its lock_key is held by {who}{begun}{older}; {place}."
        return _reason(job, "key", text, since=since, jobs=holder["holders"], ahead=ahead)
    if holder["pid"] is not None:
        found = session_of(holder)
        text = f"Its lock_key is locked by {described(found)}, which runs no job with this key; {place}."
        return _reason(job, "foreign_lock", text, since=None, ahead=ahead, session=found)
    return _reason(job, "key_free", f"Its lock_key has become free; {place}.", ahead=ahead)


def session_of(row: Mapping[str, Any]) -> LockingSession:
    """Return the session of a row with the columns of `SESSION_OF`."""
    return LockingSession(**{field.name: row[field.name] for field in attrs.fields(LockingSession)})


def described(session: LockingSession) -> str:
    """Return a description of a session for a sentence."""
    about: list[str | None] = [
        session.application and f"application {session.application}",
        session.user and f"role {session.user}",
        session.address and f"from {session.address}",
        f"connected since {at(session.connected_at)}" if session.connected_at else None,
    ]
    return f"the database session {session.pid} ({', '.join(filter(None, about)) or 'details not visible'})"


async def _aio_of_lane(connection: Any, job: Mapping[str, Any]) -> WaitReason:
    name = job["lane"] or job["task"]
    values = (*_place_in_queue(job), job["queue"], job["names"], name, job["partition_key"])
    found = await connection.fetchrow(_IN_LANE, *values)
    if found is None:
        return _unknown_task(job)
    task = task_state(found)
    each = found["max_running_per_partition"]
    ahead = found["ahead_in_lane" if each is None else "ahead_in_partition"]
    is_full = each is not None and found["in_partition"] >= each
    place = _in_line(ahead) if each is None else f"in its partition, {_in_line(ahead)}"
    opens = "" if task.opens_at is None else f" until {at(task.opens_at)}"
    supplier = task.limits.get("supplier")
    texts: dict[str, tuple[Cause, str]] = {
        "paused": ("task_paused", f"The task {name} is paused"),
        "period": ("period", f"The task {name} is outside its work periods{opens}"),
        "running": (
            "max_running",
            f"The task {name} has reached its concurrency limit, {found['max_running']}",
        ),
        "batch": (
            "batch",
            f"The next batch of the task {name} waits{opens}"
            if opens
            else f"The batch of the task {name} is full; the next batch starts when its jobs have ended",
        ),
        "supplier_paused": ("supplier_paused", f"The supplier {supplier} is paused"),
        "supplier_period": ("supplier_period", f"The supplier {supplier} is outside its work periods{opens}"),
        "budget": ("budget", f"A rate limit of the supplier {supplier} is used up{opens}"),
        "error": ("limit_error", f"The limits of the task {name} cannot be evaluated ({task.error})"),
    }
    closed = _closed_queue(job)
    if task.closed is None:
        if closed is not None:
            return closed
        if is_full:
            text = f"Its partition_key has reached the concurrency limit of the task {name}, {each}; {place}."
            return _reason(job, "partition", text, ahead=ahead)
        if found["running_in_queue"] >= job["slots"]:
            return _of_full_queue(job, found["ahead"])
        return _reason(job, "next", f"The limits of the task {name} allow its start; {place}.", ahead=ahead)
    cause, text = texts[task.closed]
    also = [] if closed is None else [closed.text]
    return _reason(job, cause, f"{text}; {place}.", until=task.opens_at, ahead=ahead, also=also)


def _closed_queue(job: Mapping[str, Any]) -> WaitReason | None:
    """Return the reason if no worker takes jobs of this task from this queue; None if one may."""
    if job["queue_paused"]:
        since = job["queue_changed_at"]
        return _reason(job, "queue_paused", f"The queue {job['queue']} has been paused since {at(since)}.", since=since)
    if not job["workers"]:
        return _reason(job, "no_worker", f"No worker serves the queue {job['queue']}.")
    if not job["knowing"]:
        return _unknown_task(job)
    if not job["taking"]:
        return _reason(
            job, "no_worker", f"No worker of the queue {job['queue']} claims jobs of the task {job['task']}."
        )
    return None


def _unknown_task(job: Mapping[str, Any]) -> WaitReason:
    text = f"No running worker of the queue {job['queue']} has the task {job['task']}."
    return _reason(job, "unknown_task", text)


async def _aio_of_queue(connection: Any, job: Mapping[str, Any]) -> WaitReason:
    closed = _closed_queue(job)
    if closed is not None:
        return closed
    if job["task_paused"]:
        return _reason(job, "task_paused", f"The task {job['task']} is paused.")
    found = await connection.fetchrow(_AHEAD_READY, *_place_in_queue(job), job["queue"], job["names"])
    if found["running"] >= job["slots"]:
        return _of_full_queue(job, found["ahead"])
    text = f"It is ready for a worker of the queue {job['queue']}; {_in_line(found['ahead'])}."
    return _reason(job, "next", text, since=job["available_at"], ahead=found["ahead"])


def _of_full_queue(job: Mapping[str, Any], ahead: int) -> WaitReason:
    text = f"All {job['slots']:,} slots of the queue {job['queue']} are in use; {_in_line(ahead)}."
    return _reason(job, "slots", text, since=job["available_at"], ahead=ahead)


def _place_in_queue(job: Mapping[str, Any]) -> tuple[Any, ...]:
    return job["priority"], job["created_at"], job["job_id"]


def _in_line(ahead: int) -> str:
    if ahead == 0:
        return "it is next"
    few = f"{ahead:,}" if ahead < MOST_AHEAD else f"{MOST_AHEAD:,} or more"
    return f"{few} {'job is' if ahead == 1 else 'jobs are'} ahead"
