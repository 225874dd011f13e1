"""Commands for suppliers: the use of their rate limits, and operators' actions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import attrs
import click

from dataloader.cli.arguments import RenamedChoice, former_option
from dataloader.cli.cells import Column, cell
from dataloader.cli.entry import Group
from dataloader.cli.output import print_fields, print_json, print_table
from dataloader.cli.target import AskedQueue, all_rows, asks_queue
from dataloader.cli.task_limits import NAME, changes_of
from dataloader.jobs.client.limits import Limits
from dataloader.jobs.limits import FORMER_LIMITS, Supplier
from dataloader.jobs.supplier_listings import RateLimitState, SupplierRecord

_SUPPLIERS: Final = (
    Column("SUPPLIER", least=12),
    Column("STATE"),
    Column("OPENS", rank=2),
    Column("RATE_LIMITS", least=20),
    Column("TASKS", least=12, rank=1),
)
_RATE_LIMITS: Final = (Column("UNITS"), Column("SECONDS"), Column("USED"), Column("LEFT"), Column("NEXT_FREE"))
_LIMITS: Final = [field.name for field in attrs.fields(Supplier) if field.name != "name"]
_UNSET: Final = RenamedChoice(_LIMITS, FORMER_LIMITS)


class _RateLimit(click.ParamType[Any]):
    """Rate limit such as 100/60, for at most 100 in 60 seconds, or 10000/day/Europe/Berlin."""

    name = "rate limit"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Convert like click."""
        number, _, span = str(value).partition("/")
        span, _, zone = span.partition("/")
        try:
            if span == "day":
                return {"requests": int(number), "per": span, "zone": zone or "UTC"}
            if not zone:
                return [int(number), float(span)]
        except ValueError:
            pass
        return self.fail(
            f"must have the form 100/60 (units/seconds) or 10000/day/Europe/Berlin, not {value!r}", param, ctx
        )


@click.group(cls=Group)
def supplier_command() -> None:
    """List, show, limit, pause, resume and remove suppliers."""


@supplier_command.command("list")
@asks_queue
def supplier_list_command(target: AskedQueue, *, as_json: bool) -> None:
    """List the suppliers of tasks and loads, with the units left in their rate limits."""
    found = target.ask_client(lambda client: all_rows(client.limits.suppliers, "suppliers"))
    if as_json:
        print_json(found)
        return
    print_table(
        _SUPPLIERS,
        (
            (one.supplier, _supplier_state(one), one.opens_at, _rate_limits_text(one), ", ".join(one.tasks))
            for one in found
        ),
        nothing="no suppliers",
    )


@supplier_command.command("show")
@NAME
@asks_queue
def supplier_show_command(target: AskedQueue, *, name: str, as_json: bool) -> None:
    """Show the supplier NAME: the used and free units of each rate limit, and when the next unit is free."""
    found = target.ask_client(lambda client: client.limits.supplier(name))
    if as_json:
        print_json(found)
        return
    fields: dict[str, object] = {"supplier": found.supplier, "state": _supplier_state(found), "opens": found.opens_at}
    periods = found.limits.get("work_periods") or ()
    fields |= {"error": found.error, "work periods": ", ".join(periods) or None, "zone": found.limits.get("zone")}
    fields |= {"margin": f"{found.margin_s:g} s", "tasks": ", ".join(found.tasks) or None}
    if found.slot is not None:
        fields["request of"] = f"job {found.slot.job_id or 'unknown'}, until {cell(found.slot.until)}"
    fields |= {"override": dict(found.override) or None}
    print_fields({key: value for key, value in fields.items() if value is not None})
    if found.rate_limits:
        print_table(
            _RATE_LIMITS,
            ((one.requests, _rate_span(one), one.used, one.left, one.free_at or "now") for one in found.rate_limits),
            nothing="",
        )
    click.echo("limits of a single load, Load(rate_limits=…), are in its program and not shown here", err=True)


@supplier_command.command("set")
@NAME
@click.option(
    "--rate-limit",
    "rate_limits",
    type=_RateLimit(),
    multiple=True,
    metavar="UNITS/SECONDS",
    help="Rate limit such as 100/60 or 10000/day/Europe/Berlin; may be repeated.",
)
@former_option("--budget", "--rate-limit")
@click.option(
    "--work-periods",
    multiple=True,
    metavar="PERIOD",
    help="Work period such as 'MON-FRI 00:00-06:00'; may be repeated.",
)
@click.option("--zone", help="Time zone of --work-periods.")
@click.option(
    "--margin",
    "margin_s",
    type=float,
    metavar="SECONDS",
    help="Maximum seconds between the claim and the start of a job.",
)
@click.option("--unset", multiple=True, type=_UNSET, help="Remove this override; may be repeated.")
@asks_queue
def supplier_set_command(
    target: AskedQueue, *, name: str, unset: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Override limits of the supplier NAME from the next claim on. The supplier is created if it is unknown."""
    changes = changes_of(options, unset)
    found = target.ask_client(lambda client: client.limits.set_supplier(name, changes))
    _print_supplier(found, as_json=as_json)
    if not found.tasks:  # the name may be mistyped
        click.echo(f"no task uses the supplier {cell(name)!r}; loads may use it", err=True)


def _supplier_change(what: str, change: Callable[[Limits, str], Any], said: str = "") -> click.Command:
    """Return a command that applies one action to one supplier. `what` is its help."""

    @click.command(help=what)
    @NAME
    @asks_queue
    def command(target: AskedQueue, *, name: str, as_json: bool) -> None:
        found = target.ask_client(lambda client: change(client.limits, name))
        if said and not as_json:
            click.echo(f"{cell(found.supplier)}  {said}")
        else:
            _print_supplier(found, as_json=as_json)

    return command


supplier_command.add_command(
    _supplier_change(
        "Pause the supplier NAME: no jobs of its tasks start.", lambda limits, name: limits.pause_supplier(name)
    ),
    "pause",
)
supplier_command.add_command(
    _supplier_change("Resume the supplier NAME.", lambda limits, name: limits.resume_supplier(name)),
    "resume",
)
supplier_command.add_command(
    _supplier_change(
        "Remove the supplier NAME until a process declares it again.",
        lambda limits, name: limits.remove_supplier(name),
        "removed",
    ),
    "remove",
)


def _supplier_state(one: SupplierRecord) -> str:
    return "open" if one.closed is None else f"closed: {one.closed}"


def _rate_span(one: RateLimitState, unit: str = "") -> str:
    """Return the span in the format of `--rate-limit`."""
    return f"day/{one.zone}" if one.per_s is None else f"{one.per_s:g}{unit}"


def _rate_limits_text(one: SupplierRecord) -> str:
    return ", ".join(
        f"{rate_limit.left} of {rate_limit.requests}/{_rate_span(rate_limit, ' s')}" for rate_limit in one.rate_limits
    )


def _print_supplier(one: SupplierRecord, *, as_json: bool) -> None:
    if as_json:
        print_json(one)
    else:
        click.echo(f"{cell(one.supplier)}  {_supplier_state(one)}  {_rate_limits_text(one)}".rstrip())
