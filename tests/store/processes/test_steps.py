"""Steps of processes by SQL alone: requests, begins and commits, and the resulting rows."""

from __future__ import annotations

from contextlib import asynccontextmanager
from datetime import UTC, datetime
from uuid import UUID

import pytest

from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.processes.requests import Request, aio_act, aio_ask
from dataloader.store.processes.steps import StepOutcome, Wakeup, aio_begin, aio_commit

pytestmark = pytest.mark.requirement("P4")


class Engine:
    """Actions of a driver, one at a time."""

    def __init__(self, database, sql):
        self.database = database
        self.sql = sql

    async def ask(self, kind="call", **fields):
        request = Request(type="pay", process_id="77", kind=kind, **fields)
        return await self.database.run(aio_ask, request, 60)

    async def act(self, act):
        return await self.database.run(aio_act, "pay", "77", act, 60)

    def claim(self):
        """Take the wake-up job like a claim."""
        row = self.sql(
            "UPDATE dl_jobs SET status = 'running', token = (random() * 1e15)::bigint + 1, claimed_by = 'w',"
            " lease_expires_at = now() + interval '60 s'"
            " WHERE queue = 'process.pay' AND status = 'queued' AND waits_for IS NULL"
            " RETURNING args ->> 'key', job_id, token"
        )
        if not row:
            return None
        key, job_id, token = row.split("|")
        return Wakeup(int(key), UUID(job_id), int(token))

    async def begin(self, wakeup):
        [begun] = await self.database.run(aio_begin, [wakeup])
        return begun

    async def commit(self, wakeup, task_id, outcome="done", **fields):
        [committed] = await self.database.run(
            aio_commit, [StepOutcome(wakeup=wakeup, task_id=task_id, outcome=outcome, **fields)]
        )
        return committed

    def process(self, columns="status, last_event_id, aux_state, timer_task IS NOT NULL, running_task IS NOT NULL"):
        return self.sql(f"SELECT {columns} FROM dl_processes WHERE removed_at IS NULL")

    def jobs(self):
        return self.sql("SELECT status, waits_for FROM dl_jobs")


@pytest.fixture
def open_engine(database):
    @asynccontextmanager
    async def opened():
        async with open_database(DatabaseOptions(dsn=database.dsn)) as opened_database:
            yield Engine(opened_database, database.psql)

    return opened


async def started(engine, **fields):
    assert (await engine.ask("init", args={"amount": 5})).verdict == "added"
    wakeup = engine.claim()
    begun = await engine.begin(wakeup)
    assert (begun.verdict, begun.work.kind, begun.work.args) == ("step", "init", {"amount": 5})
    return await engine.commit(wakeup, begun.work.task_id, **fields), wakeup


@pytest.mark.requirement("P1")
async def test_a_process_is_started_called_and_rests_without_a_job(open_engine):
    async with open_engine() as engine:
        committed, _ = await started(engine, state='{"amount": 5}', events='["reserved"]', response='"ok"')
        assert (committed.verdict, committed.last_event_id) == ("rest", 1)
        assert engine.process() == 'running|1|{"amount": 5}|f|f'
        assert engine.jobs() == ""
        assert (await engine.ask(method="pay", args=5)).verdict == "added"
        wakeup = engine.claim()
        begun = await engine.begin(wakeup)
        assert (begun.work.kind, begun.work.method, begun.snapshot.aux_state) == ("call", "pay", {"amount": 5})
        assert (await engine.commit(wakeup, begun.work.task_id, response='"thanks"')).verdict == "rest"
        assert engine.sql("SELECT kind, status, response FROM dl_process_tasks ORDER BY task_id") == (
            'init|finished|"ok"\ncall|finished|"thanks"'
        )


@pytest.mark.requirement("P5")
async def test_calls_go_before_a_timer_that_is_due_and_the_oldest_first(open_engine):
    async with open_engine() as engine:
        _, wakeup = await started(engine, following="timeout", after_s=0.0, go_on=False)
        assert engine.jobs() == "queued|"
        first, second = [(await engine.ask(method=name)).task_id for name in "ab"]
        wakeup = engine.claim()
        begun = await engine.begin(wakeup)
        assert begun.work.task_id == first
        then = await engine.commit(wakeup, first, go_on=True)
        assert (then.verdict, then.work.task_id, then.work.method) == ("next", second, "b")
        then = await engine.commit(wakeup, second, go_on=True)
        assert (then.verdict, then.work.kind) == ("next", "timeout")
        assert (await engine.commit(wakeup, then.work.task_id, go_on=True)).verdict == "rest"
        assert engine.process() == "running|0||f|f"
        assert engine.jobs() == ""


@pytest.mark.requirement("P5")
async def test_a_timer_waits_with_the_job_and_a_call_wakes_it_and_may_replace_it(open_engine):
    async with open_engine() as engine:
        await started(engine, following="timeout", after_s=900.0, context='{"c": 1}')
        assert engine.jobs() == "queued|time"
        assert (await engine.ask(method="a")).verdict == "added"
        assert engine.jobs() == "queued|"
        wakeup = engine.claim()
        begun = await engine.begin(wakeup)
        assert (await engine.commit(wakeup, begun.work.task_id, following="timeout", after_s=60.0)).verdict == "rest"
        assert engine.sql("SELECT kind, status FROM dl_process_tasks ORDER BY task_id") == (
            "init|finished\ntimeout|cancelled\ncall|finished"
        )
        assert engine.process("timer_at < now() + interval '61 s'") == "t"


@pytest.mark.requirement("P6")
async def test_a_timer_is_retried_then_fails_and_a_resume_tries_it_again(open_engine):
    async with open_engine() as engine:
        _, wakeup = await started(engine, following="timeout", after_s=0.0)
        wakeup = engine.claim()
        begun = await engine.begin(wakeup)
        again = await engine.commit(wakeup, begun.work.task_id, "retry", error="no", after_s=0.0, go_on=True)
        assert (again.verdict, again.work.attempt, again.work.first_task) == ("next", 1, begun.work.task_id)
        await engine.ask(method="late")
        failed = await engine.commit(wakeup, again.work.task_id, "failed", error="no more")
        assert failed.verdict == "rest"
        assert len(failed.told) == 1
        assert engine.process("status, detail, corrupted_by") == f"error|no more|{again.work.task_id}"
        assert (await engine.ask(method="a")).verdict == "status"
        assert (await engine.act("resume")).verdict == "done"
        assert (await engine.act("resume")).verdict == "busy"
        wakeup = engine.claim()
        begun = await engine.begin(wakeup)
        assert (begun.work.kind, begun.work.attempt, begun.snapshot.status) == ("timeout", 0, "error")
        await engine.commit(wakeup, begun.work.task_id)
        assert engine.process("status, detail, corrupted_by, previous_status") == "running|||error"


@pytest.mark.requirement("P6")
async def test_a_repair_fixes_a_process_and_a_failed_repair_keeps_the_first_failure(open_engine):
    async with open_engine() as engine:
        _, wakeup = await started(engine, following="timeout", after_s=0.0)
        wakeup = engine.claim()
        begun = await engine.begin(wakeup)
        await engine.commit(wakeup, begun.work.task_id, "failed", error="broken")
        assert (await engine.ask("repair", args=1)).verdict == "added"
        assert (await engine.ask("repair", args=2)).verdict == "busy"
        wakeup = engine.claim()
        repair = await engine.begin(wakeup)
        assert repair.work.kind == "repair"
        await engine.commit(wakeup, repair.work.task_id, "failed", error="not so")
        assert engine.process("status, detail") == "error|broken"
        await engine.ask("repair", args=3)
        wakeup = engine.claim()
        repair = await engine.begin(wakeup)
        mended = await engine.commit(wakeup, repair.work.task_id, go_on=True)
        assert (mended.verdict, mended.work.kind) == ("next", "timeout")
        assert engine.process("status, detail") == "running|"


@pytest.mark.requirement("P7")
async def test_a_step_that_lost_its_worker_is_a_zombie_or_is_run_again_as_often_as_allowed(open_engine):
    async with open_engine() as engine:
        await started(engine)
        call = (await engine.ask(method="a")).task_id
        other = (await engine.ask(method="b")).task_id
        wakeup = engine.claim()
        assert (await engine.begin(wakeup)).work.task_id == call
        engine.sql("UPDATE dl_jobs SET status = 'queued'")
        second = engine.claim()
        begun = await engine.begin(Wakeup(second.key, second.job_id, second.token, 1))
        assert (begun.verdict, begun.work.task_id) == ("step", call)
        assert (await engine.commit(wakeup, call)).verdict == "void"
        engine.sql("UPDATE dl_jobs SET status = 'queued'")
        third = engine.claim()
        dead = await engine.begin(Wakeup(third.key, third.job_id, third.token, 1))
        assert (dead.verdict, sorted(dead.told)) == ("zombie", [call, other])
        assert engine.process("status, detail, corrupted_by") == f"error|zombie detected|{call}"
        assert engine.jobs() == ""
        assert (await engine.act("resume")).verdict == "done"
        assert engine.process("status, detail, corrupted_by") == "running||"


@pytest.mark.requirement("P7")
async def test_a_timer_that_kills_its_worker_each_time_is_detected_despite_calls(open_engine):
    async with open_engine() as engine:
        await started(engine, following="timeout", after_s=0.0)
        wakeup = engine.claim()
        timer = (await engine.begin(wakeup)).work.task_id
        for crash in (1, 2):
            await engine.ask(method="a")
            engine.sql("UPDATE dl_jobs SET status = 'queued'")
            wakeup = engine.claim()
            begun = await engine.begin(Wakeup(wakeup.key, wakeup.job_id, wakeup.token, 1))
            assert (begun.verdict, begun.work and begun.work.task_id) == (
                ("step", timer) if crash == 1 else ("zombie", None)
            )


@pytest.mark.requirement("P2")
async def test_a_call_readies_a_job_whose_due_timer_was_not_readied_yet(open_engine):
    async with open_engine() as engine:
        await started(engine, following="timeout", after_s=900.0)
        engine.sql("UPDATE dl_jobs SET available_at = clock_timestamp() + interval '20 ms'")
        engine.sql("SELECT pg_sleep(0.05)")
        assert engine.claim() is None
        await engine.ask(method="a")
        assert engine.jobs() == "queued|"
        assert (await engine.begin(engine.claim())).work.method == "a"


async def test_a_drain_takes_the_mark_back_and_the_step_runs_elsewhere(open_engine):
    async with open_engine() as engine:
        await started(engine)
        call = (await engine.ask(method="a")).task_id
        wakeup = engine.claim()
        await engine.begin(wakeup)
        assert (await engine.commit(wakeup, call, "returned")).verdict == "rest"
        assert engine.jobs() == "queued|"
        again = engine.claim()
        assert (await engine.begin(again)).work.task_id == call
        assert engine.process("crashes") == "0"


@pytest.mark.requirement("P2")
async def test_a_key_stands_for_one_request_and_another_one_is_a_conflict(open_engine):
    async with open_engine() as engine:
        first = await engine.ask("init", args=1, key="k")
        assert await engine.ask("init", args=1, key="k") == type(first)("again", None, first.task_id, first.ident)
        assert (await engine.ask("init", args=2, key="k")).verdict == "conflict"
        assert (await engine.ask("init", args=1, key="other")).verdict == "exists"
        assert (await engine.ask(method="a")).verdict == "status"
        assert (await engine.ask(method="a", may_start=True)).verdict == "added"


@pytest.mark.requirement("P2")
async def test_a_call_can_start_what_is_missing_and_the_init_goes_first(open_engine):
    async with open_engine() as engine:
        assert (await engine.ask(method="a")).verdict == "missing"
        call = await engine.ask(method="a", may_start=True, start={"n": 1})
        wakeup = engine.claim()
        begun = await engine.begin(wakeup)
        assert (begun.work.kind, begun.work.args) == ("init", {"n": 1})
        then = await engine.commit(wakeup, begun.work.task_id, go_on=True)
        assert then.work.task_id == call.task_id


async def test_a_removed_process_answers_the_waiting_callers_and_frees_its_id(open_engine):
    async with open_engine() as engine:
        await started(engine, following="timeout", after_s=900.0)
        call = (await engine.ask(method="a")).task_id
        removed = await engine.act("remove")
        assert (removed.verdict, removed.told) == ("done", [call])
        assert (engine.jobs(), engine.process()) == ("", "")
        assert (await engine.act("remove")).verdict == "missing"
        assert (await engine.ask("init")).verdict == "added"


async def test_a_step_can_end_the_process_and_waiting_calls_are_answered(open_engine):
    async with open_engine() as engine:
        await started(engine)
        call = (await engine.ask(method="a")).task_id
        other = (await engine.ask(method="b")).task_id
        wakeup = engine.claim()
        await engine.begin(wakeup)
        gone = await engine.commit(wakeup, call, following="gone", response="1")
        assert (gone.verdict, gone.told) == ("gone", [other])
        assert (engine.jobs(), engine.process()) == ("", "")


async def test_a_call_that_has_expired_never_runs(open_engine):
    async with open_engine() as engine:
        await started(engine)
        late = (await engine.ask(method="late", expires_at=datetime(2020, 1, 1, tzinfo=UTC))).task_id
        call = (await engine.ask(method="a")).task_id
        wakeup = engine.claim()
        begun = await engine.begin(wakeup)
        assert (begun.work.task_id, begun.told) == (call, [late])


async def test_a_wake_up_job_that_others_have_ended_is_replaced(open_engine):
    async with open_engine() as engine:
        await started(engine, following="timeout", after_s=900.0)
        engine.sql("UPDATE dl_jobs SET status = 'canceled', finished_at = now()")
        await engine.ask(method="a")
        wakeup = engine.claim()
        assert (await engine.begin(wakeup)).work.method == "a"


@pytest.mark.slow
@pytest.mark.requirement("P11")
@pytest.mark.parametrize("ends", ["done", "returned", "failed"])
async def test_the_job_of_a_process_has_the_version_that_wrote_its_state(open_engine, ends):
    async with open_engine() as engine:
        await started(engine, following="timeout", after_s=900.0)
        first, second = [(await engine.ask(method=name)).task_id for name in "ab"]
        wakeup = engine.claim()
        await engine.begin(wakeup)
        assert engine.sql("SELECT task FROM dl_jobs") == "process.pay.v1"
        then = await engine.commit(wakeup, first, state="1", version=2, go_on=True)
        assert then.work.task_id == second
        # If the worker dies now, an older one must not take the job.
        assert engine.sql("SELECT task, status FROM dl_jobs") == "process.pay.v2|running"
        await engine.commit(wakeup, second, ends, error="no" if ends == "failed" else None)
        assert engine.sql("SELECT task FROM dl_jobs") == ("" if ends == "failed" else "process.pay.v2")
        assert engine.process("version") == "2"
