"""Values that pass between the layers: a client's request, a worker's claim, a reader's record.

All are frozen attrs classes with no behavior beyond their own validation. They are copies of the database's row, which
is authoritative. Timestamps are timezone-aware `datetime`s by the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal, TypedDict, get_args
from uuid import UUID

import attrs
from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.ids import uuid7
from dataloader.jobs.job_field import JobField, job_fields
from dataloader.jobs.states import QueueState, Status, WaitsFor
from dataloader.jobs.text import CONTROL, UNSTORABLE

MAX_NAME: Final = 200
"""Maximum length of a queue or task name, in characters."""
MAX_KEY: Final = 512
"""Maximum length of an idempotency, lock or partition key, in characters.

The unique index cannot hold more than a third of a page.
"""
MAX_ARGS_BYTES: Final = 16_777_216
"""Maximum length of a job's args, in bytes of JSON."""
FIRST_INSTANT: Final = datetime(1900, 1, 1, tzinfo=UTC)
LAST_INSTANT: Final = datetime(9000, 1, 1, tzinfo=UTC)
MAX_INT: Final = 2_147_483_647
MIN_LEASE_S: Final = 3
"""A shorter lease cannot be renewed three times and still leave time to stop the handler."""
MAX_LEASE_S: Final = 86_400
MAX_ATTEMPTS: Final = 1_000_000
DEFAULT_MAX_ATTEMPTS: Final = 5
DEFAULT_LEASE_S: Final = 60
"""Lease in seconds of a job that has none of its own, if neither its task nor the settings have one."""
MAX_AFTER: Final = 10_000
"""Maximum number of jobs that one job runs after."""
Did = Literal["added", "again", "kept", "updated", "older"]
"""Effect of a request.

added: a job was added. again: nothing changed, since the same request was sent before (by its idempotency key or the
job's ID). kept: nothing changed, since an existing job covers it. updated: a waiting job was changed to the request.
older: nothing changed, since the key's newest job is as new.
"""
WhenFailed = Literal["cancel", "run"]
_WHEN_FAILED: Final = get_args(WhenFailed)
MAX_VERSION: Final = 2**53
"""Greatest number up to which JSON numbers represent every integer."""
VERSION_AHEAD: Final = timedelta(hours=1)
UNCHOSEN: Final = UUID(int=0)
"""ID of no job: the database has it while a job is still to be chosen."""
DEFAULT_PRIORITY: Final = 100
NAME: Final = MappingProxyType({"minLength": 1, "maxLength": MAX_NAME})
"""Bounds of a queue or task name, for OpenAPI."""
KEY: Final = MappingProxyType({"minLength": 1, "maxLength": MAX_KEY})
"""Bounds of a key, for OpenAPI."""
NAME_RULE: Final = "on one line, without control characters, and not of spaces alone"
"""Rule for names and keys, besides their length."""


Instant = Annotated[datetime, Meta(tz=True)]
"""Timestamp with a time zone; RFC 3339 in JSON, which OpenAPI calls `date-time`."""


def about(text: str) -> Meta:
    """Describe a field in one line, for readers of its class and for the API's description."""
    return Meta(description=text)


def check_text(name: str, value: str, limit: int, *, empty: bool = False) -> None:
    """Raise `BadRequest` unless `value` can be stored and has 1 (0 if `empty`) to `limit` characters.

    For texts that another service may have chosen: a filter, or a name in a foreign service's row.
    """
    least = 0 if empty else 1
    if not least <= len(value) <= limit:
        raise BadRequest(name, f"must have {least} to {limit:,} characters, not {len(value):,}")
    if UNSTORABLE.search(value):
        raise BadRequest(name, f"must not contain a NUL or half of a surrogate pair, not {value!r:.60}")


def check_name(name: str, value: str, limit: int, *, empty: bool = False) -> None:
    """Raise `BadRequest` unless `value` may be the name of a queue or a task, or a key.

    It needs 1 (0 if `empty`) to `limit` characters on one line, without control characters, and not only spaces.
    """
    if value.isprintable() and 0 < len(value) <= limit and not value.isspace():
        return  # nearly always; the patterns take twenty times as long
    check_text(name, value, limit, empty=empty)
    if value and (value.isspace() or CONTROL.search(value)):
        raise BadRequest(name, f"must be {NAME_RULE}, not {value!r:.60}")


def check_between(name: str, value: int, low: int, high: int) -> None:
    """Raise `BadRequest` for field `name` unless `low` <= `value` <= `high`."""
    if not low <= value <= high:
        raise BadRequest(name, f"must be an integer from {low:,} to {high:,}, not {value}")


def check_instant(name: str, value: datetime) -> None:
    """Raise `BadRequest` for field `name` unless `value` has a time zone and is in the years 1900 to 9000."""
    if value.tzinfo is None:
        raise BadRequest(name, f"must be an instant with a time zone (RFC 3339), not {value.isoformat()}")
    if not FIRST_INSTANT <= value <= LAST_INSTANT:
        raise BadRequest(name, f"must be an instant of the years 1900 to 9000, not {value.isoformat()}")


def _check_job_version(value: datetime | float) -> None:
    if isinstance(value, datetime):
        check_instant("version", value)
        if value > datetime.now(UTC) + VERSION_AHEAD:
            ahead = f"must not be more than an hour ahead of now, and is {value.isoformat()}"
            raise BadRequest("version", f"{ahead}: all others would lose against it until then")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_VERSION:
        allowed = f"an instant with a time zone (RFC 3339), or a number from -{MAX_VERSION} to {MAX_VERSION}"
        raise BadRequest("version", f"must be {allowed}, not {value!r:.60}")


def _ids(value: Iterable[UUID] | None) -> frozenset[UUID] | None:
    """Return the IDs of a list. An empty `after` means no dependency."""
    return frozenset(value or ()) or None


@attrs.frozen(kw_only=True)
class NewJob:
    """Job as requested. `BadRequest` names the field if a value is not allowed.

    `args` is any JSON object. If `queue`, `priority`, `lock_key`, `max_attempts` or `lease_ttl_sec` is None, the task's
    value in the database applies. If the task has none either, the request is refused (`queue`), or the value is 100,
    no key, 5, or the lease of the settings. `available_at` None means now.

    `after` has the IDs of jobs that exist, or precede this one in the same list: the job waits until all of them have
    ended. If one of them did not succeed, it is canceled (`when_failed` "cancel") or runs anyway ("run"). `root` is a
    job of the group that this one belongs to, so that all of them can be found together. A job that a handler enqueues
    has the handler's root by default.

    `version` is for tasks whose jobs are updated: a timestamp, or a number. A request whose version is not greater than
    that of the newest job of its key changes nothing. Without a version, the time at which the request is processed
    counts. The versions of one key are all timestamps or all numbers.
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
    after: frozenset[UUID] | None = attrs.field(default=None, converter=_ids)
    when_failed: WhenFailed = "cancel"
    root: UUID | None = None
    version: datetime | float | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse values that the table cannot hold or the workers cannot serve."""
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
        if self.version is not None:
            _check_job_version(self.version)
        self._check_after()

    def _check_after(self) -> None:
        if self.after is not None:
            if len(self.after) > MAX_AFTER:
                raise BadRequest("after", f"must have at most {MAX_AFTER:,} ids, not {len(self.after):,}")
            if self.job_id in self.after:
                raise BadRequest("after", f"must not have the job's own id, {self.job_id}")
        if self.when_failed not in _WHEN_FAILED:
            raise BadRequest("when_failed", f"must be cancel or run, not {self.when_failed!r:.60}")


JOB_FIELDS: Final = job_fields(
    NewJob,
    {
        "queue": JobField(
            "text", "The queue's name; the task's own if not given.", "load.cbr", NAME, hashed="always", is_seen=True
        ),
        "task": JobField(
            "text",
            "The task's name, as registered by the workers.",
            "load.rates",
            NAME,
            hashed="always",
            is_seen=True,
            is_single=True,
        ),
        "args": JobField(
            "text",
            "Any JSON object, handed to the task.",
            {"year": 2026},
            hashed="always",
            is_seen=True,
            is_single=True,
        ),
        "idempotency_key": JobField(
            "text",
            "A repeated request with the same key returns the first job.",
            "cbr-2026-11-20",
            KEY,
            hashed="never",
        ),
        "lock_key": JobField(
            "text",
            "Of all jobs with this key one runs at a time.",
            "cbr:2026-11",
            KEY,
            hashed="always",
            is_seen=True,
            null="null: nothing excludes the job, as far as its task says.",
        ),
        "partition_key": JobField(
            "text",
            "The part of the data that the job processes.",
            "2026",
            {"maxLength": MAX_KEY},
            hashed="always",
            is_seen=True,
        ),
        "priority": JobField(
            "int",
            "Smaller runs first; 100 if not given.",
            DEFAULT_PRIORITY,
            {"minimum": 0, "maximum": MAX_INT},
            hashed="always",
        ),
        "available_at": JobField(
            "timestamptz", "Not before; RFC 3339, now if not given.", None, {"format": "date-time"}, hashed="always"
        ),
        "max_attempts": JobField(
            "int",
            "Runs before the job is failed or lost.",
            DEFAULT_MAX_ATTEMPTS,
            {"minimum": 1, "maximum": MAX_ATTEMPTS},
            hashed="always",
            is_seen=True,
        ),
        "lease_ttl_sec": JobField(
            "int",
            "Seconds without a heartbeat after which another worker takes over.",
            DEFAULT_LEASE_S,
            {"minimum": MIN_LEASE_S, "maximum": MAX_LEASE_S},
            hashed="always",
        ),
        "producer": JobField("text", "Who asks, for people.", "airflow", KEY, as_given=True, hashed="always"),
        "consumer_group": JobField("text", "For whom, for people.", "dwh", KEY, as_given=True, hashed="always"),
        "job_id": JobField(
            "uuid",
            "The job's id; the same id again adds no second job.",
            hashed="never",
            is_seen=True,
            is_single=True,
        ),
        "after": JobField(
            "uuid[]",
            "Jobs that exist, or stand before this one in the batch: the job waits until all of them have ended.",
            ["0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b"],
            {"maxItems": MAX_AFTER},
            column=None,
            is_single=True,
            wire=list[UUID],
        ),
        "when_failed": JobField(
            "text", "If one of those did not succeed: cancel the job (if not given), or run it.", is_single=True
        ),
        "root": JobField(
            "uuid",
            "The job that this one belongs to: `GET /api/v1/jobs?root=` finds all.",
            column="root_id",
            hashed="never",
            is_single=True,
        ),
        "version": JobField(
            "float8",
            "Where jobs are updated, an instant or a number: a request that is not newer changes nothing.",
            "2026-11-20T12:00:00Z",
            is_seen=True,
        ),
    },
)
"""Descriptions of the fields of a request for a job. Statements have their parameters in this order."""
AS_GIVEN: Final = tuple(name for name, field in JOB_FIELDS.items() if field.as_given)
"""Fields that are stored in columns of their names, with the values of the request."""


@attrs.frozen
class AfterResult:
    """Outcome of a job that another one runs after: its status, and its result if it has succeeded with one.

    `status` is None for a job that was deleted before it had succeeded.
    """

    status: Status | None
    result: Any


class JobOptions(TypedDict, total=False):
    """Options of a request for a job, besides its task and arguments; `NewJob` describes them."""

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
    after: Iterable[UUID] | None
    when_failed: WhenFailed
    root: UUID | None
    version: datetime | float | None


@attrs.frozen
class Enqueued:
    """Result of a request: the job, whether this request added it, and the request's effect (`did`).

    `queue` is the job's queue: the request's or the task's. `queue_state`, the reason why that queue does not start a
    queued job, is set by a supervisor, the HTTP API and the command line. It is None if only `store.enqueue` was used.
    """

    job_id: UUID
    status: Status
    created: bool
    queue_state: QueueState | None = None
    queue: str = ""
    did: Did = "added"


class ClaimedJob(Struct, frozen=True, eq=False):
    """Job that this process may run now, until its lease ends: only the fields that the runner needs.

    `args` is JSON, or None if another service wrote more than our jobs may have. `token` fences every later write.
    `lock_hash` is the advisory lock held for its `lock_key`, or None without a key. `lease_s` is the granted lease in
    seconds. `more` has fields of some jobs only, and is None for others: `schedule` and `planned_at`, `previous` (the
    return value of the previous stage), and the request's `version`.
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
    more: Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True)
class JobRecord:
    """Complete job: a row of `dl_jobs`. `error`, `args` and `progress` are as stored, unmasked.

    `args` and `progress` are objects in our rows; other services may store any JSON there. `lock_key` is None for a job
    without a key. `queue_state` is not a column: it is the reason why the queue does not start a queued job, as far as
    its workers are known at the read. `after` has the jobs that it runs after, at most 100, and `when_failed` says what
    happens if one of them does not succeed; both are None for a job without dependencies. While it waits for them,
    `available_at` is the requested time. `root` is the first job of its group.
    """

    job_id: Annotated[UUID, about("The job's id, a UUID of version 7 where we made it.")]
    queue: Annotated[str, about("The queue in which it waits.")]
    task: Annotated[str, about("The name of the task that is run.")]
    args: Annotated[Any, about("The arguments of the task; an object where we stored it.")]
    idempotency_key: Annotated[str | None, about("The key by which a repeated request is recognized.")]
    lock_key: Annotated[str | None, about("Of all jobs with this key one runs at a time; null if it has none.")]
    partition_key: Annotated[str, about("The part of the data that it processes, for people; may be empty.")]
    priority: Annotated[int, about("The smallest runs first.")]
    available_at: Annotated[
        Instant, about("It does not start before; of a job that waits for others, the instant that was asked for.")
    ]
    status: Annotated[Status, about("The job's status.")]
    waits_for: Annotated[WaitsFor | None, about("What a queued job waits for; null if it is ready, or not queued.")]
    attempt: Annotated[int, about("The number of its attempts, without refunded ones.")]
    max_attempts: Annotated[int, about("The attempts after which it is failed or lost.")]
    crashes: Annotated[int, about("The number of consecutive attempts that lost their worker.")]
    lease_ttl_sec: Annotated[int, about("Seconds without a heartbeat after which another worker takes over.")]
    lease_expires_at: Annotated[Instant | None, about("When the lease of its worker ends; null while it does not run.")]
    heartbeat_at: Annotated[Instant | None, about("The time of its worker's last heartbeat.")]
    cancel_requested: Annotated[bool, about("Whether a cancel has been requested.")]
    progress: Annotated[Any, about("The handler's last progress.")]
    result: Annotated[Any, about("The handler's result.")]
    error: Annotated[str | None, about("The error of its last failed attempt.")]
    producer: Annotated[str | None, about("The requester, for people.")]
    consumer_group: Annotated[str | None, about("The consumer, for people.")]
    claimed_by: Annotated[str | None, about("The worker that runs it.")]
    created_at: Annotated[Instant, about("When it was added.")]
    started_at: Annotated[Instant | None, about("When its last attempt began.")]
    finished_at: Annotated[Instant | None, about("When it ended for good.")]
    queue_state: Annotated[
        QueueState | None, about("Why the job's queue does not start it; null if no reason is known.")
    ] = None
    after: Annotated[
        list[UUID] | None, about("The jobs that it runs after, a hundred at most; null for a job that runs after none.")
    ] = None
    when_failed: Annotated[
        WhenFailed | None, about("Whether it is canceled or runs if one of those does not succeed.")
    ] = None
    root: Annotated[UUID | None, about("The first job of the group that it belongs to.")] = None
    schedule: Annotated[str | None, about("The schedule that it is of.")] = None
    planned_at: Annotated[
        Instant | None, about("The time that its schedule had planned; null for one run by hand.")
    ] = None
    changed_at: Annotated[
        Instant | None,
        about(
            "When it changed last: added, started, heard of or ended; of one job that is asked for, also its journal."
        ),
    ] = None
    version: Annotated[
        float | None,
        about(
            "The version that it was requested with, an instant in seconds since 1970, or when it was requested without"
            " one; null if its task has none."
        ),
    ] = None
    superseded_by: Annotated[
        UUID | None, about("The newer job of its unique key, which waits for its end; this one is not retried.")
    ] = None
    previous: Annotated[Any, about("What the stage before has returned, for a job that goes through stages.")] = None
    moves: Annotated[
        int | None, about("How often it has moved from one stage to another; null for a job that never has.")
    ] = None


@attrs.frozen
class JobEvent:
    """Event of a job's history."""

    event_id: Annotated[int, about("The event's number; later events have larger ones.")]
    job_id: Annotated[UUID, about("The job's id.")]
    queue: Annotated[str, about("The queue in which the job was.")]
    ts: Annotated[Instant, about("When it happened.")]
    kind: Annotated[
        str,
        about("What happened, such as `queued`, `picked`, `log`, `requeue`, `moved`, `done`, `failed`."),
    ]
    payload: Annotated[Any, about("Its details, by kind.")]


@attrs.frozen
class WorkerRecord:
    """Process with a recent heartbeat; the jobs that it runs have `worker` as `claimed_by`.

    `queues` are the queues that it serves, with their slots. `tasks` are the tasks that it knows, None if unknown.
    `only_tasks` names the tasks of queues from which it claims only some tasks.
    """

    worker: Annotated[str, about("The process's name: `claimed_by` of the jobs that it runs.")]
    host: Annotated[str, about("The machine on which it runs.")]
    pid: Annotated[int, about("Its number on that machine.")]
    version: Annotated[str, about("The version of dataloader that it runs.")]
    started_at: Annotated[Instant, about("When it started.")]
    seen_at: Annotated[Instant, about("The time of its last heartbeat.")]
    queues: Annotated[dict[str, int], about("The queues that it serves, with their slots.")]
    tasks: Annotated[list[str] | None, about("The tasks that it knows; null if unknown.")] = None
    only_tasks: Annotated[
        dict[str, list[str]] | None,
        about("Of queues from which it takes jobs of some tasks alone, those tasks; null: there are none."),
    ] = None


@attrs.frozen
class QueueRecord:
    """Jobs of a queue that have not ended, by status and reason; ended jobs are never counted.

    `dependent` jobs wait for other jobs to end, `limited` ones for their task's limits. `workers` is the number of
    processes with a recent heartbeat that serve it, `slots` the number of jobs that they run concurrently.
    """

    queue: Annotated[str, about("The queue's name.")]
    paused: Annotated[bool, about("Whether an operator has paused it.")]
    ready: Annotated[int, about("Jobs that may start now.")]
    delayed: Annotated[int, about("Jobs that wait for their time.")]
    blocked: Annotated[int, about("Jobs whose lock_key is held by another job.")]
    unknown_task: Annotated[int, about("Jobs whose task no worker knows.")]
    running: Annotated[int, about("Jobs that run, or whose end is not recorded yet; may exceed `slots`.")]
    oldest_ready_at: Annotated[Instant | None, about("The instant since which its oldest ready job waits.")]
    workers: Annotated[int, about("Processes that serve it and sent a heartbeat in the last minute.")] = 0
    slots: Annotated[int, about("The number of its jobs that those processes run at once.")] = 0
    dependent: Annotated[int, about("Jobs that wait for other jobs to end.")] = 0
    limited: Annotated[int, about("Jobs that wait for the limits of their task or its supplier.")] = 0
