"""An outage of the database is never an error of a step: it waits, and runs again with the same key (P3, P7, P13)."""

from __future__ import annotations

import attrs
import pytest
import trio
from conditions import patience_s, until
from databases import raw_connection
from logged import capture_logs
from proxy import open_proxy
from quick_processes import again_soon

from dataloader import AccessDenied, Settings, StoreUnavailable, Tasks, Worker, open_supervisor
from dataloader.flows.processes import Delivery, Done, Process, Processes, Timer, add_processes
from dataloader.jobs.outages import OUTAGES
from dataloader.jobs.process_outbox import Sink
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.store.processes.requests import aio_ask
from dataloader.store.queue.reads import ping
from dataloader.testing import run_step

pytestmark = pytest.mark.requirement("P7", "P13")
INSERT = "INSERT INTO ledger VALUES ($1)"
SHORT = {"default_lease_s": 3, "heartbeat_s": 1, "reaper_period_s": 1}


@attrs.define
class Ledgers:
    """Type of processes whose steps write to a table; `during` is awaited in the first run of each step."""

    during: object = None
    in_block: bool = True
    wrap: object = None
    options: dict = attrs.field(factory=dict)
    runs: list = attrs.field(factory=list)

    def tasks(self):
        tasks, processes = Tasks(), Processes()
        kind = processes.define("ledger", state=int, **self.options)

        @kind.init
        async def begin(_p: Process[int]) -> Done:
            return Done(state=0)

        @kind.call
        async def add(p: Process[int], by: int) -> Done:
            return await self.step(p, Done(p.state + by, state=p.state + by, events=[by]))

        @kind.call
        async def arm(_p: Process[int]) -> Done:
            return Done(next=Timer(after_s=0))

        @kind.timeout
        async def due(p: Process[int]) -> Done:
            return await self.step(p, Done(state=p.state + 100, events=["due"]))

        @kind.call
        async def read(p: Process[int]) -> Done:
            return Done(p.state)

        add_processes(tasks, processes)
        return tasks

    async def step(self, p, done):
        self.runs.append((p.kind, p.step_key, p.attempt))
        is_first = len(self.runs) == 1
        if is_first and not self.in_block:
            await self.during()
        try:
            async with p.transaction() as t:
                await t.execute(INSERT, p.kind)
                if is_first and self.in_block:
                    await self.during()
                await t.execute(INSERT, p.kind)
                t.done = done
        except StoreUnavailable as error:
            if self.wrap is None:
                raise
            await self.wrap(error)
        return done


async def as_it_is(error):
    raise error


async def from_it(error):
    raise ValueError("the books cannot be written") from error


async def from_another_one(error):
    try:
        await from_it(error)
    except ValueError as other:
        raise LookupError("no books") from other


async def in_a_nursery(error):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(as_it_is, error)
        nursery.start_soon(trio.sleep_forever)


async def instead_of_it(_error):
    raise ValueError("the books cannot be written")


@pytest.fixture
async def proxy(database):
    database.psql("CREATE TABLE ledger (how text)")
    async with open_proxy(database.dsn) as proxy:
        yield proxy


@pytest.fixture
async def raw(database):
    async with raw_connection(database.dsn) as raw:
        yield raw


@pytest.fixture
async def beside(database):
    """Open a connection for use while `raw` waits for an answer."""
    async with raw_connection(database.dsn) as beside:
        yield beside


@pytest.fixture
def serve(proxy, raw):
    """Return a context that runs the processes, with the proxy before their database."""

    def serve(tasks, **given):
        settings = Settings(db_dsn=proxy.dsn, workers=(Worker("process.ledger", 2),), **given)
        return open_supervisor(settings, tasks)

    return serve


@pytest.fixture
def ask(raw):
    """Return a function that sends a request to the process, bypassing the proxy, and returns the task's number."""

    async def ask(method=None, args=None, lease_s=60):
        kind = "call" if method else "init"
        request = ProcessRequest(type="ledger", process_id="1", kind=kind, method=method, args=args)
        return (await raw.run(aio_ask, request, lease_s)).task_id

    return ask


@pytest.fixture
def answer(raw):
    async def answer(task_id, within_s=20):
        async def row():
            return await raw.fetchrow(
                "SELECT status, response::text, error FROM dl_process_tasks WHERE task_id = $1 AND status <> 'waiting'",
                task_id,
            )

        return tuple(await until(row, within_s=within_s))

    return answer


def outage(proxy, for_s=0.5):
    """Return an outage of the server; a waiting statement in the block notices it by the next statement."""

    async def during():
        proxy.cut()
        await trio.sleep(for_s)
        proxy.mend()

    return during


async def is_well(raw, ask, answer, *, state):
    """Check that the process runs, has that state, and answers."""
    assert await raw.fetchval("SELECT status FROM dl_processes") == "running"
    assert await answer(await ask("read")) == ("finished", str(state), None)


@pytest.mark.slow
@pytest.mark.parametrize("in_block", [True, False], ids=["in the block", "before it"])
async def test_an_outage_within_a_steps_transaction_runs_the_step_again_with_its_key(
    proxy, raw, serve, ask, answer, in_block
):
    ledgers = Ledgers(outage(proxy), in_block)
    async with serve(ledgers.tasks()):
        await answer(await ask())
        called = await ask("add", 5)
        follows = await ask("read")
        assert await answer(called) == ("finished", "5", None)
        # The waiting call behind it was not cancelled.
        assert await answer(follows) == ("finished", "5", None)
        assert await raw.fetchval("SELECT string_agg(how, ' ') FROM ledger") == "call call"
        assert len(ledgers.runs) in ({2} if in_block else {1, 2})
        assert len(set(ledgers.runs)) == 1
        await is_well(raw, ask, answer, state=5)


@pytest.mark.slow
async def test_an_outage_in_a_timers_step_counts_no_try_and_keeps_the_timer(proxy, raw, serve, ask, answer):
    ledgers = Ledgers(outage(proxy), options={"max_tries": 1})
    async with serve(ledgers.tasks()):
        await answer(await ask())
        await answer(await ask("arm"))

        async def state():
            return await raw.fetchval("SELECT aux_state FROM dl_processes")

        await until(state, lambda found: found == "100", within_s=20)
        assert [(kind, attempt) for kind, _, attempt in ledgers.runs] == [("timeout", 1), ("timeout", 1)]
        assert len(set(ledgers.runs)) == 1
        await is_well(raw, ask, answer, state=100)


@pytest.mark.full
@pytest.mark.parametrize("wrap", [as_it_is, from_it, from_another_one, in_a_nursery])
async def test_an_error_raised_from_an_outage_is_the_outage(proxy, raw, serve, ask, answer, wrap):
    ledgers = Ledgers(outage(proxy), wrap=wrap)
    async with serve(ledgers.tasks()):
        await answer(await ask())
        assert await answer(await ask("add", 5)) == ("finished", "5", None)
        await is_well(raw, ask, answer, state=5)


@pytest.mark.slow
async def test_an_error_in_place_of_an_outage_is_the_steps_own(proxy, serve, ask, answer):
    ledgers = Ledgers(outage(proxy), wrap=instead_of_it)
    async with serve(ledgers.tasks()):
        await answer(await ask())
        status, _, error = await answer(await ask("add", 5))
        assert (status, error) == ("error", "ValueError: the books cannot be written")


@pytest.mark.slow
async def test_a_commit_without_an_answer_that_happened_is_not_done_again(proxy, raw, beside, serve, ask, answer):
    async def lose_the_answer():
        proxy.freeze_at("transaction", b"COMMIT")
        nursery.start_soon(cut_after_it)

    async def cut_after_it():
        async def written():
            return await beside.fetchval("SELECT count(*) FROM ledger")

        await until(written, lambda rows: rows == 2)
        proxy.cut("transaction")
        proxy.thaw()

    ledgers = Ledgers(lose_the_answer)
    async with serve(ledgers.tasks()) as supervisor, trio.open_nursery() as nursery:
        await answer(await ask())
        assert await answer(await ask("add", 5)) == ("finished", "5", None)

        async def runs():
            return supervisor.state.queues["process.ledger"].running

        # The interrupted run has found out that its step is done.
        await until(runs, lambda left: left == 0, within_s=20)
        await is_well(raw, ask, answer, state=5)
        assert len(ledgers.runs) == 1
        assert await raw.fetchval("SELECT count(*) FROM dl_process_events") == 1


@pytest.mark.slow
async def test_a_step_whose_time_passes_while_the_database_is_silent_runs_again(proxy, raw, serve, ask, answer):
    async def silence():
        proxy.freeze()
        nursery.start_soon(thaw_later)

    async def thaw_later():
        # The step's time is over, and the worker's check of the database has no answer.
        await until(waits)
        proxy.thaw()
        proxy.cut("transaction")

    async def waits():
        return any(line["event"] == "a step waits for the database" for line in logs)

    ledgers = Ledgers(silence, options={"step_timeout_s": 1})
    with capture_logs() as logs:
        async with serve(ledgers.tasks()), trio.open_nursery() as nursery:
            await answer(await ask())
            assert await answer(await ask("add", 5), within_s=60) == ("finished", "5", None)
            assert len(ledgers.runs) >= 2
            await is_well(raw, ask, answer, state=5)


@pytest.mark.slow
async def test_a_step_that_is_slow_by_itself_in_its_transaction_still_fails(proxy, serve, ask, answer):
    ledgers = Ledgers(trio.sleep_forever, options={"step_timeout_s": 0.5})
    async with serve(ledgers.tasks()):
        await answer(await ask())
        assert await answer(await ask("add", 5)) == ("error", None, "the step took longer than its 0.5 s")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sql", "error"),
    [
        ("SET LOCAL statement_timeout = 50; SELECT pg_sleep(5)", "StoreError: QueryCanceledError"),
        ("SELECT 1 / 0", "Unstorable: DivisionByZeroError"),
        ("SELECT FROM no_such_table", "StoreError: UndefinedTableError"),
        ("SELECT '\0'", "StoreError: ProtocolViolationError"),
        ("DO $$ BEGIN RAISE SQLSTATE '08001';END $$", "StoreError: ClientCannotConnectError"),
        ("DO $$ BEGIN RAISE SQLSTATE 'HV00N';END $$", "StoreError: FDWUnableToEstablishConnectionError"),
        ("SET TRANSACTION READ ONLY; CREATE TABLE books (n int)", "StoreError: ReadOnlySQLTransactionError"),
        (
            "SET LOCAL temp_file_limit = 64; SELECT FROM generate_series(1, 1000000) ORDER BY random()",
            "StoreError: ConfigurationLimitExceededError",
        ),
    ],
)
async def test_an_error_in_the_steps_own_sql_is_the_steps_error(proxy, serve, ask, answer, sql, error):
    processes, tasks = Processes(), Tasks()
    kind = processes.define("ledger")

    @kind.init
    async def begin(p: Process) -> Done:
        async with p.transaction() as t:
            for one in sql.split("; "):
                await t.execute(one)
            t.done = Done()

    add_processes(tasks, processes)
    async with serve(tasks):
        status, _, said = await answer(await ask())
        assert (status, said[: len(error)]) == ("error", error)


@pytest.mark.full
@pytest.mark.parametrize("code", ["40001", "40P01", "53100", "57P03"])
async def test_a_transient_server_error_runs_the_step_again(proxy, raw, serve, ask, answer, code):
    await raw.execute(f"""
        CREATE SEQUENCE times;
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
          IF nextval('times') < 4 THEN RAISE SQLSTATE '{code}'; END IF;
          RETURN NEW;
        END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION refuse();
    """)
    ledgers = Ledgers(trio.lowlevel.checkpoint)
    async with serve(ledgers.tasks()):
        await answer(await ask())
        assert await answer(await ask("add", 5)) == ("finished", "5", None)
        assert len(ledgers.runs) >= 3
        assert len(set(ledgers.runs)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "runs"),
    [(StoreUnavailable("another queue is away"), OUTAGES + 1), (AccessDenied("another queue refuses us"), 1)],
    ids=["away", "refused"],
)
async def test_an_outage_of_another_queue_becomes_the_steps_own_error(proxy, raw, serve, ask, answer, error, runs):
    async def elsewhere():
        ledgers.runs.clear()  # so that each run is the first
        times.append(1)
        raise error

    times, ledgers = [], Ledgers(elsewhere, in_block=False)
    async with serve(again_soon(ledgers.tasks())):
        await answer(await ask())
        status, _, said = await answer(await ask("add", 5))
        assert (status, said) == ("error", f"{type(error).__name__}: {error}")
        assert len(times) == runs
        assert await raw.fetchval("SELECT status FROM dl_processes") == "error"


@pytest.mark.slow
async def test_an_outage_in_each_step_of_a_process_is_counted_for_that_step_alone(proxy, raw, serve, ask, answer):
    tries = {}

    async def passes():
        ledgers.runs.clear()
        tries[len(steps)] = tries.get(len(steps), 0) + 1
        if tries[len(steps)] <= OUTAGES:
            raise StoreUnavailable("another queue is away")

    steps, ledgers = [], Ledgers(passes, in_block=False)
    async with serve(again_soon(ledgers.tasks())):
        await answer(await ask())
        for number in (1, 2, 3):
            assert await answer(await ask("add", 1)) == ("finished", str(number), None)
            steps.append(number)
        await is_well(raw, ask, answer, state=3)
    assert set(tries.values()) == {OUTAGES + 1}


@pytest.mark.slow
async def test_a_process_that_another_session_has_locked_for_long_is_waited_for(proxy, beside, serve, ask, answer):
    rolled_back = trio.Event()

    async def hold():
        await beside.execute("BEGIN")
        await beside.execute("SELECT FROM dl_processes FOR UPDATE")
        nursery.start_soon(let_go)

    async def let_go():
        await rolled_back.wait()
        await beside.execute("COMMIT")

    async def noticed(error):
        rolled_back.set()
        raise error

    ledgers = Ledgers(hold, wrap=noticed)
    async with serve(ledgers.tasks()), trio.open_nursery() as nursery:
        await answer(await ask())
        assert await answer(await ask("add", 5), within_s=180) == ("finished", "5", None)
        assert rolled_back.is_set()
        assert len(ledgers.runs) >= 2
        assert len(set(ledgers.runs)) == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", ["in the step", "before its commit"])
async def test_an_outage_that_outlasts_the_lease_puts_no_process_in_error(
    proxy, raw, beside, serve, ask, answer, where
):
    """The step is stopped in time, or its outcome is known: that is written when the database is back."""
    runs = []

    async def long_outage():
        proxy.cut()
        nursery.start_soon(mend_later)
        if where == "in the step":
            await trio.sleep_forever()

    async def mend_later():
        await until(has_expired)
        proxy.mend()

    async def has_expired():
        return await beside.fetchval("SELECT bool_or(lease_expires_at < now()) FROM dl_jobs WHERE status = 'running'")

    processes, tasks = Processes(), Tasks()
    kind = processes.define("ledger", state=int)

    @kind.init
    async def begin(_p: Process[int]) -> Done:
        return Done(state=0)

    @kind.call
    async def add(p: Process[int], by: int) -> Done:
        runs.append(p.step_key)
        if len(runs) == 1:
            await long_outage()
        return Done(p.state + by, state=p.state + by)

    @kind.call
    async def read(p: Process[int]) -> Done:
        return Done(p.state)

    add_processes(tasks, processes)
    async with serve(tasks, **SHORT), trio.open_nursery() as nursery:
        await answer(await ask())
        assert await answer(await ask("add", 5, lease_s=3), within_s=40) == ("finished", "5", None)
        assert (len(runs), len(set(runs))) == (2 if where == "in the step" else 1, 1)
        await is_well(raw, ask, answer, state=5)


async def test_run_step_tells_an_outage_from_a_failure():
    kind = Processes().define("ledger")

    @kind.call
    async def away(_p: Process) -> Done:
        raise StoreUnavailable("the database cannot be reached")

    run = await run_step(kind, "away")
    assert (run.outcome, run.error, run.events) == ("returned", None, [])


@pytest.mark.slow
@pytest.mark.requirement("P10")
async def test_an_outage_that_a_sinks_handler_meets_is_no_failed_delivery(proxy, raw, database):
    """With only one attempt allowed, a failure would hold up the deliveries of its process."""
    processes, tasks, told = Processes(), Tasks(), []
    kind = processes.define("ledger", state=int)

    @kind.init
    async def begin(_p: Process[int]) -> Done:
        return Done(state=0, events=["begun"])

    @processes.sink("books")
    async def book(delivery: Delivery) -> None:
        told.append(delivery.key)
        if len(told) == 1:
            proxy.cut()
            nursery.start_soon(mend_later)
            await ping(supervisor.database, 1)

    async def mend_later():
        await until(waits)
        proxy.mend()

    async def waits():
        return any(line["event"] == "a delivery waits for the database" for line in logs)

    add_processes(tasks, processes)
    sink = Sink(name="books", kinds=("event",), max_tries=1)
    settings = Settings(db_dsn=proxy.dsn, workers=(Worker("process.ledger", 2),), sinks=(sink,))
    with capture_logs() as logs:
        async with open_supervisor(settings, tasks) as supervisor, trio.open_nursery() as nursery:
            await raw.run(aio_ask, ProcessRequest(type="ledger", process_id="1", kind="init"), 60)
            await until(lambda: raw.fetchval("SELECT last_event_id = 1 FROM dl_processes"))
            await until(lambda: raw.fetchval("SELECT NOT EXISTS (SELECT FROM dl_process_outbox)"))
            assert await raw.fetchval("SELECT count(*) FROM dl_process_holdups") == 0
    assert (len(told), len(set(told))) == (2, 1)


@pytest.mark.slow
@pytest.mark.requirement("P10")
async def test_an_outage_of_another_queue_is_a_failed_delivery_in_the_end(raw, database):
    processes, tasks, told = Processes(), Tasks(), []
    kind = processes.define("ledger", state=int)

    @kind.init
    async def begin(_p: Process[int]) -> Done:
        return Done(state=0, events=["begun"])

    @processes.sink("books")
    async def book(delivery: Delivery) -> None:
        told.append(delivery.key)
        raise StoreUnavailable("another queue is away")

    add_processes(tasks, processes)
    sink = Sink(name="books", kinds=("event",), max_tries=1)
    settings = Settings(db_dsn=database.dsn, workers=(Worker("process.ledger", 2),), sinks=(sink,))
    async with open_supervisor(settings, again_soon(tasks)):
        await raw.run(aio_ask, ProcessRequest(type="ledger", process_id="1", kind="init"), 60)
        await until(lambda: raw.fetchval("SELECT count(*) FROM dl_process_holdups"))
    assert (len(told), len(set(told))) == (OUTAGES + 1, 1)


@pytest.mark.full
async def test_a_drain_while_a_step_waits_for_the_database_ends_in_time(proxy, serve, ask, answer, raw):
    ledgers = Ledgers(trio.lowlevel.checkpoint)

    async def away():
        proxy.cut()
        stopping.set()

    async def waits():
        return any(line["event"] == "a step waits for the database" for line in logs)

    ledgers.during, stopping = away, trio.Event()
    with capture_logs() as logs, trio.fail_after(patience_s()):
        async with serve(ledgers.tasks(), drain_timeout_s=1):
            await answer(await ask())
            await ask("add", 5)
            await stopping.wait()
            await until(waits)
    # The outcome was not written. The next process finds a step without a worker.
    assert await raw.fetchval("SELECT running_task IS NOT NULL FROM dl_processes")
