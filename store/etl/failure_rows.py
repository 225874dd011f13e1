"""Records failures in a run of a load, so that the record of a failure is never lost by the failure itself.

Texts of sources reach the record: samples, keys, errors, addresses. `storable_text` and `storable_json` make them
storable. If the database refuses a row all the same, a note replaces it, and the caller's transaction continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

import asyncpg
import attrs

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.logger import get_logger
from dataloader.jobs.text import MAX_JSON, exact_json, storable_text
from dataloader.store.connection.driver_errors import said
from dataloader.store.connection.error_meanings import ErrorMeaning, meaning_of_error

log = get_logger(__name__)

MAX_REQUESTS: Final = 16 * MAX_JSON
"""Maximum size in bytes of the requests that are kept with a failure: those of a batch may be thousands."""

_INSERT: Final = """
INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error, sample, times, requests)
SELECT $1, load, segment, phase, key, error, sample, times, requests::jsonb
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::int[], $9::text[])
  AS f (load, segment, phase, key, error, sample, times, requests)
"""
_SAVEPOINT: Final = "dl_failures"


@attrs.frozen(kw_only=True)
class Failure:
    """Failure of a load: its phase (`request`, `detail`, `record`, `row`, `batch`, `segment`) and its error.

    `key` identifies it, such as an address or a record's key. `sample` is the beginning of the data. `requests` are
    those that load it again. `times` is the number that it counts as: a batch counts as its rows.
    """

    load: str
    segment: str
    phase: str
    key: str
    error: str
    sample: str | None = None
    requests: Sequence[Mapping[str, Any]] = ()
    times: int = 1


_Row = tuple[object, ...]


def _row_of_failure(failure: Failure) -> _Row:
    texts = (failure.load, failure.segment, failure.phase, failure.key, failure.error)
    sample = None if failure.sample is None else storable_text(failure.sample)
    return *map(storable_text, texts), sample, failure.times, _requests(failure)


def _requests(failure: Failure) -> str:
    """Return the requests as JSON; none if JSON would change them, because a changed request loads something else."""
    try:
        return exact_json("requests", list(failure.requests), MAX_REQUESTS)
    except BadRequest as error:
        log.warning("a failure cannot be retried alone", load=failure.load, segment=failure.segment, error=str(error))
        return "[]"


def _note(failure: Failure, refusal: BaseException) -> _Row:
    """Return the row that replaces a failure which the database refuses."""
    why = f"the database rejected the record of this failure: {storable_text(said(refusal), 500)}"
    return *map(storable_text, (failure.load, failure.segment, failure.phase)), "", why, None, failure.times, "[]"


async def aio_keep_failures(connection: Any, run_id: UUID, failures: Sequence[Failure]) -> None:
    """Record failures of a run (asyncio-flavored), in the caller's transaction.

    Never raises because of the content of a failure. Raises other errors, such as that of a lost connection.
    """
    if (
        not failures
        or await _aio_refusal(connection, run_id, [_row_of_failure(failure) for failure in failures]) is None
    ):
        return
    notes = []
    for failure in failures:
        refusal = await _aio_refusal(connection, run_id, [_row_of_failure(failure)])
        if refusal is not None:
            notes.append(_note(failure, refusal))
    if notes:
        refusal = await _aio_refusal(connection, run_id, notes)
        told = {"failures": len(notes), "are_noted": refusal is None, "run_id": str(run_id)}
        log.warning("the database rejected the records of failures", **told)


async def _aio_refusal(connection: Any, run_id: UUID, rows: Sequence[_Row]) -> BaseException | None:
    """Insert the rows. If the database refuses one of them, insert none and return the error."""
    await connection.execute(f"SAVEPOINT {_SAVEPOINT}")
    try:
        await connection.execute(_INSERT, run_id, *map(list, zip(*rows, strict=True)))
    except (asyncpg.PostgresError, UnicodeEncodeError) as error:
        if meaning_of_error(error) is not ErrorMeaning.BAD_VALUE:
            raise
        await connection.execute(f"ROLLBACK TO {_SAVEPOINT}; RELEASE {_SAVEPOINT}")
        return error
    await connection.execute(f"RELEASE {_SAVEPOINT}")
    return None
