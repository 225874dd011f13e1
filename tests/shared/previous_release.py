"""The release before this one, out of the repository's own history: a folder with its files, and how to run it.

tests/faults/previous_release names its commit; whoever makes a release writes the new one there. Where the history is
not at hand, as in a shallow clone or an archive, that is said, and the test fails.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import attrs
import pytest

ROOT = Path(__file__).parents[2]
NAMED_IN = ROOT / "tests" / "faults" / "previous_release"


@attrs.frozen
class Release:
    """A release in a folder: the Python that runs it, and the variables that this needs."""

    commit: str
    python: str
    environment: dict[str, str]


def unpack(commit: str, folder: Path) -> None:
    """Put the files of a commit into a folder. Fails when the repository does not know it."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", "--format=tar", commit], capture_output=True, check=False
    )
    if archive.returncode != 0:
        pytest.fail(
            f"{NAMED_IN.relative_to(ROOT)} names the commit {commit}, which git can't give: "
            f"{archive.stderr.decode().strip()}. The test needs a clone with its history: git fetch --unshallow"
        )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="tar")


def previous_release(folder: Path) -> Release:
    """The release before this one, made ready in a folder that is empty."""
    commit = NAMED_IN.read_text().strip()
    source = folder / "source"
    unpack(commit, source)
    environment = {"PYTHONPATH": f"{source / 'src'}:{source / 'tests'}"}
    python = sys.executable
    if not _dependencies(source) <= _dependencies(ROOT):
        # Its own libraries; its own files come first all the same.
        python = str(folder / "environment" / "bin" / "python")
        subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True, timeout=120)
        constraints = source / "constraints.txt"
        install = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints, f"{source}"]
        subprocess.run(install, check=True, timeout=600)
    release = Release(commit, python, environment)
    where = [python, "-c", "import dataloader, service_tasks; print(dataloader.__file__, service_tasks.__file__)"]
    found = subprocess.run(where, cwd=folder, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert all(path.startswith(str(source)) for path in found.stdout.split()), found.stdout
    return release


def _dependencies(source: Path) -> set[str]:
    return set(tomllib.loads((source / "pyproject.toml").read_text())["project"]["dependencies"])
