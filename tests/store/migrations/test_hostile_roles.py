"""Roles that try to run their own code with the rights of the tables' owner do not succeed."""

from __future__ import annotations

import pytest
from databases import raw_connection
from roles import a_role

from dataloader.store.migrations import function_set, migrate

pytestmark = pytest.mark.requirement("Q16")

# With the owner's rights, a function would write the owner's name into its creator's table.
LOOT = """
CREATE {kind} TABLE {schema}.loot (caught text);
GRANT INSERT ON {schema}.loot TO PUBLIC;
"""
TRAP = (
    LOOT.format(kind="TEMP", schema="pg_temp")
    + """
CREATE FUNCTION pg_temp.spring(text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN INSERT INTO pg_temp.loot VALUES (current_user); RETURN true; END $$;
CREATE DOMAIN pg_temp.trap AS text CHECK (pg_temp.spring(VALUE));
CREATE TEMP TABLE bait (status text, waits_for pg_temp.trap, available_at timestamptz, token bigint, claimed_by text);
"""
)
BAIT = """
CREATE TRIGGER bait BEFORE INSERT ON pg_temp.bait FOR EACH ROW EXECUTE FUNCTION public.dl_jobs_shape();
"""
BAIT_OF_DELETION = """
CREATE TRIGGER deleted AFTER DELETE ON pg_temp.bait FOR EACH ROW EXECUTE FUNCTION public.dl_jobs_deleted();
"""
BITE = "INSERT INTO pg_temp.bait (status, available_at) VALUES ('queued', 'infinity')"

CAUGHT = "SELECT DISTINCT caught FROM {schema}.loot"

# Replacements for the functions that ours call, which match their arguments better than PostgreSQL's own.
STAND_INS = (
    LOOT.format(kind="", schema="public")
    + """
CREATE FUNCTION public.nextval(text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.loot VALUES (current_user); RETURN 1; END $$;
CREATE FUNCTION public.same(dl_status, dl_status) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.loot VALUES (current_user); RETURN $1::text = $2::text; END $$;
CREATE OPERATOR public.= (FUNCTION = public.same, LEFTARG = dl_status, RIGHTARG = dl_status);
CREATE FUNCTION public.cardinality(int[]) RETURNS int LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.loot VALUES (current_user); RETURN array_length($1, 1); END $$;
CREATE FUNCTION public.unnest(int[]) RETURNS SETOF int LANGUAGE plpgsql AS $$
BEGIN INSERT INTO public.loot VALUES (current_user); RETURN QUERY SELECT pg_catalog.unnest($1); END $$;
"""
)
ALL_FUNCTIONS = """
SELECT FROM public.dl_claim_known('q', 9, 9, 'w', '{t}', '{1}', 9::float8, '{2}'::int[], NULL, '{t}', '{t}'::text[]);
SELECT public.dl_release('{1}'::int[]), public.dl_unpark('{1}'::int[]), public.dl_sweep_parked('{1}'::int[], 9);
SELECT public.dl_ready_next('{1}'::int[]), public.dl_free_keys('{1}'::int[]), public.dl_parked_keys(0::bigint, 9);
SELECT public.dl_judge_after(9, true);
SELECT FROM public.dl_open_lanes('q', '{t}');
SELECT public.dl_charge_lanes('{t}', '{s}', '{1}'), public.dl_take_units('s', 1, 1);
SELECT public.dl_opens_in('{[0,9)}', 'UTC', now(), 1);
SELECT public.dl_budgets_left(NULL::public.dl_sources, '{1}', '{1}', '{UTC}', 1, now());
SELECT public.dl_check_name('a', 'a', 9), public.dl_key('lock_key', '["a"]', 't', '{"a": 1}');
SELECT public.dl_enqueue('t', '{}', 'q', 'k', idempotency_key => 'i');
SELECT public.dl_error_group('e'), public.dl_error_line('e');
SELECT public.dl_source_take('s'::text, 1::bigint, 1::float8, '{1}'::int[], '{1}'::float8[]);
SELECT public.dl_source_give('s', 1, 1, 'w'), public.dl_supplier_take('s', 1);
"""
OUR_TRIGGERS = "SELECT tgname FROM pg_trigger WHERE tgrelid = 'dl_jobs'::regclass AND NOT tgisinternal"
INSERT_EACH = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, available_at)
VALUES (gen_random_uuid(), 'q', 't', 'a', 'running', now()), (gen_random_uuid(), 'q', 't', 'b', 'queued', 'infinity'),
       (gen_random_uuid(), 'q', 't', 'c', 'queued', now()), (gen_random_uuid(), 'q', 't', 'd', 'failed', now())
"""
UPDATE_EACH = """
UPDATE dl_jobs SET cancel_requested = true, watched = true;
UPDATE dl_jobs SET status = 'queued', available_at = now(), error = 'e1';
DELETE FROM dl_jobs WHERE lock_key = 'c';
"""


@pytest.fixture
async def outsider(database):
    """Open a connection of a role that may connect, create temporary tables and use the schema, as every role may."""
    with a_role(database) as role:
        async with raw_connection(role.dsn) as connection:
            yield connection


async def refused(connection, sql, match="permission denied"):
    with pytest.raises(Exception, match=match):
        await connection.execute(sql)


async def test_public_executes_no_function_and_only_four_run_with_their_owners_rights(raw):
    functions = await raw.fetch(
        "SELECT proname, prosecdef, proconfig, prosqlbody IS NOT NULL AS is_parsed,"
        " has_function_privilege('public', oid, 'EXECUTE') AS is_public"
        " FROM pg_proc WHERE proname LIKE 'dl\\_%'"
    )
    assert len(functions) == function_set.source().count("CREATE OR REPLACE FUNCTION") > 0
    assert [one["proname"] for one in functions if one["is_public"]] == []
    assert sorted(one["proname"] for one in functions if one["prosecdef"]) == [
        "dl_enqueue", "dl_enqueue_job", "dl_jobs_deleted", "dl_jobs_shape",
    ]  # fmt: skip
    # The names in a function body that was parsed when the function was created are not searched again.
    paths = {one["proconfig"][0] for one in functions if not one["is_parsed"]}
    assert paths == {"search_path=pg_catalog, pg_temp"}


async def test_a_role_without_rights_reads_writes_and_calls_nothing(outsider, raw):
    for row in await raw.fetch("SELECT relname FROM pg_class WHERE relname LIKE 'dl\\_%' AND relkind IN ('r', 'S')"):
        await refused(outsider, f"SELECT * FROM {row['relname']}")
    for statement in ALL_FUNCTIONS.strip().splitlines():
        await refused(outsider, statement)


async def test_our_triggers_cannot_be_put_on_a_foreign_table(outsider, raw):
    await outsider.execute(TRAP)
    await refused(outsider, BAIT)
    await refused(outsider, BAIT_OF_DELETION)
    # The function does nothing there for a role that may execute it, either.
    await raw.execute("GRANT EXECUTE ON FUNCTION dl_jobs_shape() TO PUBLIC")
    await outsider.execute(BAIT)
    await refused(outsider, BITE, "dl_jobs_shape is a trigger of dl_jobs alone")
    await outsider.execute("DROP TRIGGER bait ON pg_temp.bait")
    await outsider.execute(BITE)
    await outsider.execute("TRUNCATE pg_temp.loot")
    await raw.execute("GRANT EXECUTE ON FUNCTION dl_jobs_deleted() TO PUBLIC")
    await outsider.execute(BAIT_OF_DELETION)
    await refused(outsider, "DELETE FROM pg_temp.bait", "dl_jobs_deleted is a trigger of dl_jobs alone")
    await outsider.execute("DROP TRIGGER deleted ON pg_temp.bait")
    assert await outsider.fetch(CAUGHT.format(schema="pg_temp")) == []


async def test_functions_and_operators_of_others_do_not_stand_in_for_those_that_are_meant(
    database, store, raw, add_job
):
    await add_job(status="'running'", lease_expires_at="now() + interval '1 hour'", lock_key="'k'")
    await add_job(lock_key="'k'")
    with a_role(database, "GRANT CREATE ON SCHEMA public TO jobs_service") as role:
        async with raw_connection(role.dsn) as creator:
            await creator.execute(STAND_INS)
            # A statement whose types are not explicit is caught.
            await raw.execute(
                "SELECT nextval('dl_process_task_seq') WHERE 'queued'::dl_status = 'queued'::dl_status"
                " AND cardinality('{1}'::int[]) = (SELECT count(*) FROM unnest('{1}'::int[]))"
            )
            assert await raw.fetchval("SELECT count(*) FROM loot WHERE caught = 'postgres'") == 4
            await raw.execute("TRUNCATE loot")
            # New triggers use PostgreSQL's own operators, too.
            ours = await raw.fetch(OUR_TRIGGERS)
            assert len(ours) == function_set.source().count("EXECUTE FUNCTION {schema}.dl_jobs_") > 0
            for trigger in ours:
                await raw.execute(f"DROP TRIGGER {trigger['tgname']} ON dl_jobs")
            await raw.execute("UPDATE dl_function_sets SET number = number - 1")
            assert await migrate(store) == [f"functions {function_set.NUMBER}"]
            await raw.execute(ALL_FUNCTIONS)
            await raw.execute(INSERT_EACH)
            await raw.execute(UPDATE_EACH)
            assert await raw.fetch(CAUGHT.format(schema="public")) == []


async def test_a_role_that_may_only_insert_needs_no_right_on_anything_of_ours(database, raw):
    with a_role(database, "GRANT INSERT ON dl_jobs TO jobs_service") as role:
        async with raw_connection(role.dsn) as foreign:
            await foreign.execute(INSERT_EACH)
    assert await raw.fetch("SELECT status::text, waits_for, token > 0 FROM dl_jobs ORDER BY lock_key") == [
        ("running", None, True),
        ("queued", "time", False),
        ("queued", None, False),
        ("failed", None, False),
    ]
