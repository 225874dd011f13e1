"""Task types and suppliers over HTTP: the routes of their operations, and an address for the jobs of a task.

That address takes the arguments of the task as the body.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Any, Final

from msgspec import Meta

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.new_job import new_job
from dataloader.jobs.operations.fields import JobFields, new_job_body
from dataloader.jobs.operations.limits import limits
from dataloader.jobs.roles import Role
from dataloader.store.queue.task_rows import get_task
from dataloader.web.api.trigger import IDEMPOTENCY_KEY, LOCATION, Triggered, key_of, triggered
from dataloader.web.decoding import convert
from dataloader.web.operation_routes import OperationRoutes
from dataloader.web.routes import Answer, Call

routes: Final = OperationRoutes()

TRIGGER: Final = "/api/v1/tasks/<path:task>/trigger"


class _TaskName(JobFields, kw_only=True):
    object_type: Annotated[str, Meta(description="Name of the task; optional.")] | None = None


TaskJobFields: Any = new_job_body(
    "TaskJobFields",
    """Fields of a request for a job of a task, besides the task's arguments.

    If the task has an argument with one of these names, the field is the argument.
    """,
    ("priority", "available_at", "version", "idempotency_key"),
    base=_TaskName,
)


@routes.add(
    "POST",
    TRIGGER,
    role=Role.OPERATE,
    body=dict[str, Any],
    headers=[IDEMPOTENCY_KEY],
    answer_headers=LOCATION,
    answers={201: Triggered, 200: Triggered},
    conflicts=True,
)
async def trigger_task(call: Call, task: str, body: dict[str, Any]) -> Answer:
    """Add a job of a task: the body has the task's arguments.

    It may also have `priority`, `available_at`, `version`, `idempotency_key` and `object_type`, the task's name. If the
    task has an argument with such a name, the value is the argument. Queue and keys are the task's own.

    201 if the job is new, 200 if another one covers the request: `did` says why.
    """
    known = call.services.tasks.get(task)
    if known is not None:
        fields = frozenset(() if known.args is None else known.args.fields)
    else:
        fields = (await get_task(call.services.database, task)).fields
    own = convert({name: body.pop(name) for name in own_fields(fields) if name in body}, TaskJobFields)
    if own.object_type not in {None, task}:
        raise BadRequest("object_type", f"must be {task!r}, as in the path, not {own.object_type!r:.60}")
    options = own.domain_fields()
    if (key := key_of(call.headers, own.idempotency_key)) is not None:
        options["idempotency_key"] = key
    try:
        [job] = await call.jobs.enqueue_many([new_job(known if known is not None else task, body, **options)])
    except BadRequest as error:
        # In the client's terms: the arguments are the body.
        raise BadRequest(error.field.removeprefix("args."), error.message) from error
    return Answer(
        value=triggered(job),
        status=HTTPStatus.CREATED if job.created else HTTPStatus.OK,
        headers={"Location": f"/api/v1/jobs/{job.job_id}"},
    )


def own_fields(fields: frozenset[str]) -> list[str]:
    """Return the fields of a request that are not the task's arguments."""
    return [name for name in TaskJobFields.__struct_fields__ if name not in fields]


routes.operations(limits)
