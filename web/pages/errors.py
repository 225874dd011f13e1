"""Failures: groups of jobs by their error, the jobs of a group and their retry, and the error log."""

from __future__ import annotations

from typing import Annotated, Final
from uuid import UUID

import trio
from msgspec import Meta, Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.failures import MAX_SPREAD_S, FailureState, GroupRetry
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.queue.failing_jobs import MAX_COUNTED, bars_of_groups, get_error_group, list_failing_jobs
from dataloader.store.queue.look_back import search_errors
from dataloader.web.pages.addresses import PublicAddress
from dataloader.web.pages.asking import MOST_UNTYPED, FormField, Question
from dataloader.web.pages.formats import at_least
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit
from dataloader.web.pages.wall_times import field_of_instant, instant_of_field

pages: Final = PageRoutes()

GROUPS: Final = 25
JOBS: Final = 25
ERRORS: Final = 20
"""Number of errors on a page: each may have 4,000 characters."""
NEWEST: Final = 3
"""Number of a group's errors that are shown with their full texts."""
BATCH: Final = 1_000
REFRESH_S: Final = 5.0
"""Seconds between refreshes; the groups are counted again each time."""
_STATES: Final = (("", "all"), ("failed", "failed for good"), ("waiting", "waiting for a retry"))


class ErrorGroupsQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Filter of groups."""

    task: str | None = None
    state: FailureState | None = None
    exact: bool = False
    after: str | None = None


class ErrorGroupQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of a group's jobs."""

    after: str | None = None


class GroupRetryQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Continuation of a retry: the job after which it continues, and its choices."""

    after: str | None = None
    state: FailureState | None = None
    at: str | None = None
    spread_min: float = 0.0


class GroupRetryForm(GroupRetryQuery, kw_only=True):
    """Confirmed retry. `shown`: the number of jobs in the form. `typed`: the number that the operator typed."""

    shown: int = 0
    typed: str | None = None


class ErrorLogQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Filter of the error log."""

    task: str | None = None
    queue: str | None = None
    group: str | None = None
    job_id: Annotated[UUID | None, Meta(description="ID of a job.")] = None
    after: str | None = None


@pages.show("/errors", query=ErrorGroupsQuery)
async def show_groups(visit: Visit, query: ErrorGroupsQuery) -> PageAnswer:
    """Show the groups of errors, those with the most jobs first."""
    page = await visit.jobs.error_groups(
        task=query.task, state=query.state, exact=query.exact, limit=GROUPS, after=query.after
    )
    bars = {} if query.exact else await bars_of_groups(visit.services.database, [one.group for one in page.groups])
    values = {
        "groups": [(one, masked(one), bars.get(one.group)) for one in page.groups],
        "next": page.next,
        "query": query,
        "states": _STATES,
    }
    # Exact groups read up to 20,000 jobs: they are requested once, without refreshes.
    return HtmlPage("errors.html", "Errors", values, refresh_s=None if query.exact else REFRESH_S)


@pages.show("/errors/log", query=ErrorLogQuery)
async def show_error_log(visit: Visit, query: ErrorLogQuery) -> PageAnswer:
    """Show the error log: a row for each failed run, also of jobs that were deleted."""
    found = await search_errors(
        visit.services.database,
        task=query.task,
        queue=query.queue,
        group=query.group,
        job_id=query.job_id,
        limit=ERRORS,
        after=query.after,
    )
    values = {"errors": [(one, masked(one)) for one in found.rows], "found": found, "query": query}
    return HtmlPage("error_log.html", "Error log", values)


@pages.show("/errors/<group>", query=ErrorGroupQuery)
async def show_group(visit: Visit, group: str, query: ErrorGroupQuery) -> PageAnswer:
    """Show a group of errors: its jobs, and its newest errors with their full texts."""
    database = visit.services.database
    found = await get_error_group(database, group)
    jobs = await list_failing_jobs(database, group, limit=JOBS, after=query.after)
    log = [] if visit.part else (await search_errors(database, group=group, limit=NEWEST)).rows
    shown = masked(found)
    values = {
        "group": shown,
        "real": found,
        "jobs": [(one, masked(one).queue) for one in jobs.jobs],
        "next": jobs.next,
        "count": at_least(found.jobs, MAX_COUNTED),
        "errors": [(one, masked(one)) for one in log],
    }
    return HtmlPage("error_group.html", f"Error of {shown.task}", values, refresh_s=REFRESH_S)


@pages.show("/errors/<group>/retry", role=Role.ADMIN, query=GroupRetryQuery)
async def ask_group_retry(visit: Visit, group: str, query: GroupRetryQuery) -> PageAnswer:
    """Ask for confirmation of a group's retry, and for its time."""
    found = await get_error_group(visit.services.database, group)
    shown = masked(found)
    count = at_least(found.jobs, MAX_COUNTED)
    failed = found.jobs - found.waiting
    typed = FormField(
        name="typed", label=f"Type {found.jobs} to retry at least this many jobs", required=True, kind="number"
    )
    at = instant_of_field("at", query.at, visit.preferences.tz)
    return Question(
        title="Continue the retry" if query.after else f"Retry {count} jobs",
        sentences=[
            f"{shown.task}: {shown.error}",
            *([f"{failed:,} jobs failed for good. They are queued again, from attempt 0."] if failed else []),
            *([f"{found.waiting:,} jobs wait for a retry. It is moved to this time."] if found.waiting else []),
            "Jobs that have started in the meantime do not change.",
        ],
        path=f"/ui/errors/{group}/retry",
        hidden={"shown": found.jobs, "after": query.after},
        fields=[
            FormField(name="state", label="Which", kind="select", options=_STATES, value=query.state or ""),
            FormField(
                name="at",
                label="When",
                kind="datetime-local",
                value=field_of_instant(at, visit.preferences.tz),
                hint=f"Time zone: {visit.preferences.zone}; empty: now.",
            ),
            FormField(
                name="spread_min",
                label="Spread over (minutes)",
                kind="number",
                step="any",
                value=f"{query.spread_min:g}",
                hint="Jobs start at different times within this period; 0: all start together.",
            ),
            *([typed] if found.jobs > MOST_UNTYPED and not query.after else []),
        ],
        verb="Retry",
        back=f"/ui/errors/{group}",
    ).page


@pages.act("/errors/<group>/retry", role=Role.ADMIN, form=GroupRetryForm)
async def retry_group_from_page(visit: Visit, group: str, form: GroupRetryForm) -> PageAnswer:
    """Retry the jobs of a group, each once, oldest first. A request takes a few seconds; the next one continues."""
    here = f"/ui/errors/{group}"
    at = instant_of_field("at", form.at, visit.preferences.tz)
    if not 0 <= form.spread_min * 60 <= MAX_SPREAD_S:
        raise BadRequest("spread_min", f"must be a number of minutes from 0 to {MAX_SPREAD_S / 60:,.0f}")
    if form.after is None and form.shown > MOST_UNTYPED:
        if form.typed is None or form.typed.replace(",", "").strip() != str(form.shown):
            raise BadRequest("typed", f"must be {form.shown}, the number of jobs, to confirm the retry")
    elif form.after is None and (await get_error_group(visit.services.database, group)).jobs > MOST_UNTYPED:
        raise BadRequest("shown", f"is outdated: there are more than {MOST_UNTYPED:,} jobs now; check the number again")
    wanted = GroupRetry(group=group, at=at, spread_s=form.spread_min * 60, state=form.state)
    changed, after = 0, form.after
    until = trio.current_time() + visit.services.http_limits.batches_s
    while True:
        done = await visit.jobs.retry_some_of_group(wanted, limit=BATCH, after=after)
        changed, after = changed + done.changed, done.next
        if after is None:
            return Redirect(here, f"Retried {changed:,} jobs.")
        if trio.current_time() > until:
            query = {"after": after, "state": form.state, "at": form.at, "spread_min": form.spread_min or None}
            to = PublicAddress().url(f"{here}/retry", query)
            return Redirect(to, f"Retried {changed:,} jobs so far. Continue with the remaining jobs.")
