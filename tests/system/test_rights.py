"""A service whose role does not own the tables, with the rights from docs/security.md."""

from __future__ import annotations

import pytest
from roles import service_role

pytestmark = [pytest.mark.full, pytest.mark.requirement("Q16")]


@pytest.mark.parametrize("migrate", ["false", "true"])
async def test_a_service_with_the_rights_of_the_page_runs_jobs(serve, database, add, row_when, client_of, migrate):
    with service_role(database) as role:
        service = await serve(dsn=role.dsn, migrate=migrate)
        done, waits, canceled = await add("quick"), await add("sleep", {"s": 3_600}), await add("sleep", {"s": 3_600})
        await row_when(done, "succeeded")
        await row_when(canceled, "running")
        async with client_of(service) as client:
            for action in (f"jobs/{canceled}/cancel", "queues/q/pause", "queues/q/resume"):
                assert (await client.post(f"/api/v1/{action}")).status_code < 300
            assert len((await client.get("/api/v1/audit")).json()["audit"]) == 3
        await row_when(canceled, "canceled")
        await row_when(waits, "running")
        service.signal(15)
        assert await service.exit_code(within_s=60) == 0
        assert [line for line in service.lines if line["level"] in {"warning", "error", "critical"}] == []
