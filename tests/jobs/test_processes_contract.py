"""The promises of `ProcessClient` hold in each way: by the database, through a service, and from asyncio."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import UUID

import anyio.from_thread
import attrs
import pytest
import trio
import trio.testing
from conditions import patience_s, until
from payments import Gate, payments

from dataloader import (
    BadRequest,
    CallTimeout,
    Conflict,
    IdempotencyConflict,
    ProcessClient,
    ProcessConflict,
    ProcessFailed,
    ProcessFilter,
    ProcessNotFound,
    Refused,
    Settings,
    Tasks,
    Worker,
    open_client,
    open_supervisor,
)
from dataloader.flows.processes import Timer, add_processes
from dataloader.jobs.operations.performer import Performer
from dataloader.jobs.process_requests import ProcessChange, ProcessImport, ProcessRequest
from dataloader.supervisor.settings import ApiToken

pytestmark = pytest.mark.requirement("P1", "P2")

TOKEN = "chief-0123456789"


def _forwarded(name):
    async def forward(self, *args, **kwargs):
        return await self.run(partial(getattr(self.performer, name), *args, **kwargs))

    return forward


@attrs.frozen
class OnAsyncio:
    """Performer on an asyncio loop in another thread, for a test on Trio."""

    performer: Performer
    portal: anyio.from_thread.BlockingPortal

    async def run(self, call):
        future = self.portal.start_task_soon(call)
        try:
            return await trio.to_thread.run_sync(future.result, abandon_on_cancel=True)
        except trio.Cancelled:
            future.cancel()
            raise

    vars().update({name: _forwarded(name) for name in Performer.__abstractmethods__ - {"signed"}})


@asynccontextmanager
async def _on_asyncio(url):
    with (
        anyio.from_thread.start_blocking_portal("asyncio") as portal,
        portal.wrap_async_context_manager(open_client(url=url, token=TOKEN)) as client,
    ):
        yield attrs.evolve(client, processes=ProcessClient(OnAsyncio(client.processes.performer, portal)))


@attrs.frozen
class Way:
    """A way to the processes; `gate` releases blocked steps, `supervisor` runs the steps."""

    kind: str
    processes: ProcessClient
    gate: Gate
    supervisor: object
    sql: object

    async def count(self, amounts):
        for n, amount in enumerate(amounts):
            await self.processes.start("payment", f"p{n}", amount, metadata={"n": n, "tenant": "ab"[n % 2]})


@pytest.fixture(params=["database", "service", "service from asyncio"])
async def way(request, database):
    """Return the processes of the test's database, in one of the ways; another supervisor runs their steps."""
    gate, tasks = Gate(), Tasks()
    add_processes(tasks, payments(gate))
    settings = Settings(
        db_dsn=database.dsn,
        workers=(Worker("process.payment", 8),),
        tokens=(ApiToken(name="chief", role="admin", token=TOKEN),),
        port=0,
        drain_timeout_s=0,
    )
    async with AsyncExitStack() as stack:
        with_web = request.param != "database"
        supervisor = await stack.enter_async_context(open_supervisor(settings, tasks, with_web=with_web))
        if request.param == "database":
            opened = open_client(database.dsn, operator="chief")
        elif request.param == "service":
            opened = open_client(url=supervisor.url, token=TOKEN)
        else:
            opened = _on_asyncio(supervisor.url)
        client = await stack.enter_async_context(opened)
        yield Way(request.param, client.processes, gate, supervisor, database.psql)


@pytest.mark.slow
async def test_a_process_is_started_called_refused_and_shown(way):
    ask = way.processes
    assert await ask.start("payment", "a/b ü", 5, metadata={"tenant": "a"}) == "reserved"
    with pytest.raises(Refused, match=r"^5 is due$") as refused:
        await ask.call("payment", "a/b ü", "pay", 4)
    assert (await ask.task(refused.value.task_id)).error == "5 is due"
    assert await ask.call("payment", "a/b ü", "pay", 5, context="me") == "thanks"
    found = await ask.get("payment", "a/b ü")
    assert (found.status, found.state, found.metadata) == ("running", {"amount": 5, "paid": True}, {"tenant": "a"})
    assert (found.last_event_id, found.timer.kind, found.timer.attempt, found.running) == (3, "timeout", 0, None)
    events = await ask.events("payment", "a/b ü", limit=2)
    assert [event.payload for event in events.events] == ["reserved", "paid"]
    rest = await ask.events("payment", "a/b ü", after=events.next)
    assert [(event.event_id, event.payload) for event in rest.events] == [(3, {"by": "me"})]
    assert rest.next is None
    assert [e.event_id for e in (await ask.events("payment", "a/b ü", after=3, newest_first=True)).events] == [2, 1]
    tasks = (await ask.tasks("payment", "a/b ü")).tasks
    assert [(task.kind, task.status, task.method) for task in tasks] == [
        ("init", "finished", None), ("timeout", "waiting", None),
        ("call", "finished", "pay"), ("call", "finished", "pay"),
    ]  # fmt: skip
    newest = await ask.tasks("payment", "a/b ü", newest_first=True, limit=1)
    assert (newest.tasks[0].response, newest.tasks[0].args, newest.tasks[0].context) == ("thanks", 5, "me")
    older = await ask.tasks("payment", "a/b ü", newest_first=True, after=newest.next)
    assert older.tasks == tasks[2::-1]


@pytest.mark.slow
@pytest.mark.requirement("P11")
async def test_versions_are_counted_and_unserved_ones_are_reported(way):
    ask = way.processes
    await ask.start("payment", "a", 5)
    served, other = (
        {"type": "payment", "version": version, "served": version == 1, "init": 0, "running": 1, "error": 0}
        for version in (1, 7)
    )
    assert [attrs.asdict(one) for one in await ask.versions()] == [served]
    way.sql("INSERT INTO dl_processes (type, process_id, version, status) VALUES ('payment', 'b', 7, 'running')")
    assert [attrs.asdict(one) for one in await ask.versions("payment")] == [other, served]
    assert await ask.versions("other") == []
    with pytest.raises(BadRequest, match="type"):
        await ask.versions("a/b")


@pytest.mark.slow
async def test_a_request_with_a_known_key_has_the_first_ones_answer_success_or_error(way):
    ask = way.processes
    assert [await ask.start("payment", "1", 5, key="k") for _ in range(2)] == ["reserved", "reserved"]
    for _ in range(2):
        with pytest.raises(Refused, match="5 is due"):
            await ask.call("payment", "1", "pay", 4, key="pay")
    with pytest.raises(IdempotencyConflict, match=r"'pay' belongs to task [0-9]+ of a process") as conflict:
        await ask.call("payment", "1", "pay", 5, key="pay")
    assert conflict.value.task_id > 0
    await ask.remove("payment", "1")
    assert await ask.start("payment", "1", 5, key="k") == "reserved"
    with pytest.raises(ProcessNotFound):
        await ask.get("payment", "1")


@pytest.mark.slow
async def test_a_request_that_the_status_forbids_is_a_conflict_naming_the_process(way):
    ask = way.processes
    await ask.start("payment", "1", 5)
    for request in (
        partial(ask.start, "payment", "1", 5),
        partial(ask.repair, "payment", "1", 5),
        partial(ask.resume, "payment", "1"),
        partial(ask.stop, "payment", "1"),
    ):
        with pytest.raises(ProcessConflict, match=r"^the process payment/1 is running; ") as conflict:
            await request()
        assert isinstance(conflict.value, Conflict)
        assert (conflict.value.process_type, conflict.value.process_id, conflict.value.status) == (
            "payment", "1", "running",
        )  # fmt: skip
    for request in (
        partial(ask.call, "payment", "2", "pay"),
        partial(ask.repair, "payment", "2"),
        partial(ask.resume, "payment", "2"),
        partial(ask.stop, "payment", "2"),
        partial(ask.remove, "payment", "2"),
        partial(ask.get, "payment", "2"),
        partial(ask.events, "payment", "2"),
        partial(ask.tasks, "payment", "2"),
    ):
        with pytest.raises(ProcessNotFound, match=r"^there is no process payment/2$"):
            await request()
    for request in (ask.task, ask.wait, ask.withdraw):
        with pytest.raises(ProcessNotFound, match=r"^there is no process task 99$"):
            await request(99)


@pytest.mark.slow
async def test_an_invalid_value_is_refused_by_the_name_of_its_field(way):
    ask = way.processes
    await ask.start("payment", "1", 5)
    for field, request in {
        "type": partial(ask.start, "a/b", "1"),
        "type ": partial(ask.start, "tasks", "1"),
        "process_id": partial(ask.start, "payment", ".."),
        "process_id ": partial(ask.start, "payment", "/1"),
        "method": partial(ask.call, "payment", "1", "m" * 201),
        "key": partial(ask.call, "payment", "1", "pay", key=""),
        "args": partial(ask.call, "payment", "1", "pay", "x" * 1_048_576),
        "args ": partial(ask.call, "payment", "1", "pay", "\0"),
        "metadata.a": partial(ask.start, "payment", "2", metadata={"a": []}),
        "limit": partial(ask.find, limit=0),
        "after": partial(ask.tasks, "payment", "1", after="nonsense"),
        "error_group": lambda: ask.find(ProcessFilter(error_group="x")),
        "which": lambda: ask.resume_many(ProcessFilter()),
        "status": lambda: ask.repair_many(ProcessFilter(status="running")),
    }.items():
        with pytest.raises(BadRequest) as refused:
            await request()
        assert (field, refused.value.field) == (field, field.strip())


@pytest.mark.slow
async def test_numbers_that_json_does_not_have_and_keys_of_messages_are_refused(way):
    ask, nan = way.processes, float("nan")
    with pytest.raises(BadRequest, match=r"args.amount: must be a finite number, not nan"):
        await ask.start("payment", "a", {"amount": nan})
    with pytest.raises(BadRequest, match=r"metadata.rate: must be a finite number, not nan"):
        await ask.start("payment", "a", 5, metadata={"rate": nan})
    with pytest.raises(BadRequest, match=r"^start: must be a finite number, not nan"):
        await ask.call("payment", "a", "pay", 5, start=nan)
    with pytest.raises(BadRequest, match=r"context\[0\]: must be a finite number, not inf"):
        await ask.call("payment", "a", "pay", 5, context=[float("inf")])
    many = [ProcessRequest(type="payment", process_id="a", kind="init", args=nan)]
    with pytest.raises(BadRequest, match=r"args: must be a finite number, not nan"):
        await ask.start_many(many)
    with pytest.raises(BadRequest, match=r"args: must be a finite number, not nan"):
        await ask.repair_many(ProcessFilter(type="payment"), nan)
    with pytest.raises(BadRequest, match=r"state.amount: must be a finite number, not nan"):
        await ask.put(ProcessImport(type="payment", process_id="a", state={"amount": nan}))
    with pytest.raises(
        BadRequest, match=r"must not begin with message:, which is reserved for messages between processes"
    ):
        await ask.start("payment", "a", 5, key="message:1:2:3")
    with pytest.raises(
        BadRequest, match=r"must not begin with message:, which is reserved for messages between processes"
    ):
        await ask.start_many([attrs.evolve(many[0], args=5, key="message:1:2:3")])
    assert (await ask.find()).processes == []


@pytest.mark.slow
async def test_a_call_starts_a_process_that_is_missing_and_its_arguments_may_be_null(way):
    ask = way.processes
    assert await ask.call("payment", "1", "pay", 5, start=5, metadata={"tenant": "b"}) == "thanks"
    assert (await ask.get("payment", "1")).metadata == {"tenant": "b"}
    assert await ask.call("payment", "1", "pay", 5, start=7) == "thanks"
    with pytest.raises(ProcessFailed, match="the process was removed"):
        await ask.call("payment", "2", "pay", 5, start=-1)
    with pytest.raises(ProcessFailed, match="the process was removed"):
        await ask.call("payment", "3", "pay", 5, start=None)


@pytest.mark.slow
@pytest.mark.requirement("P6")
async def test_a_failure_answers_all_waiting_callers_and_can_be_repaired(way):
    ask = way.processes
    with pytest.raises(ProcessFailed, match="no amount of 'nothing' 123"):
        await ask.start("payment", "0", 0)
    found = await ask.get("payment", "0")
    assert (found.status, found.detail, found.previous_status) == ("error", "no amount of 'nothing' 123", "init")
    await ask.start("payment", "1", 5)
    outcomes = {}

    async def waits(name, method, args=None):
        try:
            await ask.call("payment", "1", method, args)
        except ProcessFailed as error:
            outcomes[name] = str(error)

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits, "first", "hang")
            await until(lambda: _seen(way.gate.begun))
            nursery.start_soon(waits, "second", "fall", "why not")
            await until(lambda: _waiting(ask, "1", 1))
            nursery.start_soon(waits, "third", "hang")
            await until(lambda: _waiting(ask, "1", 2))
            way.gate.opened.set()
    assert outcomes == {"second": "why not", "third": "the process failed: why not"}
    assert await ask.repair("payment", "1", 7) == "mended"
    assert (await ask.get("payment", "1")).state["amount"] == 7


@pytest.mark.slow
async def test_a_cancelled_wait_keeps_its_call_and_a_removal_answers_the_waiting_callers(way):
    ask = way.processes
    await ask.start("payment", "1", 5)
    with pytest.raises(CallTimeout) as late:
        await ask.call("payment", "1", "hang", timeout_s=0.1)
    await until(lambda: _seen(way.gate.begun))
    running = await ask.get("payment", "1")
    assert (running.running.task_id, running.running.kind) == (late.value.task_id, "call")
    tasks = (await ask.tasks("payment", "1")).tasks
    assert [task.status for task in tasks] == ["finished", "blocked", "running"]
    removed = []

    async def waits():
        with pytest.raises(ProcessFailed, match="the process was removed"):
            await ask.wait(late.value.task_id)
        removed.append(1)

    with trio.fail_after(patience_s()):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits)
            nursery.start_soon(waits)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert (await ask.remove("payment", "1")).status == "running"
    assert removed == [1, 1]


@pytest.mark.full
async def test_a_call_that_has_not_begun_expires_or_is_withdrawn(way):
    ask = way.processes
    await ask.start("payment", "1", 5)
    with pytest.raises(CallTimeout) as first:
        await ask.call("payment", "1", "hang", timeout_s=0.1)
    await until(lambda: _seen(way.gate.begun))
    soon = datetime.now(UTC) + timedelta(seconds=0.3)
    with trio.fail_after(patience_s()), pytest.raises(ProcessFailed, match=r"^expired$"):
        await ask.call("payment", "1", "pay", 5, expires_at=soon)
    with pytest.raises(CallTimeout) as withdrawn:
        await ask.call("payment", "1", "pay", 5, timeout_s=0.1, withdraw=True)
    assert (withdrawn.value.withdrawn, (await ask.task(withdrawn.value.task_id)).error) == (True, "withdrawn")
    with trio.move_on_after(0.5) as scope:
        await ask.call("payment", "1", "pay", 5, withdraw=True)
    assert scope.cancelled_caught
    await until(lambda: _waiting(ask, "1", 0))
    # A running step continues.
    assert (await ask.withdraw(first.value.task_id)).status in {"waiting", "running"}
    with pytest.raises(CallTimeout) as goes_on:
        await ask.wait(first.value.task_id, timeout_s=0.1)
    assert not goes_on.value.withdrawn
    way.gate.opened.set()
    assert await ask.wait(first.value.task_id) == "at last"
    assert not (await ask.get("payment", "1")).state["paid"]


@pytest.mark.slow
@pytest.mark.requirement("P12")
async def test_a_step_is_stopped_by_an_operator_and_its_process_resumed(way):
    ask = way.processes
    await ask.start("payment", "1", 5)
    with pytest.raises(CallTimeout) as late:
        await ask.call("payment", "1", "hang", timeout_s=0)
    await until(lambda: _seen(way.gate.begun))
    job_id = UUID(way.sql("SELECT job_id FROM dl_jobs"))
    with pytest.raises(Conflict, match="it wakes the process payment/1: stop its step, or remove the process"):
        await way.supervisor.jobs.cancel(job_id)
    assert (await ask.stop("payment", "1")).running is not None
    with pytest.raises(ProcessFailed, match="stopped by an operator"):
        await ask.wait(late.value.task_id)
    assert (await ask.resume("payment", "1")).status == "running"
    actions = [(row.actor, row.action) for row in (await way.supervisor.jobs.audit()).audit]
    assert actions == [("chief", "resume_process"), ("chief", "stop_process")]


@pytest.mark.slow
async def test_processes_are_found_by_each_criterion_in_pages_newest_first(way):
    ask = way.processes
    await way.count([1, 2, 13, 4])
    await ask.call("payment", "p2", "capture")
    with pytest.raises(ProcessFailed):
        await ask.start("payment", "p4", 0, metadata={"tenant": "a"})

    async def in_error():
        return len((await ask.find(ProcessFilter(status="error"))).processes) == 2

    await until(in_error)
    [group] = (await ask.find(ProcessFilter(process_id="p2"))).processes
    for criteria, expected in (
        ({}, ["p4", "p3", "p2", "p1", "p0"]),
        ({"type": "payment"}, ["p4", "p3", "p2", "p1", "p0"]),
        ({"type": "other"}, []),
        ({"process_id": "p3"}, ["p3"]),
        ({"status": "running"}, ["p3", "p1", "p0"]),
        ({"status": "init", "type": "payment"}, []),
        ({"metadata": {"tenant": "a"}}, ["p4", "p2", "p0"]),
        ({"metadata": {"n": 1, "tenant": "b"}, "type": "payment"}, ["p1"]),
        ({"metadata": {"tenant": "a"}, "status": "error"}, ["p4", "p2"]),
        ({"error_group": group.error_group}, ["p2"]),
        ({"error_group": group.error_group, "status": "running"}, []),
    ):
        found, after = [], None
        while True:
            page = await ask.find(ProcessFilter(**criteria), limit=2, after=after)
            assert len(page.processes) <= 2
            found += [one.process_id for one in page.processes]
            if (after := page.next) is None:
                break
        assert (criteria, found) == (criteria, expected)


@pytest.mark.slow
@pytest.mark.requirement("P6")
async def test_processes_in_error_are_counted_by_error_and_repaired_or_resumed_by_group(way, monkeypatch):
    ask = way.processes
    await way.count([5] * 4)
    for n in range(3):
        with pytest.raises(ProcessFailed):
            await ask.call("payment", f"p{n}", "fall", f"no row {n}")
    with pytest.raises(ProcessFailed):
        await ask.call("payment", "p3", "fall", "other")
    page = await ask.errors(process_type="payment", limit=1)
    [group] = page.groups
    assert (group.error, group.processes, group.example, group.type) == ("no row #", 3, "p2", "payment")
    [other] = (await ask.errors(after=page.next)).groups
    assert (other.error, other.processes) == ("other", 1)
    wanted = ProcessFilter(error_group=group.group)
    some = await ask.change_some(ProcessChange(action="resume"), wanted, limit=1)
    assert (some.changed, some.next is None) == (1, False)
    assert (await ask.get("payment", "p0")).status == "running"
    assert await ask.repair_many(wanted, 9, limit=1) == 1
    assert (await ask.get("payment", "p1", wait_s=5)).status in {"running", "error"}

    async def mended():
        return (await ask.get("payment", "p1")).state["amount"] == 9

    await until(mended)
    assert await ask.resume_many(ProcessFilter(type="payment", metadata={"tenant": "a"})) == 1
    assert [one.process_id for one in (await ask.find(ProcessFilter(status="error"))).processes] == ["p3"]
    audit = (await way.supervisor.jobs.audit()).audit
    assert {(row.actor, row.action) for row in audit} == {("chief", "resume_processes"), ("chief", "repair_processes")}
    assert audit[0].detail["changed"] == 1


@pytest.mark.slow
async def test_many_processes_start_in_one_transaction_and_existing_ones_are_kept(way):
    ask = way.processes
    await ask.start("payment", "p1", 5)
    new = [
        ProcessRequest(type="payment", process_id=f"p{n}", kind="init", args=5, key=f"k{n}", metadata={"n": n})
        for n in (2, 1, 0)
    ]
    first, again = [await ask.start_many(new) for _ in range(2)]
    assert [(one.process_id, one.did, one.task_id is None) for one in first] == [
        ("p2", "added", False), ("p1", "exists", True), ("p0", "added", False),
    ]  # fmt: skip
    assert [(one.did, one.task_id) for one in again] == [
        ("again", first[0].task_id), ("exists", None), ("again", first[2].task_id),
    ]  # fmt: skip
    assert (await ask.get("payment", "p2", wait_s=20)).status == "running"
    assert [await ask.wait(one.task_id) for one in (first[0], first[2])] == ["reserved"] * 2
    with pytest.raises(IdempotencyConflict):
        await ask.start_many([attrs.evolve(new[0], process_id="p9"), attrs.evolve(new[0], process_id="p8", key=None)])
    with pytest.raises(ProcessNotFound):
        await ask.get("payment", "p8")
    assert await ask.start_many([]) == []


@pytest.mark.slow
async def test_a_process_of_another_system_is_imported_and_continues(way):
    ask = way.processes
    process = ProcessImport(
        type="payment",
        process_id="old",
        state={"amount": 5},
        metadata={"from": "old"},
        events=["reserved", {"n": 1}],
        next=Timer(after_s=900, context={"c": 1}),
    )
    found = await ask.put(process)
    assert (found.status, found.last_event_id, found.metadata) == ("running", 2, {"from": "old"})
    assert (found.timer.kind, found.timer.context) == ("timeout", {"c": 1})
    assert way.sql("SELECT status, waits_for FROM dl_jobs") == "queued|time"
    with pytest.raises(ProcessConflict):
        await ask.put(process)
    assert await ask.call("payment", "old", "pay", 5) == "thanks"
    assert [event.payload for event in (await ask.events("payment", "old")).events][:3] == [
        "reserved",
        {"n": 1},
        "paid",
    ]
    await ask.put(attrs.evolve(process, process_id="due", next=Timer(after_s=0), events=()))

    async def captured():
        return (await ask.get("payment", "due")).last_event_id == 1

    await until(captured)


@pytest.mark.slow
@pytest.mark.requirement("P11")
async def test_a_type_without_a_worker_is_accepted_and_the_wait_ends_with_the_task(way):
    names = "('process.unknown.v2'), ('process.unknown.v12'), ('process.unknown.vx'), ('process.unknown2.v99')"
    way.sql(f"INSERT INTO dl_tasks (task, layout, declared_by) SELECT n, 1, 'w' FROM (VALUES {names}) AS v (n)")
    with pytest.raises(CallTimeout) as late:
        await way.processes.start("unknown", "1", 5, timeout_s=0.2)
    found = await way.processes.get("unknown", "1", wait_s=0.1)
    # A new process has the newest version that any worker has declared.
    assert (found.status, found.running, found.version) == ("init", None, 12)
    assert (await way.processes.task(late.value.task_id)).status == "waiting"


async def _seen(things):
    return len(things) > 0


async def _waiting(ask, process_id, number):
    tasks = (await ask.tasks("payment", process_id)).tasks
    return sum(task.kind == "call" and task.status == "waiting" for task in tasks) == number
