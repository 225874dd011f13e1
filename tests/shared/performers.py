"""Performer over a test's database."""

from __future__ import annotations

from typing import Any

from dataloader.jobs.contract import Operator
from dataloader.store.connection.bridge import Database
from dataloader.store.performer import DatabasePerformer
from dataloader.store.queue.enqueuer import Enqueuer
from dataloader.store.queue.queue_states import ServedQueues
from dataloader.store.queue.waits import Waits


def performer_of(
    database: Database, operator: Operator, *, default_lease_s: int = 60, reread_s: float = 2.0, **more: Any
) -> DatabasePerformer:
    return DatabasePerformer(
        database=database,
        operator=operator,
        enqueuer=Enqueuer(database, default_lease_s=default_lease_s),
        served=ServedQueues(database),
        waits=Waits(database, reread_s=reread_s),
        **more,
    )
