"""HTTP as a source, on real sockets: whole answers or none, only on the declared host, and no secret anywhere."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import socket
import ssl
from datetime import UTC, datetime, timedelta

import attrs
import pytest
import trio
from certificates import certificate
from source_app import Answer, open_source_app
from walking import ask, first, records, requests, walk

from dataloader.flows.etl.formats.csv_format import Csv
from dataloader.flows.etl.formats.json_format import Json
from dataloader.flows.etl.formats.packed_format import Compressed
from dataloader.flows.etl.sources.credentials import Auth
from dataloader.flows.etl.sources.http import Http
from dataloader.flows.etl.sources.http_body import STEP, HttpBody
from dataloader.flows.etl.sources.pagination import Cursor, LinkHeader, NextUrl, PageNumber
from dataloader.flows.etl.sources.routing import Routing
from dataloader.flows.etl.sources.source import SAMPLE, Request, SourceError, Window

pytestmark = pytest.mark.requirement("S7")

OK = Answer(b'[{"id": 1}]')
TOKEN = "s3cr3t-t0ken-42"


async def failure(source, request: Request | None = None, **options) -> SourceError:
    """Return the error of the first request."""
    with pytest.raises(SourceError) as caught:
        await ask(source, request, **options)
    return caught.value


@pytest.mark.requirement("E6")
async def test_the_meaning_of_a_status_can_be_declared(service):
    service.put("/", lambda seen: Answer(b"x" * 5_000, status=int(seen.query["status"])))

    def asked(status, **options):
        return Http(
            service.url, params={"status": status}, statuses={404: "empty", 202: "retry", 503: "fail"}, **options
        )

    for source in (asked(404), asked(404, pages=PageNumber(size=10))):
        page = source.read(await ask(source, await first(source)))
        assert (list(page.records), page.broken, page.following) == ([], [], None)
    for status, is_retryable in ((202, True), (503, False), (410, False), (502, True)):
        error = await failure(asked(status), await first(asked(status)))
        assert (error.status, error.is_retryable) == (status, is_retryable)


@pytest.mark.requirement("E6")
async def test_a_redirect_with_a_declared_meaning_is_not_followed(service):
    service.put("/", Answer(status=302, headers={"Location": "/elsewhere"}))
    closed = Http(service.url, statuses={302: "empty"})
    assert closed.redirected(await ask(closed)) is None
    error = await failure(Http(service.url, statuses={302: "retry"}), await first(closed))
    assert (error.status, error.is_retryable) == (302, True)


@pytest.mark.parametrize("statuses", [{404: "gone"}, {"404": "empty"}, {99: "empty"}, {200: "empty"}, {True: "empty"}])
def test_statuses_that_mean_nothing_known_are_refused_when_they_are_declared(statuses):
    with pytest.raises(ValueError, match=r'^statuses: must be .* mean "empty", "retry" or "fail", not \{.*\}$'):
        Http("http://127.0.0.1", statuses=statuses)


async def test_an_answer_has_what_a_load_notes_of_it(service):
    service.put("/v1/rates", Answer(b'{"items": [{"id": 1}]}', headers={"X-Thing": "a"}))
    source = Http(f"{service.url}/v1/", endpoint="rates", params={"base": "EUR", "n": 2, "flag": True, "s": ["a", "b"]})
    response = await ask(source)
    assert response.url == f"{service.url}/v1/rates?base=EUR&n=2&flag=true&s=a&s=b"
    assert (response.status, response.headers["x-thing"], response.body) == (200, "a", b'{"items": [{"id": 1}]}')
    assert response.took_s > 0
    assert source.name == "127.0.0.1"
    assert not source.needs_answer


async def test_parameters_can_be_made_from_the_window(service):
    def params(window: Window) -> dict[str, str]:
        return {"from": f"{window.start:%Y-%m-%d}", "to": f"{window.end:%Y-%m-%d}"}

    source = Http(service.url, endpoint="/rates", params=params, pages=PageNumber(size=10))
    window = Window(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 2, 1, tzinfo=UTC))
    assert (await first(source, window)).params == {"from": "2026-01-01", "to": "2026-02-01", "page": 1, "size": 10}


async def test_a_parameter_that_is_none_is_left_out_and_one_that_is_no_text_refused(service):
    source = Http(service.url, params=lambda window: {"from": window.start, "n": 1})
    assert (await first(source)).params == {"n": 1}
    with pytest.raises(ValueError, match=r"params\.from: must be a string, a number, a boolean, .*, not datetime"):
        await first(source, Window(datetime(2026, 1, 1, tzinfo=UTC)))


async def test_the_proxy_of_the_environment_is_used(service, monkeypatch):
    service.put("/x", OK)
    monkeypatch.setenv("http_proxy", service.url)
    assert (await ask(Http("http://somewhere.invalid", endpoint="/x"))).body == OK.body
    assert service.requests[0].headers["host"] == "somewhere.invalid"
    monkeypatch.setenv("no_proxy", "somewhere.invalid")
    assert (await failure(Http("http://somewhere.invalid", endpoint="/x"))).is_retryable
    assert len(service.requests) == 1


async def test_by_post_the_parameters_are_the_body(service):
    service.put("/list", lambda seen: Answer(json.dumps([{"method": seen.method, **json.loads(seen.body)}]).encode()))
    source = Http(service.url, endpoint="/list", params={"site": 7}, pages=PageNumber(size=10), method="POST")
    assert records(await walk(source)) == [{"method": "POST", "site": 7, "page": 1, "size": 10}]
    assert service.requests[0].query == {}


def test_a_source_needs_its_answer_where_that_decides_on_the_next_request():
    plain = Http("https://api.example.org")
    assert not plain.needs_answer
    assert attrs.evolve(plain, pages=LinkHeader()).needs_answer
    assert attrs.evolve(plain, format=Json(errors=lambda _: None)).needs_answer


# Routing: windows by age.

NOW = datetime(2026, 11, 21, tzinfo=UTC)
BOUNDARY = NOW - timedelta(days=30)


def routed(url: str = "http://127.0.0.1:9") -> Http:
    routing = Routing(recent="/live", former="/archive", recent_for=timedelta(days=30), now=lambda: NOW)
    return Http(url, endpoint=routing, params=lambda window: {"from": str(window.start), "to": str(window.end)})


@pytest.mark.parametrize(
    ("start", "end", "walks"),
    [
        (-40, -30, [("/archive", -40, -30)]),
        (-30, -20, [("/live", -30, -20)]),
        (-31, -29, [("/archive", -31, -30), ("/live", -30, -29)]),
        (-90, -60, [("/archive", -90, -60)]),
        (-1, 1, [("/live", -1, 1)]),
        (None, -20, [("/archive", None, -30), ("/live", -30, -20)]),
        (-40, None, [("/archive", -40, -30), ("/live", -30, None)]),
        (None, None, [("/archive", None, -30), ("/live", -30, None)]),
    ],
)
async def test_a_window_is_sent_to_the_endpoint_for_its_age_or_split_between_both(start, end, walks):
    def at(days):
        return None if days is None else NOW + timedelta(days=days)

    asked = await requests(routed(), Window(at(start), at(end)))
    assert [(one.endpoint, one.params["from"], one.params["to"]) for one in asked] == [
        (endpoint, str(at(first_day)), str(at(last_day))) for endpoint, first_day, last_day in walks
    ]


async def test_both_parts_of_a_window_are_walked_over_all_their_pages(service):
    for path in ("/archive", "/live"):
        pages = {"1": [{"from": path, "n": 1}, {"from": path, "n": 2}], "2": [{"from": path, "n": 3}]}
        service.put(path, lambda seen, pages=pages: Answer(json.dumps(pages[seen.query["page"]]).encode()))
    source = attrs.evolve(routed(service.url), pages=PageNumber(size=2))
    found = records(await walk(source, Window(BOUNDARY - timedelta(days=1), BOUNDARY + timedelta(days=1))))
    assert [(record["from"], record["n"]) for record in found] == [
        *(("/archive", n) for n in (1, 2, 3)),
        *(("/live", n) for n in (1, 2, 3)),
    ]


def test_a_routing_without_a_length_of_time_is_refused():
    with pytest.raises(ValueError, match=r"recent_for: must be a timedelta greater than 0, "):
        Routing(recent="/a", former="/b", recent_for=timedelta(0))


# Errors.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "is_retryable"),
    [
        *((status, False) for status in (304, 400, 401, 403, 404, 410, 422)),
        *((status, True) for status in (408, 425, 429, 500, 502, 503, 504)),
    ],
)
async def test_a_status_that_is_no_success_is_an_error_that_passes_or_does_not(service, status, is_retryable):
    service.misbehave(status=status, body=b"" if status == 304 else b"it is so because password=hunter2")
    error = await failure(Http(service.url, endpoint="/x", params={"page": 2}))
    assert (error.status, error.is_retryable, error.retry_after_s) == (status, is_retryable, None)
    assert str(error).startswith(f"GET /x?page=2: status {status}")
    assert "hunter2" not in str(error)
    assert status == 304 or "password=***" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("status", [403, 429, 503])
async def test_a_service_says_how_long_it_wants_to_be_left_alone(service, status):
    source = Http(service.url)
    service.misbehave(status=status, headers={"Retry-After": "120"})
    assert (await failure(source)).retry_after_s == 120
    # The service's own clock is in the header Date; this one has no fraction of a second.
    later = (datetime.now(UTC) + timedelta(seconds=90)).strftime("%a, %d %b %Y %H:%M:%S GMT")
    service.misbehave(status=status, headers={"Retry-After": later})
    assert 60 < (await failure(source)).retry_after_s <= 91
    service.misbehave(status=status, headers={"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "77"})
    error = await failure(source)
    assert (error.retry_after_s, error.is_retryable) == (77, True)


async def test_an_answer_that_is_fine_can_ask_for_rest_too(service):
    service.put("/", OK)
    source = Http(service.url)
    assert source.hint_s(await ask(source)) == 0
    service.misbehave(headers={"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "33"})
    response = await ask(source)
    assert list(source.read(response).records) == [{"id": 1}]
    assert source.hint_s(response) == 33


@pytest.mark.parametrize("chunked", [False, True])
async def test_an_answer_that_is_cut_is_an_error_that_passes(service, chunked):
    service.put("/", Answer(b'[{"id": 1}, {"id": 2}]'))
    service.misbehave(cut_at=11, chunked=chunked)
    error = await failure(Http(service.url))
    assert error.is_retryable
    assert "RemoteProtocolError" in str(error)
    assert (await ask(Http(service.url))).body == b'[{"id": 1}, {"id": 2}]'


@pytest.mark.slow
async def test_an_answer_received_byte_by_byte_has_one_deadline_for_all_of_it(service):
    service.put("/", Answer(b"x" * 10_000))
    service.misbehave(drip_s=0.05)
    error = await failure(Http(service.url), timeout_s=1)
    assert error.is_retryable
    assert "no complete answer within 1 s; " in str(error)
    assert "received " in str(error)
    assert len(service.asked()) == 1


@pytest.mark.slow
async def test_the_smaller_of_both_times_counts(service):
    service.put("/", OK)
    service.misbehave(delay_s=600, times=2)
    assert "within 0.3 s; received nothing" in str(await failure(Http(service.url, timeout_s=0.3)))
    assert "within 0.2 s; received nothing" in str(await failure(Http(service.url, timeout_s=30), timeout_s=0.2))


@pytest.mark.slow
async def test_a_client_is_of_use_after_an_answer_that_came_too_late(service):
    service.put("/", OK)
    service.misbehave(delay_s=600, times=3)
    source = Http(service.url)
    request = await first(source)
    with trio.fail_after(60):
        async with source.open() as connection:
            for _ in range(3):
                with pytest.raises(SourceError, match="no complete answer"):
                    await connection.fetch(request, timeout_s=0.2)
            assert (await connection.fetch(request, timeout_s=30)).body == OK.body


async def test_a_cancelled_request_ends_immediately(service):
    service.put("/", OK)
    service.misbehave(delay_s=600)
    source = Http(service.url)
    request = await first(source)
    with trio.fail_after(60):
        async with source.open() as connection:
            with trio.move_on_after(0.3) as scope:
                await connection.fetch(request, timeout_s=50)
            assert scope.cancelled_caught
            assert (await connection.fetch(request, timeout_s=30)).status == 200


async def test_an_answer_over_the_size_limit_is_refused_with_or_without_a_length(service):
    service.put("/", Answer(b"x" * 100_001))
    source = Http(service.url, max_body_bytes=100_000)
    for chunked in (False, True):
        service.misbehave(chunked=chunked)
        error = await failure(source)
        assert "has more than the limit of 100,000 bytes" in str(error)
        assert not error.is_retryable
    service.put("/", Answer(b"x" * 100_000))
    assert len((await ask(source)).body) == 100_000


async def test_a_small_answer_that_unpacks_without_end_is_refused_at_the_bound(service):
    bomb = gzip.compress(b"0" * 50_000_000)
    service.put("/", Answer(bomb, headers={"Content-Encoding": "gzip"}))
    error = await failure(Http(service.url, max_body_bytes=1_000_000))
    assert "has more than the limit of 1,000,000 bytes" in str(error)
    service.put("/", Answer(gzip.compress(bomb), headers={"Content-Encoding": "gzip, gzip"}))
    assert "compressed with 'gzip, gzip', which was not requested" in str(await failure(Http(service.url)))
    service.put("/", Answer(gzip.compress(OK.body), headers={"Content-Encoding": "gzip"}))
    assert (await ask(Http(service.url))).body == OK.body


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"no gzip", "it is not gzip"),
        (gzip.compress(b"x" * 1000)[:-9], "the compressed data are truncated"),
        (gzip.compress(b"x") + b"y", "there are data after the compressed part"),
    ],
    ids=["none", "cut", "more"],
)
async def test_a_body_that_contradicts_its_encoding_is_a_retryable_error(service, body, error):
    service.put("/", Answer(body, headers={"Content-Encoding": "gzip"}))
    caught = await failure(Http(service.url))
    assert caught.is_retryable
    assert f"the answer is damaged: {error}" in str(caught)


async def test_an_unreachable_server_is_a_retryable_error():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        error = await failure(Http(f"http://127.0.0.1:{taken.getsockname()[1]}", endpoint="/x"))
    assert error.is_retryable
    assert error.status is None
    assert str(error).startswith("GET /x: ConnectError")


async def test_an_error_in_an_answer_that_is_fine_passes(service):
    service.put("/", Answer(b'{"code": 5, "data": []}'))
    source = Http(service.url, format=Json("data", errors=lambda document: f"code {document['code']}"))
    with pytest.raises(SourceError, match="the answer reports an error: code 5") as caught:
        source.read(await ask(source))
    assert caught.value.is_retryable


@pytest.mark.parametrize("encoding", ["", "gzip", "br"])
async def test_an_answer_without_content_has_no_records_and_no_encoding(service, encoding):
    service.put("/", Answer(b"", status=204, headers={"Content-Encoding": encoding}))
    source = Http(service.url, pages=PageNumber())
    page = source.read(await ask(source))
    assert (list(page.records), page.following) == ([], None)
    service.put("/", Answer(b"", headers={"Content-Encoding": encoding}))
    assert (await ask(source)).body == b""


async def test_an_answer_of_which_no_byte_came_says_nothing_of_its_end():
    body = HttpBody()
    body.begin("gzip", 1_000)
    assert await body.add(b"")
    body.end()
    assert (body.damage, body.has_end) == ("", False)


@pytest.mark.parametrize("more", [-1, 0, 1])
async def test_other_tasks_run_while_one_piece_is_unpacked(more):
    whole = b"{}," * (10 * STEP // 3) + b" " * (10 * STEP % 3 + more)
    turns = 0

    async def take_turns():
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    body = HttpBody()
    body.begin("gzip", len(whole))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_turns)
        assert await body.add(gzip.compress(whole))
        nursery.cancel_scope.cancel()
    body.end()
    assert (body.value() == whole, body.damage, body.is_full) == (True, "", False)
    assert turns >= 5


async def test_the_encoding_is_the_one_that_the_service_names_unless_the_format_does(service):
    body = "name\nЖюль\n".encode("windows-1251")
    service.put("/", Answer(body, 'text/csv; charset="windows-1251"'))
    assert records(await walk(Http(service.url, format=Csv()))) == [{"name": "Жюль"}]
    service.put("/", Answer(body, "text/csv; charset=nonsense"))
    assert records(await walk(Http(service.url, format=Csv(encoding="windows-1251")))) == [{"name": "Жюль"}]


# Redirects and links.


@pytest.mark.requirement("Q16")
@pytest.mark.parametrize("user", ["", f"bob:{TOKEN}@"])
async def test_a_redirect_on_the_host_is_followed_and_its_signature_is_never_logged(service, caplog, user):
    caplog.set_level(logging.INFO, "httpx2")
    signed = f"x=a%2Fb&X-Amz-Signature={TOKEN}&c=d+e%20f"
    whole = service.url.replace("http://", f"http://{user}") + f"/new?{signed}"
    service.put("/old", Answer(status=302, headers={"Location": whole}))
    service.put("/new", OK)
    source = Http(service.url, endpoint="/old", params={"page": 2})
    response = await ask(source)
    assert (response.url, response.body) == (f"{service.url}/new", OK.body)
    assert response.request.endpoint == "/old"
    assert service.requests[-1].raw_query == signed
    assert ("authorization" in service.requests[-1].headers) == bool(user)
    service.misbehave("^/new", status=404)
    texts = [repr(response), str(await failure(source)), caplog.text]
    assert TOKEN not in " ".join(texts)
    assert "/new" in caplog.text


async def test_a_post_is_not_redirected(service):
    service.put("/old", Answer(status=307, headers={"Location": "/new"}))
    error = await failure(Http(service.url, endpoint="/old", method="POST"))
    assert (str(error), error.is_retryable) == ("POST /old: status 307: redirects of a POST are not supported", False)


@pytest.mark.parametrize("pages", [NextUrl(path="next"), LinkHeader(), None])
async def test_another_host_is_not_asked_unless_it_is_allowed_and_gets_no_secrets_then(service, pages):
    with open_source_app() as other:
        other.put("/2", Answer(b'{"items": [{"id": 2}]}'))
        elsewhere = f"{other.url}/2".replace("127.0.0.1", "localhost")
        document = json.dumps({"items": [{"id": 1}], "next": elsewhere}).encode()
        redirect = {"status": 302, "headers": {"Location": elsewhere}}
        following = {"headers": {"Link": f'<{elsewhere}>; rel="next"'}}
        service.put("/", Answer(document, **(redirect if pages is None else following)))
        auth = Auth(headers={"Authorization": f"Bearer {TOKEN}"}, params={"api_key": TOKEN})
        source = Http(service.url, format=Json("items"), pages=pages, auth=auth, headers={"X-Mine": "a"})
        with pytest.raises(
            SourceError, match=r"the request would go to http://localhost:.*, which is neither http://127"
        ) as caught:
            await walk(source)
        assert not caught.value.is_retryable
        assert other.requests == []
        allowed = attrs.evolve(source, allowed_hosts=["localhost"])
        assert records(await walk(allowed))[-1] == {"id": 2}
        [seen] = other.requests
        assert TOKEN not in str(seen)
        assert not {"authorization", "x-mine"} & set(seen.headers)
        assert service.requests[-1].headers["authorization"] == f"Bearer {TOKEN}"
        assert service.requests[-1].query["api_key"] == TOKEN


async def test_another_port_or_scheme_is_another_place():
    source = Http("https://api.example.org/v1")
    assert str(source.resolve("/x")) == "https://api.example.org/v1/x"
    assert str(source.resolve("x/a%2Fb%20c?d=1")) == "https://api.example.org/v1/x/a%2Fb%20c?d=1"
    assert str(source.resolve("")) == "https://api.example.org/v1"
    assert source.resolve("/../../x").host == "api.example.org"
    assert str(source.resolve("https://api.example.org/x?a=1")) == "https://api.example.org/x?a=1"
    assert str(source.resolve("https://api.example.org:443/x")) == "https://api.example.org/x"
    assert str(source.resolve("http://api.example.org/x")) == "https://api.example.org/x"
    for elsewhere in (
        "https://api.example.org:8443/x",
        "http://api.example.org:8080/x",
        "https://example.org/x",
        "//example.org/x",
        "https://api.example.org.evil.test/x",
        "https://api.example.org@evil.test/x",
        "ftp://api.example.org/x",
        "file:///etc/passwd",
    ):
        with pytest.raises(SourceError, match="the request would go to"):
            source.resolve(elsewhere)
    plain = attrs.evolve(source, allowed_hosts=["cdn.example.org"])
    assert plain.resolve("https://cdn.example.org/x").host == "cdn.example.org"
    with pytest.raises(SourceError, match="the request would go to http://cdn"):
        plain.resolve("http://cdn.example.org/x")


# Secrets.


@pytest.mark.requirement("Q16")
@pytest.mark.parametrize(
    ("auth", "header", "value"),
    [
        (Auth.bearer(TOKEN), "authorization", f"Bearer {TOKEN}"),
        (Auth.basic("bob", "s3cr3t"), "authorization", "Basic Ym9iOnMzY3IzdA=="),
        (Auth.header("X-API-Key", TOKEN), "x-api-key", TOKEN),
    ],
)
async def test_credentials_are_sent_in_a_header(service, auth, header, value):
    service.put("/", OK)
    await ask(Http(service.url, auth=auth))
    assert service.requests[0].headers[header] == value


@pytest.mark.requirement("Q16")
async def test_a_secret_is_sent_and_nowhere_else(service, caplog):
    """Not in requests, answers, next pages, errors, representations, or log lines of libraries."""
    caplog.set_level(logging.DEBUG)
    auth = Auth(headers={"Authorization": f"Bearer {TOKEN}"}, params={"api_key": TOKEN})
    service.put("/", Answer(json.dumps({"items": [{"id": 1}], "next": f"/2?api_key={TOKEN}&page=2"}).encode()))
    source = Http(service.url, format=Json("items"), pages=NextUrl(path="next"), auth=auth)
    request = await first(source)
    response = await ask(source, request)
    page = source.read(response)
    assert service.requests[0].query == {"api_key": TOKEN}
    assert page.following.endpoint == f"{service.url}/2?page=2"
    service.misbehave(status=403, body=f"{TOKEN} is no longer good: ask /x?api_key={TOKEN}".encode())
    error = await failure(source, page.following)
    assert service.requests[1].query == {"api_key": TOKEN, "page": "2"}
    assert "*** is no longer good" in str(error)
    texts = [repr(source), repr(auth), repr(request), repr(response), response.url, repr(page), str(error), repr(error)]
    assert TOKEN not in " ".join([*texts, caplog.text])
    assert caplog.records


@pytest.mark.requirement("Q16")
async def test_a_token_is_hidden_without_the_word_before_it_too(service):
    service.misbehave(status=401, body=f"unknown: {TOKEN}".encode())
    assert (
        str(await failure(Http(service.url, endpoint="/x", auth=Auth.bearer(TOKEN))))
        == "GET /x: status 401: unknown: ***"
    )


@pytest.mark.requirement("Q16")
@pytest.mark.parametrize("left", [4, 9, len(TOKEN) - 1])
async def test_a_secret_that_the_end_of_an_error_cuts_is_hidden(service, left):
    service.misbehave(status=400, body=("x" * (SAMPLE - left) + TOKEN).encode())
    error = str(await failure(Http(service.url, auth=Auth.header("X-Weird", TOKEN))))
    assert error.endswith("x***")


@pytest.mark.requirement("Q16")
@pytest.mark.parametrize(
    ("auth", "echoed"),
    [
        (Auth.header("X-Weird", TOKEN), base64.b64encode(TOKEN.encode()).decode()),
        (Auth.basic("me", TOKEN), TOKEN),
        (Auth.param("key", "a/b+c d!"), "a%2Fb%2Bc%20d%21"),
    ],
)
async def test_encoded_and_decoded_forms_of_a_secret_are_hidden(service, auth, echoed):
    service.misbehave(status=400, body=f"unknown: {echoed}".encode())
    assert echoed[:-2] not in str(await failure(Http(service.url, auth=auth)))


@pytest.mark.requirement("Q16")
async def test_parameters_that_look_like_secrets_are_not_shown(service):
    service.misbehave(status=400, body=b"bad")
    source = Http(service.url, endpoint="/x", params={"access_token": TOKEN, "page": 1})
    error = await failure(source)
    assert str(error) == "GET /x?access_token=***&page=1: status 400: bad"
    assert TOKEN not in repr(await first(source))


@pytest.mark.requirement("Q16")
@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Auth.bearer(""), "token: must not be empty; check the setting that has its value"),
        (lambda: Auth.basic("bob", None), "password: must not be empty"),
        (lambda: Auth.header("X-Key", "line\nbreak"), r"headers\.X-Key: must be printable ASCII, .*, not \*\*\*"),
        (lambda: Auth.param("key", ""), r"params\.key: must be .*, not \*\*\*"),
        (
            lambda: Http("https://bob:hunter2@api.example.org"),
            r"url: must be .*auth=Auth.basic.*, not 'https://\*\*\*@api",
        ),
        (
            lambda: Http("https://a.org", headers={"Authorization": "x"}),
            "headers: must be headers .*, not 'Authorization'",
        ),
        (lambda: Http("ftp://a.org"), "url: must be an address such as https://.*, not 'ftp://a.org'"),
        (lambda: Http("https://a.org?x=1"), "url: must be .* without user, query and fragment, not .*"),
        (lambda: Http("api.example.org"), "url: must be .*, not 'api.example.org'"),
        (
            lambda: Http("https://a.org", timeout_s=0),
            "timeout_s: must be a number of seconds above 0, at most 86,400",
        ),
        (lambda: Http("https://a.org", timeout_s=float("nan")), "timeout_s: must be .*, not nan"),
        (lambda: Http("https://a.org", max_body_bytes=0), "max_body_bytes: must be .*, not 0"),
        (lambda: Http("https://a.org", name=""), "name: must be .*, not ''"),
        (lambda: Http("https://a.org", method="DELETE"), "method"),
    ],
)
def test_invalid_options_of_a_source_are_refused_without_showing_secrets(make, error):
    with pytest.raises(ValueError, match=error) as caught:
        make()
    assert "hunter2" not in str(caught.value)


# TLS.


async def test_an_untrusted_certificate_is_refused_and_not_retried(tmp_path):
    path = certificate(tmp_path)
    with open_source_app(certificate=path) as service:
        service.put("/", OK)
        assert service.url.startswith("https://")
        error = await failure(Http(service.url))
        assert "CERTIFICATE_VERIFY_FAILED" in str(error)
        assert not error.is_retryable
        trusting = ssl.create_default_context(cafile=path)
        assert (await ask(Http(service.url, tls=trusting))).body == OK.body


async def test_cursors_walk_by_post_too(service):
    def answer(seen):
        place = json.loads(seen.body).get("cursor", 0)
        return Answer(json.dumps({"items": [{"id": place}], "next": place + 1 if place < 3 else None}).encode())

    service.put("/list", answer)
    source = Http(service.url, endpoint="/list", format=Json("items"), pages=Cursor(path="next"), method="POST")
    assert [record["id"] for record in records(await walk(source))] == [0, 1, 2, 3]


# Incomplete answers, and files that arrive unpacked.


@pytest.mark.parametrize("said", ["bytes 0-9/100", "bytes 5-14/15", "bytes 0-9/*", "bytes nonsense", None])
async def test_a_part_that_was_not_asked_for_is_an_error(service, said):
    headers = {} if said is None else {"Content-Range": said}
    service.put("/", Answer(OK.body, status=206, headers=headers))
    error = await failure(Http(service.url))
    assert "status 206: the server sent only a part of the answer" in str(error)
    assert error.is_retryable


@pytest.mark.parametrize(
    ("said", "headers"),
    [("bytes 0-10/11", {}), ("0-14/3573458", {}), ("items 0-14/99", {}), ("bytes 0-9/100", {"Range": "bytes=0-9"})],
)
async def test_an_answer_206_that_is_whole_or_was_asked_for_is_read(service, said, headers):
    service.put("/", Answer(OK.body, status=206, headers={"Content-Range": said}))
    assert records(await walk(Http(service.url, headers=headers))) == [{"id": 1}]


@pytest.mark.parametrize("pack", [lambda body: body, gzip.compress])
async def test_a_compressed_file_may_be_labeled_as_compressed_for_the_transport(service, pack):
    body = gzip.compress(pack(b"id\n1\n"))
    service.put("/a.csv.gz", Answer(body, headers={"Content-Encoding": "gzip"}))
    source = Http(service.url, endpoint="/a.csv.gz", format=Compressed(Csv()))
    assert records(await walk(source)) == [{"id": "1"}]


async def test_a_file_that_should_be_compressed_and_is_not_is_an_error(service):
    service.put("/a.csv.gz", Answer(b"id\n1\n"))
    with pytest.raises(SourceError, match="not compressed with gzip or xz"):
        await walk(Http(service.url, endpoint="/a.csv.gz", format=Compressed(Csv())))
