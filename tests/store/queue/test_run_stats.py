"""Statistics of runs (R3): sums are appended, folded by hour, and read without reading any job."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta

import pytest
import trio

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.run_stats import RunOutcome, RunSum, StatsFilter
from dataloader.store.queue.leases import reap
from dataloader.store.queue.run_stats import _STATEMENTS, aio_add_run_stats, fold_run_stats, list_run_stats

pytestmark = pytest.mark.requirement("R3")

HOUR = timedelta(hours=1)
THIS_HOUR = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


@pytest.fixture
def append(raw):
    """Return a function that appends a row like a process, at a given time."""

    async def append(at, queue="q", task="t", outcome="succeeded", runs=1, total_s=1.0, max_s=1.0):
        await raw.execute(
            "INSERT INTO dl_run_stats_new (at, queue, task, outcome, runs, total_s, max_s)"
            " VALUES ($1, $2, $3, $4, $5, $6, $7)",
            *(at, queue, task, outcome, runs, total_s, max_s),
        )

    return append


async def asked(store, **wanted):
    page = await list_run_stats(store, StatsFilter(**{"begin": LONG_AGO} | wanted))
    return [(one.at, one.queue, one.task, one.outcome, one.runs, one.mean_s, one.max_s) for one in page.stats]


async def test_appended_rows_give_the_same_sums_before_and_after_a_fold(store, raw, append):
    half_past = datetime(2026, 3, 1, 10, 30, tzinfo=UTC)
    for at, total_s in ((half_past, 1.0), (half_past + timedelta(minutes=29), 5.0), (half_past + HOUR, 7.0)):
        await append(at, total_s=total_s, max_s=total_s)
        await append(at, queue="other", outcome="failed", runs=2, total_s=1.0, max_s=0.9)
    before = await asked(store)
    ten = half_past.replace(minute=0)
    assert before == [
        (ten, "other", "t", "failed", 4, 0.5, 0.9),
        (ten, "q", "t", "succeeded", 2, 3.0, 5.0),
        (ten + HOUR, "other", "t", "failed", 2, 0.5, 0.9),
        (ten + HOUR, "q", "t", "succeeded", 1, 7.0, 7.0),
    ]
    assert await fold_run_stats(store) == 6
    assert await raw.fetchval("SELECT count(*) FROM dl_run_stats_new") == 0
    assert await asked(store) == before
    await append(half_past, total_s=9.0, max_s=9.0)
    await fold_run_stats(store)
    assert (ten, "q", "t", "succeeded", 3, 5.0, 9.0) in await asked(store)
    assert await raw.fetchval("SELECT count(*) FROM dl_run_stats") == 4


async def test_concurrent_folds_count_each_run_once(store, append):
    for minute in range(60):
        await append(LONG_AGO + timedelta(minutes=minute, days=minute % 2), task=f"t{minute % 7}")
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(fold_run_stats, store)
    await append(LONG_AGO)
    assert sum(row[4] for row in await asked(store)) == 61


async def test_it_is_asked_for_by_time_queue_and_task_and_summed_up_by_day_or_in_all(store, append):
    for hour in range(48):
        await append(datetime(2026, 3, 1, tzinfo=UTC) + hour * HOUR, task=f"t{hour % 2}", max_s=float(hour))
    await fold_run_stats(store)
    march = datetime(2026, 3, 1, tzinfo=UTC)
    day = timedelta(days=1)
    assert [row[0] for row in await asked(store, begin=march + 1.5 * HOUR, end=march + 3 * HOUR)] == [
        march + HOUR,
        march + 2 * HOUR,
    ]
    assert await asked(store, task="t0", by="day", begin=march + 5 * HOUR) == [
        (march, "q", "t0", "succeeded", 12, 1.0, 22.0),
        (march + day, "q", "t0", "succeeded", 12, 1.0, 46.0),
    ]
    assert await asked(store, by="total", begin=march) == [
        (march, "q", "t0", "succeeded", 24, 1.0, 46.0),
        (march, "q", "t1", "succeeded", 24, 1.0, 47.0),
    ]
    assert await asked(store, queue="none") == []
    with pytest.raises(BadRequest, match="end: must be later than begin"):
        StatsFilter(begin=march, end=march)


async def test_the_run_of_a_worker_that_is_gone_lasts_until_its_lease_has_ended(store, raw, add_job, start_worker):
    for attempts in (1, 5):
        await add_job(max_attempts=str(attempts), task="'t'")
    assert len(await start_worker().claim()) == 2
    await raw.execute(
        "UPDATE dl_jobs SET started_at = now() - interval '1 h', run_started_at = now() - interval '100 s',"
        " lease_expires_at = now() - interval '10 s'"
    )
    await reap(store, 10)
    found = {outcome: (runs, round(mean_s)) for _, _, _, outcome, runs, mean_s, _ in await asked(store)}
    assert found == {RunOutcome.LOST: (1, 90), RunOutcome.EXPIRED: (1, 90)}


async def test_a_lease_that_ended_before_all_time_is_taken_back_all_the_same(store, add_job):
    await add_job(status="'running'", lease_expires_at="'-infinity'", started_at="'-infinity'", attempt="1")
    assert len((await reap(store, 10)).became) == 1


@pytest.mark.slow
async def test_run_stats_of_thirty_days_take_a_bounded_multiple_of_a_plain_sum(store, raw):
    """Each is the fastest of ten repetitions, compared with a plain sum of the same rows."""
    await raw.execute(
        "INSERT INTO dl_run_stats SELECT $1::timestamptz - make_interval(hours => h), 'q' || k % 5, 'task ' || k,"
        " 'succeeded', 100, 12.5, 1 FROM generate_series(0, 719) AS h, generate_series(1, 50) AS k",
        THIS_HOUR,
    )
    await raw.execute("ANALYZE dl_run_stats")
    begin = THIS_HOUR - timedelta(days=30)
    ways = ("plain", *_STATEMENTS)
    took = dict.fromkeys(ways, math.inf)
    for _ in range(10):
        for by in ways:
            started = time.perf_counter()
            if by == "plain":
                await raw.fetchval("SELECT sum(runs), sum(total_s) FROM dl_run_stats")
            else:
                page = await list_run_stats(store, StatsFilter(begin=begin, by=by))
                assert len(page.stats) == {"hour": 1_000, "day": 1_000, "total": 50}[by]
            took[by] = min(took[by], time.perf_counter() - started)
    assert not any("dl_jobs" in statement for statement in _STATEMENTS.values())
    assert max(took.values()) < 200 * took["plain"], took  # sorted by hour, and decoded: 50


async def test_sums_are_appended_one_row_a_key(store, raw):
    one, other = RunSum(), RunSum()
    for seconds in (1.0, 3.0):
        one.add(seconds)
    other.add(0.5)
    await store.write(aio_add_run_stats, {("q", "t", "succeeded"): one, ("q", "t", "failed"): other})
    rows = await raw.fetch("SELECT outcome, runs, total_s, max_s FROM dl_run_stats_new ORDER BY 1")
    assert [tuple(row) for row in rows] == [("failed", 1, 0.5, 0.5), ("succeeded", 2, 4.0, 3.0)]


@pytest.mark.requirement("R3")
async def test_rows_that_another_program_has_written_stop_no_fold_and_no_sum(store, raw, append):
    for values in ("'odd', 1, 1, 1", "'succeeded', 9223372036854775807, 1e308, 1e308", "'succeeded', 0, 'NaN', -1"):
        await raw.execute(
            "INSERT INTO dl_run_stats_new (queue, task, outcome, runs, total_s, max_s)"
            f" SELECT 'q', 't', {values} FROM generate_series(1, 3)"
        )
    await raw.execute(
        "INSERT INTO dl_run_stats_new (at, queue, task, outcome, runs, total_s, max_s)"
        " VALUES ('infinity', 'q', 't', 'succeeded', 1, 1, 1), ('4714-11-24 BC', 'q', 't', 'succeeded', 1, 1, 1)"
    )
    assert (await list_run_stats(store, StatsFilter(begin=datetime.now(UTC) - timedelta(hours=1)))).stats == []
    assert await fold_run_stats(store) == 11
    assert await raw.fetchval("SELECT count(*) FROM dl_run_stats") == 0
