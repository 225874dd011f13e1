"""Status of a run or a task in SQL: a stored `running` is replaced by its job's status once the job does not run."""

from __future__ import annotations


def as_job(row: str) -> str:
    """Return columns of a run or a task; if its job `j` does not run any more, with the job's own status and end.

    The job's error is the reason of a run or task that has none, because it was not completed.
    """
    return f"""
  CASE WHEN {row}.status = 'running' AND j.status <> 'running' THEN j.status::text ELSE {row}.status END AS status,
  {row}.started_at,
  coalesce({row}.finished_at, CASE WHEN {row}.status = 'running' THEN j.finished_at END) AS finished_at,
  CASE WHEN {row}.status IN ('waiting', 'succeeded', 'succeeded_with_failures') THEN {row}.summary ->> 'reason'
    WHEN {row}.status <> 'running' THEN coalesce({row}.summary ->> 'reason', split_part(j.error, E'\\n', 1))
    WHEN j.status <> 'running' THEN split_part(j.error, E'\\n', 1) END AS reason,
  coalesce({row}.summary -> 'counts', '{{}}') AS counts
"""
