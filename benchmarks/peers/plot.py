"""One picture of a benchmark as SVG, for docs/performance.md: every bar, and the rates of W1. No library.

The row of a bar shows our figure as a multiple of it, on a logarithmic scale with the bar in its middle: to the right
is better than required, to the left is worse, whichever direction of the figure is better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from typing import Final
from xml.sax.saxutils import escape

from benchmarks.peers.contenders import ALL, OURS
from benchmarks.peers.results import Result, Verdict, Workloads, closing, medians, shown, verdicts

WIDTH: Final = 880
ROW: Final = 20
BASELINE: Final = 14
THICK: Final = 12
LEFT, TITLES, TEXTS, RIGHT = 16, 48, 250, WIDTH - 16
MIDDLE, DOUBLING = 640, 66
MARKS: Final = {-2: "¼", -1: "½", 0: "the bar", 1: "2 ×", 2: "4 ×"}
"""Marks by doublings. A figure beyond the last mark is drawn to that mark, with a point."""
SHORTEST: Final = 3
RATES: Final = {"short_rate": "short", "long_rate": "long"}
RATES_LEFT, RATES_LENGTH = 220, WIDTH - 220 - 80

INK, PALE, LINE, BAND = "#1a202c", "#5a6474", "#cbd5e0", "#f3f5f8"
REACHED, MISSED = "#2f855a", "#dd4a1f"
OUR_COLOUR, THEIR_COLOUR = "#2b6cb0", "#a0aec0"


def svg(results: list[Result], workloads: Workloads) -> str:
    """Return the picture; the same results give the same text."""
    judgements = verdicts(results, workloads)
    scale = 80
    rows = scale + 8
    rates = rows + ROW * len(judgements) + 2 * ROW
    drawn = list(_rates(medians(results).get("w1", {}), rates))
    height = rates + ROW * len(drawn) + (LEFT if drawn else -ROW)
    parts = [
        text(LEFT, 30, "What is asked of dataloader, and what it does", weight="bold", size=16),
        text(LEFT, 50, closing(results, workloads), colour=PALE),
        *_names(judgements, rows),
        *_scale(scale, rows + ROW * len(judgements)),
        *(_row(verdict, rows + ROW * number) for number, verdict in enumerate(judgements)),
        *drawn,
    ]
    return picture(height, parts)


def picture(height: int, parts: Iterable[str]) -> str:
    """Return a complete file of these parts, on white."""
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'
    ground = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" fill="white" stroke="{LINE}"/>'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', ground, *parts, "</svg>\n"])


def _names(judgements: list[Verdict], top: int) -> Iterator[str]:
    """Yield each workload's name beside its first bar; every other one on a band, to separate them."""
    for number, (_, group) in enumerate(groupby(judgements, key=lambda verdict: verdict.workload.name)):
        members = list(group)
        if number % 2 == 0:
            yield _rect(LEFT - 8, top, WIDTH - 2 * (LEFT - 8), ROW * len(members), BAND)
        yield text(LEFT, top + BASELINE, members[0].workload.name.upper(), weight="bold")
        yield text(TITLES, top + BASELINE, members[0].workload.title, colour=PALE)
        top += ROW * len(members)


def _scale(top: int, bottom: int) -> Iterator[str]:
    for doublings, label in MARKS.items():
        x = MIDDLE + doublings * DOUBLING
        yield text(x, top, label, anchor="middle", colour=PALE if doublings else INK)
        yield f'<path d="M{x} {top + 6}V{bottom}" stroke="{LINE if doublings else INK}"/>'


def _row(verdict: Verdict, top: int) -> str:
    words = text(TEXTS, top + BASELINE, verdict.bar.text)
    if verdict.value is None:
        return words + text(RIGHT, top + BASELINE, "not measured", anchor="end", colour=PALE)
    colour = REACHED if verdict.is_reached else MISSED
    figure = text(RIGHT, top + BASELINE, shown(verdict.value), anchor="end", colour=colour, weight="bold")
    return words + _mark(verdict.bar.share(verdict.value), top + (ROW - THICK) // 2, colour) + figure


def _mark(share: float, top: int, colour: str) -> str:
    """Return a rectangle from the bar's line to the share of it, with a point if it exceeds the scale."""
    side = 1 if share >= 1 else -1
    length = DOUBLING * abs(math.log2(share)) if 0 < share < math.inf else math.inf
    longest = DOUBLING * max(MARKS)
    if length <= longest:
        length = max(round(length), SHORTEST)
        return _rect(MIDDLE if side > 0 else MIDDLE - length, top, length, THICK, colour)
    points = f"V{top}H{MIDDLE + side * longest}l{side * THICK // 2} {THICK // 2}l{-side * THICK // 2} {THICK // 2}"
    return f'<path d="M{MIDDLE} {top + THICK}{points}Z" fill="{colour}"/>'


def _rates(rates: Mapping[str, Mapping[str, float]], top: int) -> Iterator[str]:
    """Yield W1's rates of all contenders, one row each, under a heading for each queue."""
    longest = max((rates[name].get(figure, 0) for figure in RATES for name in rates), default=0)
    for figure, queue in RATES.items():
        names = [name for name in ALL if figure in rates.get(name, {})]
        if names:
            yield text(LEFT, top + BASELINE, f"W1, {queue} queue: jobs/s", weight="bold")
            top += ROW
        for name in names:
            rate, colour = rates[name][figure], OUR_COLOUR if ALL[name].peer == OURS else THEIR_COLOUR
            length = max(round(rate / longest * RATES_LENGTH), SHORTEST)
            yield (
                text(TITLES, top + BASELINE, name)
                + _rect(RATES_LEFT, top + (ROW - THICK) // 2, length, THICK, colour)
                + text(RATES_LEFT + length + 6, top + BASELINE, f"{rate:,.0f}")
            )
            top += ROW


def _rect(x: int, y: int, width: int, height: int, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{colour}"/>'


def text(
    x: int, y: int, words: str, *, colour: str = INK, weight: str = "normal", anchor: str = "start", size: int = 12
) -> str:
    """Return a piece of text; `y` is its baseline."""
    style = f'fill="{colour}" font-weight="{weight}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'
