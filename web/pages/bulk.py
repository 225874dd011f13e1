"""Bulk operations: their effect, confirmation, progress and stop."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final
from uuid import UUID

import attrs
from msgspec import Struct

from dataloader.jobs.bulk_listings import COUNTED, NOT_TYPED, Action, BulkCount, BulkRecord, Chosen
from dataloader.jobs.contract import Change
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.listings import EVERY_JOB
from dataloader.jobs.model import MAX_INT
from dataloader.jobs.operations.bulk import FREEZE_S
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.record_masks import masked
from dataloader.web.pages.addresses import PublicAddress, own_path
from dataloader.web.pages.asking import FormField, Question, once
from dataloader.web.pages.formats import at_least
from dataloader.web.pages.job_choice import JobChoice
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

PAGE: Final = 50
REFRESH_S: Final = 1.0
LIST_REFRESH_S: Final = 5.0

_WORDS: Final[dict[str, tuple[str, str]]] = {
    "cancel": ("Cancel", "Queued jobs are canceled immediately. Running jobs are asked to stop."),
    "retry": ("Retry", "Each job is queued once more, from attempt 0. Jobs that fail again stay failed."),
    "run_now": (
        "Run now",
        "The jobs become due now. Jobs that wait for a key, a limit or other jobs continue to wait.",
    ),
    "set_priority": ("Priority", "Smaller numbers run first."),
}
"""Label and effect of each action."""
_BUTTONS: Final = {
    "cancel": "Cancel jobs",
    "retry": "Retry jobs",
    "run_now": "Run jobs now",
    "set_priority": "Set priority",
}
_MEANT: Final = {
    "cancel": "queued or running", "retry": "failed, canceled or lost", "run_now": "delayed",
    "set_priority": "queued",
}  # fmt: skip


class BulkChoice(JobChoice, kw_only=True):
    """Action, and the jobs: the chosen ones, or `all` that match the filter."""

    action: Action
    all: bool = False
    job: list[UUID] | None = None
    priority: int | None = None


class BulkForm(BulkChoice, kw_only=True):
    """Confirmed operation: its ID, the number that was shown, and the number that was typed."""

    bulk_id: UUID
    shown: int
    exact: bool = False
    typed: str = ""


class BulkQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of bulk operations, latest first."""

    after: str | None = None


@pages.show("/bulk/new", role=Role.ADMIN, query=BulkChoice)
async def ask_bulk(visit: Visit, query: BulkChoice) -> PageAnswer:
    """Ask for confirmation, and say what will happen."""
    return await _bulk_question(visit, query)


@pages.act("/bulk", role=Role.ADMIN, form=BulkForm, deadline_s=FREEZE_S)
async def start_bulk_from_page(visit: Visit, form: BulkForm) -> PageAnswer:
    """Freeze the jobs and begin the operation; its page shows their number."""
    is_typed = form.typed.replace(",", "").strip() == str(form.shown)
    if not is_typed and _needs_typing(BulkCount(form.shown, form.exact)):
        return await _bulk_question(visit, form, "The typed number does not match the number of jobs.")
    most = None
    if form.exact:
        most = 2 * form.shown if is_typed else NOT_TYPED
    try:
        chosen = _chosen_jobs(visit, form)
        record = await visit.bulk.start(_change_of_choice(form), chosen, bulk_id=form.bulk_id, most=most)
    except BadRequest as error:
        if error.field != "most":
            raise
        return await _bulk_question(visit, form, "There are many more jobs now. Check the number again.")
    return Redirect(f"/ui/bulk/{record.bulk_id}")


@pages.show("/bulk/<uuid:bulk_id>", role=Role.ADMIN)
async def show_bulk(visit: Visit, bulk_id: UUID) -> PageAnswer:
    """Show an operation and its progress."""
    record = masked(await visit.bulk.get(bulk_id))
    values = {"act": record, "label": _label(record), "meant": _meant(record)}
    return HtmlPage("bulk.html", _label(record), values, refresh_s=REFRESH_S if record.state == "open" else None)


@pages.act("/bulk/<uuid:bulk_id>/stop", role=Role.ADMIN)
async def stop_bulk(visit: Visit, bulk_id: UUID) -> PageAnswer:
    """Stop an operation before its end."""
    record = await visit.bulk.stop(bulk_id)
    said = "Stopped. Changes already made remain." if record.state == "stopped" else "It had already ended."
    return Redirect(f"/ui/bulk/{bulk_id}", said)


@pages.show("/bulk", role=Role.ADMIN, query=BulkQuery)
async def list_bulk_operations(visit: Visit, query: BulkQuery) -> PageAnswer:
    """Show the operations, latest first."""
    page = await visit.bulk.find(limit=PAGE, after=query.after)
    acts = [(record, _label(record), _meant(record)) for record in map(masked, page.bulk)]
    return HtmlPage("bulk_list.html", "Bulk operations", {"acts": acts, "next": page.next}, refresh_s=LIST_REFRESH_S)


def _change_of_choice(choice: BulkChoice) -> Change:
    if choice.action != "set_priority":
        return Change(action=choice.action)
    if choice.priority is None:
        raise BadRequest("priority", "is required")
    return Change(action=choice.action, priority=choice.priority)


def _chosen_jobs(visit: Visit, choice: BulkChoice) -> Chosen:
    """Return the chosen jobs. Raises `BadRequest` if none are chosen, or if no criterion is given."""
    if not choice.all:
        if not choice.job:
            raise BadRequest("job", "is required: select jobs in the list, or all that match its filter")
        return choice.job
    if choice.args is not None:
        raise BadRequest("args", "cannot be used here, because the search reads every job; select jobs in the list")
    wanted = choice.job_filter(visit.preferences.tz)
    if wanted == EVERY_JOB:
        raise BadRequest("all", "needs a filter: choose a status, a queue or another criterion first")
    return wanted


def _needs_typing(counted: BulkCount) -> bool:
    return not counted.exact or counted.jobs > NOT_TYPED


async def _bulk_question(visit: Visit, choice: BulkChoice, fault: str | None = None) -> HtmlPage:
    chosen = _chosen_jobs(visit, choice)
    # The priority is not known yet: count with one that no job has.
    change = Change(action=choice.action, priority=MAX_INT)
    counted = await visit.bulk.count(change, chosen)
    verb, does = _WORDS[choice.action]
    number = f"{counted.jobs:,}" if counted.exact else at_least(counted.jobs, min(counted.jobs, COUNTED))
    jobs = f"{number} {'job' if counted.exact and counted.jobs == 1 else 'jobs'}"
    fields = []
    if choice.action == "set_priority":
        value = "" if choice.priority is None else str(choice.priority)
        fields.append(FormField(name="priority", label="Priority", kind="number", value=value, required=True))
    if _needs_typing(counted):
        fields.append(FormField(name="typed", label=f"Type {counted.jobs} to continue", required=True))
    hidden = {name: value for name, value in choice.given.items() if choice.all} | {
        "action": choice.action,
        "all": "true" if choice.all else None,
        "bulk_id": once(),
        "shown": counted.jobs,
        "exact": "true" if counted.exact else None,
    }
    back = PublicAddress().url("/ui/jobs", choice.given)
    whose = f"the {len(choice.job or ()):,} selected jobs" if not choice.all else "the jobs that match the filter"
    sentences = [f"Applies to those of {whose} that are {_MEANT[choice.action]} now: {jobs}.", does]
    if counted.leaves_out:
        sentences.append(counted.leaves_out)
    if counted.jobs > PAGE or not counted.exact:
        sentences.append("It runs in the background, in batches of 500 jobs. You can watch and stop it.")
    question = Question(
        title=f"{verb}: {jobs}",
        sentences=[fault, *sentences] if fault else sentences,
        told=[f"{chip.label}: {chip.text}" for chip in choice.chips] if choice.all else (),
        path="/ui/bulk",
        verb=_BUTTONS[choice.action],
        back=own_path(back),
        fields=fields,
        hidden=hidden,
        lists={} if choice.all else {"job": [str(job_id) for job_id in choice.job or ()]},
        is_harsh=choice.action == "cancel",
    )
    return attrs.evolve(question.page, status=HTTPStatus.UNPROCESSABLE_ENTITY if fault else HTTPStatus.OK)


def _label(record: BulkRecord) -> str:
    verb = _WORDS.get(record.action, (record.action,))[0]
    return f"{verb} {record.priority}" if record.priority is not None else verb


def _meant(record: BulkRecord) -> list[tuple[str, str]]:
    """Return the filter as labels and texts; it was stored without secrets."""
    if "chosen" in record.filter:
        return [("selected", f"{record.filter['chosen']:,} jobs")]
    return [(name.replace("_", " "), _criterion_text(value)) for name, value in record.filter.items()]


def _criterion_text(value: Any) -> str:
    return " or ".join(map(str, value)) if isinstance(value, list) else str(value)
