"""Turns at a source: one request at a time, with pauses and rate limits, for all callers and processes (E1, S4)."""

from __future__ import annotations

import pytest
import trio
from conditions import patience_s
from databases import raw_connection

from dataloader.jobs.limits import RateLimit
from dataloader.store.connection.bridge import open_database
from dataloader.store.connection.options import DatabaseOptions
from dataloader.store.etl.suppliers import SlotAnswer, aio_return_slot, aio_take_slot

pytestmark = pytest.mark.requirement("E1", "S4")
TAKEN = SlotAnswer(0, None)
LEASE_S = 60


async def run(raw, holder):
    """Add a running job with the token `holder`, unless there is one."""
    await raw.execute(
        """
        INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, token, claimed_by, started_at,
          heartbeat_at, lease_expires_at)
        SELECT gen_random_uuid(), 'q', 't', 'k' || $1::bigint, 'running', 1, $1, 'w', now(), now(),
          now() + interval '1 hour'
        WHERE NOT EXISTS (SELECT FROM dl_jobs WHERE token = $1)""",
        holder,
    )


@pytest.fixture
def take(store, raw):
    """Return a function that takes the source `s` for a running job."""

    async def take(holder, *rate_limits, lease_s=LEASE_S, source="s"):
        await run(raw, holder)
        return await store.write(aio_take_slot, source, holder, lease_s, rate_limits)

    return take


@pytest.fixture
def give(store):
    """Return a function that gives the source `s` back."""

    async def give(holder, pause_s=0.0, waits_for="pause"):
        await store.write(aio_return_slot, "s", holder, pause_s, waits_for)

    return give


async def test_a_source_is_one_holder_s_until_it_is_given_back(take, give):
    assert await take(1) == TAKEN
    turn = await take(2)
    assert turn.waits_for == "request"
    assert LEASE_S - 30 < turn.wait_s <= LEASE_S
    await give(1)
    assert await take(2) == TAKEN
    assert (await take(1)).waits_for == "request"


async def test_other_sources_are_free_meanwhile(take):
    assert await take(1) == TAKEN
    assert await take(2, source="t") == TAKEN


async def test_a_holder_that_takes_its_source_again_keeps_it(take):
    # As after a lost answer of the database.
    assert await take(1) == TAKEN
    assert await take(1) == TAKEN


async def test_no_holder_gets_a_source_in_its_pause_and_each_learns_its_length_and_reason(take, give):
    await take(1)
    await give(1, 40)
    for holder in (1, 2):
        turn = await take(holder)
        assert turn.waits_for == "pause"
        assert 10 < turn.wait_s <= 40


async def test_a_later_pause_does_not_shorten_the_wait_that_a_source_asked_for(take, give, raw):
    await take(1)
    await give(1, 600, "retry-after")
    # Another request was in progress: its lease had ended.
    await raw.execute("UPDATE dl_sources SET holder = 2, held_until = now() - interval '1 s'")
    await give(2, 5)
    turn = await take(3)
    assert turn.waits_for == "retry-after"
    assert turn.wait_s > 500


async def test_a_holder_that_died_loses_the_source_with_its_lease(take, raw):
    await take(1)
    await raw.execute("UPDATE dl_sources SET held_until = clock_timestamp() - interval '1 ms'")
    assert await take(2) == TAKEN


@pytest.mark.parametrize(
    "end",
    [
        "lease_expires_at = now() - interval '1 ms'",
        "token = 77",  # it was claimed again
        "status = 'queued', lease_expires_at = NULL, claimed_by = NULL",
        "status = 'succeeded', finished_at = now(), lease_expires_at = NULL",
    ],
)
async def test_a_slot_ends_with_the_lease_of_its_run(take, raw, end):
    assert await take(1) == TAKEN
    assert (await take(2)).waits_for == "request"
    await raw.execute(f"UPDATE dl_jobs SET {end} WHERE token = 1")
    assert await take(2) == TAKEN


async def test_a_run_without_a_lease_keeps_its_slot(take, raw):
    await take(1)
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = NULL WHERE token = 1")
    assert (await take(2)).waits_for == "request"


async def test_the_request_of_a_run_whose_lease_ended_counts_in_rate_limits(take, raw):
    rate_limit = RateLimit(1, 600)
    assert await take(1, rate_limit) == TAKEN
    await raw.execute("UPDATE dl_jobs SET lease_expires_at = now() - interval '1 ms' WHERE token = 1")
    turn = await take(2, rate_limit)
    assert turn.waits_for == "budget"
    assert turn.wait_s > 590


async def test_a_holder_whose_lease_ended_can_not_give_back_what_is_another_s(take, give, raw):
    await take(1)
    await raw.execute("UPDATE dl_sources SET held_until = clock_timestamp() - interval '1 ms'")
    await take(2)
    await give(1, 600)
    turn = await take(3)
    assert turn.waits_for == "request"
    await give(2)
    assert await take(3) == TAKEN


async def test_one_of_many_concurrent_requests_gets_the_source(database, raw):
    turns = []
    for number in range(1, 5):
        await run(raw, number)

    async def ask(number):
        async with open_database(DatabaseOptions(dsn=database.dsn)) as store:
            turns.extend([await store.write(aio_take_slot, "s", number, LEASE_S, ()) for _ in range(3)])

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            for number in range(1, 5):
                nursery.start_soon(ask, number)
    # The three successes are of the same holder, which keeps it.
    assert [turn.waits_for for turn in turns].count(None) == 3
    assert [turn.waits_for for turn in turns].count("request") == 9


async def test_a_request_for_a_source_waits_for_an_uncommitted_take(take, database, until_blocked):
    async with raw_connection(database.dsn) as other, trio.open_nursery() as nursery:
        await take(1)
        turns = []

        async def ask():
            turns.append(await take(3))

        await run(other, 2)
        await other.execute("BEGIN; UPDATE dl_sources SET holder = 2, held_until = now() + interval '1 minute'")
        nursery.start_soon(ask)
        with trio.fail_after(patience_s()):
            while not await _is_blocked(database):  # noqa: ASYNC110 - the database has no event
                await trio.sleep(0.01)
        assert turns == []
        await other.execute("COMMIT")
    assert turns[0].waits_for == "request"


async def _is_blocked(database):
    return await trio.to_thread.run_sync(
        database.psql, "SELECT 1 FROM pg_locks WHERE NOT granted AND cardinality(pg_blocking_pids(pid)) > 0"
    )


async def test_a_rate_limit_holds_over_holders(take, give):
    rate_limit = RateLimit(2, 60)
    for holder in (1, 2):
        assert await take(holder, rate_limit) == TAKEN
        await give(holder)
    turn = await take(3, rate_limit)
    assert turn.waits_for == "budget"
    assert 30 < turn.wait_s <= 60


async def test_of_several_rate_limits_the_one_that_takes_longest_counts(take, give):
    longest, shorter, unreached = RateLimit(2, 600), RateLimit(1, 10), RateLimit(3, 6_000)
    for _ in range(2):
        assert await take(1, longest) == TAKEN
        await give(1)
    turn = await take(1, longest, shorter, unreached)
    assert turn.waits_for == "budget"
    assert 500 < turn.wait_s <= 600


async def test_the_span_of_a_rate_limit_slides(take, give, raw):
    rate_limit = RateLimit(2, 60)
    for _ in range(2):
        await take(1, rate_limit)
        await give(1)
    await raw.execute(
        "UPDATE dl_source_calls SET at = at - interval '50 s' WHERE at = (SELECT min(at) FROM dl_source_calls)"
    )
    # Only the older one must leave the span, not both.
    assert 0 < (await take(1, rate_limit)).wait_s <= 10
    await raw.execute(
        "UPDATE dl_source_calls SET at = at - interval '11 s' WHERE at = (SELECT min(at) FROM dl_source_calls)"
    )
    assert await take(1, rate_limit) == TAKEN


async def test_a_load_with_a_shorter_rate_limit_or_none_does_not_make_a_longer_one_forget(take, give, raw):
    longer, shorter = RateLimit(3, 6_000), RateLimit(100, 1)
    for rate_limits in ([longer], [shorter], []):
        assert await take(1, *rate_limits) == TAKEN
        await give(1)
        await raw.execute("UPDATE dl_source_calls SET at = at - interval '5 s'")
    assert (await take(1, longer)).waits_for == "budget"


async def test_calls_behind_the_longest_span_are_forgotten(take, give, raw):
    for _ in range(3):
        await take(1, RateLimit(100, 60), RateLimit(100, 5))
        await give(1)
        await raw.execute("UPDATE dl_source_calls SET at = at - interval '59 s'")
    assert await raw.fetchval("SELECT count(*) FROM dl_source_calls") == 2


async def test_a_source_without_a_rate_limit_keeps_no_calls(take, give, raw):
    await take(1)
    await give(1)
    await take(1)
    assert await raw.fetchval("SELECT count(*) FROM dl_source_calls") == 0


@pytest.mark.parametrize(
    ("requests", "per_s", "said"),
    [
        (0, 1, "requests: must be an integer from 1 to 1,000,000, not 0"),
        (1.5, 1, "requests: must be an integer from 1 to 1,000,000, not 1.5"),
        (True, 1, "requests: must be an integer from 1 to 1,000,000, not True"),
        (1, 0, "per_s: must be a number of seconds from 0.001 to 604,800, not 0"),
        (1, 604_801, "per_s: must be a number of seconds from 0.001 to 604,800, not 604801"),
        (1, float("nan"), "per_s: must be a number of seconds from 0.001 to 604,800, not nan"),
    ],
)
def test_a_rate_limit_that_makes_no_sense_is_refused(requests, per_s, said):
    with pytest.raises(ValueError, match=r".") as caught:
        RateLimit(requests, per_s)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "per_s: must be a number of seconds from 0.001 to 604,800, not None"),
        ({"per": "week"}, "per: must be 'day', not 'week'"),
        ({"per": "day", "per_s": 60}, "per_s: 60 cannot be combined with per='day'"),
        ({"per_s": 60, "zone": "UTC"}, "zone: 'UTC' needs per='day'; per_s has no time zone"),
        (
            {"per": "day", "zone": "Mars"},
            "zone: must be a time zone of the IANA database, such as Europe/Berlin, not 'Mars'",
        ),
    ],
)
def test_a_rate_limit_has_either_a_span_or_a_zones_day(more, said):
    with pytest.raises(ValueError, match=r".") as caught:
        RateLimit(1, **more)
    assert str(caught.value) == said
