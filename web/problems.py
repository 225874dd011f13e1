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
    "invalid-request": "Fields of the request are invalid, missing or unknown; `errors` lists them.",
    "no-json": "The request body is not JSON.",
    "idempotency-conflict": "The idempotency key was used for another request. Use a new key.",
    "not-allowed-now": "Not allowed in the status of the job or process. Fetch it again, then retry if still needed.",
    "history-changed": "The database was restored, and another task has this number now. Send the request again.",
    "in-use": "The resource is in use. `detail` names its users, and what to do first.",
    "too-many-waits": "Too many requests wait for a change. Retry later, or without `wait`.",
    "too-many-wrong-tokens": "Your address has sent too many invalid API tokens. Send a valid one after `Retry-After`.",
    "too-busy": "A limit of this server is reached. Retry after `Retry-After`.",
    "draining": "This process is shutting down. Retry on another replica.",
    "store-unavailable": "The database is unreachable, too slow or not ready. Retry after `Retry-After`.",
}
"""Kinds of problems, and what a client can do about each. `GET /problems/KIND` shows it."""
ADDRESS: Final = "/problems/"
BLANK: Final = "about:blank"
MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER_S: Final = 5
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


class FieldError(msgspec.Struct, frozen=True):
    """Invalid part of the request: its path (`jobs[3].priority`), and what is allowed there."""

    path: Annotated[str, about("Path of the field, such as `jobs[3].priority`.")]
    message: Annotated[str, about("Allowed values.")]


class Problem(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Body of every error. `type` is `about:blank`, or the address of a kind that is more specific than the status."""

    type: Annotated[str, about("Address of the page about this kind of problem, or `about:blank`.")]
    title: Annotated[str, about("Name of the HTTP status.")]
    status: Annotated[int, about("HTTP status of the response.")]
    detail: Annotated[str, about("Cause, and what the client can do.")]
    request_id: Annotated[str, about("ID of the request, as in the logs.")]
    instance: Annotated[str | None, about("Path of the request.")] = None
    errors: Annotated[tuple[FieldError, ...], about("Invalid fields of the request.")] = ()
    job_id: Annotated[str | None, about("Conflicts: ID of the job.")] = None
    job_status: Annotated[str | None, about("Conflicts: status of the job.")] = None
    process_type: Annotated[str | None, about("Conflicts: type of the process.")] = None
    process_id: Annotated[str | None, about("Conflicts: ID of the process.")] = None
    process_status: Annotated[str | None, about("Conflicts: status of the process.")] = None
    task_id: Annotated[str | None, about("Conflicts: ID of the process task that has the key.")] = None
    idempotency_key: Annotated[str | None, about("Conflicts: idempotency key that another request has used.")] = None


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
            return unavailable("This process is still starting; try again.", "store-unavailable")
        case SchemaError():
            # For example if the database was recreated. The claims log the cause, give up, and end the process.
            detail = "The tables of the queue are missing or too old; an operator must run `dataloader migrate`."
            return unavailable(detail, "store-unavailable")
        case BadRequest():
            return unprocessable([FieldError(error.field, error.message)])
        case JobNotFound():
            return ProblemError(
                HTTPStatus.NOT_FOUND, "No job has this ID: it never existed, or retention has deleted it."
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
            return unavailable(
                "This process is shutting down and accepts no new jobs; use another replica.", "draining"
            )
        case Unstorable():
            return ProblemError(HTTPStatus.UNPROCESSABLE_ENTITY, "The database cannot store a value of this request.")
        case StoreUnavailable() | trio.TooSlowError():
            return unavailable("The database is unreachable or too slow; try again.", "store-unavailable")
        case HTTPException(code=int(code)):
            return _of_http(error, HTTPStatus(code))
        case _:
            return None


def _of_http(error: HTTPException, status: HTTPStatus) -> ProblemError:
    if isinstance(error, MethodNotAllowed) and error.valid_methods:
        allowed = ", ".join(sorted(error.valid_methods))
        return ProblemError(status, f"This address only allows {allowed}.", headers={"Allow": allowed})
    if status is HTTPStatus.NOT_FOUND:
        return ProblemError(
            status,
            "There is nothing at this address. The pages are at /ui, the API is described at /docs and /openapi.json.",
        )
    return ProblemError(status, error.description or status.description)
