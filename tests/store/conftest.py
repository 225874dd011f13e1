"""Fixtures of the store's tests: our store on the test's database, another service's connection to it, and rows."""

from __future__ import annotations

from functools import partial

import pytest
import trio
from conditions import patience_s
from queue_workers import Worker

from dataloader.jobs.ids import uuid7
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue import finish, plain_claim


@pytest.fixture
async def store(database):
    """Open our store on the test's database."""
    async with open_database(DatabaseOptions(dsn=database.dsn, statement_timeout_s=10)) as store:
        yield store


@pytest.fixture
async def until(raw):
    """Return a function that waits for a condition in the database, an SQL expression."""

    async def until(condition, *args):
        with trio.fail_after(patience_s()):
            while not await raw.fetchval(f"SELECT {condition}", *args):  # noqa: ASYNC110 - the database has no event
                await trio.sleep(0.01)

    return until


@pytest.fixture
async def until_blocked(until):
    """Return a function that waits until another connection waits for a lock that `raw` holds."""

    async def until_blocked():
        # Not from pg_stat_activity, which does not change within a transaction.
        await until(
            "EXISTS (SELECT FROM pg_locks WHERE NOT granted AND pg_backend_pid() = ANY (pg_blocking_pids(pid)))"
        )

    return until_blocked


@pytest.fixture
async def add_job(raw):
    """Return a function that adds a row to dl_jobs, with columns as SQL expressions, and returns its ID."""

    async def add(**columns):
        job_id = uuid7()
        values = {"job_id": f"'{job_id}'", "queue": "'q'", "task": "'t'", "lock_key": f"'{job_id}'"} | columns
        await raw.execute(f"INSERT INTO dl_jobs ({', '.join(values)}) VALUES ({', '.join(values.values())})")
        return job_id

    return add


@pytest.fixture
async def start_worker(store):
    """Return a function that starts workers, each with a separate lock session, in one process."""
    workers = []

    def start(name=None, database=None, **options):
        workers.append(Worker(database or store, name or f"w{len(workers) + 1}", **options))
        return workers[-1]

    yield start
    for worker in workers:
        await worker.locks.close()


@pytest.fixture
def row_of(raw):
    """Return a function that reads a job's row as a dictionary, or one column of it."""

    async def row_of(job_id, column=None):
        row = dict(await raw.fetchrow("SELECT *, status::text AS status FROM dl_jobs WHERE job_id = $1", job_id))
        return row if column is None else row[column]

    return row_of


@pytest.fixture
def journal_of(raw):
    """Return a function that reads a job's events: the kinds, with the reason where there is one."""

    async def journal_of(job_id):
        rows = await raw.fetch(
            "SELECT kind, payload ->> 'reason' AS reason FROM dl_job_events WHERE job_id = $1 ORDER BY event_id", job_id
        )
        return [row["kind"] if row["reason"] is None else f"{row['kind']}: {row['reason']}" for row in rows]

    return journal_of


@pytest.fixture
def locks_of(raw):
    """Return a function that reads the hashes that a worker's session holds, from the server's view."""

    async def locks_of(worker):
        rows = await raw.fetch(
            "SELECT objid::bigint::bit(32)::int AS h FROM pg_locks"
            " WHERE locktype = 'advisory' AND granted AND pid = $1 ORDER BY 1",
            worker.pid,
        )
        return [row["h"] for row in rows]

    return locks_of


@pytest.fixture
def end_session(raw):
    """Return a function that ends a worker's lock session from the server's side, and waits for its end."""

    async def end_session(worker):
        assert await raw.fetchval("SELECT pg_terminate_backend($1, 5000)", worker.pid)

    return end_session


@pytest.fixture
def general_claims_only(monkeypatch):
    """Return a function that makes all claims general ones."""
    return partial(monkeypatch.setattr, plain_claim.PlainClaims, "may_serve", lambda *_: False)


@pytest.fixture(params=["general", "plain"])
def add_for_both(add_job, general_claims_only, request):
    """Return `add_job`; in one run of the test all claims are general, in the other they are plain."""
    if request.param == "general":
        general_claims_only()

    async def add(**columns):
        return await add_job(**{"keyed": str(request.param == "general")} | columns)

    return add


@pytest.fixture
def barrier(raw, monkeypatch):
    """Return a barrier that blocks a claim of the worker `slow`, or a finish.

    First `await barrier(before)`, for `dl_claim_known` before a piece of its text, or `await
    barrier.in_plain_claim(…)`, or `await barrier.in_finish()`; then `await until_blocked()`, then `await
    barrier.lift()`.
    """

    class Barrier:
        async def __call__(self, before):
            source = await raw.fetchval("SELECT pg_get_functiondef('dl_claim_known'::regproc)")
            assert source.count(before), f"dl_claim_known has no {before!r} any more"
            await self._hold()
            statement = "PERFORM public.barrier(p_worker);\n" if before.startswith("SELECT") else ""
            condition = "" if statement else before.replace("WHEN ", "WHEN public.barrier(p_worker) AND ", 1)
            await raw.execute(source.replace(before, statement + before if statement else condition))

        async def in_plain_claim(self, *, has_locked):
            """Block it after the snapshot, before the rows are locked or once they are."""
            if has_locked:
                self._edit(
                    plain_claim,
                    "_CLAIM",
                    "SELECT p.are_plain",
                    "SELECT public.barrier($3) AND p.are_plain AS are_plain",
                )
            else:
                self._edit(
                    plain_claim,
                    "_CLAIM",
                    "AND EXISTS (SELECT FROM start)",
                    "AND public.barrier($3) AND EXISTS (SELECT FROM start)",
                )
            await self._hold()

        async def in_finish(self):
            """Block it after the snapshot of a batch of successes, before the rows are locked."""
            self._edit(finish, "_SUCCEED", "WHERE j.token", "WHERE public.barrier('slow') AND j.token")
            await self._hold()

        async def lift(self):
            await raw.execute("SELECT pg_advisory_unlock(4711, 4711)")

        def _edit(self, module, name, old, new):
            text = getattr(module, name)
            assert text.count(old) == 1, f"{name} has {text.count(old)} times {old!r}"
            monkeypatch.setattr(module, name, text.replace(old, new))

        async def _hold(self):
            await raw.execute("""
                CREATE FUNCTION barrier(p_worker text) RETURNS boolean LANGUAGE plpgsql AS $$
                BEGIN
                  IF p_worker = 'slow' THEN PERFORM pg_advisory_xact_lock_shared(4711, 4711); END IF;
                  RETURN true;
                END $$""")
            await raw.execute("SELECT pg_advisory_lock(4711, 4711)")

    return Barrier()
