"""Pages of queues, workers and task types by name, with cursors that reveal no secret contained in a name (Q16).

A page begins behind the name of the last row of the former page, and the cursor contains this name. If the name has a
secret in it, or is longer than names of queues may be, the cursor contains its SHA-256, and the row with this hash is
searched.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.listings import MAX_PAGE, QueuePage, WorkerPage
from dataloader.jobs.model import MAX_NAME, check_between
from dataloader.jobs.page_cursor import BY_NAME, After
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.task_listings import TaskPage
from dataloader.store.connection.bridge import Database
from dataloader.store.limits.limit_reads import aio_task_states
from dataloader.store.queue.reads import QUEUES, list_queues, list_workers
from dataloader.store.queue.worker_rows import ALIVE_WITHIN_S

_DIGEST: Final = "sha256:"

_QUEUE_OF_DIGEST: Final = f"""
SELECT queue FROM ({QUEUES}) AS queues WHERE encode(sha256(convert_to(queue, 'UTF8')), 'hex') = $2
"""
_WORKER_OF_DIGEST: Final = """
SELECT worker FROM dl_workers
WHERE seen_at > now() - make_interval(secs => $1) AND encode(sha256(convert_to(worker, 'UTF8')), 'hex') = $2
"""

_TASK_OF_DIGEST: Final = """
SELECT task FROM dl_tasks WHERE $1::float8 > 0 AND encode(sha256(convert_to(task, 'UTF8')), 'hex') = $2
"""


async def page_of_queues(database: Database, *, limit: int = 200, after: After = None) -> QueuePage:
    """Return at most `limit` (1 to 1,000) queues by name, after the cursor `after`.

    Raises `BadRequest` if `limit` is not allowed, or if the queue at `after` does not exist any more.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    queues = await list_queues(database, limit=limit + 1, after=await _name_at(database, after, _QUEUE_OF_DIGEST))
    return QueuePage(*BY_NAME.page(queues, limit, lambda queue: _place_of_name(queue.queue)))


async def page_of_workers(database: Database, *, limit: int = MAX_PAGE, after: After = None) -> WorkerPage:
    """Return at most `limit` (1 to 1,000) workers by name, after the cursor `after`.

    Raises the errors of `page_of_queues`.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    behind = await _name_at(database, after, _WORKER_OF_DIGEST)
    workers = await list_workers(database, limit=limit + 1, after=behind or "")
    return WorkerPage(*BY_NAME.page(workers, limit, lambda worker: _place_of_name(worker.worker)))


async def page_of_tasks(database: Database, *, limit: int = 200, after: After = None) -> TaskPage:
    """Return at most `limit` (1 to 1,000) task types by name, after the cursor `after`.

    Raises the errors of `page_of_queues`.
    """
    check_between("limit", limit, 1, MAX_PAGE)
    behind = await _name_at(database, after, _TASK_OF_DIGEST)
    tasks = await database.run(aio_task_states, behind or "", limit + 1)
    return TaskPage(*BY_NAME.page(tasks, limit, lambda task: _place_of_name(task.task)))


def _place_of_name(name: str) -> str:
    """Return the text for a name in a cursor."""
    shows_itself = len(name) <= MAX_NAME and mask_text(name) == name and not name.startswith(_DIGEST)
    return name if shows_itself else _DIGEST + sha256(name.encode()).hexdigest()


async def _name_at(database: Database, after: After, sql: str) -> str | None:
    """Return the name at the place `after`."""
    if after is None:
        return None
    place = BY_NAME.key(after)
    if not place.startswith(_DIGEST):
        return place
    name: str | None = await database.run(_aio_of_digest, sql, place.removeprefix(_DIGEST))
    if name is None:
        raise BadRequest("after", f"refers to a row that no longer exists, {str(after)!r:.80}; list from the beginning")
    return name


async def _aio_of_digest(connection: Any, sql: str, digest: str) -> str | None:
    name: str | None = await connection.fetchval(sql, ALIVE_WITHIN_S, digest)
    return name
