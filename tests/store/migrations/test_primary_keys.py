"""Primary keys: a publication for all tables makes UPDATE and DELETE fail on a table without one."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.requirement("Q1")

WITHOUT_KEY = """
SELECT c.relname FROM pg_class c
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')
  AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indisvalid)
ORDER BY 1
"""


async def test_every_table_has_a_primary_key(raw):
    assert [row["relname"] for row in await raw.fetch(WITHOUT_KEY)] == []
