"""Lists on a terminal of 80 columns: a line for each row, whole IDs, and a note on omitted values."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import termios
import threading

import pytest

ROWS = """
insert into dl_jobs (job_id, queue, task, lock_key, status, error, attempt, finished_at)
  select gen_random_uuid(), 'load.exchange.rates', 'load.rates.of.a.year', i::text, 'failed',
         'ValueError: the year has no rates at all in the file that the bank has sent', 5, now()
  from generate_series(1, 3) i;
insert into dl_jobs (job_id, queue, task, lock_key, status, progress, attempt, token, claimed_by)
  values (gen_random_uuid(), 'load.exchange.rates', 'load.rates.of.a.year', 'r', 'running',
          '{"rows": 4200, "requests": 17, "segment": "2024-01-01"}', 1, 1, 'w');
insert into dl_jobs (job_id, queue, task, lock_key) values (gen_random_uuid(), 'nobody.serves.this', 't', 'n');
insert into dl_workers (worker, host, pid, version, queues)
  select 'etl-7f9c5d-xk2v' || i || ':17:ab12cd34', 'etl-7f9c5d-xk2v' || i, 17, '0.1.0',
         '{"load.exchange.rates": 4, "default": 10, "load.something.else": 2}' from generate_series(1, 2) i;
insert into dl_audit (actor, action, job_id, detail)
  select 'somebody@a-rather-long-host-name', 'cancel', job_id, '{"was": "queued", "request_id": "x"}' from dl_jobs;
insert into dl_etl_runs (run_id, name, kind, status)
  select job_id, 'rates.of.the.central.bank', 'load', 'failed' from dl_jobs where status = 'running';
insert into dl_etl_tasks (run_id, ordinal, task, status, started_at, finished_at, summary)
  select run_id, 0, name, 'failed', now(), now(), '{"counts": {"requests": 100, "rows": 4200, "inserted": 4000}}'
  from dl_etl_runs;
insert into dl_etl_failures (run_id, load, segment, phase, key, error, sample)
  select run_id, name, '2024-01-01 to 2024-02-01', 'requests', 'GET https://bank.example/rates/daily?day=2024-01-01',
         'the source answers 500 Internal Server Error again and again', 'data' from dl_etl_runs;
"""
COMMANDS = [
    "jobs",
    "queues",
    "workers",
    "audit",
    "config",
    "tasks --tasks dataloader.cli.demo.tasks:tasks",
    "etl status",
    "etl failures rates.of.the.central.bank",
]
ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")


@pytest.fixture
def on_terminal(on_database):
    """Return a function that runs a command on a terminal with `columns`, and returns the lines without colors."""

    def on_terminal(columns, *arguments):
        keyboard, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        shown = []
        # A terminal buffers few characters, so they must be read meanwhile.
        reader = threading.Thread(target=_read, args=(keyboard, shown), daemon=True)
        reader.start()
        with _standard_output_to(terminal):
            ended = on_database(*arguments, TERM="xterm", COLUMNS="")
        os.close(terminal)
        reader.join(20)
        os.close(keyboard)
        assert ended.returncode == 0, shown
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(shown).decode()).replace("\r\n", "\n")
        return [line.rstrip() for line in text.splitlines()]

    return on_terminal


def _read(keyboard, shown):
    with contextlib.suppress(OSError):  # Linux reports in this way that no process has the terminal open any more
        while more := os.read(keyboard, 10_000):
            shown.append(more)


@contextlib.contextmanager
def _standard_output_to(terminal):
    """Redirect descriptors and streams: a command may use either to look for a terminal and its width."""
    kept = [os.dup(1), os.dup(2)]
    os.dup2(terminal, 1)
    os.dup2(terminal, 2)
    try:
        with (
            os.fdopen(os.dup(terminal), "w") as out,
            os.fdopen(os.dup(terminal), "w") as err,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            yield
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def test_a_row_of_a_list_is_one_line_on_a_terminal_of_80_columns(on_terminal, database):
    database.psql(ROWS)
    for command in COMMANDS:
        lines = on_terminal(80, *command.split())
        *table, last = lines
        if not last.startswith("no room for "):
            table = lines
        assert max(map(len, table)) <= 80, "\n".join(lines)
        if command != "config":
            # No line is broken: each has a text in its first column.
            assert all(re.match(r"\S", line) for line in table), "\n".join(lines)
        if command in {"jobs", "audit"}:
            assert sum(bool(ID.search(line)) for line in table) == 5, "\n".join(lines)


def test_a_column_of_noughts_gives_way_to_one_that_says_something(on_terminal, database):
    database.psql(ROWS)
    header, *_, last = on_terminal(80, "queues")
    assert ("UNKNOWN_TASK" in header, last.startswith("no room")) == (False, False)
    database.psql(
        "insert into dl_workers (worker, host, pid, version, queues, tasks)"
        " values ('w', 'h', 1, '1', '{\"nobody.serves.this\": 1}', '{}')"
    )
    header, *_ = on_terminal(80, "queues")
    assert "UNKNOWN_TASK" in header
    assert "BLOCKED" not in header


def test_columns_without_room_are_named_and_shown_on_a_wider_terminal(on_terminal, database):
    database.psql(ROWS)
    header, *_, last = on_terminal(80, "jobs")
    assert header.split() == ["JOB_ID", "STATUS", "TASK", "QUEUE"]
    assert last == "hidden: DETAIL, CREATED, ATTEMPT; use a pipe or --json"
    header, *rows = on_terminal(250, "jobs")
    assert header.split() == ["JOB_ID", "STATUS", "TASK", "QUEUE", "ATTEMPT", "CREATED", "DETAIL"]
    assert sum("has no rates at all in the file that the bank has sent" in row for row in rows) == 3
    assert not rows[-1].startswith("no room")


def test_a_terminal_that_is_too_narrow_for_an_id_cuts_none(on_terminal, database):
    database.psql(ROWS)
    assert sum(bool(ID.match(line)) for line in on_terminal(30, "jobs")) == 5


def test_a_pause_and_a_number_of_jobs_stay_on_a_terminal_of_80_columns(on_terminal, on_database, database):
    database.psql(ROWS)
    timing = ("--cron", "0 6 * * MON-FRI", "--zone", "Europe/Berlin")
    on_database("schedule", "set", "rates-of-the-central-bank", "--task", "load.rates.of.a.year", *timing)
    on_database("schedule", "pause", "rates-of-the-central-bank")
    header, row, *_ = on_terminal(80, "schedule", "list")
    assert header.split()[-1] == "STATE"
    assert row.endswith("  paused")
    header, row, *_ = on_terminal(80, "errors", "list")
    assert "WAITING" in header
    assert "load.rates.of.a.year" in row
