"""Adds the tasks of durable processes to a program's tasks."""

from __future__ import annotations

from dataloader.flows.processes.define import Processes
from dataloader.flows.processes.deliver import delivery_tasks
from dataloader.flows.processes.driver import tasks_of
from dataloader.flows.processes.stepper import open_stepper
from dataloader.jobs.tasks import Tasks


def add_processes(tasks: Tasks, processes: Processes) -> None:
    """Add the tasks of these process types to a program's tasks.

    The steps of a type run in workers of the queue `process.<type>`. The queue's slots limit the number of concurrent
    steps.
    """
    tasks.resource(open_stepper)
    tasks.built_in(tasks_of(processes))
    tasks.built_in(delivery_tasks(processes))
