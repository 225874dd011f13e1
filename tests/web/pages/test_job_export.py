"""Files of jobs: their contents, the small part of them in memory, and an error if a file is incomplete."""

from __future__ import annotations

import csv
import io
import json
import re
from uuid import uuid4

import httpx2
import pytest
import trio
from conditions import patience_s, until
from turns import all_taken, waiting_for
from web_server import all_tokens, cookie_of

from dataloader.web.server.limits import HttpLimits

pytestmark = pytest.mark.requirement("E11")

EXPORT = "/ui/jobs/export"


def add(database, number, args="'{}'"):
    """Add `number` jobs to the queue q, each younger than the one before; return their IDs.

    A part of a file has 200.
    """
    database.psql(
        "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args, created_at)"
        f" SELECT md5(i::text)::uuid, 'q', 't', i::text, {args}, now() + i * interval '1 ms'"
        f" FROM generate_series(0, {number - 1}) AS i"
    )
    return database.psql(f"SELECT md5(i::text)::uuid FROM generate_series(0, {number - 1}) AS i").split()


@pytest.mark.slow
async def test_u24_a_filter_is_exported_whole_in_utc_without_secrets(open_web, database):
    async with open_web() as web:
        await web.client.post("/ui/look", data={"zone": "Europe/Berlin"}, headers={"Origin": web.url})
        ids = add(database, 401, "jsonb_build_object('n', 9007199254740993 + i, 'password', 'hunter2')")
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
        assert sorted(row["args"]["n"] for row in rows) == [9007199254740993 + n for n in range(401)]
        assert {row["args"]["password"] for row in rows} == {"***"}

        table = list(csv.DictReader(io.StringIO((await web.client.get(EXPORT, params=query | {"format": "csv"})).text)))
        assert sorted(row["job_id"] for row in table) == sorted(ids)
        assert {row["created_at"] for row in table} == {"2026-11-22T23:30:00+00:00"}

        found = await web.client.get(EXPORT, params={"args": "n=9007199254740994"})
        assert [json.loads(line)["job_id"] for line in found.text.splitlines()] == [ids[1]]
        assert (await web.client.get(EXPORT, params={"args": "password=hunter2"})).status_code == 422
    for most in (3, 250):
        async with open_web(limits=HttpLimits(exported_jobs=most)) as web:
            assert len((await web.client.get(EXPORT)).text.splitlines()) == most


FORMULAS = (
    "=HYPERLINK(1)", "+1", "-1", "@x", "\t=1", "\uff1d1", "\uff0b1", "\uff0d1", "\uff201", "x;=cmd|' /C calc'!A0;y",
    'x;"=1', 'x; ""=1', "x\t+1", "x|-1", "x;\uff1d1",
)  # fmt: skip


async def test_u24_a_value_that_looks_like_a_formula_is_a_text_in_csv(open_web, database):
    """For every separator that the opening program may use."""
    async with open_web() as web:
        for name in (*FORMULAS, "plain"):
            quoted = name.replace("'", "''")
            database.psql(
                "INSERT INTO dl_jobs (job_id, queue, task, lock_key, priority, error)"
                f" VALUES ('{uuid4()}', 'q', 't', 'k', 5, '{quoted}')"
            )
        text = (await web.client.get(EXPORT, params={"format": "csv"})).text
        rows = list(csv.DictReader(io.StringIO(text)))
        assert {row["priority"] for row in rows} == {"5"}
        assert len(rows) == len(FORMULAS) + 1
        assert "plain" in {row["error"] for row in rows}
        for delimiter in ",;\t|":
            cells = [cell for row in csv.reader(io.StringIO(text), delimiter=delimiter) for cell in row]
            assert [cell for cell in cells if re.match(r"[=+@\uff1d\uff0b\uff0d\uff20-]", cell)] == [], delimiter


@pytest.mark.slow
async def test_a_file_that_fails_on_the_way_is_cut_off(open_web, database):
    database.psql("ALTER TYPE dl_status ADD VALUE 'of a later release'")
    async with open_web() as web:
        first, *_ = add(database, 201)
        assert len((await web.client.get(EXPORT)).text.splitlines()) == 201
        # The last part has a job that this release cannot read.
        database.psql(f"UPDATE dl_jobs SET status = 'of a later release' WHERE job_id = '{first}'")
        with pytest.raises(httpx2.RemoteProtocolError):
            await web.client.get(EXPORT)
        database.psql(f"DELETE FROM dl_jobs WHERE job_id <> '{first}'")
        assert (await web.client.get(EXPORT)).status_code == 500
        database.psql("DELETE FROM dl_jobs")
        assert (await web.client.get(EXPORT)).status_code == 200


@pytest.mark.slow
async def test_a_client_that_leaves_ends_the_reading(open_web, database):
    async with open_web() as web:
        # More than the buffers of the connection hold.
        add(database, 401, "jsonb_build_object('text', repeat('x', 5000))")
        web.sock.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 32_768)
        files = web.services.turns.files
        async with await trio.open_tcp_stream(*web.sock.getsockname()) as stream:
            stream.socket.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_RCVBUF, 65_536)
            await stream.send_all(f"GET {EXPORT} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert await stream.receive_some()
            assert files.held == 1

        async def taken():
            return files.held

        await until(taken, lambda number: number == 0)
        # Now the next client gets its file.
        assert len((await web.client.get(EXPORT)).text.splitlines()) == 401


async def test_exports_beyond_the_limit_of_concurrent_files_are_refused(open_web):
    async with open_web() as web:
        await web.trigger()
        files, exports, lines = web.services.turns.files, web.services.turns.exports, []

        async def export():
            lines.extend((await web.client.get(EXPORT)).text.splitlines())

        with trio.fail_after(patience_s()):
            async with trio.open_nursery() as nursery, all_taken(exports):
                nursery.start_soon(export)
                await until(lambda: waiting_for(exports), lambda number: number == 1)
                assert (files.held, lines) == (1, [])
        assert (files.held, len(lines)) == (0, 1)
        async with all_taken(files):
            refused = await web.client.get(EXPORT)
            assert (refused.status_code, "four files concurrently" in refused.text) == (503, True)
        assert (await web.client.get(EXPORT)).status_code == 200


async def test_two_files_of_an_operator_leave_two_places_for_others(open_web):
    async with open_web(tokens=all_tokens()) as web:
        reader, operator = await cookie_of(web, "reader"), await cookie_of(web, "operator")
        files = web.services.turns.files
        async with files.place_of("reader"), files.place_of("reader"):
            refused = await web.client.get(EXPORT, headers=reader)
            assert (refused.status_code, "two per operator" in refused.text) == (503, True)
            assert (await web.client.get(EXPORT, headers=operator)).status_code == 200
        assert (await web.client.get(EXPORT, headers=reader)).status_code == 200


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
