"""Cron expressions, compared with a scan over the minutes of years in zones with odd clocks (R7)."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from itertools import islice
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import example, given, settings
from hypothesis import strategies as st
from odd_clocks import CHANGES, ODD_ZONES

from dataloader.jobs.cron import Cron, shortest_pause
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.zones import zone_named

MINUTE = timedelta(minutes=1)
DAY = timedelta(days=1)
BERLIN = ZoneInfo("Europe/Berlin")

MINUTES = ["0", "30", "59", "1", "0,15,45", "*", "*/20", "7-50/9"]
HOURS = ["0", "1", "2", "3", "23", "0-3", "*", "*/2", "1,2,23"]
DATES = ["*", "1", "L", "LW", "29-31", "*/2"]
MONTHS = ["*", "2,3,10", "JAN-DEC/3"]
WEEKDAYS = ["*", "SUN", "7", "MON-FRI", "SUN#2", "6L", "0"]
EXPRESSIONS = st.tuples(*map(st.sampled_from, (MINUTES, HOURS, DATES, MONTHS, WEEKDAYS))).map(" ".join)


def walk(text, zone, begin, end):
    """Return the times from `begin` to `end`, by checking each minute and the clock of the minute before."""
    days = CronSim(text, datetime(2000, 1, 1, tzinfo=UTC))

    def matches(wall):
        in_day = wall.minute in days.minutes and wall.hour in days.hours
        return in_day and wall.month in days.months and days.match_day(wall.date())

    is_fixed = "*" not in {part[0] for part in text.split()[:2]}
    shown, found = set(), []
    at = begin - 2 * DAY
    last = None
    while at <= end:
        wall = at.astimezone(zone).replace(tzinfo=None)
        if not is_fixed:
            is_due = matches(wall)
        else:
            is_due = matches(wall) and wall not in shown
            while last is not None and last + MINUTE < wall:
                last += MINUTE
                is_due = is_due or matches(last)
        shown.add(wall)
        last = wall if last is None else max(wall, last) if is_fixed and wall < last else wall
        if is_due and at >= begin:
            found.append(at)
        at += MINUTE
    return found


@pytest.mark.slow
@pytest.mark.requirement("R7")
@settings(max_examples=60, deadline=None)
@given(EXPRESSIONS, st.sampled_from(ODD_ZONES), st.sampled_from(CHANGES))
@example("30 23 * * *", "America/St_Johns", datetime(2010, 11, 7, tzinfo=UTC))
@example("*/20 * * * *", "America/St_Johns", datetime(2010, 11, 7, tzinfo=UTC))
@example("0 2 * * *", "Pacific/Apia", datetime(2011, 12, 30, tzinfo=UTC))
def test_the_times_are_those_of_a_walk_over_the_minutes(text, name, change):
    zone = ZoneInfo(name)
    cron = Cron.parsed(text, zone)
    begin, end = change - DAY, change + 2 * DAY
    expected = walk(text, zone, begin, end)
    assert list(cron.after(begin - MINUTE, end)) == expected
    assert list(cron.until(end, begin - MINUTE)) == expected[::-1]
    for found in expected[:3]:
        assert next(cron.until(found, begin - MINUTE)) == found
        assert found not in list(cron.after(found, end))


@pytest.mark.requirement("R7")
def test_a_fixed_time_runs_once_a_day_and_stars_follow_the_wall_clock():
    spring, autumn = datetime(2026, 3, 28, 22, tzinfo=UTC), datetime(2026, 10, 24, 22, tzinfo=UTC)
    fixed = Cron.parsed("30 2 * * *", BERLIN)
    assert next(fixed.after(spring)) == datetime(2026, 3, 29, 1, 0, tzinfo=UTC)
    assert list(islice(fixed.after(autumn), 2)) == [
        datetime(2026, 10, 25, 0, 30, tzinfo=UTC),
        datetime(2026, 10, 26, 1, 30, tzinfo=UTC),
    ]
    stars = Cron.parsed("30 * * * *", BERLIN)
    assert [found.astimezone(BERLIN).strftime("%H:%M") for found in islice(stars.after(spring), 3, 6)] == [
        "03:30",
        "04:30",
        "05:30",
    ]
    assert [found.astimezone(BERLIN).strftime("%H:%M") for found in islice(stars.after(autumn), 2, 5)] == [
        "02:30",
        "02:30",
        "03:30",
    ]


@pytest.mark.requirement("R7")
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("* * * *", "has 4 fields"),
        ("0 * * * * *", "has 6 fields"),
        ("@reboot", "has 1 fields"),
        ("61 * * * *", "has an invalid minute"),
        ("* 24 * * *", "has an invalid hour"),
        ("* * 0 * *", "has an invalid day-of-month"),
        ("* * * 13 *", "has an invalid month"),
        ("* * * * MOON", "has an invalid day-of-week"),
        ("*/0 * * * *", "has an invalid minute"),
        ("0 0 31 2 *", "has an invalid day-of-month"),
        ("0 0 */31 * MON#2", "has no date"),
        pytest.param(f"{'9' * 5_000} * * * *", "has more than 1,000 characters", id="a number that is too long"),
        pytest.param(f"{'0,' * 500_000}0 * * * *", "has more than 1,000 characters", id="a list that is too long"),
    ],
)
def test_an_expression_that_means_nothing_is_refused(text, says):
    with pytest.raises(BadRequest, match=rf"^cron: must have five fields .*; {re.escape(f'{text!r:.100}')} {says}$"):
        Cron.parsed(text, BERLIN)


def test_a_rare_time_is_found_and_a_year_is_walked_backwards_by_days():
    leap = Cron.parsed("0 12 29 2 MON#5,*", ZoneInfo("UTC"))
    assert next(leap.after(datetime(2026, 1, 1, tzinfo=UTC))).month == 2
    every = Cron.parsed("* * * * *", BERLIN)
    now = datetime(2026, 6, 1, 12, 0, 30, tzinfo=UTC)
    assert next(every.until(now, now - 365 * DAY)) == datetime(2026, 6, 1, 12, 0, tzinfo=UTC)
    assert shortest_pause(every, now) == MINUTE


@pytest.mark.parametrize("name", ["", "Mars/Base", "../etc/passwd", "Europe", "x" * 300, "/etc/localtime", "a\0b"])
def test_a_zone_that_does_not_exist_is_refused(name):
    with pytest.raises(BadRequest, match=r"^zone: must be a time zone of the IANA database"):
        zone_named(name)
