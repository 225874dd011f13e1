"""Adjustable clock of the database, for tests of its jumps. A plugin of tests/conftest.py."""

from __future__ import annotations

import pytest
import trio
from databases import raw_connection

DATABASES_CLOCKS = {"now": "STABLE", "statement_timestamp": "STABLE", "clock_timestamp": "VOLATILE"}
AGAIN_S = 0.2
SET_CLOCK = """
CREATE OR REPLACE FUNCTION other_clock.{name}() RETURNS timestamptz LANGUAGE sql {volatility}
AS 'SELECT pg_catalog.{name}() + interval ''{ahead_s} s''';
"""
USE_THE_OTHER_CLOCK = """
DO $$
DECLARE
  v_function regprocedure;
BEGIN
  EXECUTE format('ALTER DATABASE %I SET search_path = public, other_clock, pg_catalog', current_database());
  FOR v_function IN SELECT oid FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND proname LIKE 'dl\\_%' LOOP
    EXECUTE format('ALTER FUNCTION %s SET search_path = public, other_clock, pg_catalog, pg_temp', v_function);
  END LOOP;
END $$
"""
"""Makes `now()` another schema's in the queue's functions, and in all sessions that begin from now on."""


@pytest.fixture
async def set_clock(database):
    """Return a function that moves the database's clock ahead for the product; `raw` has the machine's clock.

    The product's own statements run with another `now()`. To move the rows instead would not be a jump for the reaper.
    """

    async def set_clock(ahead_s, *, sessions_end=False):
        statements = [
            SET_CLOCK.format(name=name, volatility=volatility, ahead_s=ahead_s)
            for name, volatility in DATABASES_CLOCKS.items()
        ]
        # PostgreSQL may miss a plan with the former clock that a session is about to save; the second time finds it.
        # Sessions that the test ends immediately afterwards have no such plan.
        await connection.execute("".join(statements))
        if not sessions_end:
            await trio.sleep(AGAIN_S)
            await connection.execute("".join(statements))

    async with raw_connection(database.dsn) as connection:
        await connection.execute("CREATE SCHEMA other_clock")
        await set_clock(0, sessions_end=True)
        await connection.execute(USE_THE_OTHER_CLOCK)
        yield set_clock
