"""`ProcessClient` over the database: operations of programs, HTTP views and commands on the tables of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import BadRequest, Draining, IdempotencyConflict, StoreError
from dataloader.jobs.model import check_between
from dataloader.jobs.page_cursor import After
from dataloader.jobs.process_contract import BATCH, ProcessChange, ProcessClient, check_wanted
from dataloader.jobs.process_listings import (
    EVERY_PROCESS,
    ProcessAnswer,
    ProcessErrorPage,
    ProcessesChanged,
    ProcessEventPage,
    ProcessFilter,
    ProcessPage,
    ProcessRecord,
    ProcessTask,
    ProcessTaskPage,
    ProcessVersion,
)
from dataloader.jobs.process_outbox import EVERY_DELIVERY, HeldDeliveryPage, HeldFilter, SinkRecord
from dataloader.jobs.process_requests import MAX_STARTS, ProcessImport, ProcessRequest, ProcessStarted
from dataloader.jobs.process_telemetry import ProcessTelemetry
from dataloader.jobs.processes import ProcessConflict, ProcessNotFound, check_process_id, check_type
from dataloader.store.connection.bridge import Database
from dataloader.store.processes import deliveries, operations, reads, search
from dataloader.store.processes.answers import Waiter
from dataloader.store.processes.asker import Asker
from dataloader.store.processes.requests import (
    Act,
    Asked,
    aio_start_many,
    aio_take_back,
)
from dataloader.store.processes.versions import list_versions
from dataloader.store.queue.control import aio_short_transaction

WITHDRAW_S: Final = 5.0
"""Seconds in which the call of a canceled caller is withdrawn."""


@attrs.frozen(kw_only=True)
class DatabaseProcesses(ProcessClient):
    """Processes in the tables of the database, on Trio. `operator` signs the audit.

    Attributes:
        draining: returns whether the program drains, so that no requests are accepted.
        by_hand: true if a person makes the requests, so that starts, calls and withdrawals are also audited.
        acted: called after changes that sinks may have to receive; None if there are no sinks.
    """

    database: Database
    operator: Operator
    answers: Waiter
    default_lease_s: int = 60
    telemetry: ProcessTelemetry = attrs.field(factory=ProcessTelemetry)
    draining: Callable[[], bool] = lambda: False
    by_hand: bool = False
    acted: Callable[[], None] | None = None
    asker: Asker = attrs.field(
        default=attrs.Factory(lambda self: Asker(self.database, self.default_lease_s), takes_self=True)
    )

    def signed(self, operator: Operator) -> DatabaseProcesses:
        """Return the same processes for another operator."""
        return attrs.evolve(self, operator=operator)

    async def ask(self, request: ProcessRequest, *, wait_s: float = 0.0, withdraw: bool = False) -> ProcessAnswer:
        """Send a request: see `ProcessClient.ask`. A cancellation prevents the request, or ends the wait."""
        _check_wait("wait_s", wait_s)
        if withdraw and request.kind != "call":
            raise BadRequest("withdraw", "is for calls")
        request.check_key()
        self._check_draining()
        request = attrs.evolve(request, watched=wait_s > 0)
        lease_s, since = self.default_lease_s, trio.current_time()
        if request.kind == "repair" or self.by_hand:
            asked = await self.database.write(operations.aio_ask_audited, request, self.operator, lease_s)
        else:
            asked = await self.asker.ask(request)
        self.telemetry.asked(request.type, request.kind, trio.current_time() - since)
        task_id, ident = _task_of(asked, request), asked.ident
        is_new = asked.verdict == "added"
        if is_new and not wait_s:
            return ProcessAnswer(task_id=task_id, status="waiting", ident=ident)
        try:
            answer = await self.answers.wait(task_id, timeout_s=wait_s, is_new=is_new, ident=ident)
        except BaseException:
            if withdraw:
                with trio.move_on_after(WITHDRAW_S, shield=True), suppress(StoreError):
                    await self._take_back(task_id, ident)
            raise
        return await self.withdraw(task_id, ident=ident) if withdraw and not answer.is_answered else answer

    async def task(self, task_id: int, *, wait_s: float = 0.0, ident: UUID | None = None) -> ProcessTask:
        """See `ProcessClient.task`."""
        _check_wait("wait_s", wait_s)
        found = await reads.get_task(self.database, task_id, ident)
        if wait_s and not found.answer.is_answered:
            await self.answers.wait(task_id, timeout_s=wait_s, ident=found.ident)
            found = await reads.get_task(self.database, task_id, found.ident)
        return found

    async def withdraw(self, task_id: int, *, ident: UUID | None = None) -> ProcessAnswer:
        """See `ProcessClient.withdraw`."""
        found = await reads.get_task(self.database, task_id, ident)
        await self._take_back(task_id, found.ident, is_audited=self.by_hand)
        return (await reads.get_task(self.database, task_id, found.ident)).answer

    async def _take_back(self, task_id: int, ident: UUID | None, *, is_audited: bool = False) -> None:
        if is_audited:
            taken = await self.database.write(operations.aio_withdraw_audited, task_id, ident, self.operator)
        else:
            taken = await self.database.write(aio_take_back, {task_id: ident}, expired=False)
        for one in taken:
            self.answers.told(one)

    async def start_many(self, requests: Sequence[ProcessRequest]) -> list[ProcessStarted]:
        """See `ProcessClient.start_many`."""
        if len(requests) > MAX_STARTS:
            raise BadRequest("processes", f"must have at most {MAX_STARTS:,} items, not {len(requests):,}")
        for number, request in enumerate(requests):
            if request.kind != "init":
                raise BadRequest(f"processes[{number}].kind", f"must be init, not {request.kind}")
            request.check_key(f"processes[{number}].key")
        self._check_draining()
        # Two batches with the same processes lock them in the same order.
        order = sorted(range(len(requests)), key=lambda number: (requests[number].type, requests[number].process_id))
        ordered = [requests[number] for number in order]
        answers = await self.database.write(_aio_start_many, ordered, self.default_lease_s) if ordered else []
        return [started for _, started in sorted(zip(order, answers, strict=True), key=lambda pair: pair[0])]

    async def put(self, process: ProcessImport) -> ProcessRecord:
        """See `ProcessClient.put`."""
        self._check_draining()
        return await self.database.write(operations.aio_import, process, self.operator, self.default_lease_s)

    async def get(self, process_type: str, process_id: str, *, wait_s: float = 0.0) -> ProcessRecord:
        """See `ProcessClient.get`."""
        _check_wait("wait_s", wait_s)
        found = await reads.get_process(self.database, process_type, process_id)
        if found.status == "init" and wait_s:
            [first] = (await reads.list_tasks(self.database, process_type, process_id, limit=1)).tasks
            with suppress(ProcessNotFound):
                await self.answers.wait(first.task_id, timeout_s=wait_s, ident=first.ident)
            found = await reads.get_process(self.database, process_type, process_id)
        return found

    async def events(
        self,
        process_type: str,
        process_id: str,
        *,
        limit: int = 200,
        after: After = None,
        newest_first: bool = False,
    ) -> ProcessEventPage:
        """See `ProcessClient.events`."""
        return await reads.list_events(
            self.database, process_type, process_id, limit=limit, after=after, newest_first=newest_first
        )

    async def tasks(
        self, process_type: str, process_id: str, *, limit: int = 200, after: After = None, newest_first: bool = False
    ) -> ProcessTaskPage:
        """See `ProcessClient.tasks`."""
        return await reads.list_tasks(
            self.database, process_type, process_id, limit=limit, after=after, newest_first=newest_first
        )

    async def find(self, wanted: ProcessFilter = EVERY_PROCESS, *, limit: int = 50, after: After = None) -> ProcessPage:
        """See `ProcessClient.find`."""
        return await search.find_processes(self.database, wanted, limit=limit, after=after)

    async def errors(
        self, *, process_type: str | None = None, limit: int = 50, after: After = None
    ) -> ProcessErrorPage:
        """See `ProcessClient.errors`."""
        return await search.list_error_groups(self.database, process_type=process_type, limit=limit, after=after)

    async def versions(self, process_type: str | None = None) -> list[ProcessVersion]:
        """See `ProcessClient.versions`."""
        return await list_versions(self.database, process_type)

    async def sinks(self) -> list[SinkRecord]:
        """See `ProcessClient.sinks`."""
        return await deliveries.list_sinks(self.database)

    async def deliveries(
        self, wanted: HeldFilter = EVERY_DELIVERY, *, limit: int = 50, after: After = None
    ) -> HeldDeliveryPage:
        """See `ProcessClient.deliveries`."""
        return await deliveries.list_held(self.database, wanted, limit=limit, after=after)

    async def release(self, wanted: HeldFilter) -> int:
        """See `ProcessClient.release`."""
        released = await deliveries.release(self.database, wanted, operator=self.operator, lease_s=self.default_lease_s)
        return released.released

    async def resume(self, process_type: str, process_id: str) -> ProcessRecord:
        """See `ProcessClient.resume`."""
        return await self._act(process_type, process_id, "resume")

    async def stop(self, process_type: str, process_id: str) -> ProcessRecord:
        """See `ProcessClient.stop`."""
        return await self._act(process_type, process_id, "stop")

    async def remove(self, process_type: str, process_id: str) -> ProcessRecord:
        """See `ProcessClient.remove`."""
        return await self._act(process_type, process_id, "remove")

    async def _act(self, process_type: str, process_id: str, act: Act) -> ProcessRecord:
        check_type("type", process_type)
        check_process_id("process_id", process_id)
        record, acted = await self.database.write(
            operations.aio_change,
            process_type,
            process_id,
            act,
            operator=self.operator,
            lease_s=self.default_lease_s,
        )
        for task_id in acted.told:
            self.answers.told(task_id)
        self._acted()
        return record

    async def change_some(
        self, change: ProcessChange, wanted: ProcessFilter, *, limit: int = BATCH, after: After = None
    ) -> ProcessesChanged:
        """See `ProcessClient.change_some`."""
        check_wanted(wanted)
        check_between("limit", limit, 1, BATCH)
        changed = await self.database.write(
            operations.aio_change_some,
            change,
            wanted,
            operator=self.operator,
            lease_s=self.default_lease_s,
            limit=limit,
            after=after,
        )
        self._acted()
        return changed

    def _acted(self) -> None:
        if self.acted is not None:
            self.acted()

    def _check_draining(self) -> None:
        if self.draining():
            raise Draining("this process is shutting down and takes no new requests")


async def _aio_start_many(connection: Any, requests: Sequence[ProcessRequest], lease_s: int) -> list[ProcessStarted]:
    async with aio_short_transaction(connection):
        started = []
        for request, asked in zip(requests, await aio_start_many(connection, requests, lease_s), strict=True):
            if asked.verdict == "exists":
                started.append(ProcessStarted(process_id=request.process_id, task_id=None, did="exists"))
            else:
                task_id = _task_of(asked, request)
                started.append(
                    ProcessStarted(
                        process_id=request.process_id,
                        task_id=task_id,
                        did="added" if asked.verdict == "added" else "again",
                    )
                )
        return started


def _task_of(asked: Asked, request: ProcessRequest) -> int:
    """Return the ID of the task for a request. Raises an error with the reason if there is none."""
    match asked.verdict:
        case "conflict":
            raise IdempotencyConflict(request.key or "", task_id=asked.task_id)
        case "missing":
            raise reads.not_found(request.type, request.process_id)
        case "exists":
            message = "there is a process of this id"
        case "busy":
            message = "it is being mended: a repair, or what had failed, runs or waits"
        case "status":
            allowed = "error" if request.kind == "repair" else "running"
            message = f"{request.kind} is for processes that are {allowed}"
        case _:
            assert asked.task_id is not None  # noqa: S101 - added or again
            return asked.task_id
    raise ProcessConflict(request.type, request.process_id, asked.status or "error", message)


def _check_wait(name: str, wait_s: float) -> None:
    if math.isnan(wait_s) or wait_s < 0:
        raise BadRequest(name, f"must be a number of seconds from 0 on, not {wait_s}")
