"""Results as they are kept, a JSON line for each measurement, and the one table that is made of them.

The table has a line for each figure, the medians of all contenders beside each other, and one for each bar: what ours
is by that bar, and whether that is enough. Figures of different machines or runs are never set beside each other.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import attrs

from benchmarks.peers.contenders import ALL, OURS
from benchmarks.peers.workload import Bar, Workload
from benchmarks.peers.workloads import WORKLOADS

NOTHING: Final = "–"


@attrs.frozen
class Result:
    """One measurement: its figures, or why there are none."""

    workload: str
    contender: str
    run: int
    figures: dict[str, float]
    error: str = ""

    def append_to(self, path: Path) -> None:
        """Keep it."""
        with path.open("a") as file:
            file.write(json.dumps(attrs.asdict(self)) + "\n")


def read(path: Path) -> list[Result]:
    """All that a file has."""
    return [Result(**json.loads(line)) for line in path.read_text().splitlines()]


def medians(results: Iterable[Result]) -> dict[str, dict[str, dict[str, float]]]:
    """By workload, contender and figure."""
    gathered: dict[str, dict[str, dict[str, list[float]]]] = {}
    for result in results:
        figures = gathered.setdefault(result.workload, {}).setdefault(result.contender, {})
        for name, value in result.figures.items():
            figures.setdefault(name, []).append(value)
    return {
        workload: {
            contender: {name: statistics.median(values) for name, values in figures.items()}
            for contender, figures in contenders.items()
        }
        for workload, contenders in gathered.items()
    }


def judged(bar: Bar, results: Iterable[Result]) -> float | None:
    """What ours is by a bar: the median of each run's own ratio, since a shared machine is not the same a minute later.

    `results` are those of one workload. None where something was not measured.
    """
    runs: dict[int, dict[str, dict[str, float]]] = {}
    for result in results:
        runs.setdefault(result.run, {})[result.contender] = result.figures
    values = [bar.value(run.get(OURS, {}), run) for run in runs.values()]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def table(results: list[Result]) -> str:
    """The one table, as Markdown."""
    results = [result for result in results if result.workload in WORKLOADS]
    found = medians(results)
    names = [name for name in ALL if any(name in contenders for contenders in found.values())]
    lines = [
        f"| | | {' | '.join(names)} |",
        f"| --- | --- |{' ---: |' * len(names)}",
    ]
    for name, workload in WORKLOADS.items():
        if name in found:
            lines += _lines(workload, found[name], names)
            lines += _bars(workload, [result for result in results if result.workload == name], names)
    runs = max((result.run for result in results), default=0)
    lines += ["", f"Medians of {runs} runs." if runs > 1 else "One run: no medians."]
    lines += [f"Failed: {x.workload} {x.contender} run {x.run}: {x.error}" for x in results if x.error]
    return "\n".join(lines)


def _lines(workload: Workload, figures: dict[str, dict[str, float]], names: list[str]) -> Iterator[str]:
    yield f"| **{workload.name.upper()}** | **{workload.title}** |{' |' * len(names)}"
    for figure, heading in workload.figures.items():
        cells = [_shown(figures.get(name, {}).get(figure)) for name in names]
        if any(cell != NOTHING for cell in cells):
            yield f"| | {heading} | {' | '.join(cells)} |"


def _bars(workload: Workload, results: list[Result], names: list[str]) -> Iterator[str]:
    if OURS not in names:
        return
    for bar in workload.bars:
        value = judged(bar, results)
        verdict = NOTHING
        if value is not None:
            verdict = f"{_shown(value)} {'reached' if bar.is_reached(value) else '**missed**'}"
        yield f"| bar | {bar.text} | {' | '.join(verdict if name == OURS else '' for name in names)} |"


def _shown(value: float | None) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
