"""The program of docs/embedding.md works when it is pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / "docs" / "embedding.md").read_text()


@pytest.mark.requirement("Q14")
def test_the_program_of_the_page_works_and_says_nothing_but_its_own_line(database, tmp_path):
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    (tmp_path / "program.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DL_")}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment | {"DL_DB_DSN": database.dsn},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "succeeded {'words': 3}\n", "")
