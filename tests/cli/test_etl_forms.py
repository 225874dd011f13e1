"""Output of `etl plan` and `etl status` on a terminal of 80 columns: in this process, without a database."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from uuid import uuid4

import pytest

from dataloader.cli import etl, etl_plan
from dataloader.cli.output import print_fields
from dataloader.flows.etl import Detail, Http, Load, PipelineConfig, RateLimit, Request, Table, Window, Windows
from dataloader.jobs.load_listings import LastRun, LoadRecord

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.fixture
def lines(capsys, monkeypatch):
    """Return a function that returns the lines that another function prints on such a terminal."""
    monkeypatch.setenv("COLUMNS", "80")

    def lines(function, *arguments):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        function(*arguments)
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()

    return lines


def test_a_plan_fits_80_columns_and_says_all_that_takes_time(lines):
    source = Http("https://bank.example", endpoint="/rates", params={"day": "2026-01-01"})
    table = Table("rates", key="day")
    detail = Detail(
        id=lambda _: 1,
        request=lambda id_: Request(endpoint=f"/{id_}"),
        source=source,
        table=table,
        transform=lambda _, record: record,
    )
    load = Load(
        "rates",
        source,
        table,
        windows=Windows(start=NOON),
        detail=detail,
        rate_limits=(RateLimit(100, per_s=60), RateLimit(5_000, per_s=86_400)),
    )
    request = Request(
        endpoint="https://bank.example/rates/of/all/currencies", params={"from": "2026-01-01", "to": "2026-02-01"}
    )
    plan = etl_plan.LoadPlan(
        load=load,
        config=PipelineConfig(),
        watermark=NOON,
        is_first=False,
        windows=[(Window(NOON, NOON), [request] * 3)],
    )
    shown = lines(etl_plan._print_plan, plan)
    assert max(map(len, shown)) <= 80
    text = " ".join(" ".join(shown).split())
    assert "watermark 2026-01-01 12:00:00Z" in text
    assert "mean 0:00:25, minimum 0:00:10, maximum 0:00:40" in text
    assert "one request each and the rate limit of 100 in 60 s and the rate limit of 5000 in 86400 s" in text


def test_a_load_s_status_fits_80_columns_with_each_field_behind_its_name(lines):
    counts = {f"a_count_of_something_{number}": 1_000_000 for number in range(12)}
    last = LastRun(
        run_id=uuid4(), status="failed", started_at=NOON, finished_at=NOON, reason="too much " * 20, counts=counts
    )
    load = LoadRecord(
        load="rates", watermark=NOON, upto=NOON, moved_at=NOON, unresolved=1_000, unsolved=1_000, last_run=last
    )
    shown = lines(print_fields, etl._load_form(load))
    assert max(map(len, shown)) <= 80
    assert "watermark    2026-01-01 12:00:00Z" in shown
    assert "unresolved   1000 or more" in shown
    [reason] = [number for number, line in enumerate(shown) if line.startswith("reason")]
    assert re.match(r" {13}(too )?much too much", shown[reason + 1])
