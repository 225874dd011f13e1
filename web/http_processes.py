"""`ProcessClient` through a running service, over its HTTP API: on asyncio and on Trio.

A service masks secrets in states, args, answers and errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar
from urllib.parse import quote
from uuid import UUID

import anyio
import attrs
import msgspec

from dataloader.jobs.errors import BadRequest, StoreError
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
from dataloader.jobs.process_outbox import (
    EVERY_DELIVERY,
    HeldDeliveryPage,
    HeldFilter,
    Released,
    SinkRecord,
    check_held,
)
from dataloader.jobs.process_requests import ProcessImport, ProcessRequest, ProcessStarted
from dataloader.jobs.processes import MAX_VALUE, ProcessNotFound, Remove, check_metadata, check_process_id, check_type
from dataloader.jobs.text import exact_json
from dataloader.web.service_connection import ANSWER_S, ServiceBusy, ServiceConnection

T = TypeVar("T")

LONG_POLL_S: Final = 25.0
"""Seconds for which the service may hold a request; shorter than the timeouts of proxies."""
WITHDRAW_S: Final = 5.0
"""Seconds in which the call of a cancelled caller is withdrawn."""


@attrs.frozen
class HttpProcesses(ProcessClient):
    """Durable processes through a service."""

    service: ServiceConnection

    async def ask(self, request: ProcessRequest, *, wait_s: float = 0.0, withdraw: bool = False) -> ProcessAnswer:
        """See `ProcessClient.ask`. If the caller is cancelled before the service returns the task, the task stays."""
        if withdraw and request.kind != "call":
            raise BadRequest("withdraw", "is for calls")
        until = anyio.current_time() + wait_s
        held_s = min(wait_s, LONG_POLL_S)
        # A call that may be withdrawn is sent without a wait first, so that its task is known.
        answer = await self._send(request, 0.0 if withdraw else held_s)
        try:
            return await self._until(answer, until, withdraw=withdraw)
        except BaseException:
            if withdraw:
                with anyio.move_on_after(WITHDRAW_S, shield=True), suppress(StoreError):
                    await self.withdraw(answer.task_id, ident=answer.ident)
            raise

    async def _send(self, request: ProcessRequest, wait_s: float) -> ProcessAnswer:
        body: dict[str, Any] = {}
        for name in ("args", "context", "start"):
            if getattr(request, name) is not None or (name == "start" and request.may_start):
                body[name] = _raw(request.json(name))
        for name in ("method", "expires_at"):
            if (value := getattr(request, name)) is not None:
                body[name] = value
        if request.metadata is not None:
            body["metadata"] = _raw(request.metadata_json())
        if request.key is not None:
            body["idempotency_key"] = request.key
        if request.kind == "init":
            path = f"/processes/{quote(request.type, safe='')}"
            body["process_id"] = request.process_id
        else:
            path = f"{_path(request.type, request.process_id)}/{request.kind}"
        return await self.service.ask(
            ProcessAnswer,
            "POST",
            path,
            body=body,
            params={"wait": wait_s or None},
            timeout_s=wait_s + ANSWER_S,
            missing=ProcessNotFound,
        )

    async def _until(self, answer: ProcessAnswer, until: float, *, withdraw: bool) -> ProcessAnswer:
        while not answer.is_answered:
            left_s = until - anyio.current_time()
            if left_s <= 0:
                return await self.withdraw(answer.task_id, ident=answer.ident) if withdraw else answer
            answer = (await self._held(answer.task_id, min(left_s, LONG_POLL_S), answer.ident)).answer
        return answer

    async def task(self, task_id: int, *, wait_s: float = 0.0, ident: UUID | None = None) -> ProcessTask:
        """See `ProcessClient.task`."""
        until = anyio.current_time() + wait_s
        while True:
            left_s = max(until - anyio.current_time(), 0.0)
            task = await self._held(task_id, min(left_s, LONG_POLL_S), ident)
            if task.answer.is_answered or left_s <= 0:
                return task
            ident = task.ident

    async def _held(self, task_id: int, hold_s: float, ident: UUID | None) -> ProcessTask:
        """Return the task when it has its answer, or after `hold_s` seconds. If the service is busy, read it later."""
        path = f"/processes/tasks/{task_id}"
        try:
            return await self.service.ask(
                ProcessTask,
                "GET",
                path,
                params={"wait": hold_s or None, "ident": ident},
                timeout_s=hold_s + ANSWER_S,
                missing=ProcessNotFound,
            )
        except ServiceBusy as busy:
            await anyio.sleep(min(busy.again_s, hold_s))
            return await self.service.ask(ProcessTask, "GET", path, params={"ident": ident}, missing=ProcessNotFound)

    async def withdraw(self, task_id: int, *, ident: UUID | None = None) -> ProcessAnswer:
        """See `ProcessClient.withdraw`."""
        path = f"/processes/tasks/{task_id}/withdraw"
        params = {"ident": ident}
        return await self.service.ask(ProcessAnswer, "POST", path, params=params, missing=ProcessNotFound)

    async def start_many(self, requests: Sequence[ProcessRequest]) -> list[ProcessStarted]:
        """Start processes, as `ProcessClient.start_many` describes; all must be of one type."""
        if not requests:
            return []
        types = sorted({request.type for request in requests})
        if len(types) > 1:
            raise BadRequest("processes", f"must be of one type through a service, not of {', '.join(types)}")
        given = []
        for number, request in enumerate(requests):
            if request.kind != "init":
                raise BadRequest(f"processes[{number}].kind", f"must be init, not {request.kind}")
            one: dict[str, Any] = {"process_id": request.process_id, "idempotency_key": request.key}
            one |= {"args": _raw(request.json("args")), "context": _raw(request.json("context"))}
            one["metadata"] = _raw(request.metadata_json())
            given.append({name: value for name, value in one.items() if value is not None})
        path = f"/processes/{quote(types[0], safe='')}/batch"
        return (await self.service.ask(_Started, "POST", path, body={"processes": given})).processes

    async def put(self, process: ProcessImport) -> ProcessRecord:
        """See `ProcessClient.put`."""
        body: dict[str, Any] = {
            "state": _raw(process.state_json()),
            "metadata": _raw(check_metadata("metadata", process.metadata)),
            "events": _raw(process.events_json()),
        }
        if process.next is not None:
            kind = "remove" if isinstance(process.next, Remove) else "timeout"
            body["timer"] = {"kind": kind} | attrs.asdict(process.next, recurse=False)
            if (context := body["timer"].get("context")) is not None:
                body["timer"]["context"] = _raw(exact_json("next.context", context, MAX_VALUE))
        return await self._ask(ProcessRecord, "PUT", process.type, process.process_id, body=body)

    async def get(self, process_type: str, process_id: str, *, wait_s: float = 0.0) -> ProcessRecord:
        """See `ProcessClient.get`."""
        until = anyio.current_time() + wait_s
        while True:
            left_s = max(until - anyio.current_time(), 0.0)
            hold_s = min(left_s, LONG_POLL_S)
            params = {"wait": hold_s or None}
            found = await self._ask(
                ProcessRecord, "GET", process_type, process_id, params=params, timeout_s=hold_s + ANSWER_S
            )
            if found.status != "init" or left_s <= 0:
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
        params = _page(limit, after, newest_first=newest_first)
        return await self._ask(ProcessEventPage, "GET", process_type, process_id, "/events", params=params)

    async def tasks(
        self, process_type: str, process_id: str, *, limit: int = 200, after: After = None, newest_first: bool = False
    ) -> ProcessTaskPage:
        """See `ProcessClient.tasks`."""
        params = _page(limit, after, newest_first=newest_first)
        return await self._ask(ProcessTaskPage, "GET", process_type, process_id, "/tasks", params=params)

    async def find(self, wanted: ProcessFilter = EVERY_PROCESS, *, limit: int = 50, after: After = None) -> ProcessPage:
        """See `ProcessClient.find`."""
        params = wanted.criteria() | {"limit": limit, "after": after}
        if wanted.metadata is not None:
            params["metadata"] = msgspec.json.encode(wanted.metadata).decode()
        return await self.service.ask(ProcessPage, "GET", "/processes", params=params)

    async def errors(
        self, *, process_type: str | None = None, limit: int = 50, after: After = None
    ) -> ProcessErrorPage:
        """See `ProcessClient.errors`."""
        params = {"type": process_type, "limit": limit, "after": after}
        return await self.service.ask(ProcessErrorPage, "GET", "/processes/errors", params=params)

    async def versions(self, process_type: str | None = None) -> list[ProcessVersion]:
        """See `ProcessClient.versions`."""
        found = await self.service.ask(_Versions, "GET", "/processes/versions", params={"type": process_type})
        return found.versions

    async def sinks(self) -> list[SinkRecord]:
        """See `ProcessClient.sinks`."""
        return (await self.service.ask(_Sinks, "GET", "/processes/sinks")).sinks

    async def deliveries(
        self, wanted: HeldFilter = EVERY_DELIVERY, *, limit: int = 50, after: After = None
    ) -> HeldDeliveryPage:
        """See `ProcessClient.deliveries`."""
        params = _criteria(wanted) | {"limit": limit, "after": after, "held": "true" if wanted.held else None}
        return await self.service.ask(HeldDeliveryPage, "GET", "/processes/deliveries", params=params)

    async def release(self, wanted: HeldFilter) -> int:
        """See `ProcessClient.release`."""
        check_held(wanted)
        released = await self.service.ask(
            Released, "POST", "/processes/deliveries/release", body=_criteria(wanted) | {"held": wanted.held}
        )
        return released.released

    async def resume(self, process_type: str, process_id: str) -> ProcessRecord:
        """See `ProcessClient.resume`."""
        return await self._ask(ProcessRecord, "POST", process_type, process_id, "/resume")

    async def stop(self, process_type: str, process_id: str) -> ProcessRecord:
        """See `ProcessClient.stop`."""
        return await self._ask(ProcessRecord, "POST", process_type, process_id, "/stop")

    async def remove(self, process_type: str, process_id: str) -> ProcessRecord:
        """See `ProcessClient.remove`."""
        return await self._ask(ProcessRecord, "POST", process_type, process_id, "/remove")

    async def change_some(
        self, change: ProcessChange, wanted: ProcessFilter, *, limit: int = BATCH, after: After = None
    ) -> ProcessesChanged:
        """See `ProcessClient.change_some`."""
        check_wanted(wanted)
        body: dict[str, Any] = wanted.criteria() | {"limit": limit, "after": after}
        if change.args is not None:
            body["args"] = _raw(exact_json("args", change.args, MAX_VALUE))
        return await self.service.ask(ProcessesChanged, "POST", f"/processes/{change.action}", body=body)

    async def _ask(
        self, kind: type[T], method: str, process_type: str, process_id: str, then: str = "", **more: Any
    ) -> T:
        path = f"{_path(process_type, process_id)}{then}"
        return await self.service.ask(kind, method, path, missing=ProcessNotFound, **more)


def _raw(text: str | None) -> msgspec.Raw | None:
    return None if text is None else msgspec.Raw(text.encode())


def _criteria(wanted: HeldFilter) -> dict[str, Any]:
    return {name: value for name in ("sink", "type", "process_id") if (value := getattr(wanted, name)) is not None}


class _Sinks(msgspec.Struct):
    sinks: list[SinkRecord]


class _Versions(msgspec.Struct):
    versions: list[ProcessVersion]


class _Started(msgspec.Struct):
    processes: list[ProcessStarted]


def _path(process_type: str, process_id: str) -> str:
    check_type("type", process_type)
    check_process_id("process_id", process_id)
    return f"/processes/{quote(process_type, safe='')}/{quote(process_id, safe='')}"


def _page(limit: int, after: After, *, newest_first: bool) -> Mapping[str, Any]:
    return {"limit": limit, "after": after, "newest_first": "true" if newest_first else None}
