"""Runs one load within a job's run: its tables and staging tables, its segments, its pipeline, its progress."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Final

import attrs
import trio

from dataloader.flows.etl.declare.load import Load, Table
from dataloader.flows.etl.declare.pipeline_config import PipelineConfig
from dataloader.flows.etl.declare.rows import Rows
from dataloader.flows.etl.fetch.fetcher import Fetcher
from dataloader.flows.etl.fetch.rate_limiter import LEASE_MARGIN_S, RateLimiter
from dataloader.flows.etl.fetch.request_sender import RequestSender
from dataloader.flows.etl.parse.copy_lines import LineEncoder
from dataloader.flows.etl.parse.parsers import Parsers
from dataloader.flows.etl.parse.transform import Recipe
from dataloader.flows.etl.plan.known_history import KnownHistory, aio_known_history
from dataloader.flows.etl.plan.planner import (
    Kept,
    LoadArgs,
    check_failures,
    new_segments,
    retried_segments,
    why_idle,
    windows_of,
)
from dataloader.flows.etl.plan.segment import OpenTable, Segment
from dataloader.flows.etl.rows.row_reading import LAST, RowReading, has_last_segment, next_number
from dataloader.flows.etl.run.etl_run import EtlRun
from dataloader.flows.etl.run.load_log import LoadLog
from dataloader.flows.etl.run.load_metrics import LoadMetrics
from dataloader.flows.etl.run.load_progress import FAILED, LoadProgress
from dataloader.flows.etl.run.load_verdict import Verdict, give_up, judge
from dataloader.flows.etl.run.pipeline import Pipeline, PipelineEnd, SourceReading
from dataloader.flows.etl.run.pipeline_state import PipelineState
from dataloader.flows.etl.run.request_reading import RequestReading
from dataloader.jobs.asyncio_calls import AsyncioCalls
from dataloader.jobs.calls import Calls, CallsOn
from dataloader.jobs.error_groups import only_error
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.lease_margin import last_word_s
from dataloader.store.etl.load_state import aio_load_state
from dataloader.store.etl.run_journal import RunState, aio_next_failures, aio_open_failures, staging_name
from dataloader.store.etl.staging import aio_create_staging, aio_drop_staging
from dataloader.store.etl.target_table import TableInfo, aio_describe


async def run_one(run: EtlRun, load: Load, config: PipelineConfig, asked: LoadArgs, state: RunState) -> Verdict:
    """Run `load` to its end, from the point where an earlier attempt of the job stopped.

    Raises `TargetError` if the target table does not fit the declaration.
    """
    metrics = run.job.resource(LoadMetrics)
    progress = LoadProgress(
        load=load.name,
        max_failures=config.max_failures,
        max_failed_share=config.max_failed_share,
        telemetry=metrics.count,
        hide=load.hide,
    )
    verdict = CANCELED
    async with run.task(load.name) as noted:
        try:
            if not run.cancel.is_cancelled:
                verdict = await _Loading(run, load, config, asked, progress).run(state)
        except BaseExceptionGroup as group:
            raise only_error(group) from None
        else:
            noted.status = verdict.end
        finally:
            status = noted.status or run.status_of_stop()
            noted.summary = summary = progress.summary(status, verdict.reason if noted.status else "")
            metrics.ended(load.name, status)
            told = {
                name: summary[name] for name in ("status", "reason", "seconds", "counts", "phases") if name in summary
            }
            # Not a warning if it has failed: the job fails with it, which is logged.
            LoadLog.of(run.job, load.name, load.hide).info("ended", phase="run", **told)
            run.job.end_log_of(load.name)
    return verdict


CANCELED: Final = Verdict(end="canceled", reason="the run's cancellation token was cancelled")


@attrs.frozen(eq=False)
class _Loading:
    """Running load."""

    run_of_job: EtlRun
    load: Load
    config: PipelineConfig
    asked: LoadArgs
    progress: LoadProgress

    async def run(self, state: RunState) -> Verdict:
        """Run the load; return its end."""
        async with self._tables() as tables:
            pipeline = self._pipeline(state)
            end = await self._shown(pipeline, self._reading(state, tables, pipeline.shared))
        match end:
            case "canceled":
                return CANCELED
            case "failed":
                return give_up(self.progress, self.config)
        verdict = judge(self.progress, self.config)
        return verdict if verdict.reason else attrs.evolve(verdict, reason=self._remarks())

    def _remarks(self) -> str:
        """Return the parts of its request that a successful run left out, with reasons; empty if there are none."""
        progress = self.progress
        remarks = [one if times == 1 else f"{one} ({times:,} times)" for one, times in progress.remarks.items()]
        if progress.counts["requests"] or isinstance(self.load.source, Rows):
            return "; ".join(remarks)
        LoadLog.of(self.run_of_job.job, self.load.name, self.load.hide).warning(
            "the run has sent no request", phase="run", why=progress.idle
        )
        return "; ".join([progress.idle, *remarks])

    def _remark(self, text: str) -> None:
        """Log once that the run leaves out a part of its request."""
        if text not in self.progress.remarks:
            self.progress.remarks[text] = 1
            LoadLog.of(self.run_of_job.job, self.load.name, self.load.hide).warning(text, phase="run")

    def _pipeline(self, state: RunState) -> Pipeline:
        run, config = self.run_of_job, self.config
        shared = PipelineState(
            run_id=run.claimed.job_id,
            token=run.claimed.token,
            lease_s=run.claimed.lease_s,
            last_failure=state.last_failure,
            load=self.load.name,
            config=config,
            progress=self.progress,
            log=LoadLog.of(run.job, self.load.name, self.load.hide),
            limits=run.limits,
        )
        return Pipeline(
            shared=shared,
            transactions=run.transactions,
            cancel=run.cancel,
            drain_s=partial(run.drain_s, config.drain_timeout),
            is_lost=lambda: run.is_lost,
        )

    def _reading(self, state: RunState, tables: list[OpenTable], shared: PipelineState) -> SourceReading:
        if isinstance(self.load.source, Rows):
            return self._row_reading(self.load.source, state, tables[0], shared)
        sender = RequestSender(shared, self._rate_limiter())
        return RequestReading(
            Fetcher(shared, sender),
            Parsers(shared, self.run_of_job.database, self._calls()),
            self._segments(state, tables, sender),
        )

    def _rate_limiter(self) -> RateLimiter:
        run, config = self.run_of_job, self.config
        return RateLimiter(
            database=run.database,
            holder=run.claimed.token,
            progress=self.progress,
            rate_min=config.rate_min,
            rate_max=config.rate_max,
            lease_s=config.request_timeout + LEASE_MARGIN_S,
            linger_s=partial(run.drain_s, run.limits.linger_s),
            last_word_s=last_word_s(run.claimed.lease_s),
            rate_limits=self.load.rate_limits,
            draw=random.Random(),  # noqa: S311 - pauses, not secrets
        )

    def _row_reading(self, source: Rows, state: RunState, table: OpenTable, shared: PipelineState) -> SourceReading:
        run, declared = self.run_of_job, table.declared
        if self.asked.failures is not None:
            told = f"is not allowed: a function yields the rows of {self.load.name}; run the load again"
            raise BadRequest("args.failures", told)
        done = self._count_done(state)
        is_one_segment = declared.history is not None or declared.delete_missing is not None
        has_pieces = bool(declared.key) and not is_one_segment
        return RowReading(
            shared=shared,
            source=source,
            table=table,
            database=run.database,
            rate_limiter=self._rate_limiter(),
            asyncio_calls=self._asyncio_calls(),
            number=next_number(done),
            is_one_segment=is_one_segment,
            is_done=not has_pieces and has_last_segment(done),
        )

    def _asyncio_calls(self) -> AsyncioCalls | None:
        if not self.load.calls_asyncio:
            return None
        kind: Any = AsyncioCalls
        try:
            calls: AsyncioCalls = self.run_of_job.job.resource(kind)
        except LookupError:
            told = "needs the asyncio loop of handlers; register the load with add_loads, or a task with asyncio=True"
            raise BadRequest("asyncio", told) from None
        return calls

    def _calls(self) -> Calls | None:
        if self.load.dask is None and not self.load.processes:
            return None
        kind: Any = Calls if self.load.dask is None else CallsOn(self.load.dask)
        calls: Calls = self.run_of_job.job.resource(kind)
        return calls

    async def _shown(self, pipeline: Pipeline, reading: SourceReading) -> PipelineEnd:
        """Run the pipeline, and meanwhile show its state as the job's progress."""
        job = self.run_of_job.job
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._show, pipeline.shared.log)
            try:
                end = await pipeline.run(reading)
            finally:
                nursery.cancel_scope.cancel()
                # Without a checkpoint: the job may be stopped, and the last progress must still be shown.
                job.progress_nowait({"load": self.load.name, **self.progress.snapshot()})
        return end

    async def _show(self, log: LoadLog) -> None:
        limits = self.run_of_job.limits
        log_at = trio.current_time() + limits.log_s
        while True:
            progress = self.progress.snapshot()
            self.run_of_job.job.progress_nowait({"load": self.load.name, **progress})
            if trio.current_time() >= log_at:
                log.info("progress", phase="run", **progress)
                log_at += limits.log_s
            await trio.sleep(limits.show_s)

    def _count_done(self, state: RunState) -> Mapping[str, Any]:
        """Count what earlier attempts have committed; return the counts of each committed segment."""
        done = state.segments.get(self.load.name, {})
        # Not by `count`: they are already in the metrics of this process or of another one.
        for counts in done.values():
            self.progress.counts.update(counts if "segments_failed" in counts else {**counts, "segments": 1})
        del self.progress.counts[LAST]
        for phase, times in state.failed.get(self.load.name, {}).items():
            self.progress.counts.update({FAILED[phase]: times} if phase in FAILED else {})
        return done

    async def _segments(
        self, state: RunState, tables: list[OpenTable], sender: RequestSender
    ) -> AsyncGenerator[Segment, None]:
        """Yield the segments to load, in order, without those that this run has committed before."""
        load = self.load
        done = self._count_done(state)
        details = state.details.get(load.name, {})
        # Requests of an earlier attempt count even if nothing from their responses is recorded.
        sent = ((state.summaries.get(load.name) or {}).get("counts") or {}).get("requests", 0)
        on_record = [*done.values(), *(came_in.counts for came_in in details.values())]
        self.progress.counts["requests"] += max(0, sent - sum(counts.get("requests", 0) for counts in on_record))
        if self.asked.failures is not None:
            if not load.table.key:
                told = "is not allowed: without a key, existing rows would be duplicated; run the load again"
                raise BadRequest("args.failures", told)
            self.progress.idle = f"{load.name} has no failure that can be retried alone"
            segments = retried_segments(partial(self._kept_behind, bool(done)), tables)
        else:
            segments = await self._planned(state, tables, sender)
        number, names = 0, Counter[str]()
        async with aclosing(segments):
            async for segment in segments:
                number += 1
                names[segment.name] += 1
                if (times := names[segment.name]) > 1:
                    segment.name = f"{segment.name} ({times})"  # the ledger has a row for each name
                if self.asked.is_span and not segment.is_dated:
                    self._remark("files without a separate window are loaded; from and to do not apply to them")
                if segment.name not in done:
                    segment.number = number
                    if came_in := details.get(segment.name):
                        segment.done, segment.counts = came_in.keys, came_in.counts
                        self.progress.counts.update(came_in.counts)
                    yield segment  # noqa: ASYNC119 - the fetcher closes this generator as well

    async def _planned(
        self, state: RunState, tables: list[OpenTable], sender: RequestSender
    ) -> AsyncGenerator[Segment, None]:
        """Yield the segments of the run's windows.

        Raises `BadRequest`, before a request is sent, if the asked windows cannot be loaded.
        """
        run, load = self.run_of_job, self.load
        if load.windows is None and self.asked.is_span:
            self._remark(f"{load.name} has no windows and loads everything; from and to do not apply to it")
        before = await run.database.run(aio_load_state, load.name)
        watermark = None if before is None or load.windows is None else before.watermark(load.name)
        if before is not None and before.run_id == run.claimed.job_id:
            # The run continues after its last segment, and has already applied look_back.
            load = attrs.evolve(load, windows=load.windows and attrs.evolve(load.windows, look_back=timedelta()))
        windows = windows_of(load, self.asked, watermark=watermark, now=state.started_at)
        end, until = windows[-1].end if windows else None, self.asked.until
        if load.windows is not None and end is not None and until is not None and load.windows.ends_before(end, until):
            self._remark(
                f"nothing after {end.isoformat(timespec='seconds')} is loaded, because `to` ({until}) is in the future"
            )
        known = [await self._known(table) for table in tables]
        for one in known:
            if one is not None and load.windows is not None and not load.source.walks_are_segments:
                one.check_windows(windows)
        self.progress.idle = why_idle(load, self.asked, windows, watermark)
        segments = new_segments(load, windows, tables, sender.listed, watermark=watermark, known=known[0])
        # A backfill loads its whole span again.
        is_skipping = load.source.walks_are_segments and (load.windows is None or self.asked.since is None)
        return self._without_merged(segments, known[0]) if is_skipping and known[0] else segments

    async def _known(self, table: OpenTable) -> KnownHistory | None:
        if table.declared.history is None:
            return None
        return await self.run_of_job.database.run(aio_known_history, self.load.name, table.declared)

    async def _kept_behind(self, is_any_done: bool, number: int) -> Kept:  # noqa: FBT001 - given by a partial
        """Return the next failures to retry, after the one with this number.

        Raises `BadRequest` if a number in the job's args is not the number of an unresolved failure.
        """
        run, asked = self.run_of_job, self.asked.failures
        if not asked:
            mine = run.claimed.job_id
            return await run.database.run(aio_next_failures, self.load.name, mine, number, run.limits.most_retried)
        # All failures that the args name are one segment.
        if number or is_any_done:
            return {}
        kept: Kept = await run.database.run(aio_open_failures, self.load.name, asked)
        check_failures(asked, kept)
        return kept

    async def _without_merged(
        self, segments: AsyncGenerator[Segment, None], known: KnownHistory
    ) -> AsyncGenerator[Segment, None]:
        """Yield the files that the table has not merged before its newest snapshot."""
        left_out = 0
        async with aclosing(segments):
            async for segment in segments:
                if known.has_merged(segment):
                    left_out += 1
                else:
                    yield segment  # noqa: ASYNC119 - the caller closes this generator
        if left_out:
            self.progress.idle = f"nothing is new: the table has already merged {left_out:,} older snapshots"
            told = "skipping older snapshots, which the table has already merged"
            LoadLog.of(self.run_of_job.job, self.load.name, self.load.hide).info(told, phase="run", segments=left_out)

    @asynccontextmanager
    async def _tables(self) -> AsyncIterator[list[OpenTable]]:
        """Open the tables of the load, each with a staging table, for the duration of a block."""
        load, transactions = self.load, self.run_of_job.transactions
        tables = [await self._table(load.table, is_detail=False)]
        if load.detail is not None:
            tables.append(await self._table(load.detail.table, is_detail=True))
        try:
            yield tables
        finally:
            # A lost run has no time for this. The next run drops the remaining tables.
            if not self.run_of_job.is_lost:
                with trio.move_on_after(self.run_of_job.limits.clean_up_s, shield=True):
                    for table in tables:
                        await transactions.run(aio_drop_staging, table.staging)

    async def _table(self, declared: Table, *, is_detail: bool) -> OpenTable:
        transactions, load = self.run_of_job.transactions, self.load
        info = await transactions.run(aio_describe, declared.name)
        columns = loaded_columns(info, declared)
        for name in declared.key:
            info.column(name)
        if declared.history is None and declared.key:
            info.check_key(declared.key)
        staging = staging_name(self.run_of_job.claimed.job_id, self.run_of_job.claimed.token, int(is_detail))
        if declared.history is not None:
            declared.history.check_table(info)
        await transactions.run(aio_create_staging, info, staging, columns, declared.key, declared.history)
        detail = load.detail if is_detail else None
        return OpenTable(
            info=info,
            staging=staging,
            declared=declared,
            source=load.source if detail is None else detail.source,
            recipe=Recipe(
                transform=load.transform if detail is None else detail.transform,
                encoder=LineEncoder(
                    columns,
                    arrays={name for name in columns if info.column(name).is_array},
                    documents={name for name in columns if info.column(name).is_document},
                ),
                key=declared.key,
                changed_at=None if declared.history is None else declared.history.changed_at,
                hash_without=frozenset(declared.hash_without),
                takes_id=is_detail,
                reads=load.reads if detail is None else detail.reads,
                identify=load.detail.id if load.detail is not None and not is_detail else None,
            ),
            scope_column=None if load.windows is None or is_detail else load.windows.column,
            detail=detail,
        )


def loaded_columns(info: TableInfo, declared: Table) -> list[str]:
    """Return the columns of a table that a load may fill: not those that the database or the merge writes."""
    ours = {declared.delete_missing}
    if declared.history is not None:
        ours |= declared.history.not_loaded
    return [column.name for column in info.columns if not column.generated and column.name not in ours]
