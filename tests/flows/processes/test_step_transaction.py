"""`p.transaction()`: an author's rows and the step's outcome are stored together, or neither is (P13)."""

from __future__ import annotations

import pytest
import trio
from conditions import until

from dataloader import Settings, Tasks, Worker, open_supervisor
from dataloader.flows.processes import Done, Process, Processes, Timer, add_processes
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.store.processes.requests import aio_act, aio_ask
from dataloader.testing import run_step

pytestmark = pytest.mark.requirement("P13")
INSERT = "INSERT INTO ledger VALUES ($1)"


def ledgers(database, raised):
    processes = Processes()
    kind = processes.define("ledger", state=int)

    @kind.init
    async def begin(_p: Process[int]) -> Done:
        return Done(state=0)

    @kind.timeout
    async def tick(_p: Process[int]) -> Done:
        return Done(events=["tick"])

    def written(p, what):
        return Done(what, state=p.state + 1, events=[what], next=Timer(after_s=0))

    @kind.call
    async def well(p: Process[int]) -> None:
        async with p.transaction() as t:
            await t.execute(INSERT, "well")
            t.done = written(p, "well")

    @kind.call
    async def twice(p: Process[int]) -> None:
        async with p.transaction() as t:
            await t.execute(INSERT, "twice")
            t.done = written(p, "twice")
        async with p.transaction():
            pass

    @kind.call
    async def broken(p: Process[int]) -> None:
        async with p.transaction() as t:
            t.done = written(p, "broken")
            await t.execute(INSERT, "broken")
            await t.execute("SELECT 1 / 0")

    @kind.call
    async def nothing(p: Process[int]) -> None:
        async with p.transaction() as t:
            await t.execute(INSERT, "nothing")

    @kind.call
    async def lost(p: Process[int]) -> None:
        try:
            async with p.transaction() as t:
                # As after the end of a lease.
                await trio.to_thread.run_sync(database.psql, "UPDATE dl_jobs SET token = (random() * 1e15)::bigint + 1")
                await t.execute(INSERT, "lost")
                t.done = written(p, "lost")
        except Exception as error:
            raised.append(type(error).__name__)
            raise

    return processes


@pytest.mark.slow
async def test_rows_of_a_step_and_its_outcome_are_stored_together_or_neither(database):
    tasks, raised = Tasks(), []
    add_processes(tasks, ledgers(database, raised))
    database.psql("CREATE TABLE ledger (how text)")

    async def events():
        return database.psql("SELECT string_agg(payload #>> '{}', ' ' ORDER BY event_id) FROM dl_process_events")

    async with open_supervisor(
        Settings(db_dsn=database.dsn, workers=(Worker("process.ledger", 2),)), tasks
    ) as supervisor:

        async def ask(method):
            kind = "call" if method else "init"
            request = ProcessRequest(type="ledger", process_id="1", kind=kind, method=method)
            task_id = (await supervisor.database.run(aio_ask, request, 60)).task_id

            async def row():
                return database.psql(
                    "SELECT status, response, error FROM dl_process_tasks"
                    f" WHERE task_id = {task_id} AND status <> 'waiting'"
                )

            return row if method == "lost" else await until(row)

        await ask(None)
        assert await ask("well") == 'finished|"well"|'
        # Actions of the step after its transaction change nothing.
        assert await ask("twice") == 'finished|"twice"|'
        await until(events, lambda found: found == "well tick twice tick")
        assert database.psql("SELECT aux_state FROM dl_processes") == "2"
        assert "division by zero" in await ask("broken")
        await supervisor.database.run(aio_act, "ledger", "1", "resume", 60)
        assert "done: must be set" in await ask("nothing")
        await supervisor.database.run(aio_act, "ledger", "1", "resume", 60)
        await ask("lost")

        async def is_lost():
            return raised == ["LeaseLost"]

        await until(is_lost)
        assert database.psql("SELECT string_agg(how, ' ') FROM ledger") == "well twice"
        assert await events() == "well tick twice tick"


async def test_a_step_that_is_run_without_a_database_has_no_transaction():
    run = await run_step(next(iter(ledgers(None, []))), "well", state=1)
    assert (run.outcome, run.error.partition(":")[0]) == ("failed", "RuntimeError")
