"""The repository belongs to its users: it contains no host of a package registry and no path of the build machine."""

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOREIGN = re.compile(
    r"pypi\.org|pythonhosted\.org|registry\.npmjs\.org|index-url|/work/(main|shared)|/tmp/venv|\bfarm-\w+",
)


def test_no_file_names_a_registry_or_a_path_of_one_machine() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    ).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    read = {path: path.read_text(errors="replace") for path in files if path.is_file() and path != Path(__file__)}
    assert len(read) > 10
    found = [f"{path.relative_to(ROOT)}: {hit[0]}" for path, text in read.items() for hit in FOREIGN.finditer(text)]
    assert not found
