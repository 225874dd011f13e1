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
from dataloader.jobs.secrets.record_masks import SENSITIVE, Public
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
"""Lease in seconds if neither the job, its task nor the settings have one."""
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
NAME_RULE: Final = "on one line, without control characters, and not only spaces"
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
        raise BadRequest(name, f"must not contain NUL or unpaired surrogates, and is {value!r:.60}")


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
        raise BadRequest(name, f"must be a timestamp with a time zone (RFC 3339), not {value.isoformat()}")
    if not FIRST_INSTANT <= value <= LAST_INSTANT:
        raise BadRequest(name, f"must be between the years 1900 and 9000, not {value.isoformat()}")


def _check_job_version(value: datetime | float) -> None:
    if isinstance(value, datetime):
        check_instant("version", value)
        if value > datetime.now(UTC) + VERSION_AHEAD:
            ahead = f"must be at most an hour in the future, not {value.isoformat()}"
            raise BadRequest("version", f"{ahead}: requests with earlier versions would be ignored until then")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_VERSION:
        allowed = f"a timestamp with a time zone (RFC 3339), or a number from -{MAX_VERSION} to {MAX_VERSION}"
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
                raise BadRequest("after", f"must have at most {MAX_AFTER:,} IDs, not {len(self.after):,}")
            if self.job_id in self.after:
                raise BadRequest("after", f"must not contain the ID of the job itself, {self.job_id}")
        if self.when_failed not in _WHEN_FAILED:
            raise BadRequest("when_failed", f"must be cancel or run, not {self.when_failed!r:.60}")


JOB_FIELDS: Final = job_fields(
    NewJob,
    {
        "queue": JobField(
            "text", "Name of the queue. Default: the task's own queue.", "load.cbr", NAME, hashed="always", is_seen=True
        ),
        "task": JobField(
            "text",
            "Name of the task, as registered by the workers.",
            "load.rates",
            NAME,
            hashed="always",
            is_seen=True,
            is_single=True,
        ),
        "args": JobField(
            "text",
            "JSON object that the handler receives.",
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
            "Lock key. One job with this key runs at a time.",
            "cbr:2026-11",
            KEY,
            hashed="always",
            is_seen=True,
            null="null: no lock key, unless the task declares one.",
        ),
        "partition_key": JobField(
            "text",
            "Part of the data that the job processes.",
            "2026",
            {"maxLength": MAX_KEY},
            hashed="always",
            is_seen=True,
        ),
        "priority": JobField(
            "int",
            "Priority. Smaller numbers run first. Default: 100.",
            DEFAULT_PRIORITY,
            {"minimum": 0, "maximum": MAX_INT},
            hashed="always",
        ),
        "available_at": JobField(
            "timestamptz", "Earliest start (RFC 3339). Default: now.", None, {"format": "date-time"}, hashed="always"
        ),
        "max_attempts": JobField(
            "int",
            "Maximum number of attempts, after which the job is failed or lost.",
            DEFAULT_MAX_ATTEMPTS,
            {"minimum": 1, "maximum": MAX_ATTEMPTS},
            hashed="always",
            is_seen=True,
        ),
        "lease_ttl_sec": JobField(
            "int",
            "Seconds without a heartbeat after which another worker runs the job.",
            DEFAULT_LEASE_S,
            {"minimum": MIN_LEASE_S, "maximum": MAX_LEASE_S},
            hashed="always",
        ),
        "producer": JobField(
            "text", "Name of the producer; informative.", "airflow", KEY, as_given=True, hashed="always"
        ),
        "consumer_group": JobField(
            "text", "Name of the consumer group; informative.", "dwh", KEY, as_given=True, hashed="always"
        ),
        "job_id": JobField(
            "uuid",
            "ID of the job. Repeating the ID adds no second job.",
            hashed="never",
            is_seen=True,
            is_single=True,
        ),
        "after": JobField(
            "uuid[]",
            "Existing jobs, or earlier jobs of the batch. The job waits until all of them have ended.",
            ["0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b"],
            {"maxItems": MAX_AFTER},
            column=None,
            is_single=True,
            wire=list[UUID],
        ),
        "when_failed": JobField(
            "text", "If one of `after` did not succeed: cancel the job (default), or run it.", is_single=True
        ),
        "root": JobField(
            "uuid",
            "Root job that this job belongs to. `GET /api/v1/jobs?root=` finds all of them.",
            column="root_id",
            hashed="never",
            is_single=True,
        ),
        "version": JobField(
            "float8",
            "Version (timestamp or number), for tasks that update waiting jobs. An older request changes nothing.",
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
    queue: Annotated[str, SENSITIVE] = ""
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

    job_id: Annotated[UUID, about("ID of the job; a version 7 UUID if the service created it.")]
    queue: Annotated[str, about("Name of the queue."), SENSITIVE]
    task: Annotated[str, about("Name of the task."), SENSITIVE]
    args: Annotated[Any, about("Arguments of the task; an object if the service stored the job."), SENSITIVE]
    idempotency_key: Annotated[str | None, about("Key that identifies repeated requests."), SENSITIVE]
    lock_key: Annotated[
        str | None, about("Lock key. One job with this key runs at a time; null: no lock key."), SENSITIVE
    ]
    partition_key: Annotated[str, about("Part of the data that the job processes; may be empty."), SENSITIVE]
    priority: Annotated[int, about("Priority. Smaller numbers run first.")]
    available_at: Annotated[Instant, about("Earliest start; for a job that waits for other jobs, the requested one.")]
    status: Annotated[Status, about("Status of the job.")]
    waits_for: Annotated[WaitsFor | None, about("Waiting reason of a queued job; null if it is ready or not queued.")]
    attempt: Annotated[int, about("Number of attempts, without refunded ones.")]
    max_attempts: Annotated[int, about("Maximum number of attempts, after which the job is failed or lost.")]
    crashes: Annotated[int, about("Number of consecutive attempts that lost their worker.")]
    lease_ttl_sec: Annotated[int, about("Seconds without a heartbeat after which another worker runs the job.")]
    lease_expires_at: Annotated[
        Instant | None, about("Expiry of the lease of its worker; null while the job is not running.")
    ]
    heartbeat_at: Annotated[Instant | None, about("Last heartbeat of the worker.")]
    cancel_requested: Annotated[bool, about("True if a cancel was requested.")]
    progress: Annotated[Any, about("Last progress that the handler reported."), SENSITIVE]
    result: Annotated[Any, about("Result of the handler."), SENSITIVE]
    error: Annotated[str | None, about("Error of the last failed attempt."), SENSITIVE]
    producer: Annotated[str | None, about("Name of the producer; informative."), SENSITIVE]
    consumer_group: Annotated[str | None, about("Name of the consumer group; informative."), SENSITIVE]
    claimed_by: Annotated[str | None, about("Worker that runs the job."), SENSITIVE]
    created_at: Annotated[Instant, about("Creation time.")]
    started_at: Annotated[Instant | None, about("Start of the first run.")]
    finished_at: Annotated[Instant | None, about("End of the job.")]
    queue_state: Annotated[
        QueueState | None, about("Reason why the queue does not start the job; null if none is known.")
    ] = None
    run_started_at: Annotated[Instant | None, about("Start of the current or last run.")] = None
    after: Annotated[list[UUID] | None, about("Jobs that it depends on, at most 100; null if there are none.")] = None
    when_failed: Annotated[
        WhenFailed | None, about("Effect if one of `after` does not succeed: the job is canceled or runs.")
    ] = None
    root: Annotated[UUID | None, about("Root job that it belongs to.")] = None
    schedule: Annotated[str | None, about("Schedule that created the job."), SENSITIVE] = None
    planned_at: Annotated[Instant | None, about("Planned time of the schedule; null for a manual run.")] = None
    changed_at: Annotated[
        Instant | None,
        about("Last change: created, started, heartbeat or end; for a single job, also its last event."),
    ] = None
    version: Annotated[
        float | None,
        about(
            "Version of its request (timestamps as seconds since 1970), or the time of a request without one; null if"
            " its task has no versions."
        ),
    ] = None
    superseded_by: Annotated[
        UUID | None,
        about("Newer job with the same unique key, which waits for the end of this job. This job is not retried."),
    ] = None
    previous: Annotated[Any, about("Return value of the previous stage, for a job with stages."), SENSITIVE] = None
    moves: Annotated[int | None, about("Number of moves between stages; null if there were none.")] = None


@attrs.frozen
class JobEvent:
    """Event of a job's history."""

    event_id: Annotated[int, about("Number of the event, in ascending order of time.")]
    job_id: Annotated[UUID, about("ID of the job.")]
    queue: Annotated[str, about("Queue of the job at that time."), SENSITIVE]
    ts: Annotated[Instant, about("Timestamp of the event.")]
    kind: Annotated[
        str,
        about("Kind of the event, such as `queued`, `picked`, `log`, `requeue`, `moved`, `done`, `failed`."),
        SENSITIVE,
    ]
    payload: Annotated[Any, about("Details, by kind."), SENSITIVE]


@attrs.frozen
class WorkerRecord:
    """Process with a recent heartbeat; the jobs that it runs have `worker` as `claimed_by`.

    `queues` are the queues that it serves, with their slots. `tasks` are the tasks that it knows, None if unknown.
    `only_tasks` names the tasks of queues from which it claims only some tasks.
    """

    worker: Annotated[str, about("Name of the process: `claimed_by` of its jobs."), SENSITIVE]
    host: Annotated[str, about("Host name."), SENSITIVE]
    pid: Annotated[int, about("Process ID on that host.")]
    version: Annotated[str, about("Version of dataloader."), Public("a version number")]
    started_at: Annotated[Instant, about("Start time.")]
    seen_at: Annotated[Instant, about("Last heartbeat.")]
    queues: Annotated[dict[str, int], about("Queues that it serves, with their slots."), SENSITIVE]
    tasks: Annotated[list[str] | None, about("Tasks that it has; null if unknown."), SENSITIVE] = None
    only_tasks: Annotated[
        dict[str, list[str]] | None,
        about("Tasks per queue, for queues from which it claims only jobs of some tasks; null: no such queues."),
        SENSITIVE,
    ] = None


@attrs.frozen
class QueueRecord:
    """Jobs of a queue that have not ended, by status and reason; ended jobs are never counted.

    `dependent` jobs wait for other jobs to end, `limited` ones for their task's limits. `workers` is the number of
    processes with a recent heartbeat that serve it, `slots` the number of jobs that they run concurrently.
    """

    queue: Annotated[str, about("Name of the queue."), SENSITIVE]
    paused: Annotated[bool, about("True if an operator has paused it.")]
    ready: Annotated[int, about("Jobs that may start now.")]
    delayed: Annotated[int, about("Jobs that are not due yet.")]
    blocked: Annotated[int, about("Jobs whose lock_key is held by another job.")]
    unknown_task: Annotated[int, about("Jobs whose task no worker has.")]
    running: Annotated[int, about("Running jobs, including jobs whose end is not recorded yet; can exceed `slots`.")]
    oldest_ready_at: Annotated[Instant | None, about("Time since which its oldest ready job has waited.")]
    workers: Annotated[int, about("Processes that serve it, with a heartbeat in the last minute.")] = 0
    slots: Annotated[int, about("Number of its jobs that these processes can run concurrently.")] = 0
    dependent: Annotated[int, about("Jobs that wait for other jobs to end.")] = 0
    limited: Annotated[int, about("Jobs that wait for a limit of their task or its supplier.")] = 0
