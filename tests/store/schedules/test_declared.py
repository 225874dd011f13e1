"""Schedules declared by programs: stored once, changed by the last start, retired when no longer declared."""

from __future__ import annotations

import json

import pytest

from dataloader.jobs.schedules import Schedule
from dataloader.store.schedules.rows import aio_declare_schedules


def nightly(**fields):
    return Schedule(**{"name": "nightly", "task": "report", "cron": "0 6 * * *", "zone": "Europe/Moscow"} | fields)


@pytest.fixture
def declare(store):
    async def declare(*schedules, tasks=("report",), worker="w"):
        return await store.write(aio_declare_schedules, schedules, list(tasks), worker)

    return declare


@pytest.fixture
def row(raw):
    async def row(name="nightly"):
        return dict(await raw.fetchrow("SELECT *, spec::text AS text FROM dl_schedules WHERE name = $1", name))

    return row


@pytest.mark.requirement("R7")
async def test_a_declared_schedule_is_stored_once_and_due_from_now_on(declare, row, raw):
    await declare(nightly())
    stored = await row()
    assert (stored["task"], stored["origin"], stored["stored_by"]) == ("report", "code", "w")
    assert stored["next_at"] > stored["stored_at"]
    assert stored["next_at"].hour == 3, "6 o'clock in Moscow"
    await declare(nightly(), worker="another")
    assert await row() == stored


@pytest.mark.requirement("R7")
async def test_a_change_that_keeps_the_times_keeps_the_next_time(declare, row, raw):
    await declare(nightly())
    await raw.execute("UPDATE dl_schedules SET next_at = '2020-01-01', paused = true")
    await declare(nightly(args={"region": "EU"}, missed="skip"))
    stored = await row()
    assert (stored["next_at"].year, stored["paused"]) == (2020, True)
    assert Schedule.of_spec("nightly", json.loads(stored["text"])) == nightly(args={"region": "EU"}, missed="skip")
    await declare(nightly(cron="0 7 * * *"))
    stored = await row()
    assert (stored["next_at"].hour, stored["paused"]) == (4, True)
    assert stored["next_at"] > stored["changed_at"]
    assert await raw.fetchval("SELECT count(*) FROM dl_schedule_events WHERE kind = 'changed'") == 2
    # Nothing is kept of a specification that cannot be read.
    await raw.execute("UPDATE dl_schedules SET spec = '[1]', next_at = '2020-01-01'")
    await declare(nightly())
    assert (await row())["next_at"].year > 2020


@pytest.mark.requirement("R7")
async def test_a_schedule_no_longer_declared_is_retired_by_a_program_with_its_task(declare, row, raw):
    await declare(nightly(), nightly(name="hourly", cron="@hourly"))
    await declare(tasks=["another"])
    assert (await row())["retired_at"] is None
    await declare(nightly())
    assert (await row())["retired_at"] is None
    assert (await row("hourly"))["retired_at"] is not None
    await raw.execute("UPDATE dl_schedules SET next_at = '2020-01-01' WHERE name = 'hourly'")
    await declare(nightly(), nightly(name="hourly", cron="@hourly"))
    again = await row("hourly")
    assert again["retired_at"] is None
    assert again["next_at"] > again["changed_at"], "what was due meanwhile was not planned"


@pytest.mark.requirement("R7")
async def test_a_schedule_put_by_an_operator_is_not_changed_by_a_declaration(declare, row, raw):
    await declare(nightly())
    await raw.execute("UPDATE dl_schedules SET origin = 'operator'")
    before = await row()
    assert await declare(nightly(cron="@hourly")) == ["nightly"]
    assert await declare() == []
    assert await row() == before


@pytest.mark.requirement("R7")
async def test_a_changed_declaration_sends_one_notification(declare, raw):
    heard = []
    await raw._cross(raw.asyncpg.add_listener, "dl_schedule", lambda *told: heard.append(told))
    await declare(nightly())
    await declare(nightly())
    await raw.fetchval("SELECT 1")
    assert len(heard) == 1
