"""Loads whose rows a function yields: pieces, segments, checkpoints, errors (E6, E10)."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import sqlite3
import threading
import time
from datetime import UTC, datetime
from decimal import Decimal

import attrs
import msgspec
import pytest
import trio
from conditions import until
from logged import capture_logs

from dataloader import BadRequest, RateLimit, Snooze, Supplier, Tasks
from dataloader.flows.etl import Checkpoint, Flow, History, Load, Rows, RowsRun, Table, Windows, add_flows, run_load
from dataloader.flows.etl.parse.copy_lines import LineEncoder
from dataloader.flows.etl.parse.transform import Recipe
from dataloader.flows.etl.rows.request_slots import RunOver
from dataloader.flows.etl.rows.row_taker import RowTaker
from dataloader.testing import run_task

pytestmark = pytest.mark.requirement("E6", "E10")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
KEYED = Table("item", key="id")
KEYLESS = Table("event", mode="insert")


@pytest.fixture(autouse=True)
def tables(database, limits):
    """Create a table with a key and one without, make pieces of single rows, and repeat calls immediately."""
    database.psql("CREATE TABLE item (id int PRIMARY KEY, value text); CREATE TABLE event (id int, value text)")
    limits.set(retry_s=(0.001, 0.001), piece=(1, 2**20, 1.0))


@pytest.fixture
def outcome_of_rows(outcome_of):
    """Return a function that runs a load of the rows of a function once."""

    async def outcome_of_rows(function, table=KEYED, *, every_rows=100_000, asyncio=False, **options):
        rows = Rows(function, every_rows=every_rows, asyncio=asyncio)
        return await outcome_of(Load("orders", rows, table, **options))

    return outcome_of_rows


@pytest.fixture
def segments(raw):
    """Return a function that reads the names of the committed segments, and the rows that each has inserted."""

    async def segments():
        rows = await raw.fetch("SELECT segment, counts FROM dl_etl_segments ORDER BY segment")
        return {row["segment"]: msgspec.json.decode(row["counts"]).get("inserted", 0) for row in rows}

    return segments


@attrs.frozen
class Item:
    id: int
    value: str = "attrs"


@dataclasses.dataclass
class Data:
    id: int
    value: str = "dataclass"


class Struct(msgspec.Struct):
    id: int
    value: str = "struct"


def numbered(first, last):
    return ({"id": number, "value": "a"} for number in range(first, last + 1))


async def ids(raw, table="item"):
    return [row[0] for row in await raw.fetch(f"SELECT id FROM {table} ORDER BY id")]


async def test_rows_are_mappings_objects_or_lists_of_them(outcome_of_rows, table):
    def rows(run):
        yield {"id": 1, "value": "dict"}
        yield [Item(2), Data(3)]
        yield Struct(4)
        yield []

    outcome = await outcome_of_rows(rows)
    assert (outcome.status, outcome.result["counts"]) == (
        "succeeded",
        {"inserted": 4, "records": 4, "rows": 4, "segments": 1},
    )
    assert await table() == ["(1,dict)", "(2,attrs)", "(3,dataclass)", "(4,struct)"]


@attrs.define
class UnsetAttrs:
    id: int
    value: str = attrs.field(init=False)


@dataclasses.dataclass
class UnsetData:
    id: int
    value: str = dataclasses.field(init=False)


@pytest.mark.parametrize("kind", [UnsetAttrs, UnsetData])
async def test_an_object_without_a_field_is_a_failure_of_its_record(outcome_of_rows, raw, kind):
    outcome = await outcome_of_rows(lambda _run: [Item(1), kind(2), Item(3)], pipeline={"max_failed_share": 1})
    assert outcome.result["counts"]["records_failed"] == 1
    assert await ids(raw) == [1, 3]
    [failure] = await raw.fetch("SELECT phase, key, error FROM dl_etl_failures")
    assert (failure["phase"], failure["key"], "AttributeError" in failure["error"]) == ("record", "2", True)


def test_the_time_of_a_row_does_not_depend_on_the_number_of_shapes():
    columns = [f"c{number}" for number in range(10)]
    recipe = Recipe(transform=lambda row: row, encoder=LineEncoder(columns), key=(), hash_without=frozenset())
    times = []
    for shapes in (16, 1024):
        taker = RowTaker(
            source=Rows(lambda _run: []),
            recipe=recipe,
            piece=(10**9, 2**30, 1e9),
            is_cut_anywhere=False,
            is_cut_at_checkpoints=False,
        )
        rows = [{f"c{bit}": 1 for bit in range(10) if number >> bit & 1} for number in range(shapes)]
        assert list(taker.take(rows)) == []  # each shape is prepared once
        began = time.process_time()
        assert list(taker.take(rows * (16_384 // shapes))) == []
        times.append(time.process_time() - began)
    assert times[1] < times[0] * 5


async def test_a_dictionary_that_is_yielded_again_and_again_is_read_each_time(outcome_of_rows, raw):
    def rows(run):
        row = {}
        for number in range(3):
            row["id"] = number
            yield row

    await outcome_of_rows(rows)
    assert await ids(raw) == [0, 1, 2]


async def test_a_decorated_function_is_a_load_with_segments_of_every_rows(database, raw, segments):
    tasks = Tasks()

    @tasks.load("shop.orders", table=KEYED, every_rows=2, queue="loads")
    def orders(run):
        """Load the orders."""
        yield list(numbered(1, 3))
        yield from numbered(4, 5)

    assert isinstance(orders, Load)
    assert (tasks["shop.orders"].queue, tasks["shop.orders"].description) == ("loads", "Load the orders.")
    outcome = await run_task(tasks, "shop.orders", dsn=database.dsn)
    assert outcome.result["counts"]["inserted"] == 5
    assert await segments() == {"rows 000001": 2, "rows 000002": 2, "rows 000003": 1}
    assert await ids(raw) == [1, 2, 3, 4, 5]


async def test_a_run_continues_at_the_last_checkpoint_of_the_run_before(outcome_of_rows, raw, segments):
    states = []

    def rows(run):
        states.append(run.state)
        begin = 0 if run.state is None else run.state["after"]
        for number in range(begin + 1, begin + 4):
            yield {"id": number}
            yield Checkpoint({"after": number})

    for _ in range(2):
        assert (await outcome_of_rows(rows, KEYLESS, every_rows=2)).status == "succeeded"
    assert states == [None, {"after": 3}]
    assert await ids(raw, "event") == [1, 2, 3, 4, 5, 6]
    assert await segments() == {"rows 000001": 2, "rows 000002": 1}  # of each run


@pytest.mark.parametrize("table", [KEYED, KEYLESS], ids=["key", "no key"])
async def test_after_an_error_the_function_continues_at_the_last_committed_checkpoint(outcome_of_rows, raw, table):
    states = []

    def rows(run):
        states.append(run.state)
        begin = run.state or 0
        for number in range(begin + 1, 7):
            yield {"id": number}
            yield Checkpoint(number)
            if number == 5 and len(states) < 3:
                raise OSError("the connection was reset")

    outcome = await outcome_of_rows(rows, table, every_rows=2)
    assert (outcome.status, states) == ("succeeded", [None, 4, 4])
    assert await ids(raw, table.name) == [1, 2, 3, 4, 5, 6]
    assert outcome.result["counts"] == {"inserted": 6, "records": 6, "rows": 6, "segments": 3}


async def test_without_a_checkpoint_a_table_with_a_key_is_loaded_from_the_beginning(outcome_of_rows, raw, segments):
    calls = []

    def rows(run):
        calls.append(run.state)
        for row in numbered(1, 5):
            yield row
            if row["id"] == 3 and len(calls) == 1:
                raise OSError("the connection was reset")

    outcome = await outcome_of_rows(rows, every_rows=2)
    assert (outcome.status, calls) == ("succeeded", [None, None])
    assert outcome.result["counts"]["unchanged"] == 2
    assert await ids(raw) == [1, 2, 3, 4, 5]
    assert await segments() == {"rows 000001": 2, "rows 000003": 0, "rows 000004": 2, "rows 000005": 1}


@pytest.mark.parametrize(
    "table",
    [KEYLESS, attrs.evolve(KEYED, name="marked", delete_missing="gone")],
    ids=["no key, no checkpoint", "marks of deleted rows"],
)
async def test_where_a_repetition_would_do_harm_the_run_is_one_segment(outcome_of_rows, raw, segments, table):
    await raw.execute("CREATE TABLE marked (id int PRIMARY KEY, value text, gone boolean NOT NULL DEFAULT false)")
    calls = []

    def rows(run):
        calls.append(1)
        yield from numbered(1, 4)
        if len(calls) < 3:
            raise OSError("the connection was reset")

    outcome = await outcome_of_rows(rows, table, every_rows=2)
    assert (outcome.status, len(calls)) == ("succeeded", 3)
    assert await ids(raw, table.name) == [1, 2, 3, 4]
    assert await segments() == {"rows 000003": 4}


async def test_a_function_that_fails_each_time_fails_the_attempt_and_keeps_segments(outcome_of_rows, raw):
    calls = []

    def rows(run):
        calls.append(run.state)
        for number in range((run.state or 0) + 1, 10):
            if number == 3:
                raise OSError("the supplier is closed, password=sesame-street-9")
            yield {"id": number}
            yield Checkpoint(number)

    outcome = await outcome_of_rows(rows, KEYLESS, every_rows=1, pipeline={"attempts": 2})
    assert outcome.status not in {"succeeded", "canceled"}
    assert calls == [None, 2]
    assert "the supplier is closed" in outcome.error
    assert "sesame-street" not in outcome.error
    assert await ids(raw, "event") == [1, 2]
    [failure] = await raw.fetch("SELECT phase, segment, error FROM dl_etl_failures")
    assert (failure["phase"], "the supplier is closed" in failure["error"]) == ("request", True)


async def test_without_a_key_no_rows_follow_a_refused_segment(outcome_of_rows, raw):
    await raw.execute("ALTER TABLE event ADD CONSTRAINT once UNIQUE (id) DEFERRABLE INITIALLY DEFERRED")
    await raw.execute("INSERT INTO event (id) VALUES (3)")

    def rows(run):
        for number in range((run.state or 0) + 1, 7):
            yield {"id": number}
            yield Checkpoint(number)

    first = await outcome_of_rows(rows, KEYLESS, every_rows=2, pipeline={"max_failed_segments": 5})
    assert first.result["status"] == "succeeded_with_failures"
    assert await ids(raw, "event") == [1, 2, 3]
    await raw.execute("DELETE FROM event WHERE id = 3")
    again = await outcome_of_rows(rows, KEYLESS, every_rows=2)
    assert (again.result["status"], await ids(raw, "event")) == ("succeeded", [1, 2, 3, 4, 5, 6])


async def test_rows_after_the_last_checkpoint_of_a_table_without_a_key_are_reported(outcome_of_rows):
    def rows(run):
        yield {"id": 1}
        yield Checkpoint(1)
        yield from numbered(2, 3)

    told = "rows after the last checkpoint are loaded again by the next run, because the table has no key"
    assert (await outcome_of_rows(rows, KEYLESS)).result["reason"] == told
    assert (await outcome_of_rows(rows, KEYLESS, every_rows=1)).result["reason"] == told
    assert "reason" not in (await outcome_of_rows(rows)).result


async def test_a_bad_row_is_a_failure_that_a_later_complete_run_resolves(outcome_of_rows, raw, loads_failures):
    rows = [{"id": 1}, {"id": None}, {"id": 3}, {"id": "x"}]
    outcome = await outcome_of_rows(lambda _run: rows, pipeline={"max_failed_share": 1})
    assert outcome.result["status"] == "succeeded_with_failures"
    assert await ids(raw) == [1, 3]
    assert [(phase, segment) for phase, segment, _ in await loads_failures()] == [
        ("record", "rows 000001"),
        ("row", "rows 000001"),
    ]
    rows[:] = [{"id": 1}, {"id": 2}]
    await outcome_of_rows(lambda _run: rows)
    assert [solved for _, _, solved in await loads_failures()] == [True, True]


@pytest.fixture
def loads_failures(raw):
    """Return a function that reads the recorded failures."""

    async def loads_failures():
        rows = await raw.fetch(
            "SELECT phase, segment, solved_at IS NOT NULL AS solved FROM dl_etl_failures ORDER BY phase"
        )
        return [tuple(row) for row in rows]

    return loads_failures


async def test_a_later_run_with_a_state_resolves_no_failure_of_the_rows_before(outcome_of_rows, loads_failures):
    def rows(run):
        yield {"id": 7} if run.state else {"id": None}
        yield Checkpoint(1)

    await outcome_of_rows(rows, pipeline={"max_failed_share": 1, "max_failures": 10})
    await outcome_of_rows(rows)
    assert [solved for _, _, solved in await loads_failures()] == [False]


@pytest.mark.parametrize("item", [7, "text", ("a", 1), None], ids=["number", "text", "tuple", "nothing"])
async def test_an_item_that_is_no_row_fails_the_run_with_a_clear_error(outcome_of_rows, item):
    outcome = await outcome_of_rows(lambda _run: [{"id": 1}, item])
    assert outcome.status == "failed"
    assert (
        "row 2: must be a mapping, an attrs, dataclass or msgspec object, a list of these, or a Check" in outcome.error
    )
    assert f"not {type(item).__name__}" in outcome.error


async def test_a_state_that_is_not_json_fails_the_call(outcome_of_rows):
    outcome = await outcome_of_rows(lambda _run: (Checkpoint(object()) for _ in range(1)), pipeline={"attempts": 1})
    assert "state: must be a JSON value: None," in outcome.error
    assert "; not <object object" in outcome.error


_CYCLE: list[object] = []
_CYCLE.append(_CYCLE)


@pytest.mark.parametrize(
    "state",
    [
        math.nan,
        math.inf,
        NOW,
        NOW.date(),
        Decimal(1),
        b"a",
        {"a"},
        (1, 2),
        [(1, 2)],
        {1: 2},
        Item(1),
        "a\0b",
        {"a\0": 1},
        {"a": ["\\\0"]},
        "\ud800",
        _CYCLE,
    ],
    ids=repr,
)
def test_a_state_that_json_does_not_keep_is_refused(state):
    with pytest.raises(BadRequest, match=r"^state: must be a JSON value: None, a bool, .*; not "):
        Checkpoint(state)


@pytest.mark.parametrize("state", [None, True, 0, 1.5, 2**70, "é\\u0000", [], {"a": [{"b": None}]}], ids=repr)
async def test_a_state_is_read_as_it_was_yielded(outcome_of_rows, state):
    states = []

    def rows(run):
        states.append(run.state)
        yield {"id": 1}
        yield Checkpoint(state)

    await outcome_of_rows(rows)
    await outcome_of_rows(rows)
    assert states == [None, state]


async def test_a_state_that_changes_after_its_checkpoint_loses_no_row(outcome_of_rows, raw):
    state = {"after": 0, "seen": []}

    def rows(run):
        for number in range(1, 4):
            yield {"id": number}
            state["after"] = number
            state["seen"].append(number)
            yield Checkpoint(state)
        state["after"] = 99
        state["seen"].clear()

    assert (await outcome_of_rows(rows)).status == "succeeded"
    stored = msgspec.json.decode(await raw.fetchval("SELECT state -> 'state' FROM dl_load_state"))
    assert stored == {"after": 3, "seen": [1, 2, 3]}


@pytest.mark.parametrize("option", ["delete_missing", "complete history"])
async def test_a_checkpoint_of_a_load_that_deletes_missing_rows_is_refused(outcome_of_rows, raw, option):
    await raw.execute(
        "CREATE TABLE marked (id int PRIMARY KEY, value text, gone boolean NOT NULL DEFAULT false);"
        "CREATE TABLE versions (id int, value text, valid_from timestamptz, valid_to timestamptz,"
        " is_current boolean NOT NULL, PRIMARY KEY (id, valid_from))"
    )
    history = History(tracked="value", as_of=lambda _segment: NOW)
    table = Table("versions", key="id", history=history)
    if option == "delete_missing":
        table = Table("marked", key="id", delete_missing="gone")
    # The state is that of a former declaration.
    state = """'{"kind": "checkpoint", "state": 7}'"""
    await raw.execute(f"INSERT INTO dl_load_state (load, state, run_id) VALUES ('orders', {state}, gen_random_uuid())")
    states = []

    def rows(run):
        states.append(run.state)
        yield {"id": 1}
        yield Checkpoint(1)

    outcome = await outcome_of_rows(rows, table)
    assert (outcome.status, states) == ("failed", [None])
    assert f"Checkpoint: is not allowed with {option}: a row that a run does not load" in outcome.error


async def test_a_change_history_may_have_checkpoints(outcome_of_rows, raw):
    await raw.execute(
        "CREATE TABLE versions (id int, value text, valid_from timestamptz, valid_to timestamptz,"
        " is_current boolean NOT NULL, PRIMARY KEY (id, valid_from))"
    )
    history = History(tracked="value", as_of=lambda _segment: NOW, complete=False)

    def rows(run):
        yield {"id": 1}
        yield Checkpoint(1)

    assert (await outcome_of_rows(rows, Table("versions", key="id", history=history))).status == "succeeded"
    assert await raw.fetchval("SELECT state ->> 'state' FROM dl_load_state") == "1"


async def test_rows_after_the_state_of_an_earlier_run_are_reported_without_a_key(outcome_of_rows):
    def rows(run):
        yield {"id": 1}
        if run.state is None:
            yield Checkpoint(1)

    told = "rows after the last checkpoint are loaded again by the next run, because the table has no key"
    assert "reason" not in (await outcome_of_rows(rows, KEYLESS)).result
    assert (await outcome_of_rows(rows, KEYLESS)).result["reason"] == told


async def test_an_async_generator_runs_on_trio(outcome_of_rows, raw):
    calls = []

    async def rows(run):
        calls.append(1)
        for first in (1, 3):
            await trio.lowlevel.checkpoint()
            yield list(numbered(first, first + 1))
        yield {"id": 5}
        yield Checkpoint(5)
        if len(calls) == 1:
            raise OSError("the connection was reset")

    outcome = await outcome_of_rows(rows, every_rows=2)
    assert (outcome.status, await ids(raw)) == ("succeeded", [1, 2, 3, 4, 5])


async def test_an_async_generator_runs_on_asyncio_in_one_task(outcome_of_rows, raw):
    calls, tasks = [], set()

    async def rows(run):
        calls.append(run.state)
        for first in (1, 3):
            async with asyncio.timeout(30):
                await asyncio.sleep(0)
                tasks.add(asyncio.current_task())
                yield list(numbered(first, first + 1))
        yield {"id": 5}
        yield Checkpoint(5)
        if len(calls) == 1:
            raise OSError("the connection was reset")

    outcome = await outcome_of_rows(rows, every_rows=2, asyncio=True)
    assert (outcome.status, len(calls), len(tasks)) == ("succeeded", 2, 2)
    assert await ids(raw) == [1, 2, 3, 4, 5]


async def test_a_cancellation_that_a_generator_on_asyncio_raises_is_its_error(outcome_of_rows, raw):
    calls = []

    async def rows(run):
        calls.append(1)
        yield {"id": 1}
        await asyncio.sleep(0)
        if len(calls) == 1:
            raise asyncio.CancelledError

    assert (await outcome_of_rows(rows, asyncio=True)).status == "succeeded"
    assert (len(calls), await ids(raw)) == (2, [1])


@pytest.mark.slow
async def test_a_cancel_raises_cancelled_error_in_a_generator_on_asyncio(supervised, raw):
    ended = []

    async def rows(run):
        yield {"id": 1}
        yield {"id": 2}
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    tasks, load = Tasks(), Load("orders", Rows(rows, asyncio=True), KEYED)
    add_flows(tasks, Flow(name="nightly", layers={"all": [load]}, queue="q"))
    async with supervised(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("nightly", queue="q")
        await until(lambda: raw.fetchval("SELECT (progress ->> 'records')::int = 2 FROM dl_jobs"))
        await supervisor.jobs.cancel(job.job_id)
        assert (await supervisor.jobs.wait(job.job_id)).status == "canceled"
    assert (ended, await ids(raw)) == (["cancelled"], [1, 2])


def test_a_generator_that_is_not_async_is_refused_for_asyncio():
    with pytest.raises(ValueError, match="asyncio: True needs an async generator"):
        Rows(lambda _run: [], asyncio=True)


async def test_a_load_on_asyncio_needs_the_loop_of_handlers(supervised):
    async def rows(run):
        yield {"id": 1}

    tasks, load = Tasks(), Load("orders", Rows(rows, asyncio=True), KEYED)

    @tasks.task("orders")
    async def orders(job):
        return await run_load(load, job)

    async with supervised(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("orders", queue="q")
        ended = await supervisor.jobs.wait(job.job_id)
    assert ended.status == "failed"
    assert "asyncio: needs the asyncio loop of handlers; register the load with add_loads" in ended.error


def asking(times):
    """Return a generator that sends two requests."""

    def rows(run):
        for number in range(2):
            with run.request():
                times.append(time.monotonic())
                yield {"id": number}
                times.append(time.monotonic())

    return rows


def asking_on_trio(times):
    async def rows(run):
        for number in range(2):
            async with run.request():
                times.append(time.monotonic())
                await trio.sleep(0.01)
                times.append(time.monotonic())
            yield {"id": number}

    return rows


def asking_on_asyncio(times):
    async def rows(run):
        for number in range(2):
            async with run.request():
                times.append(time.monotonic())
                await asyncio.sleep(0.01)
                times.append(time.monotonic())
            yield {"id": number}

    return rows


@pytest.mark.slow
@pytest.mark.requirement("E1")
@pytest.mark.parametrize("made", [asking, asking_on_trio, asking_on_asyncio], ids=["thread", "Trio", "asyncio"])
async def test_requests_of_a_function_keep_the_pause_of_its_supplier(outcome_of, raw, made):
    times = []
    source = Rows(made(times), supplier="shop", every_rows=1, asyncio=made is asking_on_asyncio)
    load = Load("orders", source, KEYED, pipeline={"rate_min": 0.5, "rate_max": 0.5})
    outcome = await outcome_of(load)
    assert outcome.result["counts"]["requests"] == 2
    _, first_ended, second_began, _ = times
    assert second_began - first_ended >= 0.45  # the database's clock differs a little
    counts = [msgspec.json.decode(row[0]) for row in await raw.fetch("SELECT counts FROM dl_etl_segments")]
    assert sum(one.get("requests", 0) for one in counts) == 2


@pytest.mark.slow
@pytest.mark.requirement("E1")
async def test_requests_of_two_functions_to_one_supplier_never_overlap(supervised):
    times = [], []

    def rows_of(times):
        def rows(run):
            for number in range(3):
                with run.request():
                    began = time.monotonic()
                    time.sleep(0.05)
                    times.append((began, time.monotonic()))
                yield {"id": number}

        return rows

    names = ["one", "two"]
    loads = [
        Load(name, Rows(rows_of(of), supplier="shop"), KEYED, queue="q", pipeline={"rate_min": 0, "rate_max": 0})
        for name, of in zip(names, times, strict=True)
    ]
    async with supervised(*loads) as supervisor:
        jobs = [await supervisor.jobs.enqueue(name, queue="q") for name in names]
        assert [(await supervisor.jobs.wait(job.job_id)).status for job in jobs] == ["succeeded"] * 2
    spans = sorted([*times[0], *times[1]])
    assert len(spans) == 6
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(spans))


@pytest.mark.slow
@pytest.mark.requirement("E1")
@pytest.mark.parametrize("is_asyncio", [False, True], ids=["Trio", "asyncio"])
async def test_concurrent_requests_of_one_run_never_overlap(outcome_of, is_asyncio):
    spans = []

    async def one(run):
        async with run.request():
            began = time.monotonic()
            if is_asyncio:
                await asyncio.sleep(0.02)
            else:
                await trio.sleep(0.02)
            spans.append((began, time.monotonic()))

    async def rows(run):
        if is_asyncio:
            await asyncio.gather(*(one(run) for _ in range(3)))
        else:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(one, run)
        yield {"id": 1}

    pipeline = {"rate_min": 0, "rate_max": 0}
    outcome = await outcome_of(
        Load("orders", Rows(rows, supplier="shop", asyncio=is_asyncio), KEYED, pipeline=pipeline)
    )
    assert (outcome.status, len(spans)) == ("succeeded", 3)
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(sorted(spans)))


def nested(calls):
    def rows(run):
        calls.append(1)
        with run.request(), run.request():
            yield {"id": 1}

    return rows


def nested_on_trio(calls):
    async def rows(run):
        calls.append(1)
        async with run.request(), run.request():
            yield {"id": 1}

    return rows


def blocking_on_trio(calls):
    async def rows(run):
        calls.append(1)
        with run.request():
            yield {"id": 1}

    return rows


@pytest.mark.parametrize(
    ("made", "is_asyncio", "told"),
    [
        (nested, False, "is not allowed inside another block of it; end that block first"),
        (nested_on_trio, False, "is not allowed inside another block of it; end that block first"),
        (nested_on_trio, True, "is not allowed inside another block of it; end that block first"),
        (blocking_on_trio, False, "needs `async with` in an async generator, not `with`"),
        (blocking_on_trio, True, "needs `async with` in an async generator, not `with`"),
    ],
    ids=["nested", "nested on Trio", "nested on asyncio", "with on Trio", "with on asyncio"],
)
async def test_a_wrong_block_for_requests_fails_the_run_with_a_clear_error(outcome_of, made, is_asyncio, told):
    calls = []
    outcome = await outcome_of(Load("orders", Rows(made(calls), supplier="shop", asyncio=is_asyncio), KEYED))
    assert (outcome.status, calls) == ("failed", [1])
    assert f"run.request(): {told}" in outcome.error


@pytest.mark.slow
@pytest.mark.requirement("E1")
async def test_a_function_in_a_thread_sends_no_request_after_its_run(supervised, raw):
    sent, begun, release, ended, errors = [], threading.Event(), threading.Event(), threading.Event(), []

    def rows(run):
        for _ in range(3):
            try:
                with run.request():
                    sent.append(1)
                    begun.set()
                    release.wait(60)
            except RunOver as error:
                errors.append(str(error))
        ended.set()
        yield {"id": 1}

    load = Load("orders", Rows(rows, supplier="shop"), KEYED, queue="q", pipeline={"rate_min": 0, "rate_max": 0})
    async with supervised(load) as supervisor:
        job = await supervisor.jobs.enqueue("orders", queue="q")
        await trio.to_thread.run_sync(begun.wait)
        await supervisor.jobs.cancel(job.job_id)
        assert (await supervisor.jobs.wait(job.job_id)).status == "canceled"
        release.set()
        assert await trio.to_thread.run_sync(ended.wait, 30)
        await until(lambda: raw.fetchval("SELECT count(*) = 1 FROM dl_sources WHERE holder IS NULL"))
    assert (sent, errors) == ([1], ["the run has ended"] * 2)


@pytest.mark.slow
@pytest.mark.requirement("E1")
async def test_a_wait_for_a_request_ends_with_the_run(supervised, raw):
    waits, closed = threading.Event(), threading.Event()

    def rows(run):
        try:
            yield {"id": 1}
            waits.set()
            with run.request():
                yield {"id": 2}
        finally:
            closed.set()

    load = Load("orders", Rows(rows, supplier="shop"), KEYED, queue="q")
    async with supervised(load) as supervisor:
        await raw.execute("INSERT INTO dl_sources (source, paused) VALUES ('shop', true)")
        job = await supervisor.jobs.enqueue("orders", queue="q")
        await trio.to_thread.run_sync(waits.wait)
        await supervisor.jobs.cancel(job.job_id)
        assert (await supervisor.jobs.wait(job.job_id)).status == "canceled"
        assert await trio.to_thread.run_sync(closed.wait, 10)


@pytest.mark.slow
async def test_a_wait_for_the_writer_ends_with_the_run(supervised, raw, limits):
    limits.set(most_bytes=1)
    begun, locked, closed = threading.Event(), threading.Event(), threading.Event()

    def rows(run):
        begun.set()
        locked.wait(60)
        try:
            yield from numbered(1, 100_000)
        finally:
            closed.set()

    load = Load("orders", Rows(rows, every_rows=1), KEYED, queue="q", pipeline={"drain_timeout": 0})
    async with supervised(load) as supervisor:
        job = await supervisor.jobs.enqueue("orders", queue="q")
        await trio.to_thread.run_sync(begun.wait)
        await raw.execute("BEGIN; LOCK TABLE item IN ACCESS EXCLUSIVE MODE")
        locked.set()
        await trio.sleep(1)
        await supervisor.jobs.cancel(job.job_id)
        await trio.sleep(1)
        await raw.execute("COMMIT")
        assert (await supervisor.jobs.wait(job.job_id)).status == "canceled"
        assert await trio.to_thread.run_sync(closed.wait, 10)


async def test_refused_rows_of_a_failed_call_are_not_counted(outcome_of_rows, loads_failures):
    calls = []

    def rows(run):
        calls.append(1)
        yield from ({"id": 1}, {"id": "x"}, {"id": 3})
        time.sleep(0.3)  # for the batch
        if len(calls) < 3:
            raise OSError("the connection was reset")

    pipeline = {"max_failed_share": 1, "batch_timeout": 0.05}
    outcome = await outcome_of_rows(rows, KEYLESS, pipeline=pipeline)
    assert (outcome.status, len(calls)) == ("succeeded", 3)
    assert outcome.result["counts"]["rows_failed"] == 1
    assert len(outcome.result["failures"]) == len(await loads_failures()) == 1


class Called:
    async def __call__(self, _run):
        yield {"id": 1}


def returned(run):
    return Called()(run)


class OneRow:
    def __init__(self):
        self.is_over = False

    def __aiter__(self):
        return self

    async def __anext__(self):
        if self.is_over:
            raise StopAsyncIteration
        self.is_over = True
        return {"id": 1}


@pytest.mark.parametrize(
    "function",
    [Called(), returned, lambda _run: OneRow()],
    ids=["async __call__", "async generator", "async iterator"],
)
async def test_a_function_may_return_an_async_iterator(outcome_of_rows, raw, function):
    assert ((await outcome_of_rows(function)).status, await ids(raw)) == ("succeeded", [1])


@pytest.mark.parametrize("kind", ["NoneType", "coroutine", "int"])
async def test_a_function_that_yields_nothing_fails_the_run_with_a_clear_error(outcome_of_rows, kind):
    calls = []

    async def coroutine():
        raise AssertionError

    def rows(run):
        calls.append(1)
        return {"NoneType": None, "coroutine": coroutine(), "int": 1}[kind]

    if kind != "coroutine":
        coroutine = int
    outcome = await outcome_of_rows(rows)
    assert (outcome.status, calls) == ("failed", [1])
    assert f"function: must yield rows, such as `def rows(run): yield …`, but has returned {kind}" in outcome.error


async def test_a_function_with_a_supplier_that_sends_no_request_is_told(outcome_of):
    with capture_logs() as lines:
        await outcome_of(Load("orders", Rows(lambda _run: [{"id": 1}], supplier="shop"), KEYED))
    [line] = [line for line in lines if line.get("supplier") == "shop"]
    assert line["event"].startswith("the function has sent no request in a block `with run.request()`")


def test_a_function_can_be_called_without_a_run():
    assert list(asking([])(RowsRun(load="orders"))) == [{"id": 0}, {"id": 1}]


def test_a_supplier_of_a_decorated_function_is_registered_with_its_rate_limits():
    tasks, shop = Tasks(), Supplier("shop", rate_limits=(RateLimit(10, per_s=60),))

    @tasks.load("orders", table=KEYED, supplier=shop)
    def orders(run):
        return []

    assert (orders.source.name, tasks.suppliers) == ("shop", (shop,))


@pytest.mark.parametrize("is_async", [False, True], ids=["generator", "async generator"])
async def test_a_transform_of_yielded_rows_may_read_the_database(outcome_of_rows, raw, table, is_async):
    await raw.execute("INSERT INTO event VALUES (1, 'found')")

    def transform(record, reader):
        return {**record, "value": reader.fetchval("SELECT value FROM event WHERE id = $1", record["id"])}

    def rows(run):
        yield {"id": 1}

    async def rows_on_trio(run):
        yield {"id": 1}

    outcome = await outcome_of_rows(rows_on_trio if is_async else rows, transform=transform, reads=True)
    assert (outcome.status, await table()) == ("succeeded", ["(1,found)"])


async def test_a_generator_has_one_thread_for_its_whole_life(outcome_of_rows, raw):
    threads = set()

    def rows(run):
        connection = sqlite3.connect(":memory:")  # refuses other threads
        try:
            for number in range(20):
                threads.add(threading.get_ident())
                yield {"id": connection.execute("SELECT ?", (number,)).fetchone()[0]}
        finally:
            threads.add(threading.get_ident())
            connection.close()

    await outcome_of_rows(rows, every_rows=3)
    assert (len(threads), await ids(raw)) == (1, list(range(20)))


@pytest.mark.slow
async def test_a_timeout_abandons_a_blocked_generator_and_closes_it_later(outcome_of_rows, raw):
    release, closed = threading.Event(), threading.Event()

    def rows(run):
        try:
            yield {"id": 1}
            yield {"id": 2}
            release.wait(60)
            yield {"id": 3}
        finally:
            closed.set()

    began = time.monotonic()
    outcome = await outcome_of_rows(rows, every_rows=2, timeout_s=1)
    assert time.monotonic() - began < 30
    assert outcome.status != "succeeded"
    assert not closed.is_set()
    release.set()
    assert await trio.to_thread.run_sync(closed.wait, 60)
    assert await ids(raw) == [1, 2]


@pytest.mark.slow
async def test_a_canceled_job_writes_the_rows_that_have_arrived(supervised, raw):
    load = Load("orders", Rows(lambda _run: endless()), KEYED, queue="q")
    async with supervised(load) as supervisor:
        job = await supervisor.jobs.enqueue("orders", queue="q")
        await until(lambda: raw.fetchval("SELECT (progress ->> 'records')::int > 3 FROM dl_jobs"))
        await supervisor.jobs.cancel(job.job_id)
        ended = await supervisor.jobs.wait(job.job_id)
    assert ended.status == "canceled"
    written = ended.result["counts"]["inserted"]
    assert written > 3
    assert await ids(raw) == list(range(written))
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_segments") == 0


def endless():
    number = 0
    while True:
        yield {"id": number}
        number += 1
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("state", [None, 1, 2], ids=["no checkpoint", "a row after it", "checkpoint at the end"])
@pytest.mark.parametrize("every_rows", [1, 100])
async def test_a_job_that_runs_again_after_its_load_was_committed_doubles_no_row(
    supervised, raw, segments, state, every_rows
):
    tasks, calls, ended = Tasks(), [], []

    def rows(run):
        calls.append(run.state)
        for row in numbered((run.state or 0) + 1, 2):
            yield row
            if row["id"] == state:
                yield Checkpoint(state)

    load = Load("orders", Rows(rows, every_rows=every_rows), KEYLESS)

    @tasks.task("orders")
    async def orders(job):
        result = await run_load(load, job)
        ended.append(1)
        return Snooze(0.01, "the process has ended") if len(ended) == 1 else result

    async with supervised(tasks) as supervisor:
        job = await supervisor.jobs.enqueue("orders", queue="q")
        done = await supervisor.jobs.wait(job.job_id)
    assert (done.status, len(ended), calls[0]) == ("succeeded", 2, None)
    assert await ids(raw, "event") == [1, 2]
    assert done.result["counts"] == {"inserted": 2, "records": 2, "rows": 2, "segments": len(await segments())}


async def test_versions_need_a_time_and_all_rows_of_a_run_are_one_snapshot(outcome_of_rows, raw, segments):
    await raw.execute(
        "CREATE TABLE versions (id int, value text, valid_from timestamptz, valid_to timestamptz,"
        " is_current boolean NOT NULL, PRIMARY KEY (id, valid_from))"
    )
    history = History(tracked="value", as_of=lambda _segment: NOW)
    outcome = await outcome_of_rows(
        lambda _run: numbered(1, 5), Table("versions", key="id", history=history), every_rows=2
    )
    assert outcome.result["counts"]["inserted"] == 5
    assert await segments() == {"rows 000001": 5}


async def test_a_state_of_another_kind_is_refused(outcome_of_rows, raw):
    state = """'{"kind": "window", "upto": "2026-01-07T00:00:00Z"}'"""
    await raw.execute(f"INSERT INTO dl_load_state (load, state, run_id) VALUES ('orders', {state}, gen_random_uuid())")
    outcome = await outcome_of_rows(lambda _run: [])
    assert outcome.status == "failed"
    assert "load orders: its state must be of the kind checkpoint, not window; to load it from" in outcome.error


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"windows": Windows(start=NOW)}, "windows: cannot be combined with rows that a function yields"),
        ({"processes": True}, "processes: cannot be combined with rows that a function yields"),
    ],
    ids=["windows", "processes"],
)
def test_options_of_requests_are_refused_for_rows(options, told):
    with pytest.raises(ValueError, match=f"^load orders: {told}"):
        Load("orders", Rows(lambda _run: []), KEYED, **options)


class CalledCoroutine:
    async def __call__(self, _run):
        return []


@pytest.mark.parametrize("rows", [CalledCoroutine().__call__, CalledCoroutine()], ids=["function", "object"])
def test_a_coroutine_function_is_refused(rows):
    with pytest.raises(ValueError, match=r"^function: must be a generator, such as `def rows\(run\): yield …`, not <"):
        Rows(rows)
