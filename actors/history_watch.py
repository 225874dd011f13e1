"""Detects that the database has another history: it was restored, or a standby was promoted.

It checks every 20 seconds, and when the lock session was lost. The heartbeat reports older tables that were restored in
place: they lack the last process heartbeat of this process. The watch logs a warning, counts the event, and makes this
process declare again what its tasks need. No guarantee depends on it (`store.connection.history`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final
from uuid import UUID

import attrs
import trio

from dataloader.actors.signals import Signals
from dataloader.actors.wake import Wake
from dataloader.jobs.errors import BadRequest, StoreError, StoreUnavailable
from dataloader.jobs.logger import get_logger
from dataloader.jobs.telemetry import Telemetry
from dataloader.store.connection.bridge import Database
from dataloader.store.connection.history import read_history

log = get_logger(__name__)

LOOK_EVERY_S: Final = 20.0
RETRY_S: Final = 2.0


@attrs.define(eq=False, kw_only=True)
class HistoryWatch:
    """Watch of one process. It calls `changed` after a change of the history, and repeats a call that has failed."""

    database: Database
    telemetry: Telemetry
    changed: Callable[[], Awaitable[None]]
    signals: Signals | None = None
    wake: Wake = attrs.field(factory=Wake)
    _known: UUID | None = attrs.field(default=None, init=False)
    _is_to_declare: bool = attrs.field(default=False, init=False)
    _refusals: set[str] = attrs.field(factory=set, init=False)
    """Refusals that are already logged."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Check until cancelled."""
        task_status.started()
        while True:
            self.wake.lower()
            pause_s = LOOK_EVERY_S
            try:
                await self._look()
            except StoreUnavailable:
                pause_s = RETRY_S  # the other parts report the outage
            except StoreError as error:  # for example, the role lacks a right: this is no outage
                self._refused("cannot check whether the database was restored", error)
            except BadRequest as error:  # for example, older tables do not allow a limit
                self._refused("cannot declare tasks, schedules and limits again in the restored database", error)
            await self.wake.wait(pause_s)

    def tables_restored(self) -> None:
        """Declare again, because the tables lack the last process heartbeat of this process."""
        log.warning(
            "the last heartbeat of this process is missing: older tables were restored. The latest commits may be"
            " lost; compare with the external systems"
        )
        self.telemetry.history_changed()
        self._is_to_declare = True
        self.wake.set()

    def _refused(self, event: str, error: Exception) -> None:
        if event not in self._refusals:
            self._refusals.add(event)
            log.warning(event, error=str(error))

    async def _look(self) -> None:
        found = await read_history(self.database)
        if found.is_new or self._known not in {None, found.id}:
            log.warning(
                "the database was restored, or a standby was promoted. The latest commits"
                " may be lost; compare with the external systems",
                history=str(found.id),
            )
            self.telemetry.history_changed()
            self._is_to_declare = True
        self._known = found.id
        if self.signals is not None:
            self.signals.history_read.emit(found.id)
        if self._is_to_declare:
            await self.changed()
            self._is_to_declare = False
