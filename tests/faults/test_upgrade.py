"""This release on the schema of the next one, as after a downgrade (F42)."""

from __future__ import annotations

import pytest
from conditions import when_ended
from databases import raw_connection
from logged import capture_logs

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
OF_THE_NEXT_RELEASE = f"""
ALTER TABLE dl_jobs ADD COLUMN of_the_next_release int NOT NULL DEFAULT 0;
INSERT INTO dl_migrations (number, name, oldest) VALUES ({LATEST + 1}, 'of the next release', {LATEST});
COMMENT ON TRIGGER dl_jobs_changed ON dl_jobs IS 'another definition';
CREATE FUNCTION dl_of_the_next_release() RETURNS int LANGUAGE sql AS 'SELECT 1';
INSERT INTO dl_function_sets (number, hash, oldest) VALUES ({function_set.NUMBER + 1}, '', {function_set.NUMBER});
"""


@pytest.fixture
def newer_database(postgres):
    """Return a database that the next release has migrated, so that this one can still work with it."""
    with postgres.database("migrated") as newer:
        newer.psql(OF_THE_NEXT_RELEASE)
        yield newer


async def test_f42_this_release_works_on_a_newer_schema_that_allows_it(newer_database):
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
