"""Schedules over HTTP: the routes of their operations.

Written by hand are the views of what this process knows more about, the args of its tasks, and of a run, which is
answered with 201 or 200.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from dataloader.jobs.operations.schedules import PutSchedule, RunSchedule, ScheduleRun, schedules
from dataloader.jobs.secrets.record_masks import masked
from dataloader.web.api.trigger import check_args
from dataloader.web.operation_routes import OperationRoutes
from dataloader.web.routes import Answer, Call

routes: Final = OperationRoutes()


@routes.operation(PutSchedule)
async def answer_put(call: Call, operation: PutSchedule) -> Answer:
    """Check the args with the task that this process has, and answer with the schedule."""
    check_args(call, operation.task, operation.args)
    [schedule] = await call.masked([await call.perform(operation)])
    return Answer(value=schedule)


@routes.operation(RunSchedule, answers={201: ScheduleRun, 200: ScheduleRun})
async def answer_run(call: Call, operation: RunSchedule) -> Answer:
    """Answer with the job's address: 201 if it is new."""
    added = masked(await call.perform(operation))
    return Answer(
        value=ScheduleRun(added.job_id, added.queue, added.status, added.created),
        status=HTTPStatus.CREATED if added.created else HTTPStatus.OK,
        headers={"Location": f"/api/v1/jobs/{added.job_id}"},
    )


routes.operations(schedules)
