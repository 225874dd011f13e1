"""Durable processes with short pauses before a step or a delivery is retried."""

from __future__ import annotations

from functools import partial

import attrs

from dataloader import Tasks
from dataloader.flows.processes.deliver import DeliveryPauses, deliver
from dataloader.flows.processes.driver import drive

_GIVEN = {
    deliver: {"pauses": DeliveryPauses(failed_s=(0.05, 600.0), outage_s=(0.01, 0.01))},
    drive: {"outage_pauses_s": (0.01, 0.01)},
}


def again_soon(tasks: Tasks) -> Tasks:
    """Return the same tasks, whose steps and deliveries are retried soon."""
    return tasks.beside(
        attrs.evolve(task, handler=partial(task.handler, **_GIVEN[task.handler.func]))
        for task in tasks.values()
        if isinstance(task.handler, partial) and task.handler.func in _GIVEN
    )
