"""`/metrics`: counts of the actors, and values that are read at the scrape.

The process's measures (jobs/measures.py) become Prometheus families here. Other gauges are made here from the process's
state, the pool, and the queues' depths. The depths are read from the database at most once in five seconds for all
scrapers, and are left out while it does not answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final, TypeVar

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dataloader.jobs.measures import Counter, Distribution, Gauge, Histogram, Measure
from dataloader.jobs.model import QueueRecord
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.processes.gauges import ProcessGauges
from dataloader.store.queue import reads
from dataloader.web.server.connections import Phase
from dataloader.web.services import Services

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
A = TypeVar("A", float, Distribution)
_STATES: Final = ("ready", "delayed", "blocked", "unknown_task", "dependent", "limited", "running")


async def render_metrics(services: Services) -> bytes:
    """Return the metrics in Prometheus' text format. If the database is unavailable or slow, depths are missing."""
    depths = await services.depths.latest()
    processes = await services.process_gauges.latest()
    ping_s = services.http_limits.ping_s
    up = services.state().store_ready and (depths is not None or await reads.answers(services.database.pool, ping_s))
    families = CollectorRegistry()
    families.register(Measured((*services.measures, services.refusals.measure())))
    families.register(_Gauges(services, depths, processes, up=up))
    async with services.turns.scrapes:
        text = generate_latest(families)
        await trio.lowlevel.checkpoint()
    return text


class Measured(Collector):
    """Measures as Prometheus families."""

    def __init__(self, measures: Iterable[Measure]) -> None:
        """Keep the measures. They are read when the families are collected."""
        self._measures = measures

    def collect(self) -> Iterator[Metric]:
        """Yield the families for a scrape."""
        for measure in self._measures:
            match measure:
                case Counter():
                    yield _counter(measure)
                case Histogram():
                    yield _histogram_family(measure)
                case Gauge():
                    yield _gauge(measure.name, measure.about, measure.value)


def _counter(measure: Counter) -> Metric:
    family = CounterMetricFamily(measure.name, measure.about, labels=measure.labels)
    for labels, count in _masked_labels(measure.counts).items():
        family.add_metric(labels, count)
    return family


def _histogram_family(measure: Histogram) -> Metric:
    family = HistogramMetricFamily(measure.name, measure.about, labels=measure.labels)
    for labels, distribution in _masked_labels(measure.distributions).items():
        family.add_metric(labels, _buckets(distribution), distribution.total)
    return family


def _buckets(distribution: Distribution) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound, in Prometheus' form."""
    bounds = (*map(str, distribution.bounds), "+Inf")
    return list(zip(bounds, map(float, accumulate(distribution.counts)), strict=True))


def _masked_labels(found: Mapping[tuple[str, ...], A]) -> dict[tuple[str, ...], A]:
    """Mask secrets in labels, and merge series that then have the same labels: Prometheus requires each once."""
    shown: dict[tuple[str, ...], A] = {}
    for values, value in list(found.items()):
        labels = tuple(map(mask_text, values))
        shown[labels] = shown[labels] + value if labels in shown else value
    return shown


class _Gauges(Collector):
    """State of the process and its queues at one moment."""

    def __init__(
        self, services: Services, depths: list[QueueRecord] | None, processes: ProcessGauges | None, *, up: bool
    ) -> None:
        self._services = services
        self._depths = depths
        self._processes = processes
        self._up = up

    def collect(self) -> Iterator[Metric]:
        state = self._services.state()
        yield InfoMetricFamily(
            "dataloader", "Version and name of this process.", {"version": state.version, "worker": state.worker}
        )
        yield _gauge("dataloader_start_time_seconds", "Start time of the process.", state.started_at.timestamp())
        yield _gauge("dataloader_draining", "1 while the process is shutting down.", state.draining)
        yield _gauge("dataloader_listener_connected", "1 while notifications are received.", state.listener_connected)
        yield _gauge("dataloader_database_up", "1 while the database answers.", self._up)
        pool = GaugeMetricFamily("dataloader_pool_connections", "Connections in the pool.", labels=("state",))
        opened, idle = self._services.database.pool_use()
        pool.add_metric(("used",), opened - idle)
        pool.add_metric(("idle",), idle)
        yield pool
        connections = GaugeMetricFamily(
            "dataloader_http_connections", "Client connections, by state.", labels=("phase",)
        )
        for phase in Phase:
            connections.add_metric((phase.name.lower(),), self._services.connections.count(phase))
        yield connections
        slots = GaugeMetricFamily("dataloader_slots", "Slots of this process.", labels=("queue", "state"))
        counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        for queue, load in state.queues.items():
            counts[mask_text(queue), "used"] += load.running
            counts[mask_text(queue), "free"] += load.concurrency - load.running
        for labels, count in counts.items():
            slots.add_metric(labels, count)
        yield slots
        if self._depths is not None:
            yield from _depth_families(self._depths)
        if self._processes is not None:
            yield from _process_families(self._processes)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=float(value))


def _depth_families(queues: list[QueueRecord]) -> Iterator[Metric]:
    depth = GaugeMetricFamily(
        "dataloader_queue_jobs", "Jobs that have not ended, in all processes.", labels=("queue", "state")
    )
    paused = GaugeMetricFamily("dataloader_queue_paused", "1 while the queue is paused.", labels=("queue",))
    oldest = GaugeMetricFamily(
        "dataloader_queue_oldest_ready_time_seconds",
        "Time since which the oldest ready job has waited.",
        labels=("queue",),
    )
    for queue in queues:
        for state in _STATES:
            depth.add_metric((queue.queue, state), getattr(queue, state))
        paused.add_metric((queue.queue,), queue.paused)
        if queue.oldest_ready_at is not None:
            oldest.add_metric((queue.queue,), queue.oldest_ready_at.timestamp())
    yield depth
    yield paused
    yield oldest


def _process_families(gauges: ProcessGauges) -> Iterator[Metric]:
    """Yield the families for a scrape. Names that differ only in their secrets are one series."""
    processes: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    for (process_type, version, status), count in gauges.processes.items():
        processes[mask_text(process_type), str(version), status] += count
    yield _family("dataloader_processes", "Durable processes.", ("type", "version", "status"), processes)
    calls: defaultdict[tuple[str, ...], float] = defaultdict(int)
    oldest: dict[tuple[str, ...], float] = {}
    for one in gauges.calls:
        labels = (mask_text(one.type),)
        calls[labels] += one.waiting
        oldest[labels] = min(oldest.get(labels, float("inf")), one.oldest_at.timestamp())
    yield _family("dataloader_process_calls_waiting", "Waiting starts, calls and repairs.", ("type",), calls)
    yield _family(
        "dataloader_process_oldest_call_time_seconds",
        "Time since which the oldest of them has waited.",
        ("type",),
        oldest,
    )
    sinks = {(mask_text(one.sink),): one for one in gauges.sinks}
    for name, about, value in (
        ("rows", "Waiting deliveries.", "waiting"),
        ("held_up", "Processes whose deliveries have failed and are retried or held.", "held_up"),
        ("held", "Processes whose deliveries are held for an operator.", "held"),
    ):
        values = {labels: float(getattr(one, value)) for labels, one in sinks.items()}
        yield _family(f"dataloader_process_outbox_{name}", about, ("sink",), values)
    since = {labels: one.oldest_at.timestamp() for labels, one in sinks.items() if one.oldest_at is not None}
    yield _family(
        "dataloader_process_outbox_oldest_time_seconds",
        "Time since which the oldest delivery has waited.",
        ("sink",),
        since,
    )


def _family(name: str, about: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, about, labels=labels)
    for given, value in values.items():
        family.add_metric(given, value)
    return family
