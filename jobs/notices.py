"""Notices: what operators are told of failures (S6), and the targets that are told.

A notice is about a group: failures of one task, or of one schedule, with the same error but for what differs from one
to the next. Each is a job for each target, so that it is tried again and is there after a crash.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal, TypeAlias, get_args
from uuid import UUID

import attrs

NoticeKind = Literal["failed", "lost", "schedule_paused", "left_out", "process_failed"]
KINDS: Final[tuple[NoticeKind, ...]] = get_args(NoticeKind)
QUEUE: Final = "notifications"
"""The queue of the jobs that tell, which each process with targets serves."""
SLOTS: Final = 2
WEBHOOK: Final = "notify.webhook"
COMMAND: Final = "notify.command"
MAX_JOBS: Final = 10
"""The most ids of jobs that a notice names."""


@attrs.frozen(kw_only=True)
class WebhookTarget:
    """An address that gets notices as JSON; `secret` signs them. `kinds` are those that it is told of."""

    name: str
    url: str = attrs.field(repr=False)
    secret: str = attrs.field(repr=False)
    kinds: tuple[NoticeKind, ...] = KINDS

    @property
    def task(self) -> str:
        """The task of the jobs that tell it."""
        return WEBHOOK


@attrs.frozen(kw_only=True)
class CommandTarget:
    """A program that gets each notice as JSON on its standard input, and has `timeout_s` seconds for it."""

    name: str
    argv: tuple[str, ...] = attrs.field(repr=False)
    timeout_s: float = 30.0
    kinds: tuple[NoticeKind, ...] = KINDS

    @property
    def task(self) -> str:
        """The task of the jobs that tell it."""
        return COMMAND


Target: TypeAlias = WebhookTarget | CommandTarget


@attrs.frozen
class Targets:
    """The targets of a process, by name: a handler finds them by this type."""

    by_name: dict[str, Target]


@attrs.frozen(kw_only=True)
class Notice:
    """What a target is told: how often something failed since it was told last, when, and which jobs.

    `name` is the task of `failed` and `lost` jobs, of processes their type, else the schedule. `error` is the newest
    one's first line, `group` what all have in common; secrets in them are masked. `job_ids` are some of the jobs, the
    first ones.
    """

    kind: NoticeKind
    name: str
    queue: str | None
    group: str
    error: str
    times: int
    first_at: datetime
    last_at: datetime
    told_before_at: datetime | None
    job_ids: tuple[UUID, ...]


@attrs.frozen(kw_only=True)
class Telling:
    """The args of a job that tells: the target's name in the settings, and the notice."""

    target: str
    notice: Notice
