"""One lock_key, one running job, in all processes; a waiting job starts as soon as the key is free (Q7)."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio
from conditions import patience_s, until, when_ended
from databases import raw_connection
from proxy import open_proxy

from dataloader import NewJob, Snooze, Tasks
from dataloader.actors.claim_cursor import MAX_LOOK


class Ledger:
    """Maximum number of concurrent holders, by key."""

    def __init__(self):
        self.inside = {}
        self.most = {}
        self.done = 0

    @asynccontextmanager
    async def entered(self, key):
        self.inside[key] = self.inside.get(key, 0) + 1
        self.most[key] = max(self.most.get(key, 0), self.inside[key])
        try:
            yield
        finally:
            self.inside[key] -= 1
            self.done += 1


@pytest.mark.slow
@pytest.mark.requirement("Q7", "Q17")
async def test_of_two_workers_on_one_key_one_waits_and_starts_when_the_other_ends(open_worker, row_of):
    tasks, ledger, started, release = Tasks(), Ledger(), [], trio.Event()

    @tasks.task("hold")
    async def hold(job):
        async with ledger.entered(job.lock_key):
            started.append(job.job_id)
            await release.wait()

    async with open_worker(tasks) as one, open_worker(tasks) as other:
        with trio.fail_after(patience_s()):
            jobs = [(await one.jobs.enqueue("hold", queue="q", lock_key="k")).job_id for _ in range(2)]
            await until(lambda: _now(started))
            [waiting] = set(jobs) - set(started)
            await until(lambda: row_of(waiting), lambda row: row["waits_for"] == "lock")
            assert started == list(set(jobs) - {waiting})
            release.set()
            for job_id in jobs:
                # Polls and backoff are an hour, so only the holder's end can have started it.
                assert (await when_ended(other, job_id)).status == "succeeded"
    assert ledger.most == {"k": 1}
    assert (await row_of(waiting))["attempt"] == 1


async def _now(value):
    return list(value)


@pytest.mark.requirement("Q7")
async def test_a_waiting_job_starts_as_soon_as_the_holder_fails_snoozes_or_is_canceled(open_worker, row_of, raw):
    tasks, started = Tasks(), {}

    @tasks.task("hold")
    async def hold(job):
        started[job.args["n"]] = trio.current_time()
        match job.args["how"]:
            case "fail":
                raise ValueError("so")
            case "snooze":
                return Snooze(3_000)
            case "cancel":
                await raw.execute("UPDATE dl_jobs SET cancel_requested = true WHERE job_id = $1", job.job_id)
                await trio.sleep_forever()
        return None

    async with open_worker(tasks) as supervisor:
        with trio.fail_after(patience_s()):
            jobs = [
                NewJob(queue="q", task="hold", lock_key="k", args={"how": how, "n": n})
                for n, how in enumerate(["fail", "snooze", "cancel", "end"])
            ]
            await supervisor.jobs.enqueue_many(jobs)
            assert (await when_ended(supervisor, jobs[-1].job_id)).status == "succeeded"
    assert sorted(started) == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_two_thousand_waiting_jobs_of_one_key_delay_no_other(open_worker, raw):
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("hold")
    async def hold(job):
        started.set()
        await release.wait()

    @tasks.task("quick")
    async def quick(job):
        return None

    async with open_worker(tasks, {"q": 2}) as supervisor:
        with trio.fail_after(patience_s()):
            await supervisor.jobs.enqueue("hold", queue="q", lock_key="hot")
            await started.wait()
            # Older and more urgent than the jobs after them.
            crowd = [NewJob(queue="q", task="quick", lock_key="hot", priority=1) for _ in range(2_000)]
            for first in range(0, 2_000, 500):
                await supervisor.jobs.enqueue_many(crowd[first : first + 500])
            parked = "SELECT count(*) FROM dl_jobs WHERE waits_for = 'lock'"
            began = trio.current_time()
            job = await supervisor.jobs.enqueue("quick", queue="q")
            await when_ended(supervisor, job.job_id)
            first_s = trio.current_time() - began
            await until(lambda: raw.fetchval(parked), lambda count: count == 2_000)
            began = trio.current_time()
            for _ in range(20):
                job = await supervisor.jobs.enqueue("quick", queue="q")
                await when_ended(supervisor, job.job_id)
            each_s = (trio.current_time() - began) / 20
            release.set()
    assert first_s < 5
    assert each_s < 0.3


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_many_jobs_of_one_key_are_parked_by_growing_claims(open_worker, raw):
    tasks, started = Tasks(), trio.Event()

    @tasks.task("hold")
    async def hold(job):
        started.set()
        await trio.sleep_forever()

    async with open_worker(tasks, {"q": 2}, drain_timeout_s=0.1) as supervisor:
        await supervisor.jobs.enqueue("hold", queue="q", lock_key="hot")
        await started.wait()
        await raw.execute(
            "INSERT INTO dl_jobs (job_id, queue, task, lock_key)"
            " SELECT gen_random_uuid(), 'q', 'hold', 'hot' FROM generate_series(1, 2000)"
        )
        parked = "SELECT count(*) FROM dl_jobs WHERE waits_for = 'lock'"
        await until(lambda: raw.fetchval(parked), lambda count: count == 2_000)
    assert max(claim.look for claim in supervisor.signals.claimed.values) == MAX_LOOK


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_a_lock_session_that_is_terminated_lets_no_second_job_of_the_key_start(open_worker, raw):
    tasks, ledger = Tasks(), Ledger()
    hold_s = 0.02

    @tasks.task("hold")
    async def hold(job):
        async with ledger.entered(job.lock_key):
            await trio.sleep(hold_s)

    jobs = [NewJob(queue="q", task="hold", lock_key=f"k{n % 5}") for n in range(150)]
    with trio.fail_after(patience_s()):
        async with AsyncExitStack() as stack:
            workers = [
                await stack.enter_async_context(open_worker(tasks, {"q": 6}, poll_s=1, claim_backoff_s=1))
                for _ in range(2)
            ]
            await workers[0].jobs.enqueue_many(jobs)
            while ledger.done < len(jobs):
                await raw.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '% locks'"
                )
                await trio.sleep(0.3)
            for job in jobs:
                assert (await when_ended(workers[1], job.job_id)).status == "succeeded"
    assert set(ledger.most.values()) == {1}
    assert ledger.done == len(jobs)


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_running_jobs_continue_when_their_lock_session_ends(open_worker, raw, row_of):
    tasks, started, release = Tasks(), trio.Event(), trio.Event()

    @tasks.task("hold")
    async def hold(job):
        started.set()
        await release.wait()

    async with open_worker(tasks) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("hold", queue="q", lock_key="k")
            await started.wait()
            held = (
                "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted"
                " AND objid::bigint::bit(32)::int = hashtext('k')"
            )
            assert await raw.fetchval(held) == 1
            ended = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE '% locks'"
            assert await raw.fetchval(ended)
            await until(lambda: raw.fetchval(held), lambda count: count == 1)
            release.set()
            done = await when_ended(supervisor, job.job_id)
            assert (done.status, done.attempt) == ("succeeded", 1)


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_a_job_whose_key_went_to_a_stranger_is_stopped_and_given_back(open_worker, database, raw, row_of):
    tasks, started, again, keyless_started, release = Tasks(), trio.Event(), trio.Event(), trio.Event(), trio.Event()

    @tasks.task("wait")
    async def wait(job):
        keyless_started.set()
        await release.wait()

    @tasks.task("hold")
    async def hold(job):
        if started.is_set():
            again.set()
            return
        started.set()
        await trio.sleep_forever()

    async with open_worker(tasks, claim_backoff_s=0.2) as supervisor:
        with trio.fail_after(patience_s()):
            job = await supervisor.jobs.enqueue("hold", queue="q", lock_key="k")
            await started.wait()
            keyless = await supervisor.jobs.enqueue("wait", queue="q")
            await keyless_started.wait()
            assert await raw.fetchval("SELECT pg_try_advisory_lock(hashtext($1))", str(keyless.job_id))
            # Another program that uses the document's advisory lock is next in the queue when the session ends.
            async with raw_connection(database.dsn) as administrator, trio.open_nursery() as nursery:
                nursery.start_soon(raw.execute, "SELECT pg_advisory_lock(hashtext('k'))")
                waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
                await until(lambda: administrator.fetchval(waiting))
                await administrator.execute(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name LIKE '% locks'"
                )
            await until(lambda: row_of(job.job_id), lambda row: row["status"] == "queued")
            assert not again.is_set()
            await raw.execute("SELECT pg_advisory_unlock(hashtext('k'))")
            with trio.fail_after(patience_s()):
                await again.wait()
            # A job without a key has lost nothing.
            release.set()
            for one in (job, keyless):
                done = await when_ended(supervisor, one.job_id)
                assert (done.status, done.attempt) == ("succeeded", 1)


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_a_body_ends_before_its_key_though_its_lease_is_held(stopped_without):
    held = """
        SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted),
               lease_expires_at > clock_timestamp() + interval '2 s'
        FROM dl_jobs"""
    async with stopped_without("locks", held) as (_supervisor, [keys, lease_is_held]):
        assert keys == 1, "the body was stopped after the server had given its key away"
        assert lease_is_held


@pytest.mark.slow
@pytest.mark.requirement("Q7")
async def test_claims_continue_and_a_process_exits_while_a_key_check_has_no_answer(
    open_worker, database, row_of, monkeypatch
):
    monkeypatch.setattr("dataloader.supervisor.tree.LEAVE_S", 0.3)
    tasks, held, begun, release = Tasks(), trio.Event(), trio.Event(), trio.Event()

    @tasks.task("hold")
    async def hold(job):
        held.set()
        await release.wait()

    @tasks.task("begin")
    async def begin(job):
        begun.set()

    # The check would end by its deadline, minutes later; the process ends without it.
    with trio.fail_after(60):
        async with (
            open_proxy(database.dsn) as proxy,
            open_worker(tasks, {"held": 1}) as holder,
            open_worker(tasks, dsn=proxy.dsn, statement_timeout_s=600) as worker,
        ):
            await holder.jobs.enqueue("hold", queue="held", lock_key="k")
            await held.wait()
            await worker.jobs.enqueue("begin", queue="q", lock_key="l")
            await begun.wait()
            begun = trio.Event()
            proxy.freeze("pool")
            for _ in range(3):
                parked = await holder.jobs.enqueue("hold", queue="q", lock_key="k")
                await until(lambda job_id=parked.job_id: row_of(job_id), lambda row: row["waits_for"] == "lock")
            await holder.jobs.enqueue("begin", queue="q")
            await begun.wait()
            release.set()
