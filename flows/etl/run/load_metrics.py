"""Counters of pipelines for `/metrics`: rows, records, requests, failures and runs of each load."""

from __future__ import annotations

from collections.abc import Mapping

from dataloader.jobs.measures import Counter, Measure


class LoadMetrics:
    """Counters of a process."""

    def __init__(self) -> None:
        """Begin with empty counters."""
        self._counts = Counter(
            "dataloader_etl",
            "Counts of loads: requests sent, records, rows inserted, updated and so on, and failures.",
            ("load", "count"),
        )
        self._runs = Counter(
            "dataloader_etl_runs",
            "Ended runs of loads: succeeded, succeeded_with_failures, failed, canceled or interrupted.",
            ("load", "status"),
        )
        self.measures: tuple[Measure, ...] = (self._counts, self._runs)

    def ended(self, load: str, status: str) -> None:
        """Count a run of a load by its status."""
        self._runs.add(load, status)

    def count(self, load: str, counts: Mapping[str, int]) -> None:
        """Add numbers of a load by their names."""
        for name, number in counts.items():
            if number:
                self._counts.add(load, name, number=number)
