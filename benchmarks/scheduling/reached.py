"""Required and found figures: a line of the final table."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs


@attrs.frozen
class Reached:
    """Figure and its bar: at least `least`, at most `most`; without a bar it is only information.

    A `promise` is a bar that must be reached on any machine.
    """

    text: str
    figure: float
    least: float = -math.inf
    most: float = math.inf
    note: str = ""
    promise: bool = False

    @property
    def is_good(self) -> bool:
        return self.least <= self.figure <= self.most

    @property
    def bar(self) -> str:
        if self.least > -math.inf:
            return f"≥ {self.least:,g}"
        return f"≤ {self.most:,g}" if self.most < math.inf else ""

    def row(self) -> str:
        verdict = "" if not self.bar else "reached" if self.is_good else "**broken**" if self.promise else "**missed**"
        figure = f"{self.figure:,.0f}" if self.figure == round(self.figure) else f"{self.figure:,.3g}"
        return f"| {self.text} | {figure} | {self.bar} | {verdict} | {self.note} |"


def table(lines: Sequence[Reached]) -> str:
    """Return the table as Markdown."""
    return "\n".join(["| | found | bar | | |", "| --- | ---: | ---: | --- | --- |", *(line.row() for line in lines)])
