"""W5: delayed and more urgent jobs have no cost for ready ones; and what happens when all fall due together."""

from __future__ import annotations

import time

from benchmarks.peers.arena import Arena, Load, scalar
from benchmarks.peers.contenders import OURS, Contender
from benchmarks.peers.drain import drain
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload

HOUR_S = 3600
DUE_IN_S = 5
STAGED_WITHIN_S = 60
FIRST_DELAYED = 1_000_000

_FALL_DUE = "UPDATE dl_jobs SET available_at = now() + make_interval(secs => %s) WHERE waits_for = 'time'"
# One row of the index: to count them would use more of the two cores than the measured work.
_STILL_DELAYED = """
SELECT count(*) FROM (
  SELECT FROM dl_jobs WHERE status = 'queued' AND waits_for = 'time' ORDER BY available_at LIMIT 1
) AS one
"""


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    delayed = Load(sizes.delayed, first=FIRST_DELAYED, delay_s=HOUR_S, urgent=True)
    alone = drain(arena, contender, arena.fresh(contender, Load(sizes.drain)), jobs=sizes.drain, cap_s=sizes.cap_s)
    database = arena.fresh(contender, delayed, Load(sizes.drain))
    behind = drain(arena, contender, database, jobs=sizes.drain, cap_s=sizes.cap_s)
    figures = {"alone_rate": alone.rate, "rate": behind.rate, "ratio": behind.rate / alone.rate}
    if contender.peer == OURS:
        figures |= _all_at_once(arena, contender, arena.fresh(contender, delayed, Load(sizes.long_drain)), alone.rate)
    return figures


def _all_at_once(arena: Arena, contender: Contender, database: str, alone_rate: float) -> dict[str, float]:
    """Return the seconds from the due time until no due job is left delayed, and the rate of outcomes meanwhile."""
    with arena.connect(database) as connection:
        connection.execute(_FALL_DUE, (DUE_IN_S,))
        due_at = time.monotonic() + DUE_IN_S
        with arena.program(contender, database, "worker") as worker:
            worker.wait("ready")
            time.sleep(max(due_at - time.monotonic(), 0))
            before = arena.done(contender, connection)
            while scalar(connection, _STILL_DELAYED) and time.monotonic() < due_at + STAGED_WITHIN_S:
                time.sleep(0.1)
            staged_s = time.monotonic() - due_at
            rate = (arena.done(contender, connection) - before) / staged_s
    return {"staged_s": staged_s, "meanwhile_rate": rate, "meanwhile_ratio": rate / alone_rate}


WORKLOAD = Workload(
    name="w5",
    title="delayed, more urgent jobs",
    measure=measure,
    figures={
        "alone_rate": "none delayed, jobs/s",
        "rate": "behind the delayed, jobs/s",
        "ratio": "ratio",
        "staged_s": "all due at once: ready within, s",
        "meanwhile_rate": "rate meanwhile, jobs/s",
    },
    bars=(
        Bar(text="≥ 0.95 × the rate alone", figure="ratio", least=0.95),
        Bar(text="all due at once: ready within 60 s", figure="staged_s", most=STAGED_WITHIN_S),
        Bar(text="meanwhile ≥ 0.8 × the rate alone", figure="meanwhile_ratio", least=0.8),
    ),
)
