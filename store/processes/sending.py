"""Requests to durable processes: sending them, waiting for their answers, and withdrawing calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

import attrs
import trio

from dataloader.jobs.errors import IdempotencyConflict, StoreError
from dataloader.jobs.process_listings import ProcessAnswer
from dataloader.jobs.process_requests import ProcessRequest, ProcessStarted
from dataloader.jobs.processes import ProcessConflict
from dataloader.store.implementations import Store
from dataloader.store.processes import operations, reads
from dataloader.store.processes.requests import Asked, aio_start_many, aio_take_back
from dataloader.store.queue.control import aio_short_transaction

WITHDRAW_S: Final = 5.0
"""Seconds in which the call of a canceled caller is withdrawn."""


async def send_and_wait(store: Store, request: ProcessRequest, *, wait_s: float, withdraw: bool) -> ProcessAnswer:
    """Send a request: see `Performer.ask`. A cancellation prevents the request, or ends the wait."""
    request = attrs.evolve(request, watched=wait_s > 0)
    since = trio.current_time()
    if request.kind == "repair" or store.by_hand:
        lease_s = store.enqueuer.default_lease_s
        asked = await store.database.write(operations.aio_ask_audited, request, store.operator, lease_s)
    else:
        asked = await store.asker.ask(request)
    store.telemetry.asked(request.type, request.kind, trio.current_time() - since)
    task_id, ident = _task_or_raise(asked, request), asked.ident
    is_new = asked.verdict == "added"
    if is_new and not wait_s:
        return ProcessAnswer(task_id=task_id, status="waiting", ident=ident)
    try:
        answer = await store.answers.wait(task_id, timeout_s=wait_s, is_new=is_new, ident=ident)
    except BaseException:
        if withdraw:
            with trio.move_on_after(WITHDRAW_S, shield=True), suppress(StoreError):
                await _take_back(store, task_id, ident, is_audited=False)
        raise
    return await withdraw_task(store, task_id, ident) if withdraw and not answer.is_answered else answer


async def withdraw_task(store: Store, task_id: int, ident: UUID | None) -> ProcessAnswer:
    """Withdraw a call if it has not begun, and return its status. Raises `ProcessNotFound`, `HistoryChanged`."""
    found = await reads.get_process_task(store.database, task_id, ident)
    await _take_back(store, task_id, found.ident, is_audited=store.by_hand)
    return (await reads.get_process_task(store.database, task_id, found.ident)).answer


async def _take_back(store: Store, task_id: int, ident: UUID | None, *, is_audited: bool) -> None:
    if is_audited:
        taken = await store.database.write(operations.aio_withdraw_audited, task_id, ident, store.operator)
    else:
        taken = await store.database.write(aio_take_back, {task_id: ident}, expired=False)
    for one in taken:
        store.answers.told(one)


async def send_starts(store: Store, requests: Sequence[ProcessRequest]) -> list[ProcessStarted]:
    """Start processes: see `Performer.start_many`."""
    # Two batches with the same processes lock them in the same order.
    order = sorted(range(len(requests)), key=lambda number: (requests[number].type, requests[number].process_id))
    ordered = [requests[number] for number in order]
    answers = await store.database.write(_aio_start_many, ordered, store.enqueuer.default_lease_s)
    return [started for _, started in sorted(zip(order, answers, strict=True), key=lambda pair: pair[0])]


async def _aio_start_many(connection: Any, requests: Sequence[ProcessRequest], lease_s: int) -> list[ProcessStarted]:
    async with aio_short_transaction(connection):
        started = []
        for request, asked in zip(requests, await aio_start_many(connection, requests, lease_s), strict=True):
            if asked.verdict == "exists":
                started.append(ProcessStarted(process_id=request.process_id, task_id=None, did="exists"))
            else:
                task_id = _task_or_raise(asked, request)
                started.append(
                    ProcessStarted(
                        process_id=request.process_id,
                        task_id=task_id,
                        did="added" if asked.verdict == "added" else "again",
                    )
                )
        return started


def _task_or_raise(asked: Asked, request: ProcessRequest) -> int:
    """Return the ID of the task for a request. Raises the reason why there is none."""
    match asked.verdict:
        case "conflict":
            raise IdempotencyConflict(request.key or "", task_id=asked.task_id)
        case "missing":
            raise reads.not_found(request.type, request.process_id)
        case "exists":
            message = "a process with this ID exists"
        case "busy":
            message = "it is already being repaired or resumed"
        case "status":
            allowed = "error" if request.kind == "repair" else "running"
            message = f"{request.kind} needs a process with the status {allowed}"
        case _:
            assert asked.task_id is not None  # noqa: S101 - added or again
            return asked.task_id
    raise ProcessConflict(request.type, request.process_id, asked.status or "error", message)
