"""Command for statistics of runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Final

import click

from dataloader.cli.arguments import instant_before_now
from dataloader.cli.cells import Column
from dataloader.cli.output import print_json, print_table
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.jobs.client.jobs import Jobs
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.run_stats import RunStats, Span, StatsFilter

_STATS: Final = (
    Column("AT"),
    Column("QUEUE", least=8, rank=1),
    Column("TASK", least=10),
    Column("OUTCOME"),
    Column("RUNS"),
    Column("MEAN_S"),
    Column("MAX_S"),
)
_DAY: Final = timedelta(days=1)


@click.command()
@click.option("--since", type=instant_before_now, help="First hour, or a duration before now.  [default: 1d]")
@click.option("--until", type=instant_before_now, help="End (exclusive), or a duration before now.  [default: now]")
@click.option("--queue", help="Only runs of this queue.")
@click.option("--task", help="Only runs of this task.")
@click.option(
    "--by",
    type=click.Choice(["hour", "day", "total"]),
    default="total",
    show_default=True,
    help="One row per hour, per day (UTC), or for the whole time.",
)
@asks_queue
def stats_command(
    target: AskedQueue,
    *,
    since: datetime | None,
    until: datetime | None,
    queue: str | None,
    task: str | None,
    by: Span,
    as_json: bool,
) -> None:
    """Show the number, outcomes and durations of runs.

    A row has the runs of a queue, a task and an outcome, with their mean and maximum durations in seconds.
    """
    wanted = StatsFilter(begin=since or datetime.now(UTC) - _DAY, end=until, queue=queue, task=task, by=by)
    found = target.ask(lambda jobs: _all(jobs, wanted))
    if as_json:
        print_json(found)
        return
    columns = _STATS if by != "total" else _STATS[1:]
    rows = [(one.at, one.queue, one.task, one.outcome, one.runs, _s(one.mean_s), _s(one.max_s)) for one in found]
    print_table(columns, (row[-len(columns) :] for row in rows), nothing="no runs")


async def _all(jobs: Jobs, wanted: StatsFilter) -> list[RunStats]:
    found: list[RunStats] = []
    after = None
    while True:
        page = await jobs.stats(wanted, limit=MAX_PAGE, after=after)
        found += page.stats
        after = page.next
        if after is None:
            return found


def _s(seconds: float) -> str:
    return f"{seconds:.3f}" if seconds < 10 else f"{seconds:.1f}"
