"""Fixtures of the pages' tests."""

from __future__ import annotations

import pytest
from etl_runs import NIGHTLY, RunMaker


@pytest.fixture
def make(database):
    """Return a maker of runs."""
    return RunMaker(database)


@pytest.fixture
def nightly(make):
    """Return a run of three tasks, of which the second has failed, with lines of each."""
    run_id = make.run(NIGHTLY, status="failed")
    make.event(run_id, "picked", attempt=1, worker="host-b")
    make.lines(run_id, "ods.rates", [("info", f"GET /rates?page={n}") for n in range(1, 4)], phase="requests")
    make.lines(
        run_id,
        "ods.countries",
        [("info", "GET /c?page=1"), ("warning", "tried again"), ("error", "GET /c?page=7 503 after 3 tries")],
        phase="requests",
        status=503,
    )
    make.failures(run_id, "ods.countries", 3)
    return run_id
