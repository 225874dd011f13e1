"""`./run`, from a clone: its installations, and its end by ^C. Only pip and venv are replaced."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = Path(sys.executable).parent


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return an environment with all programs, a Python that creates no other, and a pip that records its calls."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("just", "dataloader", "python"):
        (programs / name).symlink_to(OURS / name)
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 0\n")
    pip = programs / "pip"
    pip.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/installed\n')
    for file in (python, pip):
        file.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DL_", "WORKERS_", "COVERAGE"))}
    return kept | {"PYTHON": str(python), "VENV": str(tmp_path / "venv")}


@pytest.mark.parametrize("arguments", [["--list"], []])
def test_the_list_of_recipes_installs_nothing_but_just(
    environment: dict[str, str], tmp_path: Path, arguments: list[str]
) -> None:
    done = subprocess.run(
        [ROOT / "run", *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert {"demo", "test", "serve"} <= {*re.findall(r"^    (\w+)", done.stdout, re.MULTILINE)}
    assert (tmp_path / "installed").read_text() == "install --quiet --constraint constraints.txt rust-just\n"


@pytest.mark.full
@pytest.mark.parametrize(("recipe", "extra"), [("demo", "demo"), ("serve", "dev")])
def test_a_recipe_installs_what_it_needs(environment: dict[str, str], tmp_path: Path, recipe: str, extra: str) -> None:
    done = subprocess.run(
        [ROOT / "run", recipe, "--help"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"dataloader {recipe} [OPTIONS]" in done.stdout
    assert f"--editable .[{extra}]" in (tmp_path / "installed").read_text()


@pytest.mark.full
def test_the_demo_that_goes_on_serving_is_ended_by_interrupt_without_an_error(
    environment: dict[str, str], tmp_path: Path
) -> None:
    """Like ^C: the signal goes to all processes that the line has started."""
    command = [ROOT / "run", "demo", "--keep", "--data-dir", tmp_path / "data"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    said = []
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        watchdog = threading.Timer(180, os.killpg, (process.pid, signal.SIGKILL))
        watchdog.start()
        try:
            for line in process.stdout:
                said.append(line)
                if line.startswith("serving until ^C"):
                    os.killpg(process.pid, signal.SIGINT)
        finally:
            watchdog.cancel()
    assert process.returncode == 0, "".join(said)
    assert not [line for line in said if "error" in line.lower()]
