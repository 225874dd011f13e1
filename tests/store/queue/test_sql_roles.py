"""Rights of roles in SQL: the owner, a service, a client that enqueues, another service."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from databases import raw_connection
from roles import a_role, service_role

from dataloader.jobs.task import BUILT_IN
from dataloader.store.migrations import function_set

pytestmark = pytest.mark.requirement("Q16")

PAGE = (Path(__file__).parents[3] / "docs" / "enqueue.md").read_text()
[CLIENT] = re.findall(r"```sql\n-- As the owner[^\n]*\n(.*?)```", PAGE, re.DOTALL)
FOREIGN = "GRANT SELECT, INSERT, UPDATE, DELETE ON dl_jobs, dl_job_events TO jobs_service"
GRANTS = {"client": CLIENT.replace("TO shop", "TO jobs_service"), "foreign service": FOREIGN}

NAMES = ("notify.command", "notify.webhook", "process.payment", "migrate")
INSERT = "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', $1, gen_random_uuid())"
REFUSED = {
    "owner": set(),
    "service": set(),
    "client": {"add", "read", "forge", "built-in", "make built-in", "change built-in", "delete", "lease", "event"},
    "foreign service": {"built-in", "make built-in", "change built-in"},
}
STATEMENTS = {
    "add": INSERT.replace("$1", "'plain'"),
    "read": "SELECT args FROM dl_jobs",
    "forge": "UPDATE dl_jobs SET status = 'succeeded', result = '{\"paid\": true}' WHERE task = 'plain'",
    "lease": INSERT.replace("lock_key)", "lock_key, status, lease_expires_at)").replace(
        "$1, gen_random_uuid())", "'plain', 'victim', 'running', 'infinity')"
    ),
    "event": "INSERT INTO dl_job_events (job_id, queue, kind) SELECT gen_random_uuid(), 'q', 'canceled' WHERE false",
    "built-in": INSERT.replace("$1", "'notify.command'"),
    "make built-in": "UPDATE dl_jobs SET task = 'notify.webhook' WHERE task = 'plain'",
    "change built-in": "UPDATE dl_jobs SET args = '{\"forged\": 1}' WHERE task LIKE 'notify.%'",
    "delete": "DELETE FROM dl_jobs WHERE task = 'plain'",
}


@asynccontextmanager
async def open_as(name, database):
    if name == "owner":
        async with raw_connection(database.dsn) as connection:
            yield connection
        return
    with service_role(database) if name == "service" else a_role(database, GRANTS[name]) as role:
        async with raw_connection(role.dsn) as connection:
            yield connection


@pytest.fixture
async def jobs(raw):
    """Add a job of a plain task, and one of a built-in task."""
    for task in ("plain", "notify.command"):
        await raw.execute(INSERT, task)


@pytest.mark.parametrize("name", REFUSED)
async def test_each_role_may_do_what_the_page_says_and_no_more(database, jobs, name):
    async with open_as(name, database) as connection:
        refused = set()
        for what, statement in STATEMENTS.items():
            await connection.execute("BEGIN")
            try:
                await connection.execute(statement)
            except asyncpg.InsufficientPrivilegeError:
                refused.add(what)
            await connection.execute("ROLLBACK")
    assert refused == REFUSED[name]


@pytest.mark.parametrize("name", ["client", "foreign service"])
async def test_no_role_but_a_service_adds_a_job_of_any_built_in_task(database, raw, name):
    await raw.execute("GRANT EXECUTE ON FUNCTION dl_enqueue TO PUBLIC")
    async with open_as(name, database) as connection:
        for task in NAMES:
            with pytest.raises(Exception, match="names of built-in tasks"):
                await connection.execute("SELECT dl_enqueue($1, queue => 'q')", task)
            with pytest.raises(Exception, match=r"permission denied|written by services alone"):
                await connection.execute(INSERT, task)
        await connection.execute("SELECT dl_enqueue('plain', queue => 'q')")
    assert await raw.fetchval("SELECT string_agg(task, ' ') FROM dl_jobs") == "plain"


async def test_a_service_adds_jobs_of_built_in_tasks(database, raw):
    async with open_as("service", database) as connection:
        for task in NAMES:
            await connection.execute(INSERT, task)
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == len(NAMES)


async def test_a_client_enqueues_after_another_job_and_within_its_own_transaction(database, raw):
    async with open_as("client", database) as connection:
        first = await connection.fetchval("SELECT dl_enqueue('plain', queue => 'q', idempotency_key => 'a')")
        again = await connection.fetchval("SELECT dl_enqueue('plain', queue => 'q', idempotency_key => 'a')")
        await connection.fetchval("SELECT dl_enqueue('plain', queue => 'q', after => ARRAY[$1::uuid])", first)
        await connection.execute("BEGIN")
        await connection.execute("SELECT dl_enqueue('plain', queue => 'q')")
        await connection.execute("ROLLBACK")
    assert first == again
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs") == 2
    assert await raw.fetchval("SELECT count(*) FROM dl_job_after") == 1


async def test_objects_of_a_client_do_not_stand_in_for_those_that_dl_enqueue_means(database, raw):
    async with open_as("client", database) as connection:
        await connection.execute(
            """
            CREATE TEMP TABLE dl_jobs (job_id uuid, task text);
            CREATE TEMP TABLE dl_tasks (task text, queue text);
            CREATE FUNCTION pg_temp.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''infinity''::timestamptz';
            SET search_path = pg_temp, pg_catalog, public;
            """
        )
        await connection.execute("SELECT public.dl_enqueue('plain', queue => 'q')")
        assert await connection.fetchval("SELECT count(*) FROM pg_temp.dl_jobs") == 0
    assert await raw.fetch("SELECT task, available_at < 'infinity' FROM dl_jobs") == [("plain", True)]


async def test_a_former_clients_grants_can_be_taken_away_and_it_still_enqueues(database, raw):
    former = (
        "GRANT SELECT, INSERT, UPDATE, DELETE ON dl_jobs TO jobs_service; GRANT SELECT ON dl_tasks TO jobs_service;"
    )
    with a_role(database, GRANTS["client"] + former) as role:
        await raw.execute(f"REVOKE ALL ON dl_jobs, dl_tasks FROM {role.name}")
        async with raw_connection(role.dsn) as connection:
            await connection.execute("SELECT dl_enqueue('plain', queue => 'q')")
            with pytest.raises(Exception, match="permission denied"):
                await connection.execute(INSERT, "plain")


def test_the_triggers_and_the_function_name_the_same_built_in_tasks():
    source = function_set.source()
    patterns = [name.replace("*", "%") for name in BUILT_IN]
    listed = f"LIKE ANY (ARRAY[{', '.join(map(repr, patterns))}])"
    when = " OR ".join(f"NEW.task {'LIKE' if '%' in one else '='} {one!r}" for one in patterns)
    assert source.count(listed) == 1
    assert source.count(f"WHEN ({when})") == 2
