"""OpenTelemetry: a span for each run, a child of the span in which the job was added, whatever process that was.

pip install opentelemetry-distro opentelemetry-exporter-otlp
OTEL_SERVICE_NAME=jobs opentelemetry-instrument dataloader serve --tasks tracing:tasks
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import attrs
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind

from dataloader import AnyJob, Job, Tasks

tracer = trace.get_tracer("jobs")
tasks = Tasks()


def carrier() -> dict[str, str]:
    """Return the current span in the form that a job's args carry."""
    found: dict[str, str] = {}
    propagate.inject(found)
    return found


@attrs.frozen
class Order:
    number: int
    trace: Mapping[str, str] = attrs.field(factory=carrier)


@tasks.around
@contextmanager
def traced(job: AnyJob) -> Iterator[None]:
    parent = propagate.extract(getattr(job.args, "trace", {}))
    attributes: dict[str, str | int] = {
        "messaging.system": "dataloader",
        "messaging.operation.type": "process",
        "messaging.destination.name": job.queue,
        "messaging.message.id": str(job.job_id),
        "dataloader.attempt": job.attempt,
    }
    with tracer.start_as_current_span(f"process {job.task}", parent, SpanKind.CONSUMER, attributes):
        yield  # an error of the handler passes through and is recorded in the span


@tasks.task("order.bill", args=Order, queue="billing")
async def bill(job: Job[Order]) -> int:
    with tracer.start_as_current_span("print the bill"):
        await job.checkpoint()
    return job.args.number
