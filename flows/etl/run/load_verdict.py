"""End of a run of a load, by its failures: succeeded, succeeded with failures, or failed.

Good rows are written in any case. A segment has failed if a request of it failed for good, or its table refused it; the
load's state then stays before it. Failed records, rows and details do not stop the state, but too many of them fail
the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal

import attrs

from dataloader.flows.etl.declare.pipeline_config import PipelineConfig
from dataloader.flows.etl.run.load_progress import LoadProgress, failed_records
from dataloader.store.etl.failure_rows import Failure
from dataloader.store.etl.run_journal import SUCCEEDED_WITH_FAILURES

_WRITTEN: Final = ("inserted", "updated", "unchanged", "changed", "reappeared", "filled", "corrected", "woven")
"""Counts of merges for rows that are in the table now."""

_OF_SEGMENTS: Final = frozenset({"request", "batch", "segment"})
_OF_RECORDS: Final = frozenset({"record", "row", "batch"})

RunEnd = Literal["succeeded", "succeeded_with_failures", "failed", "canceled"]


@attrs.frozen(kw_only=True)
class Verdict:
    """End of a load, with a reason, as a sentence, if it did not simply succeed or left something out."""

    end: RunEnd
    reason: str = ""


def judge(progress: LoadProgress, config: PipelineConfig) -> Verdict:
    """Return the end of a run that has processed all of its segments."""
    counts = progress.counts
    if reasons := list(_too_many(counts, config)):
        # The first failure of the kind that the first reason is about: a refused row, for example, does not fail its
        # segment.
        (_, phases), *_ = reasons
        first = next((failure for failure in progress.failures if failure.phase in phases), None)
        told = "" if first is None else f"; the first failure was {_failure_text(first)}"
        return Verdict(end="failed", reason="; ".join(reason for reason, _ in reasons) + told)
    failed = [f"{name.replace('_', ' ')}: {number:,}" for name, number in sorted(counts.items()) if _is_failure(name)]
    if failed:
        return Verdict(end=SUCCEEDED_WITH_FAILURES, reason=", ".join(failed))
    return Verdict(end="succeeded")


def give_up(progress: LoadProgress, config: PipelineConfig) -> Verdict:
    """Return the end of a run after too many consecutive failures."""
    row = f"{config.max_failures + 1} consecutive failures (max_failures is {config.max_failures:,})"
    return Verdict(
        end="failed", reason=row if progress.last is None else f"{row}; the last one was {_failure_text(progress.last)}"
    )


def _failure_text(failure: Failure) -> str:
    return f"a {failure.phase} ({failure.key}): {failure.error}"


def _is_failure(name: str) -> bool:
    return name.endswith("_failed")


def _too_many(counts: Mapping[str, int], config: PipelineConfig) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the kinds of items that failed more often than the settings allow, or without any success.

    Each is a sentence with the phases of its failures.
    """
    failed, loaded = counts.get("segments_failed", 0), counts.get("segments", 0)
    # If a segment lacks a page, its other pages are written.
    is_all = not loaded and not any(counts.get(name) for name in _WRITTEN)
    if failed > config.max_failed_segments or (failed and is_all):
        bound = f"max_failed_segments is {config.max_failed_segments:,}"
        yield f"{failed:,} of {failed + loaded:,} segments could not be loaded ({bound})", _OF_SEGMENTS
    yield from _of_share("records", *failed_records(counts), config, _OF_RECORDS)
    failed = counts.get("details_failed", 0)
    yield from _of_share("details", failed, failed + counts.get("details", 0), config, frozenset({"detail"}))


def _of_share(
    what: str, failed: int, tried: int, config: PipelineConfig, phases: frozenset[str]
) -> Iterator[tuple[str, frozenset[str]]]:
    if failed > config.max_failed_share * tried or (failed and failed >= tried):
        share = failed / tried if tried else 1.0
        bound = f"max_failed_share is {config.max_failed_share:g}"
        yield f"{failed:,} of {tried:,} {what} failed ({share:.1%}; {bound})", phases
