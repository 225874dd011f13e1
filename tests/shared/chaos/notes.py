"""Notes of processes while they run: a file for each, a JSON line for each event, by the monotonic clock.

A line is one write, so a killed process leaves only whole lines; its last line is the last known event.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
from histories import SILENCE_S, Run

TICK_S = 0.1


class Notes:
    """File of this process."""

    def __init__(self, folder: str, kind: str) -> None:
        path = Path(folder, f"{kind}-{os.getpid()}-{time.monotonic_ns()}.notes")
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._numbers = itertools.count(1)
        self._open: dict[int, Callable[[], float]] = {}
        """Current runs, with functions that return their deadlines."""
        self.trio_is_behind_s = 0.0
        """Seconds by which the monotonic clock is ahead of Trio's."""

    def write(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"at": time.monotonic(), "kind": kind} | fields)
        os.write(self._file, line.encode() + b"\n")

    @contextmanager
    def run(self, job: str, key: str | None, task: str, deadline: Callable[[], float]) -> Iterator[list[str]]:
        """Note a run for the duration of a block. The first item of the list is how it ends if nothing is raised."""
        number, how = next(self._numbers), ["returned"]
        self.write("begin", run=number, job=job, key=key, task=task, deadline=deadline())
        self._open[number] = deadline
        try:
            yield how
        except BaseException as error:
            how[0] = type(error).__name__
            raise
        finally:
            del self._open[number]
            self.write("end", run=number, how=how[0])

    def tick(self) -> None:
        """Note that the process runs, and the deadlines of its runs. Called every `TICK_S` seconds."""
        self.write("tick", deadlines={number: deadline() for number, deadline in [*self._open.items()]})


def last_line_at(path: Path) -> float:
    """Return when a process wrote its last line."""
    at: float = json.loads(path.read_text().splitlines()[-1])["at"]
    return at


@attrs.define
class _OpenRun:
    fields: dict[str, Any]
    deadlines: list[tuple[float, float]]


def read_notes(folder: Path) -> tuple[list[Run], dict[str, list[tuple[float, float]]]]:
    """Return all runs and each process's silences. A run of a killed process ended with its last line."""
    runs: list[Run] = []
    silences: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for path in sorted(folder.glob("*.notes")):
        process = path.stem
        going: dict[int, _OpenRun] = {}
        before = at = math.nan
        for text in path.read_text().splitlines():
            line = json.loads(text)
            before, at = at, line["at"]
            if at - before >= SILENCE_S:
                silences[process].append((before, at))
            match line["kind"]:
                case "begin":
                    going[line["run"]] = _OpenRun(line, [(at, line["deadline"])])
                case "end":
                    runs.append(_run(process, going.pop(line["run"]), at, line["how"]))
                case "tick":
                    for number, deadline in line["deadlines"].items():
                        if run := going.get(int(number)):
                            run.deadlines.append((at, deadline))
        runs.extend(_run(process, run, at, "killed") for run in going.values())
    return runs, silences


def _run(process: str, run: _OpenRun, ended: float, how: str) -> Run:
    fields = run.fields
    return Run(
        job=fields["job"],
        key=fields["key"],
        task=fields["task"],
        process=process,
        began=fields["at"],
        ended=ended,
        how=how,
        deadlines=tuple(run.deadlines),
        is_foreign=process.startswith("foreign"),
    )
