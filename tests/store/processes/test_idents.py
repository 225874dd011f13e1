"""Idents of steps identify their external effects in every attempt; after a restore they are not used again."""

from __future__ import annotations

from uuid import uuid4

import pytest
from restores import Backup

from dataloader.jobs.contract import Operator
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.processes.operations import aio_withdraw_audited
from dataloader.store.processes.outbox_rows import Partition, Settled, pass_on, settle, take_deliveries
from dataloader.store.processes.requests import aio_act, aio_ask, aio_take_back
from dataloader.store.processes.steps import StepOutcome, Wakeup, aio_begin, aio_commit

pytestmark = pytest.mark.requirement("P4")

CLAIM = """
UPDATE dl_jobs SET status = 'running', token = token + 1 + (random() * 1e9)::bigint, claimed_by = 'w', waits_for = NULL,
  lease_expires_at = now() + interval '60 s'
WHERE queue = 'process.pay' RETURNING (args ->> 'key')::bigint AS key, job_id, token
"""
MESSAGE = '[{"kind": "call", "type": "pay", "process_id": "other", "method": "add", "args": 1}]'


@pytest.fixture
async def engine(database, raw):
    """Return a driver for one process whose statements are sent by the test."""

    class Engine:
        def __init__(self, opened):
            self.database = opened

        async def ask(self, kind="call", **fields):
            request = ProcessRequest(type="pay", process_id="77", kind=kind, **fields)
            return await self.database.run(aio_ask, request, 60)

        async def claim(self):
            row = await raw.fetchrow(CLAIM)
            return Wakeup(row["key"], row["job_id"], row["token"], crashes=3)

        async def begin(self):
            wakeup = await self.claim()
            [begun] = await self.database.run(aio_begin, [wakeup])
            return wakeup, begun.work

        async def commit(self, wakeup, work, outcome="done", **fields):
            step = StepOutcome(wakeup=wakeup, task_id=work.task_id, outcome=outcome, **fields)
            [committed] = await self.database.run(aio_commit, [step])
            return committed

        async def started(self):
            await self.ask("init")
            await self.commit(*await self.begin())

        async def resume(self):
            return await self.database.run(aio_act, "pay", "77", "resume", 60)

    async with open_database(DatabaseOptions(dsn=database.dsn)) as opened:
        yield Engine(opened)


async def sent(raw):
    rows = await raw.fetch("SELECT kind, ident FROM dl_process_outbox ORDER BY id")
    return [(row["kind"], row["ident"]) for row in rows]


async def test_each_try_of_a_timer_has_its_ident_and_a_resume_has_another(engine, raw):
    await engine.started()
    call = await engine.ask(method="go")
    wakeup, work = await engine.begin()
    assert work.ident == call.ident is not None
    then = await engine.commit(wakeup, work, following="timeout", after_s=0, context='{"n": 1}', go_on=True)
    first = then.work.ident
    assert first not in {None, call.ident}
    again = await engine.commit(wakeup, then.work, "retry", error="no", after_s=0, go_on=True)
    assert (again.work.attempt, again.work.ident) == (1, first)
    # A run whose worker dies is repeated with the same ident.
    wakeup, work = await engine.begin()
    assert (work.task_id, work.ident) == (again.work.task_id, first)
    await engine.commit(wakeup, work, "failed", error="for good")
    backup = Backup()
    await backup.make(raw)
    resumed = []
    for _ in range(2):
        assert (await engine.resume()).verdict == "done"
        resumed.append((await engine.begin())[1].ident)
        await backup.restore(raw)
    assert resumed[0] == resumed[1] != first


@pytest.mark.slow
async def test_a_step_run_again_after_a_restore_has_idents_by_its_content(engine, raw):
    await raw.execute(
        "INSERT INTO dl_process_sinks (sink, kinds, until) VALUES ('books', '{event,failed}', now() + interval '1 h')"
    )
    await engine.started()
    await engine.ask(method="go")
    backup = Backup()
    await backup.make(raw)

    async def step(*, context="1", state="1", events="[1]", messages=MESSAGE):
        await backup.restore(raw)
        wakeup, work = await engine.begin()
        fields = {"context": context, "state": state, "events": events, "messages": messages}
        then = await engine.commit(wakeup, work, following="timeout", after_s=0, go_on=True, **fields)
        return work.ident, then.work.ident, dict(await sent(raw))

    call, timer, told = await step()
    assert (call, timer, told) == await step()
    assert len({call, timer, *told.values()}) == 4
    assert (await step(context="2"))[1] != timer
    assert (await step(state="2"))[1] != timer
    _, same_timer, other = await step(events="[2]", messages=MESSAGE.replace("1", "2"))
    assert same_timer == timer
    assert other["event"] != told["event"]
    assert other["call"] != told["call"]


async def test_a_new_request_under_a_used_number_has_another_ident(engine, raw):
    await engine.started()
    backup = Backup()
    await backup.make(raw)
    before = await engine.ask(method="pay", args=5)
    await backup.restore(raw)
    after = await engine.ask(method="pay", args=5)
    assert after.task_id == before.task_id
    assert after.ident != before.ident


async def test_rows_stored_by_older_programs_keep_working(engine, raw):
    await engine.started()
    await engine.ask(method="go")
    # Rows from before steps had idents.
    await raw.execute("UPDATE dl_process_tasks SET ident = NULL; UPDATE dl_processes SET timer_ident = NULL")
    wakeup, work = await engine.begin()
    assert work.ident is None
    then = await engine.commit(wakeup, work, following="timeout", after_s=0, messages=MESSAGE, go_on=True)
    assert then.work.ident is not None
    assert None not in dict(await sent(raw)).values()


async def test_a_withdrawal_takes_back_no_call_that_has_its_number_after_a_restore(engine, raw):
    await engine.started()
    backup, operator = Backup(), Operator("chief")
    await backup.make(raw)
    mine = await engine.ask(method="pay", args=5)
    await backup.restore(raw)
    other = await engine.ask(method="pay", args=700)
    assert other.task_id == mine.task_id
    assert await aio_take_back(raw, {mine.task_id: mine.ident}, expired=False) == []
    assert await engine.database.run(aio_withdraw_audited, mine.task_id, mine.ident, operator) == []
    assert await raw.fetchval("SELECT count(*) FROM dl_audit") == 0
    assert await raw.fetchval("SELECT status FROM dl_process_tasks WHERE args = '700'") == "waiting"
    assert await aio_take_back(raw, {other.task_id: other.ident}, expired=False) == [other.task_id]


async def test_a_delivery_ends_no_row_that_has_its_number_after_a_restore(engine, raw):
    await raw.execute(
        "INSERT INTO dl_process_sinks (sink, kinds, until) VALUES ('books', '{event}', now() + interval '1 h')"
    )
    await engine.started()
    await engine.ask(method="go")
    backup = Backup()
    await backup.make(raw)

    async def told(amount):
        wakeup, work = await engine.begin()
        await engine.commit(wakeup, work, events=f"[{amount}]", messages=MESSAGE.replace("1", str(amount)))
        number = await raw.fetchval("SELECT partition FROM dl_process_outbox LIMIT 1")
        partitions = [Partition(sink, number, uuid4(), 1) for sink in ("books", "messages")]
        return partitions, [(await take_deliveries(engine.database, one))[0] for one in partitions]

    (books, _), (event, message) = await told(5)
    await backup.restore(raw)
    _, later = await told(700)
    assert [row.id for row in later] == [event.id, message.id]

    async def end(event, message):
        settled = Settled(done={event.id: event.ident})
        assert await settle(engine.database, books, settled, tries=1, base_s=1, cap_s=1)
        request = ProcessRequest.of_message(message.body, message.ident.hex)
        return await pass_on(engine.database, message, request, 60)

    assert await end(event, message) is None
    assert await sent(raw) == [("event", later[0].ident), ("call", later[1].ident)]
    assert (await end(*later)).verdict == "missing"
    assert [kind for kind, _ in await sent(raw)] == ["call"]
