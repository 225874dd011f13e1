"""What the process counts and times about its jobs (Q5): the actors feed it, `/metrics` reads it.

A method costs less than a microsecond, because each job passes through several of them: numbers go into plain lists and
become Prometheus families only when somebody scrapes. That is safe without locks, since only the Trio thread writes
(the loop's watchdog thread is the one writer of the stalls). Rejected: prometheus_client's own `Counter` and
`Histogram`, which take a lock and walk their buckets at each observation.

What can be read at the scrape (queue depths, pool, listener) is not here: web/api/metrics.py asks for it then.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from dataloader.jobs.secrets.masking import mask_text

LATENCY_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0)
"""Upper bounds for what should take milliseconds: a claim, a pickup, a stall."""
RUN_S: Final = (0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0)
"""Upper bounds for the run of a job."""


class _Distribution:
    """Observations by bucket; the last bucket is what exceeds all bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def __add__(self, other: _Distribution) -> _Distribution:
        both = _Distribution(self.bounds)
        both.counts = [one + another for one, another in zip(self.counts, other.counts, strict=True)]
        both.total = self.total + other.total
        return both

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulated counts by upper bound, as Prometheus has them."""
        found, reached = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            reached += count
            found.append((bound, float(reached)))
        return found


class _ByQueue(defaultdict[str, _Distribution]):
    """A distribution of latencies for each queue, made when it is first used."""

    def __missing__(self, queue: str) -> _Distribution:
        made = self[queue] = _Distribution(LATENCY_S)
        return made


class Telemetry(Collector):
    """The process's counters and histograms. Methods are called on the Trio thread, if they don't say otherwise."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Register with `registry`, where `/metrics` finds it."""
        self._ended: defaultdict[tuple[str, str, str], int] = defaultdict(int)
        self._run_s: dict[tuple[str, str], _Distribution] = {}
        self._claimed: defaultdict[str, int] = defaultdict(int)
        self._claim_s = _ByQueue()
        self._pickup_s = _ByQueue()
        self._stall_s = _Distribution(LATENCY_S)
        self._taken_back: defaultdict[tuple[str, str], int] = defaultdict(int)
        self._leases_lost = 0
        self.endless = 0
        """Running jobs whose lease never ends and that nobody renews, as the reaper has seen them last."""
        self._fenced = 0
        registry.register(self)

    def job_ended(self, queue: str, task: str, outcome: str, run_s: float) -> None:
        """A run ended with `outcome` (succeeded, failed, retry, canceled, …) after `run_s` seconds."""
        self._ended[queue, task, outcome] += 1
        run = self._run_s.get((queue, task))
        if run is None:
            run = self._run_s[queue, task] = _Distribution(RUN_S)
        run.observe(run_s)

    def claimed(self, queue: str, n: int, claim_s: float) -> None:
        """A claim took `claim_s` seconds and brought `n` jobs."""
        self._claimed[queue] += n
        self._claim_s[queue].observe(claim_s)

    def picked_up(self, queue: str, latency_s: float) -> None:
        """A job's handler was started `latency_s` seconds after the job became ready."""
        self._pickup_s[queue].observe(latency_s)

    def taken_back(self, became: Iterable[tuple[str, str]]) -> None:
        """Jobs whose workers had not renewed their leases were taken from them; each one's queue and new status."""
        for queue, status in became:
            self._taken_back[queue, status] += 1

    def lease_lost(self, n: int = 1) -> None:
        """`n` running jobs were stopped because their leases could not be held."""
        self._leases_lost += n

    def fenced(self, n: int = 1) -> None:
        """`n` outcomes were void: the jobs belonged to somebody else by then."""
        self._fenced += n

    def loop_stalled(self, stall_s: float) -> None:
        """The event loop did not turn for `stall_s` seconds. Called by the watchdog, which may be a thread."""
        self._stall_s.observe(stall_s)

    def collect(self) -> Iterator[Metric]:
        """The families, for a scrape."""
        yield _counter(
            "dataloader_jobs_ended", "Runs that ended, by outcome.", ("queue", "task", "outcome"), self._ended
        )
        yield _histogram("dataloader_job_run_seconds", "How long runs took.", ("queue", "task"), self._run_s)
        claimed = {(queue,): n for queue, n in self._claimed.items()}
        yield _counter("dataloader_jobs_claimed", "Jobs claimed.", ("queue",), claimed)
        claim_s = {(queue,): times for queue, times in self._claim_s.items()}
        yield _histogram("dataloader_claim_seconds", "How long claims took.", ("queue",), claim_s)
        pickup_s = {(queue,): times for queue, times in self._pickup_s.items()}
        yield _histogram("dataloader_pickup_seconds", "From ready to started.", ("queue",), pickup_s)
        yield _histogram("dataloader_loop_stall_seconds", "Stalls of the event loop.", (), {(): self._stall_s})
        yield _counter(
            "dataloader_jobs_taken_back",
            "Jobs taken from workers whose leases had ended, by what they became: queued, lost or canceled.",
            ("queue", "status"),
            self._taken_back,
        )
        yield _counter(
            "dataloader_leases_lost",
            "Running jobs stopped because their lease or key could not be held.",
            (),
            {(): self._leases_lost},
        )
        yield GaugeMetricFamily(
            "dataloader_endless_leases", "Running jobs whose lease never ends and that nobody renews.", self.endless
        )
        yield _counter(
            "dataloader_writes_fenced", "Outcomes that came too late and changed nothing.", (), {(): self._fenced}
        )

    def describe(self) -> Iterable[Metric]:
        """The same families; the registry reads their names from it."""
        return self.collect()


def _counter(name: str, about: str, labels: tuple[str, ...], counts: Mapping[Any, int]) -> Metric:
    family = CounterMetricFamily(name, about, labels=labels)
    shown: defaultdict[tuple[str, ...], int] = defaultdict(int)
    for values, count in list(counts.items()):
        shown[_shown(values)] += count
    for texts, count in shown.items():
        family.add_metric(texts, count)
    return family


def _histogram(name: str, about: str, labels: tuple[str, ...], found: Mapping[Any, _Distribution]) -> Metric:
    family = HistogramMetricFamily(name, about, labels=labels)
    shown: dict[tuple[str, ...], _Distribution] = {}
    for values, distribution in list(found.items()):
        texts = _shown(values)
        shown[texts] = shown[texts] + distribution if texts in shown else distribution
    for texts, distribution in shown.items():
        family.add_metric(texts, distribution.buckets(), distribution.total)
    return family


def _shown(values: tuple[str, ...]) -> tuple[str, ...]:
    """Labels without secrets; names that differ in these alone are one series, which Prometheus needs to be unique."""
    return tuple(map(mask_text, values))
