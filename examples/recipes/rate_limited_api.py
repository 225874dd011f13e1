"""Orders of a shop whose API allows 100 requests a minute and 5,000 a day: page by page, into a table.

dataloader migrate
dataloader psql -c 'CREATE TABLE shop_order (id int PRIMARY KEY, customer text, total numeric, changed_at timestamptz)'
dataloader etl run shop.orders --tasks rate_limited_api:tasks --from 2026-11-01
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date, timedelta
from typing import Any

import attrs
import httpx2

from dataloader import Job, RateLimit, Supplier, Tasks
from dataloader.flows.etl import Auth, Cursor, Http, Json, Load, Record, Table, Window, Windows, add_loads

API = os.environ.get("SHOP_URL", "https://shop.example.org")
TOKEN = os.environ.get("SHOP_TOKEN", "a token of the shop")

tasks = Tasks()
# The load and the task below use these rate limits together, in all processes.
shop = tasks.supplier(
    Supplier("shop", rate_limits=(RateLimit(100, per_s=60), RateLimit(5_000, per="day", zone="Europe/Berlin")))
)


def changed_in(window: Window) -> dict[str, Any]:
    assert window.start is not None  # a load with windows has both ends
    assert window.end is not None
    return {"changed_from": window.start.isoformat(), "changed_to": window.end.isoformat()}


def order(record: Record) -> dict[str, Any]:
    return {name: record[name] for name in ("id", "customer", "total", "changed_at")}


orders = Load(
    "shop.orders",
    Http(
        API,
        name=shop.name,
        endpoint="/orders",
        params=changed_in,
        auth=Auth.bearer(TOKEN),
        pages=Cursor(param="after", path="next", size_param="limit", size=100),
        format=Json("orders"),
    ),
    Table("shop_order", key="id"),
    windows=Windows(start=date(2026, 1, 1), segment="day", look_back=timedelta(days=1)),
    transform=order,
    pipeline={"rate_min": 0.2, "rate_max": 0.6},
)
add_loads(tasks, orders)


@tasks.resource
@asynccontextmanager
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=API, headers={"Authorization": f"Bearer {TOKEN}"}) as opened:
        yield opened


@attrs.frozen
class Confirm:
    order: int


@tasks.task("shop.confirm", args=Confirm, queue="shop", supplier=shop)  # each start is one request of the rate limits
async def confirm(job: Job[Confirm]) -> None:
    answer = await job.resource(client).post(f"/orders/{job.args.order}/confirm")
    answer.raise_for_status()
