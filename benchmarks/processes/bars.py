"""Bars for durable processes: each figure relative to another of the same run, alternating; medians."""

from __future__ import annotations

import statistics
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import attrs

from benchmarks.peers.progress import say
from benchmarks.processes import replicas, round_trips, rows, searches
from benchmarks.processes.dbos_peer import WAYS, Dbos, installed
from benchmarks.processes.drains import Rate, drained, in_turns, ratio
from benchmarks.processes.measured_types import JOBS_QUEUE
from benchmarks.scheduling.databases import enqueued, migrated
from benchmarks.scheduling.reached import Reached
from dataloader import NewJob
from dataloader.store.embedded.postgres import EmbeddedPostgres

CHAINS: Final = 64
DUE_IN_S: Final = 3.0


@attrs.frozen
class Sizes:
    """Amount of work of each measurement."""

    rounds: int
    jobs: int
    steps: int
    calls: int
    asleep: int
    many: int
    events: int
    trips: int
    dbos_steps: int


FULL: Final = Sizes(
    rounds=3,
    jobs=15_000,
    steps=10_000,
    calls=10_000,
    asleep=100_000,
    many=1_000_000,
    events=100_000,
    trips=200,
    dbos_steps=50,
)
QUICK: Final = Sizes(
    rounds=1,
    jobs=4_000,
    steps=4_000,
    calls=2_000,
    asleep=10_000,
    many=50_000,
    events=10_000,
    trips=100,
    dbos_steps=10,
)


class Field:
    """Database with processes, and the drains on it."""

    def __init__(self, server: EmbeddedPostgres, name: str, number: int, *, mixed: bool = False) -> None:
        say(f"{number:,} processes")
        self.pid = server.pid
        self.name = name
        self.dsn = migrated(server, name)
        self.connection = rows.connected(server, name)
        rows.add_processes(self.connection, name, number, mixed=mixed)
        rows.settle(self.connection)

    def keys(self, most: int) -> list[int]:
        """Return the keys of random processes."""
        return rows.keys_of(self.connection, self.name, most)

    def jobs(self, number: int) -> Rate:
        """Drain no-op jobs."""
        enqueued(self.dsn, [NewJob(task="noop", queue=JOBS_QUEUE) for _ in range(number)])
        return self._drained(number, [])

    def calls(self, number: int, method: str = "add") -> Rate:
        """Drain a call of each of `number` processes."""
        keys = self.keys(number)
        rows.add_calls(self.connection, keys, method)
        return self._drained(number, keys)

    def steps(self, number: int, keys: Sequence[int], context: str | None = None) -> Rate:
        """Drain `number` steps of these processes, each of which sets a timer that is due immediately."""
        rows.add_timers(self.connection, list(keys), 0, context)
        return self._drained(number, keys)

    def _drained(self, number: int, keys: Sequence[int]) -> Rate:
        rows.settle(self.connection, "dl_jobs, dl_job_events, dl_process_tasks")
        try:
            return drained(self.pid, self.dsn, number)
        finally:
            rows.clear(self.connection, list(keys))


def single_steps(few: Field, sizes: Sizes) -> tuple[list[Reached], dict[str, list[Rate]]]:
    """Measure steps and calls relative to the queue's jobs."""
    keys = few.keys(CHAINS)
    found = in_turns(
        {
            "jobs": partial(few.jobs, sizes.jobs),
            "steps": partial(few.steps, sizes.steps, keys),
            "calls": partial(few.calls, sizes.calls),
            "timed": partial(few.calls, sizes.calls, "arm"),
        },
        sizes.rounds,
    )
    jobs = found["jobs"]
    return [
        ratio("64 processes of zero timers, an event a step: steps by no-op jobs", found["steps"], jobs, 1.2),
        ratio(f"{sizes.calls:,} processes, a call each, by no-op jobs", found["calls"], jobs, 0.55),
        ratio("the same, each sets a timer", found["timed"], jobs, 0.45),
    ], found


def beside_dbos(server: EmbeddedPostgres, few: Field, sizes: Sizes) -> list[Reached]:
    """Measure round trips relative to the queue's, and to DBOS with steps; only the first if DBOS is unavailable."""
    say("round trips")
    calls, triggers = round_trips.beside_jobs(few.dsn, f"{few.name} 1", sizes.trips)
    lines = _slower("call and answer, idle, by trigger and wait", calls, triggers, 1.4, 1.6)
    python = installed()
    if python is None:
        return lines
    say("DBOS")
    dbos = Dbos(python, server)
    dbos.steps("1", 1)  # creates its tables
    best = max(WAYS, key=lambda way: dbos.steps(way, sizes.dbos_steps).per_s)
    found = in_turns(
        {
            "ours": partial(few.steps, sizes.steps, few.keys(CHAINS)),
            "theirs": partial(dbos.steps, best, sizes.dbos_steps),
        },
        sizes.rounds,
    )
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(sizes.rounds):
        ours += round_trips.alone(few.dsn, f"{few.name} 1", sizes.trips // 4)
        theirs += dbos.calls(sizes.trips // 4)
    how = "on one event loop" if best == "async" else f"{best} threads"
    steps = ratio(f"64 processes, a step after the other, by DBOS's ({how})", found["ours"], found["theirs"], 5)
    one, other = statistics.median(ours), statistics.median(theirs)
    text = "call and answer, idle, by DBOS's: p50"
    return [*lines, steps, Reached(text, one / other, most=0.5, note=f"{one:.2f} and {other:.2f} ms")]


def asleep(server: EmbeddedPostgres, few: Field, sizes: Sizes, calls: Sequence[Rate]) -> list[Reached]:
    """Measure beside many timers in the distant future, and when they are all due."""
    many = Field(server, "asleep", sizes.asleep)
    some = many.keys(sizes.asleep)
    awake, sleeping = some[:CHAINS], some[CHAINS:]
    [awake_id] = many.connection.execute(
        "SELECT process_id FROM dl_processes WHERE key = %s", (awake[0],)
    ).fetchone() or [""]
    rows.add_timers(many.connection, sleeping, 86_400)
    rows.settle(many.connection)
    say("steps beside them")
    found = in_turns(
        {
            "few": partial(few.steps, sizes.steps, few.keys(CHAINS)),
            "many": partial(many.steps, sizes.steps, awake),
        },
        sizes.rounds,
    )
    beside, without = [], []
    for _ in range(sizes.rounds):
        without += round_trips.alone(few.dsn, f"{few.name} 1", sizes.trips // 3)
        beside += round_trips.alone(many.dsn, awake_id, sizes.trips // 3)
    say("all are due")
    rows.make_due(many.connection, sleeping, DUE_IN_S)
    rate = drained(many.pid, many.dsn, len(sleeping))
    middle_ms = [statistics.median(took) for took in (without, beside)]
    return [
        ratio(f"steps beside {sizes.asleep:,} timers asleep, by without", found["many"], found["few"], 0.9),
        Reached(
            "call and answer without them, by beside them: p50",
            middle_ms[0] / middle_ms[1],
            least=0.9,
            note=f"{middle_ms[0]:.2f} and {middle_ms[1]:.2f} ms",
        ),
        ratio("all are due at once: steps by single calls", [rate] * len(calls), calls, 0.8),
    ]


def a_million(server: EmbeddedPostgres, few: Field, sizes: Sizes) -> list[Reached]:
    """Measure calls of random processes, their size, and searches."""
    many = Field(server, "many", sizes.many, mixed=True)
    size = rows.bytes_of(many.connection) / sizes.many
    found = in_turns({"few": partial(few.calls, sizes.calls), "many": partial(many.calls, sizes.calls)}, sizes.rounds)
    say("searches")
    return [
        ratio(f"calls at {sizes.many:,} processes, by at 10,000", found["many"], found["few"], 0.75),
        Reached("bytes of each, with a task, an event and all indexes", size, most=1_000),
        *searches.measure(many.dsn, 5 * sizes.rounds),
    ]


def a_long_past(few: Field, sizes: Sizes) -> list[Reached]:
    """Measure the consecutive steps of a process with many events relative to one with ten."""
    say(f"{sizes.events:,} events")
    short, long = few.keys(2)
    rows.add_events(few.connection, short, 10)
    rows.add_events(few.connection, long, sizes.events)
    rows.settle(few.connection)
    number = sizes.steps // 8
    found = in_turns(
        {
            "short": partial(few.steps, number, [short]),
            "long": partial(few.steps, number, [long]),
            "short, reads": partial(few.steps, number // 4, [short], "reads"),
            "long, reads": partial(few.steps, number // 4, [long], "reads"),
        },
        sizes.rounds,
    )
    text = f"steps of a process of {sizes.events:,} events, by one of 10"
    return [
        ratio(text, found["long"], found["short"], 0.9),
        ratio("the same, each reads its ten newest", found["long, reads"], found["short, reads"], 0.9),
    ]


def one_that_all_call(few: Field, sizes: Sizes) -> list[Reached]:
    """Measure a call beside 64 callers of one process, and beside 64 callers of a process each."""
    say("64 callers")
    hot: list[float] = []
    spread: list[float] = []
    rates = []
    for _ in range(sizes.rounds):
        for others, took in (([f"{few.name} 2"], hot), ([f"{few.name} {one}" for one in range(2, 66)], spread)):
            some, per_s = round_trips.beside_callers(few.dsn, f"{few.name} 1", others, sizes.trips // 2)
            took.extend(some)
            rates.append(per_s)
    one, each = (round_trips.p99(took) for took in (hot, spread))
    return [
        Reached(
            "a call beside 64 callers of one process, by beside 64 of one each: p99",
            one / each,
            most=1.5,
            note=f"{one:.1f} and {each:.1f} ms; {rates[0]:,.0f} and {rates[1]:,.0f} calls/s meanwhile",
        )
    ]


def two_replicas(few: Field, sizes: Sizes) -> list[Reached]:
    """Measure the effect of a second process of the operating system."""
    say("two replicas")
    keys = few.keys(sizes.calls)
    span = "SELECT count(*), extract(epoch FROM max(finished_at) - min(finished_at))::float8"
    ended = {
        "jobs": f"{span} FROM dl_jobs WHERE status = 'succeeded'",
        "calls": f"{span} FROM dl_process_tasks WHERE kind = 'call' AND status = 'finished'",
    }
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(max(1, sizes.rounds - 1)):
        for number in (1, 2):
            for what in ("jobs", "calls"):
                few.connection.execute("DELETE FROM dl_process_tasks WHERE kind = 'call'")
                if what == "jobs":
                    enqueued(few.dsn, [NewJob(task="noop", queue=JOBS_QUEUE) for _ in range(sizes.jobs)])
                else:
                    rows.add_calls(few.connection, keys, "add")
                rows.settle(few.connection, "dl_jobs, dl_job_events, dl_process_tasks")
                rates.setdefault((what, number), []).append(
                    replicas.rate_of(few.connection, few.dsn, number, ended[what])
                )
                rows.clear(few.connection, keys)
    jobs, calls = (statistics.median(rates[what, 2]) / statistics.median(rates[what, 1]) for what in ("jobs", "calls"))
    return [
        Reached(
            "what a second replica gains with calls, by with jobs",
            calls / jobs,
            least=0.9,
            note=f"{calls:.2f}, {jobs:.2f}",
        )
    ]


def _slower(text: str, some: Sequence[float], others: Sequence[float], p50: float, p99: float) -> list[Reached]:
    lines = []
    for name, of, most in (("p50", statistics.median, p50), ("p99", round_trips.p99, p99)):
        one, other = of(some), of(others)
        lines.append(Reached(f"{text}: {name}", one / other, most=most, note=f"{one:.2f} and {other:.2f} ms"))
    return lines


def measure(server: EmbeddedPostgres, wanted: Sequence[str], sizes: Sizes) -> tuple[list[Reached], list[str]]:
    """Run the wanted measurements of `MEASUREMENTS`; return the lines and the failed ones."""
    few = Field(server, "few", max(10_000, sizes.calls))
    found: dict[str, list[Rate]] = {}
    lines: list[Reached] = []

    def rates() -> dict[str, list[Rate]]:
        if not found:
            say("jobs, steps, calls")
            reached, some = single_steps(few, sizes)
            lines.extend(reached)
            found.update(some)
        return found

    run: dict[str, Callable[[], list[Reached]]] = {
        "rates": lambda: rates() and [],
        "dbos": lambda: beside_dbos(server, few, sizes),
        "asleep": lambda: asleep(server, few, sizes, rates()["calls"]),
        "million": lambda: a_million(server, few, sizes),
        "events": lambda: a_long_past(few, sizes),
        "callers": lambda: one_that_all_call(few, sizes),
        "replicas": lambda: two_replicas(few, sizes),
    }
    failed = []
    for name in wanted:
        before = len(lines)
        try:
            lines.extend(run[name]())
        except Exception:  # noqa: BLE001 - the results of the others are still shown
            traceback.print_exc()
            failed.append(name)
        for line in lines[before:]:
            say(line.row())
    return lines, failed


MEASUREMENTS: Final = ("rates", "dbos", "asleep", "million", "events", "callers", "replicas")
