"""The client that speaks with a running service by its HTTP API: the command line's way with `--url`.

Answers become the same records as from the database, and problems (RFC 9457) the same errors, so that a command doesn't
know which client it has. Nothing is sent a second time: whether a request without an answer took effect is unknown.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, Final, TypeVar
from urllib.parse import quote
from uuid import UUID

import attrs
import httpx2
import msgspec

from dataloader.jobs.errors import BadRequest, ConfigError, Conflict, DataloaderError, JobNotFound, StoreUnavailable
from dataloader.jobs.listings import AuditRecord, JobFilter, JobPage, Level, LogPage
from dataloader.jobs.model import Enqueued, JobEvent, JobRecord, NewJob, QueueRecord, WorkerRecord
from dataloader.jobs.page_cursor import After
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.states import Status
from dataloader.store.etl.run_records import FailureLine, LoadNotFound, LoadPage, LoadRecord, RunNotFound
from dataloader.supervisor.client import BULK, MANY_AGAIN, Client, repeat_bulk
from dataloader.supervisor.setting_kinds import is_loopback

T = TypeVar("T")

ANSWER_S: Final = 30.0
"""Seconds for an answer: as long as a statement may take by default."""
LONG_POLL_S: Final = 25.0
"""Seconds that the service may hold a question for a change: below what proxies cut off."""
QUEUED_POLL_S: Final = 5.0
"""The same for a queued job: how its queue stands is no change of the job that the service would tell."""


@asynccontextmanager
async def open_http_client(url: str, token: str | None) -> AsyncIterator[Client]:
    """A client of the service at `url`, such as `http://127.0.0.1:8080`, for the length of a block.

    Raises `ConfigError` for another kind of address.
    """
    try:
        address = httpx2.URL(url.rstrip("/"))
    except httpx2.InvalidURL:
        address = httpx2.URL("")
    if address.scheme not in {"http", "https"} or not address.host:
        raise ConfigError(f"--url: must be an address such as http://127.0.0.1:8080, not {mask_text(url)!r}")
    if token and not token.isascii():
        raise ConfigError("--token: must be letters, digits and signs of ASCII only")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = httpx2.Timeout(ANSWER_S, connect=10.0)
    # A proxy of the environment is for what is elsewhere, and would be told the token.
    is_here = is_loopback(address.host)
    # With the authorities that the environment names.
    verify = httpx2.create_ssl_context()
    async with httpx2.AsyncClient(
        base_url=f"{address}/api/v1", headers=headers, timeout=timeout, verify=verify, trust_env=not is_here
    ) as connection:
        yield HttpClient(connection, mask_text(str(address)))


def _reason(error: BaseException) -> str:
    """What an error says, or what it comes from: that of a handshake says nothing itself."""
    name = type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if str(cause):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return name


@attrs.frozen
class _QueuePage:
    queues: list[QueueRecord]
    next: str | None = None


@attrs.frozen
class HttpClient(Client):
    """A queue, by a service that serves it."""

    connection: httpx2.AsyncClient
    shown_url: str

    async def trigger(self, job: NewJob) -> Enqueued:
        request = {name: value for name, value in attrs.asdict(job).items() if value not in (None, "", {})}
        del request["job_id"]
        # The API wants a key (Q2): one that excludes no other job, and is the same when the request is repeated.
        request.setdefault("lock_key", job.idempotency_key or str(job.job_id))
        return await self._ask(Enqueued, "POST", "/jobs/trigger", body=request)

    async def job(self, job_id: UUID) -> JobRecord:
        return await self._ask(JobRecord, "GET", f"/jobs/{job_id}")

    async def change(self, seen: JobRecord) -> JobRecord:
        wait = {"wait": QUEUED_POLL_S if seen.status is Status.QUEUED else LONG_POLL_S}
        await self._ask(dict, "GET", f"/jobs/{seen.job_id}/status", params=wait, timeout=LONG_POLL_S + ANSWER_S)
        return await self.job(seen.job_id)

    async def jobs(self, wanted: JobFilter, *, limit: int, after: str | None) -> JobPage:
        page = {"limit": limit} if after is None else {"limit": limit, "after": after}
        return await self._ask(JobPage, "GET", "/jobs", params=_criteria(wanted) | page)

    async def events(self, job_id: UUID, *, after: int, limit: int) -> list[JobEvent]:
        page = {"after": after, "limit": limit}
        return await self._list(JobEvent, "events", f"/jobs/{job_id}/events", params=page)

    async def logs(
        self, job_id: UUID, *, after: After, limit: int, level: Level | None = None, load: str | None = None
    ) -> LogPage:
        wanted = {"after": after, "limit": limit, "level": level, "load": load}
        given = {name: value for name, value in wanted.items() if value is not None}
        return await self._ask(LogPage, "GET", f"/jobs/{job_id}/logs", params=given)

    async def cancel(self, job_id: UUID) -> JobRecord:
        await self._ask(dict, "POST", f"/jobs/{job_id}/cancel")
        return await self.job(job_id)

    async def retry(self, job_id: UUID, *, force: bool = False) -> JobRecord:
        await self._ask(dict, "POST", f"/jobs/{job_id}/retry", params={"force": "true"} if force else {})
        return await self.job(job_id)

    async def cancel_many(self, wanted: JobFilter) -> int:
        return await repeat_bulk(partial(self._bulk, "/jobs/cancel", wanted), least=1)

    async def retry_many(self, wanted: JobFilter) -> int:
        return await repeat_bulk(partial(self._bulk, "/jobs/retry", wanted), least=MANY_AGAIN)

    async def queues(self) -> list[QueueRecord]:
        found: list[QueueRecord] = []
        after: dict[str, str] = {}
        while True:
            page = await self._ask(_QueuePage, "GET", "/queues", params=after)
            found += page.queues
            if page.next is None:
                return found
            after = {"after": page.next}

    async def pause(self, queue: str) -> None:
        await self._ask(dict, "POST", f"/queues/{_segment(queue)}/pause")

    async def resume(self, queue: str) -> None:
        await self._ask(dict, "POST", f"/queues/{_segment(queue)}/resume")

    async def workers(self) -> list[WorkerRecord]:
        return await self._list(WorkerRecord, "workers", "/workers")

    async def audit(self, *, limit: int, before: int | None) -> list[AuditRecord]:
        page = {"limit": limit} if before is None else {"limit": limit, "before": before}
        return await self._list(AuditRecord, "audit", "/audit", params=page)

    async def loads(self, *, limit: int, after: str | None) -> LoadPage:
        page = {"limit": limit} if after is None else {"limit": limit, "after": after}
        return await self._ask(LoadPage, "GET", "/loads", params=page)

    async def load(self, name: str) -> LoadRecord:
        return await self._ask(LoadRecord, "GET", f"/loads/{_segment(name)}")

    async def failures_of_run(self, run_id: UUID, *, after: int, limit: int) -> list[FailureLine]:
        page = {"after": after, "limit": limit}
        return await self._list(FailureLine, "failures", f"/runs/{run_id}/failures", params=page)

    async def failures_of_load(self, name: str, *, after: int, limit: int) -> list[FailureLine]:
        page = {"after": after, "limit": limit}
        return await self._list(FailureLine, "failures", f"/loads/{_segment(name)}/failures", params=page)

    async def _bulk(self, path: str, wanted: JobFilter) -> int:
        answer = await self._ask(dict[str, int], "POST", path, body=_criteria(wanted) | {"limit": BULK})
        return answer["changed"]

    async def _list(self, kind: type[T], name: str, path: str, **request: Any) -> list[T]:
        """The records under `name` in an answer."""
        answer = await self._ask(dict[str, msgspec.Raw], "GET", path, **request)
        found: list[T] = msgspec.json.decode(answer[name], type=list[kind])  # type: ignore[valid-type]
        return found

    async def _ask(self, kind: type[T], method: str, path: str, *, body: object = None, **request: Any) -> T:
        """The answer to one request, as `kind`; another status than a good one is raised as our error."""
        if body is not None:
            request |= {"content": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}
        try:
            answer = await self.connection.request(method, path, **request)
        except httpx2.TransportError as error:
            reason = _reason(error)
            raise StoreUnavailable(f"no answer from {self.shown_url}: {mask_text(reason)}") from error
        if not answer.is_success:
            raise self._error(answer)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            message = f"{self.shown_url} answers {method} {path} in an unknown way: {error}; is it another version?"
            raise DataloaderError(message) from error

    def _error(self, answer: httpx2.Response) -> DataloaderError:
        """Our error for an answer that is none, from its problem document if it has one."""
        try:
            problem = msgspec.json.decode(answer.content, type=dict[str, Any])
        except msgspec.DecodeError:
            problem = {}
        detail = str(problem.get("detail") or f"{answer.status_code} {answer.reason_phrase}")
        room, _, name = answer.request.url.path.removeprefix(self.connection.base_url.path).partition("/")
        match answer.status_code:
            case HTTPStatus.NOT_FOUND if problem and room in _NOT_FOUND:
                # Of several jobs, which one is missing: as the database says it.
                is_job = room == "jobs"
                return _NOT_FOUND[room](f"no job has the id {name.partition('/')[0]}" if is_job else detail.rstrip("."))
            case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
                return ConfigError(f"--token: {self.shown_url} refuses it: {detail}")
            case HTTPStatus.UNPROCESSABLE_ENTITY if problem.get("errors"):
                first = problem["errors"][0]
                return BadRequest(str(first.get("path")), str(first.get("message")))
            case HTTPStatus.CONFLICT if problem.get("type") == "not-allowed-now":
                return Conflict.told(detail.removesuffix("."))
            # What a proxy says of a service that restarts.
            case HTTPStatus.SERVICE_UNAVAILABLE | HTTPStatus.BAD_GATEWAY | HTTPStatus.GATEWAY_TIMEOUT:
                return StoreUnavailable(f"{self.shown_url}: {detail}")
            case _:
                return DataloaderError(f"{self.shown_url}: {detail}")


_NOT_FOUND: Final = {"jobs": JobNotFound, "runs": RunNotFound, "loads": LoadNotFound}
"""What is missing where a path's first word leads."""


def _criteria(wanted: JobFilter) -> dict[str, Any]:
    """The filter as the API takes it, in a query and in a body."""
    chosen = {name: value for name, value in attrs.asdict(wanted).items() if value is not None}
    return msgspec.to_builtins(chosen)  # type: ignore[no-any-return]


def _segment(text: str) -> str:
    """`text` as one segment of a path, whatever is in it."""
    return quote(text, safe="")
