"""Small charts as SVG, whose sizes are attributes, since a page may not have inline styles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import tzinfo
from typing import Any, Final

from markupsafe import Markup

from dataloader.web.pages.formats import in_zone


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


def lifeline(parts: Sequence[Any], label: str, tz: tzinfo) -> Markup:
    """Return a job's life as a bar of parts, with the time at which each of the wider ones begins."""
    shown: list[Markup] = []
    last = -1.0
    for part in parts:
        x, width = f"{part.at * 100:.2f}%", f"{part.width * 100:.2f}%"
        if part.at - last > _LABEL and part.at < 1 - _LABEL:
            shown.append(
                Markup('<text x="{}" y="11"{}>{:%H:%M:%S}</text>').format(
                    x, Markup(' class="md"') if last >= 0 else "", in_zone(part.since, tz)
                )
            )
            last = part.at
        fill = Markup('fill="url(#dots)"') if part.kind == "delay" else Markup('class="f-{}"').format(part.kind)
        shown.append(
            Markup('<rect x="{}" y="18" width="{}" height="20" rx="3" {}><title>{}</title></rect>').format(
                x, width, fill, part.label
            )
        )
        if part.text and part.kind not in {"delay", "idle"}:
            shown.append(
                Markup('<text class="bar-t md" x="{:.2f}%" y="32" dx="8">{}</text>').format(part.at * 100, part.text)
            )
    return Markup('<svg class="lanes" width="100%" height="40" role="img" aria-label="{}">{}</svg>').format(
        label, Markup("").join(shown)
    )


_LABEL: Final = 0.09
"""Width of a time, as a fraction of the bar."""


def hourly(hours: Sequence[tuple[str, int]], label: str, *, kind: str, height: int = 110) -> Markup:
    """Return a chart of a number for each hour: a label and the number, with a scale at the left."""
    top = _round_up(max((number for _, number in hours), default=0))
    step = 100 / max(1, len(hours))
    plot = height - 24
    lines = Markup("").join(
        Markup('<line{} x2="100%" y1="{:.1f}" y2="{:.1f}"/>').format(
            Markup(' class="base"') if not share_ else "", 6 + plot * (1 - share_), 6 + plot * (1 - share_)
        )
        for share_ in (0, 0.5, 1)
    )
    scale = Markup("").join(
        Markup('<text x="-8" y="{:.1f}" text-anchor="end">{}</text>').format(
            10 + plot * (1 - share_), _short(top * share_)
        )
        for share_ in (0, 0.5, 1)
        if (top * share_).is_integer() or top * share_ > 10
    )
    rects = Markup("").join(
        Markup(
            '<rect class="f-{}" x="{:.2f}%" y="{:.1f}" width="{:.2f}%" height="{:.1f}" rx="1">'
            "<title>{}: {:,}</title></rect>"
        ).format(
            kind,
            at * step + step * 0.12,
            6 + plot - max(2.0, plot * number / top),
            step * 0.76,
            max(2.0, plot * number / top),
            hour,
            number,
        )
        for at, (hour, number) in enumerate(hours)
        if number
    )
    every = max(1, len(hours) // 4)
    marks = Markup("").join(
        Markup('<text x="{:.2f}%" y="{}" text-anchor="middle">{}</text>').format((at + 0.5) * step, height - 2, hour)
        for at, (hour, _) in enumerate(hours)
        if at % every == every // 2
    )
    return Markup(
        '<svg class="plot" width="100%" height="{}" role="img" aria-label="{}"><g class="grid">{}</g>{}{}{}</svg>'
    ).format(height, label, lines, scale, rects, marks)


def _round_up(most: int) -> float:
    """Return a round number for the top of a scale, such as 1, 2, 4, 5, 10 or 20."""
    size = 10.0 ** (len(str(max(1, most))) - 1)
    return next(factor * size for factor in (1, 2, 4, 5, 10) if factor * size >= most)


def _short(value: float) -> str:
    for size, name in ((1_000_000, " M"), (10_000, " k")):
        if value >= size:
            return f"{value / (1_000_000 if name == ' M' else 1_000):g}{name}"
    return f"{value:,.0f}"


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
    "lifeline": lifeline,
    "week_chart": week,
}
