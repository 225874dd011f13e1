"""A benchmark with two workloads that is not run: the processing of its results is tested."""

import pytest

from benchmarks.peers.workload import Bar, Workload


@pytest.fixture
def workloads():
    race = Workload(
        name="w1",
        title="a race",
        measure=lambda *_: {},
        figures={"short_rate": "jobs/s"},
        bars=(
            Bar(text="≥ 2 × pgqueuer", figure="short_rate", of=("pgqueuer",), least=2),
            Bar(text="≥ 20 × procrastinate", figure="short_rate", of=("procrastinate",), least=20),
            Bar(text="within 20 ms", figure="late_ms", most=20),
        ),
    )
    alone = Workload(
        name="w2",
        title="a wait",
        measure=lambda *_: {},
        figures={"lost": "lost"},
        bars=(Bar(text="none lost", figure="lost", most=0),),
        of_modes=False,
    )
    return {workload.name: workload for workload in (race, alone)}
