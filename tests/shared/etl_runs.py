"""Runs of loads and flows, created by SQL for tests of their readers."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import attrs

BEGAN = datetime(2026, 11, 20, 2, 0, tzinfo=UTC)
NIGHTLY = [("ods.rates", "succeeded"), ("ods.countries", "failed"), ("dwd", "waiting")]
"""Tasks of a run that has failed."""
HOSTILE = ["<script>alert(1)</script>\"'", "a\u202eb\x1b[31m\u200b", "..", "a/b?c#d&e=1,f", "x" * 190]
"""Names that would do harm if they were not escaped."""
ENDED = {"succeeded", "succeeded_with_failures", "failed", "canceled", "interrupted"}


def literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, dict | list):
        value = json.dumps(value)
    return "'" + str(value).replace("'", "''") + "'"


@attrs.define
class RunMaker:
    """Writes runs into a test's database."""

    database: Any
    _statements: list[str] = attrs.field(factory=list)

    def insert(self, table: str, **columns: Any) -> None:
        values = ", ".join(map(literal, columns.values()))
        self._statements.append(f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({values})")

    def send(self) -> None:
        """Send the inserted rows together, since a psql call for each row takes long."""
        self.database.psql(";".join(self._statements))
        self._statements.clear()

    def run(
        self,
        tasks: list[tuple[str, str]],
        *,
        name: str = "nightly",
        status: str = "succeeded",
        job: str | None = None,
        began: datetime = BEGAN,
        minutes: float = 10,
        rows: int = 1_000,
        **job_columns: Any,
    ) -> UUID:
        """Create a run of `tasks`, (name, status), one after the other, each of `minutes` with `rows` inserted."""
        run_id = uuid4()
        job = job or (status if status in {"running", "queued", "failed", "canceled"} else "succeeded")
        done = sum(how in ENDED for _, how in tasks)
        ended = began + timedelta(minutes=minutes * max(1, done))
        is_over = job not in {"queued", "running"}
        self.insert(
            "dl_jobs",
            **{
                "job_id": run_id,
                "queue": "loads",
                "task": name,
                "lock_key": str(run_id),
                "status": job,
                "attempt": 1,
                "started_at": began,
                "finished_at": ended if is_over else None,
                "error": f"{tasks[-1][0]}: at postgresql://me:sesame@db/x" if job == "failed" else None,
                "token": 7,
                **({} if is_over else {"claimed_by": "w", "lease_expires_at": "2100-01-01", "heartbeat_at": ended}),
            }
            | job_columns,
        )
        self.insert(
            "dl_etl_runs",
            run_id=run_id,
            name=name,
            kind="flow",
            status=status,
            started_at=began,
            finished_at=ended if status in ENDED else None,
            summary={"status": status} if status in ENDED else None,
        )
        for ordinal, (task, how) in enumerate(tasks, 1):
            at = began + timedelta(minutes=minutes * (ordinal - 1))
            until = at + timedelta(minutes=minutes)
            self.insert(
                "dl_etl_tasks",
                run_id=run_id,
                ordinal=ordinal,
                layer="ods" if ordinal < len(tasks) else "dwd",
                task=task,
                status=how,
                started_at=None if how == "waiting" else at,
                finished_at=until if how in ENDED else None,
                summary=self._summary(how, at, minutes, rows + ordinal) if how in ENDED else None,
            )
        self.send()
        return run_id

    def _summary(self, how: str, at: datetime, minutes: float, rows: int) -> dict[str, Any]:
        def phase(first: float, last: float) -> dict[str, Any]:
            since, until = (at + timedelta(minutes=minutes * part) for part in (first, last))
            return {"began_at": since.isoformat(), "ended_at": until.isoformat(), "busy_s": minutes * 20}

        return {
            "status": how,
            **({"reason": "1 of 7 segments failed, at postgresql://me:sesame@db/x"} if how == "failed" else {}),
            "counts": {"inserted": rows, "unchanged": 5, "requests": 17},
            "phases": {"requests": phase(0, 0.8), "processing": phase(0.1, 0.85), "writing": phase(0.3, 1)},
        }

    def lines(self, run_id: UUID, task: str | None, lines: list[tuple[str, str]], **fields: Any) -> None:
        """Create lines of a task, or of the run itself, as the recorder stores them: (level, message)."""
        payloads = [
            {"level": level, "message": message, "fields": ({} if task is None else {"load": task}) | fields}
            for level, message in lines
        ]
        texts = ", ".join(f"({index}, {literal(payload)}::jsonb)" for index, payload in enumerate(payloads))
        kept = (
            "INSERT INTO dl_job_events (job_id, queue, ts, kind, payload)"
            f" SELECT '{run_id}', 'loads', '{BEGAN}'::timestamptz + n * interval '1 s', 'log', p"
            f" FROM (VALUES {texts}) AS v (n, p) ORDER BY n RETURNING event_id, payload"
        )
        if task is None:
            self.database.psql(kept)
            return
        self.database.psql(
            f"WITH kept AS ({kept}) INSERT INTO dl_etl_logs AS k"
            f" SELECT '{run_id}', {literal(task)}, 7, min(event_id), max(event_id), count(*),"
            " count(*) FILTER (WHERE payload ->> 'level' = 'warning'),"
            " count(*) FILTER (WHERE payload ->> 'level' = 'error') FROM kept"
            " ON CONFLICT (run_id, task, token) DO UPDATE SET last_event = excluded.last_event,"
            " lines = k.lines + excluded.lines, warnings = k.warnings + excluded.warnings,"
            " errors = k.errors + excluded.errors"
        )

    def event(self, run_id: UUID, kind: str, **payload: Any) -> None:
        """Create an event of the run's history."""
        self.insert("dl_job_events", job_id=run_id, queue="loads", kind=kind, payload=payload)
        self.send()

    def failed_table(self, run_id: UUID, task: str, table: str, error: str) -> None:
        """Create a set of dimensions in the run with a table that could not be merged."""
        tables = {
            table: {"status": "failed", "began_at": BEGAN.isoformat(), "ended_at": BEGAN.isoformat(), "error": error}
        }
        summary = literal({"status": "failed", "tables_failed": 1, "tables": tables})
        self.database.psql(
            f"UPDATE dl_etl_tasks SET status = 'failed', started_at = '{BEGAN}', finished_at = '{BEGAN}',"
            f" summary = {summary} WHERE run_id = '{run_id}' AND task = {literal(task)}"
        )

    def failures(self, run_id: UUID, load: str, number: int) -> None:
        """Create failures of a load in the run."""
        self.database.psql(
            "INSERT INTO dl_etl_failures (run_id, load, segment, phase, key, error)"
            f" SELECT '{run_id}', {literal(load)}, 'all', 'request', 'page ' || n, 'HTTP 503'"
            f" FROM generate_series(1, {number}) AS n"
        )
