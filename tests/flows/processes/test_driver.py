"""Processes run by a supervisor on a real database: the payment of the plan, from its start to its end."""

from __future__ import annotations

from typing import TypedDict

import attrs
import httpx2
import msgspec
import pytest
import trio
from conditions import until
from payment_processes import newer, older, payments
from proxy import open_proxy
from queue_workers import ANY_CLAIM, LossyConnection

from dataloader import Job, RetryPolicy, Settings, Tasks, Worker, open_supervisor
from dataloader.flows.processes import (
    Done,
    Process,
    Processes,
    Refuse,
    add_processes,
)
from dataloader.flows.processes.stepper import Stepper
from dataloader.store.processes.requests import Request, aio_act, aio_ask

pytestmark = pytest.mark.requirement("P3")


async def ask(supervisor, kind="call", **fields):
    request = Request(type="payment", process_id="77", kind=kind, **fields)
    return (await supervisor.database.run(aio_ask, request, 60)).task_id


async def ended(database, task_id):
    async def row():
        return await trio.to_thread.run_sync(
            database.psql,
            f"SELECT status, response, error FROM dl_process_tasks WHERE task_id = {task_id} AND status <> 'waiting'",
        )

    return await until(row, within_s=10)


def settings(database):
    return Settings(db_dsn=database.dsn, workers=(Worker("process.payment", 4),))


@pytest.mark.slow
async def test_a_payment_is_begun_refused_paid_and_captured(database):
    log, tasks = [], Tasks()
    add_processes(tasks, payments(log))
    async with open_supervisor(settings(database), tasks) as supervisor:
        assert await ended(database, await ask(supervisor, "init", args=5)) == 'finished|"reserved"|'
        assert await ended(database, await ask(supervisor, method="pay", args=4)) == "finished||5 is due"
        assert await ended(database, await ask(supervisor, method="nothing")) == (
            "finished||method: must be a method of payment (pay, hang, wrong), not 'nothing'"
        )
        assert "args: must be" in await ended(database, await ask(supervisor, method="pay", args="five"))
        assert database.psql("SELECT status FROM dl_processes") == "running"


@pytest.mark.slow
@pytest.mark.requirement("P8")
async def test_a_call_sets_the_timer_to_now_and_it_runs_after_the_call(database):
    log, tasks = [], Tasks()
    add_processes(tasks, payments(log, retry=RetryPolicy(base_s=0.01, factor=1)))
    async with (
        open_supervisor(attrs.evolve(settings(database), port=0), tasks, with_web=True) as supervisor,
        httpx2.AsyncClient(base_url=supervisor.url, timeout=30) as client,
    ):
        await ended(database, await ask(supervisor, "init", args=5))
        assert await ended(database, await ask(supervisor, method="pay", args=5)) == 'finished|"thanks"|'

        async def row():
            return database.psql("SELECT timer_kind, last_event_id, aux_state -> 'paid' FROM dl_processes")

        await until(row, lambda found: found == "remove|3|true")
        assert [entry for entry in log if entry[0] == "due"] == [("due", 1), ("due", 2)]
        assert database.psql("SELECT status, waits_for FROM dl_jobs") == "queued|time"

        async def measured():
            return (await client.get("/metrics")).text

        # The row exists before the worker knows it.
        all_stored = 'complete_and_continue",prg_namespace="payment"} 4.0'
        shown = await until(measured, lambda text: all_stored in text)
    for name, labels, times in (
        ("calls_scanning", "", 2),
        ("task_processing", 'task_type="timeout"', 2),
        ("task_completion", 'completion_type="complete_and_continue"', 4),
    ):
        both = ",".join(sorted(filter(None, ['prg_namespace="payment"', labels])))
        assert f"progressor_{name}_duration_ms_count{{{both}}} {times}.0" in shown
    assert 'dataloader_process_steps_total{kind="timeout",outcome="retry",type="payment"} 1.0' in shown


@pytest.mark.slow
async def test_a_process_that_somebody_has_locked_at_any_time_makes_its_steps_all_the_same(database):
    tasks = Tasks()
    add_processes(tasks, payments())
    one = "BEGIN; SELECT FROM dl_processes FOR NO KEY UPDATE; SELECT pg_sleep(0.02); COMMIT;"
    lockers = 3

    async def lock_again_and_again():
        nonlocal lockers
        await trio.to_thread.run_sync(database.psql, one * 50)
        lockers -= 1

    async with open_supervisor(settings(database), tasks) as supervisor:
        await ended(database, await ask(supervisor, "init", args=5))
        async with trio.open_nursery() as nursery:
            for _ in range(lockers):
                nursery.start_soon(lock_again_and_again)
            await trio.sleep(0.3)
            answer = await supervisor.processes.call("payment", "77", "pay", 5)
            assert (answer, lockers) == ("thanks", 3)


@pytest.mark.slow
async def test_an_invalid_outcome_is_the_steps_error_and_can_be_repaired(database):
    tasks = Tasks()
    add_processes(tasks, payments())
    async with open_supervisor(settings(database), tasks) as supervisor:
        await ended(database, await ask(supervisor, "init", args=5))
        found = await ended(database, await ask(supervisor, method="wrong"))
        assert found == "error||unsupported_result: result: must be Done, Refuse or Fail, not str"
        assert database.psql("SELECT status, detail IS NOT NULL FROM dl_processes") == "error|t"
        await ended(database, await ask(supervisor, "repair", args=7))
        assert database.psql("SELECT status, aux_state -> 'amount' FROM dl_processes") == "running|7"


@pytest.mark.slow
async def test_steps_whose_statements_get_no_answer_are_written_once_and_continue(database):
    log, steppers, tasks = [], [], Tasks()
    add_processes(tasks, payments(log, retry=RetryPolicy(base_s=0.01, factor=1)))

    @tasks.task("peek", queue="process.payment")
    async def peek(job: Job) -> None:
        steppers.append(job.resource(Stepper))

    async with open_supervisor(settings(database), tasks) as supervisor:
        await ended(database, await ask(supervisor, "init", args=5))
        await supervisor.jobs.enqueue(peek)

        async def peeked():
            return steppers

        [stepper] = await until(peeked)
        begins, commits = stepper._sessions
        begins._connection = LossyConnection(begins._connection, "dl_process_begin")
        commits._connection = LossyConnection(commits._connection, "dl_process_commit")
        assert await ended(database, await ask(supervisor, method="pay", args=5)) == 'finished|"thanks"|'

        async def row():
            return database.psql("SELECT status, timer_kind, last_event_id FROM dl_processes")

        await until(row, lambda found: found == "running|remove|3")
        assert [entry for entry in log if entry[0] == "due"] == [("due", 1), ("due", 2)]


async def test_an_unstorable_outcome_is_the_steps_error_and_delays_no_other_step(database):
    processes, tasks = Processes(), Tasks()
    kind = processes.define("payment")

    @kind.init
    async def begin(p: Process) -> Done:
        return Done(msgspec.Raw(b"1e200000"))

    @kind.repair
    async def mend(p: Process) -> Refuse:
        return Refuse("no \0")

    add_processes(tasks, processes)
    async with open_supervisor(settings(database), tasks) as supervisor:
        assert "error||unsupported_result" in await ended(database, await ask(supervisor, "init"))
        assert "finished||no" in await ended(database, await ask(supervisor, "repair"))


@pytest.mark.slow
@pytest.mark.requirement("P12")
async def test_a_stopped_step_fails_and_a_drain_gives_its_step_back(database):
    log, tasks = [], Tasks()
    add_processes(tasks, payments(log))
    async with open_supervisor(attrs.evolve(settings(database), drain_timeout_s=0), tasks) as supervisor:
        await ended(database, await ask(supervisor, "init", args=5))
        task = await ask(supervisor, method="hang")

        async def hangs():
            return "hangs" in log

        await until(hangs)
        await supervisor.database.run(aio_act, "payment", "77", "stop", 60)
        assert await ended(database, task) == "error||stopped by an operator"
        await supervisor.database.run(aio_act, "payment", "77", "resume", 60)
        log.clear()
        await ask(supervisor, method="hang")
        await until(hangs)
    assert database.psql("SELECT status, running_task IS NULL, crashes FROM dl_processes") == "running|t|0"
    assert database.psql("SELECT status, waits_for FROM dl_jobs") == "queued|"


@pytest.mark.requirement("P1")
async def test_a_step_reads_pages_of_its_own_events(database):
    processes, tasks, read = Processes(), Tasks(), []
    kind = processes.define("payment")

    @kind.init
    async def begin(_p: Process) -> Done:
        return Done(events=[{"n": n} for n in range(1, 8)])

    @kind.call
    async def look(p: Process) -> Done:
        last = 0
        while page := await p.events(after=last, limit=3):
            read.append([event.payload["n"] for event in page])
            last = page[-1].event_id
        newest = await p.events(before=7, limit=2, newest_first=True)
        return Done([event.event_id for event in newest], events=["seen only later"])

    add_processes(tasks, processes)
    async with open_supervisor(settings(database), tasks) as supervisor:
        await ended(database, await ask(supervisor, "init"))
        assert await ended(database, await ask(supervisor, method="look")) == "finished|[6, 5]|"
    assert read == [[1, 2, 3], [4, 5, 6], [7]]


@pytest.mark.slow
@pytest.mark.requirement("P11")
async def test_a_newer_version_takes_over_states_of_older_ones_for_good(database):
    log, old, stuck, new = [], Tasks(), Tasks(), Tasks()
    add_processes(old, older(log))
    add_processes(stuck, newer(upgrades=False))
    add_processes(new, newer(upgrades=True))

    async def until_claimed(since):
        """Wait for a claim that began after `since`: the last statement of the lock session."""
        claims = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE '% locks'"
            f" AND query ~ '{ANY_CLAIM}' AND state = 'idle' AND query_start > '{since}'"
        )

        async def claimed():
            return database.psql(claims)

        await until(claimed, lambda found: found == "1")

    async with open_supervisor(settings(database), old) as supervisor:
        await ended(database, await ask(supervisor, "init"))
    async with open_supervisor(settings(database), stuck) as supervisor:
        first = await ask(supervisor, method="look")
        await until_claimed(database.psql("SELECT clock_timestamp()"))
        assert database.psql("SELECT status, waits_for, attempt FROM dl_jobs") == "queued||0"
    async with open_supervisor(settings(database), new) as supervisor:
        assert await ended(database, first) == "finished|5|"
        assert database.psql("SELECT version, aux_state -> 'amount' FROM dl_processes") == "2|5"
        assert database.psql("SELECT task, waits_for FROM dl_jobs") == "process.payment.v2|time"
    async with open_supervisor(settings(database), old) as supervisor:
        await ask(supervisor, method="look")
        await until_claimed(database.psql("SELECT clock_timestamp()"))
        assert log == []


class PaymentDict(TypedDict):
    amount: int


@pytest.mark.slow
@pytest.mark.requirement("P11")
@pytest.mark.parametrize("options", [{}, {"state": PaymentDict}], ids=["no state=", "TypedDict"])
async def test_a_process_whose_state_is_plain_json_is_upgraded(database, options):
    old, new, processes = Tasks(), Tasks(), Processes()
    add_processes(old, older([]))
    kind = processes.define("payment", version=2, **options)
    kind.upgrade(lambda state, _version: {"amount": state["cents"] // 100})

    @kind.call
    async def look(p: Process) -> Done:
        return Done(p.state)

    add_processes(new, processes)
    async with open_supervisor(settings(database), old) as supervisor:
        await ended(database, await ask(supervisor, "init"))
    async with open_supervisor(settings(database), new) as supervisor:
        for _ in range(2):
            assert await ended(database, await ask(supervisor, method="look")) == 'finished|{"amount": 5}|'
    stored = database.psql("SELECT status, version, aux_state FROM dl_processes")
    assert stored == 'running|2|{"amount": 5}'


@pytest.mark.full
@pytest.mark.requirement("P7")
@pytest.mark.parametrize("silent", ["begin", "commit"])
async def test_a_run_whose_lease_ends_in_a_waiting_statement_is_stopped_and_replaced(database, silent):
    log, tasks = [], Tasks()
    add_processes(tasks, payments(log, on_crash="again"))

    async def lease():
        return database.psql("SELECT lease_expires_at < now() - interval '1 s' FROM dl_jobs")

    async with open_proxy(database.dsn) as proxy:
        short = attrs.evolve(settings(database), db_dsn=proxy.dsn, default_lease_s=3, heartbeat_s=1, reaper_period_s=1)
        async with open_supervisor(short, tasks) as supervisor:
            proxy.freeze_at(f"{silent}s", f"dl_process_{silent}".encode())
            request = Request(type="payment", process_id="77", kind="init", args=5)
            task_id = (await supervisor.database.run(aio_ask, request, 3)).task_id
            await until(proxy.is_frozen)
            proxy.freeze()
            await until(lease, lambda found: found == "t", within_s=30)
            proxy.thaw()
            assert await ended(database, task_id) == 'finished|"reserved"|'
    # An error in the program would have another text.
    said = "error = 'no heartbeat succeeded: the lease was lost' OR error LIKE 'worker lost: the lease of %'"
    assert database.psql(f"SELECT count(*) FROM dl_errors WHERE NOT ({said})") == "0"
