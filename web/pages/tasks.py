"""Task types and their limits: effective values, reasons and times of closures, and operators' actions."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from dataloader.jobs.roles import Role
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.secrets.record_masks import masked
from dataloader.jobs.task_listings import TaskState
from dataloader.web.pages import limit_words
from dataloader.web.pages.addresses import PublicAddress, own_path
from dataloader.web.pages.asking import FormField, Question
from dataloader.web.pages.page_answers import HtmlPage, PageAnswer, Redirect, Undo
from dataloader.web.pages.page_routes import PageRoutes
from dataloader.web.pages.visit import Visit

pages: Final = PageRoutes()

PAGE: Final = 50
REFRESH_S: Final = 2.0

Name = Annotated[str, Meta(min_length=1)]


class TasksQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Page of tasks, by name."""

    after: str | None = None


class TaskTypeQuery(Struct, forbid_unknown_fields=True, kw_only=True):
    """Query with a task."""

    name: Name


class TaskForm(TaskTypeQuery, kw_only=True):
    """Task, and the page to return to."""

    to: str = "/ui/tasks"


class LimitsForm(TaskTypeQuery, kw_only=True):
    """Texts in the fields of a task's limits; `was`: their initial texts."""

    was: str
    work_periods: str | None = None
    zone: str | None = None
    at_period_end: str | None = None
    max_running: str | None = None
    max_running_per_partition: str | None = None
    batch_size: str | None = None
    batch_delay_s: str | None = None
    supplier: str | None = None
    cost: str | None = None
    retry_priority: str | None = None
    retry_delay_s: str | None = None
    max_attempts: str | None = None


class RemoveForm(TaskTypeQuery, kw_only=True):
    """Removal of a task. `jobs` says what to do with its open jobs; without it, they prevent the removal."""

    jobs: Literal["keep", "cancel"] | None = None


def task_page(name: str) -> str:
    """Return the address of a task's page."""
    return PublicAddress().url("/ui/task", {"name": name})


def _row_of_task(state: TaskState) -> dict[str, object]:
    shown = masked(state)
    return {
        "max_running": state.limits.get("max_running"),
        "supplier": state.limits.get("supplier"),
        "supplier_shown": shown.limits.get("supplier"),
        "own": state,
        "task": shown,
        "why": limit_words.why_closed(shown.closed, shown.error),
        "limits": limit_words.limit_rows(limit_words.TASK_LIMITS, shown.declared, shown.override, shown.limits),
    }


@pages.show("/tasks", query=TasksQuery)
async def show_tasks(visit: Visit, query: TasksQuery) -> PageAnswer:
    """Show the task types that processes have declared, by name."""
    page = await visit.limits.tasks(limit=PAGE, after=query.after)
    return HtmlPage(
        "tasks.html", "Tasks", {"tasks": list(map(_row_of_task, page.tasks)), "next": page.next}, refresh_s=REFRESH_S
    )


@pages.show("/task", query=TaskTypeQuery)
async def show_task(visit: Visit, query: TaskTypeQuery) -> PageAnswer:
    """Show a task: whether its jobs may start, its limits, its work periods as a week."""
    state = await visit.limits.task(query.name)
    values = _row_of_task(state) | {
        "week_ranges": limit_words.week_of(state.limits),
        "zone": state.limits.get("zone", "UTC"),
    }
    return HtmlPage("task.html", f"Task {mask_text(state.task)}", values, refresh_s=REFRESH_S)


@pages.act("/tasks/pause", role=Role.OPERATE, form=TaskForm)
async def pause_task(visit: Visit, form: TaskForm) -> PageAnswer:
    """Pause a task."""
    await visit.limits.pause_task(form.name)
    undo = Undo("/ui/tasks/resume", {"name": form.name, "to": own_path(form.to)})
    return Redirect(own_path(form.to), f"Paused {mask_text(form.name)}: none of its jobs start, in any queue.", undo)


@pages.act("/tasks/resume", role=Role.OPERATE, form=TaskForm)
async def resume_task(visit: Visit, form: TaskForm) -> PageAnswer:
    """End a task's pause."""
    await visit.limits.resume_task(form.name)
    undo = Undo("/ui/tasks/pause", {"name": form.name, "to": own_path(form.to)})
    return Redirect(own_path(form.to), f"Resumed {mask_text(form.name)}.", undo)


@pages.show("/tasks/limits", role=Role.ADMIN, query=TaskTypeQuery)
async def ask_task_limits(visit: Visit, query: TaskTypeQuery) -> PageAnswer:
    """Show the form for a task's limits."""
    state = await visit.limits.task(query.name)
    return Question(
        title=f"Limits of {mask_text(state.task)}",
        sentences=[
            "Values set here override the declaration of the program, in all processes. They survive deployments.",
            "Empty: as declared by the program.",
        ],
        path="/ui/tasks/limits",
        hidden={"name": query.name, "was": limit_words.shown_texts(limit_words.TASK_LIMITS, state.override)},
        fields=limit_words.limit_fields(limit_words.TASK_LIMITS, state.override, masked(state).limits),
        verb="Set limits",
        back=task_page(query.name),
    ).page


@pages.act("/tasks/limits", role=Role.ADMIN, form=LimitsForm)
async def set_task_limits(visit: Visit, form: LimitsForm) -> PageAnswer:
    """Override the limits of a task that were changed in the form."""
    given = {limit.name: getattr(form, limit.name) for limit in limit_words.TASK_LIMITS}
    changed = limit_words.changes(limit_words.TASK_LIMITS, form.was, given)
    if not changed:
        return Redirect(task_page(form.name), "The form has no changes.")
    await visit.limits.set_tasks({form.name: changed})
    labels = [limit.label for limit in limit_words.TASK_LIMITS if limit.name in changed]
    return Redirect(task_page(form.name), f"Set: {', '.join(labels)}. Applies from the next claim on.")


@pages.show("/tasks/remove", role=Role.ADMIN, query=TaskTypeQuery)
async def ask_task_removal(visit: Visit, query: TaskTypeQuery) -> PageAnswer:
    """Ask for confirmation of a task's removal, and say what it does."""
    state = await visit.limits.task(query.name)
    choices = (
        ("", "keep the task while it has any"),
        ("keep", "keep them waiting until a process declares the task"),
        ("cancel", "cancel them"),
    )
    return Question(
        title=f"Remove {mask_text(state.task)}",
        sentences=[
            "The task and its limits are removed until a process declares it again.",
            "Running processes start no more of its jobs. Its ended jobs stay.",
        ],
        path="/ui/tasks/remove",
        hidden={"name": query.name},
        fields=[FormField(name="jobs", label="Jobs that have not ended", kind="select", options=choices)],
        verb="Remove",
        back=task_page(query.name),
        is_harsh=True,
        keep="Keep the task",
    ).page


@pages.act("/tasks/remove", role=Role.ADMIN, form=RemoveForm)
async def remove_task(visit: Visit, form: RemoveForm) -> PageAnswer:
    """Forget a task until a process declares it again."""
    await visit.limits.remove_task(form.name, jobs=form.jobs)
    return Redirect("/ui/tasks", f"Removed {mask_text(form.name)}.")
