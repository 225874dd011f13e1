"""W1: no-op jobs, enqueued before, drained by one process; a short and a long queue.

Our drain is repeated for /health of an idle service beside the same load. Its duration is the share of the harness and
of the busy cores, and is subtracted.
"""

from __future__ import annotations

from benchmarks.peers.arena import Arena, Load
from benchmarks.peers.contenders import OURS, Contender
from benchmarks.peers.drain import drain
from benchmarks.peers.workload import HEALTH, Bar, Figures, Sizes, Workload

IDLE_HEALTH, OWN_HEALTH = f"idle_{HEALTH}", f"own_{HEALTH}"
TUNED, KEYED = f"{OURS} tuned", f"{OURS} keyed"


def measure(arena: Arena, contender: Contender, sizes: Sizes) -> Figures:
    key = "job-{n}" if contender.name == KEYED else ""
    figures: dict[str, float] = {}
    for prefix, jobs in (("short_", sizes.drain), ("long_", sizes.long_drain)):
        database = arena.fresh(contender, Load(jobs, key=key))
        drained = drain(arena, contender, database, jobs=jobs, cap_s=sizes.cap_s)
        figures |= {"jobs": jobs} | drained.figures(prefix)
        if contender.name in {OURS, TUNED}:
            _take_the_worse(figures, drained.health_p99_ms, _idle_health(arena, contender, Load(jobs), sizes))
    return figures


def _idle_health(arena: Arena, contender: Contender, load: Load, sizes: Sizes) -> float | None:
    """Return the duration of /health of an idle service beside another one that drains."""
    with arena.program(contender, arena.fresh(contender, name="_idle"), "worker", "--no-queues") as service:
        url, database = service.wait("ready")["url"], arena.fresh(contender, load)
        return drain(arena, contender, database, jobs=load.count, cap_s=sizes.cap_s, health_of=url).health_p99_ms


def _take_the_worse(figures: dict[str, float], busy: float | None, idle: float | None) -> None:
    if busy is not None and idle is not None:
        found = {HEALTH: busy, IDLE_HEALTH: idle, OWN_HEALTH: max(busy - idle, 0)}
        figures |= {name: max(value, figures.get(name, 0)) for name, value in found.items()}


def _bars(figure: str, queue: str, least: float) -> tuple[Bar, ...]:
    best = ("pgqueuer tuned",)
    return (
        Bar(text=f"{queue}: ≥ {least:g} × pgqueuer tuned", figure=figure, of=best, least=least),
        Bar(text=f"{queue}, keyed: ≥ 0.75 × pgqueuer tuned", figure=figure, ours=(KEYED,), of=best, least=0.75),
        Bar(text=f"{queue}: ≥ 20 × procrastinate", figure=figure, of=("procrastinate",), least=20),
    )


WORKLOAD = Workload(
    name="w1",
    title="drain of no-op jobs",
    measure=measure,
    figures={
        "short_rate": "short queue, jobs/s",
        "long_rate": "long queue, jobs/s",
        "long_cpu_us_per_job": "worker's CPU, µs/job",
        HEALTH: "/health p99, ms",
        IDLE_HEALTH: "idle /health p99, ms",
        OWN_HEALTH: "/health p99 less the idle one's, ms",
    },
    bars=(
        *_bars("short_rate", "short", 0.95),
        *_bars("long_rate", "long", 1),
        Bar(text="/health ≤ 10 ms (p99), idle off", figure=OWN_HEALTH, most=10),
        Bar(text="tuned: /health ≤ 10 ms (p99), idle off", figure=OWN_HEALTH, ours=(TUNED,), most=10),
    ),
    our_modes=("default", "tuned", "keyed"),
)
