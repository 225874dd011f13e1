"""The recipes of docs/recipes, run unchanged in this process, each on at most one database."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path

import httpx2
import psycopg
import pytest
import trio
from conditions import patience_s
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from source_app import Answer, open_source_app

from dataloader import JobFilter, Settings, Worker, open_client, open_supervisor
from dataloader.testing import drain_queue, run_task

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "recipes"
PAGES = ROOT / "docs" / "recipes"


def load(name):
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # FastAPI looks up annotations there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def supplier(monkeypatch):
    """Run a server for the requests of recipes."""
    with open_source_app() as app:
        monkeypatch.setenv("SHOP_URL", app.url)
        monkeypatch.setenv("SALES_URL", app.url)
        yield app


def create(database, recipe):
    """Create the tables like the recipe's own first lines."""
    text = (RECIPES / f"{recipe}.py").read_text()
    for statement in re.findall(r"'(CREATE TABLE .*)'", text):
        database.psql(statement)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.py")), ids=lambda path: path.stem)
def test_a_page_shows_each_recipe_as_it_is(path):
    description, code = path.read_text().split('"""\n', 1)
    commands = description.split("\n\n", 1)[1].replace("\\\\\n", "\\\n").strip()
    blocks = f"```python\n{code.strip()}\n```\n\nTo run it, save it as `{path.name}`:\n\n```sh\n{commands}\n```"
    shown = [page.name for page in PAGES.glob("*.md") if blocks in page.read_text()]
    assert len(shown) == 1
    assert len(path.read_text().splitlines()) <= 80


@pytest.mark.slow
async def test_the_rate_limited_api_recipe_loads_pages_and_sends_confirmations(database, raw, supplier):
    create(database, "rate_limited_api")

    def orders(seen):
        assert seen.headers.get("Authorization", seen.headers.get("authorization")).startswith("Bearer")
        numbers, after = ([3], None) if seen.query.get("after") == "2" else ([1, 2], "2")
        order = {"customer": "ann", "total": "9.50", "changed_at": seen.query["changed_from"], "note": "not kept"}
        return Answer(json.dumps({"orders": [{"id": number, **order} for number in numbers], "next": after}).encode())

    supplier.put("/orders", orders)
    supplier.put("/orders/3/confirm", Answer(b"{}"))
    recipe = load("rate_limited_api")
    args = {"from": "2026-11-01", "to": "2026-11-02", "pipeline": {"rate_min": 0, "rate_max": 0}}
    run = await run_task(recipe.tasks, "shop.orders", args, dsn=database.dsn)
    assert (run.status, run.error) == ("succeeded", None)
    assert await raw.fetchval("SELECT array_agg(id ORDER BY id) FROM shop_order") == [1, 2, 3]
    run = await run_task(recipe.tasks, recipe.confirm, recipe.Confirm(3))
    assert (run.status, run.error) == ("succeeded", None)
    assert [one.path for one in supplier.requests] == ["/orders", "/orders", "/orders/3/confirm"]
    assert [recipe.confirm.limits.supplier, recipe.orders.source.name] == ["shop", "shop"]


@pytest.mark.slow
async def test_a_night_replaces_its_days_and_one_without_sales_fails(database, raw, supplier):
    create(database, "nightly_load")
    shops = ["north", "south"]

    def answer(seen):
        sales = [{"day": seen.query["day"], "shop": shop, "amount": 5} for shop in shops]
        return Answer(json.dumps(sales if seen.query["day"] != "2026-11-03" else []).encode())

    supplier.put("/sales", answer)
    recipe = load("nightly_load")
    [schedule] = recipe.tasks.schedules
    assert (schedule.name, schedule.task, recipe.tasks["sales"].queue) == ("sales", "sales", "nightly")
    args = {"from": "2026-11-01", "to": "2026-11-03", "pipeline": {"rate_min": 0, "rate_max": 0, "attempts": 1}}
    for _ in range(2):
        run = await run_task(recipe.tasks, "sales", args, dsn=database.dsn)
        assert (run.status, run.error) == ("succeeded", None)
        assert await raw.fetchval("SELECT sum(amount) FROM sale") == 20
    shops.remove("south")
    run = await run_task(recipe.tasks, "sales", args | {"to": "2026-11-04"}, dsn=database.dsn)
    assert (run.status, "there are no sales" in run.error) == ("failed", True)
    assert await raw.fetchval("SELECT sum(amount) FROM sale WHERE gone IS NOT TRUE") == 10


def test_the_mail_of_a_night_has_the_notice_of_the_page_on_notifications():
    page = (ROOT / "docs" / "notifications.md").read_text()
    notice = json.loads(re.search(r"```json\n(.*?)```", page, re.DOTALL)[1])
    message = load("nightly_load").mail(notice, date(2026, 11, 23))
    assert message["Subject"] == "failed: load.year, 12 times since the last mail (2026-11-23)"
    assert notice["error"] in message.get_content()


@pytest.mark.slow
async def test_a_webhook_is_signed_waits_as_asked_and_gives_up_on_a_refusal(database, supplier):
    recipe, url = load("webhook_delivery"), f"{supplier.url}/hook"
    delivery = recipe.Delivery(url, "order.paid", {"order": 7})
    supplier.put("/hook", Answer())
    run = await run_task(recipe.tasks, recipe.deliver, delivery)
    assert (run.status, run.result) == ("succeeded", 200)
    [seen] = supplier.requests
    headers = {name.lower(): value for name, value in seen.headers.items()}
    signed = headers["x-timestamp"].encode() + b"." + seen.body
    assert headers["x-signature"] == hmac.new(recipe.SECRET, signed, hashlib.sha256).hexdigest()
    assert json.loads(seen.body) == {"event": "order.paid", "data": {"order": 7}}
    for answer, wanted in (
        (Answer(status=429, headers={"Retry-After": "77"}), ("queued", 77)),
        (Answer(status=410, body=b"gone"), ("failed", 0)),
    ):
        supplier.put("/hook", answer)
        run = await run_task(recipe.tasks, recipe.deliver, delivery)
        assert (run.status, run.delay_s) == wanted
    supplier.put("/hook", Answer(status=500))
    run = await run_task(recipe.tasks, recipe.deliver, delivery, attempt=3)
    assert run.status == "queued"
    assert 90 <= run.delay_s <= 99

    @recipe.tasks.task("order.pay", queue="orders")
    async def pay(job):
        async with job.transaction() as transaction:
            await recipe.publish(transaction, [url, f"{url}/2"], "order.paid", {"order": 7})

    await run_task(recipe.tasks, pay, dsn=database.dsn)
    async with open_client(database.dsn) as client:
        added = (await client.jobs.find(JobFilter(task="webhook.deliver"))).jobs
    assert {job.lock_key for job in added} == {f"webhook:{url}", f"webhook:{url}/2"}


@pytest.mark.slow
async def test_totals_of_a_tenant_run_one_at_a_time_and_exports_two_at_a_time(database, raw):
    create(database, "tenants")
    database.psql("INSERT INTO sale VALUES ('a', 1), ('a', 2), ('b', 5)")
    recipe, tenants = load("tenants"), ["a", "b", "c"]
    running, most = Counter(), Counter()

    @recipe.tasks.around
    @contextmanager
    def counted(job):
        of = job.task, job.args.tenant
        running[of] += 1
        most[of] = max(most[of], running[of])
        yield
        running[of] -= 1

    settings = Settings(db_dsn=database.dsn, workers=(Worker("tenants", 8),))
    async with open_supervisor(settings, recipe.tasks) as supervisor:
        exports = await recipe.export_all(supervisor.jobs, tenants, each=5)
        totals = [await supervisor.jobs.enqueue(recipe.total, recipe.Tenant(name)) for name in tenants * 3]
        with trio.fail_after(patience_s()):
            for one in [*exports, *totals]:
                assert (await supervisor.jobs.wait(one.job_id)).status == "succeeded"
    assert await raw.fetch("SELECT tenant, amount::int FROM total ORDER BY tenant") == [("a", 3), ("b", 5)]
    assert {most["tenant.total", name] for name in tenants} == {1}
    assert {most["tenant.export", name] for name in tenants} <= {1, 2}


async def test_an_upload_is_imported_once_and_one_with_bad_lines_changes_nothing(database, raw, tmp_path, monkeypatch):
    monkeypatch.setenv("UPLOADS", str(tmp_path / "uploads"))
    create(database, "uploads")
    recipe = load("uploads")
    good, bad = b"sku,name,price\n1,nut,0.10\n2,bolt,0.20\n", b"sku,name,price\n3,nail,cheap\n"
    await drain_queue(database.dsn, recipe.tasks)
    with psycopg.connect(database.dsn) as connection:
        first, second, refused = (recipe.accept(connection, content) for content in (good, good, bad))
    assert first == second
    runs = await drain_queue(database.dsn, recipe.tasks)
    assert sorted((run.status, run.error) for run in runs) == [
        ("failed", """1 bad lines: line 2: InvalidOperation([<class 'decimal.ConversionSyntax'>])"""),
        ("succeeded", None),
    ]
    assert refused != first
    assert await raw.fetchval("SELECT string_agg(name, ' ' ORDER BY sku) FROM product") == "nut bolt"


@pytest.mark.slow
async def test_a_report_shows_how_far_it_is_in_a_page_of_fastapi(database, monkeypatch):
    recipe = load("reports")
    settings = Settings(db_dsn=database.dsn, workers=(Worker("reports", 1),), port=0)
    async with open_supervisor(settings, recipe.tasks, with_web=True) as supervisor:
        monkeypatch.setenv("DATALOADER_URL", supervisor.url)
        with trio.fail_after(patience_s()):
            states = await trio.to_thread.run_sync(asyncio.run, _order_a_report(load("reports_web").app))
    assert states[0].keys() == {"status", "ended", "progress", "result", "error"}
    assert states[-1]["status"] == "succeeded"
    assert states[-1]["progress"] == {"month": 12, "of": 12}
    assert states[-1]["result"]["text"].startswith("Report for ann\nmonth 1: ")


async def _order_a_report(app):
    transport = httpx2.ASGITransport(app)
    async with app.router.lifespan_context(app), httpx2.AsyncClient(transport=transport, base_url="http://web") as web:
        ordered = await web.post("/reports/ann")
        assert ordered.status_code == 303
        page = ordered.headers["Location"]
        assert "<progress" in (await web.get(page)).text
        states = [(await web.get(f"{page}/state")).json()]
        while not states[-1]["ended"]:
            await asyncio.sleep(0.05)
            states.append((await web.get(f"{page}/state")).json())
        assert (await web.delete(page)).status_code == 204
        assert (await web.get("/reports/0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b/state")).status_code == 404
        return states


DJANGO = """
import django_shop
from django.test import Client
client = Client()
placed = client.post("/orders/7")
print(placed.status_code, client.post("/orders/7").json() == placed.json())
print(client.get("/jobs/" + placed.json()["job_id"]).json()["status"])
"""


@pytest.mark.slow
async def test_a_view_of_django_writes_an_order_with_its_job_and_shows_it(database, raw):
    create(database, "django_shop")
    environment = os.environ | {"DATABASE_URL": database.dsn, "PYTHONPATH": str(RECIPES)}
    command = [sys.executable, "-c", DJANGO]
    run = partial(subprocess.run, command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    done = await trio.to_thread.run_sync(run)
    assert (done.returncode, done.stdout.split()) == (0, ["201", "True", "queued"]), done.stderr
    assert await raw.fetchval("SELECT count(*) FROM orders JOIN dl_jobs USING (job_id)") == 1


async def test_a_run_is_a_span_below_the_one_that_has_added_its_job():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    recipe = load("tracing")
    with trace.get_tracer("shop").start_as_current_span("checkout"):
        order = recipe.Order(7)
    run = await run_task(recipe.tasks, recipe.bill, order)
    assert (run.status, run.result) == ("succeeded", 7)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["process order.bill"].parent.span_id == spans["checkout"].context.span_id
    assert spans["print the bill"].parent.span_id == spans["process order.bill"].context.span_id
    assert spans["process order.bill"].attributes["dataloader.attempt"] == 1
