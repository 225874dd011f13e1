"""Windows: the begin and the end of a run, and its division (E6)."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloader.flows.etl.declare.windows import SEGMENTS, Windows, begin_of_day, is_begin_of_day
from dataloader.jobs.errors import BadRequest

pytestmark = pytest.mark.requirement("E6")
NOW = datetime(2026, 4, 14, 9, 30, tzinfo=UTC)


def days(windows):
    return [(f"{window.start:%Y-%m-%d}", f"{window.end:%Y-%m-%d}") for window in windows]


def test_a_first_run_begins_at_the_start_and_ends_now():
    windows = Windows(start=date(2026, 2, 10)).plan(watermark=None, now=NOW)
    assert days(windows) == [("2026-02-10", "2026-03-01"), ("2026-03-01", "2026-04-01"), ("2026-04-01", "2026-04-14")]
    assert windows[-1].end == NOW


def test_a_later_run_begins_where_the_last_one_ended_less_the_look_back():
    load = Windows(start=date(2020, 1, 1), segment="day", look_back=timedelta(days=2))
    windows = load.plan(watermark=datetime(2026, 4, 13, tzinfo=UTC), now=NOW)
    assert days(windows)[0] == ("2026-04-11", "2026-04-12")
    assert len(windows) == 4


def test_the_look_back_does_not_reach_behind_the_start():
    load = Windows(start=date(2026, 4, 1), segment="week", look_back=timedelta(days=365))
    assert days(load.plan(watermark=datetime(2026, 4, 10, tzinfo=UTC), now=NOW))[0] == ("2026-04-01", "2026-04-06")


def test_windows_end_before_the_delay():
    windows = Windows(start=date(2026, 4, 1), segment="day", delay=timedelta(days=3)).plan(watermark=None, now=NOW)
    assert windows[-1].end == NOW - timedelta(days=3)


def test_a_run_that_is_asked_for_more_than_there_is_yet_ends_where_any_other_does():
    load = Windows(start=date(2026, 4, 1), segment="day", delay=timedelta(days=3))
    assert load.plan(watermark=None, now=NOW, until=date(2027, 1, 1))[-1].end == NOW - timedelta(days=3)
    with pytest.raises(BadRequest, match="from"):
        load.plan(watermark=None, now=NOW, since=date(2026, 4, 13), until=date(2027, 1, 1))


def test_nothing_is_new():
    assert Windows(start=date(2026, 1, 1)).plan(watermark=NOW, now=NOW) == []


def test_a_run_with_its_own_span_loads_that_span_instead():
    windows = Windows(start=date(2020, 1, 1)).plan(
        watermark=NOW, now=NOW, since=date(1999, 1, 15), until=date(1999, 3, 1)
    )
    assert days(windows) == [("1999-01-15", "1999-02-01"), ("1999-02-01", "1999-03-01")]


def test_a_day_is_as_long_as_its_zone_has_it():
    load = Windows(start=date(2026, 3, 28), segment="day", zone="Europe/Berlin")
    windows = load.plan(watermark=None, now=NOW, until=date(2026, 3, 31))
    lengths = [window.end.astimezone(UTC) - window.start.astimezone(UTC) for window in windows]
    assert lengths == [timedelta(hours=hours) for hours in (24, 23, 24)]


@pytest.mark.parametrize(
    ("zone", "day", "begins"),
    [
        ("America/Santiago", date(2024, 9, 8), "2024-09-08T01:00:00-03:00"),
        ("Africa/Cairo", date(2024, 4, 26), "2024-04-26T01:00:00+03:00"),
        ("Asia/Beirut", date(2024, 3, 31), "2024-03-31T01:00:00+03:00"),
        ("America/Havana", date(2024, 3, 10), "2024-03-10T01:00:00-04:00"),
        ("America/Havana", date(2024, 11, 3), "2024-11-03T00:00:00-04:00"),  # its midnight occurs twice
        ("America/Toronto", date(1919, 3, 31), "1919-03-31T00:30:00-04:00"),  # the clock skipped 23:30 to 00:30
        ("Pacific/Apia", date(2011, 12, 30), "2011-12-31T00:00:00+14:00"),  # there is no such day
        ("Europe/Berlin", date(2024, 3, 31), "2024-03-31T00:00:00+01:00"),
    ],
)
def test_a_day_begins_with_its_first_instant(zone, day, begins):
    found = begin_of_day(day, ZoneInfo(zone))
    assert found.isoformat() == begins
    assert is_begin_of_day(found)
    second = timedelta(seconds=1)
    before, after = ((found.astimezone(UTC) + shift).astimezone(ZoneInfo(zone)) for shift in (-second, second))
    assert before.date() < found.date() == after.date()
    assert not is_begin_of_day(before)
    assert not is_begin_of_day(after)


@pytest.mark.parametrize("segment", ["day", "week", "month", "year"])
def test_segments_begin_with_the_first_instant_of_a_day(segment):
    load = Windows(start=date(2024, 9, 1), segment=segment, zone="America/Santiago")
    windows = load.plan(watermark=None, now=NOW, until=date(2026, 1, 1))
    assert all(is_begin_of_day(moment) for window in windows for moment in (window.start, window.end))


@given(
    segment=st.sampled_from([*SEGMENTS, timedelta(hours=7), timedelta(days=10)]),
    start=st.datetimes(NOW.replace(year=2020, tzinfo=None), NOW.replace(year=2021, tzinfo=None)),
    length=st.timedeltas(timedelta(minutes=1), timedelta(days=40)),
    zone=st.sampled_from(["UTC", "Europe/Berlin", "Australia/Lord_Howe", "America/New_York", "America/Santiago"]),
)
def test_segments_follow_each_other_without_gaps_and_reach_the_end(segment, start, length, zone):
    begin = start.replace(tzinfo=ZoneInfo(zone))
    end = (begin.astimezone(UTC) + length).astimezone(ZoneInfo(zone))
    windows = Windows(start=start, segment=segment, zone=zone).plan(watermark=None, now=end)
    instants = [(window.start.astimezone(UTC), window.end.astimezone(UTC)) for window in windows]
    assert all(first < last for first, last in instants)
    assert [last for _, last in instants[:-1]] == [first for first, _ in instants[1:]]
    assert instants[0][0] == begin.astimezone(UTC)
    assert instants[-1][1] == end.astimezone(UTC)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"segment": "fortnight"}, "segment: must be hour, day, week, month, year or a timedelta, not 'fortnight'"),
        ({"segment": timedelta()}, "segment: must be at least a second, not 0:00:00"),
        ({"look_back": timedelta(days=-1)}, "look_back: must be a timedelta, at least zero, not -1 day, 0:00:00"),
        ({"zone": "Mars/Olympus"}, "zone: must be a time zone such as Europe/Berlin, not 'Mars/Olympus'"),
    ],
)
def test_bad_windows_are_refused_by_name(fields, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        Windows(start=date(2026, 1, 1), **fields)


def test_a_span_that_ends_before_it_begins_is_refused():
    now, since = NOW.replace(microsecond=6423), date(2026, 5, 1)
    load = Windows(start=date(2020, 1, 1), delay=timedelta(days=12))
    for windows, until, told in (
        (Windows(start=date(2020, 1, 1)), None, "2026-04-14T09:30:00+00:00 (now)"),
        (load, None, "2026-04-02T09:30:00+00:00 (now minus the load's delay of 12 days)"),
        (load, date(2026, 4, 1), "2026-04-01T00:00:00+00:00 (the value of to)"),
    ):
        said = re.escape(f"from: must be a time before {told}, not 2026-05-01T00:00:00+00:00")
        with pytest.raises(BadRequest, match=f"^{said}$"):
            windows.plan(watermark=None, now=now, since=since, until=until)


@pytest.mark.slow
def test_a_span_of_too_many_segments_is_refused():
    with pytest.raises(ValueError, match="more than 100,000"):
        Windows(start=date(1900, 1, 1), segment=timedelta(seconds=1)).plan(watermark=None, now=NOW)
