"""The short conditions of the triggers of dl_jobs pass all rows that the triggers' functions change."""

from __future__ import annotations

import re

import pytest

pytestmark = pytest.mark.requirement("Q1")

ROWS = 4_000
STATUSES = ("queued", "running", "succeeded", "failed", "canceled", "lost")
NO_JOB = "00000000-0000-0000-0000-000000000000"


def some(*values):
    """Return an SQL expression for a random one of the values."""
    return f"(ARRAY[{', '.join(values)}])[1 + floor(random() * {len(values)})::int]"


# Values of rows before and after a write, by column. NULL is frequent, as in real rows.
COLUMNS = {
    "status": some(*(f"'{status}'::dl_status" for status in (*STATUSES, "queued", "running"))),
    "waits_for": some("'time'", "'lock'", "'after'", "'limit'", "'garbage'", *["NULL"] * 10),
    "available_at": some("now()", "now()", "now() + interval '1 h'", "now() - interval '1 h'", "'infinity'"),
    "waits_on": some("gen_random_uuid()", f"'{NO_JOB}'", *["NULL"] * 8),
    "lane": some("'t'", "'other'", *["NULL"] * 6),
    "error": some("'e 1'", "'e 2'", *["NULL"] * 4),
    "token": some("0", "1", "2"),
    "claimed_by": some("'w'", "NULL"),
    "attempt": some("1", "2"),
    "watched": some("true", *["false"] * 5),
    "awaited": some("true", *["false"] * 5),
    "cancel_requested": some("true", *["false"] * 5),
    "progress": some("'{}'::jsonb", """'{"rows": 1}'"""),
    "superseded_by": some("gen_random_uuid()", *["NULL"] * 4),
    "unique_key": "CASE WHEN random() < 0.3 THEN n::text END",
}
CASES = f"""
SELECT setseed(0.5);
CREATE TEMP TABLE cases AS
SELECT n, gen_random_uuid() AS job_id, {{}} FROM generate_series(1, {ROWS}) AS n;
INSERT INTO dl_tasks (task, limited, layout, declared_by) VALUES ('t', true, 1, 'w');
INSERT INTO dl_lanes (lane) VALUES ('t');
CREATE TABLE noted (channel text, payload text);
CREATE FUNCTION noted(channel text, payload text) RETURNS void
LANGUAGE sql AS 'INSERT INTO public.noted VALUES ($1, $2)';
"""
INSERT = f"""
INSERT INTO dl_jobs (job_id, queue, task, lock_key, {", ".join(COLUMNS)})
SELECT job_id, 'q' || n, 't', n::text, {", ".join(f"old_{name}" for name in COLUMNS)} FROM cases
"""
# A write of all columns, like one of a service that does not know our schema.
UPDATE = f"""
UPDATE dl_jobs j SET {", ".join(f"{name} = c.new_{name}" for name in COLUMNS)} FROM cases c WHERE j.job_id = c.job_id
"""
# Without random and clock values: tokens of foreign claims, and the time of an end.
RESULT = """
SELECT (to_jsonb(j) - 'token' - 'finished_at' - 'created_at')::text, j.token > 2 AS is_claimed,
       j.finished_at IS NULL AS is_open, (SELECT count(*) FROM dl_errors e WHERE e.job_id = j.job_id) AS errors
FROM dl_jobs j ORDER BY job_id
"""
NOTED = """
SELECT channel, CASE WHEN channel <> 'dl_stop' OR payload::bigint < 3 THEN payload END AS payload, count(*)
FROM noted GROUP BY 1, 2 ORDER BY 1, 2
"""


@pytest.fixture
async def cases(raw):
    """Create rows before and after a write, and functions that record their notifications in a table.

    Roll back at the end.
    """
    columns = [f"{value} AS {time}_{name}" for name, value in COLUMNS.items() for time in ("old", "new")]
    await raw.execute("BEGIN")
    await raw.execute(CASES.format(", ".join(columns)))
    for name in COLUMNS:
        await raw.execute(f"UPDATE cases SET new_{name} = old_{name} WHERE random() < 0.5")
    for function in ("dl_jobs_changed", "dl_jobs_inserted"):
        source = await raw.fetchval(f"SELECT pg_get_functiondef('{function}'::regproc)")
        await raw.execute(source.replace("pg_notify(", "public.noted("))
    yield
    await raw.execute("ROLLBACK")


async def result_of(raw, write, unconditional=()):
    """Return the result of a write and its notifications, then roll it back.

    Triggers `unconditional` fire for each row.
    """
    await raw.execute("SAVEPOINT before")
    for trigger in unconditional:
        definition = await raw.fetchval("SELECT pg_get_triggerdef(oid) FROM pg_trigger WHERE tgname = $1", trigger)
        changed = re.sub(r" WHEN \(.*\) EXECUTE ", " EXECUTE ", definition)
        assert changed != definition
        await raw.execute(changed.replace("CREATE TRIGGER", "CREATE OR REPLACE TRIGGER"))
    await raw.execute(write)
    result = await raw.fetch(RESULT), await raw.fetch(NOTED)
    await raw.execute("ROLLBACK TO SAVEPOINT before")
    return result


@pytest.mark.slow
async def test_conditions_of_insert_triggers_let_through_all_that_is_changed(raw, cases):
    rows, noted = await result_of(raw, INSERT)
    assert (rows, noted) == await result_of(raw, INSERT, ["dl_jobs_shape_ins"])
    assert len(rows) == ROWS
    assert {one["channel"] for one in noted} == {"dl_jobs", "dl_due", "dl_after", "dl_lane"}


@pytest.mark.slow
async def test_conditions_of_update_triggers_let_through_all_that_is_changed(raw, cases):
    await raw.execute("SET LOCAL session_replication_role = replica")
    await raw.execute(INSERT)
    await raw.execute("SET LOCAL session_replication_role = origin")
    rows, noted = await result_of(raw, UPDATE)
    assert (rows, noted) == await result_of(raw, UPDATE, ["dl_jobs_shape_upd", "dl_jobs_changed"])
    assert {one["channel"] for one in noted} == {
        "dl_jobs", "dl_due", "dl_after", "dl_lane", "dl_stop", "dl_cancel", "dl_changed",
    }  # fmt: skip
