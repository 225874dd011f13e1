"""Durable processes on top of the queue: types are defined by steps, whose outcomes are stored whole (P1 to P6).

`Processes` collects the types of a program, `add_processes` gives them to its tasks.
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
