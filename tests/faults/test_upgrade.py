"""The release before this one and this one on one database, as in a rolling upgrade, and the way back (F42).

Each migration has to pass this. Processes of both releases are observed from outside: by the job rows, by the ledger of
the handlers, by what the processes log.
"""

from __future__ import annotations

import itertools
import signal
from contextlib import asynccontextmanager
from uuid import uuid4

import attrs
import httpx2
import previous_release
import pytest
import trio
from conditions import until, when_ended
from databases import raw_connection
from logged import capture_logs
from roles import a_role, grant_to_service
from services import PATIENT

from dataloader import Settings, Tasks, Worker, open_supervisor
from dataloader.store.migrations import LATEST, function_set

pytestmark = pytest.mark.requirement("Q7", "Q14", "Q15")

SCHEMA = """
SELECT jsonb_object_agg(name, definition) FROM (
  SELECT oid::regprocedure::text AS name, pg_get_functiondef(oid) AS definition FROM pg_proc
  WHERE pronamespace = current_schema()::regnamespace AND prokind = 'f'
  UNION ALL
  SELECT 'trigger ' || tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid = 'dl_jobs'::regclass
  UNION ALL
  SELECT 'trigger made from ' || tgname, obj_description(oid, 'pg_trigger') FROM pg_trigger
  WHERE tgrelid = 'dl_jobs'::regclass
  UNION ALL
  SELECT 'migrations', string_agg(m::text, ', ' ORDER BY m.number) FROM dl_migrations m
) AS parts
"""
GRANTED_BEFORE = """
GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO jobs_service;
GRANT USAGE ON ALL SEQUENCES IN SCHEMA public TO jobs_service;
"""
"""What the page of the release before gave a service that owns no table: everybody might execute the functions."""
OF_THE_NEXT_RELEASE = f"""
ALTER TABLE dl_jobs ADD COLUMN of_the_next_release int NOT NULL DEFAULT 0;
INSERT INTO dl_migrations (number, name, oldest) VALUES ({LATEST + 1}, 'of the next release', {LATEST});
COMMENT ON TRIGGER dl_jobs_changed ON dl_jobs IS 'another definition';
CREATE FUNCTION dl_of_the_next_release() RETURNS int LANGUAGE sql AS 'SELECT 1';
INSERT INTO dl_function_sets (number, hash, oldest) VALUES ({function_set.NUMBER + 1}, '', {function_set.NUMBER});
"""
RUNS = """
SELECT j.job_id, j.status::text, j.attempt, j.crashes, j.error,
       (SELECT count(*) FROM dl_job_events e WHERE e.job_id = j.job_id AND e.kind = 'picked') AS picked,
       (SELECT count(*) FROM ledger l WHERE l.job_id = j.job_id) AS visits
FROM dl_jobs j WHERE j.queue = 'q'
"""
PICKED_SINCE = """
SELECT count(*) FROM dl_job_events
WHERE kind = 'picked' AND event_id > $1 AND payload ->> 'worker' LIKE '%:' || $2::int || ':%'
"""


@pytest.fixture(scope="module")
def release_before(tmp_path_factory):
    """The release before this one, ready to be run."""
    return previous_release.previous_release(tmp_path_factory.mktemp("release"))


@pytest.fixture
def database(empty_database):
    """A database that the first process makes its tables in: `raw`, `ledger` and `serve` use it."""
    return empty_database


@pytest.fixture
def serve_before(serve, release_before):
    """As `serve`, the release before."""

    async def serve_before(**options):
        return await serve({"q": 4}, python=release_before.python, environment=release_before.environment, **options)

    return serve_before


@attrs.define
class Load:
    """Jobs of four keys, one after the other: by HTTP from the first of `fronts` that takes them, and by plain SQL.

    Each is asked for again, with its idempotency key, until somebody took it: `jobs` are the ids as they were answered.
    """

    raw: object
    client: httpx2.AsyncClient
    fronts: list[object]
    jobs: dict[str, str] = attrs.field(factory=dict)
    over: bool = False

    async def run(self):
        for number in itertools.count():
            if self.over:
                return
            await (self._insert if number % 3 == 0 else self._trigger)(number)
            await trio.sleep(0.03)

    async def _trigger(self, number):
        key = f"job {number}"
        body = {
            "queue": "q",
            "task": "ledger" if number % 2 else "visit",
            "lock_key": f"k{number % 4}",
            "args": {"s": 0.05},
            "idempotency_key": key,
        }
        for front in itertools.cycle([*self.fronts]):
            try:
                answer = await self.client.post(f"{front.url}/api/v1/jobs/trigger", json=body)
            except httpx2.TransportError:  # it has just ended
                continue
            if answer.status_code in {200, 201}:
                self.jobs[key] = answer.json()["job_id"]
                return
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/draining"), answer.text
            await trio.sleep(0.02)

    async def _insert(self, number):
        """As another service does it, by the document."""
        job_id = uuid4()
        await self.raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, idempotency_key)"
            " VALUES ($1, 'q', 'visit', '{\"s\": 0.05}', $2, $3)",
            job_id,
            f"k{number % 4}",
            f"job {number}",
        )
        self.jobs[f"job {number}"] = str(job_id)

    async def more(self, number):
        """Return when so many more jobs were taken."""
        wanted = len(self.jobs) + number

        async def taken():
            return len(self.jobs)

        await until(taken, lambda count: count >= wanted)


@pytest.fixture
def load(database):
    """A load on services for the length of a block, which ends when every job was taken."""

    @asynccontextmanager
    async def load(*fronts):
        async with (
            raw_connection(database.dsn) as raw,
            httpx2.AsyncClient(timeout=20, verify=False) as client,
            trio.open_nursery() as nursery,
        ):
            load = Load(raw, client, [*fronts])
            nursery.start_soon(load.run)
            yield load
            load.over = True

    return load


@pytest.fixture
def nothing_lost_or_doubled(raw, ledger):
    """Each job that was taken has succeeded, in one run, with no other of its key beside it; no other job is there."""

    async def nothing_lost_or_doubled(load):
        rows = await until(
            lambda: raw.fetch(RUNS), lambda rows: all(row["status"] == "succeeded" for row in rows), within_s=120
        )
        assert sorted(str(row["job_id"]) for row in rows) == sorted(load.jobs.values())
        assert [row for row in rows if (row["attempt"], row["crashes"], row["visits"]) != (1, 0, 1)] == []
        assert await ledger.overlaps() == []

    return nothing_lost_or_doubled


@pytest.fixture
def picks(raw):
    """Waits until a process has begun so many more jobs."""

    async def picks(service, number=8):
        since = await raw.fetchval("SELECT coalesce(max(event_id), 0) FROM dl_job_events")
        pid = service.process.pid
        await until(lambda: raw.fetchval(PICKED_SINCE, since, pid), lambda count: count >= number)

    return picks


def untroubled(service):
    """No line says that something went wrong, but that the loop was held up, which may be the machine's fault."""
    serious = [line for line in service.lines if line["level"] in {"error", "critical", "no JSON"}]
    assert [line for line in serious if line["event"] != "the event loop is blocked"] == []


async def drained(service):
    service.signal(signal.SIGTERM)
    assert await service.exit_code(within_s=60) == 0
    untroubled(service)


@pytest.mark.long
@pytest.mark.full
async def test_f42_a_rolling_upgrade_runs_beside_the_previous_release_without_loss(
    serve_before, serve, raw, ledger, load, picks, nothing_lost_or_doubled, database
):
    """Of each release one is the tables' owner, and one a role that owns nothing."""
    before = [await serve_before(**PATIENT)]
    with a_role(database, GRANTED_BEFORE) as role:
        before.append(await serve_before(dsn=role.dsn, **PATIENT))
        schema_before = await raw.fetchval(SCHEMA)
        async with load(*before) as asked:
            await asked.more(20)
            # The first of this release migrates under the others' load.
            first = await serve({"q": 4}, **PATIENT)
            assert await raw.fetchval("SELECT max(number) FROM dl_migrations") == LATEST
            assert await raw.fetchval("SELECT max(number) FROM dl_function_sets") == function_set.NUMBER
            assert await raw.fetchval(SCHEMA) != schema_before
            # Those of the release before go on: they claim, and their API does what it did.
            for service in before:
                await picks(service)
                await api_works(service)
            await picks(first)
            asked.fronts.insert(0, first)
            await drained(before[0])
            await trio.to_thread.run_sync(grant_to_service, database, role)
            second = await serve({"q": 4}, dsn=role.dsn, **PATIENT)
            asked.fronts[:] = [first, second]
            await picks(before[1])
            await drained(before[1])
            await picks(first)
            await picks(second)
            await api_works(second)
            await asked.more(20)
        await nothing_lost_or_doubled(asked)
        for service in (first, second):
            assert service.process.poll() is None
            untroubled(service)


async def api_works(service):
    """What an operator does over HTTP; on a queue that nobody serves, so that nobody is in its way."""
    async with httpx2.AsyncClient(base_url=service.url, timeout=20, verify=False) as client:
        for path in (
            "/ready",
            "/status",
            "/metrics",
            "/api/v1/jobs?status=succeeded",
            "/api/v1/queues",
            "/api/v1/audit",
        ):
            answer = await client.get(path)
            assert answer.status_code == 200, answer.text
        body = {"queue": "elsewhere", "task": "t", "lock_key": uuid4().hex}
        job_id = (await client.post("/api/v1/jobs/trigger", json=body)).json()["job_id"]
        for action, status in (
            ("cancel", "canceled"),
            ("retry", "queued"),
            ("run-now", "queued"),
            ("cancel", "canceled"),
        ):
            answer = await client.post(f"/api/v1/jobs/{job_id}/{action}")
            assert (answer.status_code, answer.json()["status"]) == (200, status), answer.text
        for action in ("pause", "resume"):
            assert (await client.post(f"/api/v1/queues/elsewhere/{action}")).status_code == 200


@pytest.mark.full
async def test_f42_the_previous_release_on_a_newer_database_works_or_refuses_to_start(
    serve_before, serve, raw, ledger, load, picks, nothing_lost_or_doubled
):
    new = await serve({"q": 4}, **PATIENT)
    schema = await raw.fetchval(SCHEMA)
    async with load(new) as asked:
        back = await serve_before(ready=None, **PATIENT)

        async def said():
            ended = back.process.poll() is not None
            return "refused" if ended else next((word for word in _events(back) if word == "serving"), None)

        outcome = await until(said)
        if outcome == "serving":
            await picks(back)
            await drained(back)
        else:
            assert await back.exit_code(within_s=20) != 0
            [line] = [line for line in _events(back) if "schema" in line]
            assert "newer than this version" in line
        await picks(new)
    await nothing_lost_or_doubled(asked)
    assert await raw.fetchval(SCHEMA) == schema
    untroubled(new)


@pytest.fixture
def newer_database(postgres):
    """A database that the release after this one has brought up to date, as this one can still work with it."""
    with postgres.database("migrated") as newer:
        newer.psql(OF_THE_NEXT_RELEASE)
        yield newer


async def test_f42_this_release_works_on_a_newer_schema_that_allows_it(newer_database):
    """In this process, which is cheaper: of the release before, the other tests run processes."""
    tasks = Tasks()

    @tasks.task("quick")
    async def quick(job): ...

    settings = Settings(db_dsn=newer_database.dsn, workers=(Worker("q", 2),))
    async with raw_connection(newer_database.dsn) as raw:
        before = [await raw.fetchval(SCHEMA), await raw.fetch("TABLE dl_function_sets")]
        with capture_logs() as lines:
            async with open_supervisor(settings, tasks) as supervisor:
                job = await supervisor.jobs.enqueue("quick", queue="q", lock_key="k")
                ended = await when_ended(supervisor, job.job_id)
                report = await supervisor.drain()
        assert (ended.status, ended.attempt, report.is_clean) == ("succeeded", 1, True)
        assert [await raw.fetchval(SCHEMA), await raw.fetch("TABLE dl_function_sets")] == before
    [said] = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert "newer than this version" in said


def _events(service):
    return [line["event"] for line in [*service.lines]]


def test_a_commit_missing_from_the_git_history_fails_with_the_fix(tmp_path):
    with pytest.raises(pytest.fail.Exception, match="needs a clone with its history: git fetch --unshallow"):
        previous_release.unpack("0" * 40, tmp_path)
