"""Idents of steps: what they do outside is known by them, in every try, and after a restore by nothing else."""

from __future__ import annotations

from uuid import uuid4

import pytest
from restores import Backup

from dataloader.jobs.contract import Operator
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.processes.operations import aio_withdraw_audited
from dataloader.store.processes.outbox_rows import Partition, Settled, pass_on, settle, take
from dataloader.store.processes.requests import aio_act, aio_ask, aio_take_back
from dataloader.store.processes.steps import StepOutcome, Wakeup, aio_begin, aio_commit

pytestmark = pytest.mark.requirement("P4")

CLAIM = """
UPDATE dl_jobs SET status = 'running', token = token + 1 + (random() * 1e9)::bigint, claimed_by = 'w', waits_for = NULL,
  lease_expires_at = now() + interval '60 s'
WHERE queue = 'process.pay' RETURNING (args ->> 'key')::bigint AS key, job_id, token
"""
SERVED = "INSERT INTO dl_process_types (type, version, served_until) VALUES ('pay', 1, now() + interval '1 min')"
UNSERVED = "UPDATE dl_process_types SET served_until = now()"
BEGIN_BY_NUMBER = "SELECT * FROM dl_process_begin($1, $2, $3, $4)"
COMMIT_BY_NUMBER = """
SELECT * FROM dl_process_commit($1, $2, $3, $4, ARRAY[$5], '{NULL}', '{no}', '{NULL}', '{NULL}', '{NULL}', '{keep}',
                                '{0}', '{NULL}', '{NULL}', '{true}', '{NULL}', NULL)
"""
MESSAGE = '[{"kind": "call", "type": "pay", "process_id": "other", "method": "add", "args": 1}]'


@pytest.fixture
async def engine(database, raw):
    """One process, whose statements are sent by hand."""

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

        async def begin_by_number(self, wakeup):
            """Begin a step as the release before does."""
            return await raw.fetchrow(BEGIN_BY_NUMBER, [wakeup.key], [wakeup.job_id], [wakeup.token], [3])

        async def commit_by_number(self, wakeup, task_id, outcome):
            return await raw.fetchrow(
                COMMIT_BY_NUMBER, [wakeup.key], [wakeup.job_id], [wakeup.token], [task_id], outcome
            )

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
    # A run whose worker dies is run again, with the same ident.
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


async def test_a_step_that_an_older_program_began_keeps_its_key_in_every_try(engine, raw):
    await engine.started()
    call = await engine.ask(method="go")
    wakeup = await engine.claim()
    begun = await engine.begin_by_number(wakeup)
    assert (begun["verdict"], begun["task_id"], "ident" in begun) == ("step", call.task_id, False)
    # Its worker dies; a newer program runs it again, and sets a timer.
    wakeup, work = await engine.begin()
    assert (work.task_id, work.ident) == (call.task_id, None)
    then = await engine.commit(wakeup, work, following="timeout", after_s=0, go_on=True)
    assert then.work.ident is not None
    # The older program tries the timer again.
    wakeup = await engine.claim()
    begun = await engine.begin_by_number(wakeup)
    assert begun["task_id"] == then.work.task_id
    again = await engine.commit_by_number(wakeup, begun["task_id"], "retry")
    assert (again["verdict"], again["attempt"]) == ("next", 1)
    _, work = await engine.begin()
    assert (work.task_id, work.first_task, work.ident) == (again["task_id"], begun["task_id"], None)


async def test_rows_stored_by_older_programs_keep_working(engine, raw):
    await engine.started()
    await engine.ask(method="go")
    # The rows before the migration.
    await raw.execute("UPDATE dl_process_tasks SET ident = NULL; UPDATE dl_processes SET timer_ident = NULL")
    wakeup, work = await engine.begin()
    assert work.ident is None
    then = await engine.commit(wakeup, work, following="timeout", after_s=0, messages=MESSAGE, go_on=True)
    assert then.work.ident is not None
    assert None not in dict(await sent(raw)).values()


@pytest.mark.slow
@pytest.mark.parametrize("tried", ["killed", "returned", "a timer"])
async def test_a_step_tried_under_its_ident_is_left_to_a_worker_that_knows_it(engine, raw, tried):
    await engine.started()
    await raw.execute(SERVED)
    await engine.ask(method="go")
    wakeup, work = await engine.begin()
    if tried == "returned":
        await engine.commit(wakeup, work, "returned")
    elif tried == "a timer":
        then = await engine.commit(wakeup, work, following="timeout", after_s=0, go_on=True)
        work = then.work
        await engine.commit(wakeup, work, "retry", error="no", after_s=0)
    wakeup = await engine.claim()
    assert (await engine.begin_by_number(wakeup))["verdict"] == "rest"
    job = await raw.fetchrow("SELECT status, waits_for, claimed_by, available_at > now() AS is_later FROM dl_jobs")
    assert tuple(job) == ("queued", "time", None, True)
    assert (await engine.begin())[1].ident == work.ident
    # The last such worker is gone: the step is not stuck.
    await raw.execute(UNSERVED)
    assert (await engine.begin_by_number(await engine.claim()))["verdict"] == "step"
    assert (await engine.begin())[1].ident is None


async def test_a_program_of_the_previous_release_begins_untried_steps(engine, raw):
    await engine.started()
    await raw.execute(SERVED)
    call = await engine.ask(method="go")
    wakeup = await engine.claim()
    begun = await engine.begin_by_number(wakeup)
    assert (begun["verdict"], begun["task_id"]) == ("step", call.task_id)
    other = await engine.ask(method="go")
    then = await engine.commit_by_number(wakeup, call.task_id, "done")
    assert (then["verdict"], then["task_id"]) == ("next", other.task_id)


async def test_an_older_programs_step_is_not_followed_by_one_tried_under_its_ident(engine, raw):
    await engine.started()
    await raw.execute(SERVED)
    await engine.ask(method="go")
    wakeup, work = await engine.begin()
    then = await engine.commit(wakeup, work, following="timeout", after_s=0, go_on=True)
    await engine.commit(wakeup, then.work, "retry", error="no", after_s=3_600)
    call = await engine.ask(method="go")
    wakeup = await engine.claim()
    assert (await engine.begin_by_number(wakeup))["task_id"] == call.task_id
    await raw.execute("UPDATE dl_processes SET timer_at = now()")
    assert (await engine.commit_by_number(wakeup, call.task_id, "done"))["verdict"] == "rest"
    assert (await engine.begin())[1].ident == then.work.ident


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
    # A program of the release before does not know an ident.
    former = "SELECT dl_process_take_back($1, false)"
    assert await raw.fetchval(former, [other.task_id]) == [other.task_id]


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
        return partitions, [(await take(engine.database, one))[0] for one in partitions]

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
    # A program of the release before does not know an ident.
    former = "SELECT dl_process_settle('messages', $1, $2, 1, $3, '{}', '{}', '{}', '{}', 1, 1, 1)"
    assert await raw.fetchval(former, books.number, books.job_id, [message.id])
    assert await sent(raw) == []
