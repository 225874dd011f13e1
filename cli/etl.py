"""Group `dataloader etl`, and its commands that show loads and flows.

etl_start.py starts them. etl_plan.py shows the requests of a run.
"""

from __future__ import annotations

from uuid import UUID

import click

from dataloader.cli.arguments import row_number
from dataloader.cli.cells import Column, cell
from dataloader.cli.entry import Group
from dataloader.cli.etl_plan import etl_plan_command
from dataloader.cli.etl_start import etl_flow_command, etl_retry_command, etl_run_command
from dataloader.cli.output import print_fields, print_json, print_table
from dataloader.cli.target import AskedQueue, asks_queue
from dataloader.jobs.client.client import Client
from dataloader.jobs.client.loads import Loads
from dataloader.jobs.load_listings import MAX_COUNTED, MAX_LOADS, FailureLine, LoadRecord
from dataloader.jobs.secrets.record_masks import masked


@click.group(cls=Group)
def etl_command() -> None:
    """Run loads and flows, and show their runs and failures."""


@etl_command.command("status")
@click.argument("load", required=False)
@asks_queue
def etl_status_command(target: AskedQueue, *, load: str | None, as_json: bool) -> None:
    """Show the watermark and the last run of LOAD, or of all loads."""
    if load is not None:
        found = target.ask_client(lambda client: client.loads.get(load))
        if as_json:
            print_json(found)
        else:
            print_fields(_load_form(found))
        return
    every = target.ask_client(lambda client: _all_loads(client.loads))
    if as_json:
        print_json(every)
        return
    columns = {
        "load": Column("LOAD"),
        "watermark": Column("WATERMARK", rank=2),
        "last_run": Column("LAST_RUN", rank=3),
        "status": Column("STATUS"),
        "started_at": Column("STARTED_AT", rank=5),
        "finished_at": Column("FINISHED_AT", rank=4),
        "counts": Column("COUNTS", least=15, rank=6),
        "unresolved": Column("UNRESOLVED", rank=1),
    }
    print_table(
        list(columns.values()),
        ([fields[name] for name in columns] for fields in map(_load_fields, every)),
        nothing="no load has run in this database",
    )


async def _all_loads(loads: Loads) -> list[LoadRecord]:
    found: list[LoadRecord] = []
    after: str | None = None
    while True:
        page = await loads.find(limit=MAX_LOADS, after=after)
        found += page.loads
        after = page.next
        if after is None:
            return found


def _load_form(load: LoadRecord) -> dict[str, object]:
    """Return the fields of one load, with its counts in words, which a narrow terminal can wrap."""
    counts = load.last_run.counts if load.last_run else {}
    said = ", ".join(f"{name.replace('_', ' ')} {cell(number)}" for name, number in counts.items())
    return {**_load_fields(load), "counts": said}


def _load_fields(load: LoadRecord) -> dict[str, object]:
    last = load.last_run
    return {
        "load": load.load,
        "watermark": load.watermark,
        "last_run": last and last.run_id,
        "status": last and last.status,
        "started_at": last and last.started_at,
        "finished_at": last and last.finished_at,
        "reason": last and last.reason,
        "counts": last and last.counts,
        "unresolved": f"{load.unresolved}{' or more' if load.unresolved >= MAX_COUNTED else ''}",
    }


@etl_command.command("failures")
@click.argument("load", required=False)
@click.option(
    "--run", "run_id", type=click.UUID, metavar="ID", help="All failures of this run, including resolved ones."
)
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    metavar="NUMBER",
    default=100,
    show_default=True,
    help="Maximum number of failures.",
)
@click.option("--after", type=row_number, metavar="NUMBER", default=0, help="Only failures after this number.")
@asks_queue
def etl_failures_command(
    target: AskedQueue, *, load: str | None, run_id: UUID | None, limit: int, after: int, as_json: bool
) -> None:
    """List the unresolved failures of LOAD, or all failures of a run.

    Retry them with `dataloader etl retry`.
    """

    async def question(client: Client) -> list[FailureLine]:
        if run_id is not None:
            return (await client.loads.failures_of_run(run_id, after=after, limit=limit)).failures
        return (await client.loads.failures(load or "", after=after, limit=limit)).failures

    if (load is None) == (run_id is None):
        raise click.UsageError("give either a LOAD or a run (--run)")
    found = target.ask_client(question)
    if as_json:
        # The name `key` would be masked as a secret.
        print_json([masked(failure) for failure in found], is_masked=True)
        return
    columns = {
        "failure_id": Column("FAILURE"),
        "failed_at": Column("FAILED_AT", rank=2),
        "resolved_at": Column("RESOLVED_AT", rank=3),
        "load": Column("LOAD", rank=4),
        "segment": Column("SEGMENT", least=10, rank=1),
        "phase": Column("PHASE", rank=2),
        "key": Column("KEY", least=10),
        "error": Column("ERROR", least=20),
        "sample": Column("SAMPLE", least=15, rank=5),
    }
    print_table(
        list(columns.values()),
        ([_failure_cell(failure, name) for name in columns] for failure in found),
        nothing="no failures",
    )
    if len(found) == limit:
        click.echo(f"there may be more: --after {found[-1].failure_id}", err=True)


def _failure_cell(failure: FailureLine, name: str) -> object:
    if name == "resolved_at" and failure.replaced_by is not None:
        return f"replaced by failure {failure.replaced_by}"
    return getattr(failure, name)


for command in (etl_run_command, etl_retry_command, etl_plan_command, etl_flow_command):
    etl_command.add_command(command)
