"""Implementations of the operations on durable processes over the database."""

from __future__ import annotations

from contextlib import suppress

from dataloader.jobs.model import check_between
from dataloader.jobs.operations.processes import (
    ListDeliveries,
    ListProcessErrors,
    ListProcesses,
    ListProcessEvents,
    ListProcessTasks,
    ListProcessVersions,
    ListSinks,
    OneProcess,
    ReleaseDeliveries,
    RemoveProcess,
    RepairProcesses,
    ResumeProcess,
    ResumeProcesses,
    ShowProcess,
    ShowProcessTask,
    StopProcess,
    WithdrawCall,
    held_filter,
)
from dataloader.jobs.page_cursor import After
from dataloader.jobs.process_listings import (
    ProcessAnswer,
    ProcessErrorPage,
    ProcessesChanged,
    ProcessEventPage,
    ProcessFilter,
    ProcessPage,
    ProcessRecord,
    ProcessTask,
    ProcessTaskPage,
    VersionList,
    check_wanted,
)
from dataloader.jobs.process_outbox import HeldDeliveryPage, Released, SinkList
from dataloader.jobs.process_requests import BATCH, ProcessChange
from dataloader.jobs.processes import ProcessNotFound
from dataloader.store.implementations import Store, implements
from dataloader.store.processes import deliveries, operations, reads, search
from dataloader.store.processes.requests import Act
from dataloader.store.processes.sending import withdraw_task
from dataloader.store.processes.versions import list_versions


@implements(ListProcesses)
async def _list_processes(store: Store, request: ListProcesses) -> ProcessPage:
    return await search.find_processes(store.database, request.wanted(), limit=request.limit, after=request.after)


@implements(ShowProcess)
async def _show_process(store: Store, request: ShowProcess) -> ProcessRecord:
    which = request.process_type, request.process_id
    found = await reads.get_process(store.database, *which)
    if request.wait and request.is_awaited(found):
        [first] = (await reads.list_process_tasks(store.database, *which, limit=1)).tasks
        with suppress(ProcessNotFound):
            await store.answers.wait(first.task_id, timeout_s=request.wait, ident=first.ident)
        found = await reads.get_process(store.database, *which)
    return found


@implements(ListProcessEvents)
async def _list_process_events(store: Store, request: ListProcessEvents) -> ProcessEventPage:
    return await reads.list_process_events(
        store.database,
        request.process_type,
        request.process_id,
        limit=request.limit,
        after=request.after,
        newest_first=request.newest_first,
    )


@implements(ListProcessTasks)
async def _list_process_tasks(store: Store, request: ListProcessTasks) -> ProcessTaskPage:
    return await reads.list_process_tasks(
        store.database,
        request.process_type,
        request.process_id,
        limit=request.limit,
        after=request.after,
        newest_first=request.newest_first,
    )


@implements(ShowProcessTask)
async def _show_task(store: Store, request: ShowProcessTask) -> ProcessTask:
    found = await reads.get_process_task(store.database, request.task_id, request.ident)
    if request.wait and request.is_awaited(found):
        await store.answers.wait(request.task_id, timeout_s=request.wait, ident=found.ident)
        found = await reads.get_process_task(store.database, request.task_id, found.ident)
    return found


@implements(ListProcessErrors)
async def _list_process_errors(store: Store, request: ListProcessErrors) -> ProcessErrorPage:
    return await search.list_process_error_groups(
        store.database, process_type=request.type, limit=request.limit, after=request.after
    )


@implements(ListProcessVersions)
async def _list_versions(store: Store, request: ListProcessVersions) -> VersionList:
    return VersionList(await list_versions(store.database, request.type))


@implements(ResumeProcess)
async def _resume_process(store: Store, request: ResumeProcess) -> ProcessRecord:
    return await _act(store, request, "resume")


@implements(StopProcess)
async def _stop_process(store: Store, request: StopProcess) -> ProcessRecord:
    return await _act(store, request, "stop")


@implements(RemoveProcess)
async def _remove_process(store: Store, request: RemoveProcess) -> ProcessRecord:
    return await _act(store, request, "remove")


async def _act(store: Store, which: OneProcess, act: Act) -> ProcessRecord:
    record, acted = await store.database.write(
        operations.aio_change,
        which.process_type,
        which.process_id,
        act,
        operator=store.operator,
        lease_s=store.enqueuer.default_lease_s,
    )
    for task_id in acted.told:
        store.answers.told(task_id)
    store.sent()
    return record


@implements(RepairProcesses)
async def _repair_many(store: Store, request: RepairProcesses) -> ProcessesChanged:
    change = ProcessChange(action="repair", args=request.args)
    return await _change_some(store, change, request.wanted(), request.limit, request.after)


@implements(ResumeProcesses)
async def _resume_many(store: Store, request: ResumeProcesses) -> ProcessesChanged:
    return await _change_some(store, ProcessChange(action="resume"), request.wanted(), request.limit, request.after)


async def _change_some(
    store: Store, change: ProcessChange, wanted: ProcessFilter, limit: int, after: After
) -> ProcessesChanged:
    check_wanted(wanted)
    check_between("limit", limit, 1, BATCH)
    changed = await store.database.write(
        operations.aio_change_some,
        change,
        wanted,
        operator=store.operator,
        lease_s=store.enqueuer.default_lease_s,
        limit=limit,
        after=after,
    )
    store.sent()
    return changed


@implements(WithdrawCall)
async def _withdraw(store: Store, request: WithdrawCall) -> ProcessAnswer:
    return await withdraw_task(store, request.task_id, request.ident)


@implements(ListSinks)
async def _list_sinks(store: Store, request: ListSinks) -> SinkList:  # noqa: ARG001 - it has no fields
    return SinkList(await deliveries.list_sinks(store.database))


@implements(ListDeliveries)
async def _list_deliveries(store: Store, request: ListDeliveries) -> HeldDeliveryPage:
    wanted = held_filter(request)
    return await deliveries.list_held(store.database, wanted, limit=request.limit, after=request.after)


@implements(ReleaseDeliveries)
async def _release(store: Store, request: ReleaseDeliveries) -> Released:
    lease_s = store.enqueuer.default_lease_s
    return await deliveries.release(store.database, held_filter(request), operator=store.operator, lease_s=lease_s)
