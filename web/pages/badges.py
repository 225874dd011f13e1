"""States as badges: an icon whose shape differs by state, a word, and a color for a state that needs reading."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from markupsafe import Markup

from dataloader.web.pages.formats import inert, words
from dataloader.web.pages.icons import icon

LOOKS: Final[Mapping[str, tuple[str, str]]] = {
    # jobs and runs
    "queued": ("", "ring"),
    "blocked": ("warn", "lock"),
    "delayed": ("later", "sched"),
    "retrying": ("warn", "retry"),
    "running": ("run", "play"),
    "succeeded": ("ok", "ok"),
    "succeeded_with_failures": ("warn", "ok"),
    "failed": ("bad", "x"),
    "canceled": ("", "stop"),
    "lost": ("bad", "bang"),
    "interrupted": ("warn", "bang"),
    # queues, tasks, schedules, suppliers
    "paused": ("warn", "pause"),
    "closed": ("warn", "limits"),
    "open": ("", "ok"),
    "on": ("", "play"),
    "faulty": ("bad", "x"),
    "over": ("", "stop"),
    "retired": ("", "stop"),
    "alive": ("", "play"),
    "gone": ("bad", "bang"),
    "no_worker": ("bad", "bang"),
    # durable processes and their tasks
    "init": ("", "ring"),
    "error": ("bad", "x"),
    "waiting": ("", "ring"),
    "timer": ("later", "sched"),
    "finished": ("ok", "ok"),
    "cancelled": ("", "stop"),
    "refused": ("warn", "stop"),
    "held": ("bad", "x"),
    "retry": ("warn", "retry"),
    # bulk operations
    "in_progress": ("run", "play"),
    "done": ("ok", "ok"),
    "stopped": ("", "stop"),
}
"""Color and icon of each state."""
_BLOCKED: Final = frozenset({"lock", "task", "after", "limit"})


def badge(state: str, text: str | None = None) -> Markup:
    """Return the badge of a state; `text` replaces its name."""
    kind, shape = _look(state)
    return Markup('<span class="badge{}">{}{}</span>').format(
        f" {kind}" * bool(kind), icon(shape), inert(words(state) if text is None else text)
    )


def state_of_job(job: Any) -> str:
    """Return the state of a job as a list shows it: a queued job may be blocked, delayed or retrying."""
    if job.status != "queued" or job.waits_for is None:
        return str(job.status)
    if job.waits_for in _BLOCKED:
        return "blocked"
    return "retrying" if job.attempt else "delayed"


def sign(status: str) -> Markup:
    """Return the icon of a status alone, for a row of results."""
    return icon(_look(status)[1])


def color(state: str) -> str:
    """Return the color of a state, a class; empty for a state that needs no reading."""
    return _look(state)[0]


def _look(state: str) -> tuple[str, str]:
    return LOOKS.get(state, ("", "ring"))
