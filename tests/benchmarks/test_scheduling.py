"""Faults that the benchmark of schedules and limits detects: pure functions over its records."""

from datetime import UTC, datetime, timedelta

import pytest

from benchmarks.scheduling.planned_times import PlannedTimes
from benchmarks.scheduling.reached import Reached, table
from benchmarks.scheduling.spans import allowed_per_s, most_within, share_used
from dataloader import RateLimit, Supplier

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def test_units_count_within_any_half_open_span_in_any_order():
    calls = [(3.0, 1), (0.0, 3), (0.5, 1), (0.999, 1), (1.0, 2)]
    assert most_within(calls, 1) == 5
    assert most_within(calls, 1.001) == 7
    assert most_within(calls, 0.1) == 3
    assert most_within([], 1) == 0


def test_the_share_is_that_of_the_scarcest_rate_limit_after_its_first_span():
    supplier = Supplier("s", rate_limits=(RateLimit(20, per_s=1), RateLimit(50, per_s=5)), margin_s=1)
    assert allowed_per_s(supplier) == pytest.approx(50 / 6)
    first = [(100.0, 50)]
    assert share_used([*first, (106.0, 50), (112.0, 25)], supplier, until=118.0) == pytest.approx(0.75)


def test_each_planned_time_has_one_job_or_a_reason():
    times = [FIRST + number * MINUTE for number in range(6)]
    found = PlannedTimes()
    jobs = {times[0]: 1, times[2]: 2, times[4]: 1, times[5]: 1, FIRST - MINUTE: 1}
    found.judge(FIRST, FIRST + 5 * MINUTE, MINUTE, jobs, [(times[3], times[4])])
    assert found == PlannedTimes(times=5, jobs=3, left_out=2, missing=1, both=1, twice=1, strange=2)


def test_the_table_tells_a_broken_promise_from_a_missed_bar():
    lines = [
        Reached("units", 51, most=50, promise=True),
        Reached("ratio", 0.8412, least=0.95, note="12 and 14"),
        Reached("first", 0.25, most=0.5),
        Reached("rate", 1234.0),
    ]
    assert table(lines).splitlines()[2:] == [
        "| units | 51 | ≤ 50 | **broken** |  |",
        "| ratio | 0.841 | ≥ 0.95 | **missed** | 12 and 14 |",
        "| first | 0.25 | ≤ 0.5 | reached |  |",
        "| rate | 1,234 |  |  |  |",
    ]
