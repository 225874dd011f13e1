"""Schedules: next time, outcomes of the last jobs, left-out times; pause, run now, backfill."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final
from uuid import UUID

from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.roles import Role
from dataloader.jobs.schedule_listings import ScheduleRecord
from dataloader.jobs.secrets.masking import mask, mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.schedules.planned_jobs import PlannedJob, last_planned_jobs
from dataloader.store.schedules.schedule_view import ScheduleView, read_schedule_view
from dataloader.web.pages import schedule_words
from dataloader.web.pages.addresses import PublicAddress, own_path
from dataloader.web.pages.asking import MOST_UNTYPED, FormField, Question, once
from dataloader.web.pages.formats import instant
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect, Undo
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit
from dataloader.web.pages.wall_times import field_of_instant, instant_of_field

pages: Final = PageRoutes()

PAGE: Final = 30
LAST: Final = 5
LAST_OF_ONE: Final = 20
NEXT: Final = 10
EVENTS: Final = 30
REFRESH_S: Final = 2.0
_TOLD: Final = 500
"""Times of a dry run that are listed."""

Name = Annotated[str, Meta(min_length=1)]


class SchedulesQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of schedules, by name."""

    after: str | None = None


class ScheduleQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with a schedule."""

    name: Name


class ScheduleForm(ScheduleQuery, kw_only=True):
    """Schedule, and the page to return to."""

    to: str = "/ui/schedules"


class RunForm(ScheduleForm, kw_only=True):
    """Run of a schedule. `once`: the job's ID, so that a form sent twice adds one job."""

    once: UUID


class BackfillQuery(ScheduleQuery, kw_only=True):
    """Span of a backfill, by the clock of the displayed zone."""

    begin: str | None = None
    end: str | None = None
    again: bool = False


class BackfillForm(BackfillQuery, kw_only=True):
    """Confirmed backfill. `once`: its ID; `shown` and `typed`: the displayed and the typed number of jobs."""

    once: UUID
    shown: int = 0
    typed: str | None = None


def schedule_page(name: str) -> str:
    """Return the address of a schedule's page."""
    return PublicAddress().url("/ui/schedule", {"name": name})


@pages.show("/schedules", query=SchedulesQuery)
async def show_schedules(visit: Visit, query: SchedulesQuery) -> PageAnswer:
    """Show the schedules, by name."""
    page = await visit.schedules.find(limit=PAGE, after=query.after)
    jobs = await last_planned_jobs(visit.services.database, [one.name for one in page.schedules], number=LAST)
    shown_rows = await visit.in_thread(lambda: list(map(_row_of_schedule, page.schedules)))
    rows = [
        row | {"signs": list(map(_sign, jobs[one.name]))} for one, row in zip(page.schedules, shown_rows, strict=True)
    ]
    return HtmlPage("schedules.html", "Schedules", {"schedules": rows, "next": page.next}, refresh_s=REFRESH_S)


def _sign(job: PlannedJob) -> dict[str, object]:
    return {"status": job.status, "path": f"/ui/jobs/{job.job_id}", "at": job.planned_at}


def _row_of_schedule(record: ScheduleRecord) -> dict[str, object]:
    schedule = None if record.fault else record.schedule
    return {
        "own": record,
        "schedule": masked(record),
        "when": None if schedule is None else schedule_words.when(schedule),
        "zone": None if schedule is None else schedule.zone,
        "missed": None if schedule is None else schedule.missed,
        "state": schedule_words.state(record),
    }


@pages.show("/schedule", query=ScheduleQuery)
async def show_schedule(visit: Visit, query: ScheduleQuery) -> PageAnswer:
    """Show a schedule: its next times, its last jobs, left-out times, its policies in words."""
    view = await read_schedule_view(visit.services.database, query.name, events=EVENTS, jobs=LAST_OF_ONE)
    values = await visit.in_thread(_values_of_schedule, view)
    values["once"] = None if visit.part else once()
    return HtmlPage("schedule.html", f"Schedule {mask_text(view.record.name)}", values, refresh_s=REFRESH_S)


def _values_of_schedule(view: ScheduleView) -> dict[str, object]:
    record = view.record
    return _row_of_schedule(record) | {
        "planned": None if record.fault else _planned_values(record),
        "events": [schedule_words.event_line(masked(one)) for one in view.events],
        "jobs": view.jobs,
    }


def _planned_values(record: ScheduleRecord) -> dict[str, object]:
    """Return the values of a valid schedule: its times, its jobs, its policies."""
    schedule = record.schedule
    times = record.next_times(NEXT)
    return {
        "policies": list(schedule_words.policies(schedule)),
        "times": list(schedule_words.planned_times(times, schedule_words.zone_of(schedule), record.last_at)),
        "options": mask(schedule.job),
        "args": mask(schedule.args),
        "start_at": schedule.start_at,
        "end_at": schedule.end_at,
    }


@pages.act("/schedules/pause", role=Role.OPERATE, form=ScheduleForm)
async def pause_schedule(visit: Visit, form: ScheduleForm) -> PageAnswer:
    """Pause a schedule."""
    await visit.schedules.pause(form.name)
    undo = Undo("/ui/schedules/resume", {"name": form.name, "to": own_path(form.to)})
    return Redirect(own_path(form.to), f"Paused {mask_text(form.name)}: it enqueues no jobs.", undo)


@pages.act("/schedules/resume", role=Role.OPERATE, form=ScheduleForm)
async def resume_schedule(visit: Visit, form: ScheduleForm) -> PageAnswer:
    """End a schedule's pause."""
    await visit.schedules.resume(form.name)
    undo = Undo("/ui/schedules/pause", {"name": form.name, "to": own_path(form.to)})
    return Redirect(own_path(form.to), f"Resumed {mask_text(form.name)}.", undo)


@pages.show("/schedules/run", role=Role.OPERATE, query=ScheduleQuery)
async def ask_schedule_run(visit: Visit, query: ScheduleQuery) -> PageAnswer:
    """Ask for confirmation of "run now", and say what it does."""
    record = await visit.schedules.get(query.name)
    return Question(
        title=f"Run {mask_text(record.name)} now",
        sentences=[
            f"A job of {mask_text(record.task)} is enqueued, with the schedule's args.",
            "The plan does not change: the next planned time stays.",
        ],
        path="/ui/schedules/run",
        hidden={"name": query.name, "once": once(), "to": "/ui/schedules"},
        verb="Run now",
        back="/ui/schedules",
    ).page


@pages.act("/schedules/run", role=Role.OPERATE, form=RunForm)
async def run_schedule(visit: Visit, form: RunForm) -> PageAnswer:
    """Add a job of a schedule in addition to its plan; the same form sent again adds none."""
    added = await visit.schedules.run(form.name, job_id=form.once)
    did = "Enqueued the job" if added.created else "The job was already enqueued:"
    return Redirect(own_path(form.to), f"{did} {added.job_id} in {mask_text(added.queue)}.")


@pages.show("/schedules/backfill", role=Role.OPERATE, query=BackfillQuery)
async def ask_backfill(visit: Visit, query: BackfillQuery) -> PageAnswer:
    """Ask for the span of a backfill, then show the times that will get a job."""
    tz, zone = visit.preferences.tz, visit.preferences.zone
    begin, end = instant_of_field("begin", query.begin, tz), instant_of_field("end", query.end, tz)
    name = mask_text(query.name)
    if begin is None or end is None:
        record = await visit.schedules.get(query.name)
        midnight = datetime.now(UTC).astimezone(tz).replace(hour=0, minute=0)
        label = "Also enqueue jobs for times that already have one"
        return Question(
            title=f"Backfill {name}",
            sentences=[
                f"Times: {schedule_words.when(record.schedule)} (time zone {record.schedule.zone}).",
                "Enqueues the missing jobs of past times. The times are shown first.",
            ],
            path="/ui/schedules/backfill",
            is_read=True,
            hidden={"name": query.name},
            fields=[
                FormField(
                    name="begin",
                    label="From",
                    kind="datetime-local",
                    value=field_of_instant(midnight - timedelta(days=1), tz),
                    required=True,
                ),
                FormField(
                    name="end",
                    label="To (exclusive)",
                    kind="datetime-local",
                    value=field_of_instant(midnight, tz),
                    hint=f"Time zone: {zone}.",
                    required=True,
                ),
                FormField(name="again", label=label, kind="checkbox", value="true" if query.again else ""),
            ],
            verb="Show the times",
            back=schedule_page(query.name),
        ).page
    found = await visit.schedules.backfill(query.name, begin, end, again=query.again, dry_run=True)
    return _found_times(visit, query, found.times, found.had_jobs)


def _found_times(visit: Visit, query: BackfillQuery, times: list[datetime], had_jobs: int) -> HtmlPage:
    count, tz = len(times), visit.preferences.tz
    sentences = [
        f"Jobs are enqueued for {count:,} planned times." if times else "All planned times of this period have a job."
    ]
    if had_jobs:
        sentences.append(f"{had_jobs:,} times already have a job, and are skipped.")
    told: list[object] = [instant(at, tz) for at in times[:_TOLD]]
    if count > _TOLD:
        told.append(f"… and {count - _TOLD:,} more, until {times[-1].astimezone(tz):%Y-%m-%d %H:%M:%S}")
    span = {"name": query.name, "begin": query.begin, "end": query.end, "again": "true" if query.again else None}
    if not times:
        return Question(
            title=f"Backfill {mask_text(query.name)}",
            sentences=sentences,
            path="/ui/schedules/backfill",
            is_read=True,
            hidden={"name": query.name},
            verb="Choose another period",
            back=schedule_page(query.name),
        ).page
    typed = FormField(name="typed", label=f"Type {count} to enqueue this many jobs", kind="number", required=True)
    return Question(
        title=f"Backfill {mask_text(query.name)}",
        sentences=sentences,
        told=told,
        path="/ui/schedules/backfill",
        hidden=span | {"once": once(), "shown": count},
        fields=[typed] if count > MOST_UNTYPED else [],
        verb=f"Enqueue {count:,} jobs" if count > 1 else "Enqueue the job",
        back=schedule_page(query.name),
    ).page


@pages.act("/schedules/backfill", role=Role.OPERATE, form=BackfillForm)
async def backfill_schedule(visit: Visit, form: BackfillForm) -> PageAnswer:
    """Add the jobs of past planned times; the same form sent again adds none."""
    tz = visit.preferences.tz
    begin, end = instant_of_field("begin", form.begin, tz), instant_of_field("end", form.end, tz)
    if begin is None or end is None:
        raise BadRequest("begin" if begin is None else "end", "is required")
    if form.shown > MOST_UNTYPED and (form.typed or "").replace(",", "").strip() != str(form.shown):
        raise BadRequest("typed", f"must be {form.shown}, the number of jobs, to confirm")
    done = await visit.schedules.backfill(form.name, begin, end, again=form.again, backfill_id=form.once)
    return Redirect(schedule_page(form.name), f"Enqueued {len(done.times):,} jobs of planned times.")
