"""`job.transaction()` (Q12).

The handler's rows and the job's success are committed together, or neither is, whatever is lost in between.
"""

from __future__ import annotations

import pytest
import trio
import trio.testing
from conditions import patience_s, until
from proxy import open_proxy

from dataloader.jobs.errors import LeaseLost, SchemaError, StoreError, StoreUnavailable
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.queue.leases import Beat
from dataloader.store.queue.transaction import Transactions


def success_of(job):
    return lambda result: Outcome(job.job_id, job.token, Step.SUCCEED, result=result)


ROWS = "SELECT count(*) FROM target"


@pytest.fixture
async def transactions(store, raw, run):  # after `run`: independent fixtures are created concurrently
    await raw.execute("CREATE TABLE target (n int PRIMARY KEY, t text)")
    transactions = Transactions(store)
    yield transactions
    transactions.close()


@pytest.fixture
async def proxied(database, transactions):
    """Open a proxy before the server, and transactions through it, on the same tables."""
    async with open_proxy(database.dsn) as proxy, open_database(DatabaseOptions(dsn=proxy.dsn)) as store:
        transactions = Transactions(store)
        yield proxy, transactions
        transactions.close()


@pytest.fixture
async def run(start_worker, add_job):
    """Return a worker, its running job, and a function that makes an outcome of the job's result."""
    await add_job()
    worker = start_worker()
    [job] = await worker.claim()
    return worker, job, success_of(job)


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_connections_that_the_network_has_forgotten_meanwhile_are_replaced_soon(database, raw):
    await raw.execute("CREATE TABLE target (n int)")
    async with (
        open_proxy(database.dsn) as proxy,
        open_database(DatabaseOptions(dsn=proxy.dsn, connect_timeout_s=1)) as db,
    ):
        transactions = Transactions(db)
        async with trio.open_nursery() as nursery:
            for n in range(4):
                nursery.start_soon(transactions.run, _add, n)
        assert len(proxy.links("transaction")) > 1
        proxy.forget()
        with trio.fail_after(5):
            await transactions.run(_add, 4)
        transactions.close()
    assert await raw.fetchval(ROWS) == 5


@pytest.mark.requirement("E3")
async def test_a_write_cancelled_during_its_commit_returns_its_result(store, transactions, raw):
    patient = Transactions(store, commit_s=60)
    await raw.execute(
        "CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN PERFORM pg_advisory_xact_lock(4711); RETURN NULL; END';"
        " CREATE CONSTRAINT TRIGGER late AFTER INSERT ON target DEFERRABLE INITIALLY DEFERRED"
        " FOR EACH ROW EXECUTE FUNCTION late()"
    )
    await raw.execute("SELECT pg_advisory_lock(4711)")
    is_waited_for = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    tags = []

    async def add(scope):
        with scope:
            tags.append(await patient.run(_insert, 1))

    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(add, scope)
        await until(lambda: raw.fetchval(is_waited_for))
        scope.cancel()
        await trio.testing.wait_all_tasks_blocked(0.01)
        await raw.execute("SELECT pg_advisory_unlock(4711)")
    patient.close()
    assert (tags, await raw.fetchval(ROWS)) == (["INSERT 0 1"], 1)


async def _insert(connection, n):
    return await connection.execute("INSERT INTO target VALUES ($1)", n)


async def _add(connection, n):
    await connection.execute("INSERT INTO target VALUES ($1)", n)
    await connection.execute("SELECT pg_sleep(0.1)")


@pytest.mark.requirement("Q12")
async def test_the_rows_and_the_success_are_committed_together(transactions, run, raw, row_of, journal_of):
    worker, job, success = run
    async with transactions.open(success) as transaction:
        assert await transaction.execute("INSERT INTO target VALUES ($1, $2)", 1, "one") == "INSERT 0 1"
        await transaction.executemany("INSERT INTO target VALUES ($1, $2)", [(2, "two"), (3, "three")])
        assert await transaction.copy("target", ["n", "t"], [(4, "four")]) == 1
        assert len(await transaction.fetch("SELECT * FROM target")) == 4
        # Not visible, not even as a lock on the job's row: heartbeats continue.
        transaction.result = '{"rows": 2}'
        assert await raw.fetchval(ROWS) == 0
        assert await worker.beat(job) == [Beat.RENEWED]
    assert await raw.fetchval(ROWS) == 4
    assert (await row_of(job.job_id, "status"), await row_of(job.job_id, "result")) == ("succeeded", '{"rows": 2}')
    assert await journal_of(job.job_id) == ["picked", "done"]


@pytest.mark.requirement("Q12")
async def test_an_error_in_the_block_undoes_its_rows_and_leaves_the_job_running(transactions, run, raw, row_of):
    _worker, job, success = run
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the whole block is refused
        async with transactions.open(success) as transaction:
            await transaction.execute("INSERT INTO target VALUES (1)")
            raise ZeroDivisionError
    assert (await raw.fetchval(ROWS), await row_of(job.job_id, "status")) == (0, "running")


@pytest.mark.requirement("Q12")
async def test_a_statement_that_fails_undoes_the_rest(transactions, run, raw, row_of):
    _worker, job, success = run
    with pytest.raises(StoreError, match="target_pkey"):  # noqa: PT012 - the whole block is refused
        async with transactions.open(success) as transaction:
            await transaction.execute("INSERT INTO target VALUES (1)")
            await transaction.execute("INSERT INTO target VALUES (1)")
    assert (await raw.fetchval(ROWS), await row_of(job.job_id, "status")) == (0, "running")


@pytest.mark.requirement("Q12")
@pytest.mark.parametrize(
    ("sql", "missing"),
    [
        ("INSERT INTO no_such_table VALUES (1)", 'relation "no_such_table" does not exist'),
        ("SELECT no_such_column FROM target", 'column "no_such_column" does not exist'),
        ("SELECT no_such_function()", r"function no_such_function\(\) does not exist"),
    ],
)
async def test_a_missing_object_in_the_handlers_own_sql_is_the_handlers_error(transactions, run, sql, missing):
    _worker, _job, success = run
    with pytest.raises(StoreError, match=missing) as raised:
        async with transactions.open(success) as transaction:
            await transaction.fetch(sql)
    assert not isinstance(raised.value, SchemaError)
    assert "migrate" not in str(raised.value)


@pytest.mark.requirement("Q12")
async def test_a_wrong_number_of_arguments_is_the_handlers_error_and_not_an_outage(transactions, run):
    _worker, _job, success = run
    with pytest.raises(StoreError, match=r"expects 1 argument for this query, 2 were passed$") as raised:
        async with transactions.open(success) as transaction:
            await transaction.fetch("SELECT $1::int", 1, 2)
    assert not isinstance(raised.value, StoreUnavailable)


@pytest.mark.requirement("Q12")
async def test_a_handler_that_runs_deallocate_fails_and_later_ones_are_unaffected(transactions, run, row_of):
    _worker, job, success = run
    told = "handlers must not run DEALLOCATE"
    with pytest.raises(StoreError, match=told):  # noqa: PT012 - the whole block is refused
        async with transactions.open(success) as transaction:
            await transaction.fetch("SELECT 2")
            await transaction.execute("DEALLOCATE ALL")
            await transaction.fetch("SELECT 2")
    async with transactions.open(success) as transaction:
        await transaction.fetch("SELECT 2")
    assert await row_of(job.job_id, "status") == "succeeded"
    # The statement that writes the success has been prepared on this connection.
    with pytest.raises(StoreError, match=told):
        async with transactions.open(success) as transaction:
            await transaction.execute("DEALLOCATE ALL")


@pytest.mark.requirement("Q12")
async def test_a_connection_that_is_gone_within_the_block_is_a_database_that_is_away(transactions, run, raw):
    _worker, _job, success = run
    with pytest.raises(StoreUnavailable):  # noqa: PT012 - the whole block is refused
        async with transactions.open(success) as transaction:
            [row] = await transaction.fetch("SELECT pg_backend_pid() AS pid")
            await raw.execute("SELECT pg_terminate_backend($1, 5000)", row["pid"])
            with pytest.raises(StoreUnavailable):
                await transaction.fetch("SELECT 1")
            await transaction.fetch("SELECT 1")


@pytest.mark.slow
@pytest.mark.requirement("Q12")
@pytest.mark.parametrize("is_ours", [True, False], ids=["the server", "the handler's transaction"])
async def test_only_a_server_that_is_read_only_makes_a_refused_write_an_outage(
    database, transactions, run, raw, is_ours
):
    _, _, success = run
    if is_ours:
        [name] = await raw.fetchrow("SELECT current_database()")
        await raw.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(StoreError, match="ReadOnlySQLTransactionError") as caught:  # noqa: PT012 - as above
        async with transactions.open(success) as transaction:
            if not is_ours:
                await transaction.execute("SET TRANSACTION READ ONLY")
            await transaction.execute("INSERT INTO target VALUES (1)")
    assert isinstance(caught.value, StoreUnavailable) == is_ours


async def test_a_swallowed_failure_does_not_pass_for_a_success(transactions, run, raw, row_of):
    """PostgreSQL answers COMMIT with ROLLBACK if a statement has failed; the job must not appear as done then."""
    _worker, job, success = run
    with pytest.raises(StoreError):  # noqa: PT012 - the whole block is refused
        async with transactions.open(success) as transaction:
            await transaction.execute("INSERT INTO target VALUES (1)")
            with pytest.raises(StoreError):
                await transaction.execute("INSERT INTO target VALUES (1)")
    assert (await raw.fetchval(ROWS), await row_of(job.job_id, "status")) == (0, "running")


@pytest.mark.slow
@pytest.mark.requirement("Q12")
@pytest.mark.parametrize(
    ("deferred", "said"),
    [
        ("ALTER TABLE target ADD CONSTRAINT u UNIQUE (t) DEFERRABLE INITIALLY DEFERRED", 'unique constraint "u"'),
        (
            """
            CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN INSERT INTO notes VALUES (1); END $$;
            CREATE CONSTRAINT TRIGGER note AFTER INSERT ON target DEFERRABLE INITIALLY DEFERRED
            FOR EACH ROW EXECUTE FUNCTION note()""",
            'relation "notes" does not exist',
        ),
    ],
)
async def test_a_failure_that_only_the_commit_finds_is_no_success(transactions, run, raw, row_of, deferred, said):
    _worker, job, success = run
    await raw.execute(deferred)
    with pytest.raises(StoreError, match=said) as raised:
        async with transactions.open(success) as transaction:
            await transaction.execute("INSERT INTO target VALUES (1, 'same'), (2, 'same')")
    assert (await raw.fetchval(ROWS), await row_of(job.job_id, "status")) == (0, "running")
    assert not isinstance(raised.value, SchemaError)


@pytest.mark.slow
@pytest.mark.requirement("Q12")
@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_a_handler_that_ends_the_transaction_itself_gets_an_error(transactions, run, row_of, end):
    """Otherwise the fenced update would be separate: the rows were committed, or rolled back, without it."""
    _worker, job, success = run
    with pytest.raises(StoreError):  # noqa: PT012 - the whole block is refused
        async with transactions.open(success) as transaction:
            await transaction.execute("INSERT INTO target VALUES (1)")
            await transaction.execute(end)
    assert await row_of(job.job_id, "status") == "running"


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.requirement("Q12")
@pytest.mark.parametrize("change", ["token = token + 1", "status = 'queued'", "status = 'canceled'"])
async def test_a_job_that_is_not_ours_any_more_has_its_rows_undone(transactions, run, raw, row_of, change):
    _worker, job, success = run
    with pytest.raises(LeaseLost, match=str(job.job_id)):  # noqa: PT012 - the whole block is refused
        async with transactions.open(success) as transaction:
            await transaction.execute("INSERT INTO target VALUES (1)")
            await raw.execute(f"UPDATE dl_jobs SET {change}")
            before = await row_of(job.job_id)
    assert await raw.fetchval(ROWS) == 0
    assert await row_of(job.job_id) == before


@pytest.mark.requirement("Q12")
async def test_a_success_whose_reply_was_lost_is_one(run, raw, row_of, proxied, until):
    _worker, job, success = run
    proxy, transactions = proxied

    async def lose():
        await until("status = 'succeeded' FROM dl_jobs WHERE job_id = $1", job.job_id)
        proxy.cut("transaction")

    async with trio.open_nursery() as nursery, transactions.open(success) as transaction:
        await transaction.execute("INSERT INTO target VALUES (1)")
        proxy.freeze_at("transaction", b"COMMIT")
        nursery.start_soon(lose)
    assert (await raw.fetchval(ROWS), await row_of(job.job_id, "status")) == (1, "succeeded")


@pytest.mark.requirement("Q12")
async def test_a_connection_lost_before_the_commit_is_no_success(transactions, run, raw, row_of):
    _worker, job, success = run
    with pytest.raises(StoreUnavailable, match="not committed"):  # noqa: PT012 - the whole block is refused
        async with transactions.open(success) as transaction:
            await transaction.execute("INSERT INTO target VALUES (1)")
            [row] = await transaction.fetch("SELECT pg_backend_pid() AS pid")
            await raw.fetchval("SELECT pg_terminate_backend($1, 5000)", row["pid"])
    assert (await raw.fetchval(ROWS), await row_of(job.job_id, "status")) == (0, "running")


@pytest.mark.requirement("Q12")
async def test_a_cancelled_block_leaves_no_transaction_behind(transactions, run, raw, row_of, until):
    _worker, job, success = run
    with trio.move_on_after(0.2) as scope:
        async with transactions.open(success) as transaction:
            await transaction.execute("INSERT INTO target VALUES (1)")
            await transaction.execute("SELECT pg_sleep(60)")
    assert scope.cancelled_caught
    await until("NOT EXISTS (SELECT FROM pg_stat_activity WHERE state <> 'idle' AND query LIKE '%pg_sleep(60)')")
    assert (await raw.fetchval(ROWS), await row_of(job.job_id, "status")) == (0, "running")


@pytest.mark.slow
async def test_a_cancelled_block_waits_for_a_silent_server_no_longer_than_its_lease(run, proxied):
    _worker, _job, success = run
    proxy, transactions = proxied
    async with transactions.open(success):
        pass
    with trio.move_on_after(0.1) as scope:
        async with transactions.open(success):
            proxy.freeze("transaction")
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert trio.current_time() - scope.deadline < 1


@pytest.mark.requirement("Q12")
async def test_the_finish_of_a_run_waits_for_its_transaction_and_is_void_then(transactions, run, raw, row_of):
    """The result of the commit is unknown: the runner's write must come after it, and have no effect."""
    worker, job, _success = run
    await raw.execute("BEGIN")
    await raw.execute("UPDATE dl_jobs SET status = 'succeeded' WHERE job_id = $1", job.job_id)
    finished = []
    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:

            async def fail():
                finished.append(await worker.record(Outcome(job.job_id, job.token, Step.RETRY, error="unknown")))

            nursery.start_soon(fail)
            await trio.sleep(0.1)
            assert not finished
            await raw.execute("COMMIT")
    assert finished[0].written == {}
    assert await row_of(job.job_id, "status") == "succeeded"


@pytest.mark.slow
@pytest.mark.requirement("Q12")
async def test_transactions_are_bounded_and_their_connections_used_again(database, raw, start_worker, add_job):
    async with open_database(DatabaseOptions(dsn=database.dsn, transaction_pool_size=2)) as store:
        transactions = Transactions(store)
        for _ in range(6):
            await add_job()
        most = now = 0
        pids = set()

        async def use(job):
            nonlocal most, now
            async with transactions.open(success_of(job)) as transaction:
                now += 1
                most = max(most, now)
                [row] = await transaction.fetch("SELECT pg_backend_pid() AS pid, pg_sleep(0.05)::text")
                pids.add(row["pid"])
                now -= 1

        async with trio.open_nursery() as nursery:
            for job in await start_worker().claim():
                nursery.start_soon(use, job)
        assert (most, len(pids)) == (2, 2)
        transactions.close()
    assert await raw.fetchval("SELECT count(*) FROM dl_jobs WHERE status = 'succeeded'") == 6


@pytest.mark.requirement("Q12")
async def test_a_connection_that_died_in_the_pool_is_replaced(transactions, run, raw, add_job, row_of):
    worker, _job, success = run
    async with transactions.open(success) as transaction:
        [row] = await transaction.fetch("SELECT pg_backend_pid() AS pid")
    await raw.fetchval("SELECT pg_terminate_backend($1, 5000)", row["pid"])
    second = await add_job()
    [job] = await worker.claim()
    async with transactions.open(success_of(job)) as transaction:
        await transaction.execute("INSERT INTO target VALUES (1)")
    assert (await raw.fetchval(ROWS), await row_of(second, "status")) == (1, "succeeded")


@pytest.mark.requirement("Q12")
async def test_session_settings_of_a_handler_do_not_reach_the_next_one(transactions, run, start_worker, add_job):
    worker, _job, success = run
    async with transactions.open(success) as transaction:
        await transaction.execute("SET work_mem = '7MB'")
        await transaction.execute("CREATE TEMP TABLE staging (n int)")
        await transaction.execute("SELECT pg_advisory_lock(42)")
    await add_job()
    [job] = await worker.claim()
    async with transactions.open(success_of(job)) as transaction:
        [row] = await transaction.fetch(
            "SELECT current_setting('work_mem') AS mem, to_regclass('pg_temp.staging') AS t"
        )
        assert (row["mem"] == "7MB", row["t"]) == (False, None)
        await transaction.execute("CREATE TEMP TABLE staging (n int)")


@pytest.mark.requirement("Q12")
async def test_the_job_succeeds_also_where_another_isolation_level_is_the_default(database, run, raw, row_of, store):
    """A heartbeat during the transaction must not make its last statement fail."""
    worker, job, success = run
    await raw.execute("CREATE TABLE target (n int PRIMARY KEY, t text)")
    await raw.execute(f"ALTER DATABASE {database.name} SET default_transaction_isolation = 'repeatable read'")
    transactions = Transactions(store)
    async with transactions.open(success) as transaction:
        await transaction.execute("INSERT INTO target VALUES (1)")
        await worker.beat(job)
    transactions.close()
    assert await row_of(job.job_id, "status") == "succeeded"
