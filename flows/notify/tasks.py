"""Built-in tasks of notifications, which a process with targets has in addition to the program's tasks."""

from __future__ import annotations

from typing import Final

from dataloader.flows.notify.command import run_command
from dataloader.flows.notify.webhook import send
from dataloader.jobs.args import ArgsType
from dataloader.jobs.job import Job
from dataloader.jobs.notices import COMMAND, QUEUE, WEBHOOK, CommandTarget, Targets, Telling, WebhookTarget
from dataloader.jobs.outcomes import GiveUp
from dataloader.jobs.retry import RetryPolicy
from dataloader.jobs.task import Task

RETRY: Final = RetryPolicy(base_s=10, factor=2, cap_s=3_600)
TIMEOUT_S: Final = 600.0
"""Timeout of a handler. Targets have shorter ones; this one limits a handler that hangs."""


async def tell_webhook(job: Job[Telling]) -> GiveUp | None:
    """Send a notice to a webhook."""
    target = job.resource(Targets).by_name.get(job.args.target)
    if not isinstance(target, WebhookTarget):
        return _gone(job.args.target)
    return await send(target, job.args.notice, delivery=job.job_id)


async def tell_command(job: Job[Telling]) -> GiveUp | None:
    """Run a command with a notice on its standard input."""
    target = job.resource(Targets).by_name.get(job.args.target)
    if not isinstance(target, CommandTarget):
        return _gone(job.args.target)
    return await run_command(target, job.args.notice)


def _gone(name: str) -> GiveUp:
    return GiveUp(f"DL_NOTIFY no longer has a target {name!r} of this kind")


_ARGS: Final = ArgsType(Telling)
TASKS: Final = tuple(
    Task(
        name=name,
        handler=handler,
        is_async=True,
        retry=RETRY,
        timeout_s=TIMEOUT_S,
        args=_ARGS,
        queue=QUEUE,
        description=(handler.__doc__ or "").partition("\n")[0],
    )
    for name, handler in ((WEBHOOK, tell_webhook), (COMMAND, tell_command))
)
