"""Result of each planned time: one job, or a recorded reason why it has none."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any

import attrs
import psycopg


@attrs.define
class PlannedTimes:
    """Sums over all schedules. `both` have a job and a reason, `twice` two jobs; `strange` jobs were never planned."""

    times: int = 0
    jobs: int = 0
    left_out: int = 0
    missing: int = 0
    both: int = 0
    twice: int = 0
    strange: int = 0

    def judge(
        self,
        begin: datetime,
        end: datetime,
        period: timedelta,
        jobs: Mapping[datetime, int],
        reasons: Collection[tuple[datetime, datetime]],
    ) -> None:
        """Count a schedule's times from `begin` to before `end`, given the jobs of each and the spans with a reason."""
        planned = [begin + number * period for number in range((end - begin) // period)]
        for at in planned:
            number, is_left_out = jobs.get(at, 0), any(first <= at <= last for first, last in reasons)
            self.times += 1
            self.jobs += number > 0
            self.left_out += is_left_out
            self.missing += number == 0 and not is_left_out
            self.both += number > 0 and is_left_out
            self.twice += number > 1
        self.strange += len(jobs.keys() - set(planned))


def read(connection: psycopg.Connection[Any], begins: Mapping[str, tuple[datetime, timedelta]]) -> PlannedTimes:
    """Read the database's records of schedules that are no longer processed, each from its first time on."""
    found = PlannedTimes()
    ends = dict(connection.execute("SELECT name, next_at FROM dl_schedules").fetchall())
    jobs: dict[str, Counter[datetime]] = {name: Counter() for name in begins}
    for name, at in connection.execute("SELECT schedule, planned_at FROM dl_jobs WHERE schedule IS NOT NULL"):
        jobs[name][at] += 1
    reasons: dict[str, list[tuple[datetime, datetime]]] = {name: [] for name in begins}
    for name, first, last in connection.execute(
        "SELECT name, (payload ->> 'first')::timestamptz, (payload ->> 'last')::timestamptz"
        " FROM dl_schedule_events WHERE kind = 'left_out'"
    ):
        reasons[name].append((first, last))
    for name, (begin, period) in begins.items():
        found.judge(begin, ends[name], period, jobs[name], reasons[name])
    return found
