"""`/metrics`: what the actors have counted, and what can be read at the moment of the scrape (Q5).

Counters and histograms live in jobs/telemetry.py and come from the process's registry. Gauges are made here out of the
process's state, the pool, and the queues' depths; the depths come from the database, at most once in five seconds
however many scrape, and are left out while it does not answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from dataloader.jobs.model import QueueRecord
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.queue import reads
from dataloader.web.server.connections import Phase
from dataloader.web.services import Services

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
PING_S: Final = 2.0
_STATES: Final = ("ready", "delayed", "blocked", "unknown_task", "running")


async def render(services: Services) -> bytes:
    """The metrics in Prometheus' text format. While the database is gone, or slow to count, the depths are missing."""
    depths = await services.depths.latest()
    up = services.state().store_ready and (depths is not None or await reads.answers(services.database, PING_S))
    gauges = CollectorRegistry()
    gauges.register(_Gauges(services, depths, up=up))
    async with services.turns.scrapes:
        text = generate_latest(services.registry) + generate_latest(gauges)
        await trio.lowlevel.checkpoint()
    return text


class _Gauges(Collector):
    """The process and its queues at one moment."""

    def __init__(self, services: Services, depths: list[QueueRecord] | None, *, up: bool) -> None:
        self._services = services
        self._depths = depths
        self._up = up

    def collect(self) -> Iterator[Metric]:
        state = self._services.state()
        yield InfoMetricFamily("dataloader", "The process.", {"version": state.version, "worker": state.worker})
        yield _gauge("dataloader_start_time_seconds", "When the process started.", state.started_at.timestamp())
        yield _gauge("dataloader_draining", "1 while the process shuts down.", state.draining)
        yield _gauge("dataloader_listener_connected", "1 while notifications arrive.", state.listener_connected)
        yield _gauge("dataloader_database_up", "1 while the database answers.", self._up)
        pool = GaugeMetricFamily("dataloader_pool_connections", "Connections of the pool.", labels=("state",))
        opened, idle = self._services.database.pool_use()
        pool.add_metric(("used",), opened - idle)
        pool.add_metric(("idle",), idle)
        yield pool
        connections = GaugeMetricFamily(
            "dataloader_http_connections", "Connections of clients, by what they do.", labels=("phase",)
        )
        for phase in Phase:
            connections.add_metric((phase.name.lower(),), self._services.connections.count(phase))
        yield connections
        slots = GaugeMetricFamily("dataloader_slots", "Slots of this process.", labels=("queue", "state"))
        counts: Counter[tuple[str, str]] = Counter()
        for queue, load in state.queues.items():
            counts[mask_text(queue), "used"] += load.running
            counts[mask_text(queue), "free"] += load.concurrency - load.running
        for labels, count in counts.items():
            slots.add_metric(labels, count)
        yield slots
        if self._depths is not None:
            yield from _depth_families(self._depths)


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=float(value))


def _depth_families(queues: list[QueueRecord]) -> Iterator[Metric]:
    depth = GaugeMetricFamily(
        "dataloader_queue_jobs", "Jobs that have not ended, in all processes.", labels=("queue", "state")
    )
    paused = GaugeMetricFamily("dataloader_queue_paused", "1 while nothing is started.", labels=("queue",))
    oldest = GaugeMetricFamily(
        "dataloader_queue_oldest_ready_time_seconds", "Since when the oldest ready job waits.", labels=("queue",)
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
