"""Commands for durable processes, over the database and a service (P2, P6)."""

from __future__ import annotations

import json
import threading
from queue import Queue
from uuid import uuid4

import pytest
import trio
from payments import Gate, payments

from dataloader import Settings, Tasks, Worker, open_supervisor
from dataloader.flows.processes import add_processes

pytestmark = [pytest.mark.slow, pytest.mark.requirement("P2")]


@pytest.fixture
def url(database):
    """Return the address of a service in a thread of this process, which runs payments; `hang` blocks."""
    tasks = Tasks()
    add_processes(tasks, payments(Gate()))
    settings = Settings(db_dsn=database.dsn, workers=(Worker("process.payment", 4),), drain_timeout_s=0, port=0)
    started: Queue = Queue()

    async def serve():
        stop = trio.Event()
        async with open_supervisor(settings, tasks, with_web=True) as supervisor:
            started.put((supervisor.url, trio.lowlevel.current_trio_token(), stop))
            await stop.wait()

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    address, token, stop = started.get(timeout=60)
    yield address
    token.run_sync_soon(stop.set)
    thread.join(60)


@pytest.fixture
def ask(on_database):
    """Return a function that runs a command that ends with `code`, and returns its output, or stderr if it fails."""

    def ask(*arguments, code=0):
        result = on_database("process", *arguments)
        assert result.returncode == code, (arguments, result.stderr)
        return result.stderr if code else result.stdout

    return ask


def fields(printed):
    return dict(line.split(None, 1) for line in printed.splitlines())


def test_a_process_is_started_called_shown_and_removed(url, ask):
    assert ask("start", "payment", "1", "--args", "5", "--key", "k", "--metadata", '{"a": 1}') == "reserved\n"
    assert ask("call", "payment", "1", "pay", "--args", "4", code=3) == "refused: 5 is due\n"
    answer = json.loads(ask("call", "payment", "1", "pay", "--args", "5", "--json", "--url", url))
    assert (answer["status"], answer["response"]) == ("finished", "thanks")
    assert "the process payment/2 " not in ask("call", "payment", "2", "pay", code=4)
    assert ask("call", "payment", "2", "pay", "--args", "7", "--start", "7") == "thanks\n"
    lines = (ask("list", "--metadata", '{"a": 1}')).splitlines()
    assert lines[0].split()[:3] == ["TYPE", "PROCESS", "STATUS"]
    assert lines[1].split()[:3] == ["payment", "1", "running"]
    shown = fields(ask("show", "payment", "1"))
    assert json.loads(shown["state"]) == {"amount": 5, "paid": True}
    assert shown["timer"].startswith("timeout at ")
    assert [line.split()[0] for line in (ask("events", "payment", "1", "--newest")).splitlines()] == [
        "EVENT", "3", "2", "1",
    ]  # fmt: skip
    tasks = json.loads(ask("tasks", "payment", "1", "--json"))["tasks"]
    assert [task["kind"] for task in tasks] == ["init", "timeout", "call", "call"]
    assert (ask("call", "payment", "1", "hang", "--timeout", "0")).startswith("task ")
    waiting = (ask("call", "payment", "1", "pay", "--timeout", "0", "--url", url)).split()[1]
    assert "does not have the ident" in ask("withdraw", waiting, "--ident", str(uuid4()), code=4)
    assert "cancelled: withdrawn" in ask("withdraw", waiting, code=3)
    assert "cancelled: withdrawn" in ask("wait", waiting, code=3)
    assert fields(ask("remove", "payment", "1"))["status"] == "running"
    assert ask("show", "payment", "1", code=4) == "there is no process payment/1\n"
    versions = [line.split() for line in ask("versions", "--type", "payment").splitlines()]
    assert versions == [
        ["TYPE", "VERSION", "SERVED", "INIT", "RUNNING", "ERROR"],
        ["payment", "1", "yes", "0", "1", "0"],
    ]
    assert json.loads(ask("versions", "--json", "--url", url))["versions"][0]["served"]
    imported = ask("import", "payment", "3", "--state", '{"amount": 1}', "--event", "1")
    assert fields(imported)["events"] == "1"


@pytest.mark.requirement("P6")
def test_processes_in_error_are_counted_repaired_and_resumed_by_group(url, ask):
    for name in "123":
        ask("start", "payment", name, "--args", "5")
        assert ask("call", "payment", name, "fall", "--args", f'"no row {name}"', code=3) == f"failed: no row {name}\n"
    group, number, kind, newest, *error = (ask("errors", "--type", "payment")).splitlines()[1].split()
    assert (number, kind, newest, error) == ("3", "payment", "3", ["no", "row", "#"])
    assert ask("repair", "payment", "1", "--args", "9") == "mended\n"
    assert "pass --yes" in ask("resume", "--error-group", group, code=2)
    assert "give one process" in ask("resume", "payment", code=2)
    assert ask("resume", "--error-group", group, "--yes") == "2 processes\n"
    assert "payment/1 is running" in ask("resume", "payment", "1", code=1)
    assert ask("errors") == ""
