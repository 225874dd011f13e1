"""A part that uses up its restarts ends its process, whose last line has the part, the cause, and the remedy (Q15).

With a whole process, only claims show this: the other parts wait for whatever the database refuses them. Their
reactions to other failures are tested in tests/actors/test_database_away.py.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import attrs
import pytest
import trio
from conditions import until
from roles import service_role
from services import FOLDER

pytestmark = [pytest.mark.full, pytest.mark.requirement("Q15")]

ADD = "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', 'quick', 'k')"
A_TRIGGER_THAT_RAISES = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no more claims'; END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON dl_jobs FOR EACH ROW WHEN (NEW.status = 'running') EXECUTE FUNCTION refuse();
"""


@attrs.frozen
class Refusal:
    """Change of the database that makes it refuse claims, its reversal, and the words of the log line."""

    sql: str
    undo: str
    cause: str


REFUSALS = {
    "a trigger raises": Refusal(A_TRIGGER_THAT_RAISES, "DROP TRIGGER refuse ON dl_jobs", "RaiseError: no more claims"),
    "a right was taken": Refusal(
        "REVOKE ALL ON dl_jobs FROM {role}", "GRANT ALL ON dl_jobs TO {role}", "permission denied for table dl_jobs"
    ),
}


async def test_the_last_line_names_the_part_that_gave_up_the_cause_and_what_to_do(serve, database):
    """The pauses between the restarts take most of the time."""
    service = await serve(drain_timeout_sec=0.5, poll_sec=0.2)
    await trio.to_thread.run_sync(database.psql, "DROP FUNCTION dl_claim_known")
    await trio.to_thread.run_sync(database.psql, ADD)
    assert await service.exit_code(within_s=240) == 1
    assert await trio.to_thread.run_sync(database.psql, "SELECT status, attempt FROM dl_jobs") == "queued|0"
    failures = [line for line in service.lines if line["event"] == "a part failed and is restarted"]
    assert {line["part"] for line in failures} == {"the claims of q"}
    assert len(failures) == 21
    line = service.lines[-1]
    assert (line["level"], line["event"]) == ("critical", "ended because a part gave up")
    assert "the claims of q gave up after 20 restarts in 60 s; the last cause was " in line["cause"]
    for words in ("SchemaError", "function dl_claim_known", "does not exist"):
        assert words in line["cause"]
    # A reader of only this line learns the state of the jobs, and that the process must be started again.
    assert "start" in line.get("what_to_do", "")


@pytest.mark.parametrize("refusal", REFUSALS.values(), ids=REFUSALS)
async def test_refused_claims_are_retried_and_logged(serve, database, refusal):
    """The process continues to serve until the database is corrected (docs/outages.md has the table)."""
    psql = partial(trio.to_thread.run_sync, database.psql)
    with service_role(database) as role:
        service = await serve(dsn=role.dsn, poll_sec=0.2)
        await psql(refusal.sql.format(role=role.name))
        await psql(ADD)
        claims = partial(told_of_claims, service)
        [said] = await until(partial(claims, "a part cannot do its work"))
        assert said["level"] == "warning"
        assert refusal.cause in said["error"]
        assert await psql("SELECT status, attempt FROM dl_jobs") == "queued|0"
        await psql(refusal.undo.format(role=role.name))
        await until(partial(psql, "SELECT status FROM dl_jobs"), lambda status: status == "succeeded")
        await until(partial(claims, "a part has recovered"))
        assert service.process.poll() is None


async def test_the_advice_about_a_missing_function_repairs_it(serve, add, row_when, database):
    """The advice is the schema's own script: by the list of migrations, all were applied."""
    await trio.to_thread.run_sync(database.psql, "DROP FUNCTION dl_claim_known")
    service = await serve(poll_sec=0.2)
    job_id = await add("quick")
    failed = await service.logged("a part failed and is restarted")
    assert "`dataloader migrate --sql` with psql" in failed["exception"]
    await trio.to_thread.run_sync(database.psql, await trio.to_thread.run_sync(script, database))
    await row_when(job_id, "succeeded", within_s=10)


def script(database):
    environment = {"PATH": "/usr/bin:/bin", "DL_DB_DSN": database.dsn, "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-m", "dataloader", "migrate", "--sql"]
    return subprocess.run(command, env=environment, check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout


BROKEN = {"stager", "heartbeat"}


async def test_a_part_that_cannot_work_keeps_trying_and_logs_it(serve, add, raw, row_when):
    """A refusal of the database to a part other than the claims stops only its work, and is logged."""
    service = await serve(poll_sec=0.2, reaper_period_sec=0.2, claim_backoff_sec=0.2, heartbeat_sec=0.2)
    # A job that waits for its key; without it, no part checks keys.
    await raw.execute("SELECT pg_advisory_lock(hashtext('held'))")
    held = await add("quick", lock_key="held")
    await until(partial(raw.fetchval, "SELECT waits_for = 'lock' FROM dl_jobs WHERE job_id = $1", held))
    await raw.execute("ALTER FUNCTION dl_parked_keys RENAME TO gone; ALTER TABLE dl_workers RENAME TO gone_too")
    said = await until(partial(told, service, "a part cannot do its work"), lambda lines: parts_of(lines) >= BROKEN)
    assert parts_of(said) <= BROKEN | {"pruner"}  # the pruner works once a minute
    for line in said:
        assert line["level"] == "warning"
        assert "does not exist" in line["error"]
    await row_when(await add("quick"), "succeeded")
    await raw.execute("ALTER FUNCTION gone RENAME TO dl_parked_keys; ALTER TABLE gone_too RENAME TO dl_workers")
    await until(lambda: raw.fetchval("SELECT seen_at > now() - interval '1 second' FROM dl_workers"))
    await until(partial(told, service, "a part has recovered"), lambda lines: parts_of(lines) >= BROKEN)
    assert service.process.poll() is None


def parts_of(lines):
    return {line["part"] for line in lines}


async def told(service, event):
    return [line for line in [*service.lines] if line["event"] == event]


async def told_of_claims(service, event):
    return [line for line in await told(service, event) if line["part"] == "claims of q"]
