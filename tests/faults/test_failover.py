"""The primary is killed under load and its streaming standby promoted: the promises, checked by recorded histories.

Services and clients have an address with both hosts. The handlers write their runs to a file, and clients record their
answers; the checks compare these with the promoted database.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from datetime import UTC, datetime, timedelta
from functools import partial

import attrs
import pytest
import trio
from conditions import until
from databases import raw_connection
from failover_history import History
from proxy import open_proxy
from services import FAST
from standby_servers import Pair, standby_pair

from dataloader import NewJob, StoreUnavailable, open_client
from dataloader.jobs.errors import Draining
from dataloader.jobs.processes import CallTimeout, ProcessNotFound
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.migrations import migrate

pytestmark = [pytest.mark.full, pytest.mark.long, pytest.mark.requirement("Q5", "Q8", "Q9")]

LEASE_S = 8
SETTINGS = FAST | {"default_lease_ttl_sec": LEASE_S, "sinks": '[{"name": "books"}]'}
QUEUES = {"q": 40, "process.account": 4, "deliveries": 4}
ACCOUNTS, KEYS = 4, 5
UNFINISHED = "SELECT job_id, task, status::text, error FROM dl_jobs WHERE queue = 'q' AND status <> 'succeeded'"
STIRRING = """
SELECT (SELECT count(*) FROM dl_process_tasks WHERE status = 'waiting') + (SELECT count(*) FROM dl_process_outbox)
  + (SELECT count(*) FROM dl_processes WHERE running_task IS NOT NULL OR timer_task IS NOT NULL)
"""
SURVIVORS = "SELECT token FROM dl_jobs WHERE status = 'running'"
HAS_REPLAYED = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn"
REPLAYED = "SELECT pg_last_wal_receive_lsn() = pg_last_wal_replay_lsn()"


@pytest.fixture
def pair(request):
    """Run a primary with its standby; the parameter says whether it is synchronous."""
    with standby_pair(synchronous=request.param) as pair:
        yield pair


@attrs.define(eq=False)
class Clients:
    """Programs that enqueue and call with a key, again and again until the request is accepted.

    `acked` has, for each job, the times of the answered request and of its answer.
    """

    dsn: str
    over: bool = False
    acked: dict[str, tuple[float, float]] = attrs.field(factory=dict)
    calls: dict[tuple[str, str], float] = attrs.field(factory=dict)
    answers: dict[str, list[int]] = attrs.field(factory=dict)
    asked: int = 0

    async def enqueue(self, jobs, job):
        self.asked += 1
        job = attrs.evolve(job, idempotency_key=f"job {job.job_id}")
        while True:
            asked_at = time.monotonic()
            try:
                [got] = await jobs.enqueue_many([job])
            except (StoreUnavailable, Draining):
                await trio.sleep(0.2)
            else:
                self.acked[str(got.job_id)] = asked_at, time.monotonic()
                return got.job_id

    def start(self, nursery, jobs, processes):
        """Enqueue jobs and call each account, in tasks of the nursery, until `over` is set."""
        nursery.start_soon(self.keep_enqueueing, jobs, nursery)
        for number in range(ACCOUNTS):
            nursery.start_soon(self.keep_calling, processes, f"a{number}", "caller")

    async def keep_enqueueing(self, jobs, nursery):
        choice = random.Random(1)
        for number in itertools.count():
            if self.over:
                return
            args = {"s": choice.uniform(0, 0.3) if choice.random() < 0.8 else choice.uniform(1, 3)}
            if choice.random() < 0.5:
                job = NewJob(task="keyed", args=args | {"key": number % KEYS}, max_attempts=50, lease_ttl_sec=LEASE_S)
            else:
                job = NewJob(task="plain", args=args, max_attempts=50, lease_ttl_sec=LEASE_S)
            nursery.start_soon(self.enqueue, jobs, job)
            await trio.sleep(0.12)

    async def keep_calling(self, processes, account, caller):
        for number in itertools.count():
            if self.over:
                return
            name = f"{caller}.{number}"
            while True:
                try:
                    answer = await processes.call(
                        "account", account, "add", name, key=f"{account} {name}", start=None, timeout_s=20
                    )
                except (StoreUnavailable, CallTimeout, Draining, ProcessNotFound):  # the last one: its call was lost
                    await trio.sleep(0.2)
                else:
                    self.calls[account, name] = time.monotonic()
                    self.answers.setdefault(account, []).append(answer)
                    break
            await trio.sleep(0.2)

    async def more(self, jobs, calls):
        """Wait until this number of further jobs and calls was accepted."""
        jobs, calls = len(self.acked) + jobs, len(self.calls) + calls

        async def taken():
            return len(self.acked), len(self.calls)

        await until(taken, lambda now: now[0] >= jobs and now[1] >= calls, within_s=120)


@attrs.frozen
class Failover:
    """External view of one failover, and the resulting database."""

    history: History
    killed_at: float
    pair: Pair

    async def continued(self):
        """Check that jobs, schedules and processes have continued, and none is stuck or has run too often."""
        new = self.pair.standby
        assert await new.fetchval("SELECT count(*) FROM dl_processes WHERE status <> 'running'") == 0
        assert await new.fetchval("SELECT count(*) FROM dl_processes") == ACCOUNTS
        states = await new.fetch(
            "SELECT process_id, aux_state::text AS state, (SELECT count(DISTINCT e.payload) FROM dl_process_events e"
            " WHERE e.key = p.key) AS events, (SELECT count(*) FROM dl_process_events e WHERE e.key = p.key) AS written"
            " FROM dl_processes p"
        )
        for row in states:
            assert row["events"] == row["written"] == json.loads(row["state"])["total"]
        ticks = [run.planned for run in self.history.runs if run.planned and run.begin > self.killed_at]
        assert len(set(ticks)) > 3
        twice = "SELECT planned_at FROM dl_jobs WHERE schedule IS NOT NULL GROUP BY 1 HAVING count(*) > 1"
        assert await new.fetch(twice) == []

    def nothing_is_given_out_twice(self):
        """Check that no token and no key of a step or a delivery was used for two things."""
        assert self.history.repeated_tokens() == []
        assert self.history.repeated_keys() == {}

    async def results(self):
        """Return, by job, the run whose result the promoted database has."""
        rows = await self.pair.standby.fetch(
            "SELECT job_id, result #>> '{}' AS run FROM dl_jobs WHERE queue IN ('q', 'far')"
        )
        return {str(row["job_id"]): row["run"] for row in rows}


async def serving(services):
    """Wait until all services are ready, and return them: together they take long to start."""
    for service in services:
        await service.logged("serving", within_s=180)
    return services


async def when_running(path, jobs):
    """Wait until the file has a run of each of the jobs."""

    async def begun():
        return {run.job for run in History.read(path).runs}

    await until(begun, lambda begun: begun >= set(jobs), within_s=60)


async def promoted(pair):
    """Promote the standby once it has replayed its log. Return the tokens of the runs that it knows."""
    await until(lambda: pair.standby.fetchval(REPLAYED))
    survivors = {row["token"] for row in await pair.standby.fetch(SURVIVORS)}
    await pair.standby.run("promote")
    return survivors


@pytest.mark.parametrize("pair", [True], indirect=True, ids=[""])
async def test_a_synchronous_failover_loses_nothing_accepted_and_overlaps_no_runs(pair, serve, tmp_path):
    file = tmp_path / "history"
    options = {"dsn": pair.address, "tasks": "failover_tasks:tasks", "environment": {"HISTORY": str(file)}}
    services = await serving([await serve(QUEUES, ready=None, **options, **SETTINGS) for _ in range(3)])
    clients = Clients(pair.address)
    async with open_client(pair.address) as client:
        jobs, processes = client.jobs, client.processes
        async with trio.open_nursery() as nursery:
            clients.start(nursery, jobs, processes)
            await clients.more(40, 20)
            await pair.primary.run("stop", "immediate")
            killed_at = time.monotonic()
            await promoted(pair)
            await clients.more(60, 30)
            clients.over = True
        await when_all_is_done(pair)
    assert await ended(services) == [0, 0, 0]
    found = Failover(History.read(file), killed_at, pair)
    assert found.history.overlaps() == []
    found.nothing_is_given_out_twice()
    await found.continued()
    # All requests were repeated until they were accepted, so there are no other jobs.
    results = await found.results()
    assert len(clients.acked) == clients.asked
    assert clients.acked.keys() <= results.keys()
    returned = {run.name for run in found.history.runs if run.how == "returned"}
    assert {results[job] for job in clients.acked} <= returned
    for account, answers in clients.answers.items():
        asked = [number for name, number in clients.calls if name == account]
        assert sorted(answers) == list(range(1, len(asked) + 1))


async def when_all_is_done(pair):
    """Wait until the promoted server has no unfinished jobs except those of schedules, and no working process."""
    await until(lambda: pair.standby.fetch(UNFINISHED), lambda rows: not ours(rows), within_s=90)
    await until(lambda: pair.standby.fetchval(STIRRING), lambda left: left == 0, within_s=60)


async def ended(services):
    """End the services by SIGTERM; return their exit codes."""
    for service in services:
        service.process.terminate()
    return [await service.exit_code(within_s=60) for service in services]


def ours(rows):
    """Return the rows of jobs that do not belong to a schedule, which may have added one just now."""
    return [row for row in rows if row["task"] != "tick"]


@pytest.mark.parametrize("pair", [False], indirect=True, ids=[""])
async def test_runs_whose_claims_an_asynchronous_failover_lost_stop_and_change_nothing(pair, serve, tmp_path):
    file = tmp_path / "history"
    options = {"tasks": "failover_tasks:tasks", "environment": {"HISTORY": str(file)}}
    clients = Clients(pair.address)
    async with open_proxy(pair.primary.socket_dsn) as one, open_proxy(pair.standby.socket_dsn) as two:
        hosts = [proxy.dsn.partition("@")[2].partition("/")[0] for proxy in (two, one)]
        far_dsn = f"postgresql://postgres@{','.join(hosts)}/jobs?target_session_attrs=read-write&sslmode=disable"
        far = await serve({"far": 4, "q": 4}, dsn=far_dsn, ready=None, **options, **SETTINGS)
        near = [await serve(QUEUES, dsn=pair.address, ready=None, **options, **SETTINGS) for _ in range(2)]
        services = await serving([*near, far])
        async with open_client(pair.address) as client:
            jobs, processes = client.jobs, client.processes
            async with trio.open_nursery() as nursery:
                clients.start(nursery, jobs, processes)
                await clients.more(40, 20)
                # Replicated as queued, and due when replication has stopped: their claims will be lost.
                soon = datetime.now(UTC) + timedelta(seconds=5)
                held = await held_jobs(clients, jobs, soon, tmp_path)
                replicated_at = time.monotonic()
                reached = await pair.primary.fetchval("SELECT pg_current_wal_lsn()::text")
                await until(lambda: pair.standby.fetchval(HAS_REPLAYED, reached))
                await pair.cut()
                await until(pair.is_cut)
                await when_running(file, held)
                await clients.more(10, 5)
                await pair.primary.run("stop", "immediate")
                killed_at = time.monotonic()
                one.cut()
                two.cut()
                (tmp_path / "end of the former").touch()
                survivors = await promoted(pair)
                await clients.more(40, 20)
                await until_ended(file, killed_at, survivors)
                one.mend()
                two.mend()
                (tmp_path / "end").touch()
                await clients.more(20, 10)
                clients.over = True
            await when_all_is_done(pair)
        assert await ended(services) == [0, 0, 0]
    found = Failover(History.read(file), killed_at, pair)
    found.nothing_is_given_out_twice()
    await found.continued()
    # A run overlaps another one only if its claim was lost. It ends within its lease, whether it reaches a database or
    # not.
    void = found.history.void(killed_at, survivors)
    names = {run.name for run in void}
    assert {run.job for run in void} >= set(held)
    overlaps = found.history.overlaps()
    # With pytest -s: the durations, and the ends of those runs.
    print([round(overlap.seconds, 2) for overlap in overlaps], sorted(round(run.end - killed_at, 2) for run in void))  # noqa: T201
    assert {overlap.former.name for overlap in overlaps} <= names
    assert all(run.end < killed_at + LEASE_S for run in void)
    # Their ends change nothing.
    results = await found.results()
    assert names.isdisjoint(results.values())
    # All replicated jobs are there, and all that the promoted server has accepted.
    acked = clients.acked.items()
    assert {job for job, (asked, answered) in acked if answered < replicated_at or asked > killed_at} <= results.keys()


@pytest.mark.parametrize("pair", [True], indirect=True, ids=[""])
async def test_a_request_sent_again_is_answered_when_the_standby_has_it(pair):
    async with open_database(DatabaseOptions(dsn=pair.primary.dsn())) as store:
        await migrate(store)
    await pair.cut()
    await until(pair.is_cut)
    job = NewJob(task="t", queue="nobody", idempotency_key="one")
    by_sql = "SELECT dl_enqueue('t', '{}', queue => 'nobody', idempotency_key => 'two')"
    try_sql = partial(_aio_try, by_sql)
    async with open_client(pair.primary.dsn()) as client, raw_connection(pair.primary.dsn()) as raw:
        jobs = client.jobs
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                await jobs.enqueue_many([job])
            assert not await raw.run(try_sql)
        # Each exists by now, only on the primary.
        assert await pair.primary.fetchval("SELECT count(*) FROM dl_jobs") == 2
        await pair.join()
        [answer] = await jobs.enqueue_many([job])
        assert not answer.created
        assert await raw.run(try_sql)
    await pair.primary.run("stop", "immediate")
    await promoted(pair)
    assert await pair.standby.fetchval("SELECT count(*) FROM dl_jobs") == 2


async def _aio_try(sql, connection):
    """Return whether the statement is answered within two seconds; if not, the driver cancels it."""
    try:
        await connection.fetchval(sql, timeout=2)
    except TimeoutError:
        return False
    return True


async def held_jobs(clients, jobs, at, folder):
    """Enqueue jobs that are due at a time; one file lets their former runs end, and another one all other runs."""
    ends = [str(folder / "end"), str(folder / "end of the former")]
    options = {"available_at": at, "max_attempts": 50, "lease_ttl_sec": LEASE_S}
    new = [NewJob(task="plain", args={"until": end}, **options) for end in ends * 2]
    new += [NewJob(task="keyed", args={"until": end, "key": f"held {n}"}, **options) for n, end in enumerate(ends * 2)]
    new += [NewJob(task="plain", queue="far", args={"until": ends[0]}, **options)]
    return [str(await clients.enqueue(jobs, job)) for job in new]


async def until_ended(path, killed_at, survivors):
    """Wait until all runs that lost their claim have ended."""

    async def left():
        return [run for run in History.read(path).void(killed_at, survivors) if run.how is None]

    await until(left, lambda left: not left, within_s=60)
