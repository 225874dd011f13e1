"""Frame of all pages: sign-in, roles, cross-site requests, policy, base path, display, live updates."""

from __future__ import annotations

import itertools
import json
import re
from ipaddress import ip_network
from uuid import uuid4

import attrs
import pytest
import trio
from conditions import until
from web_server import TOKENS, all_tokens

from dataloader.jobs.roles import Role
from dataloader.web.pages import menu_numbers
from dataloader.web.pages.addresses import PublicAddress, own_path
from dataloader.web.pages.pace import Pace
from dataloader.web.pages.rendering import POLICY
from dataloader.web.pages.site import PAGES

pytestmark = pytest.mark.requirement("E11")

QUEUES = "/ui/queues"


async def sign_in(web, name, *, headers=None):
    answer = await web.client.post(
        "/ui/sign-in", data={"token": TOKENS[name], "to": QUEUES}, headers={"Origin": web.url} | (headers or {})
    )
    assert answer.status_code == 303, answer.text
    return answer


async def test_the_root_redirects_a_browser_to_the_pages_and_is_a_404_for_a_program(open_web):
    async with open_web(public=PublicAddress("https://example.org", "/dl")) as web:
        browser = await web.client.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
        assert (browser.status_code, browser.headers["Location"]) == (303, "/dl/ui/")
        program = await web.client.get("/")
        assert (program.status_code, program.json()["status"]) == (404, 404)
        assert (await web.client.get("/other", headers={"Accept": "text/html"})).status_code == 404


async def test_u17_a_sign_in_gives_a_cookie_that_the_pages_alone_take(open_web):
    async with open_web(tokens=all_tokens()) as web:
        to_sign_in = await web.client.get(QUEUES)
        assert (to_sign_in.status_code, to_sign_in.headers["Location"]) == (303, "/ui/sign-in?to=%2Fui%2Fqueues")
        wrong = await web.client.post("/ui/sign-in", data={"token": "x"}, headers={"Origin": web.url})
        assert wrong.status_code == 422
        assert "unknown" in wrong.text

        signed = await sign_in(web, "reader")
        assert signed.headers["Location"] == QUEUES
        cookie = signed.headers["Set-Cookie"]
        port = web.url.rpartition(":")[2]
        assert cookie.startswith(f"dl_session_{port}=reader.")
        assert {"HttpOnly", "Path=/ui", "SameSite=Lax", "Max-Age=43200"} <= set(cookie.split("; "))
        assert TOKENS["reader"] not in cookie
        assert (await web.client.get(QUEUES)).status_code == 200
        assert (await web.client.get("/api/v1/queues")).status_code == 401

        out = await web.client.post("/ui/sign-out", headers={"Origin": web.url})
        assert "Max-Age=0" in out.headers["Set-Cookie"]
        assert (await web.client.get(QUEUES)).status_code == 303


@pytest.mark.slow
async def test_u17_a_sign_out_ends_the_sign_in_on_all_replicas_and_no_other_sign_in(open_web, database):
    async with open_web(tokens=all_tokens()) as first, open_web(tokens=all_tokens()) as second:
        cookies = []
        for _ in range(2):
            signed = await sign_in(first, "operator")
            cookies.append(signed.headers["Set-Cookie"].split("=", 1)[1].split(";")[0])

        async def sees(web, cookie):
            web.client.cookies.clear()
            web.client.cookies.set(f"dl_session_{web.url.rpartition(':')[2]}", cookie)
            paused = await web.client.post(f"{QUEUES}/pause", data={"queue": "q"}, headers={"Origin": web.url})
            return (await web.client.get(QUEUES)).status_code, paused.status_code

        for web in (first, second):
            assert [await sees(web, cookie) for cookie in cookies] == [(200, 303)] * 2
        assert (await sees(second, cookies[0]))[0] == 200
        await second.client.post("/ui/sign-out", headers={"Origin": second.url})
        for web in (first, second):
            assert [await sees(web, cookie) for cookie in cookies] == [(303, 401), (200, 303)]
        # Only a valid cookie is revoked, so that the table of ended sessions cannot be filled.
        for cookie in ("operator.a.b.c", "x", cookies[1][:-1]):
            second.client.cookies.clear()
            second.client.cookies.set(f"dl_session_{second.url.rpartition(':')[2]}", cookie)
            await second.client.post("/ui/sign-out", headers={"Origin": second.url})
        assert database.psql("SELECT count(*) FROM dl_ended_sessions") == "1"


@pytest.mark.slow
async def test_u17_a_cookie_holds_on_other_replicas_and_ends_with_its_token(open_web):
    async with open_web(tokens=all_tokens()) as first, open_web(tokens=all_tokens()) as second:
        signed = await sign_in(first, "operator")
        value = signed.headers["Set-Cookie"].split("=", 1)[1].split(";")[0]
        name = f"dl_session_{second.url.rpartition(':')[2]}"
        second.client.cookies.set(name, value)
        assert (await second.client.get(QUEUES)).status_code == 200

        changed = value[:-2] + ("A" if value[-2] != "A" else "B") + value[-1]
        for other in (changed, value.replace("operator", "chief"), "operator", "a.b.c", "x" * 5_000):
            second.client.cookies.clear()
            second.client.cookies.set(name, other)
            assert (await second.client.get(QUEUES)).status_code == 303

    without = tuple(token for token in all_tokens() if token.name != "operator")
    other = tuple(
        attrs.evolve(token, digest=bytes(32)) if token.name == "operator" else token for token in all_tokens()
    )
    for tokens in (without, other):
        async with open_web(tokens=tokens) as third:
            third.client.cookies.set(f"dl_session_{third.url.rpartition(':')[2]}", value)
            assert (await third.client.get(QUEUES)).status_code == 303


async def test_u17_wrong_tokens_are_throttled_for_their_address_alone(open_web):
    async with open_web(tokens=all_tokens(), trusted_proxies=(ip_network("127.0.0.1"),)) as web:
        headers = {"Origin": web.url, "X-Forwarded-For": "192.0.2.1"}
        for tries in itertools.count(1):
            answer = await web.client.post("/ui/sign-in", data={"token": "x"}, headers=headers)
            if answer.status_code == 429:
                break
            assert tries < 40
        assert tries > 10
        assert int(answer.headers["Retry-After"]) > 0
        right = {"token": TOKENS["chief"]}
        assert (await web.client.post("/ui/sign-in", data=right, headers=headers)).status_code == 429
        await sign_in(web, "chief", headers={"X-Forwarded-For": "192.0.2.2"})


@pytest.mark.slow
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "{url}", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "{url}", "Sec-Fetch-Site": "same-site"},
        {"Origin": "ftp://{host}"},
        {"Origin": "http://["},
    ],
)
async def test_u18_a_request_from_another_site_changes_nothing(open_web, headers):
    async with open_web(tokens=all_tokens()) as web:
        await sign_in(web, "chief")
        host = web.url.removeprefix("http://")
        sent = {name: value.format(url=web.url, host=host) for name, value in headers.items()}
        answer = await web.client.post(f"{QUEUES}/pause", data={"queue": "q"}, headers=sent)
        assert answer.status_code == 403
        assert "another site" in answer.text
        assert not [queue for queue in await web.jobs.queues() if queue.paused]


async def test_u14_a_forged_act_beyond_the_role_is_refused_and_its_button_is_grey(open_web):
    async with open_web(tokens=all_tokens()) as web:
        await web.jobs.enqueue("t", queue="q")
        await sign_in(web, "reader")
        assert 'disabled title="Needs the role operate."' in (await web.client.get(QUEUES)).text
        forged = await web.client.post(f"{QUEUES}/pause", data={"queue": "q"}, headers={"Origin": web.url})
        assert forged.status_code == 403
        assert "has the role read; this page needs operate" in forged.text.replace("&#39;", "'")
        await sign_in(web, "operator")
        assert "disabled" not in (await web.client.get(QUEUES)).text
        done = await web.client.post(f"{QUEUES}/pause", data={"queue": "q"}, headers={"Origin": web.url})
        assert done.status_code == 303
        [action] = (await web.jobs.audit()).audit
        assert (action.actor, action.action) == ("operator", "pause")


async def test_u15_a_single_act_says_what_it_did_once_and_can_be_undone(open_web):
    async with open_web() as web:
        await web.trigger()
        done = await web.client.post(f"{QUEUES}/pause", data={"queue": "q"}, headers={"Origin": web.url})
        assert done.headers["Location"] == QUEUES
        shown = (await web.client.get(QUEUES)).text
        assert "Paused q: none of its jobs start." in shown
        assert re.search(r'action="/ui/queues/resume">\s*<input type="hidden" name="queue" value="q">', shown)
        assert "Paused q" not in (await web.client.get(QUEUES)).text
        web.client.cookies.set(f"dl_said_{web.url.rpartition(':')[2]}", "eyJzYWlkIjoiZm9yZ2VkIn0.x.y")
        assert "forged" not in (await web.client.get(QUEUES)).text


async def test_u19_every_page_has_the_strict_policy_and_what_is_no_page_has_its_own(open_web):
    async with open_web() as web:
        for path in ("/ui", "/ui/", QUEUES, f"{QUEUES}?part=rows", "/ui/nothing", "/ui/look", "/ui/sign-in"):
            headers = (await web.client.get(path)).headers
            assert headers.get_list("Content-Security-Policy") == [POLICY], path
            assert headers.get_list("Referrer-Policy") == ["same-origin"], path
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
            assert headers["Cache-Control"] == "no-store"
        api = (await web.client.get("/api/v1/queues")).headers
        assert (api["Referrer-Policy"], "X-Frame-Options" in api) == ("no-referrer", False)


async def test_u20_without_tokens_only_loopback_hosts_are_served(open_web):
    async with open_web() as web:
        answer = await web.client.get(QUEUES, headers={"Host": "evil.example"})
        assert answer.status_code == 403


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["", "/tools/dl"])
async def test_u20_behind_a_proxy_the_public_url_is_our_origin_and_base_stripped_or_not(open_web, prefix):
    public = PublicAddress.of("https://ops.example.com/tools/dl/")
    async with open_web(tokens=all_tokens(), public=public) as web:
        headers = {"Origin": "https://ops.example.com", "Host": "127.0.0.1"}
        signed = await web.client.post(
            f"{prefix}/ui/sign-in", data={"token": TOKENS["operator"], "to": QUEUES}, headers=headers
        )
        assert signed.headers["Location"] == f"/tools/dl{QUEUES}"
        assert {"Path=/tools/dl/ui", "Secure"} <= set(signed.headers["Set-Cookie"].split("; "))
        cookie = {"Cookie": signed.headers["Set-Cookie"].split(";")[0], "Host": "127.0.0.1"}
        shown = await web.client.get(f"{prefix}{QUEUES}", headers=cookie)
        assert shown.status_code == 200
        ours = [*re.findall(r'(?:href|src|action)="([^"#]+)', shown.text)]
        assert ours
        assert {path for path in ours if not path.startswith("/tools/dl/ui")} == {"/tools/dl/docs"}
        [style] = [path for path in ours if path.endswith(".css")]
        assert (await web.client.get(style.removeprefix("/tools/dl") if not prefix else style)).status_code == 200
        pause = f"{prefix}{QUEUES}/pause"
        assert (await web.client.post(pause, data={"queue": "q"}, headers=headers | cookie)).status_code == 303
        ours = {"Origin": web.url}
        assert (await web.client.post(pause, data={"queue": "q"}, headers=cookie | ours)).status_code == 403


@pytest.mark.parametrize(
    "given",
    [
        "//evil.example",
        "https://evil.example",
        "/\\evil.example",
        "/api/v1/jobs",
        "/uix",
        "/ui\n",
        "/ui/../other",
        "/ui/jobs/%2E%2e/.%2e/other?a=b",
        None,
        "",
    ],
)
def test_a_form_leads_back_to_our_pages_alone(given):
    assert own_path(given) == "/ui"


async def test_files_of_the_pages_are_kept_for_ever_under_a_name_that_changes_with_them(open_web):
    async with open_web() as web:
        shown = (await web.client.get(QUEUES)).text
        for path in re.findall(r'(?:href|src)="(/ui/static/[^"]+)"', shown):
            answer = await web.client.get(path)
            assert (answer.status_code, "immutable" in answer.headers["Cache-Control"]) == (200, True)
            old = await web.client.get(re.sub(r"static/\w+", "static/0123", path))
            assert (old.status_code, old.headers["Cache-Control"]) == (200, "no-store")
        assert (await web.client.get("/ui/static/0123/../app.py")).status_code == 404


async def test_the_description_of_the_api_leads_to_the_pages(open_web):
    async with open_web(public=PublicAddress("https://example.org", "/dl")) as web:
        shown = (await web.client.get("/docs")).text
        assert '<a class="brand" href="/dl/ui">' in shown
        assert ("{base}" in shown, "{nonce}" in shown) == (False, False)


async def test_the_frame_names_the_product_and_the_environment_with_its_color(open_web):
    async with open_web(tokens=all_tokens(), environment="Production <eu>") as web:
        door = (await web.client.get("/ui/sign-in")).text
        assert "<title>Sign in · dataloader Production &lt;eu&gt;</title>" in door
        assert '<b class="env">Production &lt;eu&gt;</b>' in door
        assert "data-env" not in door
    async with open_web(environment="staging") as web:
        shown = (await web.client.get(QUEUES)).text
        assert 'data-env="staging"' in shown
        assert 'title="Environment: staging">staging</span>' in shown
        assert "<footer>dataloader 1.2.3<br>" in shown


async def test_the_menu_has_groups_with_numbers_that_a_live_part_renews(open_web, database, monkeypatch):
    monkeypatch.setattr(menu_numbers, "REMEMBERED_S", 0.0)
    async with open_web() as web:
        await web.trigger()
        await web.client.get(QUEUES)
        shown = (await web.client.get(QUEUES)).text
        groups = re.findall(r'<p class="group" id="group-\d">(\w+)</p>', shown)
        assert groups == ["Work", "Plans", "Loads", "Processes", "System"]
        assert '<span>Jobs</span><b data-number="/ui/jobs">1</b>' in shown
        database.psql(
            "INSERT INTO dl_processes (type, process_id, status) SELECT 'pay', i::text, 'running'"
            " FROM generate_series(1, 7) AS i;"
            "INSERT INTO dl_errors (at, job_id, task, queue, attempt, status, error_group, error)"
            " SELECT now(), gen_random_uuid(), 't', 'q', 1, 'failed', i % 2, 'odd' FROM generate_series(1, 5) AS i"
        )
        part = await web.client.get(f"{QUEUES}?part=rows")
        assert json.loads(part.headers["Menu-Numbers"]) == {
            "/ui/jobs": "1", "/ui/errors": "2", "/ui/processes": "7",
        }  # fmt: skip
        database.psql("ALTER TABLE dl_etl_runs RENAME TO gone")
        assert (await web.client.get(QUEUES)).status_code == 200


async def test_files_are_compressed_and_pages_unless_another_site_asks(open_web):
    async with open_web() as web:
        for asks, encoding in (("same-origin", "gzip"), ("none", "gzip"), ("cross-site", None), (None, None)):
            headers = {"Accept-Encoding": "gzip"} | ({"Sec-Fetch-Site": asks} if asks else {})
            shown = await web.client.get(QUEUES, headers=headers)
            assert shown.headers.get("Content-Encoding") == encoding, asks
            assert "<h1>Queues</h1>" in shown.text
        for path in set(re.findall(r'(?:href|src)="(/ui/static/[^"]+)"', shown.text)):
            zipped = await web.client.get(path, headers={"Accept-Encoding": "gzip, br"})
            plain = await web.client.get(path, headers={"Accept-Encoding": "identity"})
            assert (zipped.headers["Content-Encoding"], "Content-Encoding" in plain.headers) == ("gzip", False)
            assert zipped.headers["Vary"] == plain.headers["Vary"] == "Accept-Encoding"
            assert zipped.text == plain.text


@pytest.mark.slow
async def test_u13_a_part_that_has_not_changed_is_304_and_says_when_to_come_again(open_web, database):
    # Each page counts again, and shows the job that was added just before.
    database.psql(
        "CREATE FUNCTION count_again() RETURNS trigger LANGUAGE plpgsql"
        " AS 'BEGIN NEW.next_at = clock_timestamp(); RETURN NEW; END';"
        " CREATE TRIGGER count_again BEFORE UPDATE ON dl_depths FOR EACH ROW EXECUTE FUNCTION count_again()"
    )
    async with open_web() as web:
        await web.trigger()
        part = await web.client.get(f"{QUEUES}?part=rows")
        assert "<html" not in part.text
        assert float(part.headers["Refresh-In"]) == 5
        tag = {"If-None-Match": part.headers["ETag"]}
        same = await web.client.get(f"{QUEUES}?part=rows", headers=tag)
        assert (same.status_code, same.text, same.headers["Refresh-In"] != "") == (304, "", True)
        await web.trigger(lock_key="other")
        assert (await web.client.get(f"{QUEUES}?part=rows", headers=tag)).status_code == 200
        nobody = await web.client.get(f"{QUEUES}?part=nobody")
        assert (nobody.status_code, nobody.headers["Content-Type"]) == (404, "text/plain; charset=utf-8")


async def test_u21_times_are_in_the_chosen_zone_and_the_doubled_hour_has_its_offset(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger()
        database.psql(f"UPDATE dl_jobs SET available_at = '2026-10-25 00:30:00Z' WHERE job_id = '{job_id}'")
        answer = await web.client.post(
            "/ui/look", data={"zone": "Europe/Berlin", "theme": "dark", "to": QUEUES}, headers={"Origin": web.url}
        )
        assert answer.headers["Location"] == QUEUES
        shown = (await web.client.get(QUEUES)).text
        assert 'data-theme="dark" data-shortcuts="off" data-zone="Europe/Berlin"' in shown
        assert "2026-10-25 02:30:00+02:00" in shown
        assert "2026-10-25 00:30:00.000 UTC" in shown
        wrong = await web.client.post("/ui/look", data={"zone": "Mars"}, headers={"Origin": web.url})
        assert wrong.status_code == 422


async def test_u21_the_button_for_the_colors_changes_only_them_and_leads_back(open_web):
    async with open_web() as web:
        await web.client.post("/ui/look", data={"zone": "Europe/Berlin"}, headers={"Origin": web.url})
        headers = {"Origin": web.url, "Referer": f"{web.url}{QUEUES}?after=7"}
        answer = await web.client.post("/ui/theme", data={"theme": "dark"}, headers=headers)
        assert answer.headers["Location"] == f"{QUEUES}?after=7"
        shown = (await web.client.get(QUEUES)).text
        assert 'data-theme="dark" data-shortcuts="off" data-zone="Europe/Berlin"' in shown
        assert '<button name="theme" value="light"' in shown
        other = await web.client.post(
            "/ui/theme", data={"theme": "light"}, headers={"Origin": web.url, "Referer": "https://evil.example/x"}
        )
        assert other.headers["Location"] == "/ui"


@pytest.mark.slow
async def test_u10_names_given_by_clients_are_shown_and_never_run(open_web, database):
    async with open_web() as web:
        for name in ("<script>alert(1)</script>\"'", "a\u202eb\x1b[31m\u200b", "..", "a/b?c#d&e=1"):
            quoted = name.replace("'", "''")
            database.psql(
                "INSERT INTO dl_jobs (job_id, queue, task, lock_key, args)"
                f" VALUES (gen_random_uuid(), '{quoted}', 't', 'k', '{{}}')"
            )
        shown = (await web.client.get(QUEUES)).text
        assert "<script>alert" not in shown
        assert not re.search("[\u202e\x1b\u200b]", shown)
        assert "a\\u202eb\\u001b[31m\\u200b" in shown
        for link in re.findall(r'<th scope="row"><a href="([^"]+)"', shown):
            assert link.startswith("/ui/queue?name=")


def test_every_page_is_declared_once_and_every_act_needs_a_role():
    keys = [(route.method, route.path) for route in PAGES]
    assert len(keys) == len(set(keys))
    open_to_all = {route.path for route in PAGES if route.role is None}
    assert open_to_all == {"/ui/sign-in", "/ui/sign-out", "/ui/look", "/ui/theme", "/ui/static/<version>/<name>"}


@pytest.mark.slow
async def test_u14_every_page_and_act_is_refused_without_its_role(open_web):
    needed = {"<uuid:": str(uuid4()), "<path:": "a", "<version>": "0", "<name>": "app.css"}
    async with open_web(tokens=all_tokens()) as web:
        for route in PAGES:
            path = re.sub(
                r"<[^>]+>", lambda part: next((v for k, v in needed.items() if part[0].startswith(k)), "1"), route.path
            )
            web.client.cookies.clear()
            stranger = await web.client.request(route.method, path, headers={"Origin": web.url})
            if route.role is not None:
                assert stranger.status_code == (303 if route.method == "GET" else 401), route.path
            for name, role in (("reader", Role.READ), ("operator", Role.OPERATE)):
                if route.role is not None and route.role > role:
                    await sign_in(web, name)
                    found = await web.client.request(route.method, path, headers={"Origin": web.url})
                    assert found.status_code == 403, (route.path, name)


@pytest.mark.slow
async def test_u11_a_seen_page_follows_and_a_paused_one_asks_nothing(open_web, open_tab):
    async with open_web() as web, open_tab(web.url) as tab:
        await web.trigger()
        await tab.take_clock()
        await tab.go(QUEUES)

        async def ready():
            return await tab.do(lambda page: page.inner_text("td[data-label=Ready]"))

        async def ready_later():
            await tab.pass_time()
            return await ready()

        assert await ready() == "1"
        await tab.do(lambda page: page.focus("main button:text('Pause')"))
        await web.trigger(lock_key="other")
        await until(ready_later, lambda text: text == "2")
        assert await tab.do(lambda page: page.evaluate("document.activeElement.textContent")) == "Pause"
        assert await tab.do(lambda page: page.inner_text("#live-state")) == "Live"

        await tab.do(lambda page: page.click("#live-pause"))
        assert await tab.do(lambda page: page.inner_text("#live-state")) == "Paused"
        asked = len(tab.requests)
        await web.trigger(lock_key="third")
        for _ in range(10):
            await tab.pass_time()
            await trio.sleep(0.1)
        assert len(tab.requests) == asked
        await tab.do(lambda page: page.click("#live-pause"))
        await until(ready_later, lambda text: text == "3")


@pytest.mark.slow
async def test_u7_without_a_script_a_queue_is_paused_and_resumed(open_web, open_tab):
    async with open_web() as web, open_tab(web.url, java_script_enabled=False) as tab:
        await web.trigger()
        await tab.go(QUEUES)
        await tab.do(lambda page: page.click("main button:text('Pause')"))
        assert "Paused q" in await tab.text()
        await tab.do(lambda page: page.click("button:text('Undo')"))
        assert "Resumed q" in await tab.text()
        assert not any(queue.paused for queue in await web.jobs.queues())


@pytest.mark.full
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
async def test_u22_u23_pages_have_no_fault_that_axe_finds_and_fit_a_phone(open_web, open_tab, theme, width):
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        await web.trigger(queue="a-queue-whose-name-has-no-space-" + "x" * 160)
        for path in (QUEUES, "/ui/look"):
            await tab.go(path)
            await tab.check_looks()
    async with open_web(tokens=all_tokens()) as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        await tab.go("/ui/sign-in")
        await tab.check_looks()


async def test_u13_a_flood_of_polls_slows_the_others_for_a_minute_at_most(autojump_clock):
    pace = Pace()
    waits = [pace.next_in(2.0, 0.01) for _ in range(1_000)]
    assert (waits[0], waits[10] > 2.5, waits[-1]) == (2.0, True, 60.0)
    await trio.sleep(60)
    assert pace.next_in(2.0, 0.01) == 2.0
