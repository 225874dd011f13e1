"""Stored rows with names from before a change of names are converted."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from uuid import uuid4

import pytest
import trio
from conditions import until
from databases import raw_connection
from roles import service_role

from dataloader.jobs.limits import Supplier
from dataloader.store.etl.load_state import aio_load_state, aio_move_state, window_state
from dataloader.store.migrations import function_set, migrate, migrations


async def test_stored_limits_of_suppliers_have_rate_limits_instead_of_budgets(store, raw):
    budgets = [[100, 60], {"requests": 9, "per": "day", "zone": "Europe/Berlin"}]
    rows = {
        "declared": ({"budgets": budgets, "zone": "UTC"}, None),
        "overridden": ({"budgets": []}, {"budgets": budgets, "margin_s": 1}),
        "set by hand": (None, {"budgets": budgets}),
        "no budgets": ({"zone": "UTC"}, {"margin_s": 1}),
        "new": ({"rate_limits": budgets}, {}),
        "no object": (["budgets"], "budgets"),
    }
    await raw.execute(
        "INSERT INTO dl_sources (source, limits, override) SELECT * FROM unnest($1::text[], $2::jsonb[], $3::jsonb[])",
        list(rows),
        *([None if one is None else json.dumps(one) for one in column] for column in zip(*rows.values(), strict=True)),
    )
    await raw.execute("DELETE FROM dl_migrations WHERE name = 'rate_limits'")
    assert len(await migrate(store)) == 1
    stored = {
        name: tuple(None if text is None else json.loads(text) for text in texts)
        for name, *texts in await raw.fetch("SELECT source, limits, override FROM dl_sources")
    }
    assert stored == rows | {
        "declared": ({"rate_limits": budgets, "zone": "UTC"}, None),
        "overridden": ({"rate_limits": []}, {"rate_limits": budgets, "margin_s": 1}),
        "set by hand": (None, {"rate_limits": budgets}),
    }
    assert Supplier.of_spec("s", stored["overridden"][1]).spec()["rate_limits"] == budgets


BEFORE_LOAD_STATE = """
DROP VIEW dl_etl_cursors, dl_etl_history, dl_etl_snapshots;
DROP TRIGGER dl_load_state_upto ON dl_load_state;
DROP FUNCTION dl_load_state_upto;
ALTER TABLE dl_load_state DROP COLUMN state, ALTER COLUMN upto SET NOT NULL;
ALTER TABLE dl_load_state RENAME CONSTRAINT dl_load_state_pkey TO dl_etl_cursors_pkey;
ALTER TABLE dl_load_state RENAME TO dl_etl_cursors;
ALTER TABLE dl_load_history RENAME CONSTRAINT dl_load_history_pkey TO dl_etl_history_pkey;
ALTER TABLE dl_load_history RENAME TO dl_etl_history;
ALTER TABLE dl_load_snapshots RENAME CONSTRAINT dl_load_snapshots_pkey TO dl_etl_snapshots_pkey;
ALTER TABLE dl_load_snapshots RENAME TO dl_etl_snapshots;
DELETE FROM dl_migrations WHERE name = 'load_state';
DELETE FROM dl_function_sets;
"""
ROWS = """
INSERT INTO dl_etl_cursors (load, upto, run_id) VALUES ('rates', '2026-11-01 00:00:00.5+00', gen_random_uuid());
INSERT INTO dl_etl_history (target, columns) VALUES ('t', '{a}');
INSERT INTO dl_etl_snapshots (target, load, segment, as_of) VALUES ('t', 'rates', 'day', '2026-11-01');
"""
# The statements of the release before.
MOVE = """
INSERT INTO dl_etl_cursors AS c (load, upto, run_id) VALUES ($1, $2, gen_random_uuid())
ON CONFLICT (load) DO UPDATE SET upto = excluded.upto, run_id = excluded.run_id, moved_at = now()
WHERE c.upto < excluded.upto
"""
OPEN = "INSERT INTO dl_etl_history (target) VALUES ('t') ON CONFLICT DO NOTHING"
TAKEN = """
INSERT INTO dl_etl_snapshots (target, load, segment, as_of) VALUES ('t', 'rates', 'day', '2026-11-02')
ON CONFLICT (target, load, segment) DO UPDATE SET as_of = excluded.as_of
"""


@pytest.fixture
async def upgraded(store, raw, database):
    """Return the role of a service, in a database with rows that is migrated after the role has got its rights."""
    await raw.execute(BEFORE_LOAD_STATE + ROWS)
    with service_role(database) as role:
        assert await migrate(store) == ["0010 load_state", f"functions {function_set.NUMBER}"]
        yield role.name


async def test_the_release_before_works_between_the_tables_and_the_functions(raw, database):
    await raw.execute(BEFORE_LOAD_STATE + ROWS)
    [names] = [one for one in migrations() if one.name == "load_state"]
    with service_role(database) as role:
        await raw.execute(f"BEGIN; {names.sql}; COMMIT; SET ROLE {role.name}")
        for statement in (OPEN, TAKEN):
            await raw.execute(statement)
        assert await raw.execute(MOVE, "rates", datetime(2026, 11, 2, tzinfo=UTC)) == "INSERT 0 1"
        assert await raw.execute(MOVE, "names", datetime(2026, 11, 2, tzinfo=UTC)) == "INSERT 0 1"
        await raw.execute("RESET ROLE")
    assert await raw.fetchval("SELECT array_agg(DISTINCT state ->> 'upto') FROM dl_load_state") == [
        "2026-11-02T00:00:00+00:00"
    ]


async def test_new_names_of_tables_wait_for_a_commit_of_the_release_before(store, raw, database):
    await raw.execute(BEFORE_LOAD_STATE + ROWS)
    waits = "SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    async with AsyncExitStack() as stack:
        old = await stack.enter_async_context(raw_connection(database.dsn))
        nursery = await stack.enter_async_context(trio.open_nursery())
        await old.execute("SET deadlock_timeout = '10ms'")  # so that this session would be the one that ends
        await old.execute("BEGIN; SELECT FROM dl_etl_history WHERE target = 't' FOR UPDATE")
        nursery.start_soon(migrate, store)
        await until(lambda: raw.fetchval(waits))
        await old.execute(TAKEN)
        assert await old.execute(MOVE, "rates", datetime(2026, 11, 2, tzinfo=UTC)) == "INSERT 0 1"
        await old.execute("COMMIT")
    state = await store.run(aio_load_state, "rates")
    assert state.watermark("rates") == datetime(2026, 11, 2, tzinfo=UTC)


async def test_the_upto_of_a_load_becomes_a_state_of_the_kind_window(upgraded, store):
    state = await store.run(aio_load_state, "rates")
    assert state.state.keys() == {"kind", "upto"}
    assert state.watermark("rates") == datetime(2026, 11, 1, 0, 0, 0, 500_000, tzinfo=UTC)


async def test_the_release_before_reads_and_writes_tables_of_loads_by_former_names(upgraded, store, raw):
    await raw.execute(f"SET ROLE {upgraded}")
    later, newest = datetime(2026, 11, 2, tzinfo=UTC), datetime(2026, 11, 3, tzinfo=UTC)
    assert await raw.execute(MOVE, "rates", later) == "INSERT 0 1"
    assert await raw.execute(MOVE, "rates", datetime(2020, 1, 1, tzinfo=UTC)) == "INSERT 0 0"
    await raw.execute(MOVE, "names", later)
    assert [(await store.run(aio_load_state, load)).watermark(load) for load in ("rates", "names")] == [later, later]
    await store.run(aio_move_state, "rates", window_state(newest), uuid4())
    await store.run(aio_move_state, "orders", {"kind": "checkpoint", "state": 7}, uuid4())
    cursors = await raw.fetch("SELECT load, upto FROM dl_etl_cursors ORDER BY load")
    assert list(map(tuple, cursors)) == [("names", later), ("rates", newest)]
    await raw.execute(OPEN)
    await raw.fetchrow("SELECT last_as_of, columns FROM dl_etl_history WHERE target = 't' FOR UPDATE")
    await raw.execute("UPDATE dl_etl_history SET last_as_of = $1 WHERE target = 't'", later)
    await raw.execute(TAKEN)
    await raw.execute("RESET ROLE")
    assert await raw.fetchval("SELECT last_as_of FROM dl_load_history") == later
    assert await raw.fetchval("SELECT as_of::date::text FROM dl_load_snapshots") == "2026-11-02"
