"""Sums of each task on the page of statistics: from the hours, or from the days that a trigger sums up."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
import trio

from dataloader.jobs.run_stats import RunOutcome, StatsFilter
from dataloader.store.migrations import function_set
from dataloader.store.queue import task_sums
from dataloader.store.queue.run_stats import fold_run_stats
from dataloader.store.queue.task_sums import newest_sums, sums_of_tasks

pytestmark = pytest.mark.requirement("R3", "E11")

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
MARCH = datetime(2026, 3, 1, tzinfo=UTC)
WRONG = {RunOutcome.FAILED}
BY_DAY = "SELECT day, queue, task, outcome, runs, total_s, max_s FROM dl_run_stats_days ORDER BY 1, 2, 3, 4"
OF_HOURS = """
SELECT date_trunc('day', hour, 'UTC') AS day, queue, task, outcome, sum(runs)::bigint AS runs, sum(total_s) AS total_s,
       max(max_s) AS max_s FROM dl_run_stats GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""
APPEND = """
INSERT INTO dl_run_stats_new (at, queue, task, outcome, runs, total_s, max_s)
SELECT $1::timestamptz + make_interval(mins => 7 * n), 'q' || n % 3, 't' || n % 5,
       CASE WHEN n % 4 = 0 THEN 'failed' ELSE 'succeeded' END, 1 + n % 2, n, n FROM generate_series(1, $2::int) AS n
"""


async def asked(store, begin=MARCH, **wanted):
    limits = {"most": 10_000, "limit": 30} | {name: wanted.pop(name) for name in ("most", "limit") if name in wanted}
    return await sums_of_tasks(store, StatsFilter(begin=begin, **wanted), wrong=WRONG, **limits)


async def test_days_are_the_sums_of_their_hours_after_a_fold_by_any_program(store, raw):
    await raw.execute(APPEND, MARCH, 600)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(fold_run_stats, store)
    await raw.execute(APPEND, MARCH, 600)
    await fold_run_stats(store)
    # As another program would.
    await raw.execute(
        "UPDATE dl_run_stats SET runs = runs + 5, max_s = 1e4 WHERE queue = 'q1' AND hour < $1", MARCH + DAY
    )
    days = [tuple(row) for row in await raw.fetch(BY_DAY)]
    assert days == [tuple(row) for row in await raw.fetch(OF_HOURS)]
    assert {row[0] for row in days} == {MARCH, MARCH + DAY, MARCH + 2 * DAY}


async def test_hours_from_before_there_were_days_are_summed_up_when_the_trigger_is_made(database, raw):
    await raw.execute("DROP TRIGGER dl_run_stats_of_day ON dl_run_stats")
    await raw.execute(
        "INSERT INTO dl_run_stats SELECT $1::timestamptz + make_interval(hours => n), 'q', 't', 'succeeded', n, n, n"
        " FROM generate_series(1, 40) AS n",
        MARCH,
    )
    for _ in range(2):
        database.psql(f"BEGIN; {function_set.script().replace('{schema}', 'public')}; COMMIT")
    assert [row["runs"] for row in await raw.fetch(BY_DAY)] == [sum(range(1, 24)), sum(range(24, 41))]


@pytest.mark.parametrize("folded", [True, False])
async def test_a_task_is_summed_up_by_hour_and_by_day_the_same(store, raw, folded):
    await raw.execute(APPEND, MARCH, 600)
    if folded:
        await fold_run_stats(store)
    # A begin in the middle of a day includes the whole day; an end in the middle includes its hours until then.
    end = MARCH + 2 * DAY + 5 * HOUR
    by_day, by_hour = (
        await asked(store, by="day", begin=MARCH + 3 * HOUR, end=end),
        await asked(store, by="hour", end=end),
    )
    assert by_day.is_whole
    assert by_day.count == by_hour.count == 5
    assert [(one.task, one.runs, one.wrong, one.max_s, one.outcomes) for one in by_day.tasks] == [
        (one.task, one.runs, one.wrong, one.max_s, one.outcomes) for one in by_hour.tasks
    ]
    minutes = (end - MARCH) // timedelta(minutes=1)
    ran = [n for n in range(1, 601) if 7 * n < minutes]
    first = by_day.tasks[0]
    own = [n for n in ran if f"t{n % 5}" == first.task]
    assert (first.runs, first.wrong) == (sum(1 + n % 2 for n in own), sum(1 for n in own if n % 4 == 0))
    assert (first.max_s, first.total_s) == (max(own), sum(own))
    assert first.said == f"succeeded {first.runs - first.wrong}, failed {first.wrong}"
    assert sorted(first.parts)[1] == (1, *_ended(n for n in own if 24 * 60 <= 7 * n < 48 * 60))
    assert max(by_hour.tasks[0].parts)[0] == 52
    [newest, *_] = await newest_sums(
        store, StatsFilter(begin=MARCH, end=end, by="day"), wrong=WRONG, most=10_000, limit=7
    )
    assert (newest.at, newest.task) == (MARCH + 2 * DAY, "t0")
    few = await asked(store, by="day", end=end, limit=2)
    assert (len(few.tasks), few.count) == (2, 5)
    assert not (await asked(store, by="day", end=end, most=3)).is_whole
    assert (await asked(store, by="hour", queue="none")).tasks == []


def _ended(numbers):
    numbers = list(numbers)
    return sum(1 + n % 2 for n in numbers), sum(1 for n in numbers if n % 4 == 0)


async def test_a_month_by_day_reads_the_days_and_no_hour(store, raw):
    await raw.execute(
        "INSERT INTO dl_run_stats SELECT $1::timestamptz + h * interval '1 h', 'q', 't' || t, 'succeeded', 1, 1, 1"
        " FROM generate_series(0, 999) AS h, generate_series(1, 10) AS t",
        MARCH,
    )
    await raw.execute("VACUUM ANALYZE dl_run_stats, dl_run_stats_days")
    values = (MARCH, None, None, None, 10_001, ["failed"], 86_400, 30)

    async def explained(connection):
        async with connection.transaction():
            await connection.execute(task_sums._AS_A_WALK)
            sql = task_sums._BY["day"] + task_sums._TASKS
            text = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", *values)
        return json.loads(text)[0]["Plan"]

    def nodes(plan):
        yield plan
        for part in plan.get("Plans", ()):
            yield from nodes(part)

    read = [
        (node["Relation Name"], node["Actual Rows"] * node["Actual Loops"])
        for node in nodes(await store.run(explained))
        if "Relation Name" in node
    ]
    assert dict(read)["dl_run_stats_days"] == 42 * 10
    assert dict(read).get("dl_run_stats", 0) == 0
