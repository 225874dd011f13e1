"""Routes that enqueue jobs: one job, or a batch of up to 1,000, all or none.

A draining process takes no new jobs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

import msgspec
from msgspec import Meta, Struct
from werkzeug.datastructures import Headers

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import JOB_FIELDS, MAX_KEY, Did, Enqueued, NewJob, about
from dataloader.jobs.operations.fields import EXAMPLE_ID, QueueName, QueueStateNow, new_job_body
from dataloader.jobs.roles import Role
from dataloader.jobs.states import Status
from dataloader.web.routes import Answer, Call, Routes

routes: Final = Routes()

MAX_BATCH: Final = 1_000
"""Maximum number of jobs in one batch."""


TriggerRequest: Any = new_job_body(
    "TriggerRequest",
    "Job to be run.",
    JOB_FIELDS,
    EXAMPLE={
        "queue": "load.cbr", "task": "load.rates", "lock_key": "cbr:2026-11", "args": {"year": 2026},
        "idempotency_key": "cbr-2026-11-20",
    },
)  # fmt: skip


class BatchRequest(Struct, forbid_unknown_fields=True):
    """Up to 1,000 jobs, added all or none."""

    EXAMPLE: ClassVar[Any] = {
        "jobs": [TriggerRequest.EXAMPLE, {"queue": "load.cbr", "task": "load.rates", "lock_key": "cbr:2026-12"}]
    }

    jobs: Annotated[list[TriggerRequest], Meta(min_length=1, max_length=MAX_BATCH, description="Jobs of the batch.")]


class Triggered(Struct, frozen=True):
    """Job of a request. `created` is false if an earlier request added it.

    `queue_state` may be a second old, and is null while the database does not give it.
    """

    EXAMPLE: ClassVar[Any] = {
        "job_id": EXAMPLE_ID,
        "status": "queued",
        "created": True,
        "queue_state": None,
        "queue": "load.cbr",
        "did": "added",
    }

    job_id: Annotated[UUID, about("ID of the job.")]
    status: Annotated[Status, about("Status of the job.")]
    created: Annotated[bool, about("True if this request added the job.")]
    queue_state: QueueStateNow
    queue: QueueName
    did: Annotated[
        Did,
        about(
            "`added`: a new job. `again`: the first job of a repeated request. For unique tasks: `kept`: an existing"
            " job covers the request; `updated`: a waiting job was updated; `older`: the key's newest job is as new."
        ),
    ]


class BatchTriggered(Struct, frozen=True):
    """Jobs of a batch, in its order."""

    EXAMPLE: ClassVar[Any] = {"jobs": [Triggered.EXAMPLE]}

    jobs: Annotated[list[Triggered], about("Jobs, in the order of the batch.")]


LOCATION: Final[Mapping[str, Any]] = {
    "Location": {"description": "Address of the job.", "required": True, "schema": {"type": "string"}}
}
IDEMPOTENCY_KEY: Final = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "Same as `idempotency_key` in the body, with or without quotes. If both are sent, they must match.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY, "pattern": "^[!-~]([ -~]*[!-~])?$"},
}


@routes.add(
    "POST",
    "/api/v1/jobs/trigger",
    role=Role.OPERATE,
    body=TriggerRequest,
    headers=[IDEMPOTENCY_KEY],
    answer_headers=LOCATION,
    answers={201: Triggered, 200: Triggered},
    conflicts=True,
)
async def trigger_job(call: Call, body: TriggerRequest) -> Answer:
    """Add a job.

    201 with its address in Location; 200 if the same request was sent before with the idempotency key; 409 if the key
    belongs to another request. Built-in tasks (`process.…`, `notify.…`, `migrate`) are refused. The status is `queued`
    even if the job has started. A process that was killed counts for `queue_state` for one more minute.
    """
    body = msgspec.structs.replace(body, idempotency_key=key_of(call.headers, body.idempotency_key))
    [job] = await _enqueue(call, [body])
    return Answer(
        value=job,
        status=HTTPStatus.CREATED if job.created else HTTPStatus.OK,
        headers={"Location": f"/api/v1/jobs/{job.job_id}"},
    )


def key_of(headers: Headers, in_body: str | None) -> str | None:
    """Return the idempotency key of a request, from its header or its body. Raises `BadRequest`."""
    key = _key_of_header(headers)
    if key is not None and in_body not in {None, key}:
        raise BadRequest("idempotency_key", "must equal the header Idempotency-Key; omit one of them")
    return in_body if key is None else key


def _key_of_header(headers: Headers) -> str | None:
    """Return the key in the header, without the quotes of a structured field. Raises `BadRequest`."""
    name = str(IDEMPOTENCY_KEY["name"])
    match headers.getlist(name):
        case []:
            return None
        case [given] if given.isascii() and given.isprintable():
            return given[1:-1] if len(given) > 1 and given[0] == given[-1] == '"' else given
        case _:
            raise BadRequest(name, f"must be sent once, with 1 to {MAX_KEY} printable ASCII characters")


@routes.add(
    "POST",
    "/api/v1/jobs/trigger/batch",
    role=Role.OPERATE,
    body=BatchRequest,
    answers={201: BatchTriggered, 200: BatchTriggered},
    conflicts=True,
    large=True,
)
async def trigger_batch(call: Call, body: BatchRequest) -> Answer:
    """Add up to 1,000 jobs, all or none.

    201 if at least one is new; 200 if all were added before with their idempotency keys.
    """
    if _key_of_header(call.headers) is not None:
        raise BadRequest(str(IDEMPOTENCY_KEY["name"]), "is not allowed for a batch; set idempotency_key for each job")
    jobs = await _enqueue(call, body.jobs, "jobs[{}].")
    created = any(job.created for job in jobs)
    return Answer(
        value=BatchTriggered(jobs),
        status=HTTPStatus.CREATED if created else HTTPStatus.OK,
    )


async def _enqueue(call: Call, requests: Sequence[TriggerRequest], path: str = "") -> list[Triggered]:
    """Add jobs; `path` is the path of a request, with a place for its number. Raises `BadRequest`."""
    for number, request in enumerate(requests):
        check_args(call, request.task, request.args or {}, path.format(number))
    enqueued = await call.jobs.enqueue_many([NewJob(**request.domain_fields()) for request in requests])
    return [triggered(job) for job in enqueued]


def check_args(call: Call, task: str, args: Mapping[str, Any], path: str = "") -> None:
    """Raise `BadRequest`, with a path before the field, for args that a task of this process refuses."""
    known = call.services.tasks.get(task)
    if known is not None and known.check is not None:
        try:
            known.check(args)
        except BadRequest as error:
            raise BadRequest(f"{path}{error.field}", error.message) from None


def triggered(job: Enqueued) -> Triggered:
    """Return the answer to one request."""
    return Triggered(job.job_id, job.status, job.created, job.queue_state, job.queue, job.did)
