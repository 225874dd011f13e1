"""W2: enqueueing over one connection, one by one and in calls of 1,000.

The bulk figure is compared with a bare multi-row INSERT of the same rows, including the first event of each, which psql
sends to the same schema: it has the cost of the same indexes and triggers, but not of Python.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from benchmarks.peers.adaptors.script import chunks
from benchmarks.peers.arena import Arena
from benchmarks.peers.contenders import OURS, Contender
from benchmarks.peers.workload import PYTHON_PEERS, Bar, Figures, Sizes, Workload


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    figures = {}
    for figure, command, count in (
        ("one_per_s", "enqueue-one", sizes.one_by_one),
        ("bulk_per_s", "enqueue-bulk", sizes.bulk),
    ):
        (event,) = arena.call(contender, arena.fresh(contender), command, f"--count={count}")
        figures[figure] = count / event["seconds"]
    if contender.peer == OURS:
        figures["bare_per_s"] = sizes.bulk / _bare_insert_s(arena, arena.fresh(contender), sizes.bulk)
        figures["bulk_to_bare"] = figures["bulk_per_s"] / figures["bare_per_s"]
    return figures


def _bare_insert_s(arena: Arena, database: str, count: int) -> float:
    command, environment = arena.server.psql("-XqAt", "-v", "ON_ERROR_STOP=1", database=database)
    result = subprocess.run(
        command,
        env=environment,
        input="\n".join(_script(count)),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    first, last = result.stdout.split()
    return float(last) - float(first)


def _script(count: int) -> Iterator[str]:
    clock = "SELECT extract(epoch FROM clock_timestamp());"
    yield clock
    for numbers in chunks(0, count):
        ids = {number: f"01a1fb5d-f64b-7366-b7c2-{number:012x}" for number in numbers}
        jobs = ",\n".join(
            f"('{ids[n]}', 'bench', 'bench', '{{\"n\":{n}}}', '{ids[n]}', false, '', 100, 5, 60)" for n in numbers
        )
        events = ",\n".join(f"('{ids[n]}', 'bench', 'queued')" for n in numbers)
        yield "BEGIN;"
        yield "INSERT INTO dl_jobs (job_id, queue, task, args, lock_key, keyed, partition_key, priority,"
        yield f"max_attempts, lease_ttl_sec) VALUES {jobs};"
        yield f"INSERT INTO dl_job_events (job_id, queue, kind) VALUES {events};"
        yield "COMMIT;"
    yield clock


WORKLOAD = Workload(
    name="w2",
    title="enqueue",
    measure=measure,
    figures={
        "one_per_s": "one by one, jobs/s",
        "bulk_per_s": "in bulk, jobs/s",
        "bare_per_s": "bare INSERT by psql, rows/s",
    },
    bars=(
        Bar(text="one by one: ≥ 0.9 × the best Python peer", figure="one_per_s", of=PYTHON_PEERS, least=0.9),
        Bar(text="bulk: ≥ 0.65 × the best Python peer", figure="bulk_per_s", of=PYTHON_PEERS, least=0.65),
        Bar(text="bulk: ≥ 0.85 × bare INSERT", figure="bulk_to_bare", least=0.85),
    ),
    of_modes=False,
)
