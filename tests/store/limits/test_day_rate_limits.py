"""Rate limits by the calendar day of a zone, against a scan over the minutes and a count by dates (S4)."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from odd_clocks import CHANGES, ODD_ZONES

from dataloader import RateLimit, Supplier, Tasks
from dataloader.jobs.limits import LONGEST_DAY_S
from dataloader.store.limits.limit_rows import aio_declare_limits
from dataloader.store.queue.task_rows import aio_declare

pytestmark = pytest.mark.requirement("S4")
MINUTE = timedelta(minutes=1)
INSTANTS = [
    # In the changes of 2010 and 2011 a date was left out, or occurred twice.
    change + timedelta(hours=hours, minutes=minutes)
    for change in CHANGES
    if change.year > 2011
    for hours in range(-30, 54, 2)
    for minutes in (-1, 0, 31)
]


def edge_of(instant, zone, step):
    """Return the last minute, in steps, that has the date of `instant`."""
    at = instant.replace(second=0)
    while (at + step).astimezone(zone).date() == instant.astimezone(zone).date():
        at += step
    return at


@pytest.mark.slow
@pytest.mark.parametrize("name", ODD_ZONES)
async def test_a_day_lasts_from_its_first_minute_to_its_last_across_clock_changes(raw, name):
    zone, chance = ZoneInfo(name), random.Random(name)
    instants = chance.sample(INSTANTS, 40) + [instant + timedelta(seconds=59) for instant in INSTANTS[:5]]
    rows = await raw.fetch("SELECT d.* FROM unnest($2::timestamptz[]) AS i, dl_day($1, i) AS d", name, instants)
    for instant, (begins, ends) in zip(instants, rows, strict=True):
        assert (begins, ends) == (edge_of(instant, zone, -MINUTE), edge_of(instant, zone, MINUTE) + MINUTE), instant
        assert (ends - begins).total_seconds() <= LONGEST_DAY_S


@pytest.fixture
def declared(store):
    """Return a function that declares the supplier `s` with these rate limits, and a task that uses it."""

    async def declared(*rate_limits):
        tasks = Tasks()
        supplier = Supplier("s", rate_limits=rate_limits, margin_s=10)
        tasks.task("t", queue="q", supplier=supplier)(noop)
        await store.write(aio_declare, tasks.values(), "test")
        await store.write(aio_declare_limits, tasks.values(), tasks.suppliers)

    return declared


async def noop(_job): ...


LEFT = """
SELECT u.units, u.wait_s FROM dl_sources s, dl_budgets_left(s, s.units, s.spans_s, s.zones, 2, $1) AS u
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
async def test_a_daily_limit_counts_starts_since_midnight_and_allows_none_across_it(raw, declared, seed):
    chance = random.Random(seed)
    name = chance.choice([zone for zone in ODD_ZONES if zone != "UTC"])
    zone, around = ZoneInfo(name), chance.choice([change for change in CHANGES if change.year > 2011])
    day, span = RateLimit(40, per="day", zone=name), RateLimit(25, per_s=3_600)
    await declared(day, span)
    begin = around - timedelta(days=1)
    calls = sorted(begin + timedelta(seconds=chance.randrange(3 * 86_400)) for _ in range(90))
    taken, n = [], 0
    await raw.execute("UPDATE dl_sources SET last_at = $1", begin)
    for at in calls:
        units, wait_s = await raw.fetchrow(LEFT, at)
        today = at.astimezone(zone).date()
        in_day = sum(cost for then, cost in taken if then.astimezone(zone).date() == today)
        in_span = sum(cost for then, cost in taken if then > at - timedelta(seconds=3_610))
        assert units == min(40 - in_day, 25 - in_span)
        ends = edge_of(at, zone, MINUTE) + MINUTE
        is_late = at + timedelta(seconds=10) >= ends
        assert (wait_s > 0) == (units < 2 or is_late)
        if in_day > 38 or is_late:
            assert wait_s >= (ends - at).total_seconds()
        if wait_s == 0:
            cost = chance.choice([1, 2])
            n += cost
            taken.append((at, cost))
            await raw.execute("INSERT INTO dl_source_calls (source, at, n, cost) VALUES ('s', $1, $2, $3)", at, n, cost)
            await raw.execute("UPDATE dl_sources SET last_n = $1, last_at = $2", n, at)
    assert n > 40


async def test_calls_are_kept_for_the_longest_day_and_count_in_a_new_daily_limit(raw, declared):
    await declared(RateLimit(9, per_s=60))
    for _ in range(3):
        await raw.execute("SELECT dl_take_units('s', 1, 0)")
    # Midnight was two hours ago: the zone is the database's notation for such a clock.
    clock = datetime.now(UTC) - timedelta(hours=2)
    ahead = f"<x>+{clock:%H:%M:%S}"
    await declared(RateLimit(9, per="day"))
    await raw.execute("UPDATE dl_sources SET zones = ARRAY[$1]", ahead)
    assert (await raw.fetchrow(LEFT, datetime.now(UTC)))["units"] == 6
    assert await raw.fetchval("SELECT kept_s FROM dl_sources") == LONGEST_DAY_S + 10
    await raw.execute("UPDATE dl_source_calls SET at = at - interval '110 min'")
    await raw.execute("SELECT dl_take_units('s', 1, 0)")
    assert (await raw.fetchrow(LEFT, datetime.now(UTC)))["units"] == 5
    await declared(RateLimit(9, per_s=60))
    assert (await raw.fetchrow(LEFT, datetime.now(UTC)))["units"] == 8


async def test_a_loads_request_counts_in_its_day_and_free_starts_may_precede_midnight(raw, declared):
    await declared(RateLimit(9, per="day"))
    at = datetime(2026, 11, 23, 12, tzinfo=UTC)
    await raw.execute("UPDATE dl_sources SET holder = 1, held_until = $1", at - timedelta(hours=1))
    assert (await raw.fetchrow(LEFT, at))["units"] == 8
    assert (await raw.fetchrow(LEFT, at + timedelta(hours=12)))["units"] == 9
    late = at.replace(hour=23, minute=59, second=55)
    assert (await raw.fetchrow(LEFT, late))["wait_s"] == 5
    assert (await raw.fetchrow(LEFT.replace(" 2, ", " 0, "), late))["wait_s"] == 0
