"""Operator's actions on one job: cancel, retry, run now, change the priority, run again."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Final
from uuid import UUID

from msgspec import Meta, Struct

from dataloader.jobs.errors import Conflict
from dataloader.jobs.model import MAX_INT, Instant, JobRecord, NewJob
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.states import Status
from dataloader.store.queue.control import postpone
from dataloader.web.pages.asking import FormField, Question, once
from dataloader.web.pages.page_answers import PageAnswer, Redirect, Undo
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

_MOST_ARGS: Final = 4_000
"""Characters of args that a question shows."""


class JobRetryForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """Retry. `seen`: when the job had ended according to the page; a job that has ended again since is not retried."""

    seen: str | None = None


class CancelForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """Cancel. `waiting`: only if the job has not begun, so that the undo of a retry never stops a run."""

    waiting: bool = False


class PriorityForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """New priority. `seen`: the previous one on the page; a priority that has changed since is not replaced."""

    priority: Annotated[int, Meta(ge=0, le=MAX_INT)]
    seen: int | None = None


class PostponeForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """Time until which the job waits."""

    until: Instant


class AgainForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """Run again. `once`: the ID of the job that is added, so that the same form adds it once."""

    once: UUID


def _job_path(job_id: UUID) -> str:
    return f"/ui/jobs/{job_id}"


@pages.show("/jobs/<uuid:job_id>/cancel", role=Role.OPERATE)
async def ask_job_cancel(visit: Visit, job_id: UUID) -> PageAnswer:
    """Ask for confirmation of a cancel, and say what it does."""
    job = await visit.jobs.get(job_id)
    if job.status is Status.RUNNING:
        where = mask_text(job.claimed_by) if job.claimed_by else "another service"
        sentences = [f"The job runs on {where}. It is asked to stop, and is canceled when its handler has ended."]
    elif job.status is Status.QUEUED:
        sentences = [
            "The job is queued, and is canceled immediately.",
            "Jobs that depend on it are canceled or run, depending on their requests.",
        ]
    else:
        sentences = [f"The job has already ended ({job.status}). A cancel has no effect."]
    title = f"Cancel {mask_text(job.task)}?"
    keep = "Keep running" if job.status is Status.RUNNING else "Keep the job"
    path = _job_path(job_id)
    return Question(
        title=title,
        sentences=sentences,
        path=f"{path}/cancel",
        verb="Cancel the job",
        back=path,
        is_harsh=True,
        keep=keep,
    ).page


@pages.act("/jobs/<uuid:job_id>/cancel", role=Role.OPERATE, form=CancelForm)
async def cancel_job_from_page(visit: Visit, job_id: UUID, form: CancelForm) -> PageAnswer:
    """Cancel a job."""
    if form.waiting and (job := await visit.jobs.get(job_id)).status is not Status.QUEUED:
        return Redirect(_job_path(job_id), f"No change: the job is {job.status} now.")
    job = await visit.jobs.cancel(job_id)
    said = {
        Status.RUNNING: "Requested the cancel. The job is canceled when its handler has ended.",
        Status.CANCELED: "Canceled.",
    }.get(job.status, f"The job had already ended ({job.status}).")
    undo = Undo(f"{_job_path(job_id)}/retry", _end_as_field(job)) if job.status is Status.CANCELED else None
    return Redirect(_job_path(job_id), said, undo)


def _end_as_field(job: JobRecord) -> dict[str, str]:
    return {} if job.finished_at is None else {"seen": job.finished_at.isoformat()}


@pages.act("/jobs/<uuid:job_id>/retry", role=Role.OPERATE, form=JobRetryForm)
async def retry_job_from_page(visit: Visit, job_id: UUID, form: JobRetryForm) -> PageAnswer:
    """Queue a job again that has ended, from attempt 0."""
    job = await visit.jobs.get(job_id)
    if form.seen is not None and _end_as_field(job).get("seen") != form.seen:
        return Redirect(_job_path(job_id), f"No change: the job is {job.status} now.")
    await visit.jobs.retry(job_id)
    return Redirect(
        _job_path(job_id),
        "Queued again, from attempt 0.",
        Undo(f"{_job_path(job_id)}/cancel", {"waiting": "true"}),
    )


@pages.act("/jobs/<uuid:job_id>/run-now", role=Role.OPERATE)
async def run_job_now_from_page(visit: Visit, job_id: UUID) -> PageAnswer:
    """Make a job due."""
    before = (await visit.jobs.get(job_id)).available_at
    try:
        job = await visit.jobs.run_now(job_id)
    except Conflict:
        job = await visit.jobs.get(job_id)
        return Redirect(_job_path(job_id), f"No change: the job is {job.status} now.")
    more = {"lock": " It waits for its key.", "limit": " It waits for its limits."}.get(job.waits_for or "", "")
    later = job.status is Status.QUEUED and before > datetime.now(UTC)
    undo = Undo(f"{_job_path(job_id)}/postpone", {"until": before.isoformat()}) if later else None
    return Redirect(_job_path(job_id), f"The job is due now.{more}", undo)


@pages.act("/jobs/<uuid:job_id>/postpone", role=Role.OPERATE, form=PostponeForm)
async def postpone_job(visit: Visit, job_id: UUID, form: PostponeForm) -> PageAnswer:
    """Make a job wait for its time again, unless it has begun meanwhile."""
    try:
        await postpone(visit.services.database, job_id, form.until, visit.operator)
    except Conflict:
        job = await visit.jobs.get(job_id)
        return Redirect(_job_path(job_id), f"No change: the job is {job.status} now.")
    return Redirect(_job_path(job_id), "The job is delayed again.")


@pages.show("/jobs/<uuid:job_id>/priority", role=Role.OPERATE)
async def ask_priority(visit: Visit, job_id: UUID) -> PageAnswer:
    """Show the form for a new priority."""
    job = await visit.jobs.get(job_id)
    field = FormField(
        name="priority", label="Priority", kind="number", value=str(job.priority), required=True,
        hint="Smaller numbers run first; 100 is the default.",
    )  # fmt: skip
    path = _job_path(job_id)
    title = f"Priority of {mask_text(job.task)}"
    return Question(title=title, sentences=(), path=f"{path}/priority", verb="Set", back=path, fields=(field,)).page


@pages.act("/jobs/<uuid:job_id>/priority", role=Role.OPERATE, form=PriorityForm)
async def set_priority_from_page(visit: Visit, job_id: UUID, form: PriorityForm) -> PageAnswer:
    """Change the priority of a waiting job."""
    before = (await visit.jobs.get(job_id)).priority
    if form.seen not in {None, before}:
        return Redirect(_job_path(job_id), f"No change: the priority is {before} now.")
    await visit.jobs.set_priority(job_id, form.priority)
    fields = {"priority": str(before), "seen": str(form.priority)}
    undo = Undo(f"{_job_path(job_id)}/priority", fields) if before != form.priority else None
    return Redirect(_job_path(job_id), f"Changed the priority from {before} to {form.priority}.", undo)


@pages.show("/jobs/<uuid:job_id>/again", role=Role.OPERATE)
async def ask_to_run_again(visit: Visit, job_id: UUID) -> PageAnswer:
    """Show the job that would be added."""
    [shown] = await visit.masked([await visit.jobs.get(job_id)])
    text = await visit.in_thread(lambda: json.dumps(shown.args, ensure_ascii=False, indent=1)[: _MOST_ARGS + 1])
    key = "no lock_key" if shown.lock_key is None else f"the lock_key {shown.lock_key}"
    where = f"the queue {shown.queue}, with {key}, priority {shown.priority}"
    sentences = [
        f"A new job of the task {shown.task} is enqueued in {where} and the same args.",
        "This job does not change.",
    ]
    path = _job_path(job_id)
    return Question(
        title=f"Run {shown.task} again?",
        sentences=sentences,
        told=[text if len(text) <= _MOST_ARGS else f"{text[:_MOST_ARGS]}…"],
        path=f"{path}/again",
        verb="Enqueue the job",
        back=path,
        hidden={"once": once()},
    ).page


@pages.act("/jobs/<uuid:job_id>/again", role=Role.OPERATE, form=AgainForm)
async def run_again(visit: Visit, job_id: UUID, form: AgainForm) -> PageAnswer:
    """Add a new job with the values of this job's request."""
    job = await visit.jobs.get(job_id)
    if not isinstance(job.args, dict) or set(job.args) == {"truncated", "bytes"}:
        return Redirect(_job_path(job_id), "No change: the args are too long to read here, or not an object.")
    new = NewJob(
        task=job.task,
        queue=job.queue,
        args=job.args,
        lock_key=job.lock_key,
        partition_key=job.partition_key,
        priority=job.priority,
        max_attempts=job.max_attempts,
        lease_ttl_sec=job.lease_ttl_sec,
        producer=visit.visitor.name or None,
        job_id=form.once,
    )
    [added] = await visit.jobs.enqueue_many([new])
    said = (
        "Enqueued a new job."
        if added.did in {"added", "again"}
        else "No job was enqueued: this job already covers the request."
    )
    return Redirect(_job_path(added.job_id), said)
