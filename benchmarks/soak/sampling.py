"""Samples every ten seconds: the services' processes, the tables, the latency of recently ended jobs.

Ended jobs are deleted after a minute, and counted, so that the tables reach a constant size. The service's own
retention is in days; its statement is the same.
"""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from collections import Counter
from typing import Any, Final

import psutil  # type: ignore[import-untyped]
import psycopg

from benchmarks.soak.fleet import Fleet, Service
from benchmarks.soak.verdict import Sample

EVERY_S: Final = 10
KEPT_S: Final = 60
BATCH: Final = 1_000
FINAL: Final = ("succeeded", "failed", "canceled", "lost")

_DELETE: Final = """
WITH gone AS (
  DELETE FROM dl_jobs WHERE job_id = ANY (ARRAY(
    SELECT job_id FROM dl_jobs WHERE status = %s AND finished_at < now() - make_interval(secs => %s)
    ORDER BY finished_at LIMIT %s FOR UPDATE SKIP LOCKED))
  RETURNING job_id
)
SELECT count(*) FROM gone
"""
_LATENCY: Final = """
SELECT percentile_cont(ARRAY[0.5, 0.99]) WITHIN GROUP (
  ORDER BY (extract(epoch FROM finished_at)::float8 - (args ->> 'sent')::float8) * 1000)
FROM dl_jobs WHERE status = 'succeeded' AND finished_at > now() - make_interval(secs => %s)
"""
_STATUSES: Final = "SELECT status::text, count(*) FROM dl_jobs WHERE status IN ('queued', 'running') GROUP BY status"
_TABLES: Final = """
SELECT relname, n_dead_tup, pg_total_relation_size(relid)::float8 / 2 ^ 20 FROM pg_stat_user_tables
WHERE relname IN ('dl_jobs', 'dl_job_events')
"""
_METRIC: Final = re.compile(r'^dataloader_(slots|pool_connections)\{.*state="used"\} (\S+)$', re.MULTILINE)


class Sampler:
    """Takes samples, and deletes ended jobs; `ended` counts the deleted ones by status."""

    def __init__(self, dsn: str, fleet: Fleet) -> None:
        self.ended: Counter[str] = Counter()
        self._connection: psycopg.Connection[Any] = psycopg.connect(dsn, autocommit=True)
        self._fleet = fleet

    def sample(self, at_s: float, accepted: int) -> Sample:
        """Return the current figures; those that cannot be read are left out."""
        p50_ms, p99_ms = self._rows(_LATENCY, EVERY_S)[0][0] or (None, None)
        figures = {"at_s": round(at_s, 1), "accepted": accepted, "p50_ms": p50_ms, "p99_ms": p99_ms}
        figures |= {"queued": 0, "running": 0} | dict(self._rows(_STATUSES))
        for table, dead, mib in self._rows(_TABLES):
            name = table.removeprefix("dl_")
            figures |= {f"{name}_dead": dead, f"{name}_mib": mib}
        self.clear(KEPT_S)
        return {name: value for name, value in (figures | self._processes()).items() if value is not None}

    def open_jobs(self) -> int:
        """Return the number of jobs that have not ended."""
        return sum(count for _, count in self._rows(_STATUSES))

    def clear(self, kept_s: float) -> None:
        """Delete jobs that ended more than `kept_s` seconds ago, in batches."""
        for status in FINAL:
            gone = BATCH
            while gone == BATCH:
                [(gone,)] = self._rows(_DELETE, status, kept_s, BATCH)
                self.ended[status] += gone

    def _processes(self) -> dict[str, float]:
        figures = self._process(self._fleet.services[0])
        for number, service in enumerate(self._fleet.services[1:], 1):
            figures |= {f"{name}_{number}": value for name, value in self._process(service).items()}
        return figures

    @staticmethod
    def _process(service: Service) -> dict[str, float]:
        try:
            process = psutil.Process(service.process.pid)
            with urllib.request.urlopen(f"{service.url}/metrics", timeout=5) as answer:
                used = Counter[str]()
                for name, value in _METRIC.findall(answer.read().decode()):
                    used[f"{name}_used"] += float(value)
            with process.oneshot():
                figures = {"rss_mib": process.memory_info().rss / 2**20, "threads": process.num_threads()}
                return figures | {"descriptors": process.num_fds()} | used
        except (psutil.Error, OSError, ValueError):
            return {}

    def _rows(self, statement: str, *parameters: object) -> list[Any]:
        return self._connection.execute(statement.encode(), parameters or None).fetchall()
