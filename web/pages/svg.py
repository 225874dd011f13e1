"""Small charts as SVG, whose sizes are attributes, since a page may not have inline styles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from markupsafe import Markup


def bars(values: Sequence[float], label: str, *, height: int = 24, step: int = 6) -> Markup:
    """Return a row of bars, the highest as high as the chart. `label` is for screen readers."""
    most = max(values, default=0) or 1
    shown = Markup("").join(
        Markup('<rect x="{}" y="{:.1f}" width="{}" height="{:.1f}"><title>{:g}</title></rect>').format(
            index * step, height - max(1.0, value / most * height), step - 1, max(1.0, value / most * height), value
        )
        for index, value in enumerate(values)
        if value > 0
    )
    width = max(1, len(values) * step)
    return Markup(
        '<svg class="bars" role="img" aria-label="{}" viewBox="0 0 {} {}" width="{}" height="{}">{}</svg>'
    ).format(label, width, height, width, height, shown)


def stacked(values: Sequence[tuple[float, float]], label: str, *, height: int = 32) -> Markup:
    """Return bars of successes with failures on top; two shapes in all, since a page has many charts."""
    most = max((good + bad for good, bad in values), default=0) or 1
    below: list[str] = []
    above: list[str] = []
    for index, (good, bad) in enumerate(values):
        # Any value above zero is visible.
        top = min(max(2, round(bad / most * height)), height) if bad else 0
        low = min(max(1, round(good / most * height)), height - top) if good else 0
        if low:
            below.append(f"M{index * 6} {height}h5v-{low}h-5z")
        if top:
            above.append(f"M{index * 6} {height - low}h5v-{top}h-5z")
    width = max(1, len(values) * 6)
    return Markup(
        '<svg class="bars" role="img" aria-label="{}" viewBox="0 0 {} {}" width="{}" height="{}"'
        ' preserveAspectRatio="none"><path class="span-succeeded" d="{}"/><path class="span-failed" d="{}"/></svg>'
    ).format(label, width, height, width, height, "".join(below), "".join(above))


def span(start: float, end: float, label: str, kind: str = "") -> Markup:
    """Return a bar on a line as wide as its cell, from `start` to `end`, fractions from 0 to 1."""
    first, last = max(0.0, min(start, 1.0)), max(0.0, min(end, 1.0))
    return Markup(
        '<svg class="span" role="img" aria-label="{}" width="100%" height="14">'
        '<rect class="span-{}" x="{:.2f}%" y="1" width="{:.2f}%" height="12"><title>{}</title></rect></svg>'
    ).format(label, kind or "run", first * 100, max(0.3, (last - first) * 100), label)


def lanes(start: float, end: float, label: str, kind: str, parts: Sequence[tuple[float, float, str, str]]) -> Markup:
    """Return a `span` with its parts, each in a separate lane: (start, end, label, kind)."""
    height = 12 / max(1, len(parts))
    first, last = _share_within(start), _share_within(end)
    lane = Markup(
        '<rect class="lane-{}" x="{:.2f}%" y="{:.1f}" width="{:.2f}%" height="{:.1f}"><title>{}</title></rect>'
    )
    shown = Markup("").join(
        lane.format(of, _share_within(since) * 100, 3 + index * height, _wide(since, until), height, said)
        for index, (since, until, said, of) in enumerate(parts)
    )
    return Markup(
        '<svg class="span" role="img" aria-label="{}" width="100%" height="18">'
        '<rect class="span-{}" x="{:.2f}%" y="1" width="{:.2f}%" height="16"><title>{}</title></rect>{}</svg>'
    ).format(label, kind, first * 100, _wide(first, last), label, shown)


def ticks(marks: Sequence[tuple[float, str]]) -> Markup:
    """Return the marks of a line as wide as its cell: position as a fraction, and label."""
    shown = Markup("").join(
        Markup('<text x="{:.2f}%" y="12">{}</text>').format(_share_within(at) * 100, text) for at, text in marks
    )
    return Markup('<svg class="ticks" aria-hidden="true" width="100%" height="16">{}</svg>').format(shown)


def _wide(start: float, end: float) -> float:
    """Return a visible width, in percent."""
    return max(0.3, (_share_within(end) - _share_within(start)) * 100)


def _share_within(part: float) -> float:
    return max(0.0, min(part, 1.0))


def share(part: float, label: str) -> Markup:
    """Return a gauge of a fraction of a whole, from 0 to 1."""
    return Markup(
        '<svg class="share" role="img" aria-label="{}" width="80" height="10">'
        '<rect class="share-all" width="80" height="10"/><rect class="share-part" width="{:.1f}" height="10"/></svg>'
    ).format(label, max(0.0, min(part, 1.0)) * 80)


DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY: Final = 24 * 60
_HOUR_PX, _ROW, _LEFT = 16, 18, 34


def week(ranges: Sequence[tuple[int, int]], label: str) -> Markup:
    """Return a chart of a week, one row per day, with the open minutes (from Monday at 00:00, ends exclusive)."""
    parts = [
        Markup('<text x="{}" y="10" text-anchor="middle">{}</text>').format(_LEFT + hour * _HOUR_PX, hour)
        for hour in range(0, 25, 6)
    ]
    for day, name in enumerate(DAYS):
        top = 16 + day * _ROW
        parts.append(Markup('<text x="0" y="{}">{}</text>').format(top + 11, name))
        parts.append(
            Markup('<rect class="share-all" x="{}" y="{}" width="{}" height="14"/>').format(_LEFT, top, 24 * _HOUR_PX)
        )
        for begin, end in ranges:
            first, last = max(begin - day * _DAY, 0), min(end - day * _DAY, _DAY)
            if first < last:
                said = f"{name} {first // 60:02}:{first % 60:02}–{last // 60:02}:{last % 60:02}"
                parts.append(
                    Markup(
                        '<rect class="week-open" x="{:.1f}" y="{}" width="{:.1f}" height="14"><title>{}</title></rect>'
                    ).format(_LEFT + first / 60 * _HOUR_PX, top, (last - first) / 60 * _HOUR_PX, said)
                )
    width, height = _LEFT + 24 * _HOUR_PX + 10, 16 + len(DAYS) * _ROW
    return Markup('<svg class="week" role="img" aria-label="{}" viewBox="0 0 {} {}" width="{}">{}</svg>').format(
        label, width, height, width, Markup("").join(parts)
    )


CHARTS: Final[Mapping[str, Callable[..., Any]]] = {
    "bars": bars,
    "span": span,
    "lanes": lanes,
    "ticks": ticks,
    "share": share,
    "stacked": stacked,
    "week_chart": week,
}
