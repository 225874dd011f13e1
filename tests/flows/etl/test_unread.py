"""A truncated answer, or a page of HTML with a good status, is a failure that is retried (E10)."""

from __future__ import annotations

import gzip
import io
import socketserver
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import pytest
from etl_tasks import item, items_load
from source_app import Answer
from walking import ask

from dataloader.flows.etl import Detail, Load, Request, Table
from dataloader.flows.etl.formats.content import Content
from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.formats.json_format import Json, JsonLines
from dataloader.flows.etl.formats.xml_format import Xml
from dataloader.flows.etl.sources.http import Http
from dataloader.flows.etl.sources.source import SourceError

pytestmark = pytest.mark.requirement("E10")
LINES = b'{"id": 1, "day": "2026-01-01"}\n{"id": 2, "day": "2026-01-01"}\n'
TABLE = b"id,day\n1,2026-01-01\n2,2026-01-01\n"
HTML = b"<!DOCTYPE html>\n<html><body><h1>We are back soon</h1></body></html>\n"


@contextmanager
def ending_with_the_connection(*bodies):
    """Return the address of a service that sends no length: an answer ends with its connection."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bodies[min(len(asked), len(bodies)) - 1])

        def log_message(self, *args):
            """Suppress output to the terminal."""

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


def load_of(url, form, **fields):
    return Load(
        "items",
        Http(url, format=form, **fields),
        Table("item", key="id"),
        pipeline={"rate_min": 0, "rate_max": 0},
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "whole", "part"),
    [
        (JsonLines(), LINES, LINES[:40]),
        # Cut at the end of a line, which cannot be detected.
        (JsonLines(), LINES, LINES[: len(LINES) // 2]),
        (Csv(), TABLE, TABLE[: len(TABLE) // 2]),
    ],
)
async def test_lines_that_end_with_the_connection_are_incomplete_and_requested_again(
    form, whole, part, items, outcome_of, soon, raw
):
    with ending_with_the_connection(part) as (url, asked):
        outcome = await outcome_of(load_of(url, form))
        assert outcome.status == "failed"
        [failure] = outcome.result["failures"]
        assert "has no length and ends with its connection" in failure["error"]
        assert len(asked) == 3
    assert await raw.fetchval("SELECT count(*) FROM item") == 0
    with ending_with_the_connection(whole) as (url, asked):
        outcome = await outcome_of(load_of(url, form, ends_with_connection=True))
        assert (outcome.status, len(asked)) == ("succeeded", 1)


async def test_a_cut_line_is_requested_again_even_if_the_connection_may_end_an_answer(items, counts_of, soon):
    with ending_with_the_connection(LINES[:40], LINES) as (url, asked):
        counts = await counts_of(load_of(url, JsonLines(), ends_with_connection=True))
        assert (counts["inserted"], len(asked)) == (2, 2)


async def test_a_document_shows_its_end_itself(items, outcome_of, soon):
    whole = b'[{"id": 1, "day": "2026-01-01"}]'
    with ending_with_the_connection(whole[:20], whole) as (url, asked):
        outcome = await outcome_of(load_of(url, Json()))
        assert (outcome.status, outcome.result["counts"]["inserted"], len(asked)) == ("succeeded", 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "good"),
    [
        (Json(), b'[{"id": 1, "day": "2026-01-01"}]'),
        (JsonLines(), LINES[:31]),
        (Csv(), b"id,day\n1,2026-01-01\n"),
        (Csv(columns=("id", "day")), b"1,2026-01-01\n"),
        (Xml("item"), b"<items><item id='1' day='2026-01-01'/></items>"),
    ],
)
async def test_a_page_of_html_with_a_good_status_is_asked_for_again(form, good, items, outcome_of, soon, raw):
    # Well-formed, so that it could be read as XML without items.
    items.service.put("/", Answer(good))
    items.service.misbehave(body=b"<html><body><h1>We are back soon</h1></body></html>", status=200, times=2)
    outcome = await outcome_of(load_of(items.service.url, form))
    assert (outcome.status, outcome.result["counts"]["inserted"]) == ("succeeded", 1)
    assert len(items.service.requests) == 3
    assert outcome.result["failures"] == []


@pytest.mark.parametrize("form", [Json(), JsonLines(), Csv(), Xml("item")])
def test_a_page_of_html_is_named_as_what_it_is(form):
    with pytest.raises(SourceError) as caught:
        form.parse(io.BytesIO(b"\n" + HTML), None)
    assert caught.value.is_retryable
    assert {Json: "not JSON", Xml: "HTML"}.get(type(form), "<!DOCTYPE html>") in str(caught.value)


def test_a_header_in_angle_brackets_is_a_header():
    content: Content = Csv().parse(io.BytesIO(b"<HTM>,<DATE>\n1,2\n"), None)
    assert list(content.all()) == [{"<HTM>": "1", "<DATE>": "2"}]


async def test_an_unreadable_answer_is_requested_as_often_as_any_failed_request(items, outcome_of, soon, raw):
    items.records = [item(number, number) for number in range(1, 5)]
    items.service.misbehave("from=2026-01-02", body=b'{"items": [', status=200, times=None)
    outcome = await outcome_of(items_load(items.service.url, pipeline={"attempts": 4}), to="2026-01-05")
    assert len(items.service.asked("from=2026-01-02")) == 4
    assert [failure["segment"][:10] for failure in outcome.result["failures"]] == ["2026-01-02"]
    assert [row["id"] for row in await raw.fetch("SELECT id FROM item ORDER BY id")] == [1, 3, 4]
    assert (
        await raw.fetchval(
            "SELECT to_char((state ->> 'upto')::timestamptz AT TIME ZONE 'UTC', 'DD') FROM dl_load_state"
        )
        == "02"
    )


@pytest.mark.slow
async def test_a_list_that_could_not_be_read_at_first_has_its_details_asked_for(items, outcome_of, soon, raw):
    await raw.execute("CREATE TABLE more (id int PRIMARY KEY, name text)")
    items.records = [item(1), item(2)]
    items.service.put("/more", Answer(b'[{"name": "x"}]'))
    items.service.misbehave("/items", body=HTML, status=200)
    items.service.misbehave("/more", body=HTML, status=200)
    detail = Detail(
        id=lambda record: record["id"],
        request=lambda _: Request(endpoint="/more"),
        source=Http(items.service.url),
        transform=lambda number, record: {"id": number, **record},
        table=Table("more", key="id"),
    )
    outcome = await outcome_of(items_load(items.service.url, windows=None, detail=detail))
    assert (outcome.status, outcome.result["counts"]["inserted"]) == ("succeeded", 4)
    assert [seen.path for seen in items.service.requests].count("/more") == 3


class EndsBadly:
    """Format that can report a failed request, and whose records may end in an error during iteration."""

    reports_errors = True
    has_end = True

    def parse(self, stream, _charset):
        said = SourceError("it can't be read", is_retryable=True)
        if stream.read() == b"late":
            return Content(rest=self.ending(said))
        raise said

    def ending(self, error):
        yield {"id": 1}
        raise error


async def test_an_answer_that_stays_unreadable_after_its_retries_is_a_failure(items, outcome_of, soon):
    items.service.put("/", Answer(b"never"))
    items.service.misbehave(body=b"late", status=200)
    outcome = await outcome_of(load_of(items.service.url, EndsBadly()))
    assert outcome.status == "failed"
    assert [failure["error"] for failure in outcome.result["failures"]] == ["it can't be read"]
    assert len(items.service.requests) == 3
    again = [line.fields["tries"] for line in outcome.log if "repeating a request" in line.message]
    assert again == [1, 2]


async def test_gzip_of_several_members_is_unpacked(service):
    whole = b'[{"a": 1},' + b" " * 100_000 + b'{"a": 2}]'
    body = b"".join(gzip.compress(whole[at : at + 30_000]) for at in range(0, len(whole), 30_000))
    service.put("/", Answer(body, headers={"Content-Encoding": "gzip"}))
    assert (await ask(Http(service.url))).body == whole
    for more, told in ((b"more", "there are data after the compressed part"), (b"\x1f\x8b", "are truncated")):
        service.put("/", Answer(body + more, headers={"Content-Encoding": "gzip"}))
        with pytest.raises(SourceError, match=told):
            await ask(Http(service.url))
