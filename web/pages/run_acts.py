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
        sentences = [f"It has ended already: {run.status}. A cancel changes nothing."]
    elif run.job_status == Status.RUNNING:
        sentences = [
            "It stops asking its source at once. What has arrived is still processed and written.",
            "Its other tasks do not begin. It ends as canceled, with the counts so far; a retry goes on from there.",
        ]
    else:
        sentences = ["It waits to go on, and is canceled at once. A retry goes on with what is not done."]
    title, path = f"Cancel {mask_text(run.name)}?", f"/ui/runs/{run_id}"
    return Question(
        title=title, sentences=sentences, path=f"{path}/cancel", verb="Cancel the run", back=path, is_harsh=True
    ).page


@pages.act("/runs/<uuid:run_id>/cancel", role=Role.OPERATE, form=CancelForm)
async def cancel_run(visit: Visit, run_id: UUID, form: CancelForm) -> PageAnswer:
    """Cancel the run's job."""
    if form.waiting and (job := await visit.jobs.get(run_id)).status is not Status.QUEUED:
        return Redirect(f"/ui/runs/{run_id}", f"Nothing was done: the run's job is {job.status} by now.")
    job = await visit.jobs.cancel(run_id)
    name = mask_text(job.task)
    said = {
        Status.RUNNING: f"Asked {name} to stop: what has arrived is still written.",
        Status.CANCELED: f"Canceled {name}.",
    }.get(job.status, f"{name} had ended before: it stays {job.status}.")
    return Redirect(f"/ui/runs/{run_id}", said)


@pages.act("/runs/<uuid:run_id>/retry", role=Role.OPERATE, form=JobRetryForm)
async def retry_run(visit: Visit, run_id: UUID, form: JobRetryForm) -> PageAnswer:
    """Queue the run's job again: it continues with the rest."""
    path = f"/ui/runs/{run_id}"
    job = await visit.jobs.get(run_id)
    if form.seen is not None and (job.finished_at is None or job.finished_at.isoformat() != form.seen):
        return Redirect(path, f"Nothing was done: the run's job is {job.status} by now.")
    await visit.jobs.retry(run_id)
    said = f"Queued {mask_text(job.task)} again: it goes on with what is not done."
    return Redirect(path, said, Undo(f"{path}/cancel", {"waiting": "true"}))
