"""Runs as their pages show them: with the results of their tasks, the usual duration, and the range of their log.

Nothing here writes. A list costs the same at any length of the history: each run has few tasks, and numbers that could
be large are counted up to a bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Annotated, Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.load_listings import RunNotFound
from dataloader.jobs.page_cursor import BY_INSTANT, After
from dataloader.jobs.secrets.record_masks import FIXED_WORD, Sensitive
from dataloader.store.connection.bridge import Database
from dataloader.store.etl.run_journal import GONE_THROUGH
from dataloader.store.etl.run_status import as_job

MOST_TASKS: Final = 1_000
"""Maximum number of tasks of a run that its page shows."""
MOST_FAILURES: Final = 1_000
"""Maximum number of failures of a run that are counted: this number means at least this number."""
MOST_LOOKED_AT: Final = 2_000
"""Maximum number of runs that a page of runs with one status reads."""
USUAL_OF: Final = 10
"""Number of completed runs whose median is the usual duration."""
_MOST_BEFORE: Final = 200
"""Number of earlier runs among which those are searched."""
WRITTEN: Final = (
    "inserted",
    "updated",
    "deleted",
    "changed",
    "closed",
    "reappeared",
    "filled",
    "corrected",
    "woven",
)
"""Counts of merges that are written rows; the other rows were already correct."""
_THROUGH: Final = ", ".join(f"'{status}'" for status in sorted(GONE_THROUGH))
# The progress of a client may be long; ours is short.
_PROGRESS: Final = (
    "CASE WHEN j.status = 'running' AND pg_column_size(j.progress) < 16000 THEN j.progress END AS progress"
)
# A set of dimensions has no records of failures: its summary has the number of failed tables.
_TABLES_FAILED: Final = "coalesce((t.summary ->> 'tables_failed')::int, 0)"
_COUNTS: Final = "coalesce(t.summary -> 'counts', jsonb_path_query_array(t.summary, '$.tables.*.counts'), '{}')"

_LAST_LOOKED_AT: Final = """
SELECT r.started_at, r.run_id FROM dl_etl_runs r WHERE {terms} ORDER BY {newest} OFFSET {looked_at} - 1 LIMIT 1
"""
_RUN: Final = f"""
SELECT r.run_id, r.name, r.kind, {as_job("r")}, {_PROGRESS},
  j.status::text AS job_status, j.finished_at AS job_finished_at, j.attempt, j.max_attempts,
  j.cancel_requested, clock_timestamp() AS now, usual.usual_s, usual.last_success
FROM dl_etl_runs r JOIN dl_jobs j ON j.job_id = r.run_id
CROSS JOIN LATERAL (
  SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY extract(epoch FROM b.finished_at - b.started_at)) AS usual_s,
         (array_agg(b.run_id ORDER BY b.started_at DESC, b.run_id DESC))[1] AS last_success
  FROM (
    SELECT * FROM (
      SELECT run_id, status, started_at, finished_at FROM dl_etl_runs
      WHERE name = r.name AND (name, started_at, run_id) < (r.name, r.started_at, r.run_id)
      ORDER BY name DESC, started_at DESC, run_id DESC LIMIT {_MOST_BEFORE}
    ) AS before WHERE status IN ({_THROUGH}) ORDER BY started_at DESC, run_id DESC LIMIT {USUAL_OF}
  ) AS b
) AS usual
WHERE r.run_id = $1
"""
_TASKS: Final = f"""
SELECT t.ordinal, t.layer, t.task, {as_job("t")}, {_COUNTS} AS written,
  coalesce(t.summary -> 'phases', '{{}}') AS phases, coalesce(t.summary -> 'tables', '{{}}') AS tables,
  coalesce(l.lines, 0) AS lines, coalesce(l.warnings, 0) AS warnings, coalesce(l.errors, 0) AS errors,
  coalesce(l.last_event, 0) AS last_event, coalesce(f.failures, 0) + {_TABLES_FAILED} AS failures,
  coalesce(f.resolved, 0) AS resolved
FROM dl_etl_tasks t JOIN dl_jobs j ON j.job_id = t.run_id
LEFT JOIN (
  SELECT task, sum(lines)::bigint AS lines, sum(warnings)::bigint AS warnings, sum(errors)::bigint AS errors,
         max(last_event) AS last_event
  FROM dl_etl_logs WHERE run_id = $1 GROUP BY task
) AS l ON l.task = t.task
LEFT JOIN (
  SELECT load, count(*)::int AS failures, count(solved_at)::int AS resolved
  FROM (SELECT load, solved_at FROM dl_etl_failures WHERE run_id = $1 LIMIT {MOST_FAILURES}) AS counted GROUP BY load
) AS f ON f.load = t.task
WHERE t.run_id = $1 ORDER BY t.ordinal LIMIT {MOST_TASKS}
"""


@attrs.frozen(kw_only=True)
class RunLine:
    """Run in a list. `args`: its job's, unless they are long; `rows`: the rows written by now.

    `failures` are counted up to `MOST_FAILURES`.
    """

    run_id: UUID
    name: Sensitive[str]
    kind: Annotated[str, FIXED_WORD]
    status: Annotated[str, FIXED_WORD]
    started_at: datetime
    finished_at: datetime | None
    reason: Sensitive[str | None]
    args: Sensitive[Mapping[str, Any] | None]
    tasks: int
    done: int
    rows: int
    failures: int

    @property
    def took(self) -> timedelta | None:
        """Duration, once it has ended."""
        return None if self.finished_at is None else self.finished_at - self.started_at


@attrs.frozen
class RunLines:
    """A page of a list of runs, newest first."""

    runs: list[RunLine]
    next: str | None


@attrs.frozen(kw_only=True)
class RunViewTask:
    """Task of a run, with its kept log lines: how many, how many are serious, and the number of the last one.

    Its `phases` are those of a load, `tables` those of a set of dimensions, each with its beginning and end.
    """

    ordinal: int
    layer: Sensitive[str]
    task: Sensitive[str]
    status: Annotated[str, FIXED_WORD]
    started_at: datetime | None
    finished_at: datetime | None
    reason: Sensitive[str | None]
    counts: Sensitive[Mapping[str, Any]]
    phases: Sensitive[Mapping[str, Any]]
    tables: Sensitive[Mapping[str, Any]]
    rows: int
    lines: int
    warnings: int
    errors: int
    last_event: int
    failures: int
    resolved: int

    @property
    def took(self) -> timedelta | None:
        """Duration, once it has ended."""
        return None if self.started_at is None or self.finished_at is None else self.finished_at - self.started_at


@attrs.frozen(kw_only=True)
class RunView:
    """Run with its status, its tasks, and data to compare it with.

    `progress` is the job's, while it runs. `usual_s` is the median duration in seconds of the last completed runs of
    this name before it; `last_success` is the newest of them. `now` is the database's time.
    """

    run_id: UUID
    name: Sensitive[str]
    kind: Annotated[str, FIXED_WORD]
    status: Annotated[str, FIXED_WORD]
    started_at: datetime
    finished_at: datetime | None
    reason: Sensitive[str | None]
    counts: Sensitive[Mapping[str, Any]]
    progress: Sensitive[Mapping[str, Any] | None]
    job_status: Annotated[str, FIXED_WORD]
    job_finished_at: datetime | None
    attempt: int
    max_attempts: int
    cancel_requested: bool
    now: datetime
    usual_s: float | None
    last_success: UUID | None
    tasks: list[RunViewTask]

    @property
    def took(self) -> timedelta | None:
        """Duration, once it has ended."""
        return None if self.finished_at is None else self.finished_at - self.started_at

    @property
    def is_over(self) -> bool:
        """Return whether it changes no more, unless its job is queued again."""
        return self.job_status not in {"queued", "running"}

    @property
    def rows(self) -> int:
        """Number of rows written by now."""
        return sum(task.rows for task in self.tasks)

    @property
    def failures(self) -> int:
        """Number of failures of all tasks."""
        return sum(task.failures for task in self.tasks)


async def list_run_lines(
    database: Database, *, name: str | None, status: str | None, limit: int, after: After
) -> RunLines:
    """Return a page of runs, newest first, of all or of one name; of one status among the next `MOST_LOOKED_AT`."""
    return await database.run(_aio_list_run_lines, name, status, limit, after)


def _list_of(terms: str, newest: str, looked_at: int, wanted: str, limit: int) -> str:
    return f"""
SELECT p.run_id, p.name, p.kind, p.status, p.started_at, p.finished_at, p.reason, p.args,
  of_tasks.tasks, of_tasks.done, of_tasks.written, of_failures.failures + of_tasks.tables_failed AS failures
FROM (
  SELECT * FROM (
    SELECT r.run_id, r.name, r.kind, {as_job("r")}, {_PROGRESS},
      CASE WHEN pg_column_size(j.args) < 2000 THEN j.args END AS args
    FROM (SELECT * FROM dl_etl_runs r WHERE {terms} ORDER BY {newest} LIMIT {looked_at}) AS r
    JOIN dl_jobs j ON j.job_id = r.run_id
  ) AS q WHERE {wanted} ORDER BY started_at DESC, run_id DESC LIMIT {limit}
) AS p
CROSS JOIN LATERAL (
  SELECT count(*)::int AS tasks, count(*) FILTER (WHERE t.finished_at IS NOT NULL)::int AS done,
         coalesce(sum({_TABLES_FAILED}), 0)::int AS tables_failed,
         array_agg(CASE WHEN t.finished_at IS NOT NULL THEN {_COUNTS}
                        WHEN t.task = p.progress ->> 'load' THEN p.progress END) AS written
  FROM dl_etl_tasks t WHERE t.run_id = p.run_id
) AS of_tasks
CROSS JOIN LATERAL (
  SELECT count(*)::int AS failures FROM (
    SELECT FROM dl_etl_failures f WHERE f.run_id = p.run_id LIMIT {MOST_FAILURES}
  ) AS counted
) AS of_failures
ORDER BY p.started_at DESC, p.run_id DESC
"""


async def _aio_list_run_lines(
    connection: Any, name: str | None, status: str | None, limit: int, after: After
) -> RunLines:
    key, terms = "r.started_at, r.run_id", "true"
    values: list[object] = []
    if name is not None:
        # With the name in the key, no plan scans the runs of all names to find those of one.
        key, terms, values = f"r.name, {key}", "r.name = $1", [name]
    if after is not None:
        values += BY_INSTANT.key(after)
        terms += f" AND ({key}) < ({', '.join(f'${number}' for number in range(1, len(values) + 1))})"
    newest = ", ".join(f"{column} DESC" for column in key.split(", "))
    seen = list(values)
    looked_at = limit + 1 if status is None else MOST_LOOKED_AT
    wanted = "true"
    if status is not None:
        values.append(status)
        wanted = f"q.status = ${len(values)}"
    rows = await connection.fetch(_list_of(terms, newest, looked_at, wanted, limit + 1), *values)
    runs, following = BY_INSTANT.page(list(map(_run_line, rows)), limit, lambda run: (run.started_at, run.run_id))
    if following is None and status is not None:
        last = await connection.fetchrow(_LAST_LOOKED_AT.format(terms=terms, newest=newest, looked_at=looked_at), *seen)
        following = None if last is None else BY_INSTANT.text((last["started_at"], last["run_id"]))
    return RunLines(runs, following)


def _run_line(row: Mapping[str, Any]) -> RunLine:
    fields = dict(row)
    written = fields.pop("written") or []
    return RunLine(**fields, rows=sum(written_rows(counts) for counts in written if counts is not None))


async def get_run_view(database: Database, run_id: UUID) -> RunView:
    """Return a run with its tasks. Raises `RunNotFound`."""
    return await database.run(_aio_run_view, run_id)


async def _aio_run_view(connection: Any, run_id: UUID) -> RunView:
    row = await connection.fetchrow(_RUN, run_id)
    if row is None:
        raise RunNotFound(f"no run has the ID {run_id}: its job is not a load or flow, has not started, or was deleted")
    progress = row["progress"] or {}
    tasks = [_task_of_run(task, progress) for task in await connection.fetch(_TASKS, run_id)]
    return RunView(**row, tasks=tasks)


def _task_of_run(row: Mapping[str, Any], progress: Mapping[str, Any]) -> RunViewTask:
    fields = dict(row)
    written = fields.pop("written")
    if fields["status"] == "running" and progress.get("load") == fields["task"]:
        written = progress
    return RunViewTask(**fields, rows=written_rows(written))


def written_rows(counts: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> int:
    """Return the number of written rows in the counts of a load, or of each table of a set of dimensions."""
    each: Iterable[Any] = [counts] if isinstance(counts, Mapping) else counts
    found = (one.get(name) for one in each if isinstance(one, Mapping) for name in WRITTEN)
    return sum(number for number in found if type(number) is int)
