"""Course of a run of `just chaos`: start everything, cause faults, wait for the end, check, report."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import attrs
import trio
from conditions import until
from databases import raw_connection
from histories import CHECKS, History, violations
from own_server import OwnServer, server_in
from source_app import Answer, SourceApp, open_source_app

from chaos.away import AwayError, ask_once
from chaos.clients import Clients, day_number, records_of
from chaos.collect import collect, next_times
from chaos.fleet import SERVICES, Fleet

EVERY_S = 10
START_S = 180
SETTLE_S = 240
END_S = 60
TABLES = (
    "CREATE TABLE booked (job_id uuid)",
    "CREATE TABLE keyed (id int PRIMARY KEY, day date)",
    "CREATE TABLE keyless (id int, day date)",
)
COUNTS = "SELECT status::text, count(*) FROM dl_jobs GROUP BY status"
UNSENT = "SELECT count(*) FROM dl_process_outbox"
SHOWN = 5
"""Number of violations of a kind that the report shows."""


@attrs.define
class Course:
    """Run and its results."""

    seconds: float
    seed: int
    folder: Path
    say: Callable[[str], object]
    counts: dict[str, int] = attrs.field(factory=dict)
    found: dict[str, list[str]] = attrs.field(factory=dict)
    history: History = attrs.field(factory=History)

    @property
    def broken(self) -> int:
        """Number of violations."""
        return sum(map(len, self.found.values()))


def run_course(course: Course) -> None:
    """Run the course, in its own event loop."""
    # Not below pytest's directory, which the start of each session closes to the server's account.
    with (
        TemporaryDirectory(prefix="dataloader-tests-") as data_dir,
        server_in(Path(data_dir)) as server,
        open_source_app() as source,
    ):
        source.put("/items", _items)
        fleet = Fleet(server, course.folder, source.url, random.Random(course.seed))
        try:
            trio.run(_run, course, server, source, fleet)
        finally:
            fleet.close()


async def _run(course: Course, server: OwnServer, source: SourceApp, fleet: Fleet) -> None:
    for table in TABLES:
        await server.fetch(table)
    clients = Clients(dsn=server.dsn, urls=fleet.urls, dice=random.Random(course.seed + 1))
    fleet.start()

    async def serving() -> list[str]:
        return fleet.urls()

    await until(serving, lambda urls: len(urls) == SERVICES, within_s=START_S)
    async with raw_connection(server.dsn) as raw:
        begins = await next_times(raw)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fleet.tend)
        nursery.start_soon(_watch, course, server, fleet, clients)
        ends_at = time.monotonic() + course.seconds
        nursery.start_soon(_misbehave, source, random.Random(course.seed + 2), ends_at)
        async with trio.open_nursery() as asking:
            asking.start_soon(clients.run)
            await fleet.rage(ends_at)
            clients.over.set()
            course.say("no more faults; what was asked for goes on to its end")
            asking.cancel_scope.deadline = trio.current_time() + SETTLE_S
        await _settle(server)
        # A service that receives a signal before it serves has another exit code.
        await until(serving, lambda urls: len(urls) == SERVICES, within_s=START_S)
        await fleet.end(END_S)
        nursery.cancel_scope.cancel()
    async with raw_connection(server.dsn) as raw:
        course.history = await collect(raw, course.folder, fleet, clients, source, begins)
    course.found = violations(course.history)
    course.counts = _counts(course.history, fleet, clients, source)


def _items(seen) -> Answer:
    number = day_number(seen.query["day"])
    items = [{"id": record, "day": seen.query["day"]} for record in records_of(number)]
    return Answer(json.dumps({"items": items}).encode())


async def _misbehave(source: SourceApp, dice: random.Random, ends_at: float) -> None:
    faults = (
        {"status": 503},
        {"status": 500, "times": 2},
        {"status": 429, "headers": {"Retry-After": "1"}},
        {"cut_at": 5},
        {"delay_s": 0.5},
        {"delay_s": 3},
    )
    while time.monotonic() < ends_at:
        source.misbehave("/items", **dice.choice(faults))
        await trio.sleep(dice.uniform(0, 3))
    source.behave()


async def _watch(course: Course, server: OwnServer, fleet: Fleet, clients: Clients) -> None:
    """Count the open jobs each second, and print a line every ten."""
    began, said, found = time.monotonic(), 0, {}
    while True:
        with suppress(AwayError):
            found = dict(await ask_once(server.dsn, lambda raw: raw.fetch(COUNTS)))
        clients.open_jobs = found.get("queued", 0) + found.get("running", 0)
        if (at := int(time.monotonic() - began)) >= said + EVERY_S:
            said = at - at % EVERY_S
            ended = sum(found.values()) - clients.open_jobs
            course.say(
                f"{said:5} s: {len(clients.added):,} jobs accepted, {ended:,} ended, {clients.open_jobs:,} open,"
                f" {fleet.faults.total():,} faults"
            )
        await trio.sleep(1)


async def _settle(server: OwnServer) -> None:
    """Pause the schedules, and wait until all jobs have ended and all messages are sent."""
    await server.fetch("UPDATE dl_schedules SET paused = true, paused_why = 'the end'")
    with trio.move_on_after(SETTLE_S):
        while True:
            found = dict(await server.fetch(COUNTS))
            [(unsent,)] = await server.fetch(UNSENT)
            if not unsent and {"queued", "running"}.isdisjoint(found):
                return
            await trio.sleep(0.3)


def _counts(history: History, fleet: Fleet, clients: Clients, source: SourceApp) -> dict[str, int]:
    status, how = Counter(row.status for row in history.rows), Counter(run.how for run in history.runs)
    counts = {
        "jobs acknowledged": len(clients.added),
        "jobs in all": len(history.rows),
        "of graphs": len(history.graph),
        "of schedules": sum(len(plan.jobs) for plan in history.plans),
        "loads": len(clients.spans),
        "requests of loads": len(source.asked("/items")),
        "calls of processes": len(history.calls),
        "cancels confirmed": len(clients.canceled),
        "runs of handlers": len(history.runs),
        "runs killed": how["killed"],
        "runs stopped": how["Cancelled"] + how["JobStopped"],
        "runs void by a silence": sum(history.until(run) < run.ended for run in history.runs),
        "runs of the foreign service": sum(run.is_foreign for run in history.runs),
        "requests repeated": clients.refused,
    }
    counts |= {f"jobs {name}": status[name] for name in ("succeeded", "failed", "canceled", "lost")}
    return counts | dict(sorted(fleet.faults.items())) | {"errors in logs": fleet.errors.total()}


def report(course: Course) -> str:
    """Return the table of the run, in 80 columns, and the violations."""
    cells = [f"{name:<28}{number:>9,}" for name, number in course.counts.items()]
    lines = [f"{left}      {right}".rstrip() for left, right in zip(cells[::2], [*cells[1::2], ""], strict=False)]
    lines += ["", *(f"{name:<71}{len(course.found[name]):>9,}" for name in CHECKS)]
    for name, sentences in course.found.items():
        if sentences:
            lines += ["", f"{name}:", *(f"  {sentence}" for sentence in sentences[:SHOWN])]
            lines += [f"  … and {len(sentences) - SHOWN} more"] * (len(sentences) > SHOWN)
    verdict = f"{course.broken} violations; the history is in {course.folder}" if course.broken else "all is kept"
    return "\n".join([*lines, "", f"seed {course.seed}, {course.seconds:g} s: {verdict}"])
