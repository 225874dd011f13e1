"""Requests to durable processes through a running service, whose values are checked as the database checks them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import attrs
import msgspec

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.process_listings import ProcessAnswer, ProcessRecord
from dataloader.jobs.process_requests import ProcessImport, ProcessRequest, ProcessStarted, StartedMany
from dataloader.jobs.processes import MAX_VALUE, ProcessNotFound, Remove, check_metadata
from dataloader.jobs.text import exact_json
from dataloader.web.service_connection import ANSWER_S, ServiceConnection


async def post_request(service: ServiceConnection, request: ProcessRequest, wait_s: float) -> ProcessAnswer:
    """Send a request. The service answers after at most `wait_s` seconds."""
    body = _request_values(request) | {"method": request.method, "expires_at": request.expires_at}
    if request.may_start:
        body["start"] = _raw(request.json("start"))
    if request.kind == "init":
        path = f"/processes/{quote(request.type, safe='')}"
        body["process_id"] = request.process_id
    else:
        path = f"{_process_address(request.type, request.process_id)}/{request.kind}"
    return await service.ask(
        ProcessAnswer,
        "POST",
        path,
        body=_without_none(body),
        params={"wait": wait_s or None},
        timeout_s=wait_s + ANSWER_S,
        missing=ProcessNotFound,
    )


async def post_starts(service: ServiceConnection, requests: Sequence[ProcessRequest]) -> list[ProcessStarted]:
    """Start processes of one type."""
    types = sorted({request.type for request in requests})
    if len(types) > 1:
        raise BadRequest("processes", f"must have a single type when sent to a service, not {', '.join(types)}")
    given = [_without_none(_request_values(request) | {"process_id": request.process_id}) for request in requests]
    path = f"/processes/{quote(types[0], safe='')}/batch"
    return (await service.ask(StartedMany, "POST", path, body={"processes": given})).processes


async def post_import(service: ServiceConnection, process: ProcessImport) -> ProcessRecord:
    """Import a process."""
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
    path = _process_address(process.type, process.process_id)
    return await service.ask(ProcessRecord, "PUT", path, body=body, missing=ProcessNotFound)


def _request_values(request: ProcessRequest) -> dict[str, Any]:
    """Return the values that all kinds of requests may have."""
    return {
        "args": _raw(request.json("args")),
        "context": _raw(request.json("context")),
        "metadata": _raw(request.metadata_json()),
        "idempotency_key": request.key,
    }


def _without_none(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if value is not None}


def _raw(text: str | None) -> msgspec.Raw | None:
    return None if text is None else msgspec.Raw(text.encode())


def _process_address(process_type: str, process_id: str) -> str:
    return f"/processes/{quote(process_type, safe='')}/{quote(process_id, safe='')}"
