"""Cost of a page: at most four statements, and two for its live part, whatever it shows (U13)."""

from __future__ import annotations

import math
import re

import pytest
from databases import raw_connection
from statements import record_statements

from dataloader.web.pages import menu_numbers

pytestmark = [pytest.mark.full, pytest.mark.requirement("E11")]

OF_A_PAGE, OF_A_PART = 4, 2
"""Maximum numbers of statements."""
CONTROL = ("SET ", "BEGIN", "COMMIT", "SAVEPOINT", "RELEASE")
ROWS = """
INSERT INTO dl_workers (worker, host, pid, version, queues, tasks) VALUES ('w', 'h', 7, '1', '{"q": 1}', '{t,limited,each}');
INSERT INTO dl_tasks (task, layout, declared_by, limited, limits, supplier) VALUES
  ('limited', 1, 'w', true, '{"max_running": 1}', 's'), ('each', 1, 'w', true, '{"max_running_per_partition": 1}', NULL);
INSERT INTO dl_sources (source, limits, units, spans_s) VALUES ('s', '{"rate_limits": [[100, 60]]}', '{100}', '{60}');
INSERT INTO dl_schedules (name, spec, task, origin, stored_by, next_at)
  VALUES ('s', '{"task": "t", "cron": "30 2 * * *"}', 't', 'code', 'w', now() + interval '1 h');
INSERT INTO dl_jobs (job_id, queue, task, lock_key, lane, waits_for, partition_key, available_at) VALUES
  (md5('time')::uuid, 'q', 't', 'a', NULL, 'time', '', now() + interval '1 h'),
  (md5('key')::uuid, 'q', 't', 'held', NULL, 'lock', '', now()),
  (md5('free key')::uuid, 'q', 't', 'free', NULL, 'lock', '', now()),
  (md5('limit')::uuid, 'q', 'limited', 'b', 'limited', 'limit', '', now()),
  (md5('partition')::uuid, 'q', 'each', 'c', 'each', 'limit', 'p', now()),
  (md5('task')::uuid, 'q', 'u', 'd', NULL, 'task', '', now()),
  (md5('ready')::uuid, 'q', 't', 'e', NULL, NULL, '', now()),
  (md5('no worker')::uuid, 'p', 't', 'f', NULL, NULL, '', now()),
  (md5('after')::uuid, 'q', 't', 'g', NULL, 'after', '', 'infinity');
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, claimed_by, started_at, lease_expires_at, token)
  VALUES (md5('running')::uuid, 'q', 't', 'held', 'running', 'w', now(), now() + interval '1 h', 7);
INSERT INTO dl_jobs (job_id, queue, task, lock_key, status, attempt, error, started_at, finished_at) VALUES
  (md5('failed')::uuid, 'q', 't', 'h', 'failed', 1, 'ValueError: odd', now(), now()),
  (md5('done')::uuid, 'q', 't', 'i', 'succeeded', 1, NULL, now(), now());
INSERT INTO dl_job_after (job_id, after_id) VALUES (md5('after')::uuid, md5('running')::uuid);
INSERT INTO dl_job_events (job_id, queue, kind, payload) SELECT job_id, queue, 'log', '{"level": "info", "message": "m"}'
  FROM dl_jobs WHERE status IN ('running', 'failed');
INSERT INTO dl_processes (type, process_id, status, metadata, last_event_id, error_group, detail)
  SELECT 'pay', i::text, (ARRAY['running', 'error'])[1 + i % 2], '{"a": 1}', 1, 7, 'odd' FROM generate_series(1, 120) AS i;
INSERT INTO dl_process_tasks (task_id, key, type, kind, status, finished_at)
  SELECT key, key, 'pay', 'call', CASE WHEN key % 3 > 0 THEN 'finished' ELSE 'waiting' END, now() FROM dl_processes;
INSERT INTO dl_process_events (key, event_id, task_id, payload) SELECT key, 1, task_id, '1' FROM dl_process_tasks;
"""  # noqa: E501 - a row a line
PAGES = """
/ui /ui/find?q=nobody /ui/jobs /ui/jobs?status=failed /ui/jobs?queue=q /ui/key?k=held /ui/key?k=free /ui/runs
/ui/loads /ui/load?name=ods.rates
/ui/suppliers /ui/supplier?name=s /ui/queues /ui/queue?name=q /ui/workers /ui/tasks /ui/task?name=limited
/ui/errors /ui/errors?exact=true /ui/errors/log /ui/errors/log?task=t /ui/schedules /ui/schedule?name=s
/ui/processes /ui/processes?status=error /ui/processes?type=pay&error_group=0000000000000007
/ui/processes?metadata=a%3D1&status=error /ui/processes/errors /ui/processes/new /ui/process/task/1
/ui/processes/errors/mend?type=pay&error_group=0000000000000007&action=repair
/ui/process?type=pay&id=1 /ui/process?type=pay&id=2 /ui/process/events?type=pay&id=1 /ui/process/state?type=pay&id=1
/ui/processes/deliveries?held=true
/ui/stats /ui/stats?by=day /ui/audit /ui/audit?actor=ann /ui/bulk
""".split()  # noqa: SIM905 - lines are easier to read


async def test_u13_a_page_takes_at_most_four_statements_and_its_live_part_two(
    open_web, database, nightly, make, monkeypatch
):
    # The menu's numbers are read for all pages together, every five seconds.
    monkeypatch.setattr(menu_numbers, "REMEMBERED_S", math.inf)
    database.psql(ROWS)
    running = make.run([("ods.rates", "running")], status="running")
    group, *ids = database.psql(
        "SELECT lpad(to_hex(error_group), 16, '0') FROM dl_jobs WHERE error = 'ValueError: odd';"
        "SELECT job_id FROM dl_jobs"
    ).split()
    paths = [*PAGES, f"/ui/errors/{group}", f"/ui/jobs/{ids[0]}/compare"]
    paths += [f"/ui/runs/{running}"] + [
        f"/ui/runs/{nightly}{more}" for more in ("", "?view=all", "?open=2", "/failures")
    ]
    paths += [f"/ui/runs/{nightly}/with/{running}"]
    paths += [f"/ui/jobs/{job_id}{more}" for job_id in ids for more in ("", "/log")]
    found = {}
    async with open_web() as web, raw_connection(database.dsn) as other:
        said = await record_statements(web.services.database)

        async def asked(path, most):
            await web.client.get(path)  # the driver reads the statement's types
            await other.execute("UPDATE dl_depths SET next_at = '-infinity'")
            said.clear()
            answer = await web.client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            found[path] = statements = [one.query for one in said if not one.query.startswith(CONTROL)]
            assert len(statements) <= most, (path, statements)
            return answer.text

        for path in paths:
            text = await asked(path, OF_A_PAGE)
            live = re.search(r'data-part="(\w+)" data-live', text)
            # Search results are read only once.
            if live and "metadata=" not in path:
                await asked(f"{path}{'&' if '?' in path else '?'}part={live[1]}", OF_A_PART)
    assert sum("part=" in path for path in found) > 20 + len(ids)
    # The driver does not log statements that it reads by a cursor.
    silent = {path.partition("?")[0] for path, statements in found.items() if not statements}
    assert silent <= {"/ui/bulk", "/ui/audit", "/ui/errors/log"}
