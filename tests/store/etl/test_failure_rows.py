"""A fault is recorded whatever its text is: failures, summaries, results, progress and log lines (E10).

The values are the same each time; `PROPERTY_EXAMPLES=500 PROPERTY_SEED=1234` draws others.
"""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import uuid4

import attrs
import msgspec
import pytest
import trio
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from logged import capture_logs

from dataloader.flows.etl.parse.transform import masked_beginning, sample_of
from dataloader.jobs.outcomes import Outcome
from dataloader.jobs.states import Step
from dataloader.jobs.text import storable_json, storable_text
from dataloader.store.etl.failure_rows import Failure
from dataloader.store.etl.load_state import window_state
from dataloader.store.etl.run_journal import (
    aio_begin_run,
    aio_end_run,
    aio_next_failures,
    aio_note_failures,
    aio_note_task,
    aio_open_failures,
)
from dataloader.store.etl.segment_commit import SegmentCommit, aio_commit_segment
from dataloader.store.queue.finish import aio_finish, aio_keep_lines, aio_show_progress

SEED = int(os.environ.get("PROPERTY_SEED", "0"))
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "60"))


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


def as_json(requests):
    try:
        return msgspec.json.decode(msgspec.json.encode(requests))
    except (TypeError, ValueError, RecursionError):
        return []


def nested(depth):
    value = "\ud800\x00"
    for level in range(depth):
        value = [value] if level % 2 else {"\x00": value}
    return value


TEXTS = st.one_of(
    st.text(max_size=20),
    st.text("\x00\ud800\udfff\\\"'\n\u2028\ufffea", min_size=1, max_size=30),
    st.sampled_from(["", "\x00", "\udfff", "\\u0000", "\\\\u0000", "\x00" * 20_000, "x" * 100_000, "\N{PILE OF POO}"]),
)
VALUES = st.recursive(
    st.one_of(
        TEXTS,
        st.none(),
        st.booleans(),
        st.binary(max_size=5),
        st.floats(),
        st.sampled_from([1e308, -1e-308, -(2**70), {1, 2}]),
        # Hypothesis itself must not print them.
        st.sampled_from([400, 5_000]).map(lambda digits: 10**digits),
        st.builds(UnspeakableError),
        st.builds(nested, st.sampled_from([10, 190, 500, 990, 5_000])),
    ),
    lambda values: st.one_of(st.lists(values, max_size=4), st.dictionaries(TEXTS, values, max_size=4)),
    max_leaves=8,
)
FAILURES = st.builds(
    Failure,
    load=st.just("rates"),
    segment=TEXTS,
    phase=st.sampled_from(["request", "detail", "record", "row", "batch", "segment"]),
    key=TEXTS,
    error=TEXTS,
    sample=st.one_of(st.none(), TEXTS, VALUES.map(sample_of)),
    requests=st.lists(
        st.fixed_dictionaries({"of": st.just("list"), "endpoint": TEXTS, "params": VALUES, "body": VALUES}), max_size=3
    ),
    times=st.integers(1, 1_000),
)


@pytest.fixture
def worker(start_worker):
    return start_worker()


@pytest.fixture
async def job(worker, add_job, transactions):
    """Return a running job whose run of the load `rates` has begun."""
    await add_job()
    [job] = await worker.claim()
    await transactions.run(aio_begin_run, job.job_id, job.token, "rates", "load", [("", "rates")])
    return job


@pytest.fixture
def on_record(raw, job):
    """The failures of the run on record, oldest first, after the number `after`."""

    async def on_record(after=0):
        sql = "SELECT * FROM dl_etl_failures WHERE run_id = $1 AND failure_id > $2 ORDER BY failure_id"
        rows = await raw.fetch(sql, job.job_id, after)
        return [SimpleNamespace(**{**row, "requests": json.loads(row["requests"])}) for row in rows]

    return on_record


def played(play, *strategies):
    """Run `play` in the test's own loop, for each of the drawn values."""

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.tuples(*strategies))
    def run(values):
        trio.from_thread.run(play, *values)

    return trio.to_thread.run_sync(run)


@pytest.mark.slow
@pytest.mark.requirement("E10", "Q9")
async def test_a_failure_with_any_text_is_recorded(job, transactions, on_record, raw):
    async def play(failures):
        before = await raw.fetchval("SELECT coalesce(max(failure_id), 0) FROM dl_etl_failures")
        commit = SegmentCommit(
            run_id=job.job_id, token=job.token, task="rates", segment=None, merges=[], failures=failures
        )
        await transactions.run(aio_commit_segment, commit)
        found = await on_record(before)
        assert [(one.key, one.error, one.times) for one in found] == [
            (storable_text(one.key), storable_text(one.error), one.times) for one in failures
        ]
        for was, stored in zip(failures, found, strict=True):
            # A request that JSON would change is not stored: repeating it would request something else.
            assert stored.requests in ([], as_json(was.requests))

    await played(play, st.lists(FAILURES, min_size=1, max_size=4))


@pytest.mark.slow
@pytest.mark.requirement("E10", "Q9")
async def test_every_other_record_of_a_run_is_stored_with_any_text(job, worker, add_job, transactions, store, raw):
    async def play(text, value):
        of, summary = (job.job_id, job.token), {"reason": text, "counts": {}, text: value}
        await transactions.run(aio_note_task, *of, "rates", "running", summary)
        await transactions.run(aio_end_run, *of, "failed", summary)
        assert await raw.fetchval("SELECT summary IS NOT NULL FROM dl_etl_runs")
        assert await raw.fetchval("SELECT summary IS NOT NULL FROM dl_etl_tasks")
        assert await store.run(aio_show_progress, [(*of, storable_json(summary))]) == set()
        line = storable_json(
            {"level": "error", "message": storable_text(text), "fields": {"load": "rates", "it": value}}
        )
        before = await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'log'")
        assert await store.run(aio_keep_lines, [(*of, datetime.now(UTC), line)], of_loads=True) == set()
        assert await raw.fetchval("SELECT count(*) FROM dl_job_events WHERE kind = 'log'") == before + 1
        await add_job()
        [other] = await worker.claim()
        result = storable_json(value)
        outcome = Outcome(other.job_id, other.token, Step.FAIL, error=storable_text(text), result=result)
        finished = await store.run(aio_finish, [outcome])
        assert list(finished.written) == [other.token]

    await played(play, TEXTS, VALUES)


async def test_a_refused_failure_becomes_a_note_and_its_segment_commits(job, transactions, on_record, raw):
    # The constraint represents one that an operator has added.
    await raw.execute("ALTER TABLE dl_etl_failures ADD CONSTRAINT short CHECK (length(key) < 100)")
    kept = Failure(load="rates", segment="day 1", phase="record", key="k", error="bad", times=1)
    refused = attrs.evolve(kept, key="k" * 100, times=7)
    commit = SegmentCommit(
        run_id=job.job_id,
        token=job.token,
        task="rates",
        segment="day 1",
        merges=[],
        failures=[kept, refused, kept],
        counts={"rows": 3},
        state=window_state(datetime(2026, 1, 2, tzinfo=UTC)),
    )
    with capture_logs() as lines:
        await transactions.run(aio_commit_segment, commit)
    found = await on_record()
    assert [(one.key, one.segment, one.phase, one.times) for one in found] == [
        ("k", "day 1", "record", 1),
        ("k", "day 1", "record", 1),
        ("", "day 1", "record", 7),
    ]
    assert "the database rejected the record of this failure: CheckViolationError" in found[2].error
    assert await raw.fetchval("SELECT count(*) FROM dl_etl_segments WHERE segment = 'day 1'") == 1
    assert await raw.fetchval("SELECT count(*) FROM dl_load_state") == 1
    assert [line["event"] for line in lines] == ["the database rejected the records of failures"]


async def test_failures_whose_notes_are_refused_too_are_logged_and_end_nothing(job, transactions, on_record, raw):
    await raw.execute("ALTER TABLE dl_etl_failures ADD CONSTRAINT none CHECK (phase <> 'record')")
    failures = [Failure(load="rates", segment="day 1", phase=phase, key="k", error="e") for phase in ("record", "row")]
    with capture_logs() as lines:
        await transactions.run(aio_note_failures, job.job_id, job.token, failures)
    assert [one.phase for one in await on_record()] == ["row"]
    assert [(line["failures"], line["are_noted"]) for line in lines] == [(1, False)]


async def test_a_request_that_json_would_change_is_not_kept_for_a_retry(job, transactions, on_record):
    def failure(**fields):
        return Failure(
            load="rates", segment="day 1", phase="request", key="k", error="e", requests=[{"of": "list"} | fields]
        )

    failures = [failure(endpoint="/a"), failure(endpoint="/\x00"), failure(endpoint="/", params={"at": float("nan")})]
    await transactions.run(aio_note_failures, job.job_id, job.token, failures)
    found = await on_record()
    assert [one.requests for one in found] == [[{"of": "list", "endpoint": "/a"}], [], []]


async def test_requests_that_an_earlier_release_has_cut_are_not_retried(job, transactions, on_record, store, raw):
    failure = Failure(
        load="rates", segment="s", phase="batch", key="k", error="e", requests=[{"of": "list", "endpoint": "/a"}]
    )
    await transactions.run(aio_note_failures, job.job_id, job.token, [failure, failure])
    await raw.execute(
        'UPDATE dl_etl_failures SET requests = \'{"truncated": "[", "bytes": 9}\''
        " WHERE failure_id = (SELECT min(failure_id) FROM dl_etl_failures)"
    )
    first, second = [one.failure_id for one in await on_record()]
    assert list(await store.run(aio_next_failures, "rates", uuid4(), 0, 10)) == [second]
    assert await store.run(aio_open_failures, "rates", [first]) == {first: []}


async def test_only_details_with_storable_keys_are_recorded_as_complete(job, transactions, raw):
    commit = SegmentCommit(
        run_id=job.job_id,
        token=job.token,
        task="rates",
        segment=None,
        merges=[],
        details_of="day 1",
        details=["a", "b\x00", "c"],
    )
    await transactions.run(aio_commit_segment, commit)
    assert await raw.fetchval("SELECT details FROM dl_etl_details") == ["a", "c"]


@pytest.mark.parametrize("value", [nested(5_000), {"a": UnspeakableError()}, "\ud800", b"\x00"], ids=type)
def test_a_sample_is_made_of_any_value(value):
    assert masked_beginning(sample_of(value)) == sample_of(value)
