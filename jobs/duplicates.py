"""Duplicates: waiting jobs of one task with the same args, added by services that do not use unique tasks."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import attrs

from dataloader.jobs.model import Instant, about


@attrs.frozen
class DuplicateGroup:
    """Waiting jobs of a queue with the same task, args and `partition_key`; one of them would be enough."""

    queue: Annotated[str, about("Their queue.")]
    task: Annotated[str, about("Their task.")]
    partition_key: Annotated[str, about("Their part of the data; may be empty.")]
    jobs: Annotated[int, about("How many there are.")]
    best: Annotated[UUID, about("The one to keep: the most urgent, of these the oldest; or one that others wait for.")]
    args: Annotated[Any, about("Its arguments.")]
    oldest_at: Annotated[Instant, about("When the oldest was added.")]


@attrs.frozen
class DuplicateGroups:
    """Groups of duplicates, the largest first."""

    groups: Annotated[list[DuplicateGroup], about("The groups.")]
