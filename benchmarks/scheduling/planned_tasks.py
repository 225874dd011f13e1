"""Task of a thousand schedules."""

from __future__ import annotations

import random

import trio

from dataloader import Job, RetryPolicy, Tasks

QUEUE = "planned"
tasks = Tasks()


@tasks.task("planned", queue=QUEUE, retry=RetryPolicy(base_s=0.1))
async def planned(_job: Job) -> None:
    """Wait briefly."""
    await trio.sleep(random.uniform(0, 0.02))
