"""Output for a new user at the first start."""

from __future__ import annotations

import pytest

from dataloader.store.migrations import migrations


@pytest.mark.slow
@pytest.mark.requirement("Q1")
async def test_the_migration_of_an_empty_database_is_one_line_of_the_log(serve, empty_database):
    service = await serve(dsn=empty_database.dsn)
    about = [line for line in service.lines if "schema" in line["event"] or "migration" in line]
    assert [line["event"] for line in about] == ["the schema is up to date"]
    # The functions count as one.
    assert about[0]["migrations"] == len(migrations()) + 1
