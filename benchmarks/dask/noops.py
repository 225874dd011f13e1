"""No-op jobs in each place."""

from __future__ import annotations

from dataloader import ProcessJob, Tasks, ThreadJob

tasks = Tasks()


@tasks.task("thread")
def in_a_thread(job: ThreadJob) -> None:
    """Do nothing."""


@tasks.task("process", process=True)
def in_a_child(job: ProcessJob) -> None:
    """Do nothing."""


@tasks.task("dask", dask=True)
def beside_a_worker(job: ProcessJob) -> None:
    """Do nothing."""
