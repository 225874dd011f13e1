"""Only writer of rows: batches to staging tables, segments to their targets.

A batch is one statement. If the database refuses it, the batch is split: the refused rows become failures, and the
others are staged. A segment's end is one transaction, which merges the staged rows, writes the segment's record and
moves the load's state, as `SegmentOrder` has decided. Segments end in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import trio

from dataloader.flows.etl.parse.transform import masked_beginning
from dataloader.flows.etl.plan.segment import Part
from dataloader.flows.etl.run.pipeline_state import DetailComplete, DroppedPart, PipelineState, RowBatch, ToWriter
from dataloader.flows.etl.sources.source import Request
from dataloader.flows.etl.write.segment_end import SegmentOrder
from dataloader.jobs.errors import LeaseLost, StoreError, StoreUnavailable, Unstorable
from dataloader.store.etl.refused_rows import RefusedSearch
from dataloader.store.etl.run_journal import aio_note_failures
from dataloader.store.etl.segment_commit import SegmentCommit, aio_commit_segment
from dataloader.store.etl.staging import RowsLost, StagedLines, aio_drop_staged, aio_stage
from dataloader.store.queue.transaction import Transactions


@attrs.define(eq=False)
class Batch:
    """Rows of one part that are written together: lines, each with its response's number, and their requests, if any.

    `answers` are the responses whose last row is in the batch. `settled` is the number of rows that were staged or
    refused when the batch was split.
    """

    number: int = 0
    settled: int = 0
    lines: list[tuple[int, StagedLines]] = attrs.field(factory=list)
    requests: list[Request | None] = attrs.field(factory=list)
    answers: list[RowBatch] = attrs.field(factory=list)

    def requests_of(self, pieces: Iterable[int]) -> list[Request]:
        """Return the requests of pieces of lines, each once."""
        found = {id(request): request for piece in pieces if (request := self.requests[piece]) is not None}
        return list(found.values())

    def left(self) -> list[tuple[list[Request], int]]:
        """Return its requests, grouped by the segments in which they failed before, with the number of unsettled rows.

        All requests are returned: after a rollback of the search it is unknown whose rows are settled.
        """
        settled, found = self.settled, dict[str, tuple[list[Request], int]]()
        for request, (_, lines) in zip(self.requests, self.lines, strict=True):
            done = min(settled, lines.number)
            settled -= done
            segment = "" if request is None else request.segment
            requests, left = found.get(segment, ([], 0))
            requests += [] if request is None else [request]
            found[segment] = requests, left + lines.number - done
        return list(found.values())


@attrs.define(eq=False)
class Writer:
    """Writer of a run."""

    shared: PipelineState
    transactions: Transactions
    _batches: dict[Part, Batch] = attrs.field(init=False, factory=dict)
    _unkept: set[Part] = attrs.field(init=False, factory=set)
    _oldest: float = attrs.field(init=False, default=math.inf)
    _order: SegmentOrder = attrs.field(init=False, factory=SegmentOrder)

    async def run(self) -> None:
        """Write until no more rows arrive, then write the rest, which after a stop may be a part of a segment."""
        while True:
            message: ToWriter | None = None
            with trio.CancelScope(deadline=self._oldest) as scope:
                try:
                    message = await self.shared.processed.receive()
                except trio.EndOfChannel:
                    break
            if scope.cancelled_caught:
                await self._flush_all()
            elif isinstance(message, RowBatch):
                await self._add(message)
            elif isinstance(message, DetailComplete):
                await self._keep_in_time(message.part)
            elif isinstance(message, DroppedPart):
                await self._drop(message.part)
            elif message is not None:
                message.is_ready = True
                await self._commit_ready()
            await self._save_if_many()
        await self._flush_all()
        await self._commit_rest()

    async def _add(self, rows: RowBatch) -> None:
        size, left = self.shared.config.batch_size, rows.number
        most = max(size, self.shared.limits.most_rows)
        if not left:
            self._batches.setdefault(rows.part, Batch()).answers.append(rows)
            self._flush_within(self.shared.config.batch_timeout)
        for lines in rows.lines:
            room = most - self._batches[rows.part].number if rows.part in self._batches else most
            for piece in lines.cut(room, most):
                batch = self._batches.setdefault(rows.part, Batch())
                batch.number += piece.number
                batch.lines.append((rows.answer, piece))
                batch.requests.append(rows.request)
                left -= piece.number
                if not left:
                    batch.answers.append(rows)
                self._flush_within(self.shared.config.batch_timeout)
                # Otherwise the next request would wait for the rest of a batch, and the batch for that request.
                if batch.number == most or (not left and batch.number >= size) or self.shared.backpressure.is_heavy:
                    await self._flush(rows.part)

    def _flush_within(self, seconds: float) -> None:
        self._oldest = min(self._oldest, trio.current_time() + seconds)

    async def _flush_all(self) -> None:
        for part in list(self._batches):
            await self._flush(part)
        for part in list(self._unkept):
            await self._keep(part)
        self._oldest = math.inf

    async def _flush(self, part: Part) -> None:
        """Write a part's batch to its staging table, without the rows that the database refuses."""
        batch = self._batches.pop(part)
        if not self._batches and not self._unkept:
            self._oldest = math.inf
        await self._stage(part, batch)
        # One response may be many batches.
        await self._save_if_many()
        await self._keep_in_time(part)

    async def _keep_in_time(self, part: Part) -> None:
        """Merge the part's complete details, if any, `batch_timeout` after the last time."""
        if part.keeps_details and part.completed.done:
            self._unkept.add(part)
            if (wait_s := part.kept_at + self.shared.config.batch_timeout - trio.current_time()) > 0:
                self._flush_within(wait_s)
            else:
                await self._keep(part)

    async def _stage(self, part: Part, batch: Batch) -> None:
        began = trio.current_time()
        number = batch.number
        try:
            try:
                if number:
                    await self.transactions.run(aio_stage, part.staged_as(self.shared.token), batch.lines)
            except Unstorable:
                await self._take_apart(part, batch)
            else:
                part.staged += number
                if number:
                    self.shared.progress.worked()
            for rows in batch.answers:
                part.counts.update(rows.counts)
                part.completed.staged("" if rows.request is None else rows.request.key)
        except (StoreUnavailable, LeaseLost):
            raise
        except StoreError as error:
            part.is_whole = False
            for request in batch.requests_of(range(len(batch.requests))):
                part.completed.failed(request.key)
            self.shared.log.warning(
                "skipping rows of a batch that were rejected together",
                phase="writing",
                rows=number - batch.settled,
                error=str(error),
            )
            sample = masked_beginning(
                batch.lines[0][1].text.partition(b"\n")[0].partition(b"\t")[2].decode(errors="replace")
            )
            for requests, left in batch.left():
                key = f"{left} rows of {_origin_of(part, requests)}"
                failure = self.shared.failure(
                    part, "batch", key, str(error), sample=sample, requests=requests, times=left
                )
                self.shared.progress.failed(failure)
        finally:
            self.shared.progress.unwritten -= number
            self.shared.backpressure.hold(-sum(len(lines.text) for _, lines in batch.lines))
            self.shared.progress.phases["writing"].add(trio.current_time() - began)

    async def _take_apart(self, part: Part, batch: Batch) -> None:
        """Stage the rows of a batch that the database accepts."""
        search = RefusedSearch(part.staged_as(self.shared.token), batch.lines, self.shared.limits.most_refused)
        try:
            while not search.is_over:
                search.staged += await self.transactions.run(search.aio_go_on)
        finally:
            batch.settled = search.settled
            part.staged += search.staged
            self._refused(part, batch, search)
        # If the search itself failed, that is a separate failure.
        if search.staged:
            self.shared.progress.worked()
        else:
            self.shared.progress.spoiled()

    def _refused(self, part: Part, batch: Batch, search: RefusedSearch) -> None:
        """Record the rows that the database refused as failures. The others of their batch are staged."""
        # A refused row may be the new version of a row of the table.
        part.lacks_records |= bool(search.refused or search.unsearched)
        for row in search.refused:
            cells = _cells(row.line)
            key = ", ".join(cells[name].strip() for name in part.table.declared.key if name in cells)
            failure = self.shared.failure(
                part,
                "row",
                key or f"number {row.place + 1} of its batch",
                row.error,
                sample=_sample_of_cells(cells),
                requests=batch.requests_of([row.piece]),
            )
            self.shared.progress.failed(failure)
        for one in search.unsearched:
            failure = self.shared.failure(
                part,
                "row",
                f"{one.rows} rows from number {one.place + 1} of their batch",
                f"rejected together, after too many single rows: {one.error}",
                sample=_sample_of_cells(_cells(one.line)),
                requests=batch.requests_of(one.pieces),
                times=one.rows,
            )
            self.shared.progress.failed(failure)
        for first in search.refused[:1]:
            told = {"rows": len(search.refused), "staged": search.staged, "error": first.error}
            self.shared.log.warning("skipping rejected rows", phase="writing", **told)

    async def _keep(self, part: Part) -> None:
        """Merge and record the complete details, so that a resumed run does not request them again."""
        self._unkept.discard(part)
        segment, began = part.segment, trio.current_time()
        part.kept_at = began
        part.count_sent()
        commit = SegmentCommit(
            run_id=self.shared.run_id,
            token=self.shared.token,
            task=self.shared.load,
            lease_s=self.shared.lease_s,
            segment=None,
            merges=part.merges(self.shared.token, is_complete=False),
            failures=self.shared.progress.take_unsaved(),
            counts=part.counts,
            details_of=segment.name,
            details=part.completed.take(),
        )
        try:
            counts = await self._committed(commit)
        except (StoreUnavailable, LeaseLost):
            raise
        except StoreError:
            # The details stay staged. The error is reported when the segment ends.
            part.keeps_details = False
        else:
            self._note(part, counts)
        finally:
            self.shared.progress.phases["writing"].add(trio.current_time() - began)

    def _note(self, part: Part, counts: Mapping[str, int]) -> None:
        """Note that a part's staged rows are merged."""
        self.shared.progress.count(**counts)
        part.segment.counts.update(part.counts)
        part.segment.counts.update(counts)
        part.counts.clear()
        part.staged = 0

    async def _drop(self, part: Part) -> None:
        """Forget a part, and delete its staged rows."""
        batch = self._batches.pop(part, None)
        if batch is not None:
            self.shared.progress.unwritten -= batch.number
            self.shared.backpressure.hold(-sum(len(lines.text) for _, lines in batch.lines))
        self.shared.parts.remove(part)
        if part.staged:
            await self.transactions.run(aio_drop_staged, part.staged_as(self.shared.token))
        part.committed.set()
        self.shared.retry_queue.stir()

    async def _commit_ready(self) -> None:
        """Commit the finished parts in order, which snapshots and the load's state require."""
        while self.shared.parts and self.shared.parts[0].is_ready:
            part = self.shared.parts.popleft()
            if part in self._batches:
                await self._stage(part, self._batches.pop(part))
            self._unkept.discard(part)
            await self._commit(part, is_done=True)

    async def _commit_rest(self) -> None:
        """Merge the staged rows of a canceled run. The segment is not done, and no row is marked as deleted."""
        await self._commit_ready()
        while self.shared.parts:
            part = self.shared.parts.popleft()
            if part.staged:
                await self._commit(part, is_done=False)

    async def _commit(self, part: Part, *, is_done: bool) -> None:
        segment, began = part.segment, trio.current_time()
        part.count_sent()
        end = self._order.end(part, is_done=is_done)
        merges = part.merges(self.shared.token, is_complete=end.is_complete)
        if part.keeps_missing(is_complete=end.is_complete):
            kept = "the source has no records, so no rows are closed or marked as deleted"
            self.shared.progress.remarks[kept] += 1
            self.shared.log.warning(kept, phase="writing", segment=segment.name, table=part.table.name)
        if merges and end.left_out is not None:
            merges = []
            told = {"segment": segment.name, "rows": part.staged, "why": end.left_out}
            self.shared.log.warning("skipping a segment", phase="writing", **told)
        commit = SegmentCommit(
            run_id=self.shared.run_id,
            token=self.shared.token,
            task=self.shared.load,
            lease_s=self.shared.lease_s,
            segment=segment.name if end.is_noted else None,
            merges=merges,
            resolves=segment.retries if segment.is_retry or not segment.has_same_data else None,
            resolves_all=end.is_noted and segment.is_last_of_all and self._order.is_whole_so_far,
            again_until=self.shared.last_failure,
            window=segment.span,
            failures=self.shared.progress.take_unsaved(),
            counts=end.counts,
            details_of=segment.name if part.table.detail is not None else None,
            details=part.completed.take() if part.keeps_details else (),
            state=end.state,
        )
        try:
            counts = await self._committed(commit)
        except (StoreUnavailable, LeaseLost):
            raise
        except StoreError as error:
            self._order.refused(part)
            self._tell_of_refusal(part, error)
        else:
            self._note(part, counts)
            self.shared.log.info("committed", phase="writing", segment=segment.name, table=part.table.name, **counts)
        finally:
            self.shared.progress.phases["writing"].add(trio.current_time() - began)
            part.committed.set()
            self.shared.retry_queue.stir()
        if end.ends_segment:
            self.shared.progress.count(**{"segments" if segment.is_whole else "segments_failed": 1})

    async def _committed(self, commit: SegmentCommit) -> Mapping[str, int]:
        """Commit and return the counts. Failures that the commit did not save are put back, to be saved later."""
        try:
            return await self._commit_once(commit)
        except BaseException:
            self.shared.progress.put_back(commit.failures)
            raise

    async def _commit_once(self, commit: SegmentCommit) -> Mapping[str, int]:
        """Commit. If the answer is lost, repeat: the segment's ledger row says whether it was committed."""
        lost: StoreUnavailable | None = None
        for pause_s in (*self.shared.limits.commit_pauses_s, None):
            try:
                return await self.transactions.run(aio_commit_segment, commit)
            except RowsLost:
                if lost is None:
                    raise
                # It was not committed, and the server's crash has emptied the staging table.
                raise lost from None
            except StoreUnavailable as error:
                # The merge of a part without a ledger row cannot be repeated.
                if commit.segment is None or pause_s is None:
                    raise
                lost = error
            self.shared.log.warning(
                "repeating a commit whose answer was lost", phase="writing", segment=commit.segment, error=str(lost)
            )
            await trio.sleep(pause_s)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    def _tell_of_refusal(self, part: Part, error: StoreError) -> None:
        """Report a segment that the database refused and that was rolled back."""
        segment = part.segment
        self.shared.log.warning(
            "rolling back a rejected segment", phase="writing", segment=segment.name, error=str(error)
        )
        refused = self.shared.failure(part, "segment", segment.name, str(error))
        # The retried failures are still unresolved, and keep their requests for another retry.
        self.shared.progress.failed(refused, is_on_record=segment.is_retry)

    async def _save_if_many(self) -> None:
        if self.shared.progress.are_many_unsaved:
            await self.save_failures()

    async def save_failures(self) -> None:
        """Save the failures since the last segment's end, also after a stop of the run."""
        failures = self.shared.progress.take_unsaved()
        if failures:
            with trio.move_on_after(self.shared.limits.save_s, shield=True):
                await self.transactions.run(aio_note_failures, self.shared.run_id, self.shared.token, failures)
                return
            # The statement may have succeeded, but failures that are recorded twice are better than lost ones.
            self.shared.progress.put_back(failures)
            self.shared.log.warning("failures were not stored in time", phase="writing", failures=len(failures))


def _origin_of(part: Part, requests: Sequence[Request]) -> str:
    """Return the name of the first request, or of the segment of rows without a request."""
    return requests[0].key or requests[0].endpoint if requests else part.segment.name


def _cells(line: StagedLines) -> dict[str, str]:
    """Return the cells of a single row by the names of its columns."""
    return dict(zip(line.columns, line.text.decode(errors="replace").split("\t")[1:], strict=False))


def _sample_of_cells(cells: Mapping[str, str]) -> str:
    return masked_beginning(", ".join(f"{name}: {cell.strip()}" for name, cell in cells.items()))
