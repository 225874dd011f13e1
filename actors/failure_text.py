"""Text of a handler's exception: its last line first, then the traceback; masked and bounded."""

from __future__ import annotations

import re
import traceback
from types import TracebackType
from typing import Final

from dataloader.jobs.errors import BodyFailed
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import MAX_MASKED, storable_text

MAX_SUMMARY: Final = 2_100
_CALLER: Final = re.compile(
    r"dataloader\.actors\.(?:runner|handler_call|aio_loop|children\.(?:call_)?body)\Z|(?:trio|trio_asyncio|asyncio|outcome)(?:\.|\Z)"
)
"""Modules between the runner and a handler, in its task or in a thread."""


def error_text(error: BaseException) -> str:
    """Return an exception as the job's error: its last line first, then the traceback; masked and bounded."""
    if isinstance(error, BodyFailed):
        return error.text
    summary = _summary(error)
    try:
        frames = _users_frames(error.__traceback__)
        trace = "".join(traceback.format_exception(type(error), error, frames, limit=-30))
    except Exception:  # noqa: BLE001 - an exception whose own formatting raises still ends its job
        trace = ""
    # Cut to MAX_MASKED first, because masking takes time, and to the stored length only after masking: that cut could
    # separate a secret from the name by which it is recognized.
    return storable_text(f"{summary}\n\n{mask_text(storable_text(trace, MAX_MASKED))}".rstrip())


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the handler's frame on, without our and Trio's frames that call it.

    If there are no others, return the whole traceback.
    """
    users = frames
    while users is not None and _CALLER.match(users.tb_frame.f_globals.get("__name__", "")):
        users = users.tb_next
    return users or frames


def _summary(error: BaseException) -> str:
    try:
        text = "; ".join([str(error), *getattr(error, "__notes__", ())])
    except Exception:  # noqa: BLE001 - see above
        text = "(its text is not available)"
    # Mask before cutting: a cut through a secret would leave its beginning unmasked.
    return storable_text(
        mask_text(f"{type(error).__name__}: {mask_text(text[:20_000])[:2_000]}".rstrip(": ")), MAX_SUMMARY
    )
