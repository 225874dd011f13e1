"""Two statements of a step: `begin` gives a wake-up job its work, `commit` writes the step's outcome.

Many processes share a statement. Both are functions of the database (migrations/functions/processes.sql), because each
needs a lock and then a new snapshot in one round trip. The caller sends the steps of a batch that cannot be stored one
by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, Final, Literal
from uuid import UUID

import attrs

from dataloader.jobs.errors import LeaseLost, StoreUnavailable
from dataloader.jobs.text import json_or_none
from dataloader.store.queue.control import aio_short_transaction

Kind = Literal["init", "call", "repair", "timeout", "remove"]
Outcome = Literal["done", "refused", "retry", "failed", "returned"]
Following = Literal["keep", "timeout", "remove", "suspend", "gone"]

_BEGIN: Final = "SELECT * FROM dl_process_begin_steps($1, $2, $3, $4)"
_COMMIT: Final = (
    "SELECT * FROM dl_process_commit_steps($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)"
)
_IN_TURN: Final = """
SELECT FROM unnest($1::bigint[]) AS a (key) JOIN dl_processes p ON p.key = ANY (ARRAY[a.key])
ORDER BY p.key FOR NO KEY UPDATE OF p
"""
LOCKED_S: Final = 0.01
LOCKED_TRIES: Final = 200


@attrs.frozen(kw_only=True)
class Work:
    """Task for a run. `attempt` counts the earlier tries, `first_task` is the first of them.

    `ident` is the same in each try; None if a program of an earlier release has begun it.
    """

    task_id: int
    kind: Kind
    method: str | None
    args: Any
    context: Any
    attempt: int
    first_task: int | None
    ident: UUID | None = None


# Like the outcome below, not frozen and never evolved: each step makes some, and this takes a fifth of the time.
@attrs.define(kw_only=True)
class StepSnapshot:
    """Process as its step sees it. Not to be changed."""

    type: str
    process_id: str
    version: int
    status: str
    aux_state: Any
    metadata: dict[str, Any]
    last_event_id: int
    corrupted_by: int | None


@attrs.frozen
class Wakeup:
    """Claimed wake-up job. `crashes`: number of consecutive runs of a step again after its worker died."""

    key: int
    job_id: UUID
    token: int
    crashes: int = 0


@attrs.frozen
class BegunStep:
    """Result of `begin` for a wake-up job. `told`: tasks that were answered with it."""

    verdict: Literal["step", "zombie", "rest", "void", "locked"]
    snapshot: StepSnapshot | None
    work: Work | None
    told: Sequence[int]

    def on(self, before: StepSnapshot) -> StepSnapshot:
        """Return the process as it is now."""
        return self.snapshot or before


@attrs.define(kw_only=True)
class StepOutcome:
    """Outcome of a step. None leaves `state` and `metadata` unchanged. All JSON is text.

    `at` and `after_s`: time of the timer or the next try. `go_on`: this run can do the next task. `version`: version of
    the new state, if it differs.
    """

    wakeup: Wakeup
    task_id: int
    outcome: Outcome
    response: str | None = None
    error: str | None = None
    state: str | None = None
    metadata: str | None = None
    events: str | None = None
    following: Following = "keep"
    after_s: float | None = None
    at: datetime | None = None
    context: str | None = None
    go_on: bool = False
    version: int | None = None
    messages: str | None = None
    """Messages to other processes, a list."""


@attrs.frozen
class Committed:
    """Result of `commit` for a step. `next` has `work`. The other fields are the process's, as it is now."""

    verdict: Literal["next", "rest", "gone", "locked", "void"]
    work: Work | None
    status: str | None
    last_event_id: int | None
    corrupted_by: int | None
    told: Sequence[int]

    def on(self, before: StepSnapshot) -> StepSnapshot:
        """Return the process as it is after the step."""
        return StepSnapshot(
            type=before.type,
            process_id=before.process_id,
            version=before.version,
            status=self.status or before.status,
            aux_state=before.aux_state,
            metadata=before.metadata,
            last_event_id=before.last_event_id if self.last_event_id is None else self.last_event_id,
            corrupted_by=self.corrupted_by,
        )


async def aio_begin(connection: Any, wakeups: Sequence[Wakeup]) -> list[BegunStep]:
    """Begin a step of each wake-up job (asyncio-flavored). The answers have the same order."""
    rows = await connection.fetch(
        _BEGIN,
        [one.key for one in wakeups],
        [one.job_id for one in wakeups],
        [one.token for one in wakeups],
        [one.crashes for one in wakeups],
    )
    found = {row["key"]: row for row in rows}
    return [_begun(found[one.key]) for one in wakeups]


def _begun(row: Any) -> BegunStep:
    if row["verdict"] != "step":
        return BegunStep(row["verdict"], None, None, row["told"])
    snapshot = StepSnapshot(
        type=row["type"],
        process_id=row["process_id"],
        version=row["version"],
        status=row["status"],
        aux_state=json_or_none(row["aux_state"]),
        metadata=json_or_none(row["metadata"]),
        last_event_id=row["last_event_id"],
        corrupted_by=row["corrupted_by"],
    )
    return BegunStep("step", snapshot, _work_of(row), row["told"])


async def aio_commit(connection: Any, steps: Sequence[StepOutcome]) -> list[Committed]:
    """Write the outcomes of steps of different processes (asyncio-flavored). The answers have the same order."""
    rows = await connection.fetch(
        _COMMIT,
        [one.wakeup.key for one in steps],
        [one.wakeup.job_id for one in steps],
        [one.wakeup.token for one in steps],
        [one.task_id for one in steps],
        [one.outcome for one in steps],
        [one.response for one in steps],
        [one.error for one in steps],
        [one.state for one in steps],
        [one.metadata for one in steps],
        [one.events for one in steps],
        [one.following for one in steps],
        [one.after_s for one in steps],
        [one.at for one in steps],
        [one.context for one in steps],
        [one.go_on for one in steps],
        [one.version for one in steps],
        [one.messages for one in steps] if any(one.messages for one in steps) else None,
    )
    found = {row["key"]: row for row in rows}
    return [_committed(found[one.wakeup.key]) for one in steps]


async def aio_begin_in_turn(connection: Any, wakeups: Sequence[Wakeup]) -> list[BegunStep]:
    """Begin steps like `aio_begin`, but queue for rows that other sessions have locked."""
    async with _aio_in_turn(connection, wakeups):
        return await aio_begin(connection, wakeups)


async def aio_commit_in_turn(connection: Any, steps: Sequence[StepOutcome]) -> list[Committed]:
    """Write outcomes like `aio_commit`, but queue for rows that other sessions have locked."""
    async with _aio_in_turn(connection, [one.wakeup for one in steps]):
        return await aio_commit(connection, steps)


@asynccontextmanager
async def _aio_in_turn(connection: Any, wakeups: Sequence[Wakeup]) -> AsyncIterator[None]:
    async with aio_short_transaction(connection):
        # Otherwise a plan from the time when the table was empty would scan it forever.
        await connection.execute("SET LOCAL enable_seqscan = off")
        await connection.fetch(_IN_TURN, [one.key for one in wakeups])
        yield


async def aio_commit_within(step: StepOutcome, connection: Any) -> Committed:
    """Write one outcome in the caller's transaction, and wait for a locked row (asyncio-flavored).

    Raises `LeaseLost` if the process belongs to another run, `StoreUnavailable` if it stays locked.
    """
    for _ in range(LOCKED_TRIES):
        [committed] = await aio_commit(connection, [step])
        if committed.verdict != "locked":
            break
        await asyncio.sleep(LOCKED_S)
    if committed.verdict == "locked":
        raise StoreUnavailable("another session has locked the process: the step's transaction was rolled back")
    if committed.verdict == "void":
        raise LeaseLost("another run has the process: the step's transaction was rolled back")
    return committed


def _committed(row: Any) -> Committed:
    work = _work_of(row) if row["verdict"] == "next" else None
    return Committed(row["verdict"], work, row["status"], row["last_event_id"], row["corrupted_by"], row["told"])


def _work_of(row: Any) -> Work:
    return Work(
        task_id=row["task_id"],
        kind=row["kind"],
        method=row["method"],
        args=json_or_none(row["args"]),
        context=json_or_none(row["context"]),
        attempt=row["attempt"] or 0,
        first_task=row["first_task"],
        ident=row["ident"],
    )
