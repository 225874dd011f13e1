"""List of the libraries on top of the queue, with their resources and measures. Add a new library here.

A handler finds the resources by their type (`job.resource`). `/metrics` shows the measures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from dataloader.flows.etl.declare.pipeline_config import PipelineSettings
from dataloader.flows.etl.run.load_metrics import LoadMetrics
from dataloader.jobs.measures import Measure
from dataloader.jobs.process_outbox import NOBODY, ProcessOutbox, Sink, Sinks
from dataloader.jobs.process_telemetry import ProcessTelemetry


@attrs.frozen
class Libraries:
    """Resources and measures of a process's libraries."""

    resources: Mapping[object, Any]
    measures: Sequence[Measure]


def libraries_of(pipeline: PipelineSettings, sinks: Sequence[Sink] = (), outbox: ProcessOutbox = NOBODY) -> Libraries:
    """Return the libraries of a process. `pipeline` are the settings of its loads, `sinks` receive process events."""
    loads, processes = LoadMetrics(), ProcessTelemetry()
    return Libraries(
        {
            LoadMetrics: loads,
            PipelineSettings: pipeline,
            ProcessTelemetry: processes,
            ProcessOutbox: outbox,
            Sinks: Sinks({sink.name: sink for sink in sinks}),
        },
        (*loads.measures, *processes.measures),
    )
