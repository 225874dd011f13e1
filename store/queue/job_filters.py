"""Job filter as SQL: one constant fragment for each given criterion. Values are parameters, never part of the text.

One text with `$1::text IS NULL OR queue = $1` would serve all filters, but no plan could use an index for it.
"""

from __future__ import annotations

from typing import Any, Final

from dataloader.jobs.failures import group_key
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.states import FINAL, Status

FAILING: Final = "status IN ('queued', 'failed', 'lost')"
"""Condition of the index on `error_group`: jobs that have failed finally or wait for a retry."""
EXACT_LINE: Final = "hashtextextended(dl_error_line(error), 0)"
"""Hash of an error's first line, for groups of exactly equal errors."""

_RUNNING: Final = frozenset({Status.RUNNING})

_FRAGMENTS: Final = {
    "queue": "queue = ${0}",
    "task": "task = ${0}",
    "status": "status = ANY (${0}::dl_status[])",
    "lock_key": "hashtext(lock_key) = hashtext(${0}) AND lock_key = ${0} AND keyed",
    "created_from": "created_at >= ${0}",
    "created_to": "created_at < ${0}",
    "finished_from": "finished_at >= ${0}",
    "finished_to": "finished_at < ${0}",
    "error_group": f"error_group = ${{0}} AND {FAILING}",
    "exact": f"{EXACT_LINE} = ${{0}}",
    "worker": "claimed_by = ${0}",
    "schedule": "schedule = ${0}",
}


OF_ROOT: Final = "root_id = ${0}"
THE_ROOT: Final = "job_id = ${0} AND root_id IS DISTINCT FROM ${0}"
"""The two parts of the condition for a root; each has an index."""


def condition(wanted: JobFilter, *, root: str = f"({OF_ROOT} OR {THE_ROOT})", first: int = 1) -> tuple[str, list[Any]]:
    """Return the SQL condition of a filter, and the values of its parameters, numbered from `first`.

    `root`: the condition for the criterion `root`.
    """
    values = wanted.criteria()
    # With all statuses by name the planner can use ix_dl_jobs_finished for a short period, and ix_dl_jobs_status_queue
    # for a queue with few jobs.
    if "finished_from" in values or "finished_to" in values:
        values["status"] = values.get("status", FINAL) & FINAL
    elif "worker" in values:  # an ended job has no worker
        values["status"] = values.get("status", _RUNNING) & _RUNNING
    elif "queue" in values:
        values.setdefault("status", frozenset(Status))
    if "error_group" in values:
        values["error_group"], exact = group_key("error_group", values["error_group"])
        if exact is not None:
            values["exact"] = exact
    if "status" in values:
        values["status"] = sorted(values["status"])
    fragments = _FRAGMENTS | {"root": root}
    terms = [fragments[name].format(number) for number, name in enumerate(values, first)]
    return " AND ".join(terms) or "true", list(values.values())
