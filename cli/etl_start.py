"""Commands that start pipelines: `etl run`, `etl retry`, `etl flow`.

Each adds a job for a running service and waits for it. With `--tasks` it runs the job in this process. One run of a
load runs at a time: its jobs wait for their lock_key, or snooze.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, Final

import attrs
import click

from dataloader.cli.arguments import day_or_instant
from dataloader.cli.entry import INTERRUPTED, NOT_SUCCEEDED
from dataloader.cli.etl_screen import JobScreen, open_job_screen, print_summary
from dataloader.cli.output import print_json, print_to_stderr, unknown_task
from dataloader.cli.pipeline_options import pipeline_options
from dataloader.cli.target import AskedQueue, asks_queue, provide_server
from dataloader.cli.task_module import load_tasks, path_option
from dataloader.cli.waiting import is_known, knows_task, served_instead, wait_for_end
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.errors import BadRequest, ConfigError, DataloaderError
from dataloader.jobs.load_jobs import Kind, command_again, retry_of_load, run_of_load
from dataloader.jobs.model import Enqueued, JobRecord, NewJob
from dataloader.jobs.states import Status
from dataloader.jobs.tasks import Tasks
from dataloader.supervisor.settings_layers import load_settings

QUEUE: Final = "default"
PRODUCER: Final = "dataloader etl"

tasks_option = click.option(
    "--tasks", "where", metavar="MODULE:ATTR", help="Run it in this process, without a service."
)


@attrs.frozen(kw_only=True)
class _How:
    """Place where a job is to run, and whether to wait for it."""

    target: AskedQueue
    queue: str | None
    wait: bool | None
    where: str | None
    as_json: bool


def _starts_a_job(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the job's place to a command, which gets them as the first argument, a `_How`."""

    @functools.wraps(command)
    def with_how(
        target: AskedQueue, *, queue: str | None, wait: bool | None, where: str | None, as_json: bool, **options: Any
    ) -> Any:
        if where is not None and (queue is not None or wait is not None or target.url is not None):
            raise click.UsageError(
                "--tasks runs it in this process, so it excludes --queue, --wait, --no-wait and --url"
            )
        return command(_How(target=target, queue=queue, wait=wait, where=where, as_json=as_json), **options)

    decorated: Callable[..., Any] = with_how
    for decorate in (
        asks_queue,
        path_option,
        tasks_option,
        click.option(
            "--wait/--no-wait",
            default=None,
            help="Wait until it has ended; exit 3 unless it succeeded.  [default: wait]",
        ),
        click.option("--queue", help="Queue of a service that has the task.  [default: the task's queue]"),
    ):
        decorated = decorate(decorated)
    return decorated


def windows_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--from` and `--to` to a command, which gets the given ones as `windows`, by these names."""

    @functools.wraps(command)
    def with_windows(*args: Any, since: str | None, until: str | None, **options: Any) -> Any:
        if since is not None and until is not None and _ends_before(since, until):
            raise click.UsageError(f"--from must be before --to: {since} is not before {until}")
        windows = {name: text for name, text in (("from", since), ("to", until)) if text is not None}
        return command(*args, windows=windows, **options)

    until = click.option(
        "--to",
        "until",
        type=day_or_instant,
        metavar="DATE",
        help="Load data before this date or timestamp, or before a duration ago: 2h, 7d.",
    )
    since = click.option(
        "--from",
        "since",
        type=day_or_instant,
        metavar="DATE",
        help="Load data from this date or timestamp, or from a duration ago: 2h, 7d.  [default: the watermark]",
    )
    return since(until(with_windows))


def _ends_before(since: str, until: str) -> bool:
    """Return whether a span is empty. If only one end has a time zone, the load's zone decides later."""
    begin, end = map(datetime.fromisoformat, (since, until))
    return (begin.tzinfo is None) == (end.tzinfo is None) and begin >= end


@click.command("run")
@click.argument("load")
@windows_options
@pipeline_options
@_starts_a_job
def etl_run_command(how: _How, *, load: str, windows: Mapping[str, str], pipeline: Mapping[str, Any]) -> int:
    """Run LOAD incrementally, or backfill from --from to --to.

    Enqueues a job for a running service and waits for it; ^C ends the wait, not the job. With --tasks the job runs in
    this process, and ^C cancels it: records already received are still written.
    """
    return _start_run(how, "load", load, windows, pipeline)


@click.command("retry")
@click.argument("load")
@click.option(
    "--failure",
    "numbers",
    type=click.IntRange(1, 2**63 - 1),
    multiple=True,
    metavar="ID",
    help="Retry only this failure; may be repeated.",
)
@pipeline_options
@_starts_a_job
def etl_retry_command(how: _How, *, load: str, numbers: tuple[int, ...], pipeline: Mapping[str, Any]) -> int:
    """Retry the unresolved failures of LOAD.

    Retries all of them, or only those of --failure. Otherwise like `dataloader etl run`.
    """
    new = retry_of_load(load, numbers or None, pipeline=pipeline, queue=how.queue, producer=PRODUCER)
    return _start_job(how, "load", new)


@click.command("flow")
@click.argument("name")
@windows_options
@pipeline_options
@_starts_a_job
def etl_flow_command(how: _How, *, name: str, windows: Mapping[str, str], pipeline: Mapping[str, Any]) -> int:
    """Run the flow NAME.

    Its loads run layer by layer, as one run. Otherwise like `dataloader etl run`.
    """
    return _start_run(how, "flow", name, windows, pipeline)


def _start_run(how: _How, kind: Kind, name: str, windows: Mapping[str, str], pipeline: Mapping[str, Any]) -> int:
    begin, end = windows.get("from"), windows.get("to")
    new = run_of_load(name, kind=kind, begin=begin, end=end, pipeline=pipeline, queue=how.queue, producer=PRODUCER)
    return _start_job(how, kind, new)


def _start_job(how: _How, kind: Kind, new: NewJob) -> int:
    if how.where is not None:
        return _run_here(how, kind, new, load_tasks(how.where))
    if how.wait is False:
        return _add_job(how, new)
    added: list[Enqueued] = []
    screen = open_job_screen(new.task, as_json=how.as_json)
    try:
        with screen:
            job = how.target.ask(functools.partial(_add_and_wait, new, added, screen))
    except click.Abort:
        for one in added:
            click.echo(f"the job continues; cancel it with `dataloader cancel {one.job_id}`", err=True)
        raise
    return _print_load_end(how, job)


def _add_job(how: _How, new: NewJob) -> int:
    async def question(jobs: Jobs) -> tuple[Enqueued, str | None]:
        enqueued = await _enqueue_in_known_queue(jobs, new)
        return enqueued, await _why_never(jobs, enqueued.queue, new.task)

    enqueued, warning = how.target.ask(question)
    if how.as_json:
        print_json(enqueued)
    else:
        click.echo(f"{enqueued.job_id}  {enqueued.status}")
    if warning is not None:
        click.echo(f"the job waits: {warning}", err=True)
    return 0


async def _add_and_wait(new: NewJob, added: list[Enqueued], screen: JobScreen, jobs: Jobs) -> JobRecord:
    known = new.queue is None and await is_known(jobs, new.task)
    if not known and (reason := await _why_never(jobs, new.queue or QUEUE, new.task)):
        raise DataloaderError(f"no job was enqueued, because it would never run: {reason}")
    enqueued = await _enqueue_in_known_queue(jobs, new)
    # Only the answer has the queue of the load.
    if known and (reason := await _why_never(jobs, enqueued.queue, new.task)):
        await jobs.cancel(enqueued.job_id)
        raise DataloaderError(f"the job was canceled, because it would never run: {reason}")
    added.append(enqueued)
    return await wait_for_end(jobs, added[0].job_id, timeout_s=math.inf, on_change=screen.changed, tell=print_to_stderr)


async def _enqueue_in_known_queue(jobs: Jobs, new: NewJob) -> Enqueued:
    """Add the job to its queue, by default that of its load, or to `QUEUE` if no service has declared the load."""
    try:
        [enqueued] = await jobs.enqueue_many([new])
    except BadRequest as error:
        if new.queue is not None or not error.field.endswith("queue"):
            raise
        [enqueued] = await jobs.enqueue_many([attrs.evolve(new, queue=QUEUE)])
    return enqueued


async def _why_never(jobs: Jobs, queue: str, task: str) -> str | None:
    """Return why no worker would claim a job of the task from the queue; None if one would."""
    served = await served_instead(jobs, queue)
    if served is None:
        return None if await knows_task(jobs, queue, task) else unknown_task(queue, task)
    others = f"; served queues (--queue): {', '.join(served)}" if served else ""
    return f"no process serves the queue {queue!r}{others}; start `dataloader serve --tasks …`, or run it with --tasks"


def _run_here(how: _How, kind: Kind, new: NewJob, tasks: Tasks) -> int:
    import trio  # noqa: PLC0415 - not for --help

    from dataloader.cli.one_job import run_job  # noqa: PLC0415
    from dataloader.supervisor.logs import configure_logging  # noqa: PLC0415

    check_known(new.task, kind, tasks, how.where)
    settings = load_settings(overrides={"data_dir": how.target.data_dir})
    with provide_server(settings, create=True) as (provided, server):
        screen = open_job_screen(new.task, as_json=how.as_json)
        with screen:
            # The job stores its own lines, and the summary reports its end, except for a traceback.
            configure_logging("console" if settings.log_format == "auto" else settings.log_format, "warning")
            logging.getLogger("dataloader.actors.runner").addFilter(_has_traceback)
            outcome = trio.run(
                functools.partial(run_job, on_change=screen.changed, server=server), provided, tasks, new
            )
    if outcome.job is None:
        return INTERRUPTED
    code = _print_load_end(how, outcome.job)
    if outcome.interrupted and outcome.job.status is Status.CANCELED:
        again = command_again(new.task, new.lock_key, new.args, where=how.where)
        click.echo(f"the rows that it has written are kept; continue with `{again}`", err=True)
    return INTERRUPTED if outcome.interrupted else code


def _has_traceback(record: logging.LogRecord) -> bool:
    line: Any = record.msg
    return record.exc_info is not None or "exception" in line.fields


def check_known(name: str, kind: Kind, tasks: Tasks, where: str | None) -> None:
    """Refuse a name that is not a task's, and a task that is not a load (or flow); name the valid ones.

    A set of dimensions is a flow as well.
    """
    from dataloader.flows.etl.declare.load import Load  # noqa: PLC0415 - not for --help
    from dataloader.flows.etl.flow.flow import Flow  # noqa: PLC0415
    from dataloader.flows.etl.run.etl_task import names_of  # noqa: PLC0415

    if name not in tasks:
        raise ConfigError(f"--tasks: {where} has no task {name!r}; its tasks: {', '.join(sorted(tasks)) or 'none'}")
    known = names_of(tasks, Load if kind == "load" else Flow)
    if name not in known:
        raise ConfigError(f"--tasks: task {name!r} is not a {kind}; {kind}s of {where}: {', '.join(known) or 'none'}")


def _print_load_end(how: _How, job: JobRecord) -> int:
    if how.as_json:
        print_json(job)
    else:
        print_summary(job)
    return 0 if job.status is Status.SUCCEEDED else NOT_SUCCEEDED
