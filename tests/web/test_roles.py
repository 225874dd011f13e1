"""Tokens and roles, route by route: each route must be listed here with its least role.

test_auth.py tests tokens themselves, and the protection of a server without tokens.
"""

from __future__ import annotations

import itertools
import json
import re
from ipaddress import ip_network

import pytest
from web_server import TOKENS, all_tokens

pytestmark = pytest.mark.requirement("Q2")

PROXY = (ip_network("127.0.0.1"),)
_NUMBERS = itertools.count()
LEAST_ROLE = {
    ("GET", "/api/v1/jobs"): "read",
    ("GET", "/api/v1/jobs/<uuid:job_id>"): "read",
    ("GET", "/api/v1/jobs/<uuid:job_id>/status"): "read",
    ("GET", "/api/v1/jobs/<uuid:job_id>/events"): "read",
    ("GET", "/api/v1/jobs/<uuid:job_id>/why"): "read",
    ("GET", "/api/v1/jobs/<uuid:job_id>/logs"): "read",
    ("GET", "/api/v1/runs"): "read",
    ("GET", "/api/v1/runs/<uuid:run_id>/timeline"): "read",
    ("GET", "/api/v1/runs/<uuid:run_id>/failures"): "read",
    ("GET", "/api/v1/loads"): "read",
    ("GET", "/api/v1/loads/<path:load>"): "read",
    ("GET", "/api/v1/loads/<path:load>/failures"): "read",
    ("GET", "/api/v1/queues"): "read",
    ("GET", "/api/v1/workers"): "read",
    ("GET", "/api/v1/tasks"): "read",
    ("GET", "/api/v1/tasks/<path:task>"): "read",
    ("GET", "/api/v1/suppliers"): "read",
    ("GET", "/api/v1/suppliers/<path:supplier>"): "read",
    ("GET", "/api/v1/duplicates"): "read",
    ("POST", "/api/v1/duplicates/cancel"): "admin",
    ("POST", "/api/v1/tasks/<path:task>/trigger"): "operate",
    ("GET", "/api/v1/errors"): "read",
    ("GET", "/api/v1/errors/log"): "read",
    ("GET", "/api/v1/errors/<path:group>/jobs"): "read",
    ("GET", "/api/v1/schedules"): "read",
    ("GET", "/api/v1/schedules/<path:name>"): "read",
    ("GET", "/api/v1/schedules/<path:name>/next"): "read",
    ("GET", "/api/v1/schedules/<path:name>/events"): "read",
    ("GET", "/api/v1/processes"): "read",
    ("GET", "/api/v1/processes/versions"): "read",
    ("GET", "/api/v1/processes/errors"): "read",
    ("GET", "/api/v1/processes/sinks"): "read",
    ("GET", "/api/v1/processes/deliveries"): "read",
    ("GET", "/api/v1/processes/tasks/<int:task_id>"): "read",
    ("GET", "/api/v1/processes/<process_type>/<path:process_id>"): "read",
    ("GET", "/api/v1/processes/<process_type>/<path:process_id>/events"): "read",
    ("GET", "/api/v1/processes/<process_type>/<path:process_id>/tasks"): "read",
    ("GET", "/api/v1/stats"): "read",
    ("GET", "/api/v1/bulk"): "admin",
    ("GET", "/api/v1/bulk/<uuid:bulk_id>"): "admin",
    ("POST", "/api/v1/bulk"): "admin",
    ("POST", "/api/v1/bulk/<uuid:bulk_id>/stop"): "admin",
    ("GET", "/status"): "read",
    ("GET", "/metrics"): "read",
    ("POST", "/api/v1/jobs/trigger"): "operate",
    ("POST", "/api/v1/jobs/trigger/batch"): "operate",
    ("POST", "/api/v1/jobs/<uuid:job_id>/cancel"): "operate",
    ("POST", "/api/v1/jobs/<uuid:job_id>/retry"): "operate",
    ("POST", "/api/v1/jobs/<uuid:job_id>/run-now"): "operate",
    ("PATCH", "/api/v1/jobs/<uuid:job_id>"): "operate",
    ("POST", "/api/v1/processes/<process_type>"): "operate",
    ("POST", "/api/v1/processes/<process_type>/batch"): "operate",
    ("POST", "/api/v1/processes/<process_type>/<path:process_id>/call"): "operate",
    ("POST", "/api/v1/processes/<process_type>/<path:process_id>/repair"): "operate",
    ("POST", "/api/v1/processes/<process_type>/<path:process_id>/resume"): "operate",
    ("POST", "/api/v1/processes/<process_type>/<path:process_id>/stop"): "operate",
    ("POST", "/api/v1/processes/<process_type>/<path:process_id>/remove"): "operate",
    ("POST", "/api/v1/processes/tasks/<int:task_id>/withdraw"): "operate",
    ("POST", "/api/v1/processes/deliveries/release"): "operate",
    ("POST", "/api/v1/queues/<path:queue>/pause"): "operate",
    ("POST", "/api/v1/queues/<path:queue>/resume"): "operate",
    ("POST", "/api/v1/schedules/<path:name>/pause"): "operate",
    ("POST", "/api/v1/schedules/<path:name>/resume"): "operate",
    ("POST", "/api/v1/schedules/<path:name>/run"): "operate",
    ("POST", "/api/v1/schedules/<path:name>/backfill"): "operate",
    ("POST", "/api/v1/tasks/<path:task>/pause"): "operate",
    ("POST", "/api/v1/tasks/<path:task>/resume"): "operate",
    ("POST", "/api/v1/suppliers/<path:supplier>/pause"): "operate",
    ("POST", "/api/v1/suppliers/<path:supplier>/resume"): "operate",
    ("PATCH", "/api/v1/tasks"): "admin",
    ("PATCH", "/api/v1/tasks/<path:task>"): "admin",
    ("DELETE", "/api/v1/tasks/<path:task>"): "admin",
    ("PATCH", "/api/v1/suppliers/<path:supplier>"): "admin",
    ("DELETE", "/api/v1/suppliers/<path:supplier>"): "admin",
    ("PUT", "/api/v1/schedules/<path:name>"): "admin",
    ("DELETE", "/api/v1/schedules/<path:name>"): "admin",
    ("PUT", "/api/v1/processes/<process_type>/<path:process_id>"): "admin",
    ("POST", "/api/v1/processes/repair"): "admin",
    ("POST", "/api/v1/processes/resume"): "admin",
    ("POST", "/api/v1/jobs/cancel"): "admin",
    ("POST", "/api/v1/jobs/retry"): "admin",
    ("POST", "/api/v1/jobs/run-now"): "admin",
    ("POST", "/api/v1/jobs/reprioritize"): "admin",
    ("POST", "/api/v1/errors/<path:group>/retry"): "admin",
    ("GET", "/api/v1/audit"): "admin",
    ("GET", "/health"): "all",
    ("GET", "/ready"): "all",
    ("GET", "/openapi.json"): "all",
    ("GET", "/docs"): "all",
    ("GET", "/problems/<kind>"): "all",
}
JOB = {"queue": "q", "task": "t", "lock_key": "k"}
BODIES = {
    ("POST", "/api/v1/jobs/trigger"): JOB,
    ("POST", "/api/v1/jobs/trigger/batch"): {"jobs": [JOB]},
    ("POST", "/api/v1/tasks/<path:task>/trigger"): {"year": 1},
    ("POST", "/api/v1/duplicates/cancel"): {"task": "none such"},
    ("PATCH", "/api/v1/jobs/<uuid:job_id>"): {"priority": 1},
    ("PATCH", "/api/v1/tasks"): {"tasks": [{"task": "t", "max_running": 1}]},
    ("PATCH", "/api/v1/tasks/<path:task>"): {"max_running": 1},
    ("PATCH", "/api/v1/suppliers/<path:supplier>"): {"rate_limits": [[1, 1]]},
    ("PUT", "/api/v1/schedules/<path:name>"): {"task": "t", "every_s": 60},
    ("POST", "/api/v1/schedules/<path:name>/backfill"): {"begin": "2026-01-01T00:00Z", "end": "2026-01-02T00:00Z"},
    ("POST", "/api/v1/jobs/cancel"): {"queue": "none such"},
    ("POST", "/api/v1/jobs/retry"): {"queue": "none such"},
    ("POST", "/api/v1/jobs/run-now"): {"queue": "none such"},
    ("POST", "/api/v1/errors/<path:group>/retry"): {"spread_s": 1},
    ("POST", "/api/v1/jobs/reprioritize"): {"queue": "none such", "priority": 1},
    ("POST", "/api/v1/processes/<process_type>"): {"process_id": "1"},
    ("POST", "/api/v1/processes/<process_type>/batch"): {"processes": [{"process_id": "2"}]},
    ("POST", "/api/v1/processes/<process_type>/<path:process_id>/call"): {"method": "m"},
    ("POST", "/api/v1/processes/<process_type>/<path:process_id>/repair"): {},
    ("POST", "/api/v1/processes/repair"): {"type": "none such"},
    ("POST", "/api/v1/processes/deliveries/release"): {"sink": "none such"},
    ("POST", "/api/v1/processes/resume"): {"type": "none such"},
    ("PUT", "/api/v1/processes/<process_type>/<path:process_id>"): {},
}
ROLES = ("all", "read", "operate", "admin")
"""Each may do everything that those before it may."""
CALLERS = {
    "nobody": (None, "all"),
    "a stranger": ("x" * 20, "all"),
    "a reader": (TOKENS["reader"], "read"),
    "an operator": (TOKENS["operator"], "operate"),
    "an administrator": (TOKENS["chief"], "admin"),
}
WRITTEN = "SELECT (SELECT count(*) FROM dl_jobs), (SELECT count(*) FROM dl_queues), (SELECT count(*) FROM dl_audit)"
UNKNOWN_JOB = "0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b"


def address(rule):
    rule = rule.replace("<int:task_id>", "1").replace("<path:process_id>", "1")
    return re.sub(r"<(?:\w+:)?(\w+)>", lambda part: UNKNOWN_JOB if part[1].endswith("_id") else "q", rule)


def described(rule):
    return re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule)


def bearer(secret):
    """Return headers with another address for each request, so that none is throttled behind a trusted proxy."""
    number = next(_NUMBERS)
    forwarded = {"X-Forwarded-For": f"10.0.{number // 256}.{number % 256}"}
    return forwarded if secret is None else {"Authorization": f"Bearer {secret}"} | forwarded


def verdict(answer):
    assert answer.status_code < 500, answer.text
    return {401: "unknown", 403: "refused"}.get(answer.status_code, "served")


def expected(secret, role, least):
    if ROLES.index(role) >= ROLES.index(least):
        return "served"
    return "unknown" if secret is None or secret not in TOKENS.values() else "refused"


async def test_every_route_of_the_app_has_an_entry_and_every_entry_a_route(open_web):
    async with open_web() as web:
        all_rules = {(method, rule.rule) for rule in web.app.url_map.iter_rules() for method in rule.methods}
    rules = {(method, rule) for method, rule in all_rules if not rule.startswith("/ui")}  # pages/test_frame.py has them
    assert {(method, rule) for method, rule in rules if method not in {"HEAD", "OPTIONS"}} == set(LEAST_ROLE)
    # HEAD is the same as GET, and OPTIONS lists methods.
    assert {rule for method, rule in rules if method == "HEAD"} == {r for method, r in LEAST_ROLE if method == "GET"}


@pytest.mark.full
@pytest.mark.parametrize(("secret", "role"), CALLERS.values(), ids=CALLERS)
async def test_each_route_serves_its_least_role_and_those_above(open_web, secret, role):
    async with open_web(tokens=all_tokens(), trusted_proxies=PROXY) as web:
        found = {}
        for route in LEAST_ROLE:
            method, rule = route
            answer = await web.client.request(
                method, address(rule), json=BODIES.get(route), headers=bearer(secret), timeout=20
            )
            found[route] = verdict(answer)
            assert ("WWW-Authenticate" in answer.headers) == (found[route] != "served")
            if method == "GET":
                headed = await web.client.head(address(rule), headers=bearer(secret))
                assert (verdict(headed), headed.content) == (found[route], b""), rule
        assert found == {route: expected(secret, role, least) for route, least in LEAST_ROLE.items()}


@pytest.mark.full
@pytest.mark.parametrize("caller", ["nobody", "a stranger", "a reader"])
async def test_a_caller_without_the_role_is_refused_before_anything_is_read_or_written(open_web, database, caller):
    secret, role = CALLERS[caller]
    bodies = {"max_body_bytes": 1_000, "max_batch_body_bytes": 1_000}
    async with open_web(tokens=all_tokens(), trusted_proxies=PROXY, **bodies) as web:
        for (method, rule), least in LEAST_ROLE.items():
            if expected(secret, role, least) == "served":
                continue
            for content in (b"{", b"x" * 2_000, json.dumps(JOB).encode()):
                answer = await web.client.request(
                    method, f"{address(rule)}?colour=red", content=content, headers=bearer(secret)
                )
                assert verdict(answer) == expected(secret, role, least), (method, rule)
                assert set(answer.json()) == {"type", "title", "status", "detail", "request_id", "instance"}
    assert database.psql(WRITTEN) == "0|0|0"


async def test_a_token_counts_in_its_header_only(open_web):
    token = TOKENS["chief"]
    async with open_web(tokens=all_tokens()) as web:
        for name in ("token", "access_token", "authorization", "api_key"):
            answer = await web.client.get("/api/v1/workers", params={name: token})
            assert answer.status_code == 401
            assert token not in answer.text
        for name, value in {
            "Cookie": f"token={token}; Authorization=Bearer {token}",
            "X-Api-Key": token,
            "X-Auth-Token": token,
            "Proxy-Authorization": f"Bearer {token}",
            "X-Forwarded-Authorization": f"Bearer {token}",
            "X-HTTP-Method-Override": "GET",
        }.items():
            answer = await web.client.get("/api/v1/workers", headers={name: value})
            assert answer.status_code == 401, name
        both = [("Authorization", "Bearer unknown"), ("Authorization", f"Bearer {token}")]
        assert (await web.client.get("/api/v1/workers", headers=both)).status_code == 401
        assert (
            await web.client.get("/api/v1/workers", headers={"authorization": f"bearer {token}"})
        ).status_code == 200


@pytest.mark.slow
async def test_options_shows_the_methods_of_an_address_to_everyone(open_web):
    async with open_web(tokens=all_tokens()) as web:
        for method, rule in LEAST_ROLE:
            answer = await web.client.options(address(rule))
            assert (answer.status_code, answer.content) == (200, b""), rule
            assert method in answer.headers["Allow"]


@pytest.mark.slow
async def test_the_description_says_of_each_route_what_it_takes(open_web):
    async with open_web() as web:
        paths = (await web.client.get("/openapi.json")).json()["paths"]
    found = {}
    for path, methods in paths.items():
        for method, operation in methods.items():
            role = re.search(r"Needs the role (\w+)\.", operation.get("description", ""))
            found[method.upper(), path] = role[1] if role else "all"
            # In OpenAPI, [] means "no token, whatever the other operations need".
            assert (operation.get("security") == []) == (role is None), path
            assert ({"401", "403"} <= set(operation["responses"])) == (role is not None), path
    # It does not describe itself.
    found |= {("GET", "/openapi.json"): "all", ("GET", "/docs"): "all"}
    assert found == {(method, described(rule)): least for (method, rule), least in LEAST_ROLE.items()}
