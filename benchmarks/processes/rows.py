"""Processes, their calls and timers, created by SQL: measurements begin with existing rows."""

from __future__ import annotations

from typing import Any, Final

import psycopg

from benchmarks.processes.measured_types import EVENT, STEPS_QUEUE, TYPE
from dataloader.store.embedded.postgres import EmbeddedPostgres

_PROCESSES: Final = f"""
INSERT INTO dl_processes (type, process_id, status, previous_status, error_group, detail, aux_state, metadata,
                          last_event_id)
SELECT '{TYPE}', %(name)s || ' ' || i, CASE WHEN is_error THEN 'error' ELSE 'running' END, 'init',
       CASE WHEN is_error THEN i %% 7 END, CASE WHEN is_error THEN 'the bank has refused it' END, '0',
       CASE WHEN NOT %(mixed)s THEN '{{}}'
            ELSE jsonb_build_object('customer', 'c' || i %% 50000, 'country', (ARRAY['de', 'fr', 'it'])[1 + i %% 3],
                                    'is_first', i <= 100) END, 1
FROM generate_series(1, %(number)s) AS i CROSS JOIN LATERAL (SELECT i %% 100 = 0 AND %(mixed)s AS is_error) AS e
"""
_PASTS: Final = f"""
INSERT INTO dl_process_tasks (key, type, kind, status, finished_at, started_at)
SELECT key, '{TYPE}', 'init', 'finished', now(), now() FROM dl_processes WHERE starts_with(process_id, %(name)s || ' ');
INSERT INTO dl_process_events (key, event_id, task_id, payload)
SELECT key, 1, 1, to_jsonb('{EVENT}'::text) FROM dl_processes WHERE starts_with(process_id, %(name)s || ' ');
"""
# As `dl_process_wake` adds them: a job for each process with work.
_JOBS: Final = f"""
WITH woken AS (
  UPDATE dl_processes SET job_id = gen_random_uuid()
  WHERE job_id IS NULL AND key = ANY (%(keys)s::bigint[])
  RETURNING key, type, process_id, version, job_id, timer_at
)
INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, keyed, available_at, waits_for, max_attempts, lease_ttl_sec)
SELECT job_id, '{STEPS_QUEUE}', '{STEPS_QUEUE}.v' || version,
       jsonb_build_object('key', key, 'type', type, 'process_id', process_id), job_id::text, false,
       CASE WHEN %(at_timer)s THEN timer_at ELSE now() END, CASE WHEN %(at_timer)s AND timer_at > now() THEN 'time' END,
       1000000, 60
FROM woken
"""
_CALLS: Final = f"""
INSERT INTO dl_process_tasks (key, type, kind, method, args)
SELECT key, '{TYPE}', 'call', %(method)s, '1' FROM unnest(%(keys)s::bigint[]) AS k (key)
"""
_TIMERS: Final = """
UPDATE dl_processes SET timer_task = nextval('dl_process_task_seq'), timer_kind = 'timeout', timer_attempt = 0,
  timer_at = now() + make_interval(secs => %(after_s)s), timer_context = %(context)s::text::jsonb
WHERE key = ANY (%(keys)s::bigint[])
"""
_ALL_DUE: Final = """
WITH due AS (
  UPDATE dl_processes SET timer_at = now() + make_interval(secs => %(after_s)s), timer_context = '"once"'
  WHERE key = ANY (%(keys)s::bigint[]) RETURNING job_id, timer_at)
UPDATE dl_jobs SET available_at = due.timer_at FROM due WHERE dl_jobs.job_id = due.job_id
"""
_LONG_PAST: Final = f"""
INSERT INTO dl_process_events (key, event_id, task_id, payload)
SELECT %(key)s, n, 1, to_jsonb('{EVENT}'::text) FROM generate_series(2, %(number)s) AS n
"""
_CLEAR: Final = f"""
WITH gone AS (
  UPDATE dl_processes SET timer_task = NULL, timer_kind = NULL, timer_at = NULL, job_id = NULL
  WHERE key = ANY (%(keys)s::bigint[]) AND job_id IS NOT NULL RETURNING key)
DELETE FROM dl_jobs USING gone WHERE queue = '{STEPS_QUEUE}' AND (args ->> 'key')::bigint = gone.key
"""
_SIZE: Final = """
SELECT sum(pg_total_relation_size(name::regclass))
FROM unnest(ARRAY['dl_processes', 'dl_process_tasks', 'dl_process_events']) AS t (name)
"""

Connection = psycopg.Connection[Any]


def connected(server: EmbeddedPostgres, database: str) -> Connection:
    """Return a connection that does not wait for the disk, since filling is not measured."""
    connection = psycopg.connect(server.dsn_of(database), autocommit=True)
    connection.execute("SET synchronous_commit = off")
    return connection


def add_processes(connection: Connection, name: str, number: int, *, mixed: bool = False) -> None:
    """Add `number` running processes, each with a past task and event. `mixed`: with metadata, some in error."""
    values = {"name": name, "number": number, "mixed": mixed}
    connection.execute(_PROCESSES.encode(), values)
    for statement in _PASTS.split(";\n")[:2]:
        connection.execute(statement.encode(), values)


def keys_of(connection: Connection, name: str, most: int) -> list[int]:
    """Return the keys of up to `most` processes of this name without errors, random but the same each time."""
    rows = connection.execute(
        "SELECT key FROM dl_processes WHERE starts_with(process_id, %s) AND status = 'running'"
        " ORDER BY hashint8(key) LIMIT %s",
        (f"{name} ", most),
    )
    return [key for (key,) in rows]


def add_calls(connection: Connection, keys: list[int], method: str) -> None:
    """Add a call of each, with its job."""
    connection.execute(_CALLS.encode(), {"keys": keys, "method": method})
    connection.execute(_JOBS.encode(), {"keys": keys, "at_timer": False})


def add_timers(connection: Connection, keys: list[int], after_s: float, context: str | None = None) -> None:
    """Add a timer of each, with its job."""
    text = None if context is None else f'"{context}"'
    connection.execute(_TIMERS.encode(), {"keys": keys, "after_s": after_s, "context": text})
    connection.execute(_JOBS.encode(), {"keys": keys, "at_timer": True})


def make_due(connection: Connection, keys: list[int], after_s: float) -> None:
    """Move all these timers to one time."""
    connection.execute(_ALL_DUE.encode(), {"keys": keys, "after_s": after_s})


def add_events(connection: Connection, key: int, number: int) -> None:
    """Replace the events of one process by `number` events."""
    connection.execute("DELETE FROM dl_process_events WHERE key = %s AND event_id > 1", (key,))
    connection.execute(_LONG_PAST.encode(), {"key": key, "number": number})
    connection.execute("UPDATE dl_processes SET last_event_id = %s WHERE key = %s", (number, key))


def bytes_of(connection: Connection) -> int:
    """Return the size of the processes, their tasks and their events, with all indexes."""
    [size] = connection.execute(_SIZE.encode()).fetchone() or [0]
    return int(size)


def clear(connection: Connection, keys: list[int]) -> None:
    """Delete the leftovers of a measurement: ended jobs, and timers of these processes."""
    connection.execute("DELETE FROM dl_jobs WHERE status NOT IN ('queued', 'running')")
    connection.execute(
        _CLEAR.encode(),
        {"keys": keys},
    )


def settle(connection: Connection, tables: str = "") -> None:
    """Bring tables to a steady state: analyzed, and nothing left to be written."""
    connection.execute(f"VACUUM ANALYZE {tables}".encode())
    connection.execute("CHECKPOINT")
