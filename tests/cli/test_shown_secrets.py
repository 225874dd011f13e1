"""No command that reads shows a secret of any row (Q16)."""

from __future__ import annotations

import pytest
from canaries import CANARY
from secret_rows import BULK, FAILED, PLAIN, RUNNING, insert_secret_rows

from dataloader.jobs.operations.bulk import GetBulk, ListBulk, bulk
from dataloader.jobs.operations.failures import ListDuplicates, ListErrorGroups, ListErrors, ListGroupJobs, failures
from dataloader.jobs.operations.jobs import GetJob, ListEvents, ListJobs, ListLog, ShowWhy, jobs
from dataloader.jobs.operations.limits import GetSupplier, GetTask, ListSuppliers, ListTasks, limits
from dataloader.jobs.operations.loads import (
    ListFailuresOfLoad,
    ListFailuresOfRun,
    ListLoads,
    ListRuns,
    ShowLoad,
    ShowTimeline,
    loads,
)
from dataloader.jobs.operations.processes import (
    ListDeliveries,
    ListProcessErrors,
    ListProcesses,
    ListProcessEvents,
    ListProcessTasks,
    ListProcessVersions,
    ListSinks,
    ShowProcess,
    ShowProcessTask,
    processes,
)
from dataloader.jobs.operations.queues import ListAudit, ListQueues, ListStats, ListWorkers, queues
from dataloader.jobs.operations.schedules import (
    GetSchedule,
    ListNextTimes,
    ListScheduleEvents,
    ListSchedules,
    schedules,
)

pytestmark = [pytest.mark.slow, pytest.mark.requirement("Q16")]

COMMANDS = {
    GetJob: [f"status {FAILED}", f"status {RUNNING}", f"status {FAILED} --all-fields"],
    ShowWhy: [],
    ListJobs: ["jobs"],
    ListEvents: [f"events {FAILED}"],
    ListLog: [f"logs {FAILED}"],
    ListErrorGroups: ["errors list", "errors list --exact"],
    ListErrors: ["errors log"],
    ListGroupJobs: ["jobs --error-group {group}"],
    ListDuplicates: ["duplicates"],
    ListQueues: ["queues"],
    ListWorkers: ["workers"],
    ListStats: ["stats --since 2026-11-01T00:00:00Z", "stats --since 2026-11-01T00:00:00Z --by day"],
    ListAudit: ["audit"],
    ListSchedules: ["schedule list"],
    GetSchedule: [f"schedule show {PLAIN}"],
    ListNextTimes: [f"schedule next {PLAIN}"],
    ListScheduleEvents: [],
    ListTasks: ["task list"],
    GetTask: [f"task show {PLAIN}"],
    ListSuppliers: ["supplier list"],
    GetSupplier: [f"supplier show {PLAIN}"],
    ListProcesses: ["process list"],
    ShowProcess: [f"process show {PLAIN} {PLAIN}"],
    ListProcessEvents: [f"process events {PLAIN} {PLAIN}"],
    ListProcessTasks: [f"process tasks {PLAIN} {PLAIN}"],
    ShowProcessTask: ["process wait {call}"],
    ListProcessErrors: ["process errors"],
    ListProcessVersions: ["process versions"],
    ListSinks: ["process sinks"],
    ListDeliveries: ["process deliveries"],
    ListBulk: ["bulk list"],
    GetBulk: [f"bulk show {BULK}"],
    ListRuns: [],
    ShowTimeline: [],
    ListFailuresOfRun: [f"etl failures --run {FAILED}"],
    ListLoads: ["etl status"],
    ShowLoad: [f"etl status {PLAIN}"],
    ListFailuresOfLoad: [f"etl failures {PLAIN}"],
}
"""Commands by the operation that they read; no command reads those without one."""


def test_no_command_shows_a_secret_of_a_row(on_database, database):
    every = [*jobs, *failures, *queues, *schedules, *limits, *processes, *bulk, *loads]
    assert set(COMMANDS) == {kind for kind in every if kind.declaration.method == "GET"}
    assert on_database("migrate").returncode == 0
    rows = insert_secret_rows(database)
    leaks, masked = {}, 0
    for command in [command for commands in COMMANDS.values() for command in commands]:
        arguments = command.format(group=rows.group, call=rows.call).split()
        for form in ([], ["--json"]):
            ended = on_database(*arguments, *form)
            said = ended.stdout + ended.stderr
            masked += "***" in said
            if CANARY in said:
                leaks[command, *form] = said[max(said.find(CANARY) - 80, 0) :][:160]
            elif ended.returncode != 3 and (ended.returncode or not ended.stdout):
                leaks[command, *form] = f"{ended.returncode} {said[:2000]}"
    assert leaks == {}
    assert masked > 40
