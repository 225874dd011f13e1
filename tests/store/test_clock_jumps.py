"""The database's clock jumps ahead, as after a failover to a server with a wrong clock, and is corrected later."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from conditions import until
from logged import capture_logs

from dataloader.jobs.limits import RateLimit
from dataloader.jobs.schedules import Schedule
from dataloader.store.connection.history import read_history
from dataloader.store.etl.suppliers import aio_return_slot, aio_take_slot
from dataloader.store.limits.take import take_units
from dataloader.store.queue.leases import aio_cut_back_leases, aio_mark_jump, reap
from dataloader.store.schedules.cut_back import cut_back
from dataloader.store.schedules.rows import spec_text
from dataloader.store.schedules.tick import tick

TWO_HOURS_S, DAY_S = 7_200, 86_400
TTL_S = 60
HOLDER = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, token, lease_expires_at)
VALUES (gen_random_uuid(), 'q', 't', 'k', 'running', 1, now() + interval '2 days')
"""
ENDED = """
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, token, heartbeat_at, lease_expires_at)
VALUES (gen_random_uuid(), 'q', 't', 'k', 'running', 1, now() - interval '2 min', now() - interval '1 min')
"""
NEXT_S = "SELECT extract(epoch FROM next_at - now())::float8 FROM dl_schedules WHERE name = $1"


@pytest.mark.slow
@pytest.mark.requirement("Q7", "Q8", "Q10")
async def test_leases_count_for_their_length_after_the_clock_jumped_ahead(
    set_clock, store, start_worker, add_job, end_session
):
    """The holder of the key cannot reach the server that was restarted or promoted; another worker can."""
    await read_history(store)
    await add_job(lock_key="'k'")
    await add_job(lock_key="'l'", keyed="false")
    holder, other = start_worker("holder"), start_worker("other")
    assert len(await holder.claim()) == 2
    await other.ping()
    await add_job(lock_key="'k'")
    await set_clock(TWO_HOURS_S)
    for worker in (holder, other):
        await end_session(worker)
    assert await other.claim() == []
    assert (await reap(store, 10)).became == []
    # After their length they have no holder any more.
    await set_clock(TWO_HOURS_S + TTL_S + 1)
    assert len((await reap(store, 10)).became) == 2


@pytest.mark.requirement("Q8", "Q10")
async def test_leases_end_again_when_a_clock_that_had_jumped_ahead_is_put_right(set_clock, store, raw):
    await read_history(store)
    await set_clock(TWO_HOURS_S)
    await store.write(aio_mark_jump)
    await raw.execute(ENDED)
    await set_clock(0)
    assert len((await reap(store, 10)).became) == 1


@pytest.mark.requirement("Q10")
async def test_leases_that_the_clock_granted_while_it_was_ahead_are_cut_back(
    set_clock, store, raw, start_worker, add_job
):
    await add_job()
    worker = start_worker("w")
    await set_clock(DAY_S)
    [job] = await worker.claim()
    await set_clock(0)
    assert await store.write(aio_cut_back_leases) == 1
    assert await store.write(aio_cut_back_leases) == 0
    left = "SELECT extract(epoch FROM lease_expires_at - now()) FROM dl_jobs WHERE job_id = $1"
    assert await raw.fetchval(left, job.job_id) <= TTL_S


@pytest.mark.slow
@pytest.mark.requirement("S4")
async def test_a_rate_limit_used_while_the_clock_was_ahead_is_not_closed_until_then(set_clock, store, raw):
    rate_limits = (RateLimit(2, per_s=1),)
    await set_clock(DAY_S)
    for holder in (1, 2):
        await store.write(aio_take_slot, "s", holder, TTL_S, rate_limits)
        await store.write(aio_return_slot, "s", holder, 0.0, "pause")
    assert (await store.write(aio_take_slot, "s", 3, TTL_S, rate_limits)).waits_for == "budget"
    await set_clock(0)
    with capture_logs() as lines:
        answer = await store.write(aio_take_slot, "s", 3, TTL_S, rate_limits)
    # Used units count as if they had been used now.
    assert (answer.waits_for, 0 < answer.wait_s <= 1) == ("budget", True)
    assert [line["event"] for line in lines if "clock had been ahead" in line["event"]] == [
        "corrected times of the supplier s that were in the future: the database's clock had been ahead"
    ]

    async def taken():
        return await store.write(aio_take_slot, "s", 3, TTL_S, rate_limits)

    await until(taken, lambda answer: answer.waits_for is None)
    assert await raw.fetchval("SELECT max(at) <= clock_timestamp() FROM dl_source_calls")


@pytest.mark.slow
@pytest.mark.requirement("S4")
async def test_a_pause_and_a_slot_of_a_supplier_end_though_the_clock_was_ahead(set_clock, store, raw):
    await raw.execute(
        "INSERT INTO dl_sources (source, units, spans_s, zones, margin_s) VALUES ('s', '{1}', '{1}', '{NULL}', 0.2)"
    )
    await set_clock(DAY_S)
    await take_units(store, "s", 1, 0.5)
    await store.write(aio_take_slot, "t", 1, TTL_S, ())
    await store.write(aio_return_slot, "t", 1, 5.0, "retry-after")
    await raw.execute(HOLDER)
    await store.write(aio_take_slot, "u", 1, TTL_S, ())
    await set_clock(0)
    await take_units(store, "s", 1, 5)
    answer = await store.write(aio_take_slot, "t", 2, TTL_S, ())
    # It began a little after the last time in the row, so a slow server adds this little to the rest.
    assert (answer.waits_for, 0 < answer.wait_s < 5 + TTL_S) == ("retry-after", True)
    answer = await store.write(aio_take_slot, "u", 2, TTL_S, ())
    assert (answer.waits_for, 0 < answer.wait_s < 2 * TTL_S) == ("request", True)


@pytest.mark.requirement("R7")
async def test_schedules_whose_next_time_the_clock_put_off_are_cut_back(set_clock, store, raw):
    now = datetime.now(UTC)
    for name, start_at in (("hourly", None), ("later", now + timedelta(days=2))):
        schedule = Schedule(name=name, task="report", every_s=3_600, start_at=start_at, job={"queue": "q"})
        await raw.execute(
            "INSERT INTO dl_schedules (name, spec, task, origin, stored_by, stored_at, next_at)"
            " VALUES ($1, $2, 'report', 'code', 'test', $3, $4)",
            name,
            spec_text(schedule),
            now,
            start_at or now,
        )
    await set_clock(DAY_S)
    assert (await tick(store)).added == 1
    await set_clock(0)
    assert await raw.fetchval(NEXT_S, "hourly") > DAY_S
    with capture_logs() as lines:
        assert await cut_back(store) == 1
        assert await cut_back(store) == 0
    assert [line["names"] for line in lines if "clock had been ahead" in line["event"]] == [["hourly"]]
    assert 0 < await raw.fetchval(NEXT_S, "hourly") <= 3_600
    # One that begins later is planned for its beginning.
    assert await raw.fetchval(NEXT_S, "later") > 1.9 * DAY_S
