"""Requests of clients to a process, and actions of operators: one statement each, decided under the process's lock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias
from uuid import UUID

import attrs

from dataloader.jobs.ids import uuid7
from dataloader.jobs.process_requests import ProcessImport
from dataloader.jobs.process_requests import ProcessRequest as Request
from dataloader.jobs.processes import MAX_VALUE, Remove, Timer, check_metadata
from dataloader.jobs.text import exact_json

_ASK: Final = """
SELECT * FROM dl_process_request($1, $2, $3, $4, $5::text::jsonb, $6::text::jsonb, $7, $8, $9, $10, $11::text::jsonb,
                                 $12, $13::text::jsonb, $14, $15, $16)
"""
_ASK_MANY: Final = """
SELECT * FROM dl_process_request_many($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)
"""
_ACT: Final = "SELECT * FROM dl_process_act($1, $2, $3, $4, $5)"
_PUT: Final = """
SELECT dl_process_put($1, $2, $3, $4::text::jsonb, $5::text::jsonb, $6::text::jsonb, $7, $8, $9, $10::text::jsonb, $11,
                      $12)
"""
_TAKE_BACK: Final = "SELECT dl_process_withdraw($1, $2, $3)"

# The function sees its own changes for the rows before.
_START_REST: Final = """
SELECT r.verdict, r.status, r.task_id, r.ident
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::bytea[],
            $9::timestamptz[], $10::boolean[], $11::text[], $12::int[], $13::boolean[], $14::uuid[])
       WITH ORDINALITY AS a (type, id, kind, method, args, context, key, hash, expires_at, watched, metadata, version,
                             may_start, job, number)
CROSS JOIN LATERAL dl_process_request(a.type, a.id, a.kind, a.method, a.args::jsonb, a.context::jsonb, a.key, a.hash,
                                      NULL, false, a.metadata::jsonb, a.version, NULL, a.job, $15, NULL) AS r
ORDER BY a.number
"""
Act = Literal["resume", "remove", "stop"]
Row: TypeAlias = tuple[Any, ...]


@attrs.frozen
class Asked:
    """Answer to a request. `status` is the process's status, if that does not allow the request.

    `locked`: another session has locked the process, and the request did not wait. `ident` distinguishes the task from
    another one with the same ID after a restore.
    """

    verdict: Literal["added", "again", "conflict", "exists", "missing", "status", "busy", "locked"]
    status: str | None
    task_id: int | None
    ident: UUID | None = None


@attrs.frozen
class Acted:
    """Answer to an operator's action. `told` are the tasks that it has answered."""

    verdict: Literal["done", "missing", "status", "busy"]
    status: str | None
    told: Sequence[int]


async def aio_ask(connection: Any, request: Request, lease_s: int, *, ident: UUID | None = None) -> Asked:
    """Send a request (asyncio-flavored). `ident` is the task's, random if None. Raises `BadRequest`."""
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
        ident,
    )
    return Asked(row["verdict"], row["status"], row["task_id"], row["ident"])


def row_of_request(request: Request) -> Row:
    """Return a call or a start as a row of the statement for many. Raises `BadRequest`."""
    return (
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
        request.may_start,
        uuid7(),
    )


async def aio_ask_many(connection: Any, rows: Sequence[Row], lease_s: int, *, waits: bool = False) -> dict[int, Asked]:
    """Send requests in one statement (asyncio-flavored). Return the answers "added" and "locked" by their places.

    `waits`: wait for locked processes. A request without an entry has another answer, and must be sent by itself.
    """
    rows = await connection.fetch(_ASK_MANY, *map(list, zip(*rows, strict=True)), lease_s, waits)
    return {
        number - 1: Asked("locked" if task_id is None else "added", None, task_id, ident)
        for number, task_id, ident in rows
    }


async def aio_start_many(connection: Any, requests: Sequence[Request], lease_s: int) -> list[Asked]:
    """Start processes, within a transaction (asyncio-flavored). Raises `BadRequest`."""
    rows = [row_of_request(one) for one in requests]
    asked = await aio_ask_many(connection, rows, lease_s)
    if rest := [place for place in range(len(rows)) if place not in asked]:
        columns = map(list, zip(*(rows[place] for place in rest), strict=True))
        for place, row in zip(rest, await connection.fetch(_START_REST, *columns, lease_s), strict=True):
            asked[place] = Asked(row["verdict"], row["status"], row["task_id"], row["ident"])
    return [asked[place] for place in range(len(rows))]


async def aio_act(connection: Any, process_type: str, process_id: str, act: Act, lease_s: int) -> Acted:
    """Change a process (asyncio-flavored)."""
    row = await connection.fetchrow(_ACT, process_type, process_id, act, uuid7(), lease_s)
    return Acted(row["verdict"], row["status"], row["told"])


async def aio_put(connection: Any, process: ProcessImport, lease_s: int) -> bool:
    """Store a process (asyncio-flavored). Return whether its ID was free. Raises `BadRequest`."""
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


async def aio_take_back(connection: Any, tasks: Mapping[int, UUID | None], *, expired: bool) -> list[int]:
    """Withdraw calls that have not begun; return their IDs (asyncio-flavored).

    Args:
        connection: connection to the database.
        tasks: IDs of the calls with their idents. A task with another ident is unchanged.
        expired: withdraw only expired calls.
    """
    taken: list[int] = await connection.fetchval(_TAKE_BACK, list(tasks), list(tasks.values()), expired)
    return taken
