"""Pages of runs in a browser: jumps to a block, lines that arrive while it is open, looks (U1, U3, U7, U12, U22)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from conditions import until
from etl_runs import BEGAN, HOSTILE, NIGHTLY

pytestmark = pytest.mark.requirement("E11")


async def at(tab, script):
    return await tab.do(lambda page: page.evaluate(script))


@pytest.mark.slow
async def test_u1_a_click_or_enter_on_a_task_opens_its_block_and_gives_it_the_focus(open_web, open_tab, nightly):
    async with open_web() as web, open_tab(web.url) as tab:
        await tab.go(f"/ui/runs/{nightly}")
        await tab.do(lambda page: page.click("#task-2 th a"))
        await tab.do(lambda page: page.wait_for_selector("#block-2 li"))
        assert await at(tab, "location.hash") == "#log-2"
        assert await at(tab, "document.activeElement.parentElement.id") == "block-2"
        assert await at(tab, "document.querySelectorAll('#block-2 li').length") == 3
        assert not await at(tab, "document.getElementById('block-1').open")
        await tab.do(lambda page: (page.focus("#task-1 th a"), page.keyboard.press("Enter")))
        await tab.do(lambda page: page.wait_for_selector("#block-1 li"))
        assert await at(tab, "[location.hash, document.activeElement.parentElement.id].join()") == "#log-1,block-1"
        # A copied link opens the same block.
        await tab.go(f"/ui/runs/{nightly}?level=error#log-2")
        await tab.do(lambda page: page.wait_for_selector("#block-2 li"))
        assert await at(tab, "document.querySelectorAll('#block-2 li').length") == 1


@pytest.mark.slow
async def test_u1_u7_without_a_script_the_link_opens_the_block_and_more_lines_are_a_link(
    open_web, open_tab, make, nightly
):
    make.lines(nightly, "ods.rates", [("info", f"line {n}") for n in range(600)])
    async with open_web() as web, open_tab(web.url, java_script_enabled=False) as tab:
        await tab.go(f"/ui/runs/{nightly}")
        await tab.do(lambda page: page.click("#task-1 th a"))
        assert (await tab.do(lambda page: page.url)).endswith("?open=1#log-1")
        assert "GET /rates?page=1" in await tab.text("#block-1")
        await tab.do(lambda page: page.click("#block-1 .more"))
        shown = await tab.text("#block-1")
        assert "line 599" in shown
        assert "GET /rates?page=1" not in shown
        await tab.do(lambda page: page.click("#block-1 .from-start a"))
        assert "GET /rates?page=1" in await tab.text("#block-1")


@pytest.mark.slow
async def test_u3_u12_an_open_block_gets_new_lines_and_keeps_the_readers_state(open_web, open_tab, make):
    run_id = make.run([("a", "running"), ("b", "waiting")], status="running")
    make.lines(run_id, "a", [("info", f"line {n}") for n in range(502)])
    async with open_web() as web, open_tab(web.url) as tab:
        await tab.take_clock()
        await tab.go(f"/ui/runs/{run_id}")
        await tab.do(lambda page: page.click("#block-1 summary"))
        await tab.do(lambda page: page.wait_for_selector("#block-1 li"))
        await tab.do(lambda page: page.click("#block-1 .more"))

        async def lines():
            await tab.pass_time()
            return await at(tab, "document.querySelectorAll('#block-1 li').length")

        await until(lines, lambda number: number == 502)
        await tab.do(lambda page: page.fill("input[name=q]", "half typed"))
        for number in (503, 504):
            make.lines(run_id, "a", [("warning", "came later")])
            await until(lines, lambda seen, number=number: seen == number)
        assert "504 lines" in await tab.text("#block-1 summary")
        assert await at(tab, "document.getElementById('block-1').open")
        assert await tab.do(lambda page: page.input_value("input[name=q]")) == "half typed"
        last = await at(tab, "[...document.querySelectorAll('#block-1 li')].map((li) => li.textContent).slice(-1)[0]")
        assert "came later" in last


@pytest.mark.full
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (360, "dark")])
async def test_u22_u23_pages_of_runs_have_no_fault_that_axe_finds_and_fit_a_phone(
    open_web, open_tab, make, width, theme
):
    good = make.run([("ods.rates", "succeeded"), ("ods.countries", "succeeded")], began=BEGAN - timedelta(days=1))
    tasks = [*NIGHTLY, *((name, "waiting") for name in HOSTILE)]
    nightly = make.run(tasks, status="failed")
    make.lines(
        nightly, "ods.countries", [("info", "GET /c?page=1"), ("warning", "w" * 300), ("error", "503")], phase="x"
    )
    make.failures(nightly, "ods.countries", 3)
    progress = {
        "load": "ods.rates",
        "segment": "2026",
        "requests": 10,
        "queued": 1,
        "active_workers": 2,
        "unwritten": 3,
    }
    running = make.run(
        [("ods.rates", "running"), ("dwd", "waiting")],
        status="running",
        progress=progress,
        began=datetime.now(UTC) - timedelta(minutes=4),
    )
    async with open_web() as web, open_tab(web.url, width=width, color_scheme=theme) as tab:
        for path in (
            "/ui/runs",
            f"/ui/runs/{nightly}?open=2&level=warning",
            f"/ui/runs/{nightly}/with/{good}",
            f"/ui/runs/{running}",
            f"/ui/runs/{running}/cancel",
            f"/ui/runs/{nightly}/failures",
        ):
            await tab.go(path)
            await tab.check_looks()
