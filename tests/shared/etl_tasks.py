"""Small loads for the tests of pipelines: `Items` is a service's data, `items_load` loads it into the table `item`.

In the tests' own process they are created with arguments. `dataloader serve --tasks etl_tasks:tasks` has some that are
configured by variables. Each day of January 2026 is a window.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from datetime import date
from functools import partial

import attrs
import trio
from source_app import Answer, Seen, SourceApp

from dataloader import Tasks
from dataloader.flows.etl import Checkpoint, Detail, Load, RateLimit, Request, Table, Windows, add_loads
from dataloader.flows.etl.declare.pipeline_limits import PipelineLimits
from dataloader.flows.etl.flow.flow import run_flow
from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.formats.json_format import Json
from dataloader.flows.etl.run.load_task import run_load
from dataloader.flows.etl.sources.files import Files
from dataloader.flows.etl.sources.http import Http
from dataloader.flows.etl.sources.pagination import PageNumber

AT_ONCE = {"rate_min": 0, "rate_max": 0}
COUNTED = 400
BEARS_ALL = {"max_failed_segments": 1_000, "max_failed_share": 1}
"""Limits of a run that ends only after consecutive failures, or because it has loaded nothing."""
ITEM = "CREATE TABLE item (id int PRIMARY KEY, day date NOT NULL, value text)"
DETAIL = "CREATE TABLE detail (id int PRIMARY KEY, about text)"


def day(number: int) -> str:
    """Return a day of January 2026."""
    return f"2026-01-{number:02}"


def item(number: int, of_day: int = 1, value: object = "a") -> dict[str, object]:
    """Return a record."""
    return {"id": number, "day": day(of_day), "value": value}


@attrs.define
class Items:
    """Records of a service, by windows and pages; `answered_at` has the time at which each answer was ready."""

    service: SourceApp
    records: list[dict[str, object]] = attrs.field(factory=list)
    before: Callable[[Seen], object] = lambda _seen: None
    answered_at: list[float] = attrs.field(factory=list)

    def answer(self, seen: Seen) -> Answer:
        """Return the requested records, after `before` has returned."""
        self.before(seen)
        since, until = seen.query.get("from", ""), seen.query.get("to", "9")
        found = [record for record in self.records if since <= str(record["day"]) < until]
        size, page = int(seen.query.get("size", 100_000)), int(seen.query.get("page", 1))
        body = json.dumps({"items": found[(page - 1) * size : page * size], "total": len(found)}).encode()
        self.answered_at.append(time.monotonic())
        return Answer(body)

    def gaps(self) -> list[float]:
        """Return the seconds from each ready answer to the next request: a pause is not longer than its gap."""
        began_at = [seen.began_at for seen in self.service.requests]
        return [began - answered for answered, began in zip(self.answered_at, began_at[1:], strict=False)]

    def asked(self) -> list[str]:
        """Return the requested days and pages, in order."""
        return [
            "/".join(seen.query[name] for name in ("from", "page") if name in seen.query)
            for seen in self.service.requests
        ]


def span(window) -> dict[str, str]:
    return {"from": f"{window.start:%Y-%m-%d}", "to": f"{window.end:%Y-%m-%d}"}


def items_load(url: str, *, page_size: int | None = None, name: str = "items", **fields: object) -> Load:
    """Return a load of the items by day. `windows=None` requests all together; `pipeline` is added to no pauses.

    `total_path="total"` reads the number of items.
    """
    pipeline = {**AT_ONCE, **fields.pop("pipeline", {})}
    total_path = fields.pop("total_path", None)
    windows = fields.pop("windows", Windows(start=date(2026, 1, 1), segment="day", column="day"))
    source = Http(
        url,
        endpoint="/items",
        params={} if windows is None else span,
        pages=None if page_size is None else PageNumber(size=page_size, total_path=total_path),
        format=Json("items"),
        statuses=fields.pop("statuses", {}),
    )
    table = fields.pop("table", Table("item", key="id"))
    return Load(name, source, table, windows=windows, pipeline=pipeline, **fields)


def detailed_load(url: str, *, name: str = "detailed", table: Table | None = None, **fields: object) -> Load:
    """Return a load of all items together, with the details of each in the table `detail`."""
    detail = Detail(
        id=lambda record: record["id"],
        request=lambda number: Request(endpoint="/detail", params={"id": number}),
        source=Http(url, format=Json()),
        table=table or Table("detail", key="id"),
        transform=fields.pop("detail_transform", lambda _number, record: record),
    )
    return items_load(url, name=name, windows=None, detail=detail, **fields)


def names_load(archive: str) -> Load:
    """Return a load of the files of an archive, one per year, with name, sex and count of the children."""
    return Load(
        "names",
        Files(archive, members="*.txt", format=Csv(columns=("name", "sex", "count"))),
        Table("name", key=("year", "name", "sex")),
        transform=lambda row: {"year": row["source_file"][-8:-4], **row},
        pipeline={"batch_size": 5_000},
    )


def with_limits(tasks: Tasks, limits: PipelineLimits) -> Tasks:
    """Return the same tasks, whose loads and flows run with other limits."""
    return tasks.beside(
        attrs.evolve(task, handler=_given(task.handler, limits=limits))
        for task in tasks.values()
        if isinstance(task.handler, partial) and task.handler.func in {run_load, run_flow}
    )


def _given(handler: partial, **more: object) -> partial:
    """Return the same function with more arguments, not a nested partial, which would hide the declaration."""
    return partial(handler.func, *handler.args, **handler.keywords, **more)


tasks = Tasks()


def and_memory(record):
    """Return the record with the peak memory of this process so far."""
    return {**record, "value": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


if url := os.environ.get("ITEMS_URL"):
    paused = json.loads(os.environ.get("ITEMS_PIPELINE", "{}"))
    rate_limits = tuple(RateLimit(*rate_limit) for rate_limit in json.loads(os.environ.get("ITEMS_RATE_LIMITS", "[]")))
    add_loads(
        tasks,
        *(items_load(url, name=name, pipeline=paused, rate_limits=rate_limits) for name in ("items", "others")),
        items_load(url, name="measured", transform=and_memory),
        detailed_load(url, pipeline=paused),
    )


def counted(run):
    """Yield `COUNTED` rows, slowly, each with a checkpoint."""
    for number in range((run.state or 0) + 1, COUNTED + 1):
        time.sleep(0.005)
        yield {"id": number}
        yield Checkpoint(number)


async def counted_on_trio(run):
    for item in counted(run):
        await trio.lowlevel.checkpoint()
        yield item


tasks.load("counted", table=Table("event", mode="insert"), every_rows=20)(counted)
tasks.load("counted on trio", table=Table("event", mode="insert"), every_rows=20)(counted_on_trio)
if archive := os.environ.get("NAMES_ARCHIVE"):
    add_loads(tasks, names_load(archive))
