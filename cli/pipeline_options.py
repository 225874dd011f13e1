"""Options of pipelines, such as `--pipeline-rate-min`, for a process or for one run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import click

_OPTIONS: Final[dict[str, tuple[type, str]]] = {
    "workers": (int, "Number of workers that read and transform responses."),
    "batch_size": (int, "Rows per written batch."),
    "rate_min": (float, "Minimum pause between two requests to a source, in seconds."),
    "rate_max": (float, "Maximum pause, in seconds."),
    "max_failed_segments": (int, "Number of segments that may fail before the run fails."),
    "max_failed_share": (float, "Share of records that may fail before the run fails, from 0 to 1."),
}


def pipeline_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which gets the given ones as `pipeline`, by the names of `PipelineConfig`."""

    @functools.wraps(command)
    def with_pipeline(*args: Any, **options: Any) -> Any:
        given = {name: value for name in _OPTIONS if (value := options.pop(f"pipeline_{name}")) is not None}
        if given:
            _check_pipeline(given)
        return command(*args, pipeline=given, **options)

    for name, (kind, about) in reversed(_OPTIONS.items()):
        add = click.option(f"--pipeline-{name.replace('_', '-')}", type=kind, metavar="NUMBER", help=about)
        with_pipeline = add(with_pipeline)
    return with_pipeline


def _check_pipeline(given: Mapping[str, Any]) -> None:
    """Refuse values that are invalid for all loads, whatever else is set where the load runs."""
    from dataloader.flows.etl.declare.pipeline_config import PipelineConfig  # noqa: PLC0415 - not for --help

    pauses = {"rate_min": 0.0, "rate_max": given.get("rate_min", 0.0)}
    try:
        PipelineConfig(**{**pauses, **given})
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def as_variables(pipeline: Mapping[str, Any]) -> dict[str, str]:
    """Return the options as the equivalent variables, for `load_settings`."""
    from dataloader.flows.etl.declare.pipeline_config import PREFIX  # noqa: PLC0415 - not for --help

    return {PREFIX + name.upper(): str(value) for name, value in pipeline.items()}
