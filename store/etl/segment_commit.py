"""Commit of a segment: one transaction that merges its staged rows, records it and moves the load's state.

The commit is idempotent. Its first write is the segment's ledger row, whose key has the run and the segment. If the
answer to COMMIT is lost, the caller repeats the whole operation: it waits for a transaction that still holds the row,
and if that has committed, the row gives the counts and nothing is merged again. A worker that stops in the middle of
its transaction holds the row until the server ends it, after `lease_s` seconds.

The last statement is the fence: it commits only while the job still belongs to its worker and its run holds the load.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.model import DEFAULT_LEASE_S
from dataloader.jobs.text import UNSTORABLE
from dataloader.store.etl.failure_rows import Failure, aio_keep_failures
from dataloader.store.etl.history_merge import aio_merge_any, aio_note_snapshot
from dataloader.store.etl.history_snapshot import HistoryMerge
from dataloader.store.etl.load_holders import aio_fence_load
from dataloader.store.etl.load_state import aio_move_state
from dataloader.store.etl.merge import Merge

_END_IDLE: Final = "SET LOCAL idle_in_transaction_session_timeout = {0}"
_LEDGER: Final = """
INSERT INTO dl_etl_segments (run_id, task, segment, counts) VALUES ($1, $2, $3, $4)
ON CONFLICT DO NOTHING RETURNING true
"""
_RECORDED: Final = "SELECT counts FROM dl_etl_segments WHERE run_id = $1 AND task = $2 AND segment = $3"
_COUNTED: Final = "UPDATE dl_etl_segments SET counts = $4 WHERE run_id = $1 AND task = $2 AND segment = $3"
# This also resolves failures that an earlier attempt of the run has recorded for the same segment, which it did not
# commit. A retried failure keeps the segment in which it failed first; its requests name the segment that retried it.
_RESOLVE: Final = """
UPDATE dl_etl_failures SET solved_at = clock_timestamp() WHERE solved_at IS NULL
AND (failure_id = ANY ($5) OR
  (run_id = $1 AND load = $2 AND requests -> 0 ->> 'tried_by' = $3 AND failure_id <= $4))
"""
_ALL: Final = """
UPDATE dl_etl_failures SET solved_at = clock_timestamp()
WHERE load = $2 AND solved_at IS NULL AND (run_id <> $1 OR failure_id <= $3)
"""
_KEEP_DETAILS: Final = """
INSERT INTO dl_etl_details (run_id, task, segment, token, details, counts) VALUES ($1, $2, $3, $4, $5, $6)
"""
_FORGET_DETAILS: Final = "DELETE FROM dl_etl_details WHERE run_id = $1 AND task = $2 AND segment = $3"
_INSTANT: Final = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"
# A segment that is loaded completely resolves the failures in it before:
# - in another run, by the segment's name;
# - in another run, by a window that lies within this one: a run's last window ends in the middle of its unit, so the
#   next run's has another name. Names have both ends of a window, in whole seconds;
# - in an earlier attempt of this run. But a detail that such an attempt has completed is not requested again, so its
#   failures stay unresolved.
_AGAIN: Final = f"""
UPDATE dl_etl_failures f SET solved_at = clock_timestamp()
WHERE f.load = $2 AND f.solved_at IS NULL AND (f.segment = $3 OR CASE
  WHEN $6::timestamptz IS NULL OR f.segment !~ '^{_INSTANT} to {_INSTANT}$' THEN false
  ELSE split_part(f.segment, ' to ', 1)::timestamptz >= date_trunc('second', $6)
   AND split_part(f.segment, ' to ', 2)::timestamptz <= $7 END)
AND (f.run_id <> $1 OR (f.failure_id <= $4 AND NOT EXISTS (
  SELECT FROM dl_etl_details d WHERE d.run_id = $1 AND d.task = $2 AND d.segment = $3 AND d.token <> $5 AND
  f.requests -> 0 ->> 'of' = 'detail' AND f.requests -> 0 ->> 'key' = ANY (d.details))))
"""


@attrs.frozen(kw_only=True)
class SegmentCommit:
    """End of a segment: the merges, and the records to write in the same transaction.

    Attributes:
        lease_s: seconds after which the server ends this transaction if the worker has stopped in the middle of it.
        segment: its name; None merges the rows that have arrived so far, and the segment is not done.
        merges: the merges of its rows, one for each table, parents before children.
        resolves: the failures that the segment has retried; None for a segment that was loaded completely, which
            resolves its earlier failures: in other runs, and in this run's earlier attempts.
        resolves_all: the run has loaded all data of the load, which resolves all earlier failures.
        again_until: the number of the last failure of the run's earlier attempts.
        window: both ends of the segment's window; failures of other windows within it are resolved, too.
        failures: new failures to record.
        state: the load's state after this segment; None leaves it as it is.
        counts: the counts to record with those of the merges.
        details_of: the segment's name, if its rows are those of details.
        details: the keys of the details that are complete now.
    """

    run_id: UUID
    token: int
    task: str
    segment: str | None
    merges: Sequence[Merge | HistoryMerge]
    lease_s: float = DEFAULT_LEASE_S
    resolves: Sequence[int] | None = None
    resolves_all: bool = False
    again_until: int = 0
    window: tuple[datetime, datetime] | None = None
    failures: Sequence[Failure] = ()
    state: Mapping[str, Any] | None = None
    counts: Mapping[str, int] = attrs.field(factory=dict)
    details_of: str | None = None
    details: Sequence[str] = ()


async def aio_commit_segment(connection: Any, commit: SegmentCommit) -> dict[str, int]:
    """Merge a segment's staged rows and record it, in the caller's transaction. Return the counts of all merges.

    If the run has already committed the segment, this writes nothing and returns the counts of that commit.

    Raises `LeaseLost` if the job no longer belongs to this worker, or another run holds the load.
    """
    # The server ends the transaction of a stopped worker, which would make the next worker wait for its ledger row.
    await connection.execute(_END_IDLE.format(int(commit.lease_s * 1000)))
    if commit.segment is not None and (recorded := await _aio_recorded(connection, commit, commit.segment)) is not None:
        return dict(Counter(recorded) - Counter(commit.counts))
    counts: dict[str, int] = {}
    for merge in commit.merges:
        for name, number in (await aio_merge_any(connection, merge)).items():
            counts[name] = counts.get(name, 0) + number
    done = dict(Counter(commit.counts) + Counter(counts))
    if commit.segment is not None:
        await _aio_note_segment(connection, commit, commit.segment, done)
    elif commit.details:
        of = commit.run_id, commit.task, commit.details_of
        # A detail whose key PostgreSQL cannot store is requested again when the run is resumed.
        details = [key for key in commit.details if not UNSTORABLE.search(key)]
        await connection.execute(_KEEP_DETAILS, *of, commit.token, details, done)
    if commit.failures:
        await aio_keep_failures(connection, commit.run_id, commit.failures)
    if commit.state is not None:
        await aio_move_state(connection, commit.task, commit.state, commit.run_id)
    await aio_fence_load(connection, commit.task, commit.run_id, commit.token)
    return counts


async def _aio_recorded(connection: Any, commit: SegmentCommit, segment: str) -> Mapping[str, int] | None:
    """Write the segment's ledger row and return None, or return the counts in the row that the run has committed."""
    of = commit.run_id, commit.task, segment
    if await connection.fetchval(_LEDGER, *of, dict(commit.counts)):
        return None
    # A separate statement: it must see a row that was committed while the previous one waited for it.
    recorded: Mapping[str, int] = await connection.fetchval(_RECORDED, *of)
    return recorded


async def _aio_note_segment(connection: Any, commit: SegmentCommit, segment: str, done: Mapping[str, int]) -> None:
    of = commit.run_id, commit.task, segment
    await connection.execute(_COUNTED, *of, done)
    for merge in commit.merges:
        if isinstance(merge, HistoryMerge):
            await aio_note_snapshot(connection, merge, commit.task, segment)
    if commit.resolves is None:
        await connection.execute(_AGAIN, *of, commit.again_until, commit.token, *(commit.window or (None, None)))
    else:
        await connection.execute(_RESOLVE, *of, commit.again_until, list(commit.resolves))
    if commit.resolves_all:
        await connection.execute(_ALL, commit.run_id, commit.task, commit.again_until)
    if commit.details_of is not None:
        await connection.execute(_FORGET_DETAILS, *of)
