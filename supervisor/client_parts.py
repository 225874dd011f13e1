"""Clients over the database, for a process's handlers, pages and HTTP API."""

from __future__ import annotations

import attrs

from dataloader.jobs.process_telemetry import ProcessTelemetry
from dataloader.store.performer import DatabasePerformer
from dataloader.store.processes.database_processes import DatabaseProcesses
from dataloader.store.queue.bulk import DatabaseBulkActs
from dataloader.store.queue.queue_states import ServedQueues
from dataloader.store.queue.waits import Waits
from dataloader.supervisor.base_parts import BaseParts
from dataloader.supervisor.running_parts import RunningParts


@attrs.frozen(kw_only=True)
class ClientParts:
    """Clients over the database, with this process as the operator."""

    performer: DatabasePerformer
    processes: DatabaseProcesses
    bulk: DatabaseBulkActs
    waits: Waits


def client_parts(base: BaseParts, running: RunningParts) -> ClientParts:
    """Return the clients over the database."""
    settings, database, draining = base.settings, base.database, base.drain.requested.is_set
    waits = Waits(database)
    return ClientParts(
        performer=DatabasePerformer(
            database=database,
            operator=base.operator,
            enqueuer=base.enqueuer,
            served=ServedQueues(database),
            waits=waits,
            draining=draining,
        ),
        processes=DatabaseProcesses(
            database=database,
            operator=base.operator,
            answers=running.answers,
            telemetry=base.libraries.resources[ProcessTelemetry],
            default_lease_s=settings.default_lease_s,
            draining=draining,
            acted=base.poster.wake.set if settings.sinks else None,
        ),
        bulk=DatabaseBulkActs(database=database, operator=base.operator),
        waits=waits,
    )
