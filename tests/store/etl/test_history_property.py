"""Random sequences of snapshots against a model of histories (E8).

The model keeps the last value of each key on each day, which alone determines the versions. Further checks: no
overlaps, no gaps while a key exists, at most one current version, none of length zero, and no changes by a rerun.
"""

from __future__ import annotations

import datetime as dt
import itertools
import os

import attrs
import pytest
import trio
from etl_loads import open_dimension
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from dataloader.store.etl.history_merge import HistoryCounts

pytestmark = pytest.mark.full

SEED = int(os.environ.get("PROPERTY_SEED", "0"))
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "60"))


@attrs.define
class Model:
    """Values of each key over time as (tracked, not tracked), None where the key did not exist."""

    days: dict[int, dict[str, tuple[str, str] | None]] = attrs.field(factory=dict)
    open: dict[str, tuple[str, str]] = attrs.field(factory=dict)

    def take(self, day, snapshot, *, complete):
        gone = dict.fromkeys(self.open) if complete else {}
        said = self.days.setdefault(day, {})
        said |= dict.fromkeys(said) | gone if complete else {}
        said |= snapshot
        self.open = {key: value for key, value in (self.open | said).items() if value is not None}

    def versions(self):
        found = {}
        for day, said in sorted(self.days.items()):
            for key, value in said.items():
                past = found.setdefault(key, [])
                current = past[-1] if past and past[-1][2] is None else None
                tracked = value and value[0]
                if current is not None and current[0] != tracked:
                    current[2] = day
                elif current is not None:
                    # A column that is not tracked has the last value of the version's time.
                    current[3] = value[1]
                if value is not None and (current is None or current[0] != tracked):
                    past.append([tracked, day, None, value[1]])
        return {key: past for key, past in found.items() if past}


VALUES = st.tuples(st.sampled_from("12"), st.sampled_from("xyz"))
SNAPSHOTS = st.dictionaries(st.sampled_from("klmn"), VALUES, max_size=4)
STEPS = st.lists(st.tuples(st.integers(0, 1), SNAPSHOTS, st.booleans()), min_size=1, max_size=8)


@pytest.mark.requirement("E8")
async def test_every_sequence_of_snapshots_ends_as_the_model_says(transactions, raw):
    dimension = await open_dimension(transactions, raw, "a", "o")

    async def play(steps):
        await raw.execute("TRUNCATE target, dl_load_history CASCADE")
        model, day = Model(), 1
        for pause, snapshot, complete in steps:
            day += pause
            before = await versions()
            rows = [(key, *values) for key, values in snapshot.items()]
            counts = await dimension.merge(dt.date(2020, 1, day), rows, complete=complete)
            model.take(day, snapshot, complete=complete)
            found = await versions()
            assert found == model.versions()
            check(found)
            assert (found == before) is not any(attrs.astuple(attrs.evolve(counts, unchanged=0)))
            assert await dimension.merge(dt.date(2020, 1, day), rows, complete=complete) == HistoryCounts(
                unchanged=len(rows)
            )

    async def versions():
        found = {}
        for row in await raw.fetch("SELECT * FROM target ORDER BY key, valid_from"):
            assert row["is_current"] is (row["valid_to"] is None)
            ended = row["valid_to"] and row["valid_to"].day
            found.setdefault(row["key"], []).append([row["a"], row["valid_from"].day, ended, row["o"]])
        return found

    def check(found):
        for past in found.values():
            for (value, begun, ended, _), (next_value, next_begun, _, _) in itertools.pairwise(past):
                assert begun < ended <= next_begun
                assert value != next_value or ended < next_begun

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(steps=STEPS)
    def sequences(steps):
        trio.from_thread.run(play, steps)

    await trio.to_thread.run_sync(sequences)
