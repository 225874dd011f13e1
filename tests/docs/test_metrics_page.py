"""The page on metrics has each metric of `/metrics` with its labels, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from web_server import open_server

from dataloader.flows.etl.run.load_metrics import LoadMetrics
from dataloader.jobs.process_telemetry import ProcessTelemetry
from dataloader.jobs.telemetry import Telemetry
from dataloader.web.server.refusals import Refusals

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def on_the_page():
    """Return the labels of each metric on the page."""
    found = {}
    for names, labels in re.findall(r"^\| (`[^|]+`) \| ([^|]*)\|", PAGE.read_text(), re.MULTILINE):
        for name in re.findall(r"`(\w+)`", names):
            found[name.removesuffix("_total")] = {label for label in labels.strip().split(", ") if label}
    return found


async def test_the_page_on_metrics_has_every_metric_with_its_labels(database):
    measures = [*Telemetry().measures, *ProcessTelemetry().measures, *LoadMetrics().measures, Refusals().measure()]
    named = {one.name: set(getattr(one, "labels", ())) - {"prg_namespace"} for one in measures}
    async with open_server(database.dsn) as web:
        text = (await web.client.get("/metrics")).text
    shown = {family.name.removesuffix("_info") for family in text_string_to_metric_families(text)}
    found = on_the_page()
    found["dataloader"] = found.pop("dataloader_info")
    assert found.keys() == named.keys() | shown
    assert {name: found[name] for name in named} == named
