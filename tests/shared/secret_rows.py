"""Rows with a secret in each text and each JSON value, as programs store them that mask nothing.

Objects named `spill` can be requested by their names. Others of the same kinds have a secret in the name itself, and
appear in lists.
"""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import attrs
from canaries import CANARY, canaries
from etl_runs import literal

PLAIN = "spill"
NAME = f"token={CANARY}-name"
TOLD = f"password={CANARY}-told refused by https://u:{CANARY}-told@h/"
JSON = canaries("row")
FAILED, RUNNING, ENDED, FLOW = (UUID(int=number) for number in range(1, 5))
"""Jobs: FAILED is also a run of a load, FLOW a running flow."""
BULK = UUID(int=9)


@attrs.frozen
class SecretRows:
    """IDs of the rows."""

    group: str
    process_group: str
    call: int


def _insert(table: str, **columns: Any) -> str:
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join(map(literal, columns.values()))});"


def _job(job_id: UUID, name: str, **columns: Any) -> str:
    texts = dict.fromkeys(("idempotency_key", "producer", "consumer_group", "schedule"), f"{NAME}-{job_id}")
    values = dict.fromkeys(("args", "progress", "result", "previous"), JSON)
    return _insert(
        "dl_jobs",
        job_id=job_id,
        queue=name,
        task=name,
        partition_key=NAME,
        **{"lock_key": PLAIN, "error": TOLD, "claimed_by": NAME} | texts | values | columns,
    )


def insert_secret_rows(database: Any) -> SecretRows:
    """Insert the rows, and return IDs of them."""
    statements = []
    for name in (PLAIN, NAME):
        statements += _named(name)
    statements += _jobs()
    statements += _runs()
    statements += [
        _insert("dl_audit", actor=TOLD, action=TOLD, detail=JSON),
        _insert("dl_audit", actor=TOLD, action="pause", detail={"queue": NAME}),
        # Filters of bulk operations are stored without their secrets.
        _insert(
            "dl_bulk", bulk_id=BULK, action="cancel", filter={"queue": "q"}, actor=TOLD, error=TOLD, stopped_by=TOLD
        ),
    ]
    database.psql("".join(statements))
    database.psql(f"UPDATE dl_jobs SET status = 'failed', error = '{TOLD}' WHERE job_id = '{FAILED}'")
    group = "SELECT error_group FROM dl_jobs WHERE error_group IS NOT NULL LIMIT 1"
    found, call = database.psql(f"{group}; SELECT task_id FROM dl_process_tasks WHERE type = '{PLAIN}'").split()
    return SecretRows(group=f"{int(found) % 2**64:016x}", process_group=f"{1:016x}", call=int(call))


def _named(name: str) -> list[str]:
    limits = {"max_running": 1, "supplier": name, "work_periods": [TOLD]}
    return [
        _insert("dl_queues", queue=name, paused=True, changed_at="2026-11-20 12:00Z", changed_by=TOLD),
        _insert("dl_workers", worker=f"{NAME}-{name}", host=TOLD, pid=1, version="1", queues={name: 1, NAME: 1},
                only_tasks={NAME: [NAME]}),
        _insert("dl_tasks", task=name, queue=name, layout=1, declared_by=TOLD, description=TOLD, limits=limits,
                override={"supplier": name}, limited=True, supplier=name, paused=True, paused_by=TOLD,
                paused_at="2026-11-20 12:00Z"),
        _insert("dl_sources", source=name, limits={"work_periods": [TOLD]}),
        _insert("dl_schedules", name=name, task=name, origin="operator", stored_by=TOLD, paused=True, paused_why=TOLD,
                spec={"task": PLAIN, "every_s": 3_600, "args": JSON, "job": {"queue": NAME}}),
        _insert("dl_schedules", name=f"{name} faulty", task=name, origin="operator", stored_by=TOLD,
                spec={"cron": TOLD}),
        _insert("dl_schedule_events", name=name, kind="paused", payload={"why": TOLD}),
        _insert("dl_run_stats", hour="2026-11-20 12:00Z", queue=name, task=name, outcome="failed", runs=1, total_s=1,
                max_s=1),
        _insert("dl_errors", at="2026-11-20 12:00Z", job_id=FAILED, task=name, queue=name, attempt=1, worker=NAME,
                status="failed", error_group=1, error=TOLD),
        _insert("dl_etl_cursors", load=name, upto="2026-11-20 12:00Z", run_id=FAILED),
        _insert("dl_process_sinks", sink=f"{name}-sink", types=f'{{"{name}"}}', kinds="{event}", until="2100-01-01Z"),
        *_process(name),
    ]  # fmt: skip


def _process(name: str) -> list[str]:
    sink = f"{name}-sink"
    key = f"(SELECT key FROM dl_processes WHERE type = {literal(name)})"
    values = dict.fromkeys(("args", "context", "response"), JSON)
    return [
        _insert("dl_processes", type=name, process_id=name, status="error", detail=TOLD, error_group=1, aux_state=JSON,
                metadata=JSON, last_event_id=1, timer_task=10**9, timer_kind="timeout", timer_at="2100-01-01Z",
                timer_attempt=0, timer_context=JSON),
        _insert_of(key, "dl_process_events", event_id=1, task_id=1, payload=JSON),
        _insert_of(key, "dl_process_tasks", type=name, kind="call", method=NAME, status="error", error=TOLD,
                   idempotency_key=NAME, **values),
        _insert_of(key, "dl_process_outbox", sink=sink, partition=0, event_id=1, kind="event", body=JSON,
                   held_up=True),
        _insert_of(key, "dl_process_holdups", sink=sink, partition=0, tries=20, error=TOLD),
    ]  # fmt: skip


def _insert_of(key: str, table: str, **columns: Any) -> str:
    """Return the statement for a row of the process with this key."""
    values = ", ".join(map(literal, columns.values()))
    return f"INSERT INTO {table} (key, {', '.join(columns)}) VALUES ({key}, {values});"


def _jobs() -> list[str]:
    lines = {"level": TOLD, "message": TOLD, "fields": JSON}
    events = {"log": lines, "picked": {"worker": NAME}, "failed": {"error": TOLD, "reason": TOLD, "by": TOLD},
              TOLD: JSON, "canceled": {"by": TOLD}}  # fmt: skip
    running = {"status": "running", "lease_expires_at": "2100-01-01Z", "heartbeat_at": "2026-11-20 12:00Z", "token": 1}
    return [
        _job(FAILED, PLAIN, attempt=1, **running),
        _job(RUNNING, NAME, lock_key=NAME, **running),
        _job(ENDED, PLAIN, status="succeeded", finished_at="2026-11-20 12:00Z", lock_key=f"{NAME}-2"),
        _job(FLOW, NAME, lock_key=f"{NAME}-3", **running),
        # Duplicates of each other, which wait for the key.
        *(_job(UUID(int=number), PLAIN, waits_for="lock", schedule=None, previous=None) for number in (5, 6)),
        *(
            _insert("dl_job_events", job_id=job_id, queue=NAME, kind=kind, payload=payload)
            for job_id in (FAILED, RUNNING)
            for kind, payload in events.items()
        ),
    ]


def _runs() -> list[str]:
    summary = {"reason": TOLD, "counts": JSON, "phases": JSON, "tables": {NAME: {"status": TOLD, "error": TOLD}}}
    kinds = {FAILED: (PLAIN, "load"), FLOW: (NAME, "flow")}
    return [
        *(
            _insert("dl_etl_runs", run_id=one, name=name, kind=kind, summary=summary)
            for one, (name, kind) in kinds.items()
        ),
        *(
            _insert("dl_etl_tasks", run_id=one, ordinal=number, layer=TOLD, task=name, status="failed", summary=summary)
            for one in kinds
            for number, name in enumerate((PLAIN, NAME), 1)
        ),
        *(
            _insert("dl_etl_failures", run_id=FAILED, load=name, segment=TOLD, phase="record", key=TOLD, error=TOLD,
                    sample=json.dumps(JSON))
            for name in (PLAIN, NAME)
        ),
    ]  # fmt: skip
