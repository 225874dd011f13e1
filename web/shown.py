"""Masking of the store's records for answers: secrets in texts of clients and handlers are hidden.

The database has the real values. Locks, filters and repeated requests use these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, get_type_hints

import attrs

from dataloader.jobs.bulk_listings import BulkPage, BulkRecord
from dataloader.jobs.duplicates import DuplicateGroup, DuplicateGroups
from dataloader.jobs.errors import BadRequest
from dataloader.jobs.failures import ErrorGroup, ErrorGroupPage, ErrorPage, ErrorRecord, GroupRetried
from dataloader.jobs.listings import (
    AuditPage,
    AuditRecord,
    EventPage,
    JobPage,
    LogLine,
    LogPage,
    QueuePage,
    WorkerPage,
)
from dataloader.jobs.load_listings import (
    FailurePage,
    LoadPage,
    LoadRecord,
    RunPage,
    RunRecord,
    RunTask,
    RunTimeline,
)
from dataloader.jobs.model import JobEvent, JobRecord, QueueRecord, WorkerRecord
from dataloader.jobs.operations.jobs import Changed
from dataloader.jobs.operations.limits import ChangedTasks
from dataloader.jobs.operations.queues import QueuePaused
from dataloader.jobs.operations.schedules import NextTimes
from dataloader.jobs.process_listings import (
    ProcessAnswer,
    ProcessErrorGroup,
    ProcessErrorPage,
    ProcessesChanged,
    ProcessEvent,
    ProcessEventPage,
    ProcessPage,
    ProcessRecord,
    ProcessTask,
    ProcessTaskPage,
    VersionList,
)
from dataloader.jobs.process_outbox import HeldDelivery, HeldDeliveryPage, Released, SinkList
from dataloader.jobs.run_stats import RunStats, RunStatsPage
from dataloader.jobs.schedule_listings import Backfilled, ScheduleEvent, ScheduleEventPage, SchedulePage, ScheduleRecord
from dataloader.jobs.secrets.masking import mask, mask_names, mask_text
from dataloader.jobs.supplier_listings import SupplierPage, SupplierRecord
from dataloader.jobs.task_listings import TaskPage, TaskState
from dataloader.jobs.wait_reasons import WaitReason
from dataloader.store.queue.serving import ServingProcess

R = TypeVar("R")


_KINDS: Final = get_type_hints(JobRecord)
_JOB_TEXTS: Final = [name for name, kind in _KINDS.items() if kind in {str, str | None}]
_JOB_VALUES: Final = [name for name, kind in _KINDS.items() if kind is Any]


def job(record: JobRecord) -> JobRecord:
    """Mask a job: all of its texts, including names and keys, and all of its JSON."""
    masked: dict[str, Any] = {name: text(getattr(record, name)) for name in _JOB_TEXTS}
    masked |= {name: mask(getattr(record, name)) for name in _JOB_VALUES}
    return attrs.evolve(record, **masked)


def task(record: TaskState) -> TaskState:
    """Mask a task type."""
    return attrs.evolve(
        record,
        task=mask_text(record.task),
        description=text(record.description),
        queue=text(record.queue),
        declared_by=mask_text(record.declared_by),
        declared=fields(dict(record.declared)),
        override=fields(dict(record.override)),
        limits=fields(dict(record.limits)),
        error=text(record.error),
    )


def supplier(record: SupplierRecord) -> SupplierRecord:
    """Mask a supplier. Two whose names differ only in their secrets look the same."""
    return attrs.evolve(
        record,
        supplier=mask_text(record.supplier),
        tasks=list(map(mask_text, record.tasks)),
        error=text(record.error),
    )


def duplicates(record: DuplicateGroup) -> DuplicateGroup:
    """Mask a group of duplicates."""
    return attrs.evolve(
        record,
        queue=mask_text(record.queue),
        task=mask_text(record.task),
        partition_key=mask_text(record.partition_key),
        args=mask(record.args),
    )


def wait_reason(reason: WaitReason) -> WaitReason:
    """Mask the reason why a job does not run."""
    session = reason.session
    if session is not None:
        session = attrs.evolve(session, application=text(session.application), user=text(session.user))
    return attrs.evolve(reason, text=mask_text(reason.text), also=list(map(mask_text, reason.also)), session=session)


def event(record: JobEvent) -> JobEvent:
    """Mask an event of a job."""
    return attrs.evolve(record, queue=mask_text(record.queue), payload=mask(record.payload))


def log_line(line: LogLine) -> LogLine:
    """Mask a line of a job's log."""
    return attrs.evolve(line, message=mask_text(line.message), fields=fields(line.fields))


def error_group(group: ErrorGroup) -> ErrorGroup:
    """Mask a group of jobs that failed."""
    return attrs.evolve(group, task=mask_text(group.task), error=mask_text(group.error))


def error(record: ErrorRecord) -> ErrorRecord:
    """Mask a row of the error log."""
    return attrs.evolve(
        record,
        task=mask_text(record.task),
        queue=mask_text(record.queue),
        worker=text(record.worker),
        error=mask_text(record.error),
    )


def queue(record: QueueRecord) -> QueueRecord:
    """Mask a queue. Two whose names differ only in their secrets look the same."""
    return attrs.evolve(record, queue=mask_text(record.queue))


def worker(record: WorkerRecord) -> WorkerRecord:
    """Mask a process, its queues and its tasks."""
    return attrs.evolve(
        record,
        worker=mask_text(record.worker),
        queues=mask_names(record.queues),
        tasks=None if record.tasks is None else list(map(mask_text, record.tasks)),
        only_tasks=_only_tasks(record.only_tasks),
    )


def _only_tasks(given: Mapping[str, Sequence[str]] | None) -> dict[str, list[str]] | None:
    return None if given is None else {mask_text(queue): list(map(mask_text, names)) for queue, names in given.items()}


def worker_process(row: ServingProcess) -> ServingProcess:
    """Mask a process for a page."""
    return attrs.evolve(
        row,
        worker=mask_text(row.worker),
        queues=mask_names(row.queues),
        running=None if row.running is None else mask_names(row.running),
        only_tasks=_only_tasks(row.only_tasks),
    )


def stats(one: RunStats) -> RunStats:
    """Mask statistics of runs. Two whose names differ only in their secrets look the same."""
    return attrs.evolve(one, queue=mask_text(one.queue), task=mask_text(one.task))


def schedule(record: ScheduleRecord) -> ScheduleRecord:
    """Mask a schedule, including its args and names."""
    return attrs.evolve(
        record,
        name=mask_text(record.name),
        task=mask_text(record.task),
        spec=fields(dict(record.spec)),
        stored_by=mask_text(record.stored_by),
        paused_why=text(record.paused_why),
        fault=text(record.fault),
    )


def schedule_event(event: ScheduleEvent) -> ScheduleEvent:
    """Mask an event of a schedule."""
    return attrs.evolve(event, payload=None if event.payload is None else fields(dict(event.payload)))


def load_record(record: LoadRecord) -> LoadRecord:
    """Mask the last run of a load."""
    last = record.last_run
    if last is None:
        return record
    return attrs.evolve(record, last_run=attrs.evolve(last, reason=text(last.reason), counts=fields(last.counts)))


def run(record: RunRecord) -> RunRecord:
    """Mask a run of a load or a flow."""
    return attrs.evolve(record, name=mask_text(record.name), reason=text(record.reason), counts=fields(record.counts))


def task_of_run(task: RunTask) -> RunTask:
    """Mask a task of a run."""
    return attrs.evolve(
        task,
        task=mask_text(task.task),
        layer=mask_text(task.layer),
        reason=text(task.reason),
        phases=fields(task.phases),
        tables=fields(task.tables),
        counts=fields(task.counts),
    )


def run_timeline(timeline: RunTimeline) -> RunTimeline:
    """Mask a run and its tasks."""
    return attrs.evolve(
        timeline,
        name=mask_text(timeline.name),
        reason=text(timeline.reason),
        counts=fields(timeline.counts),
        tasks=list(map(task_of_run, timeline.tasks)),
    )


def searchable(metadata: R) -> R:
    """Return metadata that may be searched for. Masked values are refused, since a search would reveal them.

    Raises `BadRequest`.
    """
    if mask(metadata) != metadata:
        raise BadRequest("metadata", "contains a secret name or value, which cannot be searched for")
    return metadata


def process(record: ProcessRecord) -> ProcessRecord:
    """Mask a process, including its ID and metadata."""
    return attrs.evolve(
        record,
        process_id=mask_text(record.process_id),
        detail=text(record.detail),
        state=mask(record.state),
        metadata=fields(dict(record.metadata)),
        timer=None if record.timer is None else attrs.evolve(record.timer, context=mask(record.timer.context)),
    )


def process_event(event: ProcessEvent) -> ProcessEvent:
    """Mask an event of a process."""
    return attrs.evolve(event, payload=mask(event.payload))


def process_task(task: ProcessTask) -> ProcessTask:
    """Mask a task of a process."""
    return attrs.evolve(
        task,
        process_id=mask_text(task.process_id),
        args=mask(task.args),
        context=mask(task.context),
        idempotency_key=text(task.idempotency_key),
        response=mask(task.response),
        error=text(task.error),
    )


def process_answer(answer: ProcessAnswer) -> ProcessAnswer:
    """Mask an answer of a step, as a job's result."""
    return attrs.evolve(answer, response=mask(answer.response), error=text(answer.error))


def process_error_group(group: ProcessErrorGroup) -> ProcessErrorGroup:
    """Mask a group of processes in error."""
    return attrs.evolve(group, error=mask_text(group.error), example=mask_text(group.example))


def held_delivery(one: HeldDelivery) -> HeldDelivery:
    """Mask a process whose deliveries are held up. Its error was stored without secrets."""
    return attrs.evolve(one, process_id=mask_text(one.process_id), error=mask_text(one.error))


def audit(record: AuditRecord) -> AuditRecord:
    """Mask an operator's action, including the filter of a bulk operation."""
    return attrs.evolve(
        record, actor=mask_text(record.actor), action=mask_text(record.action), detail=fields(record.detail)
    )


def bulk(record: BulkRecord) -> BulkRecord:
    """Mask a bulk operation. Its filter was stored without secrets."""
    return attrs.evolve(record, actor=mask_text(record.actor), stopped_by=text(record.stopped_by))


def text(given: str | None) -> str | None:
    """Mask a text, if it is given."""
    return None if given is None else mask_text(given)


def fields(given: dict[str, Any]) -> dict[str, Any]:
    """Mask a JSON object."""
    masked: Any = mask(given)
    return masked  # type: ignore[no-any-return]


def _rows(name: str, mask: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that masks each row of a page, in the attribute `name`."""
    return lambda page: attrs.evolve(page, **{name: list(map(mask, getattr(page, name)))})


def _as_it_is(answer: R) -> R:
    """Return an answer unchanged, since it has no text of a client or a handler."""
    return answer


MASKS: Final[Mapping[Any, Callable[[Any], Any]]] = {
    JobRecord: job,
    JobPage: _rows("jobs", job),
    WaitReason: wait_reason,
    EventPage: _rows("events", event),
    LogPage: _rows("lines", log_line),
    Changed: _as_it_is,
    ErrorGroupPage: _rows("groups", error_group),
    ErrorPage: _rows("errors", error),
    GroupRetried: _as_it_is,
    DuplicateGroups: _rows("groups", duplicates),
    QueuePage: _rows("queues", queue),
    QueuePaused: lambda answer: QueuePaused(mask_text(answer.queue), answer.paused),
    WorkerPage: _rows("workers", worker),
    RunStatsPage: _rows("stats", stats),
    AuditPage: _rows("audit", audit),
    TaskPage: _rows("tasks", task),
    TaskState: task,
    ChangedTasks: lambda answer: ChangedTasks(list(map(task, answer.tasks))),
    SupplierPage: _rows("suppliers", supplier),
    SupplierRecord: supplier,
    SchedulePage: _rows("schedules", schedule),
    ScheduleRecord: schedule,
    NextTimes: _as_it_is,
    ScheduleEventPage: _rows("events", schedule_event),
    Backfilled: _as_it_is,
    LoadPage: _rows("loads", load_record),
    LoadRecord: load_record,
    RunPage: _rows("runs", run),
    RunTimeline: run_timeline,
    FailurePage: _rows("failures", lambda failure: failure.masked()),
    ProcessPage: _rows("processes", process),
    ProcessRecord: process,
    ProcessEventPage: _rows("events", process_event),
    ProcessTaskPage: _rows("tasks", process_task),
    ProcessTask: process_task,
    ProcessAnswer: process_answer,
    ProcessErrorPage: _rows("groups", process_error_group),
    ProcessesChanged: _as_it_is,
    VersionList: _rows("versions", lambda one: attrs.evolve(one, type=mask_text(one.type))),
    SinkList: _as_it_is,
    HeldDeliveryPage: _rows("deliveries", held_delivery),
    Released: _as_it_is,
    BulkPage: _rows("bulk", bulk),
    BulkRecord: bulk,
}
"""Function that masks an operation's answer, by the answer's type; a type that is missing has no route."""
