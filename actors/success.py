"""Outcome of a run that went well: the job has succeeded or, if its task is a stage, moves on."""

from __future__ import annotations

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import Finish, Next, Outcome
from dataloader.jobs.stages import MoveRefused
from dataloader.jobs.states import Step
from dataloader.jobs.task import Task
from dataloader.jobs.text import MAX_JSON, exact_json, storable_json


def success_of(job: ClaimedJob, task: Task, value: object) -> Outcome:
    """Return the outcome of a run whose handler or transaction ended with `value`.

    Raises `MoveRefused` for a stage that does not exist, and for a value that cannot be passed to the next one.
    """
    stages, to = task.stages, None
    if stages is None:
        if isinstance(value, Next | Finish):
            kind = type(value).__name__
            raise MoveRefused(kind, f"must be returned by a stage (tasks.stages); the task {task.name} is not a stage")
    elif isinstance(value, Next):
        to, value = stages.task_to(value.to), value.value
    elif isinstance(value, Finish):
        value = value.value
    else:
        to = stages.task_after(task.name)
    if to is None:
        return Outcome(job.job_id, job.token, Step.SUCCEED, result=None if value is None else storable_json(value))
    try:
        previous = None if value is None else exact_json("value", value, MAX_JSON)
    except BadRequest as error:
        raise MoveRefused(f"the value for the next stage, {to}", error.message) from error
    return Outcome(job.job_id, job.token, Step.MOVE, to=to, previous=previous)
