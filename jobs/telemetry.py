"""Counts and durations of a process's jobs: the actors record them, `/metrics` reads them.

Values that can be read at the scrape (queue depths, pool, listener) are not here: web/api/metrics.py reads them then.
"""

from __future__ import annotations

from collections.abc import Iterable

from dataloader.jobs.measures import RUN_S, Counter, Gauge, Histogram, Measure


class Telemetry:
    """Counters and histograms of the process.

    Only the Trio thread writes them, except the stalls, which only the loop's watchdog writes, which may be a thread.
    """

    def __init__(self) -> None:
        """Start with empty measures."""
        self._ended = Counter("dataloader_jobs_ended", "Ended runs, by outcome.", ("queue", "task", "outcome"))
        self._run_s = Histogram("dataloader_job_run_seconds", "Duration of runs.", ("queue", "task"), RUN_S)
        self._claimed = Counter("dataloader_jobs_claimed", "Jobs claimed.", ("queue",))
        self._claim_s = Histogram("dataloader_claim_seconds", "Duration of claims.", ("queue",))
        self._pickup_s = Histogram("dataloader_pickup_seconds", "Time from ready to started.", ("queue",))
        self._stall_s = Histogram("dataloader_loop_stall_seconds", "Stalls of the event loop.")
        self._taken_back = Counter(
            "dataloader_jobs_taken_back",
            "Jobs recovered from workers whose leases had expired, by new status: queued, lost or canceled.",
            ("queue", "status"),
        )
        self._leases_lost = Counter(
            "dataloader_leases_lost", "Running jobs stopped because their lease or key was lost."
        )
        self._endless = Gauge("dataloader_endless_leases", "Running jobs whose lease never expires and is not renewed.")
        self._set_aside = Counter(
            "dataloader_rows_set_aside",
            "Stored rows that a part of the service could not use, and skipped or paused.",
            ("part",),
        )
        self._closed_lanes: dict[object, int] = {}
        self._lanes_closed = Gauge(
            "dataloader_limit_queues_closed", "Limit queues that this process keeps closed because of an error."
        )
        self._fenced = Counter("dataloader_writes_fenced", "Outcomes that arrived too late and had no effect.")
        self._history_changes = Counter(
            "dataloader_history_changes", "Detected restores of the database and promotions of a standby."
        )
        self._children_running = Gauge("dataloader_children_running", "Child processes that run a job.")
        self._children_idle = Gauge("dataloader_children_idle", "Child processes that wait for a job.")
        self._dask_running = Gauge("dataloader_dask_running", "Jobs that use a thread of a Dask cluster.")
        self._dask_threads = Gauge("dataloader_dask_threads", "Threads of connected Dask clusters.")
        self._child_start_s = Histogram("dataloader_child_start_seconds", "Start time of child processes.")
        self._children_ended = Counter(
            "dataloader_children_ended",
            "Ended child processes, by cause: stop (of a job, by a crash, or for processes that it has left),"
            " max_jobs, idle, died (without a job), drain.",
            ("cause",),
        )
        self.measures: tuple[Measure, ...] = (
            self._ended,
            self._run_s,
            self._claimed,
            self._claim_s,
            self._pickup_s,
            self._stall_s,
            self._taken_back,
            self._leases_lost,
            self._endless,
            self._set_aside,
            self._lanes_closed,
            self._fenced,
            self._history_changes,
            self._children_running,
            self._children_idle,
            self._dask_running,
            self._dask_threads,
            self._child_start_s,
            self._children_ended,
        )

    def job_ended(self, queue: str, task: str, outcome: str, run_s: float) -> None:
        """Record a run that ended with `outcome` (succeeded, failed, retry, canceled, …) after `run_s` seconds."""
        self._ended.add(queue, task, outcome)
        self._run_s.observe(run_s, queue, task)

    def claimed(self, queue: str, n: int, claim_s: float) -> None:
        """Record a claim that took `claim_s` seconds and returned `n` jobs."""
        self._claimed.add(queue, number=n)
        self._claim_s.observe(claim_s, queue)

    def started_at_once(self, queue: str) -> None:
        """Record a job that was added as running in this process, without a claim."""
        self._claimed.add(queue)

    def picked_up(self, queue: str, latency_s: float) -> None:
        """Record that a job's handler was started `latency_s` seconds after the job became ready."""
        self._pickup_s.observe(latency_s, queue)

    def taken_back(self, became: Iterable[tuple[str, str]]) -> None:
        """Record the queue and new status of jobs whose workers had not renewed their leases."""
        for queue, status in became:
            self._taken_back.add(queue, status)

    def lease_lost(self, n: int = 1) -> None:
        """Record `n` running jobs that were stopped because their leases could not be held."""
        self._leases_lost.add(number=n)

    def set_aside(self, part: str, n: int) -> None:
        """Record `n` stored rows that a part of the service, such as the scheduler, could not use and skipped."""
        if n:
            self._set_aside.add(part, number=n)

    def found_endless(self, n: int) -> None:
        """Record `n` running jobs whose lease never ends and is not renewed, as found by the reaper."""
        self._endless.value = n

    def lanes_closed(self, entry: object, n: int) -> None:
        """Record that a worker's entry keeps `n` limit queues closed, because the database refuses to evaluate them."""
        if n:
            self._closed_lanes[entry] = n
        else:
            self._closed_lanes.pop(entry, None)
        self._lanes_closed.value = sum(self._closed_lanes.values())

    def fenced(self, n: int = 1) -> None:
        """Record `n` void outcomes: the jobs belonged to another worker by then."""
        self._fenced.add(number=n)

    def history_changed(self) -> None:
        """Record that the database has another history."""
        self._history_changes.add()

    def child_started(self, start_s: float) -> None:
        """Record a child process that needed `start_s` seconds until it could run its first job."""
        self._child_start_s.observe(start_s)

    def child_ended(self, cause: str) -> None:
        """Record the end of a child process."""
        self._children_ended.add(cause)

    def clusters_now(self, running: int, threads: int) -> None:
        """Record that `running` jobs use `threads` available threads of Dask clusters."""
        self._dask_running.value, self._dask_threads.value = running, threads

    def children_now(self, running: int, idle: int) -> None:
        """Record that `running` child processes run a job, and `idle` ones wait for one."""
        self._children_running.value, self._children_idle.value = running, idle

    def loop_stalled(self, stall_s: float) -> None:
        """Record a stall of the event loop of `stall_s` seconds. Called by the watchdog, which may be a thread."""
        self._stall_s.observe(stall_s)
