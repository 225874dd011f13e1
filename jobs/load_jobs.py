"""Jobs of loads and flows: a run, and a retry of failures."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Final, Literal, Unpack

from dataloader.jobs.model import JobOptions, NewJob

Kind = Literal["load", "flow"]
ONE_JOB_QUEUE: Final = "one job "
"""Beginning of the queue names of commands that run one job. No process serves such a queue after its command."""


def load_key(kind: Kind, name: str) -> str:
    """Return the `lock_key` that makes the jobs of a load or flow run one at a time."""
    return f"{kind}:{name}"


def run_of_load(
    name: str,
    *,
    kind: Kind = "load",
    begin: date | str | None = None,
    end: date | str | None = None,
    pipeline: Mapping[str, Any] | None = None,
    **options: Unpack[JobOptions],
) -> NewJob:
    """Return a job that runs a load or a flow, as `Loads.run` describes. Raises `BadRequest`."""
    span = {"from": begin, "to": end}
    args = {name: at.isoformat() if isinstance(at, date) else at for name, at in span.items() if at is not None}
    return _job_of_load(kind, name, args, pipeline, options)


def retry_of_load(
    name: str,
    failures: Sequence[int] | None = None,
    *,
    pipeline: Mapping[str, Any] | None = None,
    **options: Unpack[JobOptions],
) -> NewJob:
    """Return a job that retries failures of a load, as `Loads.retry` describes. Raises `BadRequest`."""
    return _job_of_load("load", name, {"failures": "all" if failures is None else list(failures)}, pipeline, options)


def command_again(task: str, lock_key: str | None, args: Mapping[str, Any], *, where: str | None = None) -> str:
    """Return the command that runs a load or a flow again with these args; `where` is its `--tasks`."""
    words = ["dataloader", "etl", "flow" if lock_key == load_key("flow", task) else "run", task]
    failures, pipeline = args.get("failures"), args.get("pipeline")
    if failures is not None:
        words[2] = "retry"
        numbers = failures if isinstance(failures, list) else ()
        words += [word for number in numbers for word in ("--failure", str(number))]
    options = {"tasks": where, "from": args.get("from"), "to": args.get("to")}
    if isinstance(pipeline, dict):
        options |= {f"pipeline-{name.replace('_', '-')}": value for name, value in pipeline.items()}
    words += [word for name, value in options.items() if value is not None for word in (f"--{name}", str(value))]
    return shlex.join(words)


def _job_of_load(
    kind: Kind, name: str, args: dict[str, Any], pipeline: Mapping[str, Any] | None, options: JobOptions
) -> NewJob:
    if pipeline:
        args["pipeline"] = dict(pipeline)
    known: JobOptions = {"lock_key": load_key(kind, name)}
    return NewJob(task=name, args=args, **(known | options))
