"""Request and result of a claim, read from the rows of dl_claim_known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import attrs

from dataloader.jobs.model import ClaimedJob


@attrs.frozen
class ClaimRequest:
    """Arguments of `LockSession.claim`, except that `look` is the number of jobs to read."""

    queue: str
    slots: int
    look: int
    tasks: list[str] | None
    backoff_s: float
    after: UUID | None
    limited: list[str]
    lanes: list[str]


@attrs.frozen
class Claim:
    """Result of a claim: the claimed jobs, and the state of the other candidates.

    Attributes:
        jobs: the claimed jobs.
        waited_s: for each of them, the seconds between its due time and the claim.
        more: whether more ready jobs may follow behind the last one.
        passed_over: whether jobs were skipped because another session had locked them.
        last: the last job that was read; the next claim may begin behind it, unless slots were missing.
        to_test: hashes of lock keys whose parked jobs must be checked again, after the commit and on another session.
        sent_at: `lease_time()` before the claim was sent; leases count from it.
        lanes: for each requested lane, why no more of its jobs may start, and the seconds until the next check (None: a
            notification will arrive).
        blocked: whether many jobs of unknown tasks are in front.
        large: whether jobs were left for the next claim because the args of those before them are large.
    """

    jobs: list[ClaimedJob]
    waited_s: list[float]
    more: bool
    passed_over: bool
    last: UUID | None
    to_test: list[int]
    sent_at: float
    lanes: list[tuple[str, str | None, float | None]] = attrs.field(factory=list)
    blocked: bool = False
    large: bool = False


def claim_of(request: ClaimRequest, records: Sequence[Any], sent_at: float) -> Claim:
    """Return the result of the claim that was sent at `sent_at` and returned `records`."""
    jobs, waited = [], []
    to_test = set()
    passed_over = more = blocked = large = False
    candidates = 0
    last: UUID | None = None
    looked = []
    for record in records:
        match record["verdict"]:
            case "run":
                candidates += 1
                jobs.append(claimed_job_of(request.queue, record))
                waited.append(record["waited_s"])
            case "locked":
                passed_over = True
            case "blocked":
                blocked = True
            case "large":
                large = True
            case "later":
                more = True
            case "last":
                last = record["job_id"]
            case "lane":
                looked.append((record["task"], record["args"], record["waited_s"]))
            case verdict:
                candidates += 1
                if verdict != "held" and record["lock_hash"] is not None:
                    to_test.add(record["lock_hash"])
    full = candidates >= request.look
    return Claim(jobs, waited, more or full, passed_over, last, sorted(to_test), sent_at, looked, blocked, large)


def claimed_job_of(queue: str, record: Any) -> ClaimedJob:
    """Return the claimed job of a record."""
    return ClaimedJob(
        job_id=record["job_id"],
        token=record["token"],
        queue=queue,
        task=record["task"],
        args=record["args"],
        lock_key=record["lock_key"],
        lock_hash=record["lock_hash"],
        partition_key=record["partition_key"],
        attempt=record["attempt"],
        max_attempts=record["max_attempts"],
        lease_s=record["lease_s"],
        more=record["more"],
    )
