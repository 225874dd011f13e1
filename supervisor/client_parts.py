"""Clients over the database, for a process's handlers, pages and HTTP API."""

from __future__ import annotations

import attrs

from dataloader.jobs.process_telemetry import ProcessTelemetry
from dataloader.store.performer import DatabasePerformer
from dataloader.store.queue.queue_states import ServedQueues
from dataloader.store.queue.waits import Waits
from dataloader.supervisor.base_parts import BaseParts
from dataloader.supervisor.running_parts import RunningParts


@attrs.frozen(kw_only=True)
class ClientParts:
    """Clients over the database, with this process as the operator."""

    performer: DatabasePerformer
    waits: Waits


def client_parts(base: BaseParts, running: RunningParts) -> ClientParts:
    """Return the clients over the database."""
    database, waits = base.database, Waits(base.database)
    return ClientParts(
        performer=DatabasePerformer(
            database=database,
            operator=base.operator,
            enqueuer=base.enqueuer,
            served=ServedQueues(database),
            waits=waits,
            draining=base.drain.requested.is_set,
            answers=running.answers,
            telemetry=base.libraries.resources[ProcessTelemetry],
            sent=base.poster.wake.set if base.settings.sinks else lambda: None,
        ),
        waits=waits,
    )
