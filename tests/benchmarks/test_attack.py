"""Conditions under which a service has withstood an attack, and the table of the results."""

import json
import subprocess
import sys

import attrs
import pytest

from benchmarks.attack.attacks import ATTACKS
from benchmarks.attack.service import Service
from benchmarks.attack.verdict import HEADER, Row, line, missed

GOOD = Row(name="an attack", rss_mib=250.0, health_ms=(5.0,) * 99 + (100.0,), lost=0, errors=())


@pytest.mark.parametrize(
    ("changed", "bounds"),
    [
        ({}, []),
        ({"rss_mib": 250.1}, ["memory"]),
        ({"health_ms": (5.0,) * 99 + (100.1,)}, ["slow"]),
        ({"health_ms": (5.0,) * 199 + (5_000.0,)}, []),
        ({"lost": 1}, ["lost"]),
        ({"health_ms": ()}, ["lost", "slow"]),
        ({"errors": ("a traceback",)}, ["errors"]),
    ],
)
def test_a_bound_that_is_missed_is_named(changed, bounds):
    row = attrs.evolve(GOOD, **changed)
    assert missed(row) == bounds
    assert line(row).split("  ")[-1] == (" ".join(bounds) or "good")[:10]


def test_the_table_has_eighty_columns_at_most():
    worst = Row(name="x", rss_mib=9999.0, health_ms=(9999.9,), lost=1, errors=("x",) * 999)
    lines = [HEADER, *(line(attrs.evolve(worst, name=name)) for name in ATTACKS)]
    assert max(map(len, lines)) <= 80
    assert {row.index("999 ") for row in lines[1:]} == {lines[1].index("999 ")}


def test_lines_with_errors_and_tracebacks_are_counted(tmp_path):
    log = tmp_path / "log"
    lines = [
        {"level": "info", "event": "serving"},
        {"level": "error", "event": "bad"},
        {"level": "warning", "event": "x", "exception": "Traceback (most recent call last): …"},
    ]
    log.write_text("".join(json.dumps(one) + "\n" for one in lines) + "Exception ignored in: …\n")
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        assert len(Service(process, log).errors()) == 3
