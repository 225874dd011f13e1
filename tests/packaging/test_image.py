"""The contents of the image are named by version and hash; its steps are run here as far as possible without Docker."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IN_THE_IMAGE = {"python_version": "3.12", "python_full_version": "3.12.0", "extra": ""}


def locked(name: str) -> dict[str, tuple[str, list[str]]]:
    """Return the version and the hashes of each package in a file of deploy/."""
    text = (ROOT / "deploy" / name).read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            package, *hashes = line.split()
            project, _, version = package.partition("==")
            found[canonicalize_name(project)] = version, hashes
    return found


def all_of(own: list[str]) -> set[str]:
    """Return the names of the required packages in the image, of their requirements, and so on."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in own]
    while waiting:
        current = waiting.pop()
        name = canonicalize_name(current.name)
        if name not in found and (current.marker is None or current.marker.evaluate(IN_THE_IMAGE)):
            found.add(name)
            waiting += map(Requirement, requires(current.name) or ())
    return found


@pytest.mark.parametrize(
    ("file", "asked"),
    [
        ("requirements.txt", PROJECT["project"]["dependencies"]),
        ("build-requirements.txt", PROJECT["dependency-groups"]["image-build"]),
    ],
)
def test_all_that_is_installed_is_locked_to_the_version_of_the_tests_and_to_hashes(file: str, asked: list[str]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    tested = {canonicalize_name(name): version for name, version in pins.items()}
    packages = locked(file)
    assert packages.keys() == all_of(asked), "run `just lock`"
    for name, (version, hashes) in packages.items():
        assert version == tested.get(name, version), f"{name}: run `just lock`"
        assert hashes
        assert all(re.fullmatch(r"--hash=sha256:[0-9a-f]{64}", one) for one in hashes), name
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(packages[canonicalize_name(requirement.name)][0])


def test_each_stage_is_from_the_base_that_the_builder_may_name_by_its_digest() -> None:
    assert re.search(r"^ARG BASE=", DOCKERFILE, re.MULTILINE)
    assert [*dict.fromkeys(re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE))] == ["${BASE}"]
    assert "BASE=python:3.12-slim@sha256:" in (ROOT / "docs" / "production.md").read_text()


def test_nothing_is_installed_but_by_its_hash_or_from_what_was_built() -> None:
    installs = re.findall(r"pip install .*", DOCKERFILE)
    assert len(installs) == 3
    for line in installs:
        assert (
            "--require-hashes --only-binary :all: --requirement" in line or "--no-index --no-deps /wheels/*.whl" in line
        )
    assert "python -m build --wheel --no-isolation" in DOCKERFILE, "in isolation it fetches setuptools by itself"
    sent = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!deploy/{name}" for name in ("requirements.txt", "build-requirements.txt")} <= {*sent}
    assert {"!pyproject.toml", "!setup.py", "!README.md", "!LICENSE"} <= {*sent}


def test_the_service_can_not_write_where_its_code_lies() -> None:
    *_, final = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    assert "WORKDIR /app" in final
    assert not re.search(r"chown|chmod|--create-home|^VOLUME", final, re.MULTILINE)
    (user,) = re.findall(r"useradd .*", final)
    assert "--home-dir /nonexistent" in user
    (uid,) = re.findall(r"--uid (\d+)", user)
    assert re.findall(r"^USER (\S+)", final, re.MULTILINE) == [uid] != ["0"]
    assert final.index("pip install") < final.index(f"USER {uid}")


@pytest.mark.full
def test_the_steps_of_the_image_make_a_service_that_starts(tmp_path: Path) -> None:
    """Each RUN line with pip or build in it runs in environments of this Python instead of the stages."""
    context, wheels = tmp_path / "context", tmp_path / "wheels"
    ignore = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "build", "tests")
    shutil.copytree(ROOT, context, symlinks=True, ignore=ignore)
    shutil.copytree(ROOT / "deploy", wheels)
    shutil.copy(ROOT / "deploy" / "build-requirements.txt", context)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    for number, stage in enumerate(stages):
        subprocess.run([sys.executable, "-m", "venv", tmp_path / f"stage-{number}"], check=True, timeout=120)
        environment["PATH"] = f"{tmp_path / f'stage-{number}' / 'bin'}:{os.environ['PATH']}"
        for line in re.findall(r"^RUN (.*(?:pip|build) .*)", stage, re.MULTILINE):
            command = line.replace("/wheels", str(wheels))
            done = subprocess.run(
                command,
                shell=True,
                cwd=context,
                env=environment,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    said = subprocess.check_output(["dataloader", "--version"], env=environment, cwd=tmp_path, text=True, timeout=60)
    assert PROJECT["project"]["version"] in said
    subprocess.run(["pip", "check"], env=environment, check=True, timeout=60)
