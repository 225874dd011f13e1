"""Runs one load within a job's run: its tables and their staging tables, its segments, its pipeline, its progress."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

import attrs
import trio

from dataloader.flows.etl.declare.load import Load, Target
from dataloader.flows.etl.declare.pipeline_config import PipelineConfig
from dataloader.flows.etl.fetch.rate_limiter import LEASE_MARGIN_S, LINGER_S, RateLimiter
from dataloader.flows.etl.fetch.request_sender import RequestSender
from dataloader.flows.etl.parse.copy_lines import LineEncoder
from dataloader.flows.etl.parse.transform import Recipe
from dataloader.flows.etl.plan.planner import (
    MOST_RETRIED,
    Kept,
    LoadArgs,
    check_failures,
    new_segments,
    retried_segments,
)
from dataloader.flows.etl.plan.segment import Segment, Table
from dataloader.flows.etl.run.etl_run import CLEAN_UP_S, EtlRun
from dataloader.flows.etl.run.load_log import LoadLog
from dataloader.flows.etl.run.load_metrics import LoadMetrics
from dataloader.flows.etl.run.load_progress import FAILED, LoadProgress
from dataloader.flows.etl.run.load_verdict import Verdict, give_up, judge
from dataloader.flows.etl.run.pipeline import Pipeline, PipelineEnd
from dataloader.flows.etl.run.pipeline_state import PipelineState
from dataloader.jobs.calls import Calls, CallsOn
from dataloader.jobs.error_groups import only_error
from dataloader.jobs.errors import BadRequest
from dataloader.store.etl.history_merge import aio_snapshots_behind, instant_of
from dataloader.store.etl.run_journal import RunState, aio_next_failures, aio_open_failures, aio_watermark, staging_name
from dataloader.store.etl.staging import aio_create_staging, aio_drop_staging
from dataloader.store.etl.target_table import TableInfo, aio_describe

SHOW_S: Final = 1.0
"""How often the progress is shown."""
LOG_S: Final = 30.0
"""How often it is logged (E9)."""


async def run_one(run: EtlRun, load: Load, config: PipelineConfig, asked: LoadArgs, state: RunState) -> Verdict:
    """Run `load` to its end, from where an earlier attempt of the job has stopped.

    Raises `TargetError` if the target table does not fit the declaration.
    """
    metrics = run.job.resource(LoadMetrics)
    progress = LoadProgress(load=load.name, max_failures=config.max_failures, telemetry=metrics.count)
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
            # No warning if it has failed: the job fails with it, and that is logged.
            LoadLog.of(run.job, load.name).info("ended", phase="run", **told)
            run.job.end_log_of(load.name)
    return verdict


CANCELED: Final = Verdict(end="canceled", reason="the run's cancellation token was cancelled")


@attrs.frozen(eq=False)
class _Loading:
    """A running load."""

    run_of_job: EtlRun
    load: Load
    config: PipelineConfig
    asked: LoadArgs
    progress: LoadProgress

    async def run(self, state: RunState) -> Verdict:
        """Run the load; return how it ended."""
        async with self._tables() as tables:
            pipeline = self._pipeline(state)
            end = await self._shown(pipeline, self._segments(state, tables, pipeline.sender))
        match end:
            case "canceled":
                return CANCELED
            case "failed":
                return give_up(self.progress, self.config)
        return judge(self.progress, self.config)

    def _pipeline(self, state: RunState) -> Pipeline:
        run, config = self.run_of_job, self.config
        shared = PipelineState(
            run_id=run.claimed.job_id,
            token=run.claimed.token,
            last_failure=state.last_failure,
            load=self.load.name,
            config=config,
            progress=self.progress,
            log=LoadLog.of(run.job, self.load.name),
        )
        rate_limiter = RateLimiter(
            database=run.database,
            holder=run.claimed.token,
            progress=self.progress,
            rate_min=config.rate_min,
            rate_max=config.rate_max,
            lease_s=config.request_timeout + LEASE_MARGIN_S,
            linger_s=partial(run.drain_s, LINGER_S),
            budgets=self.load.budgets,
            draw=random.Random(),  # noqa: S311 - pauses, not secrets
        )
        return Pipeline(
            shared=shared,
            sender=RequestSender(shared, rate_limiter),
            database=run.database,
            transactions=run.transactions,
            cancel=run.cancel,
            drain_s=partial(run.drain_s, config.drain_timeout),
            is_lost=lambda: run.is_lost,
            calls=self._calls(),
        )

    def _calls(self) -> Calls | None:
        if self.load.dask is None and not self.load.processes:
            return None
        kind: Any = Calls if self.load.dask is None else CallsOn(self.load.dask)
        calls: Calls = self.run_of_job.job.resource(kind)
        return calls

    async def _shown(self, pipeline: Pipeline, segments: AsyncGenerator[Segment, None]) -> PipelineEnd:
        """Run the pipeline; meanwhile show its state as the job's progress."""
        job = self.run_of_job.job
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._show, pipeline.shared.log)
            try:
                end = await pipeline.run(segments)
            finally:
                nursery.cancel_scope.cancel()
                # Without a checkpoint: the job may be stopped, and the last progress must still be shown.
                job.progress_nowait({"load": self.load.name, **self.progress.snapshot()})
        return end

    async def _show(self, log: LoadLog) -> None:
        log_at = trio.current_time() + LOG_S
        while True:
            progress = self.progress.snapshot()
            self.run_of_job.job.progress_nowait({"load": self.load.name, **progress})
            if trio.current_time() >= log_at:
                log.info("progress", phase="run", **progress)
                log_at += LOG_S
            await trio.sleep(SHOW_S)

    async def _segments(
        self, state: RunState, tables: list[Table], sender: RequestSender
    ) -> AsyncGenerator[Segment, None]:
        """The segments to be loaded, in order, without those that this run has committed before."""
        run, load = self.run_of_job, self.load
        done = state.segments.get(load.name, {})
        details = state.details.get(load.name, {})
        # Not by `count`: they are in this process's metrics already, or in those of another process.
        for counts in done.values():
            self.progress.counts.update(counts if "segments_failed" in counts else {**counts, "segments": 1})
        for phase, times in state.failed.get(load.name, {}).items():
            self.progress.counts.update({FAILED[phase]: times} if phase in FAILED else {})
        # Requests of an earlier attempt count even if nothing that they brought is recorded.
        sent = ((state.summaries.get(load.name) or {}).get("counts") or {}).get("requests", 0)
        on_record = [*done.values(), *(came_in.counts for came_in in details.values())]
        self.progress.counts["requests"] += max(0, sent - sum(counts.get("requests", 0) for counts in on_record))
        if self.asked.failures is not None:
            if not load.target.key:
                told = "is not allowed: without a key rows that are there would come twice; run the load again"
                raise BadRequest("args.failures", told)
            segments = retried_segments(partial(self._kept_behind, bool(done)), tables)
        else:
            watermark, moved_by = await run.database.run(aio_watermark, load.name)
            if moved_by == run.claimed.job_id:
                # The run goes on behind what it has done, which has been looked back from already.
                load = attrs.evolve(load, windows=load.windows and attrs.evolve(load.windows, look_back=timedelta()))
            segments = new_segments(load, self.asked, tables, sender.listed, watermark=watermark, now=state.started_at)
        number = 0
        async with aclosing(segments), aclosing(self._not_behind(segments, tables[0])) as wanted:
            async for segment in wanted:
                number += 1
                if segment.name not in done:
                    segment.number = number
                    if came_in := details.get(segment.name):
                        segment.done, segment.counts = came_in.keys, came_in.counts
                        self.progress.counts.update(came_in.counts)
                    yield segment  # noqa: ASYNC119 - the fetcher closes us, too

    async def _kept_behind(self, is_any_done: bool, number: int) -> Kept:  # noqa: FBT001 - given by a partial
        """The next failures to retry, after the one with that number.

        Raises `BadRequest` for a number in the job's args that is not that of an unresolved failure.
        """
        run, asked = self.run_of_job, self.asked.failures
        if not asked:
            mine = run.claimed.job_id
            return await run.database.run(aio_next_failures, self.load.name, mine, number, MOST_RETRIED)
        # All failures that the args ask for are one segment.
        if number or is_any_done:
            return {}
        kept: Kept = await run.database.run(aio_open_failures, self.load.name, asked)
        check_failures(asked, kept)
        return kept

    async def _not_behind(self, segments: AsyncGenerator[Segment, None], table: Table) -> AsyncGenerator[Segment, None]:
        """The snapshots without those that the table has merged before its last one: they can't change it any more."""
        history = table.target.history
        behind = frozenset[tuple[str, datetime]]()
        if history is not None:
            behind = await self.run_of_job.database.run(aio_snapshots_behind, table.info, self.load.name)
        left_out = 0
        async for segment in segments:
            if history is not None and (segment.name, instant_of(history.instant(segment, table.info))) in behind:
                left_out += 1
            else:
                yield segment  # noqa: ASYNC119 - who iterates closes us
        if left_out:
            told = "snapshots older than the last one are left out: the table has merged them before"
            LoadLog.of(self.run_of_job.job, self.load.name).info(told, phase="run", segments=left_out)

    @asynccontextmanager
    async def _tables(self) -> AsyncIterator[list[Table]]:
        """The tables of the load, each with a staging table, for the length of a block."""
        load, transactions = self.load, self.run_of_job.transactions
        tables = [await self._table(load.target, is_detail=False)]
        if load.detail is not None:
            tables.append(await self._table(load.detail.target, is_detail=True))
        try:
            yield tables
        finally:
            with trio.move_on_after(CLEAN_UP_S, shield=True):
                for table in tables:
                    await transactions.run(aio_drop_staging, table.staging)

    async def _table(self, target: Target, *, is_detail: bool) -> Table:
        transactions, load = self.run_of_job.transactions, self.load
        info = await transactions.run(aio_describe, target.table)
        columns = loaded_columns(info, target)
        for name in target.key:
            info.column(name)
        if target.history is None and target.key:
            info.check_key(target.key)
        staging = staging_name(self.run_of_job.claimed.job_id, self.run_of_job.claimed.token, int(is_detail))
        await transactions.run(aio_create_staging, info, staging, columns, target.key)
        detail = load.detail if is_detail else None
        return Table(
            info=info,
            staging=staging,
            target=target,
            source=load.source if detail is None else detail.source,
            recipe=Recipe(
                transform=load.transform if detail is None else detail.transform,
                encoder=LineEncoder(
                    columns,
                    arrays={name for name in columns if info.column(name).is_array},
                    documents={name for name in columns if info.column(name).is_document},
                ),
                key=target.key,
                hash_without=frozenset(target.hash_without),
                takes_id=is_detail,
                reads=load.reads if detail is None else detail.reads,
                identify=load.detail.id if load.detail is not None and not is_detail else None,
            ),
            scope_column=None if load.windows is None or is_detail else load.windows.column,
            detail=detail,
        )


def loaded_columns(info: TableInfo, target: Target) -> list[str]:
    """The columns of a table that a load may fill: not those that the database or the merge writes."""
    ours = {target.delete_missing}
    if target.history is not None:
        ours |= {*target.history.columns}
    return [column.name for column in info.columns if not column.generated and column.name not in ours]
