"""Work periods, compared with a scan over the minutes (S1, S4)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from odd_clocks import CHANGES, ODD_ZONES

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.work_periods import DAYS, WEEK, WorkPeriods, closes_at

MINUTE = timedelta(minutes=1)
UTC_ZONE = ZoneInfo("UTC")
CLOCKS = st.sampled_from(["00:00", "00:30", "01:00", "02:00", "02:30", "03:00", "12:00", "23:00", "23:30"])
ENDS = st.one_of(CLOCKS, st.sampled_from(["24:00", "23:59"]))
SOME_DAYS = st.one_of(
    st.just("DAILY"),
    st.lists(st.sampled_from(DAYS), min_size=1, max_size=3).map(",".join),
    st.tuples(st.sampled_from(DAYS), st.sampled_from(DAYS)).map("-".join),
)
PERIODS = st.tuples(SOME_DAYS, CLOCKS, ENDS).filter(lambda p: p[1] != p[2]).map(lambda p: f"{p[0]} {p[1]}-{p[2]}")


def is_open(texts, wall):
    """Return whether a period is open, by the days and the clock in its text."""
    for text in texts:
        days, _, clock = text.partition(" ")
        begin, _, end = clock.partition("-")
        end = "24:00" if end == "23:59" else end
        days = ",".join(DAYS) if days == "DAILY" else days
        on = set()
        for part in days.split(","):
            first, _, last = part.partition("-")
            day = DAYS.index(first)
            on.add(day)
            while last and DAYS[day] != last:
                day = (day + 1) % 7
                on.add(day)
        now = f"{wall:%H:%M}"
        if end > begin:
            if wall.weekday() in on and begin <= now < end:
                return True
        elif (wall.weekday() in on and now >= begin) or ((wall.weekday() - 1) % 7 in on and now < end):
            return True
    return False


@pytest.mark.full
@pytest.mark.requirement("S4")
@settings(max_examples=60, deadline=None)
@given(st.lists(PERIODS, min_size=1, max_size=3), st.sampled_from(ODD_ZONES), st.sampled_from(CHANGES))
@example(["SAT 23:30-00:30"], "America/St_Johns", datetime(2010, 11, 7, tzinfo=UTC))
@example(["FRI 10:00-12:00"], "Pacific/Apia", datetime(2011, 12, 30, tzinfo=UTC))
def test_periods_open_and_close_when_the_clock_says_so(texts, name, change):
    zone = ZoneInfo(name)
    periods = WorkPeriods.parsed(texts, zone)
    at = change - timedelta(days=1, minutes=17)
    changes, was = [], None
    for _ in range(3 * 24 * 60):
        at += MINUTE
        now = is_open(texts, at.astimezone(zone).replace(tzinfo=None))
        assert periods.is_open(at) == now
        if was is not None and now != was:
            changes.append(at)
        was = now
    found, at = [], change - timedelta(days=1, minutes=16)
    while (following := periods.next_change(at)) is not None and following <= changes[-1] if changes else False:
        found.append(following)
        at = following
    assert found == changes


@pytest.mark.requirement("S1")
def test_the_documents_periods():
    periods = WorkPeriods.parsed(["MON-FRI 00:00-06:00", "SAT-SUN 00:00-23:59"], UTC_ZONE)
    assert periods.ranges == ((0, 360), (1440, 1800), (2880, 3240), (4320, 4680), (5760, 6120), (7200, WEEK))
    sunday_night = datetime(2026, 11, 22, 23, 59, 30, tzinfo=UTC)
    assert periods.is_open(sunday_night)
    assert periods.next_change(sunday_night) == datetime(2026, 11, 23, 6, tzinfo=UTC)
    always = WorkPeriods.parsed([], UTC_ZONE)
    assert always.is_open(sunday_night)
    assert always.next_change(sunday_night) is None


@pytest.mark.requirement("S4")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "MON",
        "MON 06:00",
        "MON 6:00-7:00",
        "MON 00:00-00:00",
        "MON 25:00-26:00",
        "MON 24:00-06:00",
        "MON 10:00-24:01",
        "MON 10:60-11:00",
        "MOON 00:00-06:00",
        "MON- 00:00-06:00",
        "MON,,TUE 00:00-06:00",
        "MON - FRI 00:00-06:00",
        "MON 00:00-06:00 UTC",
        "MON \N{ARABIC-INDIC DIGIT ZERO}0:00-06:00",
    ],
)
def test_an_invalid_period_is_refused(text):
    with pytest.raises(BadRequest, match=r"^work_periods: must be days and times, such as 'MON-FRI 00:00-06:00'"):
        WorkPeriods.parsed([text], UTC_ZONE)


@pytest.mark.requirement("S4")
@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(PERIODS, st.sampled_from(ODD_ZONES), st.integers(0, 59)), min_size=1, max_size=3),
    st.sampled_from(CHANGES),
)
def test_several_periods_close_together_with_the_first_by_its_margin_earlier(several, change):
    together = [(WorkPeriods.parsed([text], ZoneInfo(zone)), margin_s) for text, zone, margin_s in several]
    at = change - timedelta(hours=20)
    closes = closes_at(together, at)
    for minute in range(2 * 24 * 60):
        now = at + minute * MINUTE
        closed = [m for p, m in together if not p.is_open(now + timedelta(seconds=m))]
        if closed:
            assert closes is not None
            assert now - MINUTE < closes <= now
            return
        assert closes is None or closes > now
