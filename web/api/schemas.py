"""What goes over the wire: requests as they may be sent, answers as they are given; /openapi.json is made of these.

Requests are msgspec structs that refuse unknown fields; null means "not given". Bounds are not repeated here: a
request's fields are tried on the domain's `NewJob`, so HTTP and the Python API refuse the same things with the same
words.

Records are shown without the secrets that a handler or a client wrote: shown.py takes them out.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, ClassVar, Final, Self
from uuid import UUID

import attrs
import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import (
    MAX_INT,
    MAX_KEY,
    MAX_LEASE_S,
    MAX_NAME,
    MIN_LEASE_S,
    JobEvent,
    JobRecord,
    NewJob,
    QueueRecord,
    WorkerRecord,
)
from dataloader.jobs.states import QueueState, Status, WaitsFor
from dataloader.store.queue.control import MAX_BULK
from dataloader.store.queue.reads import MAX_PAGE, AuditRecord, JobFilter

MAX_BATCH: Final = 1_000
"""Jobs in one batch."""
MAX_ID: Final = 2**63 - 1
MAX_WAIT_S: Final = 60.0
"""The longest that a status request may wait."""


def _shown(about: str, *examples: object, **schema: object) -> Meta:
    """What OpenAPI says of a field, its bounds included; `NewJob` enforces them."""
    return Meta(description=about, examples=list(examples), extra_json_schema=schema or None)


_NAME: Final = {"minLength": 1, "maxLength": MAX_NAME}
_KEY: Final = {"minLength": 1, "maxLength": MAX_KEY}

QueueName = Annotated[str, _shown("The queue's name.", "load.cbr", **_NAME)]
TaskName = Annotated[str, _shown("The task's name, as registered by the workers.", "load.rates", **_NAME)]
LockKey = Annotated[str, _shown("Of all jobs with this key one runs at a time.", "cbr:2026-11", **_KEY)]
Priority = Annotated[int, _shown("Smaller runs first; 100 if not given.", 100, minimum=0, maximum=MAX_INT)]
Instant = Annotated[
    datetime, Meta(tz=True, description="RFC 3339, with a time zone.", examples=["2026-11-20T12:00:00Z"])
]


class JobFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """A request whose fields are some of a job's: they are tried on the domain's class when it is decoded."""

    _domain: ClassVar[frozenset[str]] = frozenset(field.name for field in attrs.fields(NewJob))

    def __post_init__(self) -> None:
        """Refuse what the domain refuses; its `BadRequest` is a ValueError, which msgspec reports with the path."""
        self._try(self.domain_fields())

    @classmethod
    def _try(cls, fields: dict[str, Any]) -> None:
        NewJob(**{"queue": "-", "task": "-"} | fields)

    @classmethod
    def refusal(cls, name: str, value: object, kind: Any) -> str | None:
        """What the domain says against one value, or None; also None for what is not even of the field's `kind`."""
        try:
            converted = msgspec.convert(value, kind)
            if name in cls._domain and converted is not None:
                cls._try({name: converted})
        except BadRequest as error:
            return error.message
        except msgspec.ValidationError:
            pass
        return None

    def domain_fields(self) -> dict[str, Any]:
        """The fields that were given and that a `NewJob` has."""
        return {
            name: value
            for name in self.__struct_fields__
            if name in self._domain and (value := getattr(self, name)) is not None
        }


class TriggerRequest(JobFields, kw_only=True):
    """A job to be run (Q2)."""

    queue: QueueName
    task: TaskName
    lock_key: LockKey
    args: Annotated[dict[str, Any], _shown("Any JSON object, handed to the task.", {"year": 2026})] | None = None
    idempotency_key: (
        Annotated[str, _shown("The same key again returns the first job.", "cbr-2026-11-20", **_KEY)] | None
    ) = None
    partition_key: (
        Annotated[str, _shown("What part of the data the job is about.", "2026", maxLength=MAX_KEY)] | None
    ) = None
    priority: Priority | None = None
    available_at: Annotated[datetime, _shown("Not before; RFC 3339, now if not given.", format="date-time")] | None = (
        None
    )
    max_attempts: (
        Annotated[int, _shown("Runs before the job is failed or lost.", 5, minimum=1, maximum=1_000_000)] | None
    ) = None
    lease_ttl_sec: (
        Annotated[
            int,
            _shown(
                "Seconds without a heartbeat after which another worker takes over.",
                60,
                minimum=MIN_LEASE_S,
                maximum=MAX_LEASE_S,
            ),
        ]
        | None
    ) = None
    producer: Annotated[str, _shown("Who asks, for people.", "airflow", **_KEY)] | None = None
    consumer_group: Annotated[str, _shown("For whom, for people.", "dwh", **_KEY)] | None = None


class BatchRequest(Struct, forbid_unknown_fields=True):
    """Up to 1,000 jobs, added all or none."""

    jobs: Annotated[list[TriggerRequest], Meta(min_length=1, max_length=MAX_BATCH)]


class PriorityRequest(JobFields, kw_only=True):
    """A new priority for a job that waits."""

    priority: Priority


class _Criteria(JobFields, kw_only=True):
    """Which jobs are meant; what is not given does not matter. Names that we refuse may be those of other services."""

    _domain: ClassVar[frozenset[str]] = frozenset(field.name for field in attrs.fields(JobFilter))

    queue: QueueName | None = None
    task: TaskName | None = None
    status: Annotated[frozenset[Status], Meta(description="One or more of the statuses.")] | None = None
    lock_key: LockKey | None = None
    created_from: Instant | None = None
    created_to: Instant | None = None
    finished_from: Instant | None = None
    finished_to: Instant | None = None

    @classmethod
    def _try(cls, fields: dict[str, Any]) -> None:
        JobFilter(**fields)

    def job_filter(self) -> JobFilter:
        """The same for the store."""
        return JobFilter(**{name: getattr(self, name) for name in _Criteria.__struct_fields__})


class BulkRequest(_Criteria, kw_only=True):
    """Which jobs an action is for. At least one criterion, so that an empty object never means everything."""

    limit: Annotated[int, Meta(ge=1, le=MAX_BULK, description="The most jobs that one request changes.")] = 1_000

    def __post_init__(self) -> None:
        """Refuse a request without a criterion, besides what `NewJob` refuses."""
        super().__post_init__()
        if all(getattr(self, name) is None for name in _Criteria.__struct_fields__):
            raise ValueError(f"$: at least one of {', '.join(_Criteria.__struct_fields__)}")


class BulkPriorityRequest(BulkRequest, kw_only=True):
    """Which jobs get another priority. At least one criterion."""

    priority: Priority


class JobsQuery(_Criteria, kw_only=True):
    """A page of jobs, newest first. `status` may be repeated or separated by commas."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50
    after: Annotated[str, Meta(description="`next` of the page before.", max_length=500)] | None = None


class StatusQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """How long to wait for an end or a change."""

    wait: Annotated[
        float, Meta(ge=0, le=MAX_WAIT_S, description="Seconds; the answer comes at once when the job has ended.")
    ] = 0.0


class RetryQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Which jobs may be queued again."""

    force: Annotated[
        bool,
        Meta(description="Also a running job whose lease never ends and that nobody renews."),
    ] = False


class EventsQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """A page of a job's journal, oldest first."""

    after: Annotated[int, Meta(ge=0, le=MAX_ID, description="The last `event_id` seen.")] = 0
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 200


class AuditQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """A page of the operators' actions, newest first."""

    before: Annotated[int, Meta(ge=0, le=MAX_ID, description="The smallest `audit_id` seen.")] | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 50


_QUEUE_STATE: Final = Meta(
    description=(
        "What keeps the job's queue from taking it. paused: an operator paused it. no_worker: no dataloader worker "
        "serves it (another service may). full: all slots of its workers are taken. unknown_task, in the answer to a "
        "trigger: none of its workers knows the task. null: none of these is known, or the job does not wait."
    )
)


class Triggered(Struct, frozen=True):
    """The job that stands for a request. `created` is false when an earlier request with the same key made it.

    `queue_state` may be a second old, and is null while the database does not tell.
    """

    job_id: UUID
    status: Status
    created: bool
    queue_state: Annotated[QueueState | None, _QUEUE_STATE]


class BatchTriggered(Struct, frozen=True):
    """The jobs of a batch, in its order."""

    jobs: list[Triggered]


class JobStatus(Struct, frozen=True, kw_only=True):
    """How a job stands (Q3). `note` says why a cancel changed nothing."""

    job_id: UUID
    status: Status
    attempt: int
    started_at: Instant | None
    finished_at: Instant | None
    heartbeat_at: Instant | None
    error: str | None
    progress: Any
    result: Any
    cancel_requested: bool
    waits_for: WaitsFor | None
    queue_state: Annotated[QueueState | None, _QUEUE_STATE]
    available_at: Instant
    note: str | UnsetType = UNSET

    @classmethod
    def of(cls, job: JobRecord, note: str | UnsetType = UNSET) -> Self:
        """The status of a job whose secrets are masked."""
        return cls(
            job_id=job.job_id,
            status=job.status,
            attempt=job.attempt,
            started_at=job.started_at,
            finished_at=job.finished_at,
            heartbeat_at=job.heartbeat_at,
            error=job.error,
            progress=job.progress,
            result=job.result,
            cancel_requested=job.cancel_requested,
            waits_for=job.waits_for,
            queue_state=job.queue_state,
            available_at=job.available_at,
            note=note,
        )


class JobList(Struct, frozen=True):
    """A page of jobs. `next` is what to send as `after` for the next page, null at the end."""

    jobs: list[JobRecord]
    next: str | None


class EventList(Struct, frozen=True):
    """A page of a job's journal."""

    events: list[JobEvent]


class QueuesQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """A page of queues, by name."""

    limit: Annotated[int, Meta(ge=1, le=MAX_PAGE)] = 200
    after: Annotated[str, Meta(description="`next` of the page before.", max_length=3_000)] | None = None


class QueueList(Struct, frozen=True):
    """A page of the queues that have jobs, are served or are paused. `next`: what to send as `after`, or null."""

    queues: list[QueueRecord]
    next: str | None


class QueuePaused(Struct, frozen=True):
    """A queue after it was paused or resumed, for all processes."""

    queue: str
    paused: bool


class WorkerList(Struct, frozen=True):
    """The processes that have beaten lately."""

    workers: list[WorkerRecord]


class AuditList(Struct, frozen=True):
    """A page of the operators' actions."""

    audit: list[AuditRecord]


class Changed(Struct, frozen=True):
    """How many jobs a bulk action changed; repeat until it is 0, since some may have ended meanwhile."""

    changed: int


class Health(Struct, frozen=True):
    """The process lives and its event loop turns."""

    status: str


class Load(Struct, frozen=True):
    """A queue that this process serves."""

    concurrency: int
    running: int


class ProcessStatus(Struct, frozen=True, kw_only=True):
    """What runs where (Q5): this process, and all that share its database; null for what that can't tell now."""

    version: str
    worker: str
    started_at: Instant
    uptime_s: float
    draining: bool
    database: str
    listener: str
    serving: dict[str, Load]
    queues: list[QueueRecord] | None
    queues_next: str | None
    workers: list[WorkerRecord] | None


_ID: Final = "0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b"
_JOB: Final = {
    "job_id": _ID, "status": "running", "attempt": 1, "started_at": "2026-11-20T12:00:00.250Z", "finished_at": None,
    "heartbeat_at": "2026-11-20T12:00:10Z", "error": None, "progress": {"rows": 4200}, "result": None,
    "cancel_requested": False, "waits_for": None, "queue_state": None, "available_at": "2026-11-20T12:00:00Z",
}  # fmt: skip
_TRIGGER: Final = {
    "queue": "load.cbr", "task": "load.rates", "lock_key": "cbr:2026-11", "args": {"year": 2026},
    "idempotency_key": "cbr-2026-11-20",
}  # fmt: skip

_TRIGGERED: Final = {"job_id": _ID, "status": "queued", "created": True, "queue_state": None}

EXAMPLES: Final[dict[type, Any]] = {
    TriggerRequest: _TRIGGER,
    BatchRequest: {"jobs": [_TRIGGER, {"queue": "load.cbr", "task": "load.rates", "lock_key": "cbr:2026-12"}]},
    PriorityRequest: {"priority": 10},
    BulkRequest: {"queue": "load.cbr", "status": ["failed", "lost"], "limit": 100},
    BulkPriorityRequest: {"queue": "load.cbr", "task": "load.rates", "priority": 10},
    Triggered: _TRIGGERED,
    BatchTriggered: {"jobs": [_TRIGGERED]},
    JobStatus: _JOB,
    Changed: {"changed": 42},
    QueuePaused: {"queue": "load.cbr", "paused": True},
    Health: {"status": "ok"},
}
"""An example of each type that people write or read most, for OpenAPI; a test decodes them all."""


def json_schema(kinds: list[Any]) -> tuple[tuple[dict[str, Any], ...], dict[str, Any]]:
    """JSON Schema of `kinds`, and the components they refer to, with their examples."""
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind, example in EXAMPLES.items():
        if kind.__name__ in components:
            components[kind.__name__]["examples"] = [example]
    return schemas, components
