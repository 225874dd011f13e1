"""Any process runs bulk operations, woken by a notification, and continues those of a process that has died (U16)."""

from __future__ import annotations

import pytest
from conditions import until

from dataloader import Tasks
from dataloader.jobs.contract import Change
from dataloader.jobs.listings import JobFilter

pytestmark = [pytest.mark.slow, pytest.mark.requirement("E11")]

MANY = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, keyed, waits_for, available_at)
SELECT gen_random_uuid(), 'later', 't', i::text, false, 'time', now() + interval '1 day'
FROM generate_series(1, 1600) AS i
"""


async def test_u16_an_act_is_done_at_once_by_processes_that_may_be_cut_off_anywhere(open_worker, settled, raw):
    await raw.execute(MANY)
    async with open_worker(Tasks()) as first, open_worker(Tasks()) as second:
        await settled(first)
        await settled(second)
        act = await first.bulk.start(Change(action="cancel"), JobFilter(queue="later"))
        assert act.jobs == 1_600

        async def found():
            return await raw.fetchrow("SELECT * FROM dl_bulk WHERE bulk_id = $1", act.bulk_id)

        await until(found, lambda found: found["done"] > 0)
        await raw.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE '% pool'"
        )
        ended = await until(found, lambda found: found["ended_at"] is not None)
        assert (ended["error"], ended["done"], ended["changed"]) == (None, 1_600, 1_600)
    assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'canceled'") == 1_600
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'canceled'") == 1_600
