"""Takes out each guard in turn: its test must notice (the guards and their tests are in tests/shared/broken.py)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from broken import GUARDS

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", GUARDS)
def test_without_a_guard_its_test_fails(name):
    environment = {
        variable: value for variable, value in os.environ.items() if not variable.startswith(("PYTEST", "COVERAGE"))
    }
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--without", name, GUARDS[name].test],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout + result.stderr
    assert re.search(r"^1 failed", result.stdout, re.MULTILINE), result.stdout


def test_each_guard_names_a_test_that_exists():
    for guard in GUARDS.values():
        path, _, name = guard.test.rpartition("::")
        assert re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), guard.test


def test_the_guards_are_those_of_the_guarantees():
    page = (ROOT / "docs" / "guarantees.md").read_text()
    shown = re.findall(r"^\| ([^|]+) \| ([^|]+) \| `([^`]+)` \|$", page, re.MULTILINE)
    assert shown == [(name, guard.does, guard.test.rpartition("::")[2]) for name, guard in GUARDS.items()]
