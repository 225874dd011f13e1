"""All errors for HTTP clients in one form: RFC 9457's `application/problem+json`.

Views and the domain raise errors; routes.py converts them into a `Problem` by the table here. A problem says what the
client can do. It never contains SQL, a DSN, a host name or a traceback. An unexpected error is a 500 with the request's
ID, under which the log has the details.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Annotated, Final

import msgspec
import trio
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from dataloader.jobs.errors import (
    BadRequest,
    Conflict,
    Draining,
    IdempotencyConflict,
    InUse,
    JobNotFound,
    NotFound,
    SchemaError,
    StoreUnavailable,
    Unstorable,
)
from dataloader.jobs.model import about
from dataloader.jobs.processes import HistoryChanged, ProcessConflict
from dataloader.jobs.secrets.masking import mask_text

PROBLEMS: Final = {
    "invalid-request": "Fields of the request are wrong, missing or unknown; `errors` names each of them.",
    "no-json": "The body is not JSON.",
    "idempotency-conflict": "The idempotency key was used before, for another request. Use a new key.",
    "not-allowed-now": "The status of the job or the process does not allow it. Read it and decide again.",
    "history-changed": "The database was restored: the task's number is another task's now. Ask for it again.",
    "in-use": "Others need it. The detail names them, and what to do first.",
    "too-many-waits": "Too many requests wait for a change. Ask again later, or without `wait`.",
    "too-many-wrong-tokens": "Your address has sent too many wrong API tokens. Send a right one after `Retry-After`.",
    "too-busy": "A limit of this server is reached. Send the request again after `Retry-After`.",
    "draining": "This process is shutting down. Ask another replica.",
    "store-unavailable": "The database can't be reached, is too slow or not ready. Send it again after `Retry-After`.",
}
"""Kinds of problems, and what a client can do about each. `GET /problems/KIND` shows it."""
ADDRESS: Final = "/problems/"
BLANK: Final = "about:blank"
MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 5
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class FieldError(msgspec.Struct, frozen=True):
    """Invalid part of the request: its path (`jobs[3].priority`), and what is allowed there."""

    path: Annotated[str, about("Where it is, such as `jobs[3].priority`.")]
    message: Annotated[str, about("What is allowed there.")]


class Problem(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Body of every error. `type` is `about:blank`, or the address of a kind that is more specific than the status."""

    type: Annotated[str, about("The address of the page on this kind of problem, or `about:blank`.")]
    title: Annotated[str, about("The status's name.")]
    status: Annotated[int, about("The status of the answer.")]
    detail: Annotated[str, about("What is wrong, and what the client can do.")]
    request_id: Annotated[str, about("The request's id, as in the logs.")]
    instance: Annotated[str | None, about("The request's path.")] = None
    errors: Annotated[tuple[FieldError, ...], about("The invalid fields of the request.")] = ()
    job_id: Annotated[str | None, about("Of a conflict: the job.")] = None
    job_status: Annotated[str | None, about("Of a conflict: the job's status.")] = None
    process_type: Annotated[str | None, about("Of a conflict: the type of the process.")] = None
    process_id: Annotated[str | None, about("Of a conflict: the process.")] = None
    process_status: Annotated[str | None, about("Of a conflict: the process's status.")] = None
    task_id: Annotated[str | None, about("Of a conflict: the task of a process that has the key.")] = None
    idempotency_key: Annotated[str | None, about("Of a conflict: the key that another request has used.")] = None


class ProblemError(Exception):
    """Raised by web code to answer with a problem."""

    def __init__(
        self,
        status: HTTPStatus,
        detail: str,
        *,
        kind: str = BLANK,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] = _NONE,
        conflict: Mapping[str, str] = _NONE,
    ) -> None:
        """Create the error. `kind` is one of `PROBLEMS`, if the status is not specific enough.

        `errors` has the bad fields of a 422, and `conflict` the fields of a conflict.
        """
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.kind = kind
        self.errors = tuple(errors)
        self.headers = headers
        self.conflict = conflict

    def problem(self, request_id: str, instance: str) -> Problem:
        """Return the body of the answer. `instance` is the request's path."""
        return Problem(
            type=self.kind if self.kind == BLANK else ADDRESS + self.kind,
            title=self.status.phrase,
            status=self.status,
            detail=mask_text(self.detail),
            request_id=request_id,
            instance=mask_text(instance),
            errors=tuple(FieldError(mask_text(error.path), mask_text(error.message)) for error in self.errors),
            **{name: mask_text(value) for name, value in self.conflict.items()},
        )


def unprocessable(errors: Sequence[FieldError]) -> ProblemError:
    """Return one 422 that names all invalid fields."""
    names = ", ".join(error.path for error in errors[:5]) + (", …" if len(errors) > 5 else "")
    detail = f"Invalid fields: {names}. See errors for the allowed values."
    return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, detail, kind="invalid-request", errors=errors)


def unavailable(detail: str, kind: str) -> ProblemError:
    """Return a 503 for a temporary condition, with `Retry-After`."""
    return ProblemError(HTTPStatus.SERVICE_UNAVAILABLE, detail, kind=kind, headers={"Retry-After": str(RETRY_AFTER_S)})


def too_busy(detail: str, *, headers: Mapping[str, str] = _NONE) -> ProblemError:
    """Return a 503 because of the current load by other clients."""
    problem = unavailable(detail, "too-busy")
    problem.headers = {**problem.headers, **headers}
    return problem


def problem_of(error: Exception, *, starting: bool = False) -> ProblemError | None:  # noqa: C901, PLR0911, PLR0912 - a table
    """Return the answer to an error of ours or of Quart's, or None for an unexpected one.

    While this process is `starting`, its tables are being created and its tasks, with their queues, are not stored yet.
    """
    match error:
        case ProblemError():
            return error
        case SchemaError() | BadRequest(field="queue") if starting:
            return unavailable("This process has not finished its start; try again.", "store-unavailable")
        case SchemaError():
            # For example if the database was recreated. The claims log the cause, give up, and end the process.
            detail = "The tables of the queue are missing or too old; an operator must run `dataloader migrate`."
            return unavailable(detail, "store-unavailable")
        case BadRequest():
            return unprocessable([FieldError(error.field, error.message)])
        case JobNotFound():
            return ProblemError(
                HTTPStatus.NOT_FOUND, "No job has this id: it never existed, or was deleted after its time."
            )
        case HistoryChanged():
            return ProblemError(HTTPStatus.NOT_FOUND, f"{error}.", kind="history-changed")
        case NotFound():
            return ProblemError(HTTPStatus.NOT_FOUND, f"{error}.")
        case IdempotencyConflict():
            owner = ("job_id", error.job_id) if error.task_id is None else ("task_id", error.task_id)
            conflict = {owner[0]: str(owner[1]), "idempotency_key": error.key}
            return ProblemError(HTTPStatus.CONFLICT, f"{error}.", kind="idempotency-conflict", conflict=conflict)
        case ProcessConflict():
            conflict = {"process_type": error.process_type, "process_id": error.process_id}
            conflict |= {"process_status": error.status}
            return ProblemError(HTTPStatus.CONFLICT, f"{error}.", kind="not-allowed-now", conflict=conflict)
        case Conflict():
            conflict = {"job_id": str(error.job_id), "job_status": error.status}
            return ProblemError(HTTPStatus.CONFLICT, f"{error}.", kind="not-allowed-now", conflict=conflict)
        case InUse():
            return ProblemError(HTTPStatus.CONFLICT, f"{error}.", kind="in-use")
        case Draining():
            return unavailable("This process is shutting down and takes no new jobs; ask another replica.", "draining")
        case Unstorable():
            return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "The database can't store a value of this request.")
        case StoreUnavailable() | trio.TooSlowError():
            return unavailable("The database can't be reached or is too slow; try again.", "store-unavailable")
        case HTTPException(code=int(code)):
            return _of_http(error, HTTPStatus(code))
        case _:
            return None


def _of_http(error: HTTPException, status: HTTPStatus) -> ProblemError:
    if isinstance(error, MethodNotAllowed) and error.valid_methods:
        allowed = ", ".join(sorted(error.valid_methods))
        return ProblemError(status, f"This address allows only {allowed}.", headers={"Allow": allowed})
    if status is HTTPStatus.NOT_FOUND:
        return ProblemError(status, "Nothing is at this address; /ui has the pages, /docs and /openapi.json the API.")
    return ProblemError(status, error.description or status.description)
