"""Flows and dimensions: several tasks as one run, tables built from tables (E8, E12)."""

from __future__ import annotations

import attrs
import pytest

from dataloader import Tasks
from dataloader.flows.etl import (
    CancellationToken,
    Dimension,
    Dimensions,
    Flow,
    History,
    Load,
    Table,
    add_dimensions,
    add_flows,
)
from dataloader.flows.etl.flow.flow import run_flow
from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.sources.files import Files
from dataloader.testing import run_task

TABLES = """
CREATE TABLE city (name text PRIMARY KEY, country text, people int);
CREATE TABLE dim_country (country text, cities int, valid_from date NOT NULL, valid_to date,
  is_current boolean NOT NULL, PRIMARY KEY (country, valid_from));
CREATE TABLE fact_people (country text PRIMARY KEY, people bigint CHECK (people < 1000), as_of date);
"""


@pytest.fixture
async def cities(raw, tmp_path):
    """Create a file of cities; return the load that loads it into the table `city`."""
    await raw.execute(TABLES)
    path = tmp_path / "cities.csv"
    path.write_text("name,country,people\nParis,fr,20\nLyon,fr,5\nRome,it,28\n")
    return Load(
        "ods.city",
        Files(str(path), format=Csv()),
        Table("city", key="name"),
        transform=lambda row: {name: row[name] for name in ("name", "country", "people")},
    )


COUNTRIES = Dimension(
    table="dim_country",
    query="SELECT country, count(*)::int AS cities FROM city GROUP BY country",
    key=("country",),
    history=History(tracked=("cities",)),
)
PEOPLE = Dimension(
    table="fact_people",
    query="SELECT country, sum(people) AS people, $1::date AS as_of FROM city GROUP BY country",
    key=("country",),
)
STARS = Dimensions(name="dwd", tables=(COUNTRIES, PEOPLE))


@pytest.fixture
def run(database):
    """Return a function that runs a flow once like a worker."""

    async def run(flow, **args):
        tasks = Tasks()
        add_flows(tasks, flow)
        return await run_task(tasks, flow.name, args, dsn=database.dsn)

    return run


@pytest.mark.requirement("E12", "E8")
async def test_a_flow_runs_its_layers_in_order_and_keeps_a_record_of_each_task(run, raw, cities):
    outcome = await run(Flow(name="nightly", layers={"ods": [cities], "dwd": [STARS]}), as_of="2026-03-01")
    assert outcome.status == "succeeded", outcome.error
    assert outcome.result["tasks"]["ods.city"]["counts"]["inserted"] == 3
    tables = outcome.result["tasks"]["dwd"]["tables"]
    assert tables["dim_country"]["counts"]["inserted"] == tables["fact_people"]["counts"]["inserted"] == 2
    rows = await raw.fetch("SELECT layer, task, status, started_at, finished_at FROM dl_etl_tasks ORDER BY ordinal")
    assert [(row["layer"], row["task"], row["status"]) for row in rows] == [
        ("ods", "ods.city", "succeeded"),
        ("dwd", "dwd", "succeeded"),
    ]
    assert rows[0]["finished_at"] <= rows[1]["started_at"]
    run_of_flow = await raw.fetchrow("SELECT kind, status FROM dl_etl_runs WHERE name = 'nightly'")
    assert tuple(run_of_flow) == ("flow", "succeeded")
    assert await raw.fetchval("SELECT people FROM fact_people WHERE country = 'fr' AND as_of = '2026-03-01'") == 25


@pytest.mark.slow
@pytest.mark.requirement("E8")
async def test_a_dimension_keeps_its_versions_and_a_fact_is_brought_up_to_date(database, raw, cities):
    tasks = Tasks()
    add_dimensions(tasks, STARS)
    await raw.execute("INSERT INTO city VALUES ('Paris', 'fr', 20)")
    await run_task(tasks, "dwd", {"as_of": "2026-03-01"}, dsn=database.dsn)
    await raw.execute("INSERT INTO city VALUES ('Lyon', 'fr', 5)")
    outcome = await run_task(tasks, "dwd", {"as_of": "2026-03-02"}, dsn=database.dsn)
    counts = {name: table["counts"] for name, table in outcome.result["tasks"]["dwd"]["tables"].items()}
    assert (counts["dim_country"]["changed"], counts["fact_people"]["updated"]) == (1, 1)
    versions = await raw.fetch("SELECT cities, valid_from::text, valid_to::text FROM dim_country ORDER BY valid_from")
    assert [tuple(version) for version in versions] == [(1, "2026-03-01", "2026-03-02"), (2, "2026-03-02", None)]


@pytest.mark.requirement("E8")
async def test_a_query_that_gives_no_row_closes_no_version_unless_it_may_be_empty(database, raw, cities):
    await raw.execute("INSERT INTO city VALUES ('Paris', 'fr', 20)")
    outcomes = []
    for dimension in (COUNTRIES, COUNTRIES, attrs.evolve(COUNTRIES, allow_empty=True)):
        tasks = Tasks()
        add_dimensions(tasks, Dimensions(name="dwd", tables=(dimension,)))
        as_of = f"2026-03-{len(outcomes) + 1:02}"
        outcome = await run_task(tasks, "dwd", {"as_of": as_of}, dsn=database.dsn)
        outcomes.append((outcome.status, await raw.fetchval("SELECT count(*) FROM dim_country WHERE is_current")))
        await raw.execute("TRUNCATE city")
    assert outcomes == [("succeeded", 1), ("failed", 1), ("succeeded", 0)]


@pytest.mark.requirement("E8")
@pytest.mark.parametrize(
    ("query", "lacking"),
    [
        ("SELECT country FROM city", "cities of tracked"),
        ("SELECT 1 AS cities FROM city", "country of its key"),
    ],
)
async def test_a_query_that_lacks_a_column_of_the_key_or_of_the_history_is_refused(
    database, raw, cities, query, lacking
):
    tasks = Tasks()
    add_dimensions(tasks, Dimensions(name="dwd", tables=(attrs.evolve(COUNTRIES, query=query),)))
    await raw.execute("INSERT INTO city VALUES ('Paris', 'fr', 20)")
    outcome = await run_task(tasks, "dwd", {"as_of": "2026-03-01"}, dsn=database.dsn)
    assert outcome.status == "failed"
    assert f"the query does not return the column {lacking}" in outcome.error
    assert await raw.fetchval("SELECT count(*) FROM dim_country") == 0


@pytest.mark.requirement("E8")
async def test_a_table_that_fails_stops_no_other_and_is_named(run, raw, cities):
    await raw.execute("INSERT INTO city VALUES ('Tokyo', 'jp', 5000)")
    flow = Flow(name="nightly", layers={"ods": [cities], "dwd": [STARS]})
    outcome = await run(flow)
    assert outcome.status == "failed"
    assert outcome.error.startswith("dwd: 1 of 2 tables failed: fact_people; fact_people: ")
    tables = outcome.result["tasks"]["dwd"]["tables"]
    assert (tables["dim_country"]["status"], tables["fact_people"]["status"]) == ("succeeded", "failed")
    assert await raw.fetchval("SELECT count(*) FROM dim_country") == 3
    assert await raw.fetchval("SELECT count(*) FROM fact_people") == 0
    assert await raw.fetchval("SELECT status FROM dl_etl_runs") == "failed"


@pytest.mark.requirement("E12")
async def test_a_layer_does_not_begin_when_the_one_before_it_has_failed(run, raw, cities):
    wrong = Load("ods.wrong", cities.source, Table("no_such_table", key="name"))
    outcome = await run(Flow(name="nightly", layers={"ods": [wrong, cities], "dwd": [STARS]}))
    assert outcome.status == "failed"
    assert outcome.error == "ods.wrong: there is no table no_such_table; create it first, or add its schema to the name"
    statuses = await raw.fetch("SELECT task, status FROM dl_etl_tasks ORDER BY ordinal")
    # The other task of the layer was run.
    assert [tuple(row) for row in statuses] == [("ods.wrong", "failed"), ("ods.city", "succeeded"), ("dwd", "waiting")]
    assert await raw.fetchval("SELECT count(*) FROM dim_country") == 0


@pytest.mark.requirement("E12")
async def test_a_retried_run_continues_with_the_tasks_that_have_not_succeeded(database, raw, cities):
    stops = CancellationToken()
    calls = []

    def transform(row):
        calls.append(row["name"])
        return {name: row[name] for name in ("name", "country", "people")}

    first = Load("ods.city", cities.source, cities.table, transform=transform)
    flow = Flow(name="nightly", layers={"ods": [first], "dwd": [STARS]})
    tasks = Tasks()

    @tasks.task("nightly")
    async def nightly(job):
        await run_flow(flow, job, stops)
        # The worker dies after the first layer: the job runs again.
        return await run_flow(flow, job)

    await raw.execute("ALTER TABLE dim_country RENAME COLUMN cities TO towns")
    outcome = await run_task(tasks, "nightly", dsn=database.dsn)
    assert outcome.status == "failed"
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda load: Flow(name="", layers={"ods": [load]}), "name: must have 1 to 200 characters, not 0"),
        (lambda _load: Flow(name="f", layers={}), "layers: must have .*, not none"),
        (
            lambda load: Flow(name="f", layers={"a": [load], "b": [load]}),
            "layers: must have .*, not ods.city, ods.city",
        ),
        (lambda _load: Dimensions(name="d", tables=()), "tables: must have .*, not none"),
        (lambda _load: Dimensions(name="d", tables=(PEOPLE,), parallel=0), "parallel: must be .*, not 0"),
        (lambda _load: Dimension(table="t", query="SELECT 1", key=()), "table t: key: is required"),
    ],
)
@pytest.mark.requirement("E8", "E12")
def test_what_can_not_be_meant_is_refused_by_name(make, message, tmp_path):
    load = Load("ods.city", Files(str(tmp_path), format=Csv()), Table("t", key="a"))
    with pytest.raises(ValueError, match=f"^{message}"):
        make(load)
