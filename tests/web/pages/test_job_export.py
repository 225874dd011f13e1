"""Files of jobs: what is in them, how little of them is in memory, and that a file which is cut off is no file."""

from __future__ import annotations

import csv
import io
import json
import re
from uuid import uuid4

import httpx2
import pytest
import trio

from dataloader.jobs.errors import StoreUnavailable
from dataloader.store.queue.database_jobs import DatabaseJobs

pytestmark = pytest.mark.requirement("E11")

EXPORT = "/ui/jobs/export"


async def test_u24_a_filter_is_exported_whole_in_utc_without_secrets(open_web, database, monkeypatch):
    monkeypatch.setattr("dataloader.web.pages.job_export._READ", 2)
    async with open_web() as web:
        await web.client.post("/ui/look", data={"zone": "Europe/Berlin"}, headers={"Origin": web.url})
        ids = [
            await web.trigger(lock_key=str(n), args={"n": 9007199254740993 + n, "password": "hunter2"})
            for n in range(5)
        ]
        await web.trigger(queue="other")
        database.psql("UPDATE dl_jobs SET created_at = '2026-11-22 23:30:00Z'")
        query = {"queue": "q", "from": "2026-11-23T00:00"}
        answer = await web.client.get(EXPORT, params=query)
        assert answer.headers["Content-Type"] == "application/x-ndjson"
        assert re.fullmatch(r'attachment; filename="jobs-\d{8}-\d{6}Z.ndjson"', answer.headers["Content-Disposition"])
        assert "Content-Length" not in answer.headers
        rows = [json.loads(line) for line in answer.text.splitlines()]
        assert sorted(row["job_id"] for row in rows) == sorted(ids)
        assert {row["created_at"] for row in rows} == {"2026-11-22T23:30:00Z"}
        assert sorted(row["args"]["n"] for row in rows) == [9007199254740993 + n for n in range(5)]
        assert {row["args"]["password"] for row in rows} == {"***"}

        table = list(csv.DictReader(io.StringIO((await web.client.get(EXPORT, params=query | {"format": "csv"})).text)))
        assert sorted(row["job_id"] for row in table) == sorted(ids)
        assert {row["created_at"] for row in table} == {"2026-11-22T23:30:00+00:00"}

        found = await web.client.get(EXPORT, params={"args": "n=9007199254740994"})
        assert [json.loads(line)["job_id"] for line in found.text.splitlines()] == [ids[1]]
        assert (await web.client.get(EXPORT, params={"args": "password=hunter2"})).status_code == 422
        monkeypatch.setattr("dataloader.web.pages.job_export.MOST", 3)
        assert len((await web.client.get(EXPORT)).text.splitlines()) == 3


async def test_u24_what_looks_like_a_formula_is_a_text_in_csv(open_web, database):
    async with open_web() as web:
        for name in ("=HYPERLINK(1)", "+1", "-1", "@x", "\t=1", "plain"):
            database.psql(
                "INSERT INTO dl_jobs (job_id, queue, task, lock_key, priority)"
                f" VALUES ('{uuid4()}', '{name}', 't', 'k', 5)"
            )
        text = (await web.client.get(EXPORT, params={"format": "csv"})).text
        rows = list(csv.DictReader(io.StringIO(text)))
        assert sorted(row["queue"][0] for row in rows) == ["'"] * 5 + ["p"]
        assert {row["priority"] for row in rows} == {"5"}


async def test_a_file_that_fails_on_the_way_is_cut_off(open_web, monkeypatch):
    monkeypatch.setattr("dataloader.web.pages.job_export._READ", 1)
    async with open_web() as web:
        for number in range(3):
            await web.trigger(lock_key=str(number))
        find, asked = DatabaseJobs.find, []

        async def failing(self, *args, **kwargs):
            asked.append(kwargs)
            if len(asked) == 2:
                raise StoreUnavailable("gone")
            return await find(self, *args, **kwargs)

        monkeypatch.setattr(DatabaseJobs, "find", failing)
        with pytest.raises(httpx2.RemoteProtocolError):
            await web.client.get(EXPORT)
        asked[:] = [1]
        refused = await web.client.get(EXPORT)
        assert refused.status_code == 503
        assert (await web.client.get("/ui/jobs")).status_code == 200


@pytest.mark.slow
async def test_a_client_that_leaves_ends_the_reading(open_web, monkeypatch):
    monkeypatch.setattr("dataloader.web.pages.job_export._READ", 1)
    async with open_web() as web:
        for number in range(40):
            await web.trigger(lock_key=str(number))
        async with await trio.open_tcp_stream(*web.sock.getsockname()) as stream:
            await stream.send_all(f"GET {EXPORT} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert await stream.receive_some()
        # Whoever comes next has its turn.
        assert len((await web.client.get(EXPORT)).text.splitlines()) == 40


async def test_files_beyond_those_that_may_be_in_memory_at_once_are_refused(open_web, monkeypatch):
    async with open_web() as web:
        await web.trigger()
        find, taken, files = DatabaseJobs.find, [], web.services.turns.files

        async def watched(self, *args, **kwargs):
            taken.append(files.borrowed_tokens)
            return await find(self, *args, **kwargs)

        monkeypatch.setattr(DatabaseJobs, "find", watched)
        assert len((await web.client.get(EXPORT)).text.splitlines()) == 1
        assert (taken, files.borrowed_tokens) == ([0, 1], 0)
        files.total_tokens = 1
        async with files:
            refused = await web.client.get(EXPORT)
            assert (refused.status_code, "as many files as it may" in refused.text) == (503, True)
        assert (await web.client.get(EXPORT)).status_code == 200


async def test_u24_the_list_offers_the_same_as_a_link_curl_and_a_command(open_web):
    async with open_web() as web:
        text = (await web.client.get("/ui/jobs", params={"queue": "load", "status": "failed"})).text
        shown = text.replace("&amp;", "&").replace("&#39;", "'")
        assert f"curl '{web.url}/api/v1/jobs?queue=load&status=failed'" in shown
        assert "dataloader jobs --queue load --status failed" in shown
        assert 'href="/ui/jobs/export?format=csv&status=failed&queue=load"' in shown
        api = re.search(r"curl '([^']+)'", shown)[1]
        assert (await web.client.get(api)).status_code == 200
        args = (await web.client.get("/ui/jobs", params={"args": "a=1"})).text
        assert ("<p>Link" in args, "<p>curl" in args) == (True, False)
