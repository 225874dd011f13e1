"""Random sequences of snapshots, in any order of their timestamps, against a model of histories (E8).

The model has the values of each key in each snapshot. Loading all of them in the order of their timestamps would result
in its versions, so merging them in any order must as well. A snapshot that is merged again changes nothing. Versions
that another program wrote before count as snapshots at their beginnings and ends. Complete and incomplete histories of
one table are merged alternately.
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

pytestmark = pytest.mark.full

SEED = int(os.environ.get("PROPERTY_SEED", "0"))
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "60"))
WRITTEN = ("inserted", "changed", "closed", "reappeared", "corrected", "woven")


@attrs.define
class Model:
    """Values of each key in each snapshot, as (tracked, not tracked), by day.

    Snapshots of the days `complete` have all keys. `ever` has the values from all snapshots, including corrected ones.
    """

    said: dict[int, dict[str, tuple[str, str]]] = attrs.field(factory=dict)
    complete: set[int] = attrs.field(factory=set)
    ever: set[tuple[str, str, str]] = attrs.field(factory=set)

    def take(self, day, snapshot, *, complete):
        if complete:
            self.complete.add(day)
            self.said[day] = {}
        self.said[day] = self.said.get(day, {}) | snapshot
        self.ever |= {(key, *values) for key, values in snapshot.items()}

    def take_written(self, versions, *, complete):
        """Add versions as the snapshots of their beginnings and ends: of all keys, or of the version's key."""
        for day in sorted({day for _, _, *days, _ in versions for day in days if day}):
            valid = {
                key: (value, other)
                for key, value, begun, ended, other in versions
                if begun <= day and (ended is None or day < ended)
            }
            bounded = {key for key, _, begun, ended, _ in versions if day in {begun, ended}}
            said = valid if complete else {key: valid.get(key, GONE) for key in bounded}
            self.take(day, said, complete=complete)

    def versions(self):
        """Return lists of [value, from, to, other] by key; the other value is the last one of the version's time."""
        return {key: [version[:4] for version in past] for key, past in self.observed().items()}

    def observed(self):
        """Return the same, each with the day of the last snapshot in its time."""
        found = {}
        for key in sorted({key for said in self.said.values() for key in said}):
            past = []
            for day, said in sorted(self.said.items()):
                if key not in said and day not in self.complete:
                    continue
                current = past[-1] if past and past[-1][2] is None else None
                value, other = said.get(key, GONE)
                if current is not None and current[0] == value:
                    current[3:] = other, day
                    continue
                if current is not None:
                    current[2] = day
                if value is not None:
                    past.append([value, day, None, other, day])
            if past:
                found[key] = past
        return found


async def versions_of(raw):
    """Return the table's versions in the form of the model's."""
    found = {}
    for row in await raw.fetch("SELECT * FROM target ORDER BY key, valid_from"):
        assert row["is_current"] is (row["valid_to"] is None)
        ended = row["valid_to"] and row["valid_to"].day
        found.setdefault(row["key"], []).append([row["a"], row["valid_from"].day, ended, row["o"]])
    return found


def tracked(found):
    return {key: [version[:3] for version in past] for key, past in found.items()}


def check(found, model):
    for key, past in found.items():
        assert model.ever.issuperset((key, value, other) for value, _, _, other in past)
        for (value, begun, ended, _), (next_value, next_begun, _, _) in itertools.pairwise(past):
            assert begun < ended <= next_begun
            assert value != next_value or ended < next_begun


def check_backfilled(found, model, since):
    """Check the versions after all snapshots since a day: those whose last snapshot is one of them have its values."""
    assert tracked(found) == tracked(model.versions())
    for key, past in model.observed().items():
        for version, (*expected, last) in zip(found[key], past, strict=True):
            assert version == expected or last < since


GONE = (None, None)
VALUES = st.tuples(st.sampled_from("12"), st.sampled_from("xyz"))
SNAPSHOTS = st.dictionaries(st.sampled_from("klmn"), VALUES, max_size=4)
DAYS = st.integers(1, 7)
STEPS = st.lists(st.tuples(DAYS, SNAPSHOTS, st.booleans()), min_size=2, max_size=9)


@st.composite
def written_versions(draw):
    """Return versions (key, value, from, to, other) of another program; equal neighbors have a gap between them."""
    versions = []
    for key in draw(st.sets(st.sampled_from("kl"))):
        days = sorted(draw(st.sets(DAYS, min_size=1, max_size=4)))
        last = None
        for begun, ended in itertools.pairwise([*days, None]):
            value, other = draw(VALUES)
            if draw(st.booleans()) and value != last:
                versions.append((key, value, begun, ended, other))
                last = value
            else:
                last = None
    return versions


@pytest.mark.requirement("E8")
@pytest.mark.parametrize("is_complete_history", [True, False, "in turn"])
async def test_snapshots_in_any_order_give_the_history_of_their_order(transactions, raw, is_complete_history):
    dimension = await open_dimension(transactions, raw, "a", "o")
    await raw.execute("""
        ALTER TABLE target ADD EXCLUDE USING gist (
          int4range(ascii(key), ascii(key), '[]') WITH &&, daterange(valid_from, valid_to) WITH &&)""")

    def declared(complete):
        return complete if is_complete_history == "in turn" else is_complete_history

    async def play(steps, written):
        await raw.execute("TRUNCATE target, dl_load_history CASCADE")
        model = Model()
        for key, value, begun, ended, other in written:
            await raw.execute(
                "INSERT INTO target (key, a, valid_from, valid_to, is_current, o) VALUES ($1, $2,"
                " '2019-12-31'::date + $3::int, '2019-12-31'::date + $4::int, $4::int IS NULL, $5)",
                *(key, value, begun, ended, other),
            )
        model.take_written(written, complete=is_complete_history is True)
        for day, snapshot, complete in steps:
            is_complete = complete and declared(complete)
            before = await versions_of(raw)
            counts = await merge(day, snapshot, complete=complete)
            model.take(day, snapshot, complete=is_complete)
            found = await versions_of(raw)
            assert tracked(found) == tracked(model.versions())
            check(found, model)
            assert any(getattr(counts, name) for name in WRITTEN) or tracked(found) == tracked(before)
            again = await merge(day, snapshot, complete=complete)
            assert (again.unchanged, await versions_of(raw)) == (len(snapshot), found)
        # A backfill also corrects the column that is not tracked, in versions whose last snapshot it has.
        days = sorted(model.said)
        for since in (days[len(days) // 2], days[0]):
            for day in days[days.index(since) :]:
                present = {key: values for key, values in model.said[day].items() if values != GONE}
                await merge(day, present, complete=day in model.complete)
            check_backfilled(await versions_of(raw), model, since)

    async def merge(day, snapshot, *, complete):
        rows = [(key, *values) for key, values in snapshot.items()]
        staged = await dimension.stage(rows)
        fields = {"complete": declared(complete), "is_complete": complete or is_complete_history == "in turn"}
        return await dimension.merge_staged(staged, as_of=dt.date(2020, 1, day), **fields)

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(steps=STEPS, written=st.just([]) if is_complete_history == "in turn" else written_versions())
    def sequences(steps, written):
        trio.from_thread.run(play, steps, written)

    await trio.to_thread.run_sync(sequences)
