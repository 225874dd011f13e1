"""What clients ask of a process, and operators do with it: one statement each, decided under its lock (P2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

import attrs

from dataloader.jobs.ids import uuid7
from dataloader.jobs.process_requests import ProcessImport
from dataloader.jobs.process_requests import ProcessRequest as Request
from dataloader.jobs.processes import MAX_VALUE, Remove, Timer, check_metadata
from dataloader.jobs.text import exact_json

_ASK: Final = """
SELECT * FROM dl_process_ask($1, $2, $3, $4, $5::text::jsonb, $6::text::jsonb, $7, $8, $9, $10, $11::text::jsonb, $12,
                             $13::text::jsonb, $14, $15)
"""
# The function sees what it has done for the rows before.
_START_MANY: Final = """
SELECT r.verdict, r.status, r.task_id
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::text[], $8::int[], $9::uuid[])
       WITH ORDINALITY AS a (type, id, args, context, key, hash, metadata, version, job, number)
CROSS JOIN LATERAL dl_process_ask(a.type, a.id, 'init', NULL, a.args::jsonb, a.context::jsonb, a.key, a.hash, NULL,
                                  false, a.metadata::jsonb, a.version, NULL, a.job, $10) AS r
ORDER BY a.number
"""
_ACT: Final = "SELECT * FROM dl_process_act($1, $2, $3, $4, $5)"
_PUT: Final = """
SELECT dl_process_put($1, $2, $3, $4::text::jsonb, $5::text::jsonb, $6::text::jsonb, $7, $8, $9, $10::text::jsonb, $11,
                      $12)
"""
_TAKE_BACK: Final = "SELECT dl_process_take_back($1, $2)"

Act = Literal["resume", "remove", "stop"]


@attrs.frozen
class Asked:
    """The answer to a request; `status` is the process's, where that does not allow it."""

    verdict: Literal["added", "again", "conflict", "exists", "missing", "status", "busy"]
    status: str | None
    task_id: int | None


@attrs.frozen
class Acted:
    """The answer to an act; `told` are tasks that were answered with it."""

    verdict: Literal["done", "missing", "status", "busy"]
    status: str | None
    told: Sequence[int]


async def aio_ask(connection: Any, request: Request, lease_s: int) -> Asked:
    """Ask it (asyncio-flavoured). Raises `BadRequest`."""
    row = await connection.fetchrow(
        _ASK,
        request.type,
        request.process_id,
        request.kind,
        request.method,
        request.json("args"),
        request.json("context"),
        request.key,
        request.hash if request.key is not None else None,
        request.expires_at,
        request.watched,
        request.metadata_json(),
        request.version,
        request.json("start"),
        uuid7(),
        lease_s,
    )
    return Asked(row["verdict"], row["status"], row["task_id"])


async def aio_start_many(connection: Any, requests: Sequence[Request], lease_s: int) -> list[Asked]:
    """Start processes, in one statement (asyncio-flavoured). Raises `BadRequest`."""
    rows = await connection.fetch(
        _START_MANY,
        [one.type for one in requests],
        [one.process_id for one in requests],
        [one.json("args") for one in requests],
        [one.json("context") for one in requests],
        [one.key for one in requests],
        [one.hash if one.key is not None else None for one in requests],
        [one.metadata_json() for one in requests],
        [one.version for one in requests],
        [uuid7() for _ in requests],
        lease_s,
    )
    return [Asked(row["verdict"], row["status"], row["task_id"]) for row in rows]


async def aio_act(connection: Any, process_type: str, process_id: str, act: Act, lease_s: int) -> Acted:
    """Do it (asyncio-flavoured)."""
    row = await connection.fetchrow(_ACT, process_type, process_id, act, uuid7(), lease_s)
    return Acted(row["verdict"], row["status"], row["told"])


async def aio_put(connection: Any, process: ProcessImport, lease_s: int) -> bool:
    """Store a process; whether there was none of its id (asyncio-flavoured). Raises `BadRequest`."""
    after = process.next
    context = after.context if isinstance(after, Timer) else None
    stored: bool = await connection.fetchval(
        _PUT,
        process.type,
        process.process_id,
        process.version,
        process.state_json(),
        check_metadata("metadata", process.metadata),
        process.events_json(),
        None if after is None else "remove" if isinstance(after, Remove) else "timeout",
        None if after is None else after.at,
        None if after is None else after.after_s,
        None if context is None else exact_json("next.context", context, MAX_VALUE),
        uuid7(),
        lease_s,
    )
    return stored


async def aio_take_back(connection: Any, tasks: Sequence[int], *, expired: bool) -> list[int]:
    """Take back calls that have not begun; which (asyncio-flavoured). `expired`: only if their time is over."""
    taken: list[int] = await connection.fetchval(_TAKE_BACK, list(tasks), expired)
    return taken
