"""Effects of a failover, determined only from recorded histories: the handlers' file, and the clients' answers."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from itertools import combinations
from pathlib import Path
from typing import Any

import attrs


@attrs.define
class Run:
    """Run of a handler. `end` is infinite while none is recorded."""

    name: str
    job: str
    key: str | None
    token: int
    pid: int
    planned: str | None
    begin: float
    end: float = math.inf
    how: str | None = None
    by: str | None = None


@attrs.frozen
class Overlap:
    """Two concurrent runs, the earlier one first."""

    former: Run
    latter: Run

    @property
    def seconds(self) -> float:
        """Seconds for which both ran."""
        return min(self.former.end, self.latter.end) - self.latter.begin


@attrs.frozen
class History:
    """Runs in the order in which they began, and the meanings of each key of a step or a delivery."""

    runs: list[Run]
    meanings: dict[str, set[tuple[Any, ...]]]

    @classmethod
    def read(cls, path: Path) -> History:
        """Return the history that the handlers have written so far."""
        text = path.read_text() if path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # the last line may be incomplete
        return cls.of(json.loads(line) for line in whole.splitlines())

    @classmethod
    def of(cls, lines: Iterable[dict[str, Any]]) -> History:
        """Return the history of such lines."""
        runs: dict[str, Run] = {}
        meanings: dict[str, set[tuple[Any, ...]]] = defaultdict(set)
        for line in sorted(lines, key=lambda line: line["at"]):
            match line["kind"]:
                case "begin":
                    given = {name: line[name] for name in ("job", "key", "token", "pid", "planned")}
                    runs[line["run"]] = Run(line["run"], begin=line["at"], **given)
                case "end":
                    run = runs[line["run"]]
                    run.end, run.how, run.by = line["at"], line["how"], line["by"]
                case "key":
                    meanings[line["key"]].add(tuple(line["meaning"]))
        return cls(list(runs.values()), dict(meanings))

    def overlaps(self) -> list[Overlap]:
        """Return runs of one job, or of one key, that ran at the same time."""
        return [*self._overlaps(lambda run: run.job), *self._overlaps(lambda run: run.key)]

    def _overlaps(self, of: Callable[[Run], str | None]) -> list[Overlap]:
        groups = defaultdict(list)
        for run in self.runs:
            if (value := of(run)) is not None:
                groups[value].append(run)
        pairs = (Overlap(*pair) for group in groups.values() for pair in combinations(group, 2))
        return [pair for pair in pairs if pair.seconds > 0]

    def void(self, killed_at: float, survivors: Collection[int]) -> list[Run]:
        """Return the runs that lost their claim: in progress at the kill, and not among the standby's tokens."""
        return [run for run in self.runs if run.begin < killed_at < run.end and run.token not in survivors]

    def repeated_tokens(self) -> list[int]:
        """Return tokens with which more than one run began."""
        tokens = [run.token for run in self.runs]
        return [token for token in set(tokens) if tokens.count(token) > 1]

    def repeated_keys(self) -> dict[str, set[tuple[Any, ...]]]:
        """Return keys of steps and deliveries with more than one meaning."""
        return {key: meant for key, meant in self.meanings.items() if len(meant) > 1}
