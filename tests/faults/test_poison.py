"""A running service whose tables have unexpected rows: everything else continues.

Each table gets a copy of its rows for each column and each hostile value of the column's type. Then each loop of the
service must finish twice without an error, and jobs, schedules, processes, pages and lists must continue as before.
"""

from __future__ import annotations

import itertools
import traceback
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import httpx2
import poison
import psycopg
import pytest
import trio
from conditions import patience_s, until, when_ended
from logged import capture_logs

from dataloader import Settings, Sink, Supplier, Tasks, Worker, open_supervisor
from dataloader.actors import notifier, outbox_poster, pruner
from dataloader.actors.outage import Outage
from dataloader.flows.processes import Done, Process, Processes, add_processes
from dataloader.jobs.notices import CommandTarget
from dataloader.jobs.schedules import Schedule
from dataloader.store.queue.notifications import CHANNELS
from dataloader.supervisor import helper_parts
from dataloader.web.app import ROUTES
from dataloader.web.pages.site import PAGES

pytestmark = pytest.mark.requirement("Q9")

LOOPS = {
    "poll",
    "stager",
    "scheduler",
    "notifier",
    "bulk operations",
    "outbox",
    "reaper",
    "retry delays",
    "heartbeat",
    "period ends",
}
"""Loops that read stored rows, by the names in their reports."""
TABLES = {
    "loads": (
        "dl_etl_details", "dl_etl_failures", "dl_etl_former", "dl_etl_logs", "dl_etl_observed", "dl_etl_runs",
        "dl_etl_segments", "dl_etl_tasks", "dl_load_history", "dl_load_holders", "dl_load_snapshots", "dl_load_state",
    ),
    "processes": (
        "dl_process_events", "dl_process_holdups", "dl_process_outbox", "dl_process_partitions", "dl_process_sinks",
        "dl_process_types", "dl_processes",
    ),
    "calls of processes": ("dl_process_tasks",),
    "records": (
        "dl_audit", "dl_bulk", "dl_bulk_jobs", "dl_ended_sessions", "dl_errors", "dl_job_events", "dl_notice_groups",
        "dl_notices", "dl_run_stats", "dl_run_stats_days", "dl_run_stats_new", "dl_schedule_events", "dl_source_calls",
    ),
    "jobs": ("dl_jobs",),
    "dependencies": ("dl_job_after",),
    "lanes": ("dl_lanes",),
    "queues and workers": ("dl_queues", "dl_workers"),
    "schedules": ("dl_schedules",),
    "suppliers": ("dl_sources",),
    "tasks": ("dl_tasks",),
}  # fmt: skip
"""Tables of one service each. The tables that most loops read have a separate service."""
OF_ONE_ROW = {"dl_depths": set(), "dl_notice_watch": {"notifier"}}
"""Tables that can have only one row, and the loops that read them. Requests read the depths."""
OF_MIGRATIONS = {"dl_function_sets", "dl_history", "dl_migrations"}
"""Tables about the schema and the database itself."""


LOADS = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, finished_at)
  SELECT gen_random_uuid(), 'q', 'beat', 'k', 'succeeded', now() FROM generate_series(1, 200);
INSERT INTO dl_etl_runs (run_id, name, kind, summary)
  SELECT job_id, 'rates', 'load', '{"rows": 1}' FROM dl_jobs WHERE lock_key = 'k' AND finished_at IS NOT NULL LIMIT 1;
INSERT INTO dl_etl_tasks (run_id, ordinal, task, status, summary)
  SELECT run_id, 1, 'rates', 'running', '{}' FROM dl_etl_runs;
INSERT INTO dl_etl_segments (run_id, task, segment, counts)
  SELECT run_id, 'rates', '2026', '{"rows": 1}' FROM dl_etl_runs;
INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error)
  SELECT run_id, 'rates', '2026', 'fetch', 'k', 'HTTP 500' FROM dl_etl_runs;
INSERT INTO dl_etl_details (run_id, task, segment, token, details, counts)
  SELECT run_id, 'rates', '2026', 1, '{a}', '{}' FROM dl_etl_runs;
INSERT INTO dl_etl_logs (run_id, task, token, first_event, last_event, lines, warnings, errors)
  SELECT run_id, 'rates', 1, 1, 2, 1, 0, 0 FROM dl_etl_runs;
INSERT INTO dl_load_history VALUES ('t', now(), '{a}');
INSERT INTO dl_load_snapshots VALUES ('t', 'rates', '2026', now());
INSERT INTO dl_etl_former VALUES ('t', '{"a": "1"}', '{"b": "2"}');
INSERT INTO dl_etl_observed VALUES ('t', now(), '{1}');
"""


@attrs.define
class Loops:
    """Number of times that each loop has worked, and the last error of each since then."""

    worked: dict[str, int] = attrs.field(factory=dict)
    errors: dict[str, str] = attrs.field(factory=dict)


@pytest.fixture
def loops(monkeypatch):
    """Record the reports of the loops; loops with long pauses make none."""
    seen = Loops()
    worked, failed = Outage.worked, Outage.failed

    def note_worked(self, part):
        seen.worked[part] = seen.worked.get(part, 0) + 1
        seen.errors.pop(part, None)
        worked(self, part)

    def note_failed(self, part, error, **fields):
        seen.errors[part] = str(error)
        failed(self, part, error, **fields)

    monkeypatch.setattr(Outage, "worked", note_worked)
    monkeypatch.setattr(Outage, "failed", note_failed)
    monkeypatch.setattr(pruner, "EVERY_S", 0.3)
    monkeypatch.setattr(pruner, "FOLD_EVERY_S", 0.3)
    monkeypatch.setattr(notifier, "POLL_S", 0.2)
    monkeypatch.setattr(notifier, "MIN_PAUSE_S", 0.1)
    monkeypatch.setattr(outbox_poster, "POLL_S", 0.2)
    monkeypatch.setattr(helper_parts, "Notifier", partial(notifier.Notifier, gather_s=0.1, again_s=0.1))
    return seen


def program():
    """Return tasks, a schedule, a process, and a sink: a program with one of each kind."""
    tasks, processes = Tasks(), Processes()
    kind = processes.define("counter", state=int)

    @kind.init
    async def begin(_p: Process[int]) -> Done:
        return Done(state=0)

    @kind.call
    async def add(p: Process[int], by: int) -> Done:
        return Done(p.state + by, state=p.state + by, events=[by])

    @processes.sink("books")
    async def books(delivery): ...

    add_processes(tasks, processes)

    @tasks.task("beat", queue="q")
    async def beat(job):
        return "alive"

    @tasks.task("narrow", queue="q", max_running=2, supplier=Supplier("hr"))
    async def narrow(job): ...

    @tasks.task("newest", queue="q", unique=True)
    async def newest(job): ...

    @tasks.task("fails", queue="q", max_attempts=1)
    async def fails(job):
        raise ValueError("as it should")

    tasks.schedule("beat", task="beat", every_s=1, overlap="allow", args={"n": 1}, job={"priority": 0})
    return tasks


async def fill(supervisor, raw):
    """Write rows to as many tables as a service does by itself."""
    jobs = supervisor.jobs
    for task in ("beat", "narrow", "newest", "fails"):
        job = await jobs.enqueue(task, {"n": 1})
        await when_ended(supervisor, job.job_id)
    first = await jobs.enqueue("beat", {}, idempotency_key="once", lock_key="k")
    await jobs.enqueue("beat", after=[first.job_id])
    await jobs.enqueue("unknown to all", queue="q")
    await jobs.enqueue("beat", queue="elsewhere", partition_key="p", lock_key="x")
    await supervisor.schedules.put(
        Schedule(name="later", task="beat", every_s=3_600, args={"a": 1}, job={"queue": "q"})
    )
    await supervisor.processes.start("counter", "one")
    await supervisor.processes.call("counter", "one", "add", 1)
    await raw.execute(LOADS)
    await supervisor.limits.set_tasks({"narrow": {"max_running": 3}})


@asynccontextmanager
async def running(database):
    """Run a service with all of this, and a client of it."""
    settings = Settings(
        db_dsn=database.dsn, port=0, workers=(Worker("q", 8), Worker("process.counter", 4)), poll_s=0.2,
        reaper_period_s=0.3, claim_backoff_s=0.3, heartbeat_s=0.3, drain_timeout_s=5, sinks=(Sink(name="books"),),
        notify=(CommandTarget(name="nobody", argv=("/bin/true",)),), retain_succeeded_days=1, retain_failed_days=1,
        retain_canceled_days=1, retain_lost_days=1, retain_stats_days=1, retain_errors_days=1,
        retain_schedule_events_days=1, retain_audit_days=1, retain_process_tasks_days=1,
    )  # fmt: skip
    async with (
        open_supervisor(settings, program(), with_web=True) as supervisor,
        httpx2.AsyncClient(base_url=supervisor.url, timeout=30, verify=False) as client,
    ):
        yield supervisor, client


ADDRESSES = sorted({route.path for route in (*ROUTES, *PAGES) if route.method == "GET" and "<" not in route.path})
"""All paths that can be read without an ID; those that need a query answer 4xx."""


async def all_loops(loops, raw, names=LOOPS):
    """Wait until each of these loops has worked twice, with all notifications sent meanwhile."""
    before = dict(loops.worked)

    async def left():
        for channel in sorted(CHANNELS):
            await raw.execute("SELECT pg_notify($1, '')", channel)
        behind = {loop for loop in names if loops.worked.get(loop, 0) < before.get(loop, 0) + 2}
        return {loop: loops.errors.get(loop) for loop in behind | (loops.errors.keys() & LOOPS)}

    await until(left, lambda left: not left)


async def everything_goes_on(supervisor, client, loops, raw, lines):
    """Check that loops work, a job runs, a schedule ticks, a process answers, and all paths can be read."""
    await all_loops(loops, raw)
    job = await supervisor.jobs.enqueue("beat", priority=0)
    assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
    job = await supervisor.jobs.enqueue("narrow", priority=0)
    assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
    planned = "SELECT count(*) FROM dl_schedules WHERE name = 'beat' AND last_at > now() - interval '3 s'"
    await until(lambda: raw.fetchval(planned), within_s=20)
    with trio.fail_after(patience_s()):
        assert await supervisor.processes.call("counter", "one", "add", 1) > 1
    assert (await client.get("/health")).status_code == 200
    wrong = []
    for address in ADDRESSES:
        status = (await client.get(address)).status_code
        if status >= 500:
            wrong.append((address, status, [_where(line["exc_info"]) for line in lines if line.get("exc_info")][-1:]))
    assert not wrong, "\n".join(map(str, wrong))


def _where(error):
    """Return an error with the last places of its traceback."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames if "/site-packages/" not in frame.filename
    ]
    return f"{error!r:.200}", ours[-4:]


def bad_lines(lines):
    """Return the log lines about failed parts. A blocked event loop is left out: a busy machine causes it, too."""
    return [
        line
        for line in lines
        if (line["log_level"] in {"error", "critical"} or "were not deleted" in line["event"])
        and line["event"] != "the event loop is blocked"
    ]


def test_every_table_is_poisoned(database):
    with psycopg.connect(database.dsn) as connection:
        named = sorted([*itertools.chain(*TABLES.values()), *OF_ONE_ROW, *OF_MIGRATIONS])
        assert named == sorted(poison.tables(connection))


@pytest.mark.long
@pytest.mark.full
@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
async def test_unexpected_rows_stop_nothing_else(database, raw, loops, tables):
    with capture_logs() as lines:
        async with running(database) as (supervisor, client):
            await fill(supervisor, raw)
            await all_loops(loops, raw)
            for table in tables:
                with psycopg.connect(database.dsn, autocommit=True) as connection:
                    poisoned = await trio.to_thread.run_sync(poison.poison, connection, table)
                print(f"{table}: {len(poisoned.stored):,} rows stored, {poisoned.refused:,} refused")  # noqa: T201
                assert poisoned.stored
            await everything_goes_on(supervisor, client, loops, raw, lines)
            assert bad_lines(lines) == []
            assert supervisor.failure is None


@pytest.mark.full
@pytest.mark.parametrize("table", OF_ONE_ROW)
async def test_one_row_with_unexpected_values_stops_nothing(database, raw, loops, table):
    with capture_logs() as lines:
        async with running(database) as (supervisor, client):
            await fill(supervisor, raw)
            with psycopg.connect(database.dsn, autocommit=True) as connection:
                for written in poison.rewrites(connection, table):
                    await all_loops(loops, raw, OF_ONE_ROW[table])
                    statuses = {path: (await client.get(path)).status_code for path in ("/ui", "/ui/queues", "/status")}
                    assert (written, statuses) == (written, dict.fromkeys(statuses, 200)), bad_lines(lines)[-1:]
            await everything_goes_on(supervisor, client, loops, raw, lines)
            assert bad_lines(lines) == []
