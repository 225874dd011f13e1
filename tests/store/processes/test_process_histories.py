"""Random histories of processes on a real database, compared with a model of them in plain Python (P1 to P7).

Requests, controls, begins and commits happen, are lost, late or repeated. After each step all rows and answers equal
the model's, and a wake-up job exists exactly where there is work. `PROCESS_HISTORIES=2000 PROPERTY_SEED=7` draws
others.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter

import pytest
import trio
from databases import raw_connection
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from process_history import IDS, ProcessHistory

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("PROCESS_HISTORIES", "100"))
SEED = int(os.environ.get("PROPERTY_SEED", "0"))
OFTEN = (
    "call",
    "call",
    "run",
    "run",
    "run",
    "claim_and_begin",
    "claim_and_begin",
    "end",
    "end",
    "go_on",
    "go_on",
    "advance",
    "mend",
)
RARELY = (
    "init",
    "start_and_call",
    "call_many",
    "repair",
    "resume",
    "act",
    "crash",
    "crash",
    "late",
    "late_begin",
    "lose_job",
    "ask_again",
    "drain",
    "locked",
)
REACHED = {
    ("call", "added"), ("call", "again"), ("call", "conflict"), ("call", "status"), ("repair", "added"),
    ("resume", "done"), ("together", "added"),
    ("stop", "done"), ("remove", "done"), ("begin", "step"), ("begin", "rest"), ("begin", "zombie"), ("begin", "void"),
    ("commit", "locked"), ("call done", "next"), ("call done", "rest"), ("call done", "gone"),
    ("call done", "void"), ("call failed", "rest"), ("timeout done", "rest"), ("timeout retry", "rest"),
    ("repair done", "rest"), ("repair failed", "rest"), ("init refused", "gone"),
}  # fmt: skip
"""Situations that a hundred histories of the first seed reach, or a thousand of any seed."""
STEPS = st.tuples(st.sampled_from(OFTEN + RARELY), st.integers(0, 7), st.integers(0, 63))
HISTORIES = st.lists(STEPS, min_size=20, max_size=60)


async def play(raw, other, number, did, history):
    play = ProcessHistory(raw, other, f"t{number}", did)
    with trio.fail_after(60):
        for place in range(len(IDS)):
            await play.init(place, 0)
        await play.check()
        for name, a, b in history:
            await getattr(play, name)(a, b)
            await play.check()


@pytest.mark.requirement("P1", "P2", "P3", "P4", "P5", "P6", "P7")
async def test_every_history_of_processes_is_the_models(database, raw):
    numbers, did = itertools.count(), Counter()
    async with raw_connection(database.dsn) as other:

        @seed(SEED)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink],
        )
        @given(history=HISTORIES)
        def histories(history):
            trio.from_thread.run(play, raw, other, next(numbers), did, history)

        await trio.to_thread.run_sync(histories)
    if (SEED == 0 and EXAMPLES >= 100) or EXAMPLES >= 1_000:
        assert did.keys() >= REACHED
