"""No read shows a secret of any row, over HTTP or on a page (Q16)."""

from __future__ import annotations

import re

import pytest
from canaries import CANARY
from secret_rows import BULK, FAILED, FLOW, PLAIN, RUNNING, insert_secret_rows

from dataloader.web.pages.site import PAGES

pytestmark = [pytest.mark.slow, pytest.mark.requirement("Q16")]

NOT_OF_ROWS = {"/ui/sign-in", "/ui/look", "/ui/static/<version>/<name>", "/ui/", "/ui/concealed"}
ONE, WHICH, GROUP = f"?name={PLAIN}", f"?type={PLAIN}&id={PLAIN}", f"?type={PLAIN}&error_group={{process_group}}"
QUERIES = {
    "/ui/jobs/<uuid:job_id>": ("", *(f"?whole={name}" for name in ("args", "previous", "progress", "result"))),
    "/ui/jobs/export": ("?format=csv", "?format=ndjson"),
    "/ui/key": (f"?k={PLAIN}",),
    "/ui/find": ("?q=token", "?q=spil"),
    "/ui/runs/<uuid:run_id>": ("", "?view=all", "?open=1"),
    "/ui/runs/<uuid:run_id>.txt": ("", "?view=all"),
    **dict.fromkeys(("/ui/load", "/ui/loads/run", "/ui/loads/retry", "/ui/queue"), (ONE,)),
    **dict.fromkeys((f"/ui/{kind}" for kind in ("task", "tasks/limits", "tasks/remove")), (ONE,)),
    **dict.fromkeys((f"/ui/{kind}" for kind in ("supplier", "suppliers/limits", "suppliers/remove")), (ONE,)),
    **dict.fromkeys((f"/ui/schedule{kind}" for kind in ("", "s/run", "s/backfill")), (ONE,)),
    "/ui/processes": ("", f"{GROUP}"),
    "/ui/process/task/<int:task_id>": ("", *(f"?whole={name}" for name in ("args", "context", "response"))),
    "/ui/process/state": (WHICH, f"{WHICH}&whole=state", f"{WHICH}&whole=metadata"),
    **dict.fromkeys((f"/ui/process{step}" for step in ("", "/events", "/call", "/repair", "/resume")), (WHICH,)),
    **dict.fromkeys(("/ui/process/stop", "/ui/process/remove"), (WHICH,)),
    "/ui/processes/errors/mend": (f"{GROUP}&action=repair",),
    "/ui/errors": ("", "?exact=true"),
    "/ui/bulk/new": (f"?action=cancel&all=true&queue={PLAIN}",),
    "/ui/stats": ("?from=2026-11-20T00:00&to=2026-11-21T00:00&table=true",),
}
"""Queries with which pages are requested, by the path of the page; the others without one."""


async def leaks_of(client, paths):
    """Return the addresses whose answers show a secret, with the text around it, and those that are refused."""
    leaks, masked = {}, 0
    for path in paths:
        answer = await client.get(path)
        said = f"{answer.text} {[*answer.headers.items()]}"
        masked += "***" in said
        if CANARY in said:
            leaks[path] = said[max(said.find(CANARY) - 80, 0) :][:160]
        elif answer.status_code != 200:
            leaks[path] = f"{answer.status_code} {answer.text[:2000]}"
    return leaks, masked


async def test_no_answer_of_the_api_shows_a_secret_of_a_row(open_web, database):
    rows = insert_secret_rows(database)
    async with open_web() as web:
        paths = (await web.client.get("/openapi.json")).json()["paths"]
        parts = {"load": PLAIN, "run_id": FAILED, "job_id": FAILED, "kind": "draining", "group": rows.group}
        parts |= dict.fromkeys(("name", "task", "supplier", "process_type", "process_id"), PLAIN)
        parts |= {"task_id": rows.call, "bulk_id": BULK}
        read = [path.format_map(parts) for path, methods in paths.items() if "get" in methods]
        read += [f"/api/v1/jobs/{RUNNING}{more}" for more in ("", "/why", "/events", "/logs", "/status")]
        leaks, masked = await leaks_of(web.client, read)
    assert leaks == {}
    assert masked > 30


async def test_no_page_shows_a_secret_of_a_row(open_web, database):
    rows = insert_secret_rows(database)
    parts = {"<uuid:job_id>": FAILED, "<uuid:run_id>": FLOW, "<uuid:other_id>": FLOW, "<group>": rows.group}
    parts |= {"<int:task_id>": rows.call, "<uuid:bulk_id>": BULK}
    read = []
    for route in PAGES:
        if route.method == "GET" and route.path not in NOT_OF_ROWS:
            path = re.sub("<[^>]+>", lambda part: str(parts[part[0]]), route.path)
            read += [path + query.format(process_group=rows.process_group) for query in QUERIES.get(route.path, ("",))]
    assert set(QUERIES) <= {route.path for route in PAGES}
    async with open_web() as web:
        leaks, masked = await leaks_of(web.client, read)
    assert leaks == {}
    assert masked > 50
