"""Histories of real data, whose versions are known (E8). Skipped without the data sets."""

from __future__ import annotations

import csv
import datetime as dt
import hashlib
import io
import json
import tarfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from etl_loads import open_dimension

from dataloader.store.etl.history_merge import HistoryCounts

DATA = Path(__file__).parents[3].parent / "shared" / "data"
COUNTS = ("inserted", "changed", "closed", "reappeared")
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not DATA.is_dir(), reason="the real data sets are not here"),
]


def total(found):
    return {name: sum(getattr(counts, name) for counts in found) for name in COUNTS}


@pytest.mark.requirement("E8")
async def test_the_history_of_an_index_has_its_known_versions(transactions, raw):
    columns = ["name", "sector", "industry", "location", "added", "cik", "founded"]
    dimension = await open_dimension(transactions, raw, " ".join(columns))
    found = {}
    with tarfile.open(DATA / "sp500-scd" / "constituents-snapshots.tar.xz") as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            text = archive.extractfile(member).read().decode()
            header, *rows = csv.reader(io.StringIO(text))
            if len(header) == 8:
                as_of = dt.date.fromisoformat(Path(member.name).stem)
                found[as_of.isoformat()] = await dimension.merge(as_of, [tuple(row) for row in rows])
    assert len(found) == 126
    assert total(found.values()) == {"inserted": 575, "changed": 233, "closed": 78, "reappeared": 6}
    assert await raw.fetchval("SELECT count(*) FROM target") == 814
    assert await raw.fetchval("SELECT count(*) FROM target WHERE is_current") == 503
    assert await raw.fetchval("SELECT count(*) FROM target WHERE key = 'DIS'") == 5
    assert sum(counts == HistoryCounts(unchanged=counts.unchanged) for counts in found.values()) == 2
    # The second column's name changed on 2024-12-08 and back again.
    assert total([found["2024-12-10"]]) == dict.fromkeys(COUNTS, 0)


@pytest.mark.requirement("E8")
async def test_the_nominals_of_currencies_have_their_known_versions(transactions, raw):
    dimension = await open_dimension(transactions, raw, "nominal name")
    found = []
    for file in sorted((DATA / "cbr-daily").glob("*.xml")):
        root = ET.fromstring(file.read_bytes())
        rows = [(entry.get("ID"), entry.findtext("Nominal"), entry.findtext("Name")) for entry in root]
        found.append(await dimension.merge(dt.date.fromisoformat(file.stem), rows))
    assert [(counts.inserted, counts.changed) for counts in found] == [(34, 0), (0, 7), (0, 8)]
    assert await raw.fetchval("SELECT count(*) FROM target") == 49
    assert await raw.fetchval("SELECT count(*) FROM target WHERE is_current") == 34


@pytest.mark.requirement("E8")
async def test_whole_documents_have_their_known_versions(transactions, raw):
    dimension = await open_dimension(transactions, raw, "content_hash", "document")
    days = {}
    with tarfile.open(DATA / "factbook" / "factbook-3-snapshots.tar.xz") as archive:
        for member in archive:
            if member.name.endswith(".json"):
                document = json.loads(archive.extractfile(member).read())
                text = json.dumps(document, sort_keys=True)
                path = Path(member.name)
                row = (path.stem, hashlib.sha256(text.encode()).hexdigest(), text)
                days.setdefault(path.parts[-3], []).append(row)
    found = [await dimension.merge(dt.date.fromisoformat(day), rows) for day, rows in sorted(days.items())]
    assert found == [
        HistoryCounts(inserted=261),
        HistoryCounts(changed=4, unchanged=257),
        HistoryCounts(changed=41, unchanged=220),
    ]
    assert await raw.fetchval("SELECT count(*) FROM target") == 306
    assert await raw.fetchval("SELECT count(*) FROM target WHERE is_current") == 261
