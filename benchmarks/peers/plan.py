"""Plan of the measurements in their order: workload, run, contender.

The contenders alternate, so that other work of the machine affects all of them. This module starts nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import attrs

from benchmarks.peers.contenders import OURS, Contender
from benchmarks.peers.results import Result
from benchmarks.peers.workload import Workload


@attrs.frozen
class Step:
    """One planned measurement."""

    workload: Workload
    contender: Contender
    run: int

    def __str__(self) -> str:
        return f"{self.workload.name} {self.contender.name} run {self.run}"


def planned(
    workloads: Iterable[Workload],
    contenders: Collection[Contender],
    runs: int,
    *,
    kept: Iterable[Result] = (),
    for_bars: bool = False,
) -> list[Step]:
    """Return the steps, without those whose results are stored already; a failed one is repeated.

    Args:
        for_bars: leave out contenders without a bar, and ours tuned, which replaces ours where it is better.
    """
    done = {result.key for result in kept if not result.error}
    return [
        Step(workload, contender, run)
        for workload in workloads
        for run in range(1, runs + 1)
        for contender in contenders
        if _is_measured(workload, contender, for_bars=for_bars) and (workload.name, contender.name, run) not in done
    ]


def _is_measured(workload: Workload, contender: Contender, *, for_bars: bool) -> bool:
    if contender.peer == OURS:
        return contender.mode in workload.our_modes and not (for_bars and contender.mode == "tuned")
    if workload.solo or (contender.mode != "default" and not workload.of_modes):
        return False
    return not for_bars or any(contender.name in bar.of for bar in workload.bars)
