"""Runs of loads and flows for readers: runs and their tasks, loads, failures. Nothing here writes.

web/ and the command line call it. Every list is a page by key, and the cost of a page does not grow with the history.

A run or a task that is stored as `running` although its job does not run shows the status of the job: `queued` if a
worker died and another one will continue, `lost` or `canceled` if none will.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Self
from uuid import UUID

import attrs

from dataloader.jobs.errors import NotFound, StoreError
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import MAX_NAME, Instant, about, check_between, check_text
from dataloader.jobs.page_cursor import BY_INSTANT, BY_NAME, BY_NUMBER, After, Next
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.connection.bridge import Database, set_local
from dataloader.store.connection.connect import PLANNER_OF_USERS
from dataloader.store.connection.error_meanings import READ_ONLY
from dataloader.store.connection.fetching import aio_fetch
from dataloader.store.etl import run_journal
from dataloader.store.etl.failure_rows import FailureRecord
from dataloader.store.queue.transaction import told_of_users

MAX_LOADS: Final = 200
"""Maximum number of loads that one call lists: each has its last run and its failures looked up."""
MAX_COUNTED: Final = 1_000
"""Maximum number of failures of a load that are counted: this number means at least this number."""


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


_RUNS: Final = f"""
SELECT r.run_id, r.name, r.kind, {as_job("r")} FROM dl_etl_runs r JOIN dl_jobs j ON j.job_id = r.run_id
"""
_TASKS: Final = f"""
SELECT t.ordinal, t.layer, t.task, {as_job("t")},
  coalesce(t.summary -> 'phases', '{{}}') AS phases, coalesce(t.summary -> 'tables', '{{}}') AS tables
FROM dl_etl_tasks t JOIN dl_jobs j ON j.job_id = t.run_id WHERE t.run_id = $1 AND t.ordinal > $2
ORDER BY t.ordinal LIMIT $3
"""
_THIS: Final = """
known AS (SELECT $1 AS load WHERE EXISTS (SELECT FROM dl_etl_tasks WHERE task = $1)
                               OR EXISTS (SELECT FROM dl_etl_cursors WHERE load = $1))
"""
# From name to name by the index, however many runs each has.
_NAMES: Final = """
RECURSIVE found (task) AS (
  (SELECT task FROM dl_etl_tasks WHERE task > $1 ORDER BY task LIMIT 1)
  UNION ALL
  SELECT (SELECT t.task FROM dl_etl_tasks t WHERE t.task > found.task ORDER BY t.task LIMIT 1)
  FROM found WHERE found.task IS NOT NULL
), known AS (
  (SELECT task AS load FROM found WHERE task IS NOT NULL LIMIT $2)
  UNION
  (SELECT load FROM dl_etl_cursors WHERE load > $1 ORDER BY load LIMIT $2)
)
"""
_LOADS: Final = f"""
SELECT known.load, c.upto AS watermark, c.upto, c.moved_at, counted.unresolved, counted.unresolved AS unsolved, last.*
FROM known
LEFT JOIN dl_etl_cursors c ON c.load = known.load
CROSS JOIN LATERAL (
  SELECT count(*)::int AS unresolved FROM (
    SELECT FROM dl_etl_failures f WHERE f.load = known.load AND f.solved_at IS NULL LIMIT {MAX_COUNTED}
  ) AS failures
) AS counted
LEFT JOIN LATERAL (
  SELECT t.run_id, {as_job("t")} FROM dl_etl_tasks t JOIN dl_jobs j ON j.job_id = t.run_id
  WHERE t.task = known.load AND t.started_at IS NOT NULL ORDER BY t.started_at DESC LIMIT 1
) AS last ON true
ORDER BY known.load
"""


class RunNotFound(NotFound):
    """Error: no run has this ID, which is its job's. The job is no load or flow, has not begun, or was deleted."""


class LoadNotFound(NotFound):
    """Error: no load of this name has run in this database, and none waits in a flow."""


@attrs.frozen(kw_only=True)
class RunRecord:
    """Run of a load or a flow, with its status, and the reason if something failed."""

    run_id: Annotated[UUID, about("The run's id, which is its job's.")]
    name: Annotated[str, about("The load or the flow that ran.")]
    kind: Annotated[str, about("`load` or `flow`.")]
    status: Annotated[str, about("Its status; if the run could not record one, its job's status.")]
    started_at: Annotated[Instant, about("When it began.")]
    finished_at: Annotated[Instant | None, about("When it ended.")]
    reason: Annotated[str | None, about("The reason for its status: its failures and their number.")]
    counts: Annotated[dict[str, Any], about("Its counts: requests, rows and more, by name.")]


@attrs.frozen
class RunPage:
    """A page of runs, newest first."""

    runs: Annotated[list[RunRecord], about("The runs.")]
    next: Next


@attrs.frozen(kw_only=True)
class RunTask:
    """Task of a run, and its results once it has ended.

    `phases` are a load's, with began_at, ended_at and busy_s (seconds, over all workers); `tables` are those of a set
    of dimensions, with status, began_at, ended_at and counts.
    """

    ordinal: Annotated[int, about("Its place in the order of registration, from 1.")]
    layer: Annotated[str, about("The layer of the warehouse that it fills.")]
    task: Annotated[str, about("The load's name.")]
    status: Annotated[str, about("Its status; `waiting` before it begins.")]
    started_at: Annotated[Instant | None, about("When it began.")]
    finished_at: Annotated[Instant | None, about("When it ended.")]
    phases: Annotated[
        dict[str, Any], about("A load's phases, with began_at, ended_at and busy_s (seconds, over all workers).")
    ]
    tables: Annotated[
        dict[str, Any], about("The tables of a set of dimensions, with status, began_at, ended_at and counts.")
    ]
    reason: Annotated[str | None, about("The reason for its status: its failures and their number.")]
    counts: Annotated[dict[str, Any], about("Its counts: requests, rows and more, by name.")]


@attrs.frozen
class Timeline:
    """Run and a page of its tasks, in the order of their registration."""

    run: RunRecord
    tasks: list[RunTask]
    next: Next


@attrs.frozen(kw_only=True)
class LastRun:
    """Last run of a load, by itself or in a flow."""

    run_id: Annotated[UUID, about("The run's id, which is its job's.")]
    status: Annotated[str, about("Its status.")]
    started_at: Annotated[Instant, about("When it began.")]
    finished_at: Annotated[Instant | None, about("When it ended.")]
    reason: Annotated[str | None, about("The reason for its status: its failures and their number.")]
    counts: Annotated[dict[str, Any], about("Its counts: requests, rows and more, by name.")]


@attrs.frozen(kw_only=True)
class LoadRecord:
    """Progress of a load: all data before `watermark` is in its table. `unresolved` failures, at most `MAX_COUNTED`.

    `upto` and `unsolved` are the former names of the two, for HTTP clients.
    """

    load: Annotated[str, about("The load's name.")]
    watermark: Annotated[
        Instant | None, about("The instant before which all data is loaded; null for a load without one.")
    ]
    upto: Annotated[Instant | None, about("The former name of `watermark`.")]
    moved_at: Annotated[Instant | None, about("When the watermark moved last.")]
    unresolved: Annotated[int, about("The number of unresolved failures, counted up to 1,000.")]
    unsolved: Annotated[int, about("The former name of `unresolved`.")]
    last_run: Annotated[LastRun | None, about("Its last run, by itself or in a flow.")]


@attrs.frozen
class LoadPage:
    """A page of loads, by name."""

    loads: Annotated[list[LoadRecord], about("The loads.")]
    next: Next


@attrs.frozen(kw_only=True)
class FailureLine:
    """Failed item, its phase and its error, without the requests that load it again."""

    failure_id: Annotated[int, about("The failure's number; later ones have larger ones.")]
    run_id: Annotated[UUID, about("The run in which it failed.")]
    load: Annotated[str, about("The load that failed.")]
    segment: Annotated[str, about("The part of the load in which it failed.")]
    phase: Annotated[str, about("What failed: requests, processing, writing, or a record.")]
    key: Annotated[str, about("What identifies the failed item within its segment.")]
    error: Annotated[str, about("Why it failed.")]
    sample: Annotated[str | None, about("The beginning of the data.")]
    failed_at: Annotated[Instant, about("When it failed.")]
    resolved_at: Annotated[
        Instant | None, about("When it was tried again with success, or its segment was loaded again.")
    ]
    solved_at: Annotated[Instant | None, about("The former name of `resolved_at`.")]

    def masked(self) -> Self:
        """Return the failure without the secrets in data that sources have sent."""
        return attrs.evolve(
            self,
            segment=mask_text(self.segment),
            key=mask_text(self.key),
            error=mask_text(self.error),
            sample=None if self.sample is None else mask_text(self.sample),
        )


@attrs.frozen
class FailurePage:
    """A page of failures, oldest first."""

    failures: Annotated[list[FailureLine], about("The failures.")]
    next: Next


async def page_of_runs(database: Database, *, name: str | None = None, limit: int = 50, after: After = None) -> RunPage:
    """Return a page of at most `limit` (1 to 1,000) runs, of all or of one name, newest first, after `after`.

    Raises `BadRequest` for a `limit` or a `name` that is not allowed.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    key, terms = "r.started_at, r.run_id", "true"
    values: list[object] = []
    if name is not None:
        check_text("name", name, MAX_NAME)
        # With the name in the key, no plan scans the runs of all names to find those of one.
        key, terms, values = f"r.name, {key}", "r.name = $1", [name]
    if after is not None:
        values += BY_INSTANT.key(after)
        terms += f" AND ({key}) < ({', '.join(f'${number}' for number in range(1, len(values) + 1))})"
    newest = ", ".join(f"{column} DESC" for column in key.split(", "))
    sql = f"{_RUNS} WHERE {terms} ORDER BY {newest} LIMIT ${len(values) + 1}"
    runs = [RunRecord(**row) for row in await database.run(aio_fetch, sql, *values, limit + 1)]
    return RunPage(*BY_INSTANT.page(runs, limit, lambda run: (run.started_at, run.run_id)))


async def get_timeline(database: Database, run_id: UUID, *, limit: int = MAX_PAGE, after: After = None) -> Timeline:
    """Return a run with at most `limit` (1 to 1,000) of its tasks, after `after`.

    Raises `RunNotFound`, and `BadRequest` for a `limit` that is not allowed.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    behind = -1 if after is None else BY_NUMBER.key(after)
    run, tasks = await database.run(_aio_timeline, run_id, behind, limit + 1)
    return Timeline(run, *BY_NUMBER.page(tasks, limit, lambda task: task.ordinal))


async def _aio_timeline(connection: Any, run_id: UUID, behind: int, limit: int) -> tuple[RunRecord, list[RunTask]]:
    run = await _aio_get_run(connection, run_id)
    return run, [RunTask(**row) for row in await connection.fetch(_TASKS, run_id, behind, limit)]


async def _aio_get_run(connection: Any, run_id: UUID) -> RunRecord:
    row = await connection.fetchrow(f"{_RUNS} WHERE r.run_id = $1", run_id)
    if row is None:
        raise RunNotFound(f"no run has the id {run_id}: its job is no load or flow, has not begun, or was deleted")
    return RunRecord(**row)


async def get_load(database: Database, load: str) -> LoadRecord:
    """Return the progress of a load. Raises `LoadNotFound`, and `BadRequest` for a text that is no name."""
    check_text("load", load, MAX_NAME)
    return await database.run(_aio_load, load)


async def _aio_load(connection: Any, load: str) -> LoadRecord:
    row = await connection.fetchrow(f"WITH {_THIS} {_LOADS}", load)
    if row is None:
        if await connection.fetchval("SELECT EXISTS (SELECT FROM dl_etl_runs WHERE name = $1 AND kind = 'flow')", load):
            todo = f"`dataloader jobs --task {load!r:.80}` lists its runs"
            raise LoadNotFound(f"{load!r:.80} is a flow, and no load of this name has run in this database; {todo}")
        raise LoadNotFound(f"no load {load!r:.80} has run in this database")
    return _load_of(row)


async def page_of_loads(database: Database, *, limit: int = 50, after: After = None) -> LoadPage:
    """Return a page of at most `limit` (1 to 200) loads that this database knows, by name, after `after`.

    Raises `BadRequest` for a `limit` that is not allowed.
    """
    check_between("limit", limit, 1, MAX_LOADS)
    behind = "" if after is None else BY_NAME.key(after)
    rows = await database.run(aio_fetch, f"WITH {_NAMES} {_LOADS} LIMIT $2", behind, limit + 1)
    return LoadPage(*BY_NAME.page(list(map(_load_of, rows)), limit, lambda load: load.load))


def _load_of(row: Mapping[str, Any]) -> LoadRecord:
    fields = dict(row)
    last = {name: fields.pop(name) for name in ("run_id", "status", "started_at", "finished_at", "reason", "counts")}
    return LoadRecord(**fields, last_run=None if last["run_id"] is None else LastRun(**last))


async def page_of_run_failures(
    database: Database, run_id: UUID, *, after: After = None, limit: int = 100
) -> FailurePage:
    """Return the failures of a run, oldest first, after `after`: at most `limit` (1 to 1,000).

    Raises `RunNotFound`, and `BadRequest` for a `limit` that is not allowed.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    behind = 0 if after is None else BY_NUMBER.key(after)
    found = await run_journal.list_failures(database, run_id=run_id, after=behind, limit=limit + 1)
    if not found:
        await database.run(_aio_get_run, run_id)
    return _failures(found, limit)


async def page_of_load_failures(database: Database, load: str, *, after: After = None, limit: int = 100) -> FailurePage:
    """Return the unresolved failures of all runs of a load, as `page_of_run_failures` does.

    Raises `LoadNotFound`, and `BadRequest` for a `limit` or a name that is not allowed.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    check_text("load", load, MAX_NAME)
    behind = 0 if after is None else BY_NUMBER.key(after)
    found = await run_journal.list_failures(database, load=load, after=behind, limit=limit + 1)
    if not found:
        await database.run(_aio_load, load)
    return _failures(found, limit)


def _failures(found: Sequence[FailureRecord], limit: int) -> FailurePage:
    names = [field.name for field in attrs.fields(FailureLine) if field.name != "solved_at"]
    failures = [
        FailureLine(**{name: getattr(record, name) for name in names}, solved_at=record.resolved_at) for record in found
    ]
    return FailurePage(*BY_NUMBER.page(failures, limit, lambda failure: failure.failure_id))


async def aio_read(connection: Any, sql: str, values: Sequence[object]) -> list[dict[str, Any]]:
    """Return the rows of a user's statement, in a read-only transaction (asyncio-flavored)."""
    try:
        async with connection.transaction(readonly=True):
            await connection.execute(set_local(PLANNER_OF_USERS))
            with told_of_users(connection):
                return [dict(row) for row in await connection.fetch(sql, *values)]
    except READ_ONLY as error:
        # The transaction is read-only, not the server, so this is no outage.
        raise StoreError(f"a Reader can only read: {error}") from error
