"""A part that uses up its restarts ends its process, whose last line says which part, why, and what to do (Q15).

Of a whole process that can be seen by its claims only: the other parts wait for whatever the database refuses them.
What each of them does when it fails in another way is in tests/actors/test_database_away.py.
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

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.requirement("Q15")]

ADD = "INSERT INTO dl_jobs (job_id, queue, task, lock_key) VALUES (gen_random_uuid(), 'q', 'quick', 'k')"
A_TRIGGER_THAT_RAISES = """
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no more claims'; END $$;
CREATE TRIGGER refuse BEFORE UPDATE ON dl_jobs FOR EACH ROW WHEN (NEW.status = 'running') EXECUTE FUNCTION refuse();
"""


@attrs.frozen
class Fault:
    """What somebody does to the database, and the words by which the last line names it."""

    sql: str
    cause: tuple[str, ...]


FAULTS = {
    "a function is gone": Fault(
        "DROP FUNCTION dl_claim_runs", ("SchemaError", "function dl_claim_runs", "does not exist")
    ),
    "a trigger raises": Fault(A_TRIGGER_THAT_RAISES, ("RaiseError", "no more claims")),
    "a right was taken": Fault("REVOKE ALL ON dl_jobs FROM {role}", ("permission denied for table dl_jobs",)),
}


async def test_the_last_line_names_the_part_that_gave_up_the_cause_and_what_to_do(serve, postgres):
    """All faults at once: what takes the time is the pauses between the restarts."""
    last_lines = {}

    async def fail(name, fault):
        with postgres.database("migrated") as database, service_role(database) as role:
            service = await serve(dsn=role.dsn, drain_timeout_sec=0.5, poll_sec=0.2)
            await trio.to_thread.run_sync(database.psql, fault.sql.format(role=role.name))
            await trio.to_thread.run_sync(database.psql, ADD)
            assert await service.exit_code(within_s=90) == 1
            assert await trio.to_thread.run_sync(database.psql, "SELECT status, attempt FROM dl_jobs") == "queued|0"
        failures = [line for line in service.lines if line["event"] == "a part failed and is started again"]
        assert {line["part"] for line in failures} == {"the claims of q"}
        assert len(failures) == 21
        last_lines[name] = service.lines[-1]

    async with trio.open_nursery() as nursery:
        for name, fault in FAULTS.items():
            nursery.start_soon(fail, name, fault)
    for name, fault in FAULTS.items():
        line = last_lines[name]
        assert (line["level"], line["event"]) == ("critical", "ended because a part gave up")
        assert "the claims of q gave up after 20 restarts in 60 s; the last cause was " in line["cause"]
        for words in fault.cause:
            assert words in line["cause"]
    # Whoever reads only this line knows what became of the jobs, and that somebody has to start the process again.
    assert [name for name, line in last_lines.items() if "start" not in line.get("what_to_do", "")] == []


async def test_what_the_cause_of_a_missing_function_advises_mends_it(serve, add, row_when, database):
    """The advice is the schema's own script: as far as the migrations know they were all applied."""
    await trio.to_thread.run_sync(database.psql, "DROP FUNCTION dl_claim_runs")
    service = await serve(poll_sec=0.2)
    job_id = await add("quick")
    failed = await service.logged("a part failed and is started again")
    assert "`dataloader migrate --sql` with psql" in failed["exception"]
    await trio.to_thread.run_sync(database.psql, await trio.to_thread.run_sync(script, database))
    await row_when(job_id, "succeeded", within_s=10)


def script(database):
    environment = {"PATH": "/usr/bin:/bin", "DL_DB_DSN": database.dsn, "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-m", "dataloader", "migrate", "--sql"]
    return subprocess.run(command, env=environment, check=True, timeout=60, stdout=subprocess.PIPE, text=True).stdout


async def test_a_part_that_can_not_work_goes_on_trying_and_says_so(serve, add, raw, row_when):
    """What the database refuses to the parts besides the claims costs their duty, and is said."""
    service = await serve(poll_sec=0.2, reaper_period_sec=0.2, claim_backoff_sec=0.2, heartbeat_sec=0.2)
    # A job that waits for its key, without which nobody looks at keys.
    await raw.execute("SELECT pg_advisory_lock(hashtext('held'))")
    held = await add("quick", lock_key="held")
    await until(partial(raw.fetchval, "SELECT waits_for = 'lock' FROM dl_jobs WHERE job_id = $1", held))
    await raw.execute("ALTER FUNCTION dl_parked_keys RENAME TO gone; ALTER TABLE dl_workers RENAME TO gone_too")
    said = await until(partial(told, service, "a part can't do its work"), lambda lines: len(lines) == 2)
    assert {line["part"] for line in said} == {"stager", "sign of life"}
    for line in said:
        assert line["level"] == "warning"
        assert "does not exist" in line["error"]
    await row_when(await add("quick"), "succeeded")
    await raw.execute("ALTER FUNCTION gone RENAME TO dl_parked_keys; ALTER TABLE gone_too RENAME TO dl_workers")
    await until(lambda: raw.fetchval("SELECT seen_at > now() - interval '1 second' FROM dl_workers"))
    await until(partial(told, service, "a part does its work again"), lambda lines: len(lines) == 2)
    assert service.process.poll() is None


async def told(service, event):
    return [line for line in [*service.lines] if line["event"] == event]
