"""A handler that returns a coroutine or a generator has done nothing: its job fails without a retry (Q9)."""

from __future__ import annotations

import child_tasks
import pytest

from dataloader import Tasks
from dataloader.testing import run_task


@pytest.mark.slow
@pytest.mark.requirement("Q9")
@pytest.mark.parametrize("in_child", [False, True], ids=["thread", "child"])
@pytest.mark.parametrize("kind", ["a coroutine", "a generator", "an async generator"])
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
async def test_a_handler_that_returns_what_nothing_runs_fails_for_good(kind, in_child):
    tasks = Tasks()
    task = tasks.task("returns", process=in_child)(child_tasks.unrun)
    run = await run_task(tasks, task, {"kind": kind})
    assert run.status == "failed"
    assert run.error.startswith(f"the handler returned {kind} ")
