"""What pipelines count, for `/metrics` (E9): rows, records, requests, failures and runs of each load."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter


class EtlMetrics:
    """The counters of a process."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register with `registry`, where `/metrics` finds it."""
        self._counts = Counter(
            "dataloader_etl",
            "What pipelines have done: requests sent, records, rows inserted, updated and so on, and what failed.",
            ("load", "count"),
            registry=registry,
        )

        self._runs = Counter(
            "dataloader_etl_runs",
            "Runs of loads that ended: succeeded, succeeded_with_failures, failed, canceled or interrupted.",
            ("load", "status"),
            registry=registry,
        )

    def ended(self, load: str, status: str) -> None:
        """Count a run of a load by how it ended."""
        self._runs.labels(load, status).inc()

    def count(self, load: str, counts: Mapping[str, int]) -> None:
        """Add numbers of a load by their names."""
        for name, number in counts.items():
            if number:
                self._counts.labels(load, name).inc(number)
