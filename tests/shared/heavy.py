"""Transforms that run in the processes of loads, which import them from here."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dataloader.flows.etl import Request

if os.environ.get("HEAVY") == "broken" and "DATALOADER_CHILD" in os.environ:
    raise RuntimeError("no licence")


def with_pid(record):
    """Return a row with the process ID in which it was made."""
    return {"n": record["n"], "pid": os.getpid()}


def with_pid_and_all(record):
    """Return the record's fields with the process ID."""
    return {**record, "pid": os.getpid()}


def picky(record):
    """Refuse some records, skip some, split some, and add fields that the table does not have."""
    if record["id"] % 10 == 3:
        raise ValueError(f"value: must not be {record['value']}")
    if record["id"] % 10 == 4:
        return None
    if record["id"] % 10 == 5:
        return [{**record, "value": None}, {"id": record["id"] + 1_000, "day": record["day"], "more": 1}]
    return {**record, "id": int(record["id"]), "value": "tab\tand\nnewline\\"}


def detail_id(record):
    """Return the ID of a detail, or None for some records."""
    return None if record["id"] % 10 == 7 else record["id"]


def detail_request(number):
    """Return the request of a detail."""
    return Request(endpoint="/detail", params={"id": number})


def detail_row(number, record):
    """Return a row of a detail, with its number."""
    return {"id": record["id"], "about": f"{number}: {record['about']}"}


def _show(record):
    Path(os.environ["HEAVY_SHOWS"]).joinpath(str(os.getpid())).write_text(str(record["n"]))


def endless(record):
    """Run forever and ignore signals, as does a process that it starts."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    Path(os.environ["HEAVY_SHOWS"]).joinpath(str(other.pid)).write_text("")
    _show(record)
    while True:
        time.sleep(0.01)


def slow(record):
    """Return the row after a delay."""
    time.sleep(1.5)
    return with_pid(record)


def crash(record):
    """Crash the process."""
    print("about to crash", record["n"])  # noqa: T201
    os.kill(os.getpid(), signal.SIGSEGV)


def leave(_record):
    """Raise an error that is not a record's failure."""
    raise SystemExit(3)


def chat(record):
    """Print many lines."""
    for number in range(100):
        print("seen", record["n"], number)  # noqa: T201
        print("warned", record["n"], number, file=sys.stderr)  # noqa: T201
    return with_pid(record)


def leave_behind(record):
    """Leave a process behind."""
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    return {"n": record["n"], "pid": other.pid}


def waits(record):
    """Report the record, and wait with the third one until the test allows it to continue."""
    _show(record)
    while int(record["n"]) == 2 and not Path(os.environ["HEAVY_SHOWS"], "go").exists():
        time.sleep(0.05)
    return with_pid(record)
