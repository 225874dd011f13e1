"""Distributions: source, the wheel built from it, and a clean environment that also has `supervisor` and `web.py`.

These are packages of PyPI whose modules ours would overwrite if the layers were installed without the package.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
ROOMS = ("supervisor", "cli", "actors", "web", "flows", "store", "jobs")
BESIDE = ("CHANGELOG.md", ".env.example", "Dockerfile", "constraints.txt")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Return the environment without the variables that the test run sets for its child processes."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "COVERAGE"))}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Return the folder with both, built from a copy of the tree, since setuptools writes next to its sources."""
    source = tmp_path_factory.mktemp("source")
    for folder in (*ROOMS, "src", "docs", "deploy", "examples"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=NOT_SHIPPED)
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", *BESIDE):
        shutil.copy(ROOT / file, source)
    out = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--outdir", out, source], environment)
    return out


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    (path,) = distributions.glob("*.whl")
    return path


def run(command: list[str | Path], environment: dict[str, str], cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def shipped() -> set[str]:
    """All files of the rooms and of the face, as they must be found in the package."""
    files = {f"{room}/{path.relative_to(ROOT / room)}" for room in ROOMS for path in (ROOT / room).rglob("*")}
    face = ROOT / "src" / "dataloader"
    files |= {path.name for path in face.iterdir() if path.is_file()}
    return {f"dataloader/{name}" for name in files if "__pycache__" not in name and Path(name).suffix}


def test_the_wheel_holds_every_file_of_the_rooms_and_no_other_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == shipped()
    assert "dataloader/py.typed" in packed
    assert any(name.endswith(".sql") for name in packed)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_source_distribution_holds_files_and_no_links(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = {member.name.partition("/src/")[2] for member in members}
    assert shipped() <= names


def test_the_source_distribution_holds_the_documents(distributions: Path) -> None:
    (path,) = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    documents = [path for folder in ("docs", "deploy", "examples") for path in (ROOT / folder).rglob("*")]
    named = {str(path.relative_to(ROOT)) for path in documents if path.is_file() and "__pycache__" not in path.parts}
    assert named | {*BESIDE} <= names
    assert not [name for name in names if name.endswith((".pyc", ".env"))]


def test_the_description_has_no_link_that_leads_nowhere_on_an_index(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
    assert "Description-Content-Type: text/markdown" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert [link for link in links if not link.startswith("https://")] == []
    assert "writing tasks (`docs/tasks.md`)" in text
    assert text.count("```") == (ROOT / "README.md").read_text().count("```")


def test_it_installs_beside_the_packages_whose_names_its_rooms_have(
    wheel: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    """`supervisor` and `web.py` are installed first, and must still be imported from their places afterwards."""
    python = tmp_path / "venv" / "bin" / "python"
    run([sys.executable, "-m", "venv", tmp_path / "venv"], environment)
    install: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    run([*install, "supervisor", "web.py"], environment)
    find = "import supervisor.xmlrpc, web; print(supervisor.__file__, web.__file__, web.application)"
    before = run([python, "-c", find], environment, tmp_path)
    run([*install, wheel], environment)
    assert run([python, "-c", find], environment, tmp_path) == before

    run([python, "-c", ";".join(f"import dataloader.{room}" for room in ROOMS)], environment, tmp_path)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    command = python.with_name("dataloader")
    assert version in run([command, "--version"], environment, tmp_path)
    assert "dl_jobs" in run([command, "migrate", "--sql"], environment, tmp_path), "the SQL files came along"
