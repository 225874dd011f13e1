"""Progress of a run: counts, phases, failures, and the check for too many consecutive failures.

All parts of a pipeline update one object, without waiting. Its snapshots are the job's progress, and its summary is the
job's result. The writer takes the failures from it to save them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import attrs
import trio

from dataloader.flows.etl.parse.transform import MAX_KEY, Processed, masked_beginning
from dataloader.flows.etl.run.load_log import Phase
from dataloader.flows.etl.sources.source import Page
from dataloader.jobs.secrets.masking import mask_text
from dataloader.store.etl.failure_rows import Failure

PHASES: Final[tuple[Phase, ...]] = ("requests", "processing", "writing")
FAILED: Final = {
    "request": "requests_failed",
    "detail": "details_failed",
    "record": "records_failed",
    "row": "rows_failed",
    "batch": "rows_failed",
}
"""Count that each kind of failure adds to. A batch counts as its rows. A segment is counted at its end."""
_OF_RECORDS: Final = frozenset({"record", "row"})
"""Failures that count by their share, because a single one says nothing about the run."""
MAX_LISTED: Final = 1_000
"""Maximum failures in the summary. All are in the table of failures."""
MANY_UNSAVED: Final = 1_000
"""Number of unsaved failures that are saved immediately instead of with their segment."""


def failed_records(counts: Mapping[str, int]) -> tuple[int, int]:
    """Return the number of failed records and rows, and the number of all."""
    records, failed = counts.get("records", 0), counts.get("records_failed", 0)
    # A record may have become several rows, each of which can be refused.
    return failed + counts.get("rows_failed", 0), max(records, counts.get("rows", 0) + failed)


@attrs.define
class PhaseTimes:
    """Times of a phase: its start, the end of its last work, and the seconds of work of all its workers."""

    began_at: datetime | None = None
    ended_at: datetime | None = None
    busy_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Add `seconds` of work that have just ended."""
        self.ended_at = datetime.now(UTC)
        began_at = self.ended_at - timedelta(seconds=seconds)
        self.began_at = began_at if self.began_at is None else min(self.began_at, began_at)
        self.busy_s += seconds


@attrs.define(eq=False, kw_only=True)
class LoadProgress:
    """Progress of one run. `too_many` is called once, when there are more than `max_failures` consecutive failures.

    These are failures of requests, batches and segments, and responses and batches without a good record. The latter
    count only while more than `max_failed_share` of the records have failed so far, because bad records often occur
    together.

    `idle` is the reason why the run sends no request, if it sends none. `remarks` are the parts of its request that it
    leaves out, each with their number. `hide` removes the secrets of its sources from stored failures.
    """

    load: str
    max_failures: int
    max_failed_share: float = 0.0
    too_many: Callable[[], None] = lambda: None
    telemetry: Callable[[str, Mapping[str, int]], None] = lambda _load, _counts: None
    hide: Callable[[str], str] = mask_text
    counts: Counter[str] = attrs.field(factory=Counter)
    phases: dict[Phase, PhaseTimes] = attrs.field(factory=lambda: {phase: PhaseTimes() for phase in PHASES})
    failures: list[Failure] = attrs.field(factory=list)
    last: Failure | None = None
    unsaved: list[Failure] = attrs.field(factory=list)
    waiting: Mapping[str, Any] | None = None
    queued: int = 0
    active: int = 0
    unwritten: int = 0
    segment: str = ""
    segments_planned: int | None = None
    idle: str = ""
    remarks: Counter[str] = attrs.field(factory=Counter)
    began: float = attrs.field(factory=trio.current_time)
    _in_a_row: int = 0

    def count(self, **numbers: int) -> None:
        """Add to the counts."""
        self.counts.update(numbers)
        self.telemetry(self.load, numbers)

    def uncount(self, numbers: Mapping[str, int]) -> None:
        """Take back counts of data that is read again."""
        self.counts.subtract(numbers)

    def take_back_failures(self, segment: str) -> None:
        """Take back the unsaved failures of a segment whose data is read again."""
        for failure in [one for one in self.unsaved if one.segment == segment]:
            self.unsaved.remove(failure)
            if failure in self.failures:
                self.failures.remove(failure)
            if failure.phase in FAILED:
                self.uncount({FAILED[failure.phase]: failure.times})

    def worked(self) -> None:
        """Note a success, which ends a series of failures."""
        self._in_a_row = 0

    def failed(self, failure: Failure, *, is_on_record: bool = False) -> None:
        """Note a final failure. `is_on_record`: other failures in the database already record the missing data."""
        failure = attrs.evolve(
            failure,
            key=self.hide(failure.key),
            error=self.hide(failure.error),
            sample=failure.sample and self.hide(failure.sample),
        )
        if failure.phase in FAILED:
            self.count(**{FAILED[failure.phase]: failure.times})
        self.last = failure
        if len(self.failures) < MAX_LISTED:
            self.failures.append(failure)
        if not is_on_record:
            self.unsaved.append(failure)
        if failure.phase not in _OF_RECORDS:
            self._failed_in_a_row()

    def spoiled(self) -> None:
        """Note a response or a batch without a good record."""
        failed, tried = failed_records(self.counts)
        if failed > self.max_failed_share * tried:
            self._failed_in_a_row()

    def _failed_in_a_row(self) -> None:
        self._in_a_row += 1
        if self._in_a_row == self.max_failures + 1:
            self.too_many()

    def processed(self, page: Page, processed: Processed, segment: str, requests: Sequence[Mapping[str, Any]]) -> None:
        """Note the failures of a page's records after they were converted to rows."""
        for broken in page.broken:
            key, error = masked_beginning(broken.key, MAX_KEY), masked_beginning(broken.error)
            self.failed(self._of_record(segment, requests, key, error, masked_beginning(broken.sample)))
        for refused in processed.refused:
            self.failed(self._of_record(segment, requests, refused.key, refused.error, refused.sample))
        if processed.more_refused:
            more = f"{processed.more_refused} more records"
            why = "their errors are not stored: too many records of one answer failed"
            failure = self._of_record(segment, requests, more, why, "")
            self.failed(attrs.evolve(failure, times=processed.more_refused))
        refused_in_all = len(processed.refused) + processed.more_refused
        if processed.records > refused_in_all or not (processed.records or page.broken):
            self.worked()
        else:
            self.spoiled()

    def _of_record(
        self, segment: str, requests: Sequence[Mapping[str, Any]], key: str, error: str, sample: str
    ) -> Failure:
        return Failure(
            load=self.load, segment=segment, phase="record", key=key, error=error, sample=sample, requests=requests
        )

    def take_unsaved(self) -> list[Failure]:
        """Return the failures that are not in the database yet, each once."""
        taken, self.unsaved = self.unsaved, []
        return taken

    @property
    def are_many_unsaved(self) -> bool:
        """Return whether there are too many unsaved failures to wait for the segment's end."""
        return len(self.unsaved) >= MANY_UNSAVED

    def put_back(self, failures: Sequence[Failure]) -> None:
        """Take back failures that could not be saved."""
        self.unsaved = [*failures, *self.unsaved]

    def snapshot(self) -> dict[str, Any]:
        """Return the state of the run, for the job's progress."""
        shown: dict[str, Any] = {
            "segment": self.segment,
            **({} if self.segments_planned is None else {"segments_planned": self.segments_planned}),
            **{name: number for name, number in sorted(self.counts.items()) if number},
            "queued": self.queued,
            "active_workers": self.active,
            "unwritten": self.unwritten,
        }
        return shown if self.waiting is None else {**shown, "waiting": dict(self.waiting)}

    def summary(self, status: str, reason: str) -> dict[str, Any]:
        """Return the outcome of the run, for the job's result. `reason`: why it failed, was stopped or did nothing."""
        return {
            "status": status,
            **({"reason": reason} if reason else {}),
            "seconds": round(trio.current_time() - self.began, 3),
            "counts": {name: number for name, number in sorted(self.counts.items()) if number},
            "phases": {
                phase: {
                    "began_at": None if times.began_at is None else times.began_at.isoformat(),
                    "ended_at": None if times.ended_at is None else times.ended_at.isoformat(),
                    "busy_s": round(times.busy_s, 3),
                }
                for phase, times in self.phases.items()
            },
            "failures": [
                {"segment": f.segment, "phase": f.phase, "item": f.key, "error": f.error} for f in self.failures
            ],
        }
