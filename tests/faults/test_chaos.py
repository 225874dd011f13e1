"""All faults together for CHAOS_SECONDS (120): no guarantee is broken. `just chaos 3600` takes an hour."""

from __future__ import annotations

import os
import random

import pytest
from chaos.course import Course, report, run_course

CHAOS_S = float(os.environ.get("CHAOS_SECONDS", "120"))


@pytest.mark.full
@pytest.mark.long
@pytest.mark.requirement("Q7", "Q9", "Q10", "Q12", "R7", "R8", "S4", "E10", "P3", "P4")
def test_a_mixed_load_under_random_faults_keeps_all_guarantees(unmeasured, tmp_path):
    course = Course(CHAOS_S, random.randrange(1_000_000), tmp_path, print)
    run_course(course)
    print(report(course))  # noqa: T201 - shown with the seed if the test fails
    assert course.broken == 0, report(course)
    # Every kind of operation has occurred.
    assert course.history.graph
    assert course.history.calls
    assert course.history.runs
