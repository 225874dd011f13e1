"""The head of the standalone binary before a small archive: the copies that it refuses.

test_binary.py tests the file.
"""

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
    """Return the module that builds the file, which is in no package."""
    spec = spec_from_file_location("build_binary", ROOT / "deploy" / "binary" / "build.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(build, tmp_path):
    """Return a file whose program reports that it runs."""
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
    return f"dataloader: {file} is damaged: its archive is not complete or was changed; copy it again\n"


@pytest.mark.parametrize(("version", "refused"), [((3, 11, 9), True), ((3, 11, 10), False), ((3, 13, 0), False)])
def test_a_python_whose_tarfile_stops_at_hostile_archives_is_not_packed(build, version, refused):
    if not refused:
        build.refuse_old_python(version)
        return
    with pytest.raises(SystemExit, match=r"3\.11\.9 cannot be packed.*use 3\.11\.10 or later"):
        build.refuse_old_python(version)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_whole_file_runs_its_program_also_where_there_is_no_stat(small, tmp_path, shell):
    for _ in ("unpacks", "from the cache"):
        done = run(small, tmp_path, shell)
        assert (done.returncode, done.stdout, done.stderr) == (0, "runs --version\n", "")
    (tmp_path / "empty").mkdir()
    done = run(small, tmp_path, shell, PATH=str(tmp_path / "empty"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "runs --version\n", "")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757, 0o1777])
def test_a_cache_that_others_can_write_to_is_not_used(small, tmp_path, shell, mode):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(mode)
    refused = (
        f"dataloader: does not use {cache}, which other users can write to; set DATALOADER_CACHE to another folder\n"
    )
    done = run(small, tmp_path, shell)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", refused)
    assert not list(cache.iterdir())
    cache.chmod(0o755)
    assert run(small, tmp_path, shell).returncode == 0
    cache.chmod(mode)  # also if it has been unpacked before
    assert run(small, tmp_path, shell).stderr == refused


@pytest.mark.parametrize("shell", SHELLS)
def test_links_in_place_of_the_cache_or_of_what_is_unpacked_are_not_followed(small, tmp_path, shell):
    cache = tmp_path / "cache"
    assert run(small, tmp_path, shell).returncode == 0
    (unpacked,) = [folder for folder in cache.iterdir() if folder.is_dir()]
    other = tmp_path / "other"
    unpacked.rename(other)
    unpacked.symlink_to(other)
    done = run(small, tmp_path, shell)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"dataloader: does not run the contents of {unpacked}, which is a link; set")
    link = tmp_path / "link"
    unpacked.unlink()
    other.rename(unpacked)
    link.symlink_to(cache)
    # Like the link that systemd creates for a cache of a dynamic user.
    assert run(small, tmp_path, shell, DATALOADER_CACHE=str(link)).stdout == "runs --version\n"
    os.lchown(link, 10_001, 0)
    for name in (link, f"{link}/", f"{link}//"):
        done = run(small, tmp_path, shell, DATALOADER_CACHE=str(name))
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith(f"dataloader: does not use {link}, which is a link; set")


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("mode", "owner", "wrong"),
    [
        (0o777, 0, "which other users can write to"),
        (0o775, 0, None),  # root's own group
        (0o1777, 0, None),
        (0o755, 10_001, "which belongs to another user"),
        (0o1777, 10_001, "which belongs to another user"),
    ],
)
def test_a_cache_in_a_folder_in_which_others_can_replace_it_is_not_used(small, tmp_path, shell, mode, owner, wrong):
    above = tmp_path / "above"
    (above / "between").mkdir(parents=True)
    os.chown(above, owner, 0)
    above.chmod(mode)
    done = run(small, tmp_path, shell, DATALOADER_CACHE=str(above / "between" / "cache"))
    assert done.returncode == (0 if wrong is None else 1), done.stderr
    assert wrong is None or f"it is in {above}, {wrong}; set DATALOADER_CACHE to another folder" in done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_a_group_that_is_not_the_users_own_must_not_write_above_the_cache(small, tmp_path, shell):
    above = tmp_path / "above"
    above.mkdir()
    os.chown(above, 0, 10_001)
    above.chmod(0o775)
    done = run(small, tmp_path, shell, DATALOADER_CACHE=str(above / "cache"))
    assert f"it is in {above}, which other users can write to" in done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_a_cache_behind_a_link_above_it_is_used_where_it_really_is(small, tmp_path, shell):
    (tmp_path / "home").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    done = run(small, tmp_path, shell, DATALOADER_CACHE=str(tmp_path / "link" / "cache"))
    assert (done.returncode, done.stdout) == (0, "runs --version\n"), done.stderr
    assert (tmp_path / "home" / "cache").is_dir()


@pytest.mark.slow
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


def test_a_copy_with_a_changed_archive_is_refused_only_when_it_is_unpacked(small, tmp_path):
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
