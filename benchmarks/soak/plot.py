"""Course of a soak as SVG: a strip for each figure, with the times at which a service was killed or stopped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from benchmarks.peers.plot import BAND, LINE, MISSED, OUR_COLOUR, PALE, WIDTH, picture, text
from benchmarks.soak.verdict import FLAT, Sample, points

STRIPS: Final = {"p50_ms": "trigger to end, p50, ms", "p99_ms": "trigger to end, p99, ms"} | {
    flat.figure: flat.text for flat in FLAT
}
LEFT, RIGHT, TOP = 16, WIDTH - 16, 64
STRIP, HEAD, CURVE = 92, 16, 60


def svg(samples: Sequence[Sample], blows: Sequence[tuple[float, str]], title: str) -> str:
    """Return the picture. `blows` are (time, signal); it ends with the last sample."""
    shown = {figure: words for figure, words in STRIPS.items() if points(samples, figure)}
    height = TOP + STRIP * len(shown)
    end_s = max((sample["at_s"] for sample in samples), default=1.0) or 1.0
    parts = [
        text(LEFT, 28, title, weight="bold", size=16),
        text(LEFT, 46, f"{end_s:,.0f} s. Lines from top to bottom: kill -9 (red), SIGTERM (grey).", colour=PALE),
    ]
    for number, (figure, words) in enumerate(shown.items()):
        parts.extend(_strip(points(samples, figure), blows, end_s, words, TOP + STRIP * number))
    return picture(height, parts)


def _strip(
    curve: Sequence[tuple[float, float]], blows: Sequence[tuple[float, str]], end_s: float, words: str, top: int
) -> Iterator[str]:
    """Yield the curve from zero to the highest value, which is written at its right."""
    highest = max(value for _, value in curve)
    base = top + HEAD + CURVE
    yield text(LEFT, top + 8, words)
    yield text(RIGHT, top + 8, f"highest {highest:,.1f}, last {curve[-1][1]:,.1f}", anchor="end", colour=PALE)
    yield f'<rect x="{LEFT}" y="{top + HEAD}" width="{RIGHT - LEFT}" height="{CURVE}" fill="{BAND}"/>'
    for at_s, how in blows:
        if at_s <= end_s:
            colour = MISSED if how == "SIGKILL" else LINE
            yield f'<path d="M{_x(at_s, end_s)} {top + HEAD}V{base}" stroke="{colour}"/>'
    places = " ".join(f"{_x(at_s, end_s)},{base - value / (highest or 1) * CURVE:.1f}" for at_s, value in curve)
    yield f'<polyline points="{places}" fill="none" stroke="{OUR_COLOUR}" stroke-width="1.5"/>'


def _x(at_s: float, end_s: float) -> float:
    return round(LEFT + at_s / end_s * (RIGHT - LEFT), 1)
