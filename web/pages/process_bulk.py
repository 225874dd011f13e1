"""Repair or resume of all matching processes in error: of a group of errors, or of a type."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final, Literal

import attrs
import msgspec
import trio
from msgspec import Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.process_listings import ProcessFilter
from dataloader.jobs.process_requests import BATCH, ProcessChange
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.store.processes.process_rows import MOST_COUNTED, get_process_error
from dataloader.web.pages.addresses import PublicAddress
from dataloader.web.pages.asking import MOST_UNTYPED, FormField, Question
from dataloader.web.pages.formats import at_least
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.process_list import json_of
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

Action = Literal["repair", "resume"]
_DOES: Final[dict[Action, str]] = {
    "repair": "Runs the repair of the type for each process, with these args. If it succeeds, the process continues.",
    "resume": "Each process continues in its current state: it tries a failed timeout again, or waits for calls.",
}


class ProcessGroupQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Group of processes in error, and the action."""

    action: Action
    type: str
    error_group: str


class ProcessGroupForm(ProcessGroupQuery, kw_only=True):
    """Confirmed action. `after`: the cursor from which it continues. `shown`: the number of processes in the form.

    `typed`: the number that was typed.
    """

    args: str | None = None
    after: str | None = None
    shown: int = 0
    typed: str | None = None


def _address_of_list(choice: ProcessGroupQuery) -> str:
    return PublicAddress().url("/ui/processes", {"type": choice.type, "error_group": choice.error_group})


@pages.show("/processes/errors/mend", role=Role.ADMIN, query=ProcessGroupQuery)
async def ask_mend(visit: Visit, query: ProcessGroupQuery) -> PageAnswer:
    """Ask for confirmation of a group's repair or resume."""
    return await _group_question(
        visit, ProcessGroupForm(action=query.action, type=query.type, error_group=query.error_group)
    )


async def _group_question(visit: Visit, choice: ProcessGroupForm, fault: str | None = None) -> HtmlPage:
    group = await get_process_error(visit.services.database, choice.type, choice.error_group)
    number = 0 if group is None else group.processes
    count = at_least(number, MOST_COUNTED)
    processes = f"{count} {'process' if number == 1 else 'processes'}"
    fields = []
    if choice.action == "repair":
        hint = 'A JSON value, such as 5, "text" or {"amount": 5}; empty: null.'
        fields.append(FormField(name="args", label="Args", kind="area", value=choice.args or "", hint=hint))
    if number > MOST_UNTYPED and choice.after is None:
        fields.append(FormField(name="typed", label=f"Type {number} to continue", required=True))
    verb = choice.action.capitalize()
    question = Question(
        title=f"Continue: {choice.action}" if choice.after else f"{verb} {processes}?",
        sentences=[
            "No process has this error anymore."
            if group is None
            else f"{mask_text(choice.type)}: {masked(group).error}",
            _DOES[choice.action],
            "Processes that are already being repaired are skipped.",
        ],
        path="/ui/processes/errors/mend",
        verb=verb,
        back=_address_of_list(choice),
        hidden={
            "action": choice.action, "type": choice.type, "error_group": choice.error_group, "shown": number,
            "after": choice.after,
        },
        fields=fields,
        fault=fault,
    )  # fmt: skip
    return attrs.evolve(question.page, status=HTTPStatus.UNPROCESSABLE_ENTITY if fault else HTTPStatus.OK)


@pages.act("/processes/errors/mend", role=Role.ADMIN, form=ProcessGroupForm)
async def mend(visit: Visit, form: ProcessGroupForm) -> PageAnswer:
    """Repair or resume a group's processes, each once, oldest first.

    A request takes a few seconds; the next continues.
    """
    try:
        if form.after is None:
            await _check_number(visit, form)
        change = ProcessChange(action=form.action, args=_args_of_form(form))
    except BadRequest as error:
        return await _group_question(visit, form, f"{error.field}: {error.message}")
    wanted = ProcessFilter(type=form.type, error_group=form.error_group)
    changed, after = 0, form.after
    until = trio.current_time() + visit.services.http_limits.batches_s
    did = "Resumed" if form.action == "resume" else "Requested the repair of"
    while True:
        done = await visit.processes.change_some(change, wanted, limit=BATCH, after=after)
        changed, after = changed + done.changed, done.next
        if after is None:
            return Redirect(_address_of_list(form), f"{did} {changed:,} {'process' if changed == 1 else 'processes'}.")
        if trio.current_time() > until:
            # Args may have values that no address should contain: the answer itself is the form that continues.
            left = msgspec.structs.replace(form, after=after)
            return await _group_question(
                visit, left, f"{did} {changed:,} processes so far. Continue with the remaining processes."
            )


def _args_of_form(form: ProcessGroupForm) -> Any:
    return None if form.args is None else json_of("args", form.args)


async def _check_number(visit: Visit, form: ProcessGroupForm) -> None:
    if form.shown > MOST_UNTYPED:
        if form.typed is None or form.typed.replace(",", "").strip() != str(form.shown):
            raise BadRequest("typed", f"must be {form.shown}, the number of processes, to confirm")
        return
    group = await get_process_error(visit.services.database, form.type, form.error_group)
    if group is not None and group.processes > MOST_UNTYPED:
        raise BadRequest(
            "shown", f"is outdated: there are more than {MOST_UNTYPED:,} processes now; check the number again"
        )
