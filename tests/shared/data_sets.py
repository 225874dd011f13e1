"""Data sets of the ETL tests, and the paths by which source_app.py serves them.

* /ecb/rates?from=&to=&page=&size=: `{"data": {"items": [{date, currency, rate}], "total"}}`, from ≤ date < to
* /ecb/rates?…&as=text: the same, its rates as texts and not as numbers
* /cbr/daily?date=2022-03-15: the Bank of Russia's XML in windows-1251
* /factbook/2025-01-22/countries: `{"items": [{code, region}], "total", "next_cursor", "next"}` and a Link header
* /factbook/2025-01-22/countries/gm: a country's document
* /sp500/2023-04-13.csv: a snapshot
* /ssa/yob2010.txt: a year of names

The list of countries supports page and size, offset and limit, or a cursor.
"""

from __future__ import annotations

import bisect
import csv
import functools
import io
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

DATA = Path(os.environ.get("DATALOADER_TEST_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")

Found = tuple[bytes, str] | tuple[bytes, str, dict[str, str]]
"""Body, media type, and optional headers."""

JSON = "application/json"


def answer(path: str, query: dict[str, str], app: Any) -> Found | None:
    """Return the answer of a path, or None if there is none. `app` has `corrections` and `largest_page`."""
    for pattern, function in _PATHS:
        if found := re.fullmatch(pattern, path):
            return function(app, query, *found.groups())
    return None


@functools.cache
def ecb_rates() -> list[tuple[str, str, str]]:
    """Return all rates as (date, currency, rate), oldest first: 217,555."""
    with zipfile.ZipFile(DATA / "ecb-fx" / "eurofxref-hist.zip") as archive:
        rows = csv.reader(io.StringIO(archive.read("eurofxref-hist.csv").decode()))
    header = next(rows)
    days = list(rows)
    return [
        (day[0], currency, rate)
        for day in reversed(days)
        for currency, rate in zip(header[1:], day[1:], strict=True)
        if currency and rate != "N/A"
    ]


@functools.cache
def members(name: str) -> dict[str, bytes]:
    """Return the files of a data set's archive by name, such as members("factbook/factbook-3-snapshots.tar.xz")."""
    with tarfile.open(DATA / name) as archive:
        return {info.name.removeprefix("./"): archive.extractfile(info).read() for info in archive if info.isreg()}


def factbook() -> dict[str, bytes]:
    """Return <date>/<region>/<code>.json: 783 documents."""
    return members("factbook/factbook-3-snapshots.tar.xz")


@functools.cache
def countries(date: str) -> list[dict[str, str]]:
    """Return code and region of the documents of a date, by code."""
    paths = [path.split("/") for path in factbook() if path.startswith(f"{date}/")]
    return sorted(
        ({"code": code.removesuffix(".json"), "region": region} for _, region, code in paths),
        key=lambda country: country["code"],
    )


def sp500() -> dict[str, bytes]:
    """Return <date>.csv: 186 snapshots."""
    return members("sp500-scd/constituents-snapshots.tar.xz")


def ssa() -> dict[str, bytes]:
    """Return yob<year>.txt: 26 files."""
    return members("ssa-names/ssa-names-1998-2023.tar.xz")


def _ecb(app: Any, query: dict[str, str]) -> Found:
    rates = ecb_rates()
    first, last = query.get("from", ""), query.get("to", "9999")
    begin, end = (bisect.bisect_left(rates, day, key=lambda rate: rate[0]) for day in (first, last))
    size = min(int(query.get("size", 1_000)), app.largest_page)
    start = (int(query.get("page", 1)) - 1) * size
    quote = '"' if query.get("as") == "text" else ""
    items = []
    for date, currency, original in rates[begin + start : min(begin + start + size, end)]:
        rate = app.corrections.get((date, currency), original)
        items.append(f'{{"date":"{date}","currency":"{currency}","rate":{quote}{rate}{quote}}}')
    return f'{{"data":{{"items":[{",".join(items)}],"total":{max(end - begin, 0)}}}}}'.encode(), JSON


def _cbr(_app: Any, query: dict[str, str]) -> Found | None:
    path = DATA / "cbr-daily" / f"{Path(query.get('date', '')).name}.xml"
    return (path.read_bytes(), "application/xml; charset=windows-1251") if path.is_file() else None


def _countries(app: Any, query: dict[str, str], date: str) -> Found:
    everything = countries(date)
    size = min(int(query.get("size") or query.get("limit") or 50), app.largest_page)
    if "cursor" in query:
        start = int(query["cursor"].removeprefix("c"))
    elif "offset" in query:
        start = int(query["offset"])
    else:
        start = (int(query.get("page", 1)) - 1) * size
    end = start + size
    document = {"items": everything[start:end], "total": len(everything), "next_cursor": None, "next": None}
    path = f"/factbook/{date}/countries"
    headers = {"Link": f'<{path}?cursor=c0>; rel="first"'}
    if end < len(everything):
        following = f"{path}?cursor=c{end}&size={size}"
        document |= {"next_cursor": f"c{end}", "next": following}
        headers["Link"] += f', <{app.url}{following}>; title="more, please"; rel="next"'
    return json.dumps(document).encode(), JSON, headers


def _country(_app: Any, _query: dict[str, str], date: str, code: str) -> Found | None:
    for country in countries(date):
        if country["code"] == code:
            return factbook()[f"{date}/{country['region']}/{code}.json"], JSON
    return None


def _sp500(_app: Any, _query: dict[str, str], name: str) -> Found | None:
    body = sp500().get(name)
    return None if body is None else (body, "text/csv; charset=utf-8")


def _ssa(_app: Any, _query: dict[str, str], name: str) -> Found | None:
    body = ssa().get(name)
    return None if body is None else (body, "text/csv; charset=us-ascii")


_PATHS: list[tuple[str, Callable[..., Found | None]]] = [
    (r"/ecb/rates", _ecb),
    (r"/cbr/daily", _cbr),
    (r"/factbook/([0-9-]+)/countries", _countries),
    (r"/factbook/([0-9-]+)/countries/([a-z]+)", _country),
    (r"/sp500/([0-9-]+\.csv)", _sp500),
    (r"/ssa/(yob[0-9]{4}\.txt)", _ssa),
]
