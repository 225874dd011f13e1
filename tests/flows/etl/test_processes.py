"""Loads whose pages are read and transformed in separate processes, for work that occupies a core (E2)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from operator import itemgetter

import heavy
import pytest
from conditions import until, when_ended
from etl_tasks import item, items_load
from processes_now import is_alive

from dataloader.flows.etl import Csv, Detail, Files, Http, Json, Load, Table
from dataloader.flows.etl.parse.processes import MOST_PRINTED

pytestmark = pytest.mark.requirement("E2")


LEASE_S = 4


@pytest.fixture
async def numbers(raw, tmp_path):
    """Return a function that returns a load of one file for each number, in processes, into a table `numbers`."""
    await raw.execute("CREATE TABLE numbers (n int PRIMARY KEY, pid int)")

    def numbers(transform, count=4, **fields):
        for n in range(count):
            (tmp_path / f"{n}.csv").write_text(f"n\n{n}\n")
        return Load(
            "numbers",
            Files(str(tmp_path / "*.csv"), format=Csv(), record_source=False),
            Table("numbers", key="n"),
            transform=transform,
            **{"processes": True} | fields,
        )

    return numbers


@pytest.fixture
def seen(monkeypatch, tmp_path_factory):
    """Return a function that reads the process IDs that transforms have recorded."""
    folder = tmp_path_factory.mktemp("shows")
    monkeypatch.setenv("HEAVY_SHOWS", str(folder))
    return lambda: sorted(int(path.name) for path in folder.iterdir())


@pytest.fixture
def failures_of(raw):
    """Return a function that reads and deletes the recorded failures."""

    async def failures_of():
        rows = await raw.fetch("DELETE FROM dl_etl_failures RETURNING phase, key, error, sample")
        return sorted(map(tuple, rows))

    return failures_of


@pytest.mark.slow
async def test_a_transform_runs_in_other_processes_if_the_load_says_so(numbers, counts_of, raw):
    await counts_of(numbers(heavy.with_pid))
    pids = [row["pid"] for row in await raw.fetch("SELECT pid FROM numbers")]
    assert len(pids) == 4
    assert os.getpid() not in pids
    assert not any(map(is_alive, pids))


@pytest.mark.slow
async def test_processes_give_the_same_rows_as_threads(items, details, outcome_of, failures_of, table, raw, soon):
    items.records = [item(number) for number in range(40)]
    items.service.misbehave("detail.*id=8$", status=404, times=None)
    made = []
    for in_processes in (False, True):
        await raw.execute("TRUNCATE item, detail")
        items.service.misbehave("detail.*id=9$", body=b"<html><body>back soon</body></html>", status=200)
        items.service.misbehave("items", body=b'{"items": [{"id', status=200)
        load = items_load(
            items.service.url,
            windows=None,
            page_size=15,
            transform=heavy.picky,
            processes=in_processes,
            pipeline={"max_failed_share": 1, "max_failures": 1_000, "workers": 1},
            detail=Detail(
                id=heavy.detail_id,
                request=heavy.detail_request,
                source=Http(items.service.url, format=Json(), params=lambda _window: {}),
                table=Table("detail", key="id"),
                transform=heavy.detail_row,
            ),
        )
        outcome = await outcome_of(load)
        failures = await failures_of()
        made.append([outcome.status, outcome.result["counts"], failures, await table(), await table(name="detail")])
    assert made[0] == made[1]
    counts = made[0][1]
    assert (counts["records_failed"], counts["left_out"], counts["details_skipped"]) == (4, 4, 4)
    assert ("record", "3", "ValueError: value: must not be a") in [failure[:3] for failure in made[0][2]]


@pytest.mark.slow
async def test_processes_report_a_broken_row_of_a_file_as_threads_do(numbers, outcome_of, failures_of, tmp_path):
    told = []
    for in_processes in (False, True):
        load = numbers(heavy.with_pid, processes=in_processes, pipeline={"max_failed_share": 1})
        (tmp_path / "1.csv").write_text("n\n1\n2,3,4\n5\n")
        await outcome_of(load)
        told.append(await failures_of())
    assert told[0] == told[1]
    assert len(told[0]) == 1


@pytest.mark.full
@pytest.mark.parametrize("by", ["cancel", "timeout", "drain"])
async def test_a_stop_kills_running_transforms_and_their_child_processes(by, numbers, seen, supervised):
    load = numbers(heavy.endless, timeout_s=8 if by == "timeout" else None, pipeline={"drain_timeout": 0.1})
    async with supervised(load, drain_timeout_s=1) as supervisor:
        job = await supervisor.jobs.enqueue("numbers", queue="q", max_attempts=1)

        async def shown():
            return len(seen()) == 4

        await until(shown, within_s=20)
        if by == "drain":
            await supervisor.drain()
        else:
            if by == "cancel":
                await supervisor.jobs.cancel(job.job_id)
            status = (await when_ended(supervisor, job.job_id)).status
            assert status == {"cancel": "canceled", "timeout": "failed"}[by]
            assert not any(map(is_alive, seen()))
    assert not any(map(is_alive, seen()))


@pytest.mark.full
async def test_processes_live_as_long_as_the_lease_is_renewed(numbers, supervised, raw):
    async with supervised(numbers(heavy.slow, pipeline={"workers": 1}), heartbeat_s=0.5) as supervisor:
        job = await supervisor.jobs.enqueue("numbers", queue="q", lease_ttl_sec=LEASE_S, max_attempts=1)
        ended = await when_ended(supervisor, job.job_id)
        assert ended.status == "succeeded", ended.error
    assert await raw.fetchval("SELECT extract(epoch FROM finished_at - started_at) FROM dl_jobs") > LEASE_S


@pytest.mark.slow
async def test_a_process_that_ends_fails_the_attempt_and_says_how(numbers, outcome_of):
    outcome = await outcome_of(numbers(heavy.crash))
    assert outcome.error == "the child process was ended by SIGSEGV"
    assert outcome.status == "queued"


@pytest.mark.slow
async def test_an_exit_in_a_transform_is_the_attempts_error_with_its_stack(numbers, outcome_of):
    outcome = await outcome_of(numbers(heavy.leave))
    assert outcome.error.endswith("SystemExit: 3")
    assert "raise SystemExit(3)" in outcome.error
    assert "page_maker" not in outcome.error.partition("\n")[0]


@pytest.mark.slow
async def test_functions_that_are_not_found_there_are_named(numbers, outcome_of, monkeypatch):
    monkeypatch.setenv("HEAVY", "broken")
    outcome = await outcome_of(numbers(heavy.with_pid))
    assert outcome.error.endswith(
        "RuntimeError: a child process cannot import the load's source or functions: RuntimeError: no licence"
    )


@pytest.mark.slow
async def test_printed_lines_of_a_process_are_in_the_loads_log_up_to_a_limit(numbers, outcome_of):
    outcome = await outcome_of(numbers(heavy.chat, pipeline={"workers": 1}))
    assert outcome.status == "succeeded"
    printed = [line for line in outcome.log if line.fields.get("stream")]
    assert {line.fields["stream"] for line in printed} == {"stdout", "stderr"}
    assert all(line.fields["load"] == "numbers" for line in printed)
    assert len(printed) == MOST_PRINTED
    told = [line.message for line in outcome.log if line.level == "warning"]
    assert told == ["the process printed more lines than are stored"]


@pytest.mark.slow
async def test_processes_are_kept_for_the_next_run_unless_they_have_left_others_behind(numbers, supervised, raw):
    async def pids():
        job = await supervisor.jobs.enqueue("numbers", queue="q")
        assert (await when_ended(supervisor, job.job_id)).status == "succeeded"
        return {row["pid"] for row in await raw.fetch("SELECT pid FROM numbers")}

    async with supervised(numbers(heavy.with_pid, pipeline={"workers": 1})) as supervisor:
        first = await pids()
        assert len(first) == 1
        assert await pids() == first
        assert all(map(is_alive, first))
    assert not any(map(is_alive, first))
    async with supervised(numbers(heavy.leave_behind, pipeline={"workers": 1})) as supervisor:
        left = await pids()
        assert not any(map(is_alive, left))
        assert left.isdisjoint(await pids())


@pytest.mark.parametrize("processes", [False, True])
def test_a_load_is_declared_with_any_function_of_a_module(processes, tmp_path):
    for transform in (dict, itemgetter("id"), partial(heavy.detail_row, "1")):
        Load(
            "numbers",
            Files(str(tmp_path), format=Csv(), window_of=lambda _name: None),
            Table("numbers", key="n"),
            transform=transform,
            processes=processes,
        )


OF_MAIN = """
from dataloader.flows.etl import Csv, Files, Load, Table

def of_main(record):
    return record

Load("n", Files("/", format=Csv()), Table("t", key="n"), processes=True, transform=of_main)
"""


@pytest.mark.slow
def test_a_transform_that_can_not_be_sent_to_a_process_is_refused(tmp_path):
    declare = partial(Load, name="numbers", table=Table("numbers", key="n"), processes=True)
    source = Files(str(tmp_path), format=Csv())
    with pytest.raises(ValueError, match=r"load numbers: transform: must be usable in another process, .*lambda"):
        declare(source=source, transform=lambda row: row)
    program = subprocess.run([sys.executable, "-c", OF_MAIN], capture_output=True, text=True, check=False, timeout=60)
    assert re.search(r"ValueError: .*transform: .*of_main must be in a module, not in the", program.stderr)
