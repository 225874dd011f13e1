"""Search box and the query language of the jobs' filter line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from dataloader.jobs.errors import BadRequest
from dataloader.web.pages.job_query import parse_terms

pytestmark = pytest.mark.requirement("E11")


@pytest.mark.parametrize(
    ("text", "values", "words"),
    [
        ("status:failed queue:mail", {"status": "failed", "queue": "mail"}, ()),
        ('task:mail.receipt key:"order 7"', {"task": "mail.receipt", "key": "order 7"}, ()),
        ("args.id:7", {"args": "id=7"}, ()),
        ("group:x ended-since:2026-11-23T12:00", {"root": "x", "finished_from": "2026-11-23T12:00"}, ()),
        ("mail.receipt", {}, ("mail.receipt",)),
        ("postgres://ann@db/x", {}, ("postgres://ann@db/x",)),
    ],
)
def test_terms_are_values_of_the_address_and_words(text, values, words):
    found = parse_terms(text, UTC)
    assert (dict(found.values), found.words) == (values, words)


def test_an_age_is_a_time_by_the_reader_s_clock():
    since = datetime.fromisoformat(parse_terms("since:2h", UTC).values["from"]).replace(tzinfo=UTC)
    assert timedelta(hours=2) <= datetime.now(UTC) - since < timedelta(hours=2, minutes=1)


def test_an_unknown_name_is_refused_with_the_allowed_ones():
    with pytest.raises(BadRequest, match=r"order: is not allowed\. Allowed names: status, queue"):
        parse_terms("order:48211", UTC)


async def test_the_filter_line_leads_to_the_address_of_its_terms(open_web):
    async with open_web() as web:
        answer = await web.client.get("/ui/jobs", params={"q": "status:failed task:t", "queue": "q"})
        assert (answer.status_code, answer.headers["Location"]) == (303, "/ui/jobs?queue=q&status=failed&task=t")
        wrong = await web.client.get("/ui/jobs", params={"q": "state:failed", "queue": "q"})
        assert wrong.status_code == 422
        assert "state: is not allowed" in wrong.text
        assert 'value="state:failed"' in wrong.text
        assert "more than one word" in (await web.client.get("/ui/jobs", params={"q": "a b"})).text
        # Terms that are not in the address yet would widen an operation.
        many = {"q": "task:t", "queue": "q", "all": "true", "action": "cancel"}
        assert (await web.client.get("/ui/bulk/new", params=many)).status_code == 422
        assert (await web.client.get("/ui/jobs/export", params={"q": "task:t"})).status_code == 422


async def test_the_search_leads_to_a_job_a_filter_or_the_only_name(open_web, database):
    async with open_web() as web:
        job_id = await web.trigger(queue="mail", lock_key="order:48211")
        database.psql(
            "INSERT INTO dl_tasks (task, layout, declared_by) VALUES ('mail.receipt', 1, 'w'), ('mail.refund', 1, 'w');"
            "INSERT INTO dl_processes (type, process_id, status) VALUES ('order', '48211', 'running')"
        )

        async def leads(text):
            answer = await web.client.get("/ui/find", params={"q": text})
            return answer.headers.get("Location"), answer.text

        assert (await leads(job_id))[0] == f"/ui/jobs/{job_id}"
        assert (await leads("status:failed since:2h"))[0] == "/ui/jobs?q=status%3Afailed%20since%3A2h"
        assert (await leads("RECEIPT"))[0] == "/ui/task?name=mail.receipt"
        assert (await leads("48211"))[0] == "/ui/process?type=order&id=48211"
        assert (await leads("order:48211"))[0] == "/ui/key?k=order%3A48211"
        assert (await leads(""))[0] == "/ui/jobs"
        await web.client.get("/ui/queues")  # counts the jobs, by which queues are known
        where, text = await leads("mail")
        assert where is None
        links = re.findall(r'class="in" href="([^"]+)"', text)
        assert links == ["/ui/queue?name=mail", "/ui/task?name=mail.refund", "/ui/task?name=mail.receipt"]
        assert "has this in its name" in (await leads("nobody"))[1]


@pytest.mark.full
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (360, "dark")])
async def test_u22_u23_results_have_no_fault_that_axe_finds_and_fit(open_web, open_tab, database, width, theme):
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        database.psql(
            "INSERT INTO dl_tasks (task, layout, declared_by) SELECT 'x' || repeat('long', i * 20), 1, 'w'"
            " FROM generate_series(1, 5) AS i"
        )
        for path in ("/ui/find?q=long", "/ui/find?q=nobody"):
            await tab.go(path)
            await tab.check_looks()
