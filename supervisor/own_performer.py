"""Performer over the database for a process's handlers, pages and HTTP API."""

from __future__ import annotations

from dataloader.jobs.process_telemetry import ProcessTelemetry
from dataloader.store.performer import DatabasePerformer
from dataloader.store.queue.queue_states import ServedQueues
from dataloader.store.queue.waits import Waits
from dataloader.supervisor.base_parts import BaseParts
from dataloader.supervisor.running_parts import RunningParts


def own_performer(base: BaseParts, running: RunningParts) -> DatabasePerformer:
    """Return the performer of this process. The audit log has this process as the operator."""
    return DatabasePerformer(
        database=base.database,
        operator=base.operator,
        enqueuer=base.enqueuer,
        served=ServedQueues(base.database),
        waits=Waits(base.database),
        draining=base.drain.requested.is_set,
        answers=running.answers,
        telemetry=base.libraries.resources[ProcessTelemetry],
        sent=base.poster.wake.set if base.settings.sinks else lambda: None,
    )
