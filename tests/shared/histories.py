"""Checker of recorded histories against docs/guarantees.md, for long runs under faults such as `just chaos`.

A history is everything that was seen from outside: the beginning and the end of each handler, the acknowledgements of
clients, and the final rows. `violations` returns a sentence for each broken guarantee. Times are seconds of one
monotonic clock.

**Runs of suspended processes.** A process that is suspended, or that gets no CPU time, cannot stop its handlers when
their leases end; guarantees.md allows them the grace period after it resumes. So a process writes a line every tenth of
a second, and a pause between two lines is a silence. A run holds its job and its key until it ends, but if its deadline
passes within a silence, only until its deadline.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

SILENCE_S = 0.4
"""Shortest pause between two lines of a process that is a silence. The smallest lease margin is longer: 0.5 s."""
GRACE_S = 5.0
"""DL_CANCEL_GRACE_SEC of the services."""
STARVED_S = 2.0
"""A process with a silence within this time before its end had no time to stop its handlers."""
SLACK_S = 1.0
"""Time on a busy machine between an event and its line; also between its two clocks."""


@attrs.frozen(kw_only=True)
class Run:
    """Run of a handler. `deadlines` are (time of the reading, deadline), the first at the beginning."""

    job: str
    task: str
    process: str
    began: float
    ended: float = math.inf
    how: str = "returned"
    key: str | None = None
    deadlines: tuple[tuple[float, float], ...] = ()
    is_foreign: bool = False

    def __str__(self) -> str:
        return f"{self.task} {self.job} in {self.process} from {self.began:.3f} to {self.ended:.3f} ({self.how})"


@attrs.frozen(kw_only=True)
class Row:
    """Job in its final row. `runs_shown` is false if its handler writes no lines."""

    job: str
    task: str
    status: str
    attempt: int = 1
    max_attempts: int = 5
    refunds: int = 0
    idempotency_key: str | None = None
    ended: float | None = None
    runs_shown: bool = True

    def __str__(self) -> str:
        return f"{self.task} {self.job} ({self.status})"


@attrs.frozen(kw_only=True)
class Node:
    """Job of a graph: the jobs that it runs after, and whether it also runs if one of them fails."""

    after: tuple[str, ...] = ()
    runs_anyway: bool = False


@attrs.frozen
class Limit:
    """Limit of `most` units in any `span_s` seconds; `taken` are (time, units)."""

    name: str
    most: int
    span_s: float
    taken: list[tuple[float, int]]


@attrs.frozen(kw_only=True)
class Plan:
    """Times of a schedule from `begin` to before `end`, the jobs that have one, and the spans with a reason."""

    name: str
    begin: float
    end: float
    period_s: float
    jobs: list[float]
    left_out: list[tuple[float, float]] = attrs.field(factory=list)


@attrs.frozen(kw_only=True)
class Call:
    """Client's call of a counter: add `by`, which no other call adds. `answer` is None if none came."""

    counter: str
    by: int
    asked: float
    answered: float = math.inf
    answer: int | None = None
    tells: bool = False


@attrs.frozen(kw_only=True)
class Loaded:
    """Job of a load over a span of records that no other job of the load has."""

    job: str
    status: str
    segments: tuple[tuple[int, ...], ...]
    """Numbers of the records of each segment."""


@attrs.frozen(kw_only=True)
class Exit:
    """Process that ended by itself or with a wrong exit code, or that has left rows behind. `at` is its last line.

    `lease_was_gone` is true if it reports that it ended because a handler continued without its lease.
    """

    process: str
    at: float
    text: str
    lease_was_gone: bool = False


@attrs.define(kw_only=True)
class History:
    """Everything recorded. `added` are (idempotency key, job) and `canceled` (job, time) from answers to clients."""

    runs: list[Run] = attrs.field(factory=list)
    silences: Mapping[str, Sequence[tuple[float, float]]] = attrs.field(factory=dict)
    outages: list[float] = attrs.field(factory=list)
    """Times at which the database was stopped."""
    rows: list[Row] = attrs.field(factory=list)
    added: list[tuple[str | None, str]] = attrs.field(factory=list)
    canceled: list[tuple[str, float]] = attrs.field(factory=list)
    graph: dict[str, Node] = attrs.field(factory=dict)
    limits: list[Limit] = attrs.field(factory=list)
    most_running: dict[str, int] = attrs.field(factory=dict)
    """Maximum number of running jobs by task."""
    plans: list[Plan] = attrs.field(factory=list)
    booked: list[str] | None = None
    """Jobs of the task `book` whose transaction wrote a row, once for each row."""
    calls: list[Call] = attrs.field(factory=list)
    events: dict[str, list[int]] = attrs.field(factory=dict)
    """Numbers that were added to each counter, in the order of its events."""
    mirrors: dict[str, list[int]] = attrs.field(factory=dict)
    """Numbers that the counter has sent to its mirror."""
    loads: dict[str, tuple[list[Loaded], list[int]]] = attrs.field(factory=dict)
    """Jobs of each load, and the numbers of the records in its table."""
    exits: list[Exit] = attrs.field(factory=list)

    row_of: dict[str, Row] = attrs.field(init=False)
    runs_of: dict[str, list[Run]] = attrs.field(init=False)
    _until: dict[int, float] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.row_of = {row.job: row for row in self.rows}
        self.runs_of = defaultdict(list)
        for run in sorted(self.runs, key=lambda run: run.began):
            self.runs_of[run.job].append(run)
        self._until = {id(run): self._held_until(run) for run in self.runs}

    def until(self, run: Run) -> float:
        """Return until when a run holds its job and its key: see the module's docstring."""
        return self._until[id(run)]

    def _held_until(self, run: Run) -> float:
        silences = self.silences.get(run.process, ())
        first = bisect.bisect_left(silences, run.began - GRACE_S, key=lambda silence: silence[1])
        for quiet, again in itertools.islice(silences, first, None):
            if quiet > run.ended:
                break
            known = [deadline for at, deadline in run.deadlines if at <= quiet]
            # A handler that begins after the silence has the deadline of a claim before it.
            deadline = known[-1] if known else run.deadlines[0][1] if run.deadlines else math.inf
            is_passed = quiet <= deadline <= again if known else quiet <= deadline <= run.began <= again + GRACE_S
            if is_passed and run.ended <= again + GRACE_S + SLACK_S:
                return min(deadline, run.ended)
        return run.ended


def lost(history: History) -> Iterator[str]:
    """Check that each acknowledged job has its row, each idempotency key one job, and each success a run."""
    of_key = {row.idempotency_key: row.job for row in history.rows if row.idempotency_key is not None}
    for key, job in history.added:
        if job not in history.row_of:
            yield f"job {job}, acknowledged for the key {key!r}, has no row"
        elif key is not None and of_key.get(key) != job:
            yield f"the key {key!r} was acknowledged with the job {job}, and belongs to {of_key.get(key)}"
    for job, runs in history.runs_of.items():
        if job not in history.row_of:
            yield f"a job without a row has run: {runs[0]}"
    for row in history.rows:
        # The transaction of `book` is the success: its process may be killed after that.
        runs = [run for run in history.runs_of.get(row.job, ()) if run.how == "returned" or row.task == "book"]
        if row.status == "succeeded" and row.runs_shown and not runs:
            yield f"{row} has succeeded, and no run of it has returned"


def unended(history: History) -> Iterator[str]:
    """Check that each job ends."""
    for row in history.rows:
        if row.status in {"queued", "running"}:
            yield f"{row} has not ended"


def overlaps(history: History) -> Iterator[str]:
    """Check that no two runs of a job or of a key hold it at the same time."""
    for name, of in (("job", lambda run: run.job), ("key", lambda run: run.key)):
        groups = defaultdict(list)
        for run in history.runs:
            if of(run) is not None:
                groups[of(run)].append(run)
        for held, runs in groups.items():
            for first, second in _overlapping(history, runs):
                if name == "job" or first.job != second.job:
                    yield f"{name} {held}: {second} began while {first} held it"


def _overlapping(history: History, runs: Iterable[Run]) -> Iterator[tuple[Run, Run]]:
    holding: list[Run] = []
    for run in sorted(runs, key=lambda run: run.began):
        if history.until(run) <= run.began:
            continue
        holding = [one for one in holding if history.until(one) > run.began]
        yield from ((one, run) for one in holding if _held_against(history, one, run) > run.began)
        holding.append(run)


def _held_against(history: History, run: Run, other: Run) -> float:
    """Return the time until which `run` keeps `other` out.

    Foreign services check only the lock, which ends with the session, and a claim takes it shortly before the run
    begins.
    """
    until = history.until(run)
    if other.is_foreign:
        until = min([until, *(at for at in history.outages if run.began - SLACK_S <= at)])
    return until


def late(history: History) -> Iterator[str]:
    """Check that no run begins after its job's end or a confirmed cancel, and that a confirmed cancel is kept."""
    confirmed: dict[str, float] = {}
    for job, at in history.canceled:
        confirmed[job] = min(at, confirmed.get(job, at))
        if (row := history.row_of.get(job)) and row.status != "canceled":
            yield f"{row} was confirmed to be canceled"
    for run in history.runs:
        row = history.row_of.get(run.job)
        ended = math.inf if row is None or row.ended is None else row.ended + SLACK_S
        if run.began > min(ended, confirmed.get(run.job, math.inf)) and history.until(run) > run.began:
            yield f"{run} began after its job had ended"


def attempts(history: History) -> Iterator[str]:
    """Check that no job runs more often than its attempts and refunds allow, and that none fails with attempts left."""
    for row in history.rows:
        runs = history.runs_of.get(row.job, [])
        if row.attempt > row.max_attempts:
            yield f"{row} has used {row.attempt} of {row.max_attempts} attempts"
        if len(runs) > row.attempt + row.refunds:
            yield f"{row} has run {len(runs)} times: attempt {row.attempt}, {row.refunds} refunds"
        gave_up = any(run.how == "gave up" for run in runs)
        if row.status in {"failed", "lost"} and row.runs_shown and row.attempt < row.max_attempts and not gave_up:
            yield f"{row} has used only {row.attempt} of {row.max_attempts} attempts"


def transactions(history: History) -> Iterator[str]:
    """Check that a job's transaction has written its row once if the job has succeeded, else not at all."""
    if history.booked is None:
        return
    rows = Counter(history.booked)
    for row in history.rows:
        if row.task == "book" and rows[row.job] != (row.status == "succeeded"):
            yield f"{row} has written {rows[row.job]} rows"


def limits(history: History) -> Iterator[str]:
    """Check that no span exceeds its rate limit, and that no task exceeds its concurrency limit."""
    for limit in history.limits:
        most, at = fullest_span(limit.taken, limit.span_s)
        if most > limit.most:
            yield f"{limit.name}: {most} units in the {limit.span_s:g} s up to {at:.3f}, {limit.most} are allowed"
    for task, allowed in history.most_running.items():
        spans = [(run.began, history.until(run)) for run in history.runs if run.task == task]
        steps = [(at, step) for began, until in spans if until > began for at, step in ((began, 1), (until, -1))]
        if (most := max(itertools.accumulate(step for _, step in sorted(steps)), default=0)) > allowed:
            yield f"{most} jobs of {task} ran at once, {allowed} are allowed"


def most_within(taken: Iterable[tuple[float, int]], span_s: float) -> int:
    """Return the largest number of units in any span, its end exclusive."""
    return fullest_span(taken, span_s)[0]


def fullest_span(taken: Iterable[tuple[float, int]], span_s: float) -> tuple[int, float]:
    """Return the largest number of units in any span, its end exclusive, and the time of the last of them."""
    ordered = sorted(taken)
    most, units, first, last = 0, 0, 0, math.nan
    for at, number in ordered:
        units += number
        while ordered[first][0] <= at - span_s:
            units -= ordered[first][1]
            first += 1
        if units > most:
            most, last = units, at
    return most, last


def schedules(history: History) -> Iterator[str]:
    """Check that each planned time has one job or a reason, and that no job has a time that was not planned."""
    for plan in history.plans:
        jobs = Counter(round(at, 3) for at in plan.jobs)
        number = round((plan.end - plan.begin) / plan.period_s)
        times = [round(plan.begin + place * plan.period_s, 3) for place in range(number)]
        for at in times:
            is_left_out = any(first - 0.01 <= at <= last + 0.01 for first, last in plan.left_out)
            if jobs[at] + is_left_out != 1:
                found = f"{jobs[at]} jobs" + " and a reason" * is_left_out
                yield f"schedule {plan.name}: the time {at} has {found}"
        for at in jobs.keys() - set(times):
            yield f"schedule {plan.name}: a job has the time {at}, which was not planned"


def graphs(history: History) -> Iterator[str]:
    """Check that a job of a graph begins after its predecessors, and is canceled exactly if one does not succeed."""
    for job, node in history.graph.items():
        row, before = history.row_of.get(job), [history.row_of[one] for one in node.after if one in history.row_of]
        if row is None or any(one.status in {"queued", "running"} for one in [row, *before]):
            continue  # lost or not ended: other checks report it
        runs = [run for run in history.runs_of.get(job, ()) if history.until(run) > run.began]
        has_failed = [one for one in before if one.status != "succeeded"]
        is_canceled = bool(has_failed) and not node.runs_anyway
        if is_canceled != (row.status == "canceled") or (is_canceled and runs):
            yield f"{row} has run {len(runs)} times, and {len(has_failed)} of {len(before)} jobs before it have failed"
        for one in before:
            ends = [run.ended for run in history.runs_of.get(one.job, ()) if run.how in {"returned", "gave up"}]
            if runs and ends and runs[0].began < min(ends):
                yield f"{runs[0]} began before the end of {one}"


def load_tables(history: History) -> Iterator[str]:
    """Check that a segment of a load is in its table whole and once, or not at all; after a success all of them."""
    for name, (jobs, numbers) in history.loads.items():
        found = Counter(numbers)
        for loaded in jobs:
            for segment in loaded.segments:
                times = {found.pop(number, 0) for number in segment}
                if times != {1} and (loaded.status == "succeeded" or times != {0}):
                    yield f"load {name}: the records {segment} of a {loaded.status} job are there {times} times"
        if found:
            yield f"load {name}: the records {sorted(found)[:5]} were never loaded"


def answers(history: History) -> Iterator[str]:
    """Check that each call of a counter is done once, and that its answer is the sum so far."""
    sums: dict[int, int] = {}
    for counter, events in history.events.items():
        if again := [by for by, times in Counter(events).items() if times > 1]:
            yield f"counter {counter}: calls were done twice: {again[:5]}"
        sums |= zip(events, itertools.accumulate(events), strict=True)
    for call in history.calls:
        if call.answer is None:
            yield f"counter {call.counter}: the call {call.by} has no answer"
        elif call.by not in history.events.get(call.counter, ()):
            yield f"counter {call.counter}: the call {call.by} has an answer, and is not done"
        elif call.answer != sums[call.by]:
            yield f"counter {call.counter}: {call.answer} was answered to {call.by}, and {sums[call.by]} is right"


def call_order(history: History) -> Iterator[str]:
    """Check that calls made after an answer run after the answered call, and that only requested calls run."""
    asked = {call.by: call for call in history.calls}
    for counter, events in history.events.items():
        # Going backward, the earliest answer of all calls that were done later.
        earliest = math.inf
        for by in reversed(events):
            call = asked.get(by)
            if call is None or call.counter != counter:
                yield f"counter {counter}: nobody asked for {by}"
                continue
            if call.asked > earliest:
                yield f"counter {counter}: {by} was done before a call that was answered before {by} was asked"
            earliest = min(earliest, call.answered)


def messages(history: History) -> Iterator[str]:
    """Check that each message of a counter is done once in its mirror, in the order of sending."""
    tells = {call.by for call in history.calls if call.tells}
    for counter, events in history.events.items():
        told, mirror = [by for by in events if by in tells], history.mirrors.get(counter, [])
        if mirror != told:
            place = next((at for at, (a, b) in enumerate(zip(told, mirror, strict=False)) if a != b), len(mirror))
            yield f"counter {counter}: message {place} of {len(told)} is wrong; its mirror has {len(mirror)}"


def exits(history: History) -> Iterator[str]:
    """Check that a process ends by itself only without time to stop handlers, and that exit 0 leaves no owned row."""
    for end in history.exits:
        silences = history.silences.get(end.process, ())
        if not (end.lease_was_gone and any(end.at - STARVED_S <= again for _, again in silences)):
            yield f"{end.process}: {end.text}"


CHECKS: dict[str, Callable[[History], Iterator[str]]] = {
    "acknowledged jobs that are lost": lost,
    "jobs that have not ended": unended,
    "overlaps of a job or a key": overlaps,
    "runs after the end of their job": late,
    "attempts beyond their limits": attempts,
    "transactions not exactly once": transactions,
    "limits exceeded": limits,
    "planned times not once": schedules,
    "graphs out of order": graphs,
    "tables of loads not exact": load_tables,
    "calls of processes not once": answers,
    "calls of processes out of order": call_order,
    "messages of processes not once": messages,
    "exits out of order": exits,
}
"""Checks by the name of the violation that they find."""


def violations(history: History) -> dict[str, list[str]]:
    """Return the results of all checks."""
    return {name: list(check(history)) for name, check in CHECKS.items()}
