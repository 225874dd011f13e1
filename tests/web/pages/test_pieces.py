"""Pieces of pages: progress in words, JSON as a tree, a job's life as a bar, badges, colors of environments."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest

from dataloader.store.queue.attempts import Attempt
from dataloader.web.pages import json_tree as trees
from dataloader.web.pages.attempt_timeline import timeline_of
from dataloader.web.pages.badges import LOOKS, badge, state_of_job
from dataloader.web.pages.env_color import env_color
from dataloader.web.pages.icons import icon
from dataloader.web.pages.json_tree import json_tree
from dataloader.web.pages.progress import progress_of
from dataloader.web.pages.svg import hourly

pytestmark = pytest.mark.requirement("E11")

NOON = datetime(2026, 11, 26, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("reported", "percent", "text"),
    [
        ({"products": 18_420, "of": 42_000}, 43, "18,420 of 42,000 products"),
        ({"done": 3, "total": 4, "unit": "files"}, 75, "3 of 4 files"),
        ({"segments": 7, "segments_planned": 7}, 100, "7 of 7 segments"),
        ({"done": 9, "of": 4}, 100, "9 of 4"),
        ({"percent": 20, "step": "waits"}, 20, "percent 20, step waits"),
        ({"n": 5}, None, "n 5"),
        ({"n": 5, "of": 0}, None, "n 5, of 0"),
    ],
)
def test_progress_is_a_share_and_a_sentence(reported, percent, text):
    found = progress_of(reported)
    assert (found.percent, found.text) == (percent, text)


def test_progress_may_have_any_numbers():
    assert progress_of({"n": 10**400, "of": 1}).percent == 100
    assert progress_of({"n": 1, "of": 10**400}).percent == 0
    assert progress_of({"n": 1e308, "of": 1e-300}).percent == 100
    assert len(progress_of({"n": 10**400, "of": 1}).text) < 100


@pytest.mark.parametrize("reported", [None, {}, [1], "half", {"nested": {"n": 1}}, {"n": -1}, {"ready": True}])
def test_what_is_no_progress_is_not_shown(reported):
    assert progress_of(reported) is None


def test_a_json_tree_has_blocks_and_escapes_texts():
    tree = json_tree({"a": {"b": [1, "<i>"]}, "c": None, "": "x"})
    assert tree.is_whole
    assert re.sub("<svg.*?</svg>", "", tree.html) == (
        "<details open><summary>a<i>1 key</i></summary><div>"
        "<details open><summary>b<i>2 items</i></summary><div>"
        "<p><i>0</i> 1</p><p><i>1</i> &#34;&lt;i&gt;&#34;</p></div></details></div></details>"
        "<p><i>c</i> null</p><p><i>&#34;&#34;</i> &#34;x&#34;</p>"
    )
    assert json_tree(7).html == "<p>7</p>"
    assert json_tree({}).html == "<p>{}</p>"


def test_a_cut_json_tree_closes_its_blocks(monkeypatch):
    monkeypatch.setattr(trees, "_MOST_PARTS", 3)
    tree = json_tree({"a": {"b": [1, 2, 3, 4]}})
    assert not tree.is_whole
    assert tree.html.count("<details") == tree.html.count("</details>") == 2
    deep = value = {}
    for _ in range(500):
        value["x"] = value = {}
    assert json_tree(deep).html.count("<details") < 40


def attempt(number, begin_s, end_s, outcome, next_s=None):
    at = [None if second is None else NOON + timedelta(seconds=second) for second in (begin_s, end_s, next_s)]
    fields = {"began": at[0], "ended": at[1], "next_at": at[2]}
    return Attempt(number=str(number), worker="w", outcome=outcome, error=None, **fields)


class JobInTime:
    """Times of a job."""

    def __init__(self, *, ended_s):
        self.created_at = self.available_at = NOON
        self.finished_at = NOON + timedelta(seconds=ended_s)
        self.status = type("Status", (), {"is_final": True})()


def test_a_life_has_the_queue_attempts_and_delays_in_proportion():
    attempts = [attempt(1, 10, 20, "failed", 50), attempt(2, 60, 100, "succeeded")]
    parts = timeline_of(JobInTime(ended_s=100), attempts, is_whole=True)
    assert [(part.kind, round(part.width, 2)) for part in parts] == [
        ("idle", 0.1), ("bad", 0.1), ("delay", 0.3), ("idle", 0.1), ("ok", 0.4),
    ]  # fmt: skip
    assert parts[-1].text == "2 succeeded, 40 s"
    # A short part can be seen.
    short = timeline_of(JobInTime(ended_s=100_000), [attempt(1, 1, 100_000, "failed")], is_whole=True)
    assert short[0].width > 0.005
    assert timeline_of(JobInTime(ended_s=100), [], is_whole=True) == []


def test_a_queued_job_is_shown_with_what_it_waits_for():
    def state(status, waits_for=None, attempts=0):
        return state_of_job(type("Job", (), {"status": status, "waits_for": waits_for, "attempt": attempts})())

    assert [state("queued"), state("queued", "lock"), state("queued", "limit"), state("queued", "time")] == [
        "queued", "blocked", "blocked", "delayed",
    ]  # fmt: skip
    assert (state("queued", "time", 2), state("failed", "time", 2)) == ("retrying", "failed")


def test_every_state_has_a_badge_and_unknown_icons_are_refused():
    shapes = {str(badge(state)) for state in LOOKS}
    assert all('href="#i-' in shape for shape in shapes)
    assert "&lt;b&gt;" in badge("queued", "<b>")
    with pytest.raises(KeyError):
        icon("nothing")


def test_a_chart_of_hours_has_a_scale_and_titles():
    drawn = str(hourly([("10:00", 3), ("11:00", 0), ("12:00", 1_204)], "x", kind="run"))
    assert re.findall(r"<title>([^<]+)", drawn) == ["10:00: 3", "12:00: 1,204"]
    assert re.findall(r'text-anchor="end">([^<]+)', drawn) == ["0", "1,000", "2,000"]


def test_known_environments_have_a_color():
    assert [env_color(name) for name in ("Prod", "production", "staging", "qa", "dev", "ops-7", None)] == [
        "production", "production", "staging", "test", "development", "", "",
    ]  # fmt: skip
