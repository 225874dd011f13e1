"""Transforms in processes, for work that keeps a core busy (E2)."""

from __future__ import annotations

import os

import pytest
from heavy import with_pid

from dataloader import Tasks
from dataloader.flows.etl import Csv, Files, Load, Target, add_loads
from dataloader.testing import run_task


@pytest.mark.slow
@pytest.mark.requirement("E2")
async def test_a_transform_runs_in_other_processes_if_the_load_says_so(database, raw, tmp_path):
    pytest.importorskip("trio_parallel")
    await raw.execute("CREATE TABLE numbers (n int PRIMARY KEY, pid int)")
    for n in range(4):
        (tmp_path / f"{n}.csv").write_text(f"n\n{n}\n")
    load = Load(
        name="numbers",
        source=Files(str(tmp_path / "*.csv"), format=Csv()),
        transform=with_pid,
        target=Target(table="numbers", key=("n",)),
        processes=True,
    )
    tasks = Tasks()
    add_loads(tasks, load)
    outcome = await run_task(tasks, "numbers", dsn=database.dsn)
    assert outcome.status == "succeeded", outcome.error
    pids = [row["pid"] for row in await raw.fetch("SELECT pid FROM numbers")]
    assert len(pids) == 4
    assert os.getpid() not in pids


@pytest.mark.requirement("E2")
def test_a_transform_that_can_not_be_sent_to_a_process_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"load numbers: .* can't be sent to another process; use a function of a module"
    ):
        Load(
            name="numbers",
            source=Files(str(tmp_path), format=Csv()),
            transform=lambda row: row,
            target=Target(table="numbers", key=("n",)),
            processes=True,
        )
