"""Older copies of the tables are restored in place, at random moments, under running workers and steps (F46)."""

from __future__ import annotations

import random
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import attrs
import pytest
import trio
from conditions import until
from logged import capture_logs
from restores import Backup

from dataloader import Settings, Sink, Tasks, Worker, open_supervisor
from dataloader.flows.processes import Delivery, Done, Process, Processes, Timer, add_processes
from dataloader.jobs.errors import DataloaderError
from dataloader.jobs.model import ClaimedJob

pytestmark = [pytest.mark.full, pytest.mark.requirement("Q9")]

RESTORES, ACTIONS = 5, 20
KEYS, PROCESSES = 3, 3
OPEN = "SELECT count(*) FROM dl_jobs WHERE queue = 'q' AND status IN ('queued', 'running')"
STIRRING = """
SELECT (SELECT count(*) FROM dl_process_tasks WHERE status = 'waiting') + (SELECT count(*) FROM dl_process_outbox)
  + (SELECT count(*) FROM dl_processes WHERE running_task IS NOT NULL OR timer_task IS NOT NULL)
"""
DUE = """
UPDATE dl_jobs SET waits_for = NULL WHERE status = 'queued' AND waits_for = 'time' AND available_at <= now()
"""
FORGED = "SELECT job_id FROM dl_jobs WHERE queue = 'q' AND status = 'succeeded' AND result #>> '{}' <> token::text"


@attrs.define(eq=False)
class Ran:
    """Run of a handler, from its worker's view."""

    worker: int
    job_id: object
    token: int
    key: str | None
    is_live: bool = True


@attrs.define(eq=False)
class Ledger:
    """View of an external system: runs, and the meaning of each key of a step or a delivery."""

    runs: list[Ran] = attrs.field(factory=list)
    faults: list[str] = attrs.field(factory=list)
    meanings: defaultdict = attrs.field(factory=lambda: defaultdict(set))
    may_end: trio.Event = attrs.field(factory=trio.Event)

    def live(self):
        return [run for run in self.runs if run.is_live]

    def begins(self, run):
        if any(run.token == other.token for other in self.runs):
            self.faults.append(f"the token {run.token} begins twice")
        for other in self.live():
            if other.job_id == run.job_id and other.worker == run.worker:
                self.faults.append(f"job {run.job_id} runs twice in one process")
            if run.key is not None and other.key == run.key:
                self.faults.append(f"two runs of the key {run.key}")
        self.runs.append(run)


def tasks_of(ledger, worker):
    """Return tasks whose result is the token of their run, and processes that pay, confirm by a timer, and pass on."""
    tasks, processes = Tasks(), Processes()

    async def work(job, key=None):
        run = Ran(worker, job.job_id, job.resource(ClaimedJob).token, key)
        ledger.begins(run)
        try:
            if job.args.get("long"):
                await ledger.may_end.wait()
            else:
                await trio.sleep(job.args["s"])
            return str(run.token)
        finally:
            with trio.move_on_after(0.05, shield=True):
                await trio.sleep(0.02)  # the time of its cleanup
            run.is_live = False

    @tasks.task("plain", queue="q")
    async def plain(job):
        return await work(job)

    @tasks.task("keyed", queue="q", lock_key="key-{key}")
    async def keyed(job):
        return await work(job, job.args["key"])

    kind = processes.define("pay", state=int, on_crash="again")

    @kind.init
    async def begin(_p: Process[int]) -> Done:
        return Done(state=0, events=["new"])

    @kind.call
    async def pay(p: Process[int], amount: int) -> Done:
        ledger.meanings[p.step_key].add(("pay", p.process_id, amount))
        await trio.sleep(0.01)
        if amount % 3 == 0:
            p.call(kind, f"{p.process_id}-of", "pay", amount + 1, start=None)
        total = p.state + amount
        return Done(state=total, events=[amount], next=Timer(after_s=0.05, context={"amount": amount, "total": total}))

    @kind.timeout
    async def confirm(p: Process[int]) -> Done:
        ledger.meanings[p.step_key].add(("confirm", p.process_id, *p.context.values()))
        return Done(events=[f"confirmed {p.context['total']}"])

    @processes.sink("books")
    async def book(delivery: Delivery) -> None:
        ledger.meanings[f"sink {delivery.key}"].add((delivery.process_id, delivery.kind, str(delivery.payload)))

    add_processes(tasks, processes)
    return tasks


def settings(database):
    return Settings(
        db_dsn=database.dsn,
        workers=(Worker("q", 60), Worker("process.pay", 4), Worker("deliveries", 4)),
        sinks=(Sink(name="books"),),
        port=0,
        heartbeat_s=1,
        default_lease_s=5,
        reaper_period_s=0.5,
        poll_s=0.1,
        claim_backoff_s=0.5,
    )


def soon(choice):
    """Return now, or a time so late that a copy has the job as queued while it runs when the copy is restored."""
    return datetime.now(UTC) + timedelta(seconds=choice.random()) if choice.random() < 0.6 else None


async def act(choice, supervisor):
    """Do something that programs do; a restore may lose interrupted work."""
    with suppress(DataloaderError):
        match choice.randrange(5):
            case 0 | 1:
                for _ in range(4):
                    args = {"long": True} if choice.random() < 0.5 else {"s": choice.random()}
                    await supervisor.jobs.enqueue("plain", args, available_at=soon(choice))
            case 2:
                args = {"long": True} if choice.random() < 0.3 else {"s": choice.random()}
                args["key"] = f"k{choice.randrange(KEYS)}"
                await supervisor.jobs.enqueue("keyed", args, available_at=soon(choice))
            case _:
                process_id, amount = f"p{choice.randrange(PROCESSES)}", choice.randrange(100)
                await supervisor.processes.call("pay", process_id, "pay", amount, start=None, timeout_s=0)


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_restore_doubles_a_run_gives_a_key_out_again_or_leaves_anything_stuck(database, raw, seed):
    choice, ledger = random.Random(seed), Ledger()
    with capture_logs():
        async with (
            open_supervisor(settings(database), tasks_of(ledger, 1), with_web=False) as first,
            open_supervisor(settings(database), tasks_of(ledger, 2), with_web=False) as second,
        ):
            backups = [Backup(0)]
            await backups[0].make(raw)
            for restore in range(1, RESTORES + 1):
                for step in range(ACTIONS):
                    await act(choice, choice.choice([first, second]))
                    await trio.sleep(choice.random() / 15)
                    if step == ACTIONS // 2:
                        backups.append(Backup(restore))
                        await backups[-1].make(raw)
                await choice.choice(backups).restore(raw)
                await raw.execute(DUE)  # like a stager at this moment

            async def twice():
                """Return the jobs with two live runs: the former one is stopped at its worker's next heartbeat."""
                jobs = [run.job_id for run in ledger.live()]
                return {job_id for job_id in jobs if jobs.count(job_id) > 1}

            await until(twice, lambda found: not found)

            async def strangers():
                """Return live runs whose rows the restore has removed, or reset to a former state."""
                rows = {row["token"] for row in await raw.fetch("SELECT token FROM dl_jobs WHERE status = 'running'")}
                return [run.token for run in ledger.live() if run.token not in rows]

            await until(strangers, lambda found: not found)
            ledger.may_end.set()
            for what in (OPEN, STIRRING):
                await until(lambda what=what: raw.fetchval(what), lambda left: left == 0)
            assert await raw.fetch(FORGED) == []
            statuses = await raw.fetch("SELECT status::text, count(*) FROM dl_jobs WHERE queue = 'q' GROUP BY 1")
            assert {row["status"] for row in statuses} <= {"succeeded"}
            assert await raw.fetchval("SELECT count(*) FROM dl_processes WHERE status = 'error'") == 0
            # This reads private fields: a process shows nowhere what it keeps in memory of ended jobs.
            assert not first._parts.runs._newest
            assert not second._parts.runs._newest
    assert ledger.faults == []
    assert {key: meant for key, meant in ledger.meanings.items() if len(meant) > 1} == {}
    assert len(ledger.runs) > 0 < len(ledger.meanings)
