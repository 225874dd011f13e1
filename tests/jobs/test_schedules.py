"""Due times of a schedule, compared with a loop over all its times (R7)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from calls import counted_calls
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader import Tasks
from dataloader.jobs import cron, schedules
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.schedules import COUNTED, Every, Missed, Schedule, plan

START = datetime(2026, 3, 28, tzinfo=UTC)
SECOND = timedelta(seconds=1)


def nightly(**more):
    return Schedule(**{"name": "nightly", "task": "report", "cron": "0 6 * * MON-FRI", "zone": "Europe/Moscow"} | more)


SCHEDULES = st.builds(
    lambda spec, missed, grace_s, limit, within_s, ends_s: Schedule(
        name="s",
        task="t",
        missed=missed,
        grace_s=grace_s,
        missed_limit=limit,
        missed_within_s=within_s,
        start_at=START,
        end_at=None if ends_s is None else START + timedelta(seconds=ends_s),
        zone="Europe/Berlin",
        **spec,
    ),
    st.sampled_from([{"every_s": 600}, {"every_s": 3_601.5}, {"cron": "*/20 * * * *"}, {"cron": "30 2 * * *"}]),
    st.sampled_from(list(Missed)),
    st.sampled_from([0, 60, 3_600]),
    st.integers(1, 6),
    st.sampled_from([None, 60, 7_200]),
    st.sampled_from([None, 86_400, 100_000]),
)


@pytest.mark.slow
@pytest.mark.requirement("R7")
@settings(max_examples=200, deadline=None)
@given(SCHEDULES, st.integers(0, 3 * 86_400), st.integers(-5_000, 2 * 86_400))
def test_due_times_equal_those_of_a_loop_over_all_times(schedule, asked_s, later_s):
    times = schedule.times(START)
    every = [at for at in times.after(START - SECOND, START + timedelta(days=7)) if at >= START]
    if schedule.end_at is not None:
        every = [at for at in every if at < schedule.end_at]
    next_at = schedule.next_after(times, START + timedelta(seconds=asked_s))
    following = [at for at in every if at > START + timedelta(seconds=asked_s)]
    assert next_at == (following[0] if following else None)
    if next_at is None:
        return
    now = next_at + timedelta(seconds=later_s)
    found = plan(schedule, times, next_at, now)
    past = [at for at in every if next_at <= at <= now]
    if now < next_at:
        assert (found.due, found.left_out, found.next_at) == ((), 0, next_at)
        return
    match schedule.missed:
        case Missed.ONCE:
            wanted = past[-1:]
        case Missed.SKIP:
            wanted = [at for at in past if (now - at).total_seconds() <= schedule.grace_s][-schedule.missed_limit :]
        case Missed.ALL:
            within_s = schedule.missed_within_s
            recent = [at for at in past if within_s is None or (now - at).total_seconds() <= within_s]
            wanted = recent[-schedule.missed_limit :]
    assert list(found.due) == wanted
    left_out = past[: len(past) - len(wanted)]
    assert found.left_out == len(left_out)
    assert (found.first_left_out, found.last_left_out) == ((left_out[0], left_out[-1]) if left_out else (None, None))
    assert found.next_at == next((at for at in every if at > now), None)


@pytest.mark.requirement("R7")
def test_a_years_pause_is_planned_as_quickly_as_a_minutes():
    for spec, module in (({"cron": "* * * * *"}, cron), ({"every_s": 1}, schedules)):
        schedule = Schedule(name="s", task="t", **spec)
        with counted_calls(module) as calls:
            found = plan(schedule, schedule.times(START), START, START + timedelta(days=365))
        assert len(found.due) == 1
        assert found.left_out == COUNTED
        assert 0 < calls.total() < 20_000


@pytest.mark.requirement("R7")
def test_the_next_time_follows_from_the_plan_and_not_from_the_end():
    every = Every(START, timedelta(seconds=100))
    late = START + timedelta(seconds=250)
    assert next(every.after(late)) == START + timedelta(seconds=300)
    assert next(every.until(late, START)) == START + timedelta(seconds=200)
    assert list(every.until(START - SECOND, START - timedelta(days=1))) == []


@pytest.mark.requirement("R7")
def test_jitter_moves_each_time_alike_everywhere_and_never_by_more():
    schedule = nightly(jitter_s=600)
    times = [at for at, _ in zip(schedule.times(START).after(START), range(50), strict=False)]
    moved = [(schedule.available_at(at) - at).total_seconds() for at in times]
    elsewhere = nightly(jitter_s=600)
    assert moved == [(elsewhere.available_at(at) - at).total_seconds() for at in times]
    assert 0 <= min(moved) < 100
    assert 500 < max(moved) < 600
    assert nightly().available_at(times[0]) == times[0]
    in_moscow = times[0].astimezone(ZoneInfo("Europe/Moscow"))
    assert nightly(jitter_s=600).available_at(in_moscow) == schedule.available_at(times[0])


@pytest.mark.requirement("R7")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"name": ""}, "name: must have 1 to 200 characters"),
        ({"every_s": 5}, "cron: must have either cron or every_s"),
        ({"cron": None}, "every_s: must have either cron or every_s"),
        ({"cron": None, "every_s": 0.5}, "every_s: must be a number of seconds from 1 to"),
        ({"cron": None, "every_s": float("nan")}, "every_s: must be a number of seconds from 1 to"),
        ({"cron": "0 6 * *"}, "cron: must have five fields"),
        ({"zone": "Moscow"}, "zone: must be a time zone of the IANA database"),
        ({"start_at": START.replace(tzinfo=None)}, "start_at: must be a timestamp with a time zone"),
        ({"start_at": START, "end_at": START}, "end_at: must be later than start_at"),
        ({"missed": "never"}, "missed: must be one of skip, once, all, not 'never'"),
        ({"overlap": None}, "overlap: must be one of buffer_one, skip, buffer_all, cancel, allow, not None"),
        ({"overlap": "one"}, "overlap: the value 'one' is now named buffer_one"),
        ({"overlap": "all"}, "overlap: the value 'all' is now named buffer_all"),
        ({"overlap": "parallel"}, "overlap: the value 'parallel' is now named allow"),
        ({"missed_limit": 0}, "missed_limit: must be an integer from 1 to 10,000, not 0"),
        ({"grace_s": -1}, "grace_s: must be a number of seconds from 0 to"),
        ({"missed_within_s": 0}, "missed_within_s: must be a number of seconds from 1 to"),
        (
            {"jitter_s": 86_400},
            "jitter_s: must be less than the shortest interval between two runs, 86400 s, not 86400",
        ),
    ],
)
def test_what_means_nothing_is_refused_by_the_name_of_its_field(more, says):
    with pytest.raises(BadRequest) as refused:
        nightly(**more)
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, "schedule 'nightly': every_s: must have either cron or every_s"),
        (
            {"every_s": 60, "job": {"priority": "x"}},
            "schedule 'nightly': job.priority: must be an integer or null, not",
        ),
        ({"every_s": 60, "job": {"color": 1}}, "schedule 'nightly': job.color: is not an option of a schedule's jobs"),
        (
            {"every_s": 60, "queue": "q"},
            "schedule 'nightly': queue: is not a field of a schedule; the fields are args, cron, ",
        ),
    ],
)
def test_a_declaration_that_is_refused_names_its_schedule(fields, says):
    tasks = Tasks()
    with pytest.raises(BadRequest) as refused:
        tasks.schedule("nightly", task="report", **fields)
    assert str(refused.value).startswith(says)
    assert tasks.schedules == ()


@pytest.mark.parametrize("instant", [datetime.max.replace(tzinfo=UTC), datetime.min.replace(tzinfo=UTC)])
def test_at_the_ends_of_time_a_schedule_has_no_next_time_or_one(instant):
    for schedule in (nightly(), nightly(cron=None, every_s=86_400)):
        found = schedule.next_after(schedule.times(instant), instant)
        assert found is None or found > instant
