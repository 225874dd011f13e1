"""Fields that several requests share: those of a job, the criteria of a filter, and those of a page.

Requests are msgspec structs that refuse unknown fields; null means "not given". Bounds are not repeated here: a
request's fields are checked by the domain's `NewJob`, so that HTTP and the Python API refuse the same values with the
same texts. The example of a type in OpenAPI is its `EXAMPLE`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

import attrs
import msgspec
from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.listings import MAX_PAGE, JobFilter
from dataloader.jobs.model import JOB_FIELDS, MAX_NAME, NAME, NewJob
from dataloader.jobs.page_cursor import MAX_CURSOR
from dataloader.jobs.states import QueueState, Status

EXAMPLE_ID: Final = "0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b"
MAX_WAIT_S: Final = 60.0
"""The longest wait of one request for a change or an answer, in seconds."""
HELD_REQUEST_S: Final = MAX_WAIT_S + 15.0
"""Seconds in which a service answers a request with such a wait."""


def field_meta(about: str, *examples: object, **schema: object) -> Meta:
    """Describe a field for OpenAPI, including its bounds, which `NewJob` enforces."""
    return Meta(description=about, examples=list(examples), extra_json_schema=schema or None)


QueueName = Annotated[str, field_meta("Name of the queue.", "load.cbr", **NAME)]
TaskName = Annotated[str, JOB_FIELDS["task"].meta]
LockKey = Annotated[str, JOB_FIELDS["lock_key"].meta]
LoadName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, examples=["ecb.rates"])]
Priority = Annotated[int, JOB_FIELDS["priority"].meta]
Instant = Annotated[
    datetime, Meta(tz=True, description="Timestamp with a time zone (RFC 3339).", examples=["2026-11-20T12:00:00Z"])
]
QueueStateNow = Annotated[
    QueueState | None,
    Meta(
        description=(
            "Reason why the queue does not start the job. `paused`: an operator has paused the queue. `no_worker`: no "
            "worker serves it (another service may). `full`: all slots of its workers are used. `unknown_task`: none "
            "of its workers has the task. null: no reason is known, or the job does not wait."
        )
    ),
]
Limit = Annotated[int, Meta(ge=1, le=MAX_PAGE, description="Maximum number of rows.")]
AfterPage = Annotated[
    str,
    # Without its own bounds: `PageCursor` reports all errors of a cursor in one way.
    Meta(
        description="`next` of the previous page.",
        extra_json_schema={"pattern": "^[A-Za-z0-9_-]+$", "maxLength": MAX_CURSOR},
    ),
]


class JobFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """Request with some of a job's fields, which the domain's class checks when it is decoded."""

    _domain: ClassVar[frozenset[str]] = frozenset(field.name for field in attrs.fields(NewJob))

    def __post_init__(self) -> None:
        """Refuse values that the domain refuses. Its `BadRequest` is a ValueError, which msgspec reports with path."""
        self._try(self.domain_fields())

    @classmethod
    def _try(cls, fields: dict[str, Any]) -> None:
        NewJob(**{"queue": "-", "task": "-"} | fields)

    @classmethod
    def refusal(cls, name: str, value: object, kind: Any) -> str | None:
        """Return the domain's refusal of one value, or None. Also return None if it is not of the field's `kind`."""
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
        """Return the given fields that a `NewJob` has."""
        return {
            name: value
            for name in self.__struct_fields__
            if name in self._domain and (value := getattr(self, name)) is not None
        }


def new_job_body(
    name: str, doc: str, fields: Iterable[str], *, base: type[JobFields] = JobFields, **attributes: object
) -> Any:
    """Return a type of requests that has these fields of a new job, besides those of `base`."""
    body = [JOB_FIELDS[field].in_body for field in fields]
    return msgspec.defstruct(name, body, bases=(base,), kw_only=True, namespace={"__doc__": doc, **attributes})


class Criteria(JobFields, kw_only=True):
    """Filter of jobs; a missing field matches all. Names may be longer than ours, as other services may have them."""

    _domain: ClassVar[frozenset[str]] = frozenset(field.name for field in attrs.fields(JobFilter))

    queue: QueueName | None = None
    task: TaskName | None = None
    status: Annotated[frozenset[Status], Meta(description="One or more statuses.")] | None = None
    lock_key: LockKey | None = None
    created_from: Instant | None = None
    created_to: Instant | None = None
    finished_from: Instant | None = None
    finished_to: Instant | None = None
    root: Annotated[UUID, Meta(description="ID of a root job: this job and all jobs that belong to it.")] | None = None
    error_group: (
        Annotated[str, Meta(description="ID of an error group: its jobs, failed or waiting for a retry.")] | None
    ) = None
    worker: Annotated[str, Meta(description="Process that runs the job.")] | None = None
    schedule: Annotated[str, Meta(description="Schedule that created the job.")] | None = None

    @classmethod
    def _try(cls, fields: dict[str, Any]) -> None:
        JobFilter(**fields)

    def job_filter(self) -> JobFilter:
        """Return the store's filter."""
        return JobFilter(**{name: getattr(self, name) for name in Criteria.__struct_fields__})
