"""Commands for whole queues and for the processes that serve them."""

from __future__ import annotations

import click

from dataloader.supervisor.cli.output import print_json, print_table
from dataloader.supervisor.cli.target import Target, asks_queue


@click.command()
@asks_queue
def queues(target: Target, *, as_json: bool) -> None:
    """List the queues, with the jobs in them that have not ended."""
    found = target.ask(lambda client: client.queues())
    if as_json:
        print_json(found)
        return
    print_table(
        ("QUEUE", "PAUSED", "READY", "RUNNING", "DELAYED", "BLOCKED", "UNKNOWN_TASK", "OLDEST_READY"),
        (
            (q.queue, q.paused, q.ready, q.running, q.delayed, q.blocked, q.unknown_task, q.oldest_ready_at)
            for q in found
        ),
        nothing="no queues",
    )


@click.command()
@click.argument("queue")
@asks_queue
def pause(target: Target, *, queue: str, as_json: bool) -> None:
    """Let no process start jobs of QUEUE; running ones go on."""
    target.ask(lambda client: client.pause(queue))
    _say(queue, as_json=as_json, paused=True)


@click.command()
@click.argument("queue")
@asks_queue
def resume(target: Target, *, queue: str, as_json: bool) -> None:
    """End a pause of QUEUE."""
    target.ask(lambda client: client.resume(queue))
    _say(queue, as_json=as_json, paused=False)


def _say(queue: str, *, as_json: bool, paused: bool) -> None:
    if as_json:
        print_json({"queue": queue, "paused": paused})
    else:
        click.echo(f"{queue}  {'paused' if paused else 'resumed'}")


@click.command()
@asks_queue
def workers(target: Target, *, as_json: bool) -> None:
    """List the processes that serve queues and have been heard of lately."""
    found = target.ask(lambda client: client.workers())
    if as_json:
        print_json(found)
        return
    print_table(
        ("WORKER", "HOST", "PID", "VERSION", "STARTED", "SEEN", "QUEUES"),
        ((w.worker, w.host, w.pid, w.version, w.started_at, w.seen_at, w.queues) for w in found),
        nothing="no workers",
    )
