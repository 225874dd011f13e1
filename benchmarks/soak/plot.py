"""The course of a soak as SVG: a strip for each figure, with the moments at which a service was killed or ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final
from xml.sax.saxutils import escape

from benchmarks.peers.plot import BAND, INK, LINE, MISSED, OUR_COLOUR, PALE, WIDTH
from benchmarks.soak.verdict import FLAT, Sample, points

STRIPS: Final = {"p50_ms": "trigger to end, p50, ms", "p99_ms": "trigger to end, p99, ms"} | {
    flat.figure: flat.text for flat in FLAT
}
LEFT, RIGHT, TOP = 16, WIDTH - 16, 64
STRIP, HEAD, CURVE = 92, 16, 60


def svg(samples: Sequence[Sample], blows: Sequence[tuple[float, str]], title: str) -> str:
    """The picture. `blows` are (when, signal); it ends with the last sample."""
    shown = {figure: text for figure, text in STRIPS.items() if points(samples, figure)}
    height = TOP + STRIP * len(shown)
    end_s = max((sample["at_s"] for sample in samples), default=1.0) or 1.0
    parts = [
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" fill="white" stroke="{LINE}"/>',
        _text(LEFT, 28, title, weight="bold", size=16),
        _text(LEFT, 46, f"{end_s:,.0f} s. Lines from top to bottom: kill -9 (red), SIGTERM (grey).", colour=PALE),
    ]
    for number, (figure, text) in enumerate(shown.items()):
        parts.extend(_strip(points(samples, figure), blows, end_s, text, TOP + STRIP * number))
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>', *parts, "</svg>\n"])


def _strip(
    curve: Sequence[tuple[float, float]], blows: Sequence[tuple[float, str]], end_s: float, text: str, top: int
) -> Iterator[str]:
    """From zero to the highest value, which is written at its right."""
    highest = max(value for _, value in curve)
    base = top + HEAD + CURVE
    yield _text(LEFT, top + 8, text)
    yield _text(RIGHT, top + 8, f"highest {highest:,.1f}, last {curve[-1][1]:,.1f}", anchor="end", colour=PALE)
    yield f'<rect x="{LEFT}" y="{top + HEAD}" width="{RIGHT - LEFT}" height="{CURVE}" fill="{BAND}"/>'
    for at_s, how in blows:
        if at_s <= end_s:
            colour = MISSED if how == "SIGKILL" else LINE
            yield f'<path d="M{_x(at_s, end_s)} {top + HEAD}V{base}" stroke="{colour}"/>'
    places = " ".join(f"{_x(at_s, end_s)},{base - value / (highest or 1) * CURVE:.1f}" for at_s, value in curve)
    yield f'<polyline points="{places}" fill="none" stroke="{OUR_COLOUR}" stroke-width="1.5"/>'


def _x(at_s: float, end_s: float) -> float:
    return round(LEFT + at_s / end_s * (RIGHT - LEFT), 1)


def _text(
    x: int, y: int, text: str, *, colour: str = INK, weight: str = "normal", anchor: str = "start", size: int = 12
) -> str:
    style = f'fill="{colour}" font-weight="{weight}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
