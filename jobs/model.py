"""The values that travel between the rooms: what a client asks for, what a worker claims, what a reader sees.

All are frozen attrs classes without behaviour beyond their own validation; the database's row is the truth and these
are pictures of it. Instants are timezone-aware `datetime`s by the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final, Literal, TypedDict, get_args
from uuid import UUID

import attrs
from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.ids import uuid7
from dataloader.jobs.states import QueueState, Status, WaitsFor
from dataloader.jobs.text import CONTROL, UNSTORABLE

MAX_NAME: Final = 200
"""The longest queue or task name, in characters."""
MAX_KEY: Final = 512
MAX_ARGS_BYTES: Final = 16_777_216
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
MAX_AFTER: Final = 10_000
"""The most jobs that one job runs after."""
Did = Literal["added", "again", "kept", "updated", "older"]
"""What a request has done.

added: a job. again: nothing, the same request was sent before (by its idempotency key or the job's id). kept: nothing,
a job stands for it. updated: a job that waited has become what it says. older: nothing, the key's newest job is as new.
"""
WhenFailed = Literal["cancel", "run"]
_WHEN_FAILED: Final = get_args(WhenFailed)
MAX_VERSION: Final = 2**53
"""The greatest number up to which each integer is a number of JSON."""
VERSION_AHEAD: Final = timedelta(hours=1)
UNCHOSEN: Final = UUID(int=0)
"""No job's id: the database has it where a job is still to be chosen."""
DEFAULT_PRIORITY: Final = 100
NAME_RULE: Final = "on one line, without control characters, and not of spaces alone"
"""What names and keys must be, besides not too long."""


Instant = Annotated[datetime, Meta(tz=True)]
"""An instant with a time zone; RFC 3339 outside, which OpenAPI calls `date-time`."""


def about(text: str) -> Meta:
    """What a field is, in one line: for readers of its class, and for the API's description, which is made of these."""
    return Meta(description=text)


def check_text(name: str, value: str, limit: int, *, empty: bool = False) -> None:
    """Raise `BadRequest` unless `value` can be stored and has 1 (0 if `empty`) to `limit` characters.

    For what may be somebody else's: a filter, a name that a foreign service has given.
    """
    least = 0 if empty else 1
    if not least <= len(value) <= limit:
        raise BadRequest(name, f"must have {least} to {limit:,} characters, not {len(value):,}")
    if UNSTORABLE.search(value):
        raise BadRequest(name, f"must not contain a NUL or half of a surrogate pair, not {value!r:.60}")


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


def _check_version(value: datetime | float) -> None:
    if isinstance(value, datetime):
        check_instant("version", value)
        if value > datetime.now(UTC) + VERSION_AHEAD:
            ahead = f"must not be more than an hour ahead of now, and is {value.isoformat()}"
            raise BadRequest("version", f"{ahead}: all others would lose against it until then")
    elif isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_VERSION:
        allowed = f"an instant with a time zone (RFC 3339), or a number from -{MAX_VERSION} to {MAX_VERSION}"
        raise BadRequest("version", f"must be {allowed}, not {value!r:.60}")


def _ids(value: Iterable[UUID] | None) -> frozenset[UUID] | None:
    """Those of a list; to run after no job is not to wait."""
    return frozenset(value or ()) or None


@attrs.frozen(kw_only=True)
class NewJob:
    """A job as requested (Q2). `BadRequest` names the field when a value is not allowed.

    `args` is any JSON object. `queue`, `priority`, `lock_key`, `max_attempts` and `lease_ttl_sec` None mean the task's
    own, which the database knows, or else: no queue (`BadRequest`), 100, no key, so that nothing excludes the job, 5,
    and the settings' lease. `available_at` None means now.

    `after` are the ids of jobs that exist, or stand before this one in the same list: the job waits until all of them
    have ended. If one of them did not succeed it is canceled (`when_failed` "cancel") or runs all the same ("run").
    `root` is a job of the whole that this one belongs to, so that all of them can be found together; for a job that a
    handler enqueues it is the handler's own, if it says none.

    `version` is for tasks whose jobs are updated: an instant, or a number. A request whose version is not greater than
    that of the newest job of its key changes nothing; one without a version is as new as the moment it is judged in.
    The versions of one key are all instants or all numbers.
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
        if self.version is not None:
            _check_version(self.version)
        self._check_after()

    def _check_after(self) -> None:
        if self.after is not None:
            if len(self.after) > MAX_AFTER:
                raise BadRequest("after", f"must have at most {MAX_AFTER:,} ids, not {len(self.after):,}")
            if self.job_id in self.after:
                raise BadRequest("after", f"must not have the job's own id, {self.job_id}")
        if self.when_failed not in _WHEN_FAILED:
            raise BadRequest("when_failed", f"must be cancel or run, not {self.when_failed!r:.60}")


@attrs.frozen
class AfterResult:
    """The outcome of a job that another one runs after: its status, and its result if it has succeeded with one.

    `status` is None for a job that was deleted before it had succeeded.
    """

    status: Status | None
    result: Any


class JobOptions(TypedDict, total=False):
    """The options of a request for a job, besides its task and arguments; see `NewJob` for each."""

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
    """The answer to a request: the job that stands for it, whether this request added it, and what it `did`.

    `queue` is the job's: the request's or the task's own. `queue_state`, what keeps that queue from taking a queued
    job, is filled in by a supervisor, the HTTP API and the command line; where `store.enqueue` alone has added the job
    it is None.
    """

    job_id: UUID
    status: Status
    created: bool
    queue_state: QueueState | None = None
    queue: str = ""
    did: Did = "added"


class ClaimedJob(Struct, frozen=True, eq=False):
    """A job that this process may run now, until its lease ends: what the runner needs and no more.

    `args` is JSON, None where another service wrote more than any job of ours may have. `token` fences every later
    write; `lock_hash` is the advisory lock held for its `lock_key`, None for a job that has none; `lease_s` seconds
    were granted. `more` is what only some jobs have, None for all others: `schedule` and `planned_at`, `previous`, what
    the stage before has returned, and `version`, of the request.
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
    """A job as it stands, all of it: a row of `dl_jobs`. `error`, `args` and `progress` are as stored, unmasked.

    `args` and `progress` are objects in our own rows; other services may store any JSON there. `lock_key` is None for a
    job that was given none. `queue_state` is no
    column: what keeps the queue of a queued job from taking it, as far as its workers are known when it is read.

    `after` are the jobs that it runs after, a hundred of them at the most, and `when_failed` what becomes of
    it if one of them does not succeed; both are None for a job that runs after none. While it waits for them
    `available_at` is the instant that was asked for. `root` is the job that it belongs to.
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
    """One line of a job's journal (Q11)."""

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
    """A process that sent a heartbeat lately: `claimed_by` of its jobs is `worker`.

    `queues` are those that it serves, with their slots; `tasks` those that it knows, None if it does not tell;
    `only_tasks` those of which alone it takes jobs from a queue.
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
    """A queue's work that has not ended, by status and reason; finished jobs are never counted.

    `dependent` jobs wait for other jobs to end, `limited` ones for their task's limits.
    `workers` are the processes that serve it and have been heard of lately, `slots` how many jobs they run at once.
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
