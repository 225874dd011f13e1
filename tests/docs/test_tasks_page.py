"""The tests that docs/tasks.md shows pass when they are pasted next to its program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


@pytest.mark.full
def test_the_tests_of_the_page_pass_beside_its_program(tmp_path):
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    testing = PAGE.partition("\n## Testing\n")[2]
    [ini] = re.findall(r"```\n(\[pytest\].*?)```", testing, re.DOTALL)
    conftest, *tests = re.findall(r"```python\n(.*?)```", testing, re.DOTALL)
    (tmp_path / "pages.py").write_text(program)
    (tmp_path / "pytest.ini").write_text(ini)
    (tmp_path / "conftest.py").write_text(conftest)
    for number, test in enumerate(tests):
        (tmp_path / f"test_{number}.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert f"{len(tests)} passed" in done.stdout, done.stdout
    assert len(tests) == 2
