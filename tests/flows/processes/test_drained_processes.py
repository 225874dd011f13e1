"""Programs with durable processes are tested with `drain_queue`: it runs all steps that can run now."""

from __future__ import annotations

import pytest
from payments import Gate, payments

from dataloader import ProcessRequest, Tasks, open_client
from dataloader.flows.processes import add_processes
from dataloader.testing import drain_queue

pytestmark = pytest.mark.slow


@pytest.mark.requirement("P1")
async def test_steps_that_can_run_now_are_run_and_the_process_is_as_they_left_it(database):
    tasks = Tasks()
    add_processes(tasks, payments(Gate()))
    async with open_client(database.dsn) as client:
        ask = client.processes
        started = await ask.ask(ProcessRequest(type="payment", process_id="1", kind="init", args=5))
        assert (await ask.get("payment", "1")).status == "init"
        await drain_queue(database.dsn, tasks)
        assert await ask.wait(started.task_id, timeout_s=0) == "reserved"
        calls = [
            await ask.ask(ProcessRequest(type="payment", process_id="1", kind="call", method=method, args=args))
            for method, args in (("pay", 5), ("fall", "why"))
        ]
        assert [run.error for run in await drain_queue(database.dsn, tasks)] == [None]
        assert await ask.wait(calls[0].task_id, timeout_s=0) == "thanks"
        found = await ask.get("payment", "1")
        assert (found.status, found.detail, found.state["paid"]) == ("error", "why", True)
        assert database.psql("SELECT count(*) FROM dl_jobs") == "0"
