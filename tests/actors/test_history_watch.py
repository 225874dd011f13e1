"""A service notices that its database was restored elsewhere, or that a standby was promoted."""

from __future__ import annotations

import pytest
from conditions import until
from logged import capture_logs
from roles import a_role

from dataloader import RateLimit, Supplier, Tasks
from dataloader.actors import heartbeat, history_watch
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.history import read_history
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.limits.limit_rows import aio_limit_supplier

pytestmark = pytest.mark.requirement("Q5")

MOVED = "UPDATE dl_history SET {} = {}"
WARNING = "the database was restored, or a standby was promoted"
CHANGES = "dataloader_history_changes_total"
GONE = "the last heartbeat of this process is missing"


@pytest.mark.parametrize(("column", "value"), [("system", "system + 1"), ("timeline", "'00000009'"), ("database", "1")])
async def test_the_first_check_of_a_moved_database_writes_its_new_history(database, raw, column, value):
    async with open_database(DatabaseOptions(dsn=database.dsn)) as store:
        first = await read_history(store)
        assert (first.is_new, await read_history(store)) == (False, first)
        await raw.execute(MOVED.format(column, value))
        found = await read_history(store)
        assert (found.is_new, found.id == first.id) == (True, False)
        assert await read_history(store) == type(found)(found.id, is_new=False)


async def test_a_role_that_owns_nothing_can_look(database):
    with a_role(database) as role:
        database.psql(f"GRANT SELECT, INSERT, UPDATE ON dl_history TO {role.name}")
        async with open_database(DatabaseOptions(dsn=role.dsn)) as store:
            assert not (await read_history(store)).is_new


@pytest.mark.slow
async def test_each_service_warns_counts_and_declares_its_tasks_again(open_worker, raw, metric, monkeypatch):
    monkeypatch.setattr(history_watch, "LOOK_EVERY_S", 0.05)
    tasks, others = Tasks(), Tasks()

    @tasks.task("mine", queue="q")
    async def mine(_job):
        pass

    @others.task("other", queue="q")
    async def other(_job):
        pass

    with capture_logs() as logs:
        async with open_worker(tasks, with_web=True) as first, open_worker(others, with_web=True) as second:

            async def known():
                return await raw.fetchval("SELECT count(*) FROM dl_history")

            await until(known)
            for supervisor in (first, second):
                await supervisor.signals.history_read.wait()
            # An older state, in which neither has declared its tasks.
            await raw.execute(f"DELETE FROM dl_tasks; {MOVED.format('timeline', chr(39) + '00000009' + chr(39))}")

            async def declared():
                return [row["task"] for row in await raw.fetch("SELECT task FROM dl_tasks ORDER BY task")]

            await until(declared, lambda names: {"mine", "other"} <= set(names))
            for supervisor in (first, second):
                assert await metric(supervisor, CHANGES) == 1
    assert [log["event"].startswith(WARNING) for log in logs if log["log_level"] == "warning"] == [True, True]


@pytest.mark.slow
@pytest.mark.parametrize("left", ["an older process heartbeat", "none"])
async def test_tasks_are_declared_again_when_older_tables_are_restored_in_place(
    open_worker, raw, metric, monkeypatch, left
):
    monkeypatch.setattr(heartbeat, "SHOW_EVERY_S", 0.05)
    tasks = Tasks()

    @tasks.task("mine", queue="q")
    async def mine(_job): ...

    older = "UPDATE dl_workers SET seen_at = seen_at - interval '1 h'" if left != "none" else "DELETE FROM dl_workers"
    with capture_logs() as logs:
        async with open_worker(tasks, with_web=True) as supervisor:
            # Its second process heartbeat, after which it knows the expected state of the tables.
            await until(lambda: raw.fetchval("SELECT seen_at > now() - interval '1 min' FROM dl_workers"))
            seen_at = await raw.fetchval("SELECT seen_at FROM dl_workers")
            await until(lambda: raw.fetchval("SELECT seen_at > $1 FROM dl_workers", seen_at))
            await raw.execute(f"BEGIN; DELETE FROM dl_tasks; {older}; COMMIT")
            await until(lambda: raw.fetchval("SELECT true FROM dl_tasks WHERE task = 'mine'"))
            assert await metric(supervisor, CHANGES) == 1
    assert [log["event"].startswith(GONE) for log in logs if log["log_level"] == "warning"] == [True]


@pytest.mark.slow
async def test_a_declaration_that_the_older_tables_refuse_is_logged_once_and_tried_again(
    open_worker, raw, metric, monkeypatch
):
    monkeypatch.setattr(history_watch, "LOOK_EVERY_S", 0.02)
    tasks = Tasks()

    @tasks.task("mine", queue="q", supplier="hr", cost=5)
    async def mine(_job):
        pass

    async def allow(requests):
        await raw.run(aio_limit_supplier, "hr", Supplier("hr", rate_limits=(RateLimit(requests, per_s=60),)).spec(), {})

    async def is_declared():
        return await raw.fetchval("SELECT limits ? 'cost' FROM dl_tasks WHERE task = 'mine'")

    with capture_logs() as logs:
        async with open_worker(tasks, with_web=True) as supervisor:
            await supervisor.signals.history_read.wait()
            # An older state, in which another program allows fewer requests than one run of the task needs.
            await raw.execute("DELETE FROM dl_tasks")
            await allow(2)
            await raw.execute(MOVED.format("timeline", "'00000009'"))

            async def refused():
                return [log for log in logs if "cannot declare tasks" in log["event"]]

            [line] = await until(refused)
            assert "cost: must be at most 2" in line["error"]
            await supervisor.signals.history_read.wait(supervisor.signals.history_read.count + 20)
            await allow(10)
            await until(is_declared)
            assert len(await refused()) == 1
            assert await metric(supervisor, CHANGES) == 1
