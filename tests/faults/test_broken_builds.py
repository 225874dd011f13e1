"""Each guard is taken out separately, and its test must fail (tests/shared/broken.py has both)."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from broken import GUARDS
from guard_runs import ROOT, GuardRuns


@pytest.fixture(scope="session")
def guard_runs():
    with contextlib.closing(GuardRuns()) as runs:
        yield runs


@pytest.fixture
def own_folder():
    """Return a folder for a run's temporary files.

    A run in pytest's own would make those of others unreadable for PostgreSQL.
    """
    with tempfile.TemporaryDirectory(prefix="guard-") as folder:
        yield Path(folder, "run")


@pytest.fixture
def run(guard_runs, postgres, own_folder, tmp_path):
    """Return a function that runs a test without a guard on this session's server.

    It returns the exit code and the output.
    """
    postgres.template("migrated")
    folder = str(postgres.embedded.data_dir)
    options = ["-q", "-x", "-p", "no:cacheprovider", "--server", folder, "--pg", str(postgres.version)]
    options += ["--basetemp", str(own_folder)]
    output = tmp_path / "output"

    def run(name, test):
        code = guard_runs.run(*options, "--without", name, test, output=output)
        return code, output.read_text()

    yield run
    postgres.drop_all_but_templates()


@pytest.mark.full
@pytest.mark.parametrize("name", GUARDS)
def test_without_a_guard_its_test_fails(run, name):
    code, output = run(name, GUARDS[name].test)
    assert code == pytest.ExitCode.TESTS_FAILED, output
    assert re.search(r"^1 failed", output, re.MULTILINE), output


ONE_BY_ONE = """
import os, sys
from broken import GUARDS
for name, guard in GUARDS.items():
    if os.fork() == 0:
        guard.take_out()
        os._exit(0)
    if os.wait()[1]:
        print(name)
"""


@pytest.mark.slow
def test_each_guard_can_be_taken_out():
    """Each in a child process. A run of its test, which then fails, takes much longer."""
    paths = os.pathsep.join([str(ROOT / "tests" / "shared"), str(ROOT / "tests"), str(ROOT)])
    command, environment = [sys.executable, "-c", ONE_BY_ONE], os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_each_guard_names_a_test_that_exists():
    for guard in GUARDS.values():
        path, _, name = guard.test.rpartition("::")
        assert re.search(rf"^(?:async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), guard.test
