"""Notices, which report failures to operators, and their targets.

A notice is about a group: failures of one task, or of one schedule, with the same error after replacement of the parts
that differ. Each notice is a job for each target, so that it is retried and survives a crash.
"""

from __future__ import annotations

from datetime import datetime
from typing import Final, Literal, TypeAlias, get_args
from uuid import UUID

import attrs

NoticeKind = Literal["failed", "lost", "schedule_paused", "left_out", "process_failed"]
KINDS: Final[tuple[NoticeKind, ...]] = get_args(NoticeKind)
QUEUE: Final = "notifications"
"""Queue of the jobs that send notices, which each process with targets serves."""
SLOTS: Final = 2
WEBHOOK: Final = "notify.webhook"
COMMAND: Final = "notify.command"
MAX_JOBS: Final = 10
"""Maximum number of job IDs in a notice."""


@attrs.frozen(kw_only=True)
class WebhookTarget:
    """URL that gets notices of the given `kinds` as JSON; `secret` signs them."""

    name: str
    url: str = attrs.field(repr=False)
    secret: str = attrs.field(repr=False)
    kinds: tuple[NoticeKind, ...] = KINDS

    @property
    def task(self) -> str:
        """Task of the jobs that send its notices."""
        return WEBHOOK


@attrs.frozen(kw_only=True)
class CommandTarget:
    """Program that gets each notice as JSON on its standard input, and has `timeout_s` seconds to handle it."""

    name: str
    argv: tuple[str, ...] = attrs.field(repr=False)
    timeout_s: float = 30.0
    kinds: tuple[NoticeKind, ...] = KINDS

    @property
    def task(self) -> str:
        """Task of the jobs that send its notices."""
        return COMMAND


Target: TypeAlias = WebhookTarget | CommandTarget


@attrs.frozen
class Targets:
    """Targets of a process, by name; handlers find them by this type."""

    by_name: dict[str, Target]


@attrs.frozen(kw_only=True)
class Notice:
    """Notice for a target: how often a failure occurred since the last notice, when, and in which jobs.

    `name` is the task of `failed` and `lost` jobs, the type of processes, or the schedule. `error` is the first line of
    the newest error, `group` the common part of all; secrets in them are masked. `job_ids` are the first of the jobs.
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
    """Args of a job that sends a notice: the target's name in the settings, and the notice."""

    target: str
    notice: Notice
