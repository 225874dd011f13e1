"""Outcome of an ended run, by the result of its handler and the reason of its stop (Q9)."""

from __future__ import annotations

import math

import pytest

from dataloader import Canceled, GiveUp, Retry, RetryPolicy, Snooze, Tasks
from dataloader.actors.job_runs import Run
from dataloader.actors.lease import Lease
from dataloader.actors.run_outcome import outcome_of
from dataloader.jobs.ids import uuid7
from dataloader.jobs.model import ClaimedJob
from dataloader.jobs.outcomes import StopReason
from dataloader.jobs.states import Step
from dataloader.jobs.task import Task

pytestmark = pytest.mark.requirement("Q9")


def a_run(attempt: int = 1) -> Run:
    job = ClaimedJob(
        job_id=uuid7(), token=7, queue="q", task="t", args="{}", lock_key=None, lock_hash=None, partition_key="",
        attempt=attempt, max_attempts=5, lease_s=60,
    )  # fmt: skip
    return Run(job=job, lease=Lease(60, math.inf), claimed_at=0)


def a_task(**options) -> Task:
    return Tasks().task("t", **options)(_handler)


async def _handler(job):
    """Do nothing; it is never called."""


@pytest.mark.parametrize(
    ("retry", "attempt", "least_s", "most_s"),
    [
        (RetryPolicy(), 1, 30, 33),
        (RetryPolicy(), 3, 90, 99),
        (RetryPolicy(base_s=1, factor=3, jitter=0), 3, 9, 9),
        (RetryPolicy(base_s=100, factor=10, cap_s=50, jitter=0), 4, 50, 50),
    ],
    ids=["30 s × attempt", "third attempt", "exponential", "capped"],
)
def test_a_failed_run_is_repeated_after_the_pause_of_its_policy(retry, attempt, least_s, most_s):
    outcome = outcome_of(a_run(attempt), a_task(retry=retry), None, ValueError("no such file"), None)
    assert outcome.step is Step.RETRY
    assert outcome.error.startswith("ValueError: no such file")
    assert least_s <= outcome.delay_s <= most_s


@pytest.mark.parametrize(
    ("said", "step"),
    [
        (GiveUp(ValueError("no text")), Step.FAIL),
        (Retry(60, None), Step.RETRY),
        (Snooze(60, {"a": 1}), Step.SNOOZE),
        (Canceled(["a"]), Step.CANCEL),
    ],
)
def test_a_reason_that_is_no_text_is_an_outcome_all_the_same(said, step):
    outcome = outcome_of(a_run(), a_task(), said, None, None)
    assert outcome.step is step
    assert isinstance(outcome.error, str | None)


@pytest.mark.parametrize(
    ("stopped", "attempt", "step", "said"),
    [
        (StopReason.CANCEL, 1, Step.CANCEL, "ValueError: at the end"),
        (StopReason.DRAIN, 1, Step.RETURN, "ValueError: at the end"),
        (StopReason.KEY_LOST, 1, Step.RETURN, "ValueError: at the end"),
        (StopReason.PERIOD_END, 1, Step.CLOSE, "ValueError: at the end"),
        (StopReason.TIMEOUT, 1, Step.RETRY, "timeout: the run took longer than 2 s\nValueError: at the end"),
        (StopReason.TIMEOUT, 5, Step.FAIL, "timeout: the run took longer than 2 s\nValueError: at the end"),
        (StopReason.LEASE_ENDED, 1, Step.RETRY, "no heartbeat succeeded: the lease was lost\nValueError"),
        (StopReason.LEASE_ENDED, 5, Step.FAIL, "no heartbeat succeeded: the lease was lost\nValueError"),
    ],
)
def test_the_stop_reason_decides_the_outcome_and_the_handlers_error_is_added(stopped, attempt, step, said):
    outcome = outcome_of(a_run(attempt), a_task(timeout_s=2), None, ValueError("at the end"), stopped)
    assert outcome.step is step
    assert outcome.error.startswith(said)


def test_of_a_run_whose_job_is_another_s_nothing_is_written():
    assert outcome_of(a_run(), a_task(), "a result", None, StopReason.LEASE_LOST) is None
