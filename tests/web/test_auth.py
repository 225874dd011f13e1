"""Rights of callers, with tokens and without."""

from __future__ import annotations

import pytest
from web_server import TOKENS, all_tokens

pytestmark = pytest.mark.requirement("Q2")

BODY = {"queue": "q", "task": "t", "lock_key": "k"}


def bearer(name):
    return {"Authorization": f"Bearer {TOKENS[name]}"}


ALLOWED = [
    ("GET", "/api/v1/jobs", None, {"reader", "operator", "chief"}),
    ("GET", "/status", None, {"reader", "operator", "chief"}),
    ("GET", "/metrics", None, {"reader", "operator", "chief"}),
    ("POST", "/api/v1/jobs/trigger", BODY, {"operator", "chief"}),
    ("POST", "/api/v1/queues/q/pause", None, {"operator", "chief"}),
    ("POST", "/api/v1/jobs/cancel", {"queue": "q"}, {"chief"}),
    ("POST", "/api/v1/jobs/retry", {"queue": "q"}, {"chief"}),
    ("GET", "/api/v1/audit", None, {"chief"}),
]


@pytest.mark.slow
async def test_a_role_allows_what_it_says(open_web):
    async with open_web(tokens=all_tokens()) as web:
        for method, path, body, allowed in ALLOWED:
            nobody = await web.client.request(method, path, json=body)
            assert nobody.status_code == 401, path
            assert nobody.headers["WWW-Authenticate"].startswith("Bearer")
            for name in TOKENS:
                answer = await web.client.request(method, path, json=body, headers=bearer(name))
                assert (answer.status_code < 300) == (name in allowed), answer.text
                assert name in allowed or answer.status_code == 403, (name, path)


WRONG = ["", "Bearer", f"Basic {TOKENS['chief']}", "Bearer wrong", f"Bearer {TOKENS['chief']}x", "Bearer \xff"]


async def test_a_wrong_token_is_refused(open_web):
    async with open_web(tokens=all_tokens()) as web:
        for header in WRONG:
            answer = await web.client.get("/api/v1/jobs", headers={"Authorization": header.encode("latin1")})
            assert answer.status_code == 401, header
            assert TOKENS["chief"] not in answer.text


async def test_the_way_to_the_docs_and_the_probes_is_open(open_web):
    async with open_web(tokens=all_tokens()) as web:
        for path in ("/health", "/ready", "/openapi.json", "/docs"):
            assert (await web.client.get(path, headers={"Host": "pod-7.cluster"})).status_code == 200


async def test_the_audit_names_the_token_and_the_request(open_web):
    async with open_web(tokens=all_tokens()) as web:
        headers = bearer("operator") | {"X-Request-ID": "from a test"}
        job = (await web.client.post("/api/v1/jobs/trigger", json=BODY, headers=headers)).json()["job_id"]
        await web.client.post(f"/api/v1/jobs/{job}/cancel", headers=headers)
        [line] = (await web.client.get("/api/v1/audit", headers=bearer("chief"))).json()["audit"]
        assert (line["actor"], line["action"], line["job_id"]) == ("operator", "cancel", job)
        assert line["detail"]["request_id"] == "from a test"


def test_a_token_is_not_kept_as_text():
    for token in all_tokens():
        assert not any(secret in repr(token) for secret in TOKENS.values())
        assert not any(secret.encode() in token.digest for secret in TOKENS.values())


HOSTS = [
    ("localhost:1", 200),
    ("127.0.0.1", 200),
    ("[::1]:8080", 200),
    ("127.0.0.9:8080", 200),
    ("evil.example", 403),
    ("127.0.0.1.evil.example:8080", 403),
    ("localhost@evil.example", 403),
    ("10.0.0.1", 403),
    ("[::1", 403),
]


@pytest.mark.slow
async def test_without_tokens_only_loopback_hosts_are_served(open_web):
    async with open_web() as web:
        for host, status in HOSTS:
            assert (await web.client.get("/api/v1/jobs", headers={"Host": host})).status_code == status, host


async def test_without_tokens_no_foreign_page_changes_anything(open_web):
    async with open_web() as web:
        job_id = await web.trigger()
        address = f"/api/v1/jobs/{job_id}/cancel"
        for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "http://["):
            assert (await web.client.post(address, headers={"Origin": origin})).status_code == 403
        assert (await web.client.get(f"/api/v1/jobs/{job_id}")).json()["status"] == "queued"
        assert (await web.client.post(address, headers={"Origin": web.url})).status_code == 200
        [line] = (await web.client.get("/api/v1/audit")).json()["audit"]
        assert line["actor"] == "local"
