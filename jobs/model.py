"""The values that travel between the rooms: what a client asks for, what a worker claims, what a reader sees.

All are frozen attrs classes without behaviour beyond their own validation; the database's row is the truth and these
are pictures of it. Instants are timezone-aware `datetime`s by the database's clock.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypedDict
from uuid import UUID

import attrs
from msgspec import Meta

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.ids import uuid7
from dataloader.jobs.states import QueueState, Status, WaitsFor
from dataloader.jobs.text import CONTROL, UNSTORABLE

MAX_NAME: Final = 200
"""The longest queue or task name, in characters."""
MAX_KEY: Final = 512
"""The longest idempotency, lock or partition key, in characters.

The unique index can't hold more than a third of a page.
"""
FIRST_INSTANT: Final = datetime(1900, 1, 1, tzinfo=UTC)
LAST_INSTANT: Final = datetime(9000, 1, 1, tzinfo=UTC)
MAX_INT: Final = 2_147_483_647
MIN_LEASE_S: Final = 3
"""A lease shorter than this can't be renewed three times with time to stop the body (protocol: lease arithmetic)."""
MAX_LEASE_S: Final = 86_400
MAX_ATTEMPTS: Final = 1_000_000
DEFAULT_MAX_ATTEMPTS: Final = 5
DEFAULT_PRIORITY: Final = 100
NAME_RULE: Final = "on one line, without control characters, and not of spaces alone"
"""What names and keys must be, besides not too long."""


Instant = Annotated[datetime, Meta(tz=True)]
"""An instant with a time zone; RFC 3339 outside, which OpenAPI calls `date-time`."""


def check_text(name: str, value: str, limit: int, *, empty: bool = False) -> None:
    """Raise `BadRequest` unless `value` can be stored and has 1 (0 if `empty`) to `limit` characters.

    For what may be somebody else's: a filter, a name that a foreign service has given.
    """
    least = 0 if empty else 1
    if not least <= len(value) <= limit:
        raise BadRequest(name, f"must have {least} to {limit:,} characters, not {len(value):,}")
    if UNSTORABLE.search(value):
        raise BadRequest(name, f"must have no NUL and no half of a surrogate pair, as {value!r:.60} has")


def check_name(name: str, value: str, limit: int, *, empty: bool = False) -> None:
    """Raise `BadRequest` unless `value` may be the name of a queue or a task, or a key: the one rule for all of them.

    1 (0 if `empty`) to `limit` characters on one line, without control characters, and not of spaces alone.
    """
    if value.isprintable() and 0 < len(value) <= limit and not value.isspace():
        return  # nearly all; the patterns take twenty times as long
    check_text(name, value, limit, empty=empty)
    if value and (value.isspace() or CONTROL.search(value)):
        raise BadRequest(name, f"must be {NAME_RULE}, not {value!r:.60}")


def check_between(name: str, value: int, low: int, high: int) -> None:
    """Raise `BadRequest` for field `name` unless `low` <= `value` <= `high`."""
    if not low <= value <= high:
        raise BadRequest(name, f"must be an integer from {low:,} to {high:,}, not {value}")


def check_instant(name: str, value: datetime) -> None:
    """Raise `BadRequest` for field `name` unless `value` has a time zone and is far from the ends of Python's time."""
    if value.tzinfo is None:
        raise BadRequest(name, f"must be an instant with a time zone (RFC 3339), not {value.isoformat()}")
    if not FIRST_INSTANT <= value <= LAST_INSTANT:
        raise BadRequest(name, f"must be an instant of the years 1900 to 9000, not {value.isoformat()}")


@attrs.frozen(kw_only=True)
class NewJob:
    """A job as requested (Q2). `BadRequest` names the field when a value is not allowed.

    `args` is any JSON object. `queue`, `priority`, `lock_key`, `max_attempts` and `lease_ttl_sec` None mean the task's
    own, which the database knows, or else: no queue (`BadRequest`), 100, no key, so that nothing excludes the job, 5,
    and the settings' lease. `available_at` None means now.
    """

    task: str
    queue: str | None = None
    args: dict[str, Any] = attrs.field(factory=dict)
    idempotency_key: str | None = None
    lock_key: str | None = None
    partition_key: str = ""
    priority: int | None = None
    available_at: datetime | None = None
    max_attempts: int | None = None
    lease_ttl_sec: int | None = None
    producer: str | None = None
    consumer_group: str | None = None
    job_id: UUID = attrs.field(factory=uuid7)

    def __attrs_post_init__(self) -> None:
        """Refuse what the table can't hold or the workers can't serve."""
        if self.queue is not None:
            check_name("queue", self.queue, MAX_NAME)
        check_name("task", self.task, MAX_NAME)
        for name in ("idempotency_key", "lock_key", "producer", "consumer_group"):
            value = getattr(self, name)
            if value is not None:
                check_name(name, value, MAX_KEY)
        check_name("partition_key", self.partition_key, MAX_KEY, empty=True)
        if self.priority is not None:
            check_between("priority", self.priority, 0, MAX_INT)
        if self.max_attempts is not None:
            check_between("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
        if self.lease_ttl_sec is not None:
            check_between("lease_ttl_sec", self.lease_ttl_sec, MIN_LEASE_S, MAX_LEASE_S)
        if self.available_at is not None:
            check_instant("available_at", self.available_at)


class JobOptions(TypedDict, total=False):
    """What a request for a job may say besides its task and arguments; see `NewJob` for each."""

    queue: str | None
    priority: int | None
    lock_key: str | None
    partition_key: str
    idempotency_key: str | None
    available_at: datetime | None
    max_attempts: int | None
    lease_ttl_sec: int | None
    producer: str | None
    consumer_group: str | None
    job_id: UUID


@attrs.frozen
class Enqueued:
    """The answer to a request: the job that stands for it, and whether this request made it.

    `queue_state`, what keeps the queue of a queued job from taking it, is filled in by a supervisor, the HTTP API and
    the command line; where `store.enqueue` alone has added the job it is None.
    """

    job_id: UUID
    status: Status
    created: bool
    queue_state: QueueState | None = None


@attrs.frozen(eq=False)
class ClaimedJob:
    """A job that this process may run now, until its lease ends: what the runner needs and no more.

    `args` is JSON, None where another service wrote more than any job of ours may have. `token` fences every later
    write; `lock_hash` is the advisory lock held for its `lock_key`, None for a job that has none; `lease_s` seconds
    were granted.
    """

    job_id: UUID
    token: int
    queue: str
    task: str
    args: str | None
    lock_key: str | None
    lock_hash: int | None
    partition_key: str
    attempt: int
    max_attempts: int
    lease_s: int


@attrs.frozen(kw_only=True)
class JobRecord:
    """A job as it stands, all of it: a row of `dl_jobs`. `error`, `args` and `progress` are as stored, unmasked.

    `args` and `progress` are objects in our own rows; other services may store any JSON there. `lock_key` is None for a
    job that was given none. `queue_state` is no
    column: what keeps the queue of a queued job from taking it, as far as its workers are known when it is read.
    """

    job_id: UUID
    queue: str
    task: str
    args: Any
    idempotency_key: str | None
    lock_key: str | None
    partition_key: str
    priority: int
    available_at: datetime
    status: Status
    waits_for: WaitsFor | None
    attempt: int
    max_attempts: int
    crashes: int
    lease_ttl_sec: int
    lease_expires_at: datetime | None
    heartbeat_at: datetime | None
    cancel_requested: bool
    progress: Any
    result: Any
    error: str | None
    producer: str | None
    consumer_group: str | None
    claimed_by: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    queue_state: QueueState | None = None


@attrs.frozen
class JobEvent:
    """One line of a job's journal (Q11)."""

    event_id: int
    job_id: UUID
    queue: str
    ts: datetime
    kind: str
    payload: Any


@attrs.frozen
class WorkerRecord:
    """A process that has beaten lately: `claimed_by` of its jobs is `worker`.

    `queues` are those that it serves, with their slots; `tasks` those that it knows, None if it does not tell.
    """

    worker: str
    host: str
    pid: int
    version: str
    started_at: datetime
    seen_at: datetime
    queues: dict[str, int]
    tasks: list[str] | None = None


@attrs.frozen
class QueueRecord:
    """A queue's work that has not ended, by status and reason; finished jobs are never counted.

    `workers` are the processes that serve it and have been heard of lately, `slots` how many jobs they run at once.
    """

    queue: str
    paused: bool
    ready: int
    delayed: int
    blocked: int
    unknown_task: int
    running: int
    oldest_ready_at: datetime | None
    workers: int = 0
    slots: int = 0
