"""Commands for queues and for the processes that serve them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from dataloader.cli.cells import Column, cell
from dataloader.cli.output import print_json, print_table, unserved
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.cli.waiting import served_instead
from dataloader.jobs.client.jobs import Jobs

_QUEUES: Final = (
    Column("QUEUE", least=12),
    Column("PAUSED", rank=1),
    Column("WORKERS", rank=1),
    Column("SLOTS", rank=1),
    Column("RUNNING"),
    Column("READY"),
    Column("DELAYED", rank=3),
    Column("BLOCKED", rank=3),
    Column("UNKNOWN_TASK", rank=4),
    Column("DEPENDENT", rank=4),
    Column("LIMITED", rank=4),
    Column("OLDEST_READY", rank=2),
)
_WORKERS: Final = (
    Column("WORKER"),
    Column("HOST", rank=5),
    Column("PID", rank=5),
    Column("VERSION", rank=3),
    Column("STARTED", rank=4),
    Column("SEEN", rank=1),
    Column("QUEUES", least=20),
)


@click.command()
@asks_queue
def queues_command(target: AskedQueue, *, as_json: bool) -> None:
    """List the queues with the numbers of their jobs.

    Shows the queues that are served, are paused, or have jobs that have not ended.
    """
    found = target.ask(lambda jobs: jobs.queues())
    if as_json:
        print_json(found)
        return
    print_table(
        _QUEUES,
        (
            (
                q.queue,
                q.paused,
                q.workers,
                q.slots,
                q.running,
                q.ready,
                q.delayed,
                q.blocked,
                q.unknown_task,
                q.dependent,
                q.limited,
                q.oldest_ready_at,
            )
            for q in found
        ),
        nothing="no queues",
    )


def _slots(queues: Mapping[str, int]) -> str:
    return ", ".join(f"{queue} {slots}" for queue, slots in sorted(queues.items()))


@click.command()
@click.argument("queue")
@asks_queue
def pause_command(target: AskedQueue, *, queue: str, as_json: bool) -> None:
    """Pause QUEUE: none of its jobs start; running jobs continue."""

    async def question(jobs: Jobs) -> list[str] | None:
        await jobs.pause(queue)
        return await served_instead(jobs, queue)

    served = target.ask(question)
    _print_pause(queue, as_json=as_json, paused=True)
    if served is not None:  # the name may be mistyped, so the intended queue is not paused
        click.echo(unserved(queue), err=True)


@click.command()
@click.argument("queue")
@asks_queue
def resume_command(target: AskedQueue, *, queue: str, as_json: bool) -> None:
    """Resume QUEUE."""
    target.ask(lambda jobs: jobs.resume(queue))
    _print_pause(queue, as_json=as_json, paused=False)


def _print_pause(queue: str, *, as_json: bool, paused: bool) -> None:
    if as_json:
        print_json({"queue": queue, "paused": paused})
    else:
        click.echo(f"{cell(queue)}  {'paused' if paused else 'resumed'}")


@click.command()
@asks_queue
def workers_command(target: AskedQueue, *, as_json: bool) -> None:
    """List the worker processes with a recent heartbeat."""
    found = target.ask(lambda jobs: jobs.workers())
    if as_json:
        print_json(found)
        return
    print_table(
        _WORKERS,
        ((w.worker, w.host, w.pid, w.version, w.started_at, w.seen_at, _slots(w.queues)) for w in found),
        nothing="no workers",
    )
