"""Decides at a segment's end what is merged and recorded, by the failures of this segment and the earlier ones.

Segments end in order. The load's state never moves over a failed segment. A segment that lacks only rows that are
recorded as failures has not failed. This module writes nothing; the writer does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from dataloader.flows.etl.plan.segment import Part


@attrs.frozen(kw_only=True)
class SegmentEnd:
    """Decision on a part, and on its segment if the part is the last one.

    `is_noted`: the segment is recorded as done. `is_complete`: rows that the part lacks are gone from the source.
    `left_out`: reason why the part's rows are not merged, or None. `state`: the load's new state, or None if it stays.
    """

    ends_segment: bool
    is_noted: bool
    is_complete: bool
    left_out: str | None
    counts: Mapping[str, int]
    state: Mapping[str, Any] | None


@attrs.define
class SegmentOrder:
    """Segments of a run in the order in which they end. `is_whole_so_far` until one of them is not whole."""

    is_whole_so_far: bool = True

    def end(self, part: Part, *, is_done: bool) -> SegmentEnd:
        """Decide on a part and its segment. `is_done` is false if the run stopped before all of the part arrived."""
        segment = part.segment
        segment.is_whole &= part.is_whole
        ends_segment = is_done and part.ends_segment
        if ends_segment:
            self.is_whole_so_far &= segment.is_whole
        # A resumed run loads an incomplete segment again; otherwise the state would move over it. In a retry of
        # failures, each repeated failure is a new one.
        is_noted = ends_segment and (not segment.is_refused if segment.is_retry else segment.is_whole)
        left_out = None
        if not part.table.declared.key and not is_noted:
            left_out = "without a key, its rows would be duplicated"
        return SegmentEnd(
            ends_segment=ends_segment,
            is_noted=is_noted,
            is_complete=is_done and part.is_whole and not part.lacks_records,
            left_out=left_out,
            counts=_counts_of_all(part) if is_noted else part.counts,
            state=segment.state if ends_segment and self.is_whole_so_far else None,
        )

    def refused(self, part: Part) -> None:
        """Note that the database has refused the whole segment."""
        part.segment.is_refused, part.segment.is_whole, self.is_whole_so_far = True, False, False


def _counts_of_all(part: Part) -> Mapping[str, int]:
    done = part.segment.counts + part.counts
    if not part.segment.is_whole:
        done["segments_failed"] = 1
    return done
