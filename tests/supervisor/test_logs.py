"""Log lines as they leave the process: one chain for structlog and `logging`, masked, never raising (Q16)."""

import fcntl
import io
import json
import logging
import os
import re
import select
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from dataloader.jobs.logger import get_logger
from dataloader.supervisor.log_stream import WAIT_S
from dataloader.supervisor.logs import MAX_TRACEBACK, configure_logging

pytestmark = pytest.mark.requirement("Q16")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()  # so that `force` closes none of pytest's handlers
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in ("httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    logging.captureWarnings(capture=False)
    structlog.contextvars.clear_contextvars()
    structlog.reset_defaults()


def fail(error: Exception) -> None:
    raise error


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_is_one_json_object_with_time_level_logger_and_context(out: io.StringIO) -> None:
    configure_logging("json", "info", out)
    with structlog.contextvars.bound_contextvars(job_id="0190", queue="load", task="t", attempt=1, request_id="r"):
        structlog.get_logger("dataloader.x").info("job started", rows=3, text="a\nb")
    (line,) = lines(out)
    assert line.pop("timestamp")[10:] >= "T00:00:00.000Z"
    assert list(line)[:3] == ["level", "logger", "event"]
    assert line == {
        "level": "info",
        "logger": "dataloader.x",
        "event": "job started",
        "rows": 3,
        "text": "a\nb",
        "job_id": "0190",
        "queue": "load",
        "task": "t",
        "attempt": 1,
        "request_id": "r",
    }


def test_times_are_utc_with_milliseconds(out: io.StringIO) -> None:
    configure_logging("json", "info", out)
    structlog.get_logger().info("x")
    assert len(lines(out)[0]["timestamp"]) == len("2026-01-01T00:00:00.000Z")


def test_stdlib_loggers_and_warnings_go_through_the_same_chain(out: io.StringIO) -> None:
    configure_logging("json", "info", out)
    structlog.contextvars.bind_contextvars(job_id="0190")
    logging.getLogger("hypercorn.error").warning("Running on %s", "http://bob:s3cr3t@h")
    logging.getLogger("asyncpg").warning("wrong arguments %d", "x")
    logging.getLogger("quart.app").debug("not shown")
    try:
        int("token=s3cr3t")
    except ValueError:
        logging.getLogger("asyncio").exception("callback failed")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", stacklevel=1)
    first, second, third, fourth = lines(out)
    assert (first["event"], first["logger"], first["level"]) == (
        "Running on http://***@h",
        "hypercorn.error",
        "warning",
    )
    assert first["job_id"] == "0190"
    assert "wrong arguments" in second["event"]
    assert third["level"] == "error"
    assert third["exception"].endswith("invalid literal for int() with base 10: 'token=***'")
    assert (fourth["logger"], "old" in fourth["event"]) == ("py.warnings", True)


def test_secrets_are_masked_everywhere_in_a_line(out: io.StringIO) -> None:
    configure_logging("json", "info", out)
    log = structlog.get_logger()
    try:
        fail(ExceptionGroup("password=s3cr3t", [ValueError("dsn postgres://u:s3cr3t@h"), KeyError("x")]))
    except ExceptionGroup:
        log.exception("GET /x?token=s3cr3t", args={"db": [{"password": "s3cr3t"}]}, headers={"Authorization": "s3cr3t"})
    log.warning("given", exc_info=RuntimeError("Bearer s3cr3t"))
    assert "s3cr3t" not in out.getvalue()
    group, given = lines(out)
    assert group["event"] == "GET /x?token=***"
    assert "ValueError: dsn postgres://***@h" in group["exception"]
    assert "KeyError: 'x'" in group["exception"]
    assert given["exception"] == "RuntimeError: Bearer ***"


def test_a_huge_error_is_cut_and_keeps_both_ends(out: io.StringIO) -> None:
    configure_logging("json", "info", out)
    try:
        fail(ValueError("begin " + "x " * 2_000_000 + "password=s3cr3t the end"))
    except ValueError:
        structlog.get_logger().exception("boom")
    text = lines(out)[0]["exception"]
    assert len(text) <= MAX_TRACEBACK
    assert text.startswith("Traceback")
    assert "ValueError: begin" in text
    assert text.endswith("password=*** the end")


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class BrokenError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no str")


@pytest.mark.parametrize("format_", ["json", "console"])
def test_nothing_that_is_logged_makes_the_call_raise(out: io.StringIO, format_: Any) -> None:
    configure_logging(format_, "info", out)
    log = structlog.get_logger()
    loop: list[object] = []
    loop.append(loop)
    odd = (
        Broken(),
        loop,
        2**200,
        10**5000,
        float("nan"),
        "\ud800",
        b"\xff",
        {Broken(): 1},
        {(1, 2): object()},
        iter,
    )
    for value in odd:
        log.info("odd", value=value)
    log.error("error", exc_info=BrokenError())
    log.error("no error", exc_info=True)  # noqa: LOG014 - the case under test
    assert out.getvalue().count("odd") == len(odd)


@pytest.mark.parametrize("format_", ["json", "console"])
def test_a_stream_that_is_gone_makes_no_call_raise(out: io.StringIO, format_: Any) -> None:
    configure_logging(format_, "info", out)
    out.close()
    structlog.get_logger().info("x")
    logging.getLogger("a").warning("x")


@pytest.fixture
def pipe() -> Iterator[tuple[io.FileIO, io.TextIOWrapper]]:
    """Return the reader and the writer of a pipe that is full except for one page."""
    descriptors = os.pipe()
    reader, writer = os.fdopen(descriptors[0], "rb", 0), os.fdopen(descriptors[1], "w")
    os.set_blocking(reader.fileno(), False)
    room = fcntl.fcntl(writer.fileno(), fcntl.F_GETPIPE_SZ)
    os.write(writer.fileno(), b"x" * (room - select.PIPE_BUF - 1) + b"\n")
    with reader, writer:
        yield reader, writer


def test_an_unread_log_costs_one_wait_and_then_dropped_lines_are_counted(
    out: io.StringIO, pipe: tuple[io.FileIO, io.TextIOWrapper]
) -> None:
    reader, writer = pipe
    configure_logging("json", "info", writer)
    log = get_logger("dataloader.x")
    began = time.monotonic()
    log.info("begun", text="y" * 10_000)  # continues when there is room again
    for number in range(1_000):
        log.info("dropped", number=number)
    assert WAIT_S <= time.monotonic() - began < 100 * WAIT_S
    read = reader.read()
    log.info("read again")
    read += reader.read()
    full, begun, notice, again = read.splitlines()
    assert {*full} == {ord("x")}
    assert json.loads(begun)["text"] == "y" * 10_000
    said = json.loads(notice)
    assert (said["event"], said["level"]) == ("dropped log lines: the log was not read", "warning")
    assert (said["lines"], said["logger"]) == (1_000, "dataloader.supervisor.logs")
    assert json.loads(again)["event"] == "read again"


@pytest.mark.slow
def test_a_log_whose_reader_takes_his_time_loses_no_line(
    out: io.StringIO, pipe: tuple[io.FileIO, io.TextIOWrapper]
) -> None:
    reader, writer = pipe
    os.set_blocking(reader.fileno(), True)
    configure_logging("json", "info", writer)
    read: list[bytes] = []
    thread = threading.Thread(target=lambda: read.extend(reader))
    thread.start()
    for number in range(3_000):
        get_logger("dataloader.x").info("a line", number=number)
    writer.close()
    thread.join(60)
    assert [json.loads(line)["number"] for line in read[1:]] == [*range(3_000)]


def test_people_get_plain_lines_on_a_terminal_and_machines_json(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    configure_logging("auto", "info", terminal)
    structlog.get_logger("x").info("job started", job_id="0190", password="s3cr3t")
    assert "job started" in terminal.getvalue()
    assert "job_id=0190" in terminal.getvalue()
    assert "password=***" in terminal.getvalue()
    configure_logging("auto", "info", out)
    structlog.get_logger("x").info("job started")
    assert lines(out)[0]["event"] == "job started"


def test_text_from_outside_writes_no_extra_lines_or_colors(out: io.StringIO) -> None:
    configure_logging("console", "info", out)
    unseen = "\x1b[2J\x9b\u202e\u2066\u2028\u2029\u200b\ufeff"
    said = {"args": {"x": f"{unseen}\n", f"{unseen}": 1}, "name": unseen, f"odd{unseen}": 1}
    structlog.get_logger().info(f"a\nb{unseen}", **said, exc_info=ValueError(unseen))
    assert not ({*unseen} - {*"[2J"}) & {*out.getvalue()}
    lines_of_exception = 1
    assert out.getvalue().count("\n") == 1 + lines_of_exception
    configure_logging("json", "info", out)
    out.seek(0)
    out.truncate()
    structlog.get_logger().info(f"a\nb{unseen}", **said)
    assert not ({*unseen} - {*"[2J"}) & {*out.getvalue()}
    [line] = lines(out)
    assert line["event"] == f"a\nb{unseen}"
    assert said.items() <= line.items()


def test_a_text_of_megabytes_is_cut_before_its_secrets_are_looked_for(out: io.StringIO) -> None:
    configure_logging("json", "info", out)
    structlog.get_logger().info("read", body="token=a, " * 100_000)
    [line] = lines(out)
    assert line["body"].startswith("token=***, token=***")
    assert "characters cut" in line["body"]
    assert len(line["body"]) < 100_000


def test_lines_below_the_level_are_left_out(out: io.StringIO) -> None:
    configure_logging("json", "warning", out)
    structlog.get_logger().info("no")
    logging.getLogger("a").info("no")
    structlog.get_logger().warning("yes")
    assert [line["event"] for line in lines(out)] == ["yes"]


def test_the_http_client_logs_no_request_unless_configured(out: io.StringIO) -> None:
    client, steps = logging.getLogger("httpx2"), logging.getLogger("httpcore2.connection")
    configure_logging("json", "debug", out)
    client.info("HTTP Request: GET https://a.example/?signature=x")
    steps.debug("connect_tcp.started")
    assert lines(out) == []
    client.warning("it cannot be reached")
    client.setLevel(logging.INFO)
    configure_logging("json", "debug", out)
    client.info("asked for")
    assert [line["event"] for line in lines(out)] == ["it cannot be reached", "asked for"]


def test_a_logger_made_before_the_configuration_follows_it(out: io.StringIO) -> None:
    log = structlog.get_logger("early")
    configure_logging("json", "info", out)
    log.info("x")
    assert lines(out)[0]["logger"] == "early"


@pytest.mark.slow
def test_a_process_without_a_terminal_logs_to_stderr_as_json() -> None:
    program = """
        import logging, structlog
        from dataloader.supervisor.logs import configure_logging
        configure_logging("auto", "info")
        structlog.get_logger("a").info("ünï", n=1)
        logging.getLogger("b").error("two")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        check=True,
        timeout=60,
        env={"PYTHONIOENCODING": "ascii:backslashreplace"},
    )
    assert run.stdout == b""
    assert [json.loads(line)["event"] for line in run.stderr.splitlines()] == ["ünï", "two"]


def test_our_own_lines_have_their_fields_and_context_and_are_masked(out: io.StringIO) -> None:
    configure_logging("json", "info", out)
    log = get_logger("dataloader.x")
    with structlog.contextvars.bound_contextvars(job_id="0190"):
        log.info("job started", rows=3, password="s3cr3t")
        log.debug("not shown")
        try:
            int("token=s3cr3t")
        except ValueError:
            log.exception("boom", level="of a field")
    started, boom = lines(out)
    assert (started["event"], started["logger"], started["level"]) == ("job started", "dataloader.x", "info")
    assert (started["rows"], started["job_id"], started["password"]) == (3, "0190", "***")
    assert boom["exception"].endswith("invalid literal for int() with base 10: 'token=***'")


def test_every_room_has_its_loggers_from_us() -> None:
    root = Path(__file__).parents[2]
    for room in ("jobs", "store", "actors", "web", "flows", "supervisor", "cli"):
        for path in (root / room).rglob("*.py"):
            text = path.read_text()
            assert not re.search(r"structlog\.(stdlib\.)?get_logger\(", text), f"{path}: use dataloader.jobs.logger"
            assert path.name == "logs.py" or "structlog.configure(" not in text, path
