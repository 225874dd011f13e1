"""Filter of a list of jobs in a page's address: parsing, display, and conversion to an address."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, tzinfo
from typing import Any, Final
from uuid import UUID

import attrs
from msgspec import Struct

from dataloader.jobs.errors import BadRequest
from dataloader.jobs.listings import JobFilter
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.states import Status

STATUSES: Final = (
    ("queued,running", "not ended"),
    *((str(status), str(status)) for status in Status),
    ("failed,lost", "failed or lost"),
)
"""Choices of the form: the value in the address, and its label."""
_LABELS: Final = {
    "status": "status", "queue": "queue", "task": "task", "key": "key", "worker": "worker", "args": "args",
    "from": "created from", "to": "created before", "finished_from": "ended from", "finished_to": "ended before",
    "schedule": "schedule", "error_group": "error group", "root": "job or group",
}  # fmt: skip


class JobChoice(Struct, forbid_unknown_fields=True, kw_only=True, rename={"from_": "from"}):
    """Filter of jobs; times without an offset are in the reader's time zone. `after` is the page's cursor."""

    status: frozenset[Status] | None = None
    queue: str | None = None
    task: str | None = None
    key: str | None = None
    worker: str | None = None
    args: str | None = None
    from_: str | None = None
    to: str | None = None
    finished_from: str | None = None
    finished_to: str | None = None
    schedule: str | None = None
    error_group: str | None = None
    root: UUID | None = None
    after: str | None = None

    def job_filter(self, tz: tzinfo) -> JobFilter:
        """Return the store's filter, without `args`. Raises `BadRequest`."""
        return JobFilter(
            status=self.status,
            queue=self.queue,
            task=self.task,
            lock_key=self.key,
            worker=self.worker,
            created_from=_instant_in_zone("from", self.from_, tz),
            created_to=_instant_in_zone("to", self.to, tz),
            finished_from=_instant_in_zone("finished_from", self.finished_from, tz),
            finished_to=_instant_in_zone("finished_to", self.finished_to, tz),
            schedule=self.schedule,
            error_group=self.error_group,
            root=self.root,
        )

    @property
    def given(self) -> dict[str, Any]:
        """Given values by their names in an address, without the cursor."""
        values = {
            "status": ",".join(sorted(self.status)) if self.status else None,
            "queue": self.queue,
            "task": self.task,
            "key": self.key,
            "worker": self.worker,
            "args": self.args,
            "from": self.from_,
            "to": self.to,
            "finished_from": self.finished_from,
            "finished_to": self.finished_to,
            "schedule": self.schedule,
            "error_group": self.error_group,
            "root": self.root,
        }
        return {name: value for name, value in values.items() if value is not None}

    @property
    def chips(self) -> Iterator[Chip]:
        """Criteria for display, without secrets."""
        for name, value in self.given.items():
            text = str(value).replace(",", " or ") if name == "status" else mask_text(str(value))
            yield Chip(name, _LABELS[name], text)


@attrs.frozen
class Chip:
    """Criterion: its name in the address, its label and its text."""

    name: str
    label: str
    text: str


def _instant_in_zone(name: str, text: str | None, tz: tzinfo) -> datetime | None:
    if text is None:
        return None
    try:
        instant = datetime.fromisoformat(text.strip())
    except ValueError as error:
        raise BadRequest(name, f"must be a time such as 2026-11-23T12:00, not {text!r:.60}") from error
    try:
        return (instant if instant.tzinfo is not None else instant.replace(tzinfo=tz)).astimezone(UTC)
    except OverflowError as error:
        raise BadRequest(name, f"must be between the years 1900 and 9000, not {text!r:.60}") from error
