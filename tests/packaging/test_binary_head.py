"""The head of the one file before a small archive: which copies it refuses. The file itself is test_binary.py's."""

from __future__ import annotations

import os
import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = b'#!/bin/sh\necho "runs $*"\n'
SHELLS = [shell for name in ("dash", "bash") if (shell := shutil.which(name))]
WATCHDOG_S = 60


@pytest.fixture(scope="module")
def build():
    """The module that makes the file, which is no part of a package."""
    spec = spec_from_file_location("build_binary", ROOT / "deploy" / "binary" / "build.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(build, tmp_path):
    """A file whose program says that it runs."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "dataloader").write_bytes(PROGRAM)
    (folder / "dataloader").chmod(0o755)
    made = tmp_path / "small"
    build.write(made, build.pack(folder), {"VERSION": "1", "SIZE": "1", "ARCH": "any", "GLIBC": "2"})
    return made


def run(file, tmp_path, *shell, **environment):
    environment = {"DATALOADER_CACHE": str(tmp_path / "cache"), "PATH": os.defpath} | environment
    command = [*shell, file, "--version"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WATCHDOG_S, check=False)


def refusal(file):
    return f"dataloader: {file} is broken: its archive is not the one that was built; copy it again\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_a_whole_file_runs_its_program_also_where_there_is_no_stat(small, tmp_path, shell):
    for _ in ("unpacks", "from the cache"):
        done = run(small, tmp_path, shell)
        assert (done.returncode, done.stdout, done.stderr) == (0, "runs --version\n", "")
    (tmp_path / "empty").mkdir()
    done = run(small, tmp_path, shell, PATH=str(tmp_path / "empty"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs --version\n", "")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("warm", [False, True])
def test_a_copy_of_another_size_is_refused_at_every_start_wherever_it_was_cut(small, tmp_path, shell, warm):
    if warm:
        assert run(small, tmp_path, shell).returncode == 0
    whole = small.read_bytes()
    first = whole.index(b"\n}\n") + 3
    broken = tmp_path / "broken"
    cuts = [first, *range(first + 1, whole.index(b"\nexit\n"), 331), len(whole) // 2, len(whole) - 1]
    for content in (*(whole[:cut] for cut in cuts), whole + b"\0"):
        broken.write_bytes(content)
        done = run(broken, tmp_path, shell)
        assert (done.returncode, done.stdout, done.stderr) == (1, "", refusal(broken)), len(content)
    for cut in range(len("#!/bin/sh\n") + 1, first, 7):  # within the check itself
        broken.write_bytes(whole[:cut])
        assert run(broken, tmp_path, shell).returncode != 0, cut


def test_a_copy_of_the_same_size_with_another_archive_is_refused_when_it_is_unpacked_and_not_later(small, tmp_path):
    changed = bytearray(small.read_bytes())
    changed[-5] ^= 1
    broken = tmp_path / "broken"
    broken.write_bytes(changed)
    done = run(broken, tmp_path, "/bin/sh")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", refusal(broken))
    assert run(small, tmp_path, "/bin/sh").returncode == 0
    assert run(broken, tmp_path, "/bin/sh").stdout == "runs --version\n"


def test_the_size_in_the_head_is_that_of_the_file(small):
    said = small.read_bytes().split(b" -eq ")[1].split()[0]
    assert int(said) == small.stat().st_size
