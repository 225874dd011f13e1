"""Duplicates: waiting jobs of one task with the same args, added by services that do not use unique tasks."""

from __future__ import annotations

from typing import Annotated, Any
from uuid import UUID

import attrs

from dataloader.jobs.model import Instant, about
from dataloader.jobs.secrets.record_masks import SENSITIVE


@attrs.frozen
class DuplicateGroup:
    """Waiting jobs of a queue with the same task, args and `partition_key`; one of them would be enough."""

    queue: Annotated[str, about("Queue of the jobs."), SENSITIVE]
    task: Annotated[str, about("Task of the jobs."), SENSITIVE]
    partition_key: Annotated[str, about("Partition key of the jobs; may be empty."), SENSITIVE]
    jobs: Annotated[int, about("Number of jobs.")]
    best: Annotated[
        UUID, about("Job to keep: one that other jobs wait for, otherwise the most urgent, then the oldest.")
    ]
    args: Annotated[Any, about("Arguments of the jobs."), SENSITIVE]
    oldest_at: Annotated[Instant, about("Creation time of the oldest job.")]


@attrs.frozen
class DuplicateGroups:
    """Groups of duplicates, the largest first."""

    groups: Annotated[list[DuplicateGroup], about("Groups.")]
