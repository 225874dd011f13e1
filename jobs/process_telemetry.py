"""Counts and durations of durable processes in an operating-system process.

The histograms have the names, labels and units that dashboards of such engines expect: milliseconds, with the type in
`prg_namespace`. The counters are ours.
"""

from __future__ import annotations

from typing import Final

from dataloader.jobs.measures import Counter, Histogram, Measure
from dataloader.jobs.process_outbox import MESSAGES

BOUNDS_MS: Final = (1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 150.0, 300.0, 500.0, 750.0, 1000.0)
_TYPE: Final = "prg_namespace"
_COMPLETIONS: Final = {
    "timeout": "complete_and_continue",
    "remove": "complete_and_continue",
    "suspend": "complete_and_suspend",
}


def _duration_histogram(name: str, about: str, *labels: str) -> Histogram:
    return Histogram(f"progressor_{name}_duration_ms", about, (_TYPE, *labels), BOUNDS_MS)


class ProcessTelemetry:
    """Counters and histograms, written only by the Trio thread."""

    def __init__(self) -> None:
        """Start with empty measures."""
        self._calls = _duration_histogram(
            "calls_scanning", "Statements that assigned a call, an init or a repair to a run."
        )
        self._timers = _duration_histogram("timers_scanning", "Statements that assigned a due timer to a run.")
        self._zombies_ms = _duration_histogram("zombie_collection", "Statements that found a step of a lost worker.")
        self._prepared = _duration_histogram(
            "request_preparing", "Duration of requests until they were stored.", "task_type"
        )
        self._processed = _duration_histogram("task_processing", "Duration of step functions.", "task_type")
        self._completed = _duration_histogram(
            "task_completion",
            "Statements that stored the outcome of a step, by its effect on the timer.",
            "completion_type",
        )
        self._removed = _duration_histogram("process_removing", "Statements in which a step removed its process.")
        self._delivered_ms = _duration_histogram("notification", "Deliveries, by kind.", "notification_type")
        self._deliveries = Counter(
            "dataloader_process_deliveries",
            "Delivery tries to a sink, or of a message, by result.",
            ("sink", "outcome"),
        )
        self._steps = Counter("dataloader_process_steps", "Steps, by result.", ("type", "kind", "outcome"))
        self._zombies = Counter("dataloader_process_zombies", "Processes found with a lost worker.", ("type",))
        self._void = Counter("dataloader_process_commits_void", "Outcomes of steps that arrived too late.", ("type",))
        self.measures: tuple[Measure, ...] = (
            self._calls,
            self._timers,
            self._zombies_ms,
            self._prepared,
            self._processed,
            self._completed,
            self._removed,
            self._delivered_ms,
            self._deliveries,
            self._steps,
            self._zombies,
            self._void,
        )

    def asked(self, process_type: str, kind: str, took_s: float) -> None:
        """Record a request that was stored, or refused because of stored data."""
        self._prepared.observe(took_s * 1e3, process_type, kind)

    def begun(self, process_type: str, verdict: str, kind: str | None, took_s: float) -> None:
        """Record a run that got its first task, of this kind, or a step found without its worker."""
        if verdict == "zombie":
            self._zombies_ms.observe(took_s * 1e3, process_type)
            self._zombies.add(process_type)
        elif kind is not None:
            scanned = self._timers if kind in {"timeout", "remove"} else self._calls
            scanned.observe(took_s * 1e3, process_type)

    def processed(self, process_type: str, kind: str, outcome: str, took_s: float) -> None:
        """Record the outcome of a step's function."""
        self._processed.observe(took_s * 1e3, process_type, kind)
        self._steps.add(process_type, kind, outcome)

    def delivered(self, sink: str, process_type: str, kind: str, outcome: str, took_s: float) -> None:
        """Record a delivery to a sink or of a message, or its failure."""
        told = "message" if sink == MESSAGES else "event_sink" if kind == "event" else "lifecycle_sink"
        self._delivered_ms.observe(took_s * 1e3, process_type, told)
        self._deliveries.add(sink, outcome)

    def committed(self, process_type: str, verdict: str, outcome: str, following: str, took_s: float) -> None:
        """Record an outcome that was stored, or was void."""
        if verdict == "void":
            self._void.add(process_type)
        elif verdict == "gone":
            self._removed.observe(took_s * 1e3, process_type)
        else:
            completion = (
                "complete_and_error" if outcome == "failed" else _COMPLETIONS.get(following, "complete_and_unlock")
            )
            self._completed.observe(took_s * 1e3, process_type, completion)
