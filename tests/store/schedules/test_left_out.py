"""Recorded planned times without a job: those with the same reason and no job in between share a row (R7)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from dataloader.store.schedules.left_out import LeftOut, aio_record_left_out

pytestmark = pytest.mark.requirement("R7")

BEGIN = datetime(2026, 11, 23, tzinfo=UTC)


def at(second):
    return BEGIN + timedelta(seconds=second)


def left_out(first, last, why="overlap", *, name="s", after_job=False):
    """Return the left-out times of a schedule that is due each second."""
    return LeftOut(name, why, last - first + 1, at(first), at(last), after_job)


@pytest.fixture
async def record(store, raw):
    """Return a function that records left-out times of one tick; `job` is the newest planned time with a job."""
    await raw.execute(
        "INSERT INTO dl_schedules (name, spec, task, origin, stored_by)"
        " VALUES ('s', '{}', 't', 'code', 'test'), ('other', '{}', 't', 'code', 'test')"
    )

    async def record(*some, job=None):
        await raw.execute("UPDATE dl_schedules SET last_at = $1", None if job is None else at(job))
        await store.write(aio_record_left_out, some)

    return record


@pytest.fixture
def rows(raw):
    """Return a function that reads the records: name, reason, number, and the seconds of the first and the last."""

    async def rows():
        found = await raw.fetch(
            "SELECT name, payload->>'why' AS why, (payload->>'times')::int AS times,"
            " extract(epoch FROM (payload->>'first')::timestamptz - $1)::int AS first,"
            " extract(epoch FROM (payload->>'last')::timestamptz - $1)::int AS last"
            " FROM dl_schedule_events WHERE kind = 'left_out' AND payload ? 'last' ORDER BY event_id",
            BEGIN,
        )
        return [tuple(row) for row in found]

    return rows


async def test_a_record_of_skipped_times_continues_until_a_time_has_a_job(record, rows):
    await record(left_out(1, 3), left_out(1, 1, name="other"), job=0)
    await record(left_out(4, 4), job=0)
    await record(left_out(6, 6), job=5)
    await record(left_out(7, 9), job=5)
    await record(left_out(11, 12, after_job=True), job=5)
    await record(left_out(2, 2, name="other"), job=0)
    assert await rows() == [
        ("s", "overlap", 4, 1, 4),
        ("other", "overlap", 2, 1, 2),
        ("s", "overlap", 4, 6, 9),
        ("s", "overlap", 2, 11, 12),
    ]


async def test_each_skip_reason_has_a_separate_record_that_continues(record, rows):
    for begin in (1, 11, 21):
        await record(
            left_out(begin, begin + 4, "missed"),
            left_out(begin + 5, begin + 7, "unique"),
            left_out(begin + 8, begin + 9),
        )
    assert await rows() == [("s", "missed", 15, 1, 25), ("s", "unique", 9, 6, 28), ("s", "overlap", 6, 9, 30)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "between",
    [
        "INSERT INTO dl_schedule_events (name, kind) VALUES ('s', 'changed')",
        "UPDATE dl_schedule_events SET at = at - interval '1 day'",
        "DELETE FROM dl_schedule_events",
        """INSERT INTO dl_schedule_events (name, kind, payload) VALUES ('s', 'left_out', '{"why": 7}')""",
        "INSERT INTO dl_schedule_events (name, kind) VALUES ('s', 'left_out')",
    ],
)
async def test_after_anything_else_or_after_a_day_another_record_begins(record, rows, raw, between):
    await record(left_out(1, 3))
    await raw.execute(between)
    await record(left_out(4, 5))
    assert (await rows())[-1] == ("s", "overlap", 2, 4, 5)


async def test_times_that_are_put_back_are_on_record_by_themselves(record, rows):
    await record(left_out(1, 3))
    await record(left_out(2, 5))
    assert await rows() == [("s", "overlap", 3, 1, 3), ("s", "overlap", 4, 2, 5)]
