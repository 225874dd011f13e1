"""Stored rows with names from before a change of names are converted."""

from __future__ import annotations

import json

from dataloader.jobs.schedules import Schedule
from dataloader.store.migrations import migrate


async def test_overlap_policies_of_stored_schedules_get_their_new_names(store, raw):
    overlaps = {
        "one": "buffer_one",
        "all": "buffer_all",
        "parallel": "allow",
        **{same: same for same in ("skip", "cancel", "buffer_one", "buffer_all", "allow")},
    }
    spec = {"task": "t", "every_s": 60, "missed": "all"}
    specs = {former: spec | {"overlap": former} for former in overlaps} | {"none": spec, "a text": "one", "a list": []}
    await raw.execute(
        "INSERT INTO dl_schedules (name, spec, task, origin, stored_by)"
        " SELECT name, spec, 't', 'code', 'w' FROM unnest($1::text[], $2::jsonb[]) AS rows (name, spec)",
        list(specs),
        [json.dumps(one) for one in specs.values()],
    )
    await raw.execute("DELETE FROM dl_migrations WHERE name = 'overlap_names'")
    assert len(await migrate(store)) == 1
    stored = {name: json.loads(text) for name, text in await raw.fetch("SELECT name, spec FROM dl_schedules")}
    wanted = {former: spec | {"overlap": new} for former, new in overlaps.items()}
    assert stored == specs | wanted
    assert {Schedule.of_spec(name, stored[name]).overlap for name in wanted} == set(overlaps.values())
