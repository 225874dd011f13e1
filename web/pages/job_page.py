"""Page of one job: its wait reason or worker, attempts, args, result, log and event history."""

from __future__ import annotations

import difflib
import json
from datetime import UTC, datetime
from typing import Any, Final, Literal
from uuid import UUID

import attrs
from msgspec import Struct

from dataloader.jobs.listings import Level
from dataloader.jobs.model import JobRecord
from dataloader.jobs.secrets.masking import mask, mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.jobs.states import Status
from dataloader.store.queue.attempts import last_success
from dataloader.store.queue.job_logs import read_job_log
from dataloader.store.queue.job_relatives import MOST_RELATED, read_relatives
from dataloader.store.queue.job_view import read_job_view
from dataloader.web.pages.attempt_timeline import timeline_of
from dataloader.web.pages.copies import copies
from dataloader.web.pages.formats import at_least, cut
from dataloader.web.pages.page_answers import Download, HtmlPage, PageAnswer, json_file
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.progress import progress_of
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

REFRESH_S: Final = 1.0
LINES: Final = 100
LOG_PAGE: Final = 500
MOST_COMPARED: Final = 2_000
"""Maximum number of compared lines of args; more would take long."""
MOST_LINE: Final = 2_000
"""Maximum number of characters of such a line."""


class JobQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """The query of a job's page. `whole`: a value to download. The page shows only its beginning."""

    whole: Literal["args", "previous", "progress", "result"] | None = None


class JobLogQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of a job's log."""

    level: Level | None = None
    after: str | None = None


@pages.show("/jobs/<uuid:job_id>", query=JobQuery)
async def show_job(visit: Visit, job_id: UUID, query: JobQuery) -> PageAnswer:
    """Show a job. The live part has the values that change while it waits and runs."""
    if query.whole is not None:
        return await visit.in_thread(_value_as_file, await visit.jobs.get(job_id), query.whole)
    # Args do not change, and may be long: the live part leaves them out.
    view = await read_job_view(visit.services.database, job_id, brief=visit.part is not None)
    own = view.job
    job, journal = await visit.in_thread(lambda: (masked(own), masked(view.journal)))
    is_over = job.status.is_final
    has_failed = is_over and job.status is not Status.SUCCEEDED
    group = None
    if job.status is not Status.QUEUED:
        group = await read_relatives(visit.services.database, own.task, job_id, success=has_failed and not visit.part)
    attempts = journal.attempts
    values: dict[str, Any] = {
        "job": job,
        "own": own,
        "why": None if view.why is None else masked(view.why),
        # By this machine's clock: small differences do not matter here.
        "is_silent": job.lease_expires_at is not None and job.lease_expires_at < datetime.now(UTC),
        "waits_for": None if view.why is None else _HEADINGS.get(view.why.cause, "Waiting"),
        "progress": None if is_over else progress_of(job.progress),
        "group": group if group is not None and group.jobs else None,
        "group_jobs": None if group is None else at_least(group.jobs, MOST_RELATED),
        "can_compare": group is not None and group.has_success,
        "took": None if attempts[-1:] == [] else attempts[-1].took,
        "timeline": timeline_of(job, attempts, is_whole=journal.is_whole),
        "attempts": attempts[::-1],
        "journal": journal,
        "can_retry": job.status in {Status.FAILED, Status.CANCELED, Status.LOST} and job.superseded_by is None,
        "seen": None if own.finished_at is None else own.finished_at.isoformat(),
        "log": None,
        "is_run": False,
        "is_wake_up": _wakes(own),
        "process": _process(own),
        "copies": (),
    }
    if visit.part in {None, "log"}:
        log = await visit.jobs.logs(job_id, limit=LINES)
        # Only loads and flows log this way.
        values["is_run"] = any(line.kind == "log" and "load" in line.fields for line in log.lines)
        values["log"] = attrs.evolve(log, lines=await visit.masked(log.lines))
        values["copies"] = copies(visit, f"/api/v1/jobs/{job_id}", {}, ["status", str(job_id)])
    return HtmlPage("job.html", f"{job.task} {job_id}", values, refresh_s=None if is_over else REFRESH_S)


_HEADINGS: Final = {
    "time": "Not due yet",
    "after": "Waiting for other jobs",
    "key": "Waiting for a lock",
    "foreign_lock": "Waiting for a lock",
    "key_free": "Waiting for a lock",
    "unknown_task": "No worker has its task",
    "queue_paused": "Its queue is paused",
    "no_worker": "No worker serves its queue",
    "task_paused": "Its task is paused",
    "supplier_paused": "Its supplier is paused",
    "slots": "Waiting for a free slot",
    "next": "Ready to start",
    "canceling": "Cancel requested",
    "period": "Waiting for a limit",
    "max_running": "Waiting for a limit",
    "partition": "Waiting for a limit",
    "batch": "Waiting for a limit",
    "supplier_period": "Waiting for a limit",
    "budget": "Waiting for a rate limit",
    "limit_error": "Waiting for a limit",
}
"""Headings by the cause for which a job waits."""


def _value_as_file(job: JobRecord, name: str) -> Download:
    """Return a value of a job as a file."""
    return json_file(getattr(masked(job), name), f"{name}-{job.job_id}.json")


def _wakes(job: JobRecord) -> bool:
    """Return True for the wake-up job of a durable process, which has no actions."""
    return job.lock_key is None and job.queue.startswith("process.") and job.task.startswith(f"{job.queue}.v")


def _process(job: JobRecord) -> dict[str, Any] | None:
    """Return the durable process that a job wakes, if any."""
    args = job.args if isinstance(job.args, dict) else {}
    kind, name = args.get("type"), args.get("process_id")
    if not _wakes(job) or not isinstance(kind, str) or not isinstance(name, str):
        return None
    return {"own": {"type": kind, "id": name}, "type": mask_text(kind), "id": mask_text(name)}


@pages.show("/jobs/<uuid:job_id>/log", query=JobLogQuery)
async def show_job_log(visit: Visit, job_id: UUID, query: JobLogQuery) -> PageAnswer:
    """Show a job's log, line by line, with the beginnings and ends of its attempts."""
    found = await read_job_log(visit.services.database, job_id, limit=LOG_PAGE, after=query.after, level=query.level)
    page, task = found.page, mask_text(found.task)
    lines = await visit.masked(page.lines)
    values = {
        "job_id": job_id,
        "task": task,
        "log": attrs.evolve(page, lines=lines),
        "level": query.level,
    }
    is_live = not found.status.is_final and page.next is None
    return HtmlPage("job_log.html", f"Log of {task}", values, refresh_s=REFRESH_S if is_live else None)


@pages.show("/jobs/<uuid:job_id>/compare")
async def compare_args(visit: Visit, job_id: UUID) -> PageAnswer:
    """Compare a job's args with those of the last job of its task that has succeeded."""
    job = await visit.jobs.get(job_id)
    other = await last_success(visit.services.database, job.task, job_id)
    lines = None
    if other is not None:
        lines = await visit.in_thread(_differences, other.args, job.args)
    values = {"job_id": job_id, "task": mask_text(job.task), "other": other, "lines": lines}
    values["is_same"] = lines is not None and all(line.startswith(" ") for line in lines)
    return HtmlPage("job_compare.html", f"Args of {mask_text(job.task)}", values)


def _differences(before: Any, now: Any) -> list[str] | None:
    """Return the lines of both, differing ones with - and +; None if there are too many."""
    texts = [json.dumps(mask(one), indent=2, ensure_ascii=False, sort_keys=True).splitlines() for one in (before, now)]
    if max(map(len, texts)) > MOST_COMPARED:
        return None
    matcher = difflib.SequenceMatcher(None, texts[0], texts[1])
    lines = []
    for tag, begin, end, first, last in matcher.get_opcodes():
        if tag == "equal":
            lines += [f"  {line}" for line in texts[0][begin:end]]
        else:
            lines += [f"- {line}" for line in texts[0][begin:end]]
            lines += [f"+ {line}" for line in texts[1][first:last]]
    return [cut(line, MOST_LINE) for line in lines]
