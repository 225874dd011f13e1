"""Workload: a measurement that returns named figures, their display, and the bars for our figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

import attrs

from benchmarks.peers.contenders import OURS, Contender

if TYPE_CHECKING:  # the table and the plot can be made without any installed peer
    from benchmarks.peers.arena import Arena

Figures = Mapping[str, float]


@attrs.frozen(kw_only=True)
class Sizes:
    """Amount of work of each workload. `QUICK` is for a check in two minutes; its figures are rougher."""

    drain: int = 20_000
    long_drain: int = 200_000
    one_by_one: int = 2_000
    bulk: int = 10_000
    samples: int = 300
    backlog: int = 1_000_000
    delayed: int = 300_000
    hot: int = 10_000
    independent: int = 100_000
    held: int = 200_000
    held_s: float = 240
    idle_s: float = 30
    pace_s: float = 600
    http_requests: int = 20_000
    finished: int = 10_000_000
    cap_s: float = 30


FULL: Final = Sizes()
QUICK: Final = Sizes(
    drain=5_000,
    long_drain=15_000,
    one_by_one=300,
    samples=50,
    backlog=50_000,
    delayed=20_000,
    hot=500,
    independent=5_000,
    held=15_000,
    held_s=20,
    idle_s=10,
    pace_s=15,
    http_requests=2_000,
    finished=100_000,
    cap_s=6,
)


@attrs.frozen(kw_only=True)
class Bar:
    """Bar for one of our figures: for itself, or for its ratio to the best of the same figure of some peers.

    Args:
        text: text in the table.
        figure: our figure.
        least, most: the bar; one of the two.
        of: contenders to compare with; empty for the figure itself.
        ours: our contenders with the figure; the better one counts.
    """

    text: str
    figure: str
    least: float | None = None
    most: float | None = None
    of: tuple[str, ...] = ()
    ours: tuple[str, ...] = (OURS,)

    def value(self, found: Mapping[str, Figures]) -> float | None:
        """Return the figure or the ratio, from the figures of each contender, or None if something was not measured."""
        ours = self._best(self.ours, found)
        if ours is None or not self.of:
            return ours
        theirs = self._best(self.of, found)
        return ours / theirs if theirs else None

    def _best(self, names: tuple[str, ...], found: Mapping[str, Figures]) -> float | None:
        figures = [found[name][self.figure] for name in names if self.figure in found.get(name, {})]
        if not figures:
            return None
        return min(figures) if self.least is None else max(figures)

    def is_reached(self, value: float) -> bool:
        """Return True if `value` reaches the bar."""
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)

    def share(self, value: float) -> float:
        """Return `value` as a multiple of the bar: 1 is just enough and more is better, for `least` and `most`."""
        if self.most is None:
            return value / (self.least or 1)
        if value == self.most:
            return 1
        return self.most / value if value else math.inf


@attrs.frozen(kw_only=True)
class Workload:
    """One row of the plan.

    Args:
        name, title: texts in the table.
        measure: the measurement, which returns the figures.
        figures: the displayed figures, with their headings.
        bars: bars for our figures.
        solo: the peers have nothing to compare.
        of_modes: False if a peer does the same in all its modes, so that one is enough.
        our_modes: our modes that are measured.
    """

    name: str
    title: str
    measure: Callable[[Arena, Contender, Sizes], Figures]
    figures: Mapping[str, str]
    bars: tuple[Bar, ...]
    solo: bool = False
    of_modes: bool = True
    our_modes: tuple[str, ...] = ("default",)


HEALTH: Final = "health_p99_ms"
HEALTH_BAR: Final = Bar(text="/health under 20 ms (p99)", figure=HEALTH, most=20)
PYTHON_PEERS: Final = ("pgqueuer", "procrastinate", "chancy", "awa")
