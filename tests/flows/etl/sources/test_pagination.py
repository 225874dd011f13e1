"""Scans over pages: each strategy reaches all records, and none continues forever."""

from __future__ import annotations

import json
import time
from decimal import Decimal

import attrs
import pytest
from source_app import Answer
from walking import ask, first, records, walk

from dataloader.flows.etl.formats.content import Content
from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.formats.json_format import Json
from dataloader.flows.etl.sources.credentials import Auth
from dataloader.flows.etl.sources.http import Http
from dataloader.flows.etl.sources.page_walk import links, without
from dataloader.flows.etl.sources.pagination import Cursor, LinkHeader, NextUrl, Offset, PageNumber
from dataloader.flows.etl.sources.source import Page, Request, Response, SourceError

pytestmark = pytest.mark.requirement("S7")

LIST = "/factbook/2025-01-22/countries"


@pytest.mark.parametrize(
    ("pages", "asked"),
    [
        (PageNumber(size=50), 6),
        (PageNumber(size=50, total_path="total"), 6),
        (PageNumber(size=87, total_path="total"), 3),
        (PageNumber(size=87), 4),
        (Offset(size=50), 6),
        (Offset(size=50, total_path="total"), 6),
        (Cursor(path="next_cursor", size_param="size", size=50), 6),
        (NextUrl(path="next"), 6),
        (LinkHeader(), 6),
    ],
)
async def test_every_pagination_strategy_reads_each_record_once(source_app, pages, asked):
    source = Http(source_app.url, endpoint=LIST, format=Json("items"), pages=pages)
    walked = await walk(source)
    codes = [record["code"] for record in records(walked)]
    assert len(codes) == len(set(codes)) == 261
    assert len(source_app.asked("countries")) == asked
    assert source_app.most_at_once() == 1


def numbered(rows: int, *, most: int = 1_000):
    """Return the answers of a list by page and size, or by offset and limit."""

    def answer(seen):
        size = min(int(seen.query.get("size") or seen.query.get("limit")), most)
        start = int(seen.query["offset"]) if "offset" in seen.query else (int(seen.query["page"]) - 1) * size
        items = [{"id": n} for n in range(start, min(start + size, rows))]
        return Answer(json.dumps({"items": items, "total": rows}).encode())

    return answer


async def ids(service, pages) -> list[int]:
    source = Http(service.url, endpoint="/list", format=Json("items"), pages=pages)
    return [record["id"] for record in records(await walk(source))]


async def csv_ids(service, pages) -> list[str]:
    source = Http(service.url, endpoint="/list", format=Csv(), pages=pages)
    return [record["id"] for record in records(await walk(source))]


@pytest.mark.slow
async def test_a_last_page_that_is_full_needs_one_more_request_only_without_a_total(service):
    service.put("/list", numbered(100))
    assert await ids(service, PageNumber(size=50)) == list(range(100))
    assert len(service.requests) == 3
    assert await ids(service, PageNumber(size=50, total_path="total")) == list(range(100))
    assert len(service.requests) == 5


async def test_pages_can_be_counted_from_zero(service):
    service.put(
        "/list", lambda seen: numbered(75)(attrs.evolve(seen, query={**seen.query, "page": seen.query["page"]}))
    )
    source = Http(service.url, endpoint="/list", format=Json("items"), pages=PageNumber(first_page=0, size=50))
    request = await first(source)
    assert (request.params, request.page) == ({"page": 0, "size": 50}, 1)
    assert source.after_failure(attrs.evolve(request, total=51)).params["page"] == 1


async def test_a_page_smaller_than_requested_is_an_error_by_number_and_none_by_offset(service):
    service.put("/list", numbered(100, most=20))
    with pytest.raises(SourceError, match=r"page 1 has 20 records, not 50, although total is 100; check that the API"):
        await ids(service, PageNumber(size=50, total_path="total"))
    assert await ids(service, Offset(size=50, total_path="total")) == list(range(100))


async def test_a_list_that_ends_before_its_total_is_an_error(service):
    service.put("/list", Answer(b'{"items": [], "total": 7}'))
    for pages in (PageNumber(total_path="total"), Offset(total_path="total")):
        with pytest.raises(SourceError, match="although total is 7"):
            await ids(service, pages)


async def test_a_total_that_is_none_is_an_error(service):
    service.put("/list", Answer(b'{"items": [], "total": "many"}'))
    with pytest.raises(SourceError, match="total_path: total is a string, not a number of records") as caught:
        await ids(service, PageNumber(total_path="total"))
    assert not caught.value.is_retryable
    with pytest.raises(SourceError, match=r"total_path: count\.all is nothing"):
        await ids(service, Offset(total_path="count.all"))


async def test_broken_records_count_for_the_fullness_of_a_page(service):
    items = [{"id": 0}, "broken", {"id": 1}]
    service.put(
        "/list", lambda seen: Answer(json.dumps({"items": items if seen.query["page"] == "1" else []}).encode())
    )
    assert await ids(service, PageNumber(size=3)) == [0, 1]
    assert len(service.requests) == 2


@pytest.mark.parametrize("pages", [PageNumber(size=5), Offset(size=5)])
async def test_a_wrong_quote_in_a_page_of_csv_does_not_end_the_walk(service, pages):
    lines = [f"{n},x" for n in range(12)]
    lines[2] = '2,"5 inch'

    def page(seen):
        start = int(seen.query["offset"]) if "offset" in seen.query else 5 * (int(seen.query["page"]) - 1)
        return Answer("\n".join(["id,name", *lines[start : start + 5], ""]).encode(), type="text/csv")

    service.put("/list", page)
    assert await csv_ids(service, pages) == ["0", "1", *(str(n) for n in range(5, 12))]


async def test_the_lines_of_one_broken_record_do_not_move_the_offset_past_other_records(service):
    records = [f"{n},x\n" for n in range(12)]
    records[2] = '2,"three\nlines\nlong",one cell too many\n'

    def page(seen):
        start = int(seen.query["offset"])
        return Answer(("id,name\n" + "".join(records[start : start + 5])).encode(), type="text/csv")

    service.put("/list", page)
    assert await csv_ids(service, Offset(size=5)) == ["0", "1", *(str(n) for n in range(3, 12))]


async def test_an_interface_that_does_not_know_the_page_parameter_is_noticed(service):
    service.put("/list", Answer(json.dumps({"items": [{"id": n} for n in range(50)]}).encode()))
    for pages in (PageNumber(size=50), Offset(size=50)):
        with pytest.raises(
            SourceError, match="page 2 has the same records as page 1; check that the API supports the param"
        ) as caught:
            await ids(service, pages)
        assert not caught.value.is_retryable


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 3, 7, 20])
@pytest.mark.parametrize("before", [0, 1, 5])
async def test_a_walk_in_a_circle_of_any_length_is_noticed(service, length, before):
    """The page after the last one is a former page."""

    def answer(seen):
        place = int(seen.query.get("cursor", 0)) + 1
        return Answer(
            json.dumps({"items": [{"id": place}], "next": place if place < before + length else before}).encode()
        )

    service.put("/list", answer)
    with pytest.raises(SourceError, match="the pages form a cycle") as caught:
        await ids(service, Cursor(path="next"))
    assert not caught.value.is_retryable
    assert len(service.requests) <= 3 * (length + before) + 2


async def test_a_next_page_that_is_the_same_page_is_detected_immediately(service):
    service.put("/list", Answer(b'{"items": [{"id": 1}]}', headers={"Link": '</list>; rel="next"'}))
    with pytest.raises(SourceError, match="the pages form a cycle: page 2 would repeat an earlier request"):
        await ids(service, LinkHeader())
    assert len(service.requests) == 1


@pytest.mark.parametrize("kind", [PageNumber, Offset, Cursor])
async def test_a_walk_that_never_ends_ends(service, kind):
    def answer(seen):
        place = len(service.requests)
        return Answer(json.dumps({"items": [{"id": place}, {"id": -place}], "next": f"c{place}"}).encode())

    service.put("/list", answer)
    pages = Cursor(path="next", max_pages=9) if kind is Cursor else kind(size=2, max_pages=9)
    with pytest.raises(SourceError, match="max_pages: there are more than 9 pages"):
        await ids(service, pages)
    assert len(service.requests) == 9


@pytest.mark.slow
@pytest.mark.parametrize("next_", [True, 1.5, {"a": 1}, [1]])
async def test_a_cursor_or_address_of_another_kind_is_an_error(service, next_):
    service.put("/list", Answer(json.dumps({"items": [], "next": next_}).encode()))
    with pytest.raises(SourceError, match=r"path: next is .*, not a cursor"):
        await ids(service, Cursor(path="next"))
    with pytest.raises(SourceError, match=r"path: next is .*, not an address"):
        await ids(service, NextUrl(path="next"))


@pytest.mark.slow
@pytest.mark.parametrize("end", [{}, {"next": None}, {"next": ""}])
async def test_a_walk_ends_where_no_next_page_is_named(service, end):
    service.put("/list", Answer(json.dumps({"items": [{"id": 1}], **end}).encode()))
    assert await ids(service, Cursor(path="next")) == [1]
    assert await ids(service, NextUrl(path="next")) == [1]


async def test_after_a_failure_a_walk_continues_only_with_pages_known_to_exist():
    source = Http("http://127.0.0.1:9", endpoint="/list", params={"q": "x"}, pages=PageNumber(size=10, max_pages=3))
    # No answer has reported a total for the first page, or there is none.
    assert source.after_failure(await first(source)) is None
    second = source.after_failure(attrs.evolve(await first(source), total=99))
    assert (second.params, second.page, second.total) == ({"q": "x", "page": 2, "size": 10}, 2, 99)
    assert source.after_failure(source.after_failure(second)) is None  # by max_pages
    assert source.after_failure(attrs.evolve(second, total=20)) is None
    assert source.after_failure(attrs.evolve(second, total=21)).page == 3
    source = attrs.evolve(source, pages=Offset(size=10))
    assert source.after_failure(await first(source)) is None
    second = source.after_failure(attrs.evolve(await first(source), total=20))
    assert (second.params, second.page, second.total) == ({"q": "x", "offset": 10, "limit": 10}, 2, 20)
    assert source.after_failure(second) is None
    assert source.after_failure(attrs.evolve(second, total=21)).params["offset"] == 20
    for pages in (Cursor(path="next"), NextUrl(path="next"), LinkHeader(), None):
        source = attrs.evolve(source, pages=pages)
        assert source.after_failure(await first(source)) is None


@pytest.mark.slow
@pytest.mark.parametrize(("pages", "second"), [(PageNumber, "page=2"), (Offset, "offset=10")])
async def test_a_walk_continues_after_a_failed_page(service, pages, second):
    service.put("/list", numbered(30))
    service.misbehave(second, status=500)
    source = Http(service.url, endpoint="/list", format=Json("items"), pages=pages(size=10, total_path="total"))
    request, got = await first(source), []
    while request is not None:
        try:
            page = source.read(await ask(source, request))
        except SourceError:
            page = Page(records=[], following=source.after_failure(request))
        got += [record["id"] for record in page.records]
        request = page.following
    assert got == [*range(10), *range(20, 30)]


async def test_a_request_can_be_asked_again_from_its_json(service):
    service.put("/list", numbered(30))
    source = Http(service.url, endpoint="/list", format=Json("items"), pages=PageNumber(size=10))
    following = (source.read(await ask(source))).following
    again = Request(**json.loads(json.dumps(attrs.asdict(following))))
    assert again == following
    assert [record["id"] for record in source.read(await ask(source, again)).records] == list(range(10, 20))


def test_an_address_is_joined_and_loses_only_its_fragment():
    request = Request(endpoint="/list", params={"x": 1})
    response = Response(request=request, url="http://h/v1/list?x=1", status=200, headers={}, body=b"", took_s=0)
    following = NextUrl(path="next").following(response, Content(document={"next": "more?s=USD&s=EUR&s=&e=#top"}))
    assert (following.endpoint, following.params) == ("http://h/v1/more?s=USD&s=EUR&s=&e=", {})


@pytest.mark.parametrize(
    ("query", "left"),
    [
        ("q=caf%E9&flag&k=s&a;b=1", "q=caf%E9&flag&a;b=1"),
        ("k=s&q=%e9&&", "q=%e9&&"),
        ("q=1;k=s;p=2", "q=1;p=2"),
        ("%6B=s", ""),
        ("K=s&kk=1", "K=s&kk=1"),
    ],
)
def test_a_query_loses_secret_parameters_and_nothing_else(query, left):
    assert without(query, {"k"}) == left


async def test_the_next_address_is_sent_byte_for_byte(service):
    raw = "q=caf%E9&flag&x=a%2fb;c='d'&&page="

    def answer(seen):
        page = int(seen.query.get("page", 1))
        following = f"/v1/list?api_key=stale&{raw}{page + 1}" if page < 3 else None
        headers = {"Link": f'<{following}>; rel="next"'} if following else {}
        return Answer(json.dumps({"items": [{"id": page}], "next": following}).encode(), headers=headers)

    service.put("/v1/list", answer)
    for pages in (NextUrl(path="next"), LinkHeader()):
        for auth, added in ((Auth(), "api_key=stale&"), (Auth.param("api_key", "a b+c"), "")):
            service.requests.clear()
            source = Http(f"{service.url}/v1", endpoint="list", format=Json("items"), pages=pages, auth=auth)
            assert [record["id"] for record in records(await walk(source))] == [1, 2, 3]
            secret = "" if added else "&api_key=a+b%2Bc"
            assert [seen.raw_query for seen in service.requests[1:]] == [f"{added}{raw}{n}{secret}" for n in (2, 3)]


async def test_secrets_are_added_to_a_redirect_and_to_a_declared_query_without_changing_it(service):
    service.put("/list", Answer(status=302, headers={"Location": "/moved?q=caf%E9&flag"}))
    service.put("/moved", Answer(b"[]"))
    service.put("/declared", Answer(b"[]"))
    auth = Auth.param("api_key", "sesame")
    await walk(Http(service.url, endpoint="/list", auth=auth))
    await walk(Http(service.url, endpoint="/declared?q=caf%E9&flag", params={"n": 1}, auth=auth))
    asked = [seen.raw_query for seen in service.requests]
    assert asked == ["api_key=sesame", "q=caf%E9&flag&api_key=sesame", "q=caf%E9&flag&n=1&api_key=sesame"]


async def test_each_page_of_a_post_has_the_body_of_the_first(service):
    def answer(seen):
        return Answer(json.dumps({"items": [{"id": 1}], "next": None if seen.query else "/list?at=%E9"}).encode())

    service.put("/list", answer)
    source = Http(
        service.url,
        endpoint="/list",
        method="POST",
        params={"q": "x"},
        format=Json("items"),
        pages=NextUrl(path="next"),
    )
    assert len(await walk(source)) == 2
    assert [(seen.raw_query, seen.body) for seen in service.requests] == [("", b'{"q":"x"}'), ("at=%E9", b'{"q":"x"}')]


@pytest.mark.parametrize(
    ("pages", "asked", "error"),
    [
        (
            PageNumber(size=5),
            2,
            "page 2 has the same records as page 1; check that the API supports the parameters page, s",
        ),
        (
            Offset(size=5),
            2,
            "page 2 has the same records as page 1; check that the API supports the parameters offset, l",
        ),
        (
            PageNumber(size=1),
            5,
            "pages 1 to 5 have the same records; check that the API supports the parameters page, size",
        ),
        (
            Cursor(path="next"),
            5,
            r"pages 1 to 5 have the same records; check that the API supports the parameters cursor$",
        ),
        (
            NextUrl(path="url"),
            5,
            r"pages 1 to 5 have the same records; check that the API links each page to the next",
        ),
        (LinkHeader(), 5, r"pages 1 to 5 have the same records; check that the API links each page to the next"),
    ],
)
async def test_repeated_pages_are_noticed_by_their_records(service, pages, asked, error):
    """The rest of the bodies does not matter, such as a number of the request or the next cursor."""
    size = getattr(pages, "size", 5)
    items = [{"id": n, "price": 0.1} for n in range(size)]

    def answer(seen):
        number = len(service.requests)
        url = f"/list?at={number}"
        body = {"request_id": number, "items": items, "next": f"c{number}", "url": url}
        return Answer(json.dumps(body).encode(), headers={"Link": f'<{url}>; rel="next"'})

    service.put("/list", answer)
    with pytest.raises(SourceError, match=error) as caught:
        await ids(service, pages)
    assert not caught.value.is_retryable
    assert caught.value.ends_walk
    assert len(service.requests) == asked


async def test_pages_without_records_and_a_few_equal_ones_do_not_end_a_walk(service):
    shown = [[], [], [], [], [], [], [{"id": 1}], [{"id": 1}], [{"id": 1}], [{"id": 1}], [{"id": 2}], [{"id": 1}]]

    def answer(seen):
        place = int(seen.query.get("cursor", 0))
        following = place + 1 if place + 1 < len(shown) else None
        return Answer(json.dumps({"items": shown[place], "next": following}).encode())

    service.put("/list", answer)
    assert await ids(service, Cursor(path="next")) == [1, 1, 1, 1, 2, 1]


def test_records_of_any_kind_have_a_mark():
    marks = set()
    for records_ in ([{"a": Decimal("0.1")}], [{"a": object}], [{1: {2}}], [{"a": "\ud800"}], [{("a",): 1}]):
        request = Request(endpoint="/list", params={"page": 1})
        response = Response(request=request, url="http://h/list", status=200, headers={}, body=b"", took_s=0)
        marks.add(PageNumber(size=1).following(response, Content(records=records_)).mark)
    assert len(marks) == 5


@pytest.mark.parametrize(
    ("header", "found"),
    [
        ("", []),
        ("<a>; rel=next", [("a", {"next"})]),
        ('<a,b;c>; title="x, <y>; rel=no"; REL="Next Last"', [("a,b;c", {"next", "last"})]),
        ('<a>;rel="prev" , <b> ; rel = "next"', [("a", {"prev"}), ("b", {"next"})]),
        (r'<a>; title="\"; rel=prev; \""; rel="next"', [("a", {"next"})]),
        ('<a>; rel="first"; rel="next"', [("a", {"first"})]),
        ("<a>; crossorigin; rel=next", [("a", {"next"})]),
        ("nonsense, <b>; rel=next", []),
    ],
)
def test_link_headers_are_read_as_the_standard_has_them(header, found):
    assert links(header) == found


def test_a_link_header_made_to_be_slow_is_not():
    began = time.perf_counter()
    for header in ("<a>" + " " * 50_000 + "x", "<a>; a" * 20_000 + "\\", '<a>; t="' + "\\" * 50_000, "<" * 50_000):
        links(header)
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: PageNumber(size=0), "size: must be an integer of at least 1, not 0"),
        (lambda: PageNumber(param=""), "param: must be a non-empty string, not ''"),
        (lambda: PageNumber(first_page=-1), "first_page: must be an integer of at least 0, not -1"),
        (lambda: Offset(size=True), "size: must be .*, not True"),
        (lambda: Offset(max_pages=0), "max_pages: must be .*, not 0"),
        (lambda: Cursor(path=""), "path: must be .*, not ''"),
        (lambda: NextUrl(path=None), "path: must be .*, not None"),
        (lambda: LinkHeader(max_pages="many"), "max_pages: must be .*, not 'many'"),
    ],
)
def test_invalid_options_of_pages_are_refused_at_the_declaration(make, error):
    with pytest.raises(ValueError, match=error):
        make()
