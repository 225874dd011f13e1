"""`Performer` through a running service, over its HTTP API: on asyncio and on Trio, without a database driver.

A service masks secrets in names, args, results and errors. It adds at most 1,000 jobs in one request, and rejects a
body that is longer than its settings allow (`BadRequest`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import anyio
import attrs
import msgspec

from dataloader.jobs.contract import Operator
from dataloader.jobs.errors import ConfigError, StoreError
from dataloader.jobs.json_values import args_json
from dataloader.jobs.model import Enqueued, JobRecord, NewJob
from dataloader.jobs.operations.jobs import CancelJob, GetJob, RetryJob, RunJobNow
from dataloader.jobs.operations.operation import Operation
from dataloader.jobs.operations.performer import Performer
from dataloader.jobs.operations.processes import ShowProcess, ShowProcessTask, WithdrawCall
from dataloader.jobs.process_listings import ProcessAnswer, ProcessRecord
from dataloader.jobs.process_requests import ProcessImport, ProcessRequest, ProcessStarted
from dataloader.web import http_requests
from dataloader.web.service_connection import ANSWER_S, ServiceBusy, ServiceConnection

R = TypeVar("R")

LONG_POLL_S: Final = 25.0
"""Seconds for which the service may hold a request until a change; shorter than the timeouts of proxies."""
QUEUED_POLL_S: Final = 5.0
"""The same for a queued job, since a change of its `queue_state` does not end the request."""
WITHDRAW_S: Final = 5.0
"""Seconds in which the call of a cancelled caller is withdrawn."""
LATE_S: Final = 5.0
"""Additional seconds after an operation's deadline for the answer to arrive."""
_STATUS_ANSWERS: Final = (CancelJob, RetryJob, RunJobNow)
"""Operations of the queue document that are answered only with the job's status."""


@attrs.frozen
class HttpPerformer(Performer):
    """Performer of operations through a service."""

    service: ServiceConnection

    def signed(self, operator: Operator) -> HttpPerformer:
        """Raise `ConfigError`: the API token names the operator."""
        raise ConfigError(
            f"operator: {operator.name!r} cannot be set through a service; the token determines the operator"
        )

    async def perform(self, operation: Operation[R]) -> R:
        """Perform an operation, as `Performer.perform` describes."""
        operation.declaration.check(operation)
        if isinstance(operation, _STATUS_ANSWERS):
            await self._send(operation, dict)
            answer: Any = await self.perform(GetJob(operation.job_id))
        elif isinstance(operation, ShowProcess | ShowProcessTask):
            answer = await self._wait(operation)
        else:
            answer = await self._send(operation, operation.declaration.result)
        return answer  # type: ignore[no-any-return]

    async def enqueue(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        """Add jobs, as `Performer.enqueue` describes; at most 1,000."""
        if not jobs:
            return []
        requests = [
            _request(job, f"jobs[{number}].args" if len(jobs) > 1 else "args") for number, job in enumerate(jobs)
        ]
        if len(requests) == 1:
            return [await self.service.ask(Enqueued, "POST", "/jobs/trigger", body=requests[0])]
        body = {"jobs": requests}
        return (await self.service.ask(_Triggered, "POST", "/jobs/trigger/batch", body=body)).jobs

    async def changed_job(self, job: JobRecord, *, with_queue: bool) -> JobRecord:
        """Wait as `Performer.changed_job` describes.

        If too many requests wait at the service, return after a few seconds.
        """
        hold_s = QUEUED_POLL_S if with_queue else LONG_POLL_S
        try:
            await self.service.ask(
                dict, "GET", f"/jobs/{job.job_id}/status", params={"wait": hold_s}, timeout_s=hold_s + ANSWER_S
            )
        except ServiceBusy as busy:
            await anyio.sleep(busy.again_s)
        return await self.perform(GetJob(job.job_id))

    async def ask(self, request: ProcessRequest, *, wait_s: float, withdraw: bool) -> ProcessAnswer:
        """Send a request, as `Performer.ask` describes.

        If the caller is cancelled before the service returns the task, the task stays.
        """
        until = anyio.current_time() + wait_s
        # A call that may be withdrawn is sent without a wait, so that its task is known.
        answer = await http_requests.post_request(self.service, request, 0.0 if withdraw else min(wait_s, LONG_POLL_S))
        try:
            left_s = until - anyio.current_time()
            if not answer.is_answered and left_s > 0:
                answer = (await self.perform(ShowProcessTask(answer.task_id, left_s, answer.ident))).answer
            if withdraw and not answer.is_answered:
                answer = await self.perform(WithdrawCall(answer.task_id, answer.ident))
        except BaseException:
            if withdraw:
                with anyio.move_on_after(WITHDRAW_S, shield=True), suppress(StoreError):
                    await self.perform(WithdrawCall(answer.task_id, answer.ident))
            raise
        return answer

    async def start_many(self, requests: Sequence[ProcessRequest]) -> list[ProcessStarted]:
        """Start processes, all of one type, as `Performer.start_many` describes."""
        return await http_requests.post_starts(self.service, requests)

    async def put(self, process: ProcessImport) -> ProcessRecord:
        """Import a process, as `Performer.put` describes."""
        return await http_requests.post_import(self.service, process)

    async def _wait(self, operation: ShowProcess | ShowProcessTask) -> Any:
        """Wait in requests that proxies do not cut off. If too many wait at the service, ask again later."""
        until = anyio.current_time() + operation.wait
        while True:
            left_s = max(until - anyio.current_time(), 0.0)
            part = msgspec.structs.replace(operation, wait=min(left_s, LONG_POLL_S))
            kind = operation.declaration.result
            try:
                answer = await self._send(part, kind, timeout_s=part.wait + ANSWER_S)
            except ServiceBusy as busy:
                await anyio.sleep(min(busy.again_s, part.wait))
                answer = await self._send(msgspec.structs.replace(part, wait=0.0), kind, timeout_s=ANSWER_S)
            if left_s <= 0 or not operation.is_awaited(answer):
                return answer
            if isinstance(operation, ShowProcessTask):
                operation = msgspec.structs.replace(operation, ident=answer.ident)

    async def _send(self, operation: Operation[Any], kind: Any, *, timeout_s: float | None = None) -> Any:
        declaration = operation.declaration
        if timeout_s is None:
            timeout_s = ANSWER_S if declaration.deadline_s is None else declaration.deadline_s + LATE_S
        fields = declaration.fields(operation) if declaration.request is not None else None
        return await self.service.ask(
            kind,
            declaration.method,
            declaration.address(operation),
            params=fields if declaration.in_query else None,
            body=None if declaration.in_query else fields,
            timeout_s=timeout_s,
            missing=declaration.not_found,
        )


class _Triggered(msgspec.Struct):
    jobs: list[Enqueued]


def _request(job: NewJob, field: str) -> dict[str, Any]:
    """Return the job in the form of the API; `field` is the path of its arguments."""
    given = {name: value for name, value in attrs.asdict(job, recurse=False).items() if value not in (None, "", {})}
    args = msgspec.Raw(args_json(field, job.args).encode())
    if job.after is None:
        del given["when_failed"]
    return {"lock_key": None} | given | {"args": args}
