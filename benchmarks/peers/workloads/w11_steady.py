"""W11: 200 jobs a second for ten minutes: from the trigger to the handler and to the recorded end, and the rest.

The recorded end is `finished_at`, when the outcome's statement began, so its own commit is not included.
"""

from __future__ import annotations

from benchmarks.peers.arena import Arena, scalar
from benchmarks.peers.contenders import Contender
from benchmarks.peers.latency import at_a_pace, percentiles
from benchmarks.peers.workload import Bar, Figures, Sizes, Workload

PER_S = 200

_ENDS = "SELECT (args->>'n')::int, extract(epoch FROM finished_at)::float8 FROM dl_jobs WHERE status = 'succeeded'"
_DEAD = "SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'dl_jobs'"


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    database = arena.fresh(contender)
    paced = at_a_pace(arena, contender, database, per_s=PER_S, seconds=sizes.pace_s)
    with arena.connect(database) as connection:
        ends = dict(connection.execute(_ENDS).fetchall())
        dead = scalar(connection, _DEAD)
    to_end_ms = [(ends[number] - at) * 1000 for number, at in paced.enqueued_at.items()]
    figures = percentiles(paced.took_ms.values())
    figures |= {f"end_{name}": value for name, value in percentiles(to_end_ms).items()}
    return figures | {"dead_rows": dead, "dead_per_live": dead / len(ends)}


WORKLOAD = Workload(
    name="w11",
    title="steady 200 jobs/s",
    measure=measure,
    figures={
        "p50_ms": "trigger to start, p50, ms",
        "p99_ms": "trigger to start, p99, ms",
        "end_p50_ms": "end to end, p50, ms",
        "end_p99_ms": "end to end, p99, ms",
        "dead_rows": "dead rows at the end",
    },
    bars=(
        Bar(text="end to end p50 ≤ 5 ms", figure="end_p50_ms", most=5),
        Bar(text="end to end p99 ≤ 20 ms", figure="end_p99_ms", most=20),
        Bar(text="dead rows ≤ the live ones", figure="dead_per_live", most=1),
    ),
    solo=True,
)
