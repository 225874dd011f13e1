"""A claim: what is asked for, and the result, read from the rows of dl_claim_known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import attrs

from dataloader.jobs.model import ClaimedJob


@attrs.frozen
class ClaimRequest:
    """The arguments of `LockSession.claim`, but for `look`, which is the number of jobs to look at here."""

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
    """What a claim brought: the jobs that are ours now, and what became of the other candidates.

    `sent_at` is `lease_time()` before the claim was sent: leases count from then. `more` tells whether more may wait
    behind, `passed_over` that some do which somebody had locked for the moment. `last` is the last job that it looked
    at, behind which a next claim may go on, unless slots were lacking. `to_test` are hashes of keys whose parked jobs
    must be looked at again, after the commit and on another session. `lanes` tells of each lane that was asked for
    why no more of it may start, and in how many seconds it is worth a look: None, when something tells. `blocked` tells
    that many jobs of unknown tasks stand in front, `large` that jobs were left for the next claim, since the args of
    those before them are long.
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
    """Return the claim that was sent at `sent_at` and has these rows."""
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
                jobs.append(job_of(request.queue, record))
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


def job_of(queue: str, record: Any) -> ClaimedJob:
    """Return the claimed job of a row."""
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
