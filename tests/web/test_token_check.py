"""Wrong tokens: throttled by the client's address, on the API and the pages, before they are compared."""

from __future__ import annotations

from ipaddress import ip_network

import pytest
import trio
from logged import capture_logs
from web_server import TOKENS, all_tokens
from werkzeug.datastructures import Headers

from dataloader.web.client_address import client_of
from dataloader.web.problems import ProblemError
from dataloader.web.server.refusals import Refusals
from dataloader.web.token_check import TRIES, TRY_EACH_S, TokenCheck

pytestmark = pytest.mark.requirement("Q2")

PROXY = (ip_network("127.0.0.1"),)


def call(name):
    return {"Authorization": f"Bearer {TOKENS.get(name, name)}"}


def of(address):
    return {"X-Forwarded-For": address}


def check(**options):
    return TokenCheck(all_tokens(), Refusals(), **options)


def fail(checked, address, times=TRIES):
    for _ in range(times):
        assert checked.find("wrong", address) is None


async def test_wrong_tokens_of_one_address_do_not_affect_another(open_web):
    async with open_web(tokens=all_tokens(), trusted_proxies=PROXY) as web:
        statuses = [
            (await web.client.get("/api/v1/queues", headers=call("wrong") | of("192.0.2.1"))).status_code
            for _ in range(TRIES + 2)
        ]
        assert statuses == [401] * TRIES + [429] * 2
        refused = await web.client.get("/api/v1/queues", headers=call("reader") | of("192.0.2.1"))
        assert (refused.status_code, refused.json()["type"]) == (429, "/problems/too-many-wrong-tokens")
        assert int(refused.headers["Retry-After"]) > 0
        for other in ("192.0.2.2", "2001:db8::1"):
            assert (await web.client.get("/api/v1/queues", headers=call("reader") | of(other))).status_code == 200
        metrics = (await web.client.get("/metrics", headers=call("reader") | of("192.0.2.2"))).text
        assert 'dataloader_http_refused_total{kind="too_many_wrong_tokens"} 3.0' in metrics


async def test_the_pages_and_the_api_count_wrong_tokens_together(open_web):
    async with open_web(tokens=all_tokens()) as web:
        for _ in range(TRIES):
            await web.client.get("/api/v1/queues", headers=call("wrong"))
        data, headers = {"token": TOKENS["chief"]}, {"Origin": web.url}
        assert (await web.client.post("/ui/sign-in", data=data, headers=headers)).status_code == 429


async def test_requests_without_a_token_and_good_requests_are_not_counted(open_web):
    async with open_web(tokens=all_tokens()) as web:
        for _ in range(TRIES + 1):
            assert (await web.client.get("/api/v1/queues")).status_code == 401
            assert (await web.client.get("/api/v1/audit", headers=call("reader"))).status_code == 403
        assert (await web.client.get("/api/v1/queues", headers=call("reader"))).status_code == 200


async def test_a_header_of_a_client_that_is_no_proxy_is_not_believed(open_web):
    async with open_web(tokens=all_tokens(), trusted_proxies=(ip_network("192.0.2.0/24"),)) as web:
        for number in range(TRIES):
            await web.client.get("/api/v1/queues", headers=call("wrong") | of(f"198.51.100.{number}"))
        assert (await web.client.get("/api/v1/queues", headers=call("reader"))).status_code == 429


async def test_a_throttled_address_gets_further_tries_as_time_passes(autojump_clock):
    checked = check()
    fail(checked, "a")
    with pytest.raises(ProblemError) as refused:
        checked.find(TOKENS["chief"], "a")
    assert refused.value.headers["Retry-After"] == str(round(TRY_EACH_S))
    await trio.sleep(TRY_EACH_S)
    assert checked.find(TOKENS["chief"], "a").name == "chief"
    fail(checked, "a", 1)
    with pytest.raises(ProblemError):
        checked.find("wrong", "a")
    await trio.sleep(10 * TRIES * TRY_EACH_S)
    fail(checked, "a")


async def test_the_clients_that_are_remembered_are_bounded(autojump_clock):
    checked = check(most_clients=3)
    fail(checked, "first")
    for address in "abc":
        fail(checked, address)
    assert len(checked._clients) == 3
    assert checked.find(TOKENS["chief"], "first").name == "chief"
    with pytest.raises(ProblemError):
        checked.find(TOKENS["chief"], "c")


async def test_the_log_names_a_throttled_address_and_the_setting_for_a_proxy(autojump_clock):
    checked = check()
    with capture_logs() as lines:
        for _ in range(TRIES):
            checked.find("wrong", "192.0.2.1", forwarded=True)
    [line] = lines
    assert line["address"] == "192.0.2.1"
    assert "DL_TRUSTED_PROXIES" in line["todo"]


async def test_an_address_that_goes_on_guessing_is_named_once_until_it_rests(autojump_clock):
    checked = check()
    with capture_logs() as lines:
        fail(checked, "a")
        for _ in range(10):
            await trio.sleep(2 * TRY_EACH_S)
            fail(checked, "a", 2)
        assert len(lines) == 1
        await trio.sleep(TRIES * TRY_EACH_S)
        fail(checked, "a")
    assert len(lines) == 2


ADDRESSES = [
    ("192.0.2.9", "", (), "192.0.2.9"),
    ("192.0.2.9", "198.51.100.1", (), "192.0.2.9"),
    ("192.0.2.9", "198.51.100.1", ("192.0.2.9",), "198.51.100.1"),
    ("192.0.2.9", "1.1.1.1, 198.51.100.1", ("192.0.2.9",), "198.51.100.1"),
    ("192.0.2.9", "198.51.100.1, 10.0.0.7", ("192.0.2.9", "10.0.0.0/8"), "198.51.100.1"),
    ("192.0.2.9", "10.0.0.8, 10.0.0.7", ("192.0.2.9", "10.0.0.0/8"), "10.0.0.8"),
    ("192.0.2.9", "unknown", ("192.0.2.9",), "192.0.2.9"),
    ("192.0.2.9", "198.51.100.1:4711", ("192.0.2.9",), "198.51.100.1"),
    ("::ffff:192.0.2.9", "198.51.100.1", ("192.0.2.9",), "198.51.100.1"),
    ("::1", "[2001:db8:1:2:3::4]:4711", ("::1",), "2001:db8:1:2::/64"),
    ("2001:db8:1:2:3::4", "", (), "2001:db8:1:2::/64"),
    ("fe80::1%eth0", "", (), "fe80::/64"),
    ("", "198.51.100.1", ("192.0.2.9",), ""),
]


@pytest.mark.parametrize(("peer", "header", "trusted", "client"), ADDRESSES)
def test_the_client_is_the_last_address_that_no_trusted_proxy_has(peer, header, trusted, client):
    headers = Headers({"X-Forwarded-For": header} if header else {})
    assert client_of(peer, headers, [ip_network(one) for one in trusted]) == client


def test_several_headers_of_proxies_are_one_list():
    headers = Headers([("X-Forwarded-For", "198.51.100.1"), ("X-Forwarded-For", "10.0.0.7")])
    assert client_of("10.0.0.8", headers, [ip_network("10.0.0.0/8")]) == "198.51.100.1"
