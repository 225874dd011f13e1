"""Operator's actions on one durable process: start, call, repair, resume, stop, remove, withdraw.

Each asks for confirmation. Conflicts with the status are explained in words, and typed values stay in the form.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final, Literal
from uuid import UUID

import attrs
from msgspec import Struct

from dataloader.jobs.client.processes import ProcessClient
from dataloader.jobs.errors import BadRequest, IdempotencyConflict
from dataloader.jobs.process_requests import ProcessRequest
from dataloader.jobs.processes import ProcessConflict
from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.processes.process_rows import known_types
from dataloader.web.pages.addresses import PublicAddress
from dataloader.web.pages.asking import FormField, Question, once
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.process_list import json_of
from dataloader.web.pages.process_words import what_of
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

_LIST: Final = "/ui/processes"
_JSON_HINT: Final = 'A JSON value, such as 5, "text" or {"amount": 5}; empty: null.'


class WhichProcess(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with one process."""

    type: str
    id: str


class WhichIdent(Struct, forbid_unknown_fields=True, kw_only=True):
    """Ident of the displayed task: after a restore, its number may belong to another task."""

    ident: UUID | None = None


class ProcessCallForm(WhichProcess, kw_only=True):
    """Call. `once`: its idempotency key, so that the same form calls once."""

    method: str = ""
    args: str | None = None
    once: str | None = None


class ProcessRepairForm(WhichProcess, kw_only=True):
    """Repair. `once`: its idempotency key, so that the same form repairs once."""

    args: str | None = None
    once: str | None = None


class ProcessStartForm(Struct, forbid_unknown_fields=True, kw_only=True):
    """Start of a process. `once`: its idempotency key, so that the same form starts once."""

    type: str = ""
    id: str = ""
    args: str | None = None
    metadata: str | None = None
    once: str | None = None


def _processes(visit: Visit) -> ProcessClient:
    """Return the processes for manual actions, all of which the audit log records."""
    return ProcessClient(attrs.evolve(visit.performer, by_hand=True))


def _process_path(which: WhichProcess | ProcessStartForm) -> str:
    return PublicAddress().url("/ui/process", {"type": which.type, "id": which.id})


def _process_name(which: WhichProcess | ProcessStartForm) -> str:
    return f"{mask_text(which.type)} {mask_text(which.id)}"


@pages.show("/process/call", role=Role.OPERATE, query=WhichProcess)
async def ask_call(_visit: Visit, query: WhichProcess) -> PageAnswer:
    """Ask for a method and its args."""
    return _call_form(ProcessCallForm(type=query.type, id=query.id))


def _call_form(form: ProcessCallForm) -> HtmlPage:
    return Question(
        title=f"Call {_process_name(form)}",
        sentences=[
            "Calls run one at a time, oldest first, and before the timer.",
            "The answer is shown in the timeline.",
        ],
        path="/ui/process/call",
        verb="Call",
        back=_process_path(form),
        hidden={"type": form.type, "id": form.id, "once": form.once or once()},
        fields=[
            FormField(name="method", label="Method", value=form.method, required=True),
            FormField(name="args", label="Args", kind="area", value=form.args or "", hint=_JSON_HINT),
        ],
    ).page


@pages.act("/process/call", role=Role.OPERATE, form=ProcessCallForm)
async def call_process_from_page(visit: Visit, form: ProcessCallForm) -> PageAnswer:
    """Call a method. The process's page shows the answer."""
    try:
        request = ProcessRequest(
            type=form.type,
            process_id=form.id,
            kind="call",
            method=form.method,
            args=_args_of_text(form.args),
            key=form.once,
        )
        answer = await _processes(visit).ask(request)
    except (BadRequest, ProcessConflict, IdempotencyConflict) as error:
        return _refused_form(_call_form(form), error)
    return Redirect(_process_path(form), f"Requested the {what_of('call', form.method)}: task {answer.task_id}.")


@pages.show("/process/repair", role=Role.OPERATE, query=WhichProcess)
async def ask_repair(_visit: Visit, query: WhichProcess) -> PageAnswer:
    """Ask for the args of a repair."""
    return _repair_form(ProcessRepairForm(type=query.type, id=query.id))


def _repair_form(form: ProcessRepairForm) -> HtmlPage:
    return Question(
        title=f"Repair {_process_name(form)}",
        sentences=[
            "Runs the repair of the process type. If it succeeds, the process continues.",
            "A failed timeout is then tried again, unless the repair sets another timer.",
            "If it fails, the process does not change.",
        ],
        path="/ui/process/repair",
        verb="Repair",
        back=_process_path(form),
        hidden={"type": form.type, "id": form.id, "once": form.once or once()},
        fields=[FormField(name="args", label="Args", kind="area", value=form.args or "", hint=_JSON_HINT)],
    ).page


@pages.act("/process/repair", role=Role.OPERATE, form=ProcessRepairForm)
async def repair_process_from_page(visit: Visit, form: ProcessRepairForm) -> PageAnswer:
    """Request a repair. The process's page shows the result."""
    try:
        request = ProcessRequest(
            type=form.type, process_id=form.id, kind="repair", args=_args_of_text(form.args), key=form.once
        )
        answer = await _processes(visit).ask(request)
    except (BadRequest, ProcessConflict, IdempotencyConflict) as error:
        return _refused_form(_repair_form(form), error)
    return Redirect(_process_path(form), f"Requested the repair: task {answer.task_id}.")


@pages.show("/processes/new", role=Role.OPERATE, query=ProcessStartForm)
async def ask_start(visit: Visit, query: ProcessStartForm) -> PageAnswer:
    """Ask for the values of a new process."""
    return await _start_form(visit, query)


async def _start_form(visit: Visit, form: ProcessStartForm) -> HtmlPage:
    types = [(name, name) for name in await known_types(visit.services.database) if mask_text(name) == name]
    return Question(
        title="Start a process",
        sentences=["The first step runs as soon as a worker of the type is free."],
        path="/ui/processes/new",
        verb="Start",
        back=_LIST,
        hidden={"once": form.once or once()},
        fields=[
            FormField(name="type", label="Type", value=form.type, required=True, options=types),
            FormField(
                name="id", label="Id", value=form.id, required=True, hint="Unique in its type, such as order-77."
            ),
            FormField(name="args", label="Args of the first step", kind="area", value=form.args or "", hint=_JSON_HINT),
            FormField(
                name="metadata", label="Metadata", kind="area", value=form.metadata or "",
                hint='A flat JSON object for searches, such as {"customer": "ann"}.',
            ),
        ],
    ).page  # fmt: skip


@pages.act("/processes/new", role=Role.OPERATE, form=ProcessStartForm)
async def start_process_from_page(visit: Visit, form: ProcessStartForm) -> PageAnswer:
    """Start a process, and show it."""
    try:
        metadata = None if form.metadata is None else json_of("metadata", form.metadata)
        if metadata is not None and not isinstance(metadata, dict):
            raise BadRequest("metadata", "must be a JSON object")  # noqa: TRY301 - as the store does
        request = ProcessRequest(
            type=form.type,
            process_id=form.id,
            kind="init",
            args=_args_of_text(form.args),
            key=form.once,
            metadata=metadata,
        )
        await _processes(visit).ask(request)
    except (BadRequest, ProcessConflict, IdempotencyConflict) as error:
        return _refused_form(await _start_form(visit, form), error)
    return Redirect(_process_path(form), "Started.")


def _args_of_text(text: str | None) -> Any:
    return None if text is None else json_of("args", text)


_Refusal = BadRequest | ProcessConflict | IdempotencyConflict


def _refused_form(page: HtmlPage, error: _Refusal) -> HtmlPage:
    """Return the form again, with the error above it and the typed values."""
    match error:
        case BadRequest():
            fault, status = f"{error.field}: {error.message}", HTTPStatus.UNPROCESSABLE_ENTITY
        case ProcessConflict():
            fault, status = f"No change: {_conflict_words(error)}", HTTPStatus.CONFLICT
        case _:
            fault = "No change: this form was already sent, with other values. Open the form again."
            status = HTTPStatus.CONFLICT
    ask = attrs.evolve(page.values["ask"], fault=fault)
    return attrs.evolve(page, values={"ask": ask}, status=status)


def _conflict_words(error: ProcessConflict) -> str:
    status = {"init": "has not completed its first step", "running": "is running", "error": "is in error"}[error.status]
    return f"the process {mask_text(error.process_id)} {status}; {error.message}."


_Act = Literal["resume", "stop", "remove"]
_ACTS: Final[dict[_Act, tuple[str, Sequence[str], str, str]]] = {
    "resume": (
        "Resume",
        ["The process continues in its current state: it tries a failed timeout again now, or waits for calls."],
        "Resume the process",
        "Resumed.",
    ),
    "stop": (
        "Stop the step of",
        [
            "The running step is asked to stop, and fails. The process is in error afterwards.",
            "Its timer and its waiting calls are cancelled. The process can be repaired or resumed.",
        ],
        "Stop the step",
        "Requested the stop of the step.",
    ),
    "remove": (
        "Remove",
        [
            "The process is deleted with its state and events. Its ID can be used again.",
            "A running step is stopped, and waiting calls are cancelled.",
        ],
        "Remove the process",
        "Removed.",
    ),
}
"""Title, effect, button and result message of each action."""


def _ask_act(which: WhichProcess, act: _Act) -> HtmlPage:
    verb, does, button, _ = _ACTS[act]
    return Question(
        title=f"{verb} {_process_name(which)}?",
        sentences=does,
        path=f"/ui/process/{act}",
        verb=button,
        back=_process_path(which),
        hidden={"type": which.type, "id": which.id},
        is_harsh=act != "resume",
    ).page


async def _act_and_say(visit: Visit, which: WhichProcess, act: _Act) -> Redirect:
    processes = _processes(visit)
    try:
        await {"resume": processes.resume, "stop": processes.stop, "remove": processes.remove}[act](
            which.type, which.id
        )
    except ProcessConflict as error:
        return Redirect(_process_path(which), f"No change: {_conflict_words(error)}")
    if act == "remove":
        return Redirect(PublicAddress().url(_LIST, {"type": which.type}), f"Removed {_process_name(which)}.")
    return Redirect(_process_path(which), _ACTS[act][3])


@pages.show("/process/resume", role=Role.OPERATE, query=WhichProcess)
async def ask_resume(_visit: Visit, query: WhichProcess) -> PageAnswer:
    """Ask for confirmation of a resume, and say what it does."""
    return _ask_act(query, "resume")


@pages.act("/process/resume", role=Role.OPERATE, form=WhichProcess)
async def resume_process(visit: Visit, form: WhichProcess) -> PageAnswer:
    """Let a process in error continue."""
    return await _act_and_say(visit, form, "resume")


@pages.show("/process/stop", role=Role.OPERATE, query=WhichProcess)
async def ask_stop(_visit: Visit, query: WhichProcess) -> PageAnswer:
    """Ask for confirmation of a stop, and say what it does."""
    return _ask_act(query, "stop")


@pages.act("/process/stop", role=Role.OPERATE, form=WhichProcess)
async def stop_process(visit: Visit, form: WhichProcess) -> PageAnswer:
    """Stop the running step."""
    return await _act_and_say(visit, form, "stop")


@pages.show("/process/remove", role=Role.OPERATE, query=WhichProcess)
async def ask_remove(_visit: Visit, query: WhichProcess) -> PageAnswer:
    """Ask for confirmation of a removal, and say what it does."""
    return _ask_act(query, "remove")


@pages.act("/process/remove", role=Role.OPERATE, form=WhichProcess)
async def remove_process(visit: Visit, form: WhichProcess) -> PageAnswer:
    """Remove a process."""
    return await _act_and_say(visit, form, "remove")


@pages.show("/process/task/<int:task_id>/withdraw", role=Role.OPERATE, query=WhichIdent)
async def ask_withdraw(visit: Visit, task_id: int, query: WhichIdent) -> PageAnswer:
    """Ask for confirmation of a withdrawal, and say what it does."""
    task = await visit.processes.task(task_id, ident=query.ident)
    which = WhichProcess(type=task.type, id=task.process_id)
    back = f"/ui/process/task/{task_id}" if visit.conceals(task.type, task.process_id) else _process_path(which)
    return Question(
        title=f"Withdraw the {what_of(task.kind, task.method)}?",
        sentences=["If the call has not begun, it never runs, and waiting callers get an error."],
        path=f"/ui/process/task/{task_id}/withdraw",
        verb="Withdraw the call",
        back=back,
        hidden={} if task.ident is None else {"ident": str(task.ident)},
        is_harsh=True,
        keep="Keep the call",
    ).page


@pages.act("/process/task/<int:task_id>/withdraw", role=Role.OPERATE, form=WhichIdent)
async def withdraw_call(visit: Visit, task_id: int, form: WhichIdent) -> PageAnswer:
    """Withdraw a call."""
    answer = await _processes(visit).withdraw(task_id, ident=form.ident)
    said = (
        "Withdrawn. The call never runs." if answer.status == "cancelled" else "No change: the call has begun or ended."
    )
    return Redirect(f"/ui/process/task/{task_id}", said)
