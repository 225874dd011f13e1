"""Work of the soak: each run locks its key's file, by a kernel lock that a killed process releases.

So a run that finds the file locked runs at the same time as another run of the key, in any process.
"""

from __future__ import annotations

import fcntl
import os
import random
from pathlib import Path

import trio

from dataloader import Job, RetryPolicy, Tasks

tasks = Tasks()
FOLDER = Path(os.environ["SOAK_FOLDER"])


@tasks.task("work", retry=RetryPolicy(base_s=1))
async def work(job: Job) -> None:
    """Wait briefly, as requests do, as the only run of the key."""
    with (FOLDER / job.lock_key).open("a") as key:
        try:
            fcntl.flock(key, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with (FOLDER / "overlaps").open("a") as overlaps:
                overlaps.write(f"{job.lock_key} {job.job_id} {job.attempt}\n")
        await trio.sleep(random.uniform(0.005, 0.05))
