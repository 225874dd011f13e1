"""Command for statistics of runs (R3)."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.requirement("R3")


def test_statistics_are_a_row_a_key_or_one_for_each_day(on_database, database):
    assert on_database("stats").stderr == "no runs\n"
    database.psql(
        "INSERT INTO dl_run_stats SELECT date_trunc('hour', now()) - d * interval '1 day', 'q', 'load.year',"
        " 'succeeded', 4, 10, 7 FROM generate_series(0, 2) AS d"
    )
    result = on_database("stats")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["QUEUE", "TASK", "OUTCOME", "RUNS", "MEAN_S", "MAX_S"],
        ["q", "load.year", "succeeded", "8", "2.500", "7.000"],
    ]
    by_day = json.loads(on_database("stats", "--since", "7d", "--by", "day", "--json").stdout)
    assert [(row["runs"], row["mean_s"]) for row in by_day] == [(4, 2.5)] * 3
    refused = on_database("stats", "--since", "1d", "--until", "2d")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
