"""Progress of a job as a share and a sentence: handlers report any JSON object, such as `{"rows": 7, "of": 20}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs

from dataloader.web.pages.formats import cut, number, words

_PAIRS: Final = (("segments", "segments_planned"), ("tables_done", "tables"), ("done", "of"), ("done", "total"))
_TOTALS: Final = ("of", "total")
_WITHOUT_UNIT: Final = frozenset({"done", "n"})
_MOST_PARTS: Final = 3
_MOST_TEXT: Final = 60


@attrs.frozen
class JobProgress:
    """Progress of a job. `percent`: None if no total was reported."""

    percent: int | None
    text: str


def progress_of(value: Any) -> JobProgress | None:
    """Return the progress that a handler has reported; None if it has not, or not as an object with scalar values.

    A total is called `of` or `total`, and the number that it belongs to is `done` or the first other number; `unit` is
    the name of what is counted. `percent` is a share alone.
    """
    if not isinstance(value, Mapping) or not value:
        return None
    numbers = {str(name): one for name, one in value.items() if _is_number(one)}
    pair = next(((done, total) for done, total in _PAIRS if {done, total} <= numbers.keys()), None)
    if pair is None:
        total_name = next((name for name in _TOTALS if name in numbers), None)
        done_name = next((name for name in numbers if name != total_name), None)
        pair = None if total_name is None or done_name is None else (done_name, total_name)
    if pair is not None and numbers[pair[1]] > 0:
        done, total = pair
        unit = value.get("unit") if isinstance(value.get("unit"), str) else "" if done in _WITHOUT_UNIT else words(done)
        so_far, all_of_it = numbers[done], numbers[total]
        text = f"{_said_scalar(so_far)} of {_said_scalar(all_of_it)} {cut(str(unit), _MOST_TEXT)}".rstrip()
        return JobProgress(100 if so_far >= all_of_it else int(100 * (so_far / all_of_it)), text)
    parts = [
        f"{words(str(name))} {_said_scalar(one)}"
        for name, one in value.items()
        if _is_number(one) or isinstance(one, str)
    ]
    percent = numbers.get("percent")
    shown = ", ".join(parts[:_MOST_PARTS])
    if percent is None:
        return JobProgress(None, shown) if shown else None
    return JobProgress(min(100, int(percent)), shown)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")


def _said_scalar(value: float | str) -> str:
    return cut(value if isinstance(value, str) else number(value), _MOST_TEXT)
