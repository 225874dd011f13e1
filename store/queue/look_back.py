"""Searches in the two logs that are never emptied, the log of errors and the operators' log, newest first (Q4, R2).

The searched values have no index, so a request reads at most `LOOKED` rows. It returns the matches and the position
where the next request continues: no reader makes the server scan a whole log.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final
from uuid import UUID

import attrs

from dataloader.jobs.failures import group_number
from dataloader.jobs.listings import MAX_PAGE
from dataloader.jobs.model import MAX_INT, check_between, check_text
from dataloader.jobs.page_cursor import BY_NUMBER, After
from dataloader.store.connection.bridge import Database
from dataloader.store.queue.failures import error_of
from dataloader.store.queue.reads import aio_read_page, audit_record

LOOKED: Final = 20_000
"""Maximum number of rows that one request reads."""

_ERRORS: Final = (
    "error_id, at, job_id, task, queue, attempt, worker, status::text AS status, error_group, error",
    "dl_errors",
    "error_id",
    "error",
)
_AUDIT: Final = ("audit_id, ts, actor, action, job_id, detail::text AS detail", "dl_audit", "audit_id", "detail")
_LOOK: Final = "SELECT {columns} FROM {table} WHERE {id} < $1 {bound} {where} ORDER BY {id} DESC LIMIT $2"
_FROM: Final = """
SELECT min({id}) FROM (SELECT {id} FROM {table} WHERE {id} < $1 ORDER BY {id} DESC LIMIT $2) AS looked_at
"""
_EARLIER: Final = "SELECT EXISTS (SELECT FROM {table} WHERE {id} < $1)"


@attrs.frozen
class Found:
    """Result of a search, latest first.

    Attributes:
        rows: the found rows.
        next: where the next request continues; None if there are no more rows.
        looked: whether the search stopped there because it had read `LOOKED` rows, not at the end of a page.
    """

    rows: list[Any]
    next: str | None
    looked: bool


async def search_errors(
    database: Database,
    *,
    task: str | None = None,
    queue: str | None = None,
    group: str | None = None,
    job_id: UUID | None = None,
    limit: int = 20,
    after: After = None,
) -> Found:
    """Return the latest failed runs: at most `limit` (1 to 1,000), after the cursor `after`. Raises `BadRequest`."""
    for name, text in (("task", task), ("queue", queue)):
        if text is not None:
            check_text(name, text, MAX_INT, empty=True)
    number = None if group is None else group_number("group", group)
    terms = {"task = ": task, "queue = ": queue, "error_group = ": number, "job_id = ": job_id}
    # Groups and jobs have an index.
    far = group is not None or job_id is not None
    found = await database.run(_aio_look_back, _ERRORS, terms, limit, after, far=far)
    return attrs.evolve(found, rows=list(map(error_of, found.rows)))


async def search_audit(
    database: Database,
    *,
    actor: str | None = None,
    action: str | None = None,
    job_id: UUID | None = None,
    begin: datetime | None = None,
    end: datetime | None = None,
    limit: int = 50,
    after: After = None,
) -> Found:
    """Return the latest actions of operators: at most `limit` (1 to 1,000), after `after`. Raises `BadRequest`.

    A page of long details has fewer rows, as in `list_audit`.
    """
    for name, text in (("actor", actor), ("action", action)):
        if text is not None:
            check_text(name, text, MAX_INT, empty=True)
    terms = {"actor = ": actor, "action = ": action, "job_id = ": job_id, "ts >= ": begin, "ts < ": end}
    found = await database.run(_aio_look_back, _AUDIT, terms, limit, after, far=False)
    return attrs.evolve(found, rows=[audit_record(row) for row in found.rows])


async def _aio_look_back(
    connection: Any,
    log: tuple[str, str, str, str],
    terms: Mapping[str, object],
    limit: int,
    after: After,
    *,
    far: bool,
) -> Found:
    check_between("limit", limit, 1, MAX_PAGE)
    columns, table, number, text = log
    before = 2**63 - 1 if after is None else BY_NUMBER.key(after)
    given = {term: value for term, value in terms.items() if value is not None}
    first = None
    if given and not far:
        first = await connection.fetchval(_FROM.format(table=table, id=number), before, LOOKED)
    where = "".join(f" AND {term}${place}" for place, term in enumerate(given, 3))
    bound = "" if first is None else f"AND {number} >= {int(first)}"
    sql = _LOOK.format(columns=columns, table=table, id=number, bound=bound, where=where)
    rows, is_more = await aio_read_page(connection, sql, (before, limit + 1, *given.values()), limit, texts=(text,))
    following = BY_NUMBER.text(rows[-1][number]) if is_more else None
    if following is not None or first is None:
        return Found(rows, following, looked=False)
    more = await connection.fetchval(_EARLIER.format(table=table, id=number), first)
    return Found(rows, BY_NUMBER.text(first) if more else None, looked=more)
