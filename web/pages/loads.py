"""Loads: the progress of each, its last runs, rows written per day, failures; run and retry."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Final
from uuid import UUID

from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.load_listings import MAX_COUNTED, LoadRecord
from dataloader.jobs.model import Enqueued
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.etl.load_history import (
    LoadDay,
    LoadRun,
    days_of_load,
    last_runs_of_loads,
    queue_of_load,
    written,
)
from dataloader.web.pages.addresses import PublicAddress
from dataloader.web.pages.asking import FormField, Question, once
from dataloader.web.pages.formats import at_least
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

PAGE: Final = 30
LAST: Final = 5
LAST_OF_ONE: Final = 20
FAILURES: Final = 20
DAYS: Final = 30
REFRESH_S: Final = 2.0
PRODUCER: Final = "pages"

Name = Annotated[str, Meta(min_length=1)]


class LoadsPageQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of loads, by name."""

    after: str | None = None


class LoadPageQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Load, and a page of its failures."""

    name: Name
    after: str | None = None


class AskQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with a load."""

    name: Name


class LoadStartForm(AskQuery, kw_only=True):
    """Run of a load. `once`: the job's ID, so that a form sent twice adds one job."""

    once: UUID
    queue: str | None = None
    begin: str | None = None
    end: str | None = None
    pipeline: str | None = None


class LoadRetryForm(AskQuery, kw_only=True):
    """Retry of failures. `failure`: only that one; else all unresolved ones."""

    once: UUID
    queue: str | None = None
    failure: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None


def page_of_load(name: str) -> str:
    """Return the address of a load's page."""
    return PublicAddress().url("/ui/load", {"name": name})


def _row_of_load(load: LoadRecord, runs: Sequence[LoadRun]) -> dict[str, object]:
    last = load.last_run
    return {
        "own": load,
        "load": masked(load).load,
        "unresolved": at_least(load.unresolved, MAX_COUNTED),
        "written": None if last is None else written(last.counts),
        "signs": [{"status": run.status, "path": f"/ui/runs/{run.run_id}", "at": run.started_at} for run in runs],
    }


@pages.show("/loads", query=LoadsPageQuery)
async def show_loads(visit: Visit, query: LoadsPageQuery) -> PageAnswer:
    """Show the loads of this database, by name."""
    page = await visit.loads.find(limit=PAGE, after=query.after)
    runs = await last_runs_of_loads(visit.services.database, [load.load for load in page.loads], number=LAST)
    rows = [_row_of_load(load, runs[load.load]) for load in page.loads]
    return HtmlPage("loads.html", "Loads", {"loads": rows, "next": page.next}, refresh_s=REFRESH_S)


@pages.show("/load", query=LoadPageQuery)
async def show_load_page(visit: Visit, query: LoadPageQuery) -> PageAnswer:
    """Show a load: its progress, its runs, rows written per day, and its unresolved failures."""
    database = visit.services.database
    load = await visit.loads.get(query.name)
    runs = (await last_runs_of_loads(database, [query.name], number=LAST_OF_ONE))[query.name]
    values = _row_of_load(load, runs) | {
        "runs": [(run, masked(run).reason) for run in reversed(runs)],
        "days": [],
        "failures": [],
        "next": None,
    }
    if visit.part is None:
        today = datetime.now(UTC).date()
        first = today - timedelta(days=DAYS - 1)
        days = await days_of_load(database, query.name, datetime(first.year, first.month, first.day, tzinfo=UTC))
        values["days"] = _each_day(days, first)
        if load.unresolved:
            failures = await visit.loads.failures(query.name, limit=FAILURES, after=query.after)
            values["failures"] = [(masked(failure), once()) for failure in failures.failures]
            values["next"] = failures.next
    return HtmlPage("load.html", f"Load {mask_text(load.load)}", values, refresh_s=REFRESH_S)


def _each_day(days: Sequence[LoadDay], first: date) -> list[LoadDay]:
    """Return a row for each day, also for days without writes; none if no day has any."""
    if not days:
        return []
    there = {one.day: one for one in days}
    each = [first + timedelta(days=number) for number in range(DAYS)]
    return [there.get(day, LoadDay(day, 0, 0)) for day in each]


def _queue_field(queue: str | None) -> FormField:
    return FormField(
        name="queue", label="Queue", value=queue or "", required=True, hint="Queue of a service that has the load."
    )


@pages.show("/loads/run", role=Role.OPERATE, query=AskQuery)
async def ask_load_run(visit: Visit, query: AskQuery) -> PageAnswer:
    """Ask for the span and settings of a run."""
    name = mask_text(query.name)
    return Question(
        title=f"Run {name}",
        sentences=["Loads the data since the watermark, or of the given period. One job of a load runs at a time."],
        path="/ui/loads/run",
        hidden={"name": query.name, "once": once()},
        fields=[
            FormField(
                name="begin", label="From", hint="A date or timestamp, such as 2026-01-31; empty: the watermark."
            ),
            FormField(name="end", label="To (exclusive)", hint="Empty: now. In the load's time zone."),
            _queue_field(await queue_of_load(visit.services.database, query.name)),
            FormField(name="pipeline", label="Load settings", kind="area", hint='JSON, such as {"rate_min": 1}.'),
        ],
        verb="Run",
        back=page_of_load(query.name),
    ).page


@pages.act("/loads/run", role=Role.OPERATE, form=LoadStartForm)
async def run_load_from_page(visit: Visit, form: LoadStartForm) -> PageAnswer:
    """Add a job of a load; the same form sent again adds none."""
    begin, end = _day_or_instant("begin", form.begin), _day_or_instant("end", form.end)
    pipeline = None if form.pipeline is None else _parse_object("pipeline", form.pipeline)
    queue = await _queue_of_form(visit, form)
    added = await visit.loads.run(
        form.name, begin=begin, end=end, pipeline=pipeline, queue=queue, producer=PRODUCER, job_id=form.once
    )
    return _answer_added(form.name, added)


@pages.show("/loads/retry", role=Role.OPERATE, query=AskQuery)
async def ask_load_retry(visit: Visit, query: AskQuery) -> PageAnswer:
    """Ask for confirmation of a retry of a load's failures."""
    load = await visit.loads.get(query.name)
    count = at_least(load.unresolved, MAX_COUNTED)
    return Question(
        title=f"Retry the failures of {mask_text(load.load)}",
        sentences=[
            f"A job requests the data of unresolved failures again: {count} failures.",
            "It loads no other data.",
        ],
        path="/ui/loads/retry",
        hidden={"name": query.name, "once": once()},
        fields=[_queue_field(await queue_of_load(visit.services.database, query.name))],
        verb="Retry",
        back=page_of_load(query.name),
    ).page


@pages.act("/loads/retry", role=Role.OPERATE, form=LoadRetryForm)
async def retry_failures(visit: Visit, form: LoadRetryForm) -> PageAnswer:
    """Add a job that retries failures of a load: all, or one. The same form sent again adds none."""
    failures = None if form.failure is None else [form.failure]
    queue = await _queue_of_form(visit, form)
    added = await visit.loads.retry(form.name, failures, queue=queue, producer=PRODUCER, job_id=form.once)
    return _answer_added(form.name, added)


async def _queue_of_form(visit: Visit, form: LoadStartForm | LoadRetryForm) -> str:
    """Return the queue of a form's job. Raises `LoadNotFound` if its name is not a load's."""
    await visit.loads.get(form.name)
    queue = form.queue or await queue_of_load(visit.services.database, form.name)
    if queue is None:
        raise BadRequest("queue", "is required: the load has no queue, and none of its runs is stored")
    return queue


def _answer_added(name: str, added: Enqueued) -> PageAnswer:
    did = "Enqueued the job" if added.created else "The job was already enqueued:"
    return Redirect(page_of_load(name), f"{did} {added.job_id} in {mask_text(added.queue)}.")


def _day_or_instant(field: str, text: str | None) -> str | None:
    if text is None:
        return None
    for kind in (date, datetime):
        try:
            kind.fromisoformat(text.strip())
        except ValueError:
            continue
        return text.strip()
    raise BadRequest(field, f"must be a date or a timestamp, such as 2026-01-31, not {text.strip()!r:.60}")


def _parse_object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadRequest(field, f"must be a JSON object, not {text!r:.60}")
    return value
