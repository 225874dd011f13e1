"""Operator's actions on a run: cancel it, or continue it after its end."""

from __future__ import annotations

from typing import Final
from uuid import UUID

from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.states import Status
from dataloader.store.etl.run_views import get_run_view
from dataloader.web.pages.asking import Question
from dataloader.web.pages.job_acts import CancelForm, JobRetryForm
from dataloader.web.pages.page_answers import PageAnswer, Redirect, Undo
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()


@pages.show("/runs/<uuid:run_id>/cancel", role=Role.OPERATE)
async def ask_run_cancel(visit: Visit, run_id: UUID) -> PageAnswer:
    """Ask for confirmation of a cancel of the run, and say what it does."""
    run = await get_run_view(visit.services.database, run_id)
    if run.is_over:
        sentences = [f"The run has already ended ({run.status}). A cancel has no effect."]
    elif run.job_status == Status.RUNNING:
        sentences = [
            "The run sends no more requests. Responses already received are still processed and written.",
            "Its other tasks do not start. It ends as canceled, with the counts so far. A retry continues from there.",
        ]
    else:
        sentences = ["The run is queued, and is canceled immediately. A retry continues with the remaining work."]
    title, path = f"Cancel {mask_text(run.name)}?", f"/ui/runs/{run_id}"
    return Question(
        title=title,
        sentences=sentences,
        path=f"{path}/cancel",
        verb="Cancel the run",
        back=path,
        is_harsh=True,
        keep="Keep running",
    ).page


@pages.act("/runs/<uuid:run_id>/cancel", role=Role.OPERATE, form=CancelForm)
async def cancel_run(visit: Visit, run_id: UUID, form: CancelForm) -> PageAnswer:
    """Cancel the run's job."""
    if form.waiting and (job := await visit.jobs.get(run_id)).status is not Status.QUEUED:
        return Redirect(f"/ui/runs/{run_id}", f"No change: the run's job is {job.status} now.")
    job = await visit.jobs.cancel(run_id)
    name = mask_text(job.task)
    said = {
        Status.RUNNING: f"Requested the cancel of {name}. Data already received is still written.",
        Status.CANCELED: f"Canceled {name}.",
    }.get(job.status, f"{name} had already ended ({job.status}).")
    return Redirect(f"/ui/runs/{run_id}", said)


@pages.act("/runs/<uuid:run_id>/retry", role=Role.OPERATE, form=JobRetryForm)
async def retry_run(visit: Visit, run_id: UUID, form: JobRetryForm) -> PageAnswer:
    """Queue the run's job again: it continues with the rest."""
    path = f"/ui/runs/{run_id}"
    job = await visit.jobs.get(run_id)
    if form.seen is not None and (job.finished_at is None or job.finished_at.isoformat() != form.seen):
        return Redirect(path, f"No change: the run's job is {job.status} now.")
    await visit.jobs.retry(run_id)
    said = f"Queued {mask_text(job.task)} again. It continues with the remaining work."
    return Redirect(path, said, Undo(f"{path}/cancel", {"waiting": "true"}))
