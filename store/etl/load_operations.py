"""Implementations of the operations on loads over the database. Nothing here writes.

Every list is a page by key, and the cost of a page does not grow with the history.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.load_listings import (
    MAX_COUNTED,
    MAX_LOADS,
    FailureLine,
    FailurePage,
    LastRun,
    LoadNotFound,
    LoadPage,
    LoadRecord,
    RunNotFound,
    RunPage,
    RunRecord,
    RunTask,
    RunTimeline,
)
from dataloader.jobs.model import MAX_NAME, check_between, check_text
from dataloader.jobs.operations.loads import (
    ListFailuresOfLoad,
    ListFailuresOfRun,
    ListLoads,
    ListRuns,
    ShowLoad,
    ShowTimeline,
)
from dataloader.jobs.page_cursor import BY_INSTANT, BY_NAME, BY_NUMBER
from dataloader.store.connection.fetching import aio_fetch
from dataloader.store.etl.run_status import as_job
from dataloader.store.implementations import Store, implements

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
                               OR EXISTS (SELECT FROM dl_load_state WHERE load = $1))
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
  (SELECT load FROM dl_load_state WHERE load > $1 ORDER BY load LIMIT $2)
)
"""
_LOADS: Final = f"""
SELECT known.load, s.upto AS watermark, s.upto, s.moved_at, counted.unresolved, counted.unresolved AS unsolved, last.*
FROM known
LEFT JOIN LATERAL (
  SELECT (state ->> 'upto')::timestamptz AS upto, moved_at FROM dl_load_state WHERE load = known.load
) AS s ON true
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
# The run that has resolved a failure is the one that ran at that time, since one run of a load runs at a time. Its own
# failure of the same item, or of the whole request, replaces the resolved one.
_FAILURES: Final = """
WITH page AS MATERIALIZED (
  SELECT * FROM dl_etl_failures WHERE failure_id > $3 AND {wanted} ORDER BY failure_id LIMIT $2
), resolved AS MATERIALIZED (
  SELECT p.failure_id, p.load, p.segment, p.phase, p.key, p.requests, (
    SELECT t.run_id FROM dl_etl_tasks t WHERE t.task = p.load AND t.started_at <= p.solved_at
    ORDER BY t.started_at DESC LIMIT 1) AS run_id
  FROM page p WHERE p.solved_at IS NOT NULL
), again AS (
  SELECT r.failure_id, n.failure_id AS by
  FROM resolved r JOIN dl_etl_failures n ON n.run_id = r.run_id AND n.segment = r.segment AND n.key = r.key
  WHERE n.load = r.load AND n.failure_id > r.failure_id
  UNION ALL
  SELECT r.failure_id, n.failure_id
  FROM resolved r JOIN dl_etl_failures n ON n.run_id = r.run_id AND n.segment = r.segment
    AND (n.requests -> 0) - 'tried_by' = (r.requests -> 0) - 'tried_by'
  WHERE n.load = r.load AND n.failure_id > r.failure_id AND n.phase IN ('request', 'detail')
    AND r.phase <> 'batch' -- these may have megabytes of requests
), replaced AS (
  SELECT failure_id, min(by) AS by FROM again GROUP BY failure_id
)
SELECT p.failure_id, p.run_id, p.load, p.segment, p.phase, p.key, p.error, p.sample, p.failed_at,
  p.solved_at AS resolved_at, p.solved_at, replaced.by AS replaced_by
FROM page p LEFT JOIN replaced USING (failure_id) ORDER BY failure_id
"""


@implements(ListRuns)
async def _list_runs(store: Store, request: ListRuns) -> RunPage:
    limit = request.limit
    check_between("limit", limit, 1, MAX_PAGE)
    key, terms = "r.started_at, r.run_id", "true"
    values: list[object] = []
    if request.name is not None:
        check_text("name", request.name, MAX_NAME)
        # With the name in the key, no plan scans the runs of all names to find those of one.
        key, terms, values = f"r.name, {key}", "r.name = $1", [request.name]
    if request.after is not None:
        values += BY_INSTANT.key(request.after)
        terms += f" AND ({key}) < ({', '.join(f'${number}' for number in range(1, len(values) + 1))})"
    newest = ", ".join(f"{column} DESC" for column in key.split(", "))
    sql = f"{_RUNS} WHERE {terms} ORDER BY {newest} LIMIT ${len(values) + 1}"
    runs = [RunRecord(**row) for row in await store.database.run(aio_fetch, sql, *values, limit + 1)]
    return RunPage(*BY_INSTANT.page(runs, limit, lambda run: (run.started_at, run.run_id)))


@implements(ShowTimeline)
async def _show_timeline(store: Store, request: ShowTimeline) -> RunTimeline:
    check_between("limit", request.limit, 1, MAX_PAGE)
    behind = -1 if request.after is None else BY_NUMBER.key(request.after)
    run, rows = await store.database.run(_aio_timeline, request.run_id, behind, request.limit + 1)
    tasks, following = BY_NUMBER.page([RunTask(**row) for row in rows], request.limit, lambda task: task.ordinal)
    return RunTimeline(**run, tasks=tasks, next=following)


async def _aio_timeline(
    connection: Any, run_id: UUID, behind: int, limit: int
) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    return await _aio_get_run(connection, run_id), list(await connection.fetch(_TASKS, run_id, behind, limit))


async def _aio_get_run(connection: Any, run_id: UUID) -> Mapping[str, Any]:
    row: Mapping[str, Any] | None = await connection.fetchrow(f"{_RUNS} WHERE r.run_id = $1", run_id)
    if row is None:
        raise RunNotFound(f"no run has the ID {run_id}: its job is not a load or flow, has not started, or was deleted")
    return row


@implements(ShowLoad)
async def _show_load(store: Store, request: ShowLoad) -> LoadRecord:
    return await store.database.run(_aio_load, request.load)


async def _aio_load(connection: Any, load: str) -> LoadRecord:
    row = await connection.fetchrow(f"WITH {_THIS} {_LOADS}", load)
    if row is None:
        if await connection.fetchval("SELECT EXISTS (SELECT FROM dl_etl_runs WHERE name = $1 AND kind = 'flow')", load):
            todo = f"`dataloader jobs --task {load!r:.80}` lists its runs"
            raise LoadNotFound(f"{load!r:.80} is a flow, not a load; {todo}")
        raise LoadNotFound(f"no load {load!r:.80} has run in this database")
    return _load_of(row)


@implements(ListLoads)
async def _list_loads(store: Store, request: ListLoads) -> LoadPage:
    check_between("limit", request.limit, 1, MAX_LOADS)
    behind = "" if request.after is None else BY_NAME.key(request.after)
    rows = await store.database.run(aio_fetch, f"WITH {_NAMES} {_LOADS} LIMIT $2", behind, request.limit + 1)
    return LoadPage(*BY_NAME.page(list(map(_load_of, rows)), request.limit, lambda load: load.load))


def _load_of(row: Mapping[str, Any]) -> LoadRecord:
    fields = dict(row)
    last = {name: fields.pop(name) for name in ("run_id", "status", "started_at", "finished_at", "reason", "counts")}
    return LoadRecord(**fields, last_run=None if last["run_id"] is None else LastRun(**last))


@implements(ListFailuresOfRun)
async def _list_failures_of_run(store: Store, request: ListFailuresOfRun) -> FailurePage:
    page = await _failures(store, request, "run_id = $1", request.run_id)
    if not page.failures:
        await store.database.run(_aio_get_run, request.run_id)
    return page


@implements(ListFailuresOfLoad)
async def _list_failures_of_load(store: Store, request: ListFailuresOfLoad) -> FailurePage:
    page = await _failures(store, request, "load = $1 AND solved_at IS NULL", request.load)
    if not page.failures:
        await store.database.run(_aio_load, request.load)
    return page


async def _failures(
    store: Store, request: ListFailuresOfRun | ListFailuresOfLoad, wanted: str, value: object
) -> FailurePage:
    check_between("limit", request.limit, 1, MAX_PAGE)
    behind = 0 if request.after is None else BY_NUMBER.key(request.after)
    sql = _FAILURES.format(wanted=wanted)
    rows = await store.database.run(aio_fetch, sql, value, request.limit + 1, behind)
    failures = [FailureLine(**row) for row in rows]
    return FailurePage(*BY_NUMBER.page(failures, request.limit, lambda failure: failure.failure_id))
