"""The drain rates as an SVG of horizontal bars, for docs/performance.md. No library: it is rectangles and text."""

from __future__ import annotations

from typing import Final

from benchmarks.peers.contenders import ALL, OURS
from benchmarks.peers.results import Result, medians

WIDTH: Final = 720
LEFT: Final = 150
BAR: Final = 18
GAP: Final = 8
FIGURES: Final = {"short_rate": "W1, short queue", "long_rate": "W1, long queue"}
OURS_COLOUR: Final = "#2b6cb0"
COLOUR: Final = "#a0aec0"


def svg(results: list[Result]) -> str:
    """The picture of W1's medians."""
    found = medians(results).get("w1", {})
    rows = [
        (heading, name, found[name][figure])
        for figure, heading in FIGURES.items()
        for name in ALL
        if figure in found.get(name, {})
    ]
    longest = max((rate for _, _, rate in rows), default=1)
    parts, y, last = [], 10, ""
    for heading, name, rate in rows:
        if heading != last:
            parts.append(f'<text x="10" y="{y + 14}" font-weight="bold">{heading}, jobs/s</text>')
            y, last = y + BAR + GAP, heading
        width = rate / longest * (WIDTH - LEFT - 80)
        colour = OURS_COLOUR if name == OURS else COLOUR
        parts.append(f'<text x="10" y="{y + 14}">{name}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{width:.0f}" height="{BAR}" fill="{colour}"/>')
        parts.append(f'<text x="{LEFT + width + 6:.0f}" y="{y + 14}">{rate:,.0f}</text>')
        y += BAR + GAP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 4}" font-family="sans-serif"'
    return "\n".join([f'{head} font-size="13">', '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])
