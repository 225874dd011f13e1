"""The examples, run as a reader would run them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio
import trio_asyncio

from dataloader.testing import run_task

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_has_a_test():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"tasks", "embedding"}


async def test_the_ten_line_task_counts_and_shows_it():
    outcome = await run_task(load("tasks").tasks, "hello.count", {"to": 3})
    assert outcome.result == {"counted": 3}
    assert outcome.progress == [{"n": 1}, {"n": 2}, {"n": 3}]


async def test_a_supervisor_is_embedded_in_a_trio_program(database):
    with trio.fail_after(20):
        assert await load("embedding").main(database.dsn) == 6


async def test_a_supervisor_is_embedded_in_a_program_with_a_trio_asyncio_loop_of_its_own(database):
    with trio.fail_after(20):
        async with trio_asyncio.open_loop():
            assert await load("embedding").main(database.dsn) == 6


@pytest.mark.slow
def test_embedding_runs_as_a_script_on_a_database_of_its_own(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "DL_DB_DSN"}
    done = subprocess.run(
        [sys.executable, EXAMPLES / "embedding.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "6 words in 3 jobs\n" in done.stdout
    assert done.stdout.endswith("drained\n")
