"""Loads whose supplier's limits the database cannot evaluate (S4)."""

from __future__ import annotations

import pytest
from conditions import patience_s, until, when_ended
from etl_tasks import items_load

from dataloader import Tasks
from dataloader.flows.etl import add_loads

pytestmark = pytest.mark.slow


@pytest.mark.requirement("S4")
async def test_a_load_of_a_bad_supplier_waits_until_it_is_corrected_and_others_load(items, supervised, raw):
    items.records = [{"id": 1, "day": "2026-01-01"}]
    tasks = Tasks()
    add_loads(tasks, items_load(items.service.url, windows=None))
    async with supervised(tasks) as supervisor:
        first = await supervisor.jobs.enqueue("items", queue="q")
        assert (await when_ended(supervisor, first.job_id, within_s=patience_s())).status == "succeeded"
        source = await raw.fetchval("SELECT source FROM dl_sources")
        await raw.execute("UPDATE dl_sources SET periods = '{[0,10080)}', zone = 'Nowhere/Land'")
        load = (await supervisor.jobs.enqueue("items", queue="q")).job_id

        async def waits_for():
            progress = (await supervisor.jobs.get(load)).progress or {}
            return (progress.get("waiting") or {}).get("for"), (progress.get("waiting") or {}).get("source")

        await until(waits_for, lambda found: found == ("error", source))
        [supplier] = (await supervisor.limits.suppliers()).suppliers
        assert supplier.closed == "error"
        await raw.execute("UPDATE dl_sources SET zone = 'UTC'")
        assert (await when_ended(supervisor, load, within_s=patience_s())).status == "succeeded"
