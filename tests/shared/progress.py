"""Progress of a test run by parts: `--parts` prints one line per folder, as soon as its last test has ended.

This is a plugin of tests/conftest.py. It replaces pytest's dots. A terminal also has a progress bar of all tests; piped
output has a count once a minute. Each failure has a line at its time.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import attrs
import pytest

WIDTH = 79
EVERY_S = 60.0
"""Seconds between two counts of all tests if the output is piped."""


def pytest_addoption(parser):
    parser.addoption("--parts", action="store_true", help="print one line per folder of tests instead of dots")


def pytest_configure(config):
    # Workers of xdist report to the controller, which prints.
    if config.getoption("--parts") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(config), "progress of parts")


@attrs.define(eq=False)
class Progress:
    """Counts of a run, by part; a part is the folder of a test's file."""

    config: Any
    began: float = attrs.field(factory=time.monotonic)
    left: Counter[str] = attrs.field(factory=Counter)
    ended: dict[str, Counter[str]] = attrs.field(factory=dict)
    next_count_at: float = attrs.field(factory=lambda: time.monotonic() + EVERY_S)
    total: int = 0
    done: int = 0
    failed: int = 0
    is_over: bool = False

    def pytest_collection_finish(self, session):
        self.expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids):
        self.expect(ids)

    def expect(self, ids):
        """Take the tests to come from their IDs. Each worker of xdist collects the same ones; the first one counts."""
        if self.total == 0 and ids:
            self.total = len(ids)
            self.left.update(map(part_of, ids))

    # Before the terminal's own hook, which would return a dot.
    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report):
        if self.is_over:
            return None  # the summary has pytest's own words
        if report.passed:
            return ("passed" if report.when == "call" else ""), "", ""
        if report.skipped:
            return "skipped", "", ""
        return ("failed" if report.when == "call" else "error"), "", ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self):
        self.is_over = True

    def pytest_runtest_logreport(self, report):
        part = part_of(report.nodeid)
        counts = self.ended.setdefault(part, Counter())
        if report.failed:
            # A test that has passed and whose cleanup fails is counted as failed, not as both.
            counts["passed"] -= report.when == "teardown" and counts["passed"] > 0
            counts["failed"] += 1
            self.failed += 1
            self.print(f"FAILED {report.nodeid}")
        elif report.skipped:
            counts["skipped"] += 1
        elif report.when == "call":
            counts["passed"] += 1
        # The report of a crashed worker is the test's only one.
        if report.when not in {"setup", "call"}:
            self.done += 1
            self.left[part] -= 1
            if not self.left[part]:
                told = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("passed", "failed", "skipped") if counts[kind])
                self.print(f"{part:24} {told:42} {self.elapsed:>6}")
            self.show_count()

    @property
    def elapsed(self):
        """Minutes and seconds since the start."""
        return f"{(seconds := int(time.monotonic() - self.began)) // 60}:{seconds % 60:02}"

    def print(self, line):
        """Print a line above the count."""
        writer = self.config.get_terminal_writer()
        if writer.hasmarkup:
            writer.write("\r".ljust(WIDTH) + "\r")
        writer.line(line)
        writer.flush()

    def show_count(self):
        """Show the count of all tests: after each test in a terminal, else once a minute."""
        writer = self.config.get_terminal_writer()
        failed = f", {self.failed:,} failed" if self.failed else ""
        count = f"{self.done:,} of {self.total:,}{failed}"
        if writer.hasmarkup:
            share = self.done / self.total if self.total else 1
            line = f"[{'#' * int(30 * share):30}] {count}  {self.elapsed}"
            writer.write("\r" + ("" if share == 1 else line).ljust(WIDTH) + ("\r" if share == 1 else ""))
            writer.flush()
        elif time.monotonic() >= self.next_count_at:
            self.next_count_at += EVERY_S
            self.print(f"{'':24} {count:42} {self.elapsed:>6}")


def part_of(nodeid: str) -> str:
    """Return the folder of a test's file below tests/."""
    return nodeid.partition("::")[0].removeprefix("tests/").rpartition("/")[0] or "tests"
