"""Durable processes on top of the queue, defined by their steps.

Each step's outcome is stored in one transaction. `Processes` collects the types of a program. `add_processes` adds them
to the program's tasks.
"""

from dataloader.flows.processes.add import add_processes
from dataloader.flows.processes.define import Processes, ProcessType
from dataloader.flows.processes.process import Process
from dataloader.jobs.process_outbox import Delivery
from dataloader.jobs.processes import KEEP, SUSPEND, Done, Fail, Refuse, Remove, Timer, Transient

__all__ = [
    "KEEP",
    "SUSPEND",
    "Delivery",
    "Done",
    "Fail",
    "Process",
    "ProcessType",
    "Processes",
    "Refuse",
    "Remove",
    "Timer",
    "Transient",
    "add_processes",
]
