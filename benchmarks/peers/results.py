"""Stored results, a JSON line for each measurement, and the table that is made of them.

The table has a line for each figure, with the medians of all contenders, and one for each bar: our value for that bar,
and whether it is reached. Figures of different machines or runs are never compared. `workloads` are always all
workloads, by name, in their order: this module does not import them and starts nothing.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs
import msgspec

from benchmarks.peers.contenders import ALL, OURS
from benchmarks.peers.workload import FULL, Bar, Workload

NOTHING: Final = "–"
Workloads = Mapping[str, Workload]


@attrs.frozen
class Result:
    """One measurement: its figures, or an error, and its sizes."""

    workload: str
    contender: str
    run: int
    figures: dict[str, float]
    error: str = ""
    sizes: dict[str, float] = attrs.field(factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """Workload, contender and run of the result."""
        return self.workload, self.contender, self.run

    def append_to(self, path: Path) -> None:
        """Append the result to a file."""
        with path.open("a") as file:
            file.write(json.dumps(attrs.asdict(self)) + "\n")


@attrs.frozen
class Verdict:
    """Our value for a bar; `value` is None if something was not measured."""

    workload: Workload
    bar: Bar
    value: float | None

    @property
    def is_reached(self) -> bool | None:
        """True if the bar is reached; None if it was not measured."""
        return None if self.value is None else self.bar.is_reached(self.value)


def read(path: Path) -> list[Result]:
    """Return all results of a file; a repetition of a failed measurement replaces it."""
    found = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    return list({result.key: result for result in found}.values())


def medians(results: Iterable[Result]) -> dict[str, dict[str, dict[str, float]]]:
    """Return medians by workload, contender and figure."""
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
    """Return our value for a bar: the median of each run's own ratio, since a shared machine changes within a minute.

    `results` are those of one workload. Returns None if something was not measured.
    """
    runs: dict[int, dict[str, dict[str, float]]] = {}
    for result in results:
        runs.setdefault(result.run, {})[result.contender] = result.figures
    values = [bar.value(run) for run in runs.values()]
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def verdicts(results: Iterable[Result], workloads: Workloads) -> list[Verdict]:
    """Return the verdicts of all bars, in their order."""
    of: dict[str, list[Result]] = {}
    for result in results:
        of.setdefault(result.workload, []).append(result)
    return [
        Verdict(workload, bar, judged(bar, of.get(workload.name, ())))
        for workload in workloads.values()
        for bar in workload.bars
    ]


def closing(results: Iterable[Result], workloads: Workloads) -> str:
    """Return a sentence about the number of reached bars, and about the quality of the figures."""
    results = list(results)
    reached = [verdict.is_reached for verdict in verdicts(results, workloads) if verdict.value is not None]
    runs = max((result.run for result in results), default=0)
    said = f"{len(reached)} bars measured: {reached.count(True)} reached, {reached.count(False)} missed. "
    said += f"Medians of {runs} runs." if runs > 1 else "One run, no medians."
    if any(result.sizes and result.sizes != attrs.asdict(FULL) for result in results):
        said += " Not the plan's sizes: a look, no proof."
    return said


def table(results: list[Result], workloads: Workloads) -> str:
    """Return the table as Markdown."""
    results = [result for result in results if result.workload in workloads]
    found = medians(results)
    names = [name for name in ALL if any(name in contenders for contenders in found.values())]
    judgements = verdicts(results, workloads)
    lines = [
        f"| | | {' | '.join(names)} |",
        f"| --- | --- |{' ---: |' * len(names)}",
    ]
    for name, workload in workloads.items():
        if name in found:
            lines += _lines(workload, found[name], names)
            lines += [_line(verdict, names) for verdict in judgements if verdict.workload == workload and OURS in names]
    failed = [f"Failed: {x.workload} {x.contender} run {x.run}: {x.error}" for x in results if x.error]
    lines += ["", *failed] if failed else []
    return "\n".join(lines)


def as_json(results: list[Result], workloads: Workloads) -> str:
    """Return the table's content as JSON; a figure that is not finite is null."""
    bars = [
        {"workload": x.workload.name, "bar": x.bar.text, "value": x.value, "reached": x.is_reached}
        for x in verdicts(results, workloads)
    ]
    failed = [{"workload": x.workload, "contender": x.contender, "run": x.run, "error": x.error} for x in results]
    data = {
        "medians": medians(results),
        "bars": bars,
        "failed": [entry for entry in failed if entry["error"]],
        "closing": closing(results, workloads),
    }
    return msgspec.json.format(msgspec.json.encode(data)).decode()


def shown(value: float | None) -> str:
    """Return a figure as text."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _lines(workload: Workload, figures: dict[str, dict[str, float]], names: list[str]) -> Iterator[str]:
    yield f"| **{workload.name.upper()}** | **{workload.title}** |{' |' * len(names)}"
    for figure, heading in workload.figures.items():
        cells = [shown(figures.get(name, {}).get(figure)) for name in names]
        if any(cell != NOTHING for cell in cells):
            yield f"| | {heading} | {' | '.join(cells)} |"


def _line(verdict: Verdict, names: list[str]) -> str:
    said = NOTHING
    if verdict.value is not None:
        said = f"{shown(verdict.value)} {'reached' if verdict.is_reached else '**missed**'}"
    return f"| bar | {verdict.bar.text} | {' | '.join(said if name == OURS else '' for name in names)} |"
