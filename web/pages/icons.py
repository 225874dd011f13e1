"""Icons of the pages: one sprite in each page, whose symbols are used by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from markupsafe import Markup

_SHAPES: Final[Mapping[str, str]] = {
    "audit": '<path d="M4 2h6l2.5 2.5V14H4zM6.5 7H10M6.5 10H10"/>',
    "bang": '<path d="M8 3v6M8 12.4v.1"/>',
    "copy": '<rect x="5.5" y="5.5" width="8" height="8" rx="1.5"/><path d="M10.5 3v-.5h-8v8H3"/>',
    "errors": '<path d="M8 2.2 1.8 13.2h12.4zM8 6.5v3M8 11.4v.1"/>',
    "home": '<path d="M2 9.5h3l2-6 2.5 9 2-5H14"/>',
    "jobs": '<path d="M5.5 4H14M5.5 8H14M5.5 12H14M2 4h.5M2 8h.5M2 12h.5"/>',
    "limits": '<path d="M2.5 12a6.5 6.5 0 1 1 11 0M8 9l2.5-3.5"/>',
    "loads": '<path d="M8 2v7.5M5 6.5l3 3 3-3M2 10.5v3h12v-3"/>',
    "lock": '<rect x="3.5" y="7" width="9" height="6.5" rx="1.5"/><path d="M5.5 7V5a2.5 2.5 0 0 1 5 0v2"/>',
    "menu": '<path d="M2 4h12M2 8h12M2 12h12"/>',
    "moon": '<path d="M13.5 9.5A6 6 0 0 1 6.5 2.5a6 6 0 1 0 7 7z"/>',
    "ok": '<path d="m3 8.5 3.2 3.2L13 4.8"/>',
    "pause": '<path d="M5.5 3.5v9M10.5 3.5v9"/>',
    "play": '<path d="M5 3.5v9l7-4.5z"/>',
    "proc": (
        '<circle cx="3.5" cy="8" r="1.8"/><circle cx="12.5" cy="3.8" r="1.8"/><circle '
        'cx="12.5" cy="12.2" r="1.8"/><path d="M5.2 7.2 10.8 4.6M5.2 8.8l5.6 2.6"/>'
    ),
    "queues": '<path d="M8 2 2 5l6 3 6-3zM2 8l6 3 6-3M2 11l6 3 6-3"/>',
    "retry": '<path d="M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3"/>',
    "ring": '<circle cx="8" cy="8" r="5"/>',
    "runs": '<path d="M2 4h6M5 8h7M9 12h5"/>',
    "sched": '<circle cx="8" cy="8" r="6"/><path d="M8 4.5V8l2.5 1.5"/>',
    "search": '<circle cx="7" cy="7" r="4.5"/><path d="m10.5 10.5 3 3"/>',
    "stats": '<path d="M3 13V8M8 13V3M13 13V6"/>',
    "stop": '<circle cx="8" cy="8" r="5.5"/><path d="m4.5 11.5 7-7"/>',
    "supply": '<path d="M5.5 2v3M10.5 2v3M3.5 5h9v2.5a4.5 4.5 0 0 1-9 0zM8 12v2.5"/>',
    "turn": '<path d="m6 3.5 4.5 4.5L6 12.5"/>',
    "workers": (
        '<rect x="4" y="4" width="8" height="8" rx="1.5"/><path d="M6.5 1.5V4M9.5 '
        '1.5V4M6.5 12v2.5M9.5 12v2.5M1.5 6.5H4M1.5 9.5H4M12 6.5h2.5M12 9.5h2.5"/>'
    ),
    "x": '<path d="m4 4 8 8M12 4l-8 8"/>',
}
"""Shapes in a square of 16 units, drawn as lines."""
_DOTS: Final = Markup(
    '<pattern id="dots" width="5" height="5" patternUnits="userSpaceOnUse"><circle class="dots" cx="2" cy="2" r="1"/>'
    "</pattern>"
)
SPRITE: Final = Markup('<svg class="sprite" aria-hidden="true">{}{}</svg>').format(
    _DOTS,
    Markup("").join(
        Markup('<symbol id="i-{}" viewBox="0 0 16 16">{}</symbol>').format(name, Markup(shape))  # noqa: S704 - shapes of this file
        for name, shape in _SHAPES.items()
    ),
)
"""Symbols of all icons, for the beginning of a page."""


def icon(name: str, kind: str = "") -> Markup:
    """Return an icon; `kind` is a state, which colors it. The word beside it, or a title, has the meaning."""
    if name not in _SHAPES:
        raise KeyError(name)
    return Markup('<svg class="i{}" aria-hidden="true"><use href="#i-{}"/></svg>').format(f" {kind}" * bool(kind), name)
