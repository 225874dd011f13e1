"""Collects the history of a run of `just chaos`: notes of processes, answers to clients, and the final rows."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from databases import RawConnection
from histories import History, Limit, Loaded, Plan, Row
from source_app import SourceApp

from chaos.clients import SPAN_DAYS, Clients, records_of
from chaos.fleet import Fleet
from chaos.notes import read_notes
from chaos.tasks import MOST_RUNNING, PARTNER, SCHEDULES

SHOWN = {"work", "thread", "book", "node", "polite", "few", "planned"}
"""Tasks whose handlers note their runs."""
ROWS = """
SELECT job_id::text, task, status::text, attempt, max_attempts, refunds, idempotency_key,
       extract(epoch FROM finished_at)::float AS ended, schedule, extract(epoch FROM planned_at)::float AS planned
FROM dl_jobs
"""
EVENTS = """
SELECT p.process_id, e.payload::text::int AS by FROM dl_process_events e JOIN dl_processes p USING (key)
WHERE p.type = 'again' ORDER BY p.key, e.event_id
"""
NEXT = "SELECT name, extract(epoch FROM next_at)::float AS at FROM dl_schedules"
LEFT_OUT = """
SELECT name, extract(epoch FROM (payload ->> 'first')::timestamptz)::float AS first,
       extract(epoch FROM (payload ->> 'last')::timestamptz)::float AS last
FROM dl_schedule_events WHERE kind = 'left_out'
"""


async def next_times(raw: RawConnection) -> dict[str, float]:
    """Return the next time of each schedule."""
    return {row["name"]: row["at"] for row in await raw.fetch(NEXT)}


async def collect(
    raw: RawConnection, folder: Path, fleet: Fleet, clients: Clients, source: SourceApp, begins: dict[str, float]
) -> History:
    """Return the history; `begins` are the first times of the schedules. All processes have ended."""
    runs, silences = read_notes(folder)
    is_behind_s = time.time() - time.monotonic()
    rows, planned = [], defaultdict(list)
    for row in await raw.fetch(ROWS):
        fields = dict(row)
        fields["ended"] = None if row["ended"] is None else row["ended"] - is_behind_s
        schedule, at = fields.pop("schedule"), fields.pop("planned")
        if schedule is not None:
            planned[schedule].append(at)
        rows.append(Row(job=fields.pop("job_id"), runs_shown=row["task"] in SHOWN, **fields))
    requests = [seen.began_at for seen in source.asked("/items")]
    # Beside the notes of the processes, for the analysis of an exceeded limit.
    (folder / "requests").write_text("".join(f"{at}\n" for at in requests))
    taken = [(at, 1) for at in [*(run.began for run in runs if run.task == "polite"), *requests]]
    events = defaultdict(list)
    for row in await raw.fetch(EVENTS):
        events[row["process_id"]].append(row["by"])
    return History(
        runs=runs,
        silences=silences,
        outages=fleet.outages,
        rows=rows,
        added=clients.added,
        canceled=clients.canceled,
        graph=clients.graph,
        limits=[Limit(PARTNER.name, one.requests, one.per_s, taken) for one in PARTNER.rate_limits],
        most_running={"few": MOST_RUNNING},
        plans=await _plans(raw, begins, planned),
        booked=[str(row["job_id"]) for row in await raw.fetch("SELECT job_id FROM booked")],
        calls=clients.calls,
        events={name: found for name, found in events.items() if not name.startswith("mirror")},
        mirrors={name.removeprefix("mirror of "): found for name, found in events.items() if name.startswith("mirror")},
        loads={name: await _load(raw, name, clients) for name in ("keyed", "keyless")},
        exits=fleet.wrong,
    )


async def _plans(raw: RawConnection, begins: dict[str, float], planned: dict[str, list[float]]) -> list[Plan]:
    left_out, ends = defaultdict(list), await next_times(raw)
    for row in await raw.fetch(LEFT_OUT):
        left_out[row["name"]].append((row["first"], row["last"]))
    return [
        Plan(
            name=name,
            begin=begins[name],
            end=ends[name],
            period_s=period_s,
            jobs=[at for at in planned[name] if at >= begins[name]],
            left_out=left_out[name],
        )
        for name, period_s in SCHEDULES.items()
    ]


async def _load(raw: RawConnection, name: str, clients: Clients) -> tuple[list[Loaded], list[int]]:
    status = dict(await raw.fetch("SELECT run_id::text, status FROM dl_etl_runs"))
    jobs = [
        Loaded(
            job=job,
            status=status.get(job, "missing"),
            segments=tuple(records_of(first + more) for more in range(SPAN_DAYS)),
        )
        for load, job, first in clients.spans
        if load == name
    ]
    return jobs, [row["id"] for row in await raw.fetch(f"SELECT id FROM {name}")]
