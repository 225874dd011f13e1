"""Stored rows with names from before a change of names are converted."""

from __future__ import annotations

import json

from dataloader.jobs.limits import Supplier
from dataloader.store.migrations import migrate


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
