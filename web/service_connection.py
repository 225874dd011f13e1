"""Connection to a running service: answers are decoded as the domain's records, problems raised as our errors.

It works on Trio and on asyncio. No request is sent a second time, since it is unknown whether a request without an
answer took effect.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, TypeVar
from uuid import UUID

import attrs
import httpx2
import msgspec

from dataloader.jobs.errors import (
    AccessDenied,
    BadRequest,
    ConfigError,
    Conflict,
    DataloaderError,
    Draining,
    IdempotencyConflict,
    InUse,
    JobNotFound,
    StoreError,
    StoreUnavailable,
    Unstorable,
)
from dataloader.jobs.loopback import is_loopback
from dataloader.jobs.processes import HistoryChanged, ProcessConflict
from dataloader.jobs.secrets.masking import mask_text

T = TypeVar("T")

ANSWER_S: Final = 30.0
"""Seconds for an answer: the default limit of a statement."""
ASK_AGAIN_S: Final = 5.0
"""Seconds to wait after a refusal because of other clients' load, if the service names no time."""


class ServiceBusy(StoreUnavailable):
    """The service has too much load now. Requests may be sent again after `again_s` seconds."""

    def __init__(self, message: str, again_s: float) -> None:
        """Create the error; `again_s` is the service's value, or `ASK_AGAIN_S`."""
        super().__init__(message)
        self.again_s = again_s


@attrs.frozen
class ServiceConnection:
    """Service, and how to send it requests. `shown_url` is for messages."""

    client: httpx2.AsyncClient
    shown_url: str

    async def ask(
        self,
        kind: type[T],
        method: str,
        path: str,
        *,
        body: object = None,
        params: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
        missing: type[DataloaderError] | None = None,
    ) -> T:
        """Send one request and return its answer as `kind`. An error status is raised as our error.

        Args:
            kind: type as which the answer is decoded.
            method: HTTP method.
            path: path after `/api/v1`.
            body: sent as JSON, if it is given.
            params: the query; None values are left out.
            timeout_s: seconds for the answer.
            missing: the error for a 404; by default `JobNotFound` for paths below `/jobs`.
        """
        content = None if body is None else msgspec.json.encode(body)
        try:
            answer = await self.client.request(
                method,
                path,
                params={name: value for name, value in (params or {}).items() if value is not None},
                content=content,
                headers=None if body is None else {"Content-Type": "application/json"},
                timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, 10.0)),
            )
        except (httpx2.TransportError, UnicodeError) as error:  # UnicodeError: the name cannot be a host's
            raise StoreUnavailable(f"no answer from {self.shown_url}: {mask_text(_text_or_cause(error))}") from error
        if not answer.is_success:
            raise self._error(answer, missing)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            message = f"{self.shown_url} returned an unexpected answer to {method} {path}: {error}; check its version"
            raise DataloaderError(message) from error

    def _error(self, answer: httpx2.Response, missing: type[DataloaderError] | None) -> DataloaderError:  # noqa: C901, PLR0911, PLR0912 - a table
        """Return our error for an error answer, from its problem document if it has one."""
        problem = _Problem.of(answer)
        detail = problem.detail or f"{answer.status_code} {answer.reason_phrase}"
        said = detail.removesuffix(".")
        path = answer.request.url.path.removeprefix(self.client.base_url.path).strip("/").split("/")
        match answer.status_code, problem.kind:
            case HTTPStatus.NOT_FOUND, "history-changed":
                return HistoryChanged(said)
            case HTTPStatus.NOT_FOUND, str() if path[0] == "jobs" and missing in {None, JobNotFound}:
                return JobNotFound(f"no job has the ID {path[1]}")  # the same text as from the database
            case HTTPStatus.NOT_FOUND, str() if missing is not None:
                return missing(said)
            case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN, _ if "Authorization" in answer.request.headers:
                return AccessDenied(f"token: rejected by {self.shown_url}: {detail}")
            case HTTPStatus.UNAUTHORIZED, _:
                return AccessDenied(f"token: is required by {self.shown_url}")
            case HTTPStatus.FORBIDDEN, _:
                return AccessDenied(f"url: rejected by {self.shown_url}: {detail}")
            case HTTPStatus.UNPROCESSABLE_ENTITY, _ if problem.errors:
                return BadRequest(problem.errors[0].path, problem.errors[0].message)
            case HTTPStatus.UNPROCESSABLE_ENTITY, _:
                return Unstorable(said)
            case HTTPStatus.REQUEST_ENTITY_TOO_LARGE, _:
                return BadRequest("body", detail)
            case HTTPStatus.CONFLICT, "idempotency-conflict":
                task_id = None if problem.task_id is None else int(problem.task_id)
                return IdempotencyConflict(problem.idempotency_key or "", problem.job_id, task_id=task_id)
            case HTTPStatus.CONFLICT, "not-allowed-now" if problem.process_id is not None:
                kind, key, status = problem.process_type or "", problem.process_id, problem.process_status or ""
                return ProcessConflict(kind, key, status, said.removeprefix(f"the process {kind}/{key} is {status}; "))
            case HTTPStatus.CONFLICT, "not-allowed-now":
                begin = f"job {problem.job_id} is {problem.job_status}; "
                return Conflict(problem.job_id, problem.job_status or "", said.removeprefix(begin))
            case HTTPStatus.CONFLICT, "in-use":
                return InUse(said)
            case HTTPStatus.SERVICE_UNAVAILABLE, "draining":
                return Draining(f"{self.shown_url}: {detail}")
            case (HTTPStatus.TOO_MANY_REQUESTS, _) | (HTTPStatus.SERVICE_UNAVAILABLE, "too-busy"):
                return ServiceBusy(f"{self.shown_url}: {detail}", _again_s(answer))
            # Answers of a proxy while the service restarts.
            case HTTPStatus.SERVICE_UNAVAILABLE | HTTPStatus.BAD_GATEWAY | HTTPStatus.GATEWAY_TIMEOUT, _:
                return StoreUnavailable(f"{self.shown_url}: {detail}")
            case _:
                return StoreError(f"{self.shown_url}: {detail}")


class _FieldError(msgspec.Struct):
    path: str = ""
    message: str = ""


class _Problem(msgspec.Struct):
    """Fields that we read of a problem document. `type` is None without such a document."""

    type: str | None = None
    detail: str = ""
    errors: list[_FieldError] = []
    job_id: UUID | None = None
    job_status: str | None = None
    process_type: str | None = None
    process_id: str | None = None
    process_status: str | None = None
    task_id: str | None = None
    idempotency_key: str | None = None

    @property
    def kind(self) -> str | None:
        """Last word of the address `type`."""
        return None if self.type is None else self.type.rpartition("/")[2]

    @classmethod
    def of(cls, answer: httpx2.Response) -> _Problem:
        """Return the document of an answer, or an empty one for an answer of a proxy on the way to the service."""
        try:
            return msgspec.json.decode(answer.content, type=cls)
        except msgspec.DecodeError:
            return cls()


def _again_s(answer: httpx2.Response) -> float:
    try:
        after_s = float(answer.headers.get("Retry-After", ASK_AGAIN_S))
    except ValueError:
        return ASK_AGAIN_S
    return after_s if 0 <= after_s < math.inf else ASK_AGAIN_S


def _text_or_cause(error: BaseException) -> str:
    """Return the text of an error or of its cause: errors of a handshake have no text themselves."""
    name = type(error).__name__
    cause: BaseException | None = error
    while cause is not None:
        if str(cause):
            return str(cause)
        cause = cause.__cause__ or cause.__context__
    return name


@asynccontextmanager
async def open_service(url: str, token: str | None) -> AsyncIterator[ServiceConnection]:
    """Open a connection to the service at `url`, such as `http://127.0.0.1:8080`, for the duration of a block.

    It connects at the first request. Raises `ConfigError` for an invalid address or token.
    """
    try:
        address = httpx2.URL(url.rstrip("/"))
    except httpx2.InvalidURL:
        address = httpx2.URL("")
    is_base = address.scheme in {"http", "https"} and address.host and not address.query and not address.fragment
    if not is_base:
        raise ConfigError(f"url: must be an address such as http://127.0.0.1:8080, not {mask_text(url)!r}")
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError("token: must be printable ASCII without line breaks")
    if token and address.userinfo:
        raise ConfigError("token: cannot be used with an address that contains a user; remove one of them")
    async with httpx2.AsyncClient(
        base_url=f"{address}/api/v1",
        headers={"Authorization": f"Bearer {token}"} if token else {},
        # With the certificate authorities that the environment names.
        verify=httpx2.create_ssl_context(),
        # Never send a local service's token to a proxy.
        trust_env=not is_loopback(address.host),
    ) as client:
        yield ServiceConnection(client, mask_text(str(address)))
