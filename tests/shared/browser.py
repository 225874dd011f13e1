"""Real browser for tests of the pages: Debian's Chromium, driven by Playwright in a separate thread.

This is a plugin of tests/conftest.py. The server runs in the test's Trio run, Playwright's synchronous API in one
thread for the whole session: a test runs code in that thread by `await tab.do(lambda page: …)`. At the end of the test,
a console error, a violation of the content security policy or a request to another server makes it fail.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from unittest import mock
from urllib.parse import urlsplit

import attrs
import pytest
import trio
from lacking import skip_without

T = TypeVar("T")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_MS = 20_000
"""Watchdog for actions of a page that should take effect immediately."""


@attrs.define
class Browser:
    """Chromium, started when the first test needs it."""

    thread: ThreadPoolExecutor = attrs.field(factory=lambda: ThreadPoolExecutor(1, "browser"))
    chromium: Any = None
    playwright: Any = None

    def start(self) -> None:
        from playwright.sync_api import sync_playwright  # noqa: PLC0415 - most tests do not need it

        if self.playwright is None:
            # Once a test has loaded trio_asyncio, new event loops in every thread are of its own kind.
            with mock.patch("asyncio.new_event_loop", asyncio.SelectorEventLoop):
                self.playwright = sync_playwright().start()
        if self.chromium is None:
            self.chromium = self.playwright.chromium.launch(
                executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
            )

    def stop(self) -> None:
        if self.chromium is not None:
            self.chromium.close()
        if self.playwright is not None:
            self.playwright.stop()

    async def do(self, act: Callable[[], T]) -> T:
        """Run a function in the browser's thread."""
        return await trio.to_thread.run_sync(lambda: self.thread.submit(act).result(), abandon_on_cancel=True)


@attrs.define
class Tab:
    """Page in a separate browser profile.

    faults: errors of the page. requests: URLs that it has requested. under_way: requests whose answers have not ended.
    """

    browser: Browser
    context: Any
    page: Any
    origin: str
    faults: list[str] = attrs.field(factory=list)
    requests: list[str] = attrs.field(factory=list)
    under_way: set[Any] = attrs.field(factory=set)
    expected: set[int] = attrs.field(factory=set)
    look: str = "light"

    async def do(self, act: Callable[[Any], T]) -> T:
        """Run `act(page)` in the browser's thread."""
        return await self.browser.do(lambda: act(self.page))

    async def text(self, selector: str = "main") -> str:
        """Return the text that a reader sees."""
        return await self.do(lambda page: page.inner_text(selector))

    async def take_clock(self) -> None:
        """Let `pass_time` move the clock of pages that are opened later; the clock also runs by itself."""
        await self.do(lambda page: page.clock.install())

    async def pass_time(self) -> None:
        """Move the pages' clock forward by 5 s when no request is in progress: one may take 20 s of that clock."""

        def forward(page: Any) -> None:
            waited_ms = 0
            while self.under_way:
                page.wait_for_timeout(10)
                waited_ms += 10
                assert waited_ms < PATIENCE_MS, f"without an answer: {[request.url for request in self.under_way]}"
            page.clock.fast_forward(5_000)

        await self.do(forward)

    async def go(self, path: str) -> None:
        """Open one of our pages."""
        await self.do(lambda page: page.goto(self.origin + path))

    async def check_looks(self) -> None:
        """Fail for violations that axe finds (WCAG 2.2 AA and best practices), and for a page that scrolls sideways."""
        from axe_playwright_python.sync_playwright import Axe  # noqa: PLC0415 - most tests do not need it

        def look(page: Any) -> tuple[list[str], list[int]]:
            # A dialog that is fading in has pale text. The mark of a live page pulses without an end.
            ends = "(one) => one.effect.getComputedTiming().endTime < Infinity"
            page.evaluate(f"Promise.all(document.getAnimations().filter({ends}).map((one) => one.finished))")
            found = Axe().run(page).response["violations"]
            faults = [f"{one['id']}: {one['help']}: {node['html'][:200]}" for one in found for node in one["nodes"]]
            root = "document.documentElement"
            return faults, page.evaluate(f"[{root}.scrollWidth, {root}.clientWidth]")

        faults, (needed, there) = await self.do(look)
        assert not faults
        assert needed <= there, f"the page is {needed} wide, the window {there}"
        if folder := os.environ.get("SCREENSHOTS"):
            await self.do(lambda page: page.screenshot(path=f"{folder}/{self.page_name()}.png", full_page=True))

    def page_name(self) -> str:
        """Return a file name for the page in its current form."""
        at = urlsplit(self.page.url)
        subject = re.sub(r"[^a-z-]+", "-", at.path.removeprefix("/ui").lower()).strip("-") or "overview"
        size = self.page.viewport_size["width"]
        return f"{subject}-{size}-{self.look}"

    def watch(self) -> None:
        def note_request(request: Any) -> None:
            self.requests.append(request.url)
            self.under_way.add(request)
            at = urlsplit(request.url)
            if at.scheme not in {"data", "blob", "about"} and f"{at.scheme}://{at.netloc}" != self.origin:
                self.faults.append(f"asked another server: {request.url}")

        def note_end(request: Any) -> None:
            self.under_way.discard(request)

        def note_line(line: Any) -> None:
            refused = any(f"status of {status} " in line.text for status in self.expected)
            if line.type in {"error", "warning"} and not refused:
                self.faults.append(f"console: {line.type}: {line.text}")

        self.context.on("request", note_request)
        self.context.on("requestfinished", note_end)
        self.context.on("requestfailed", note_end)
        self.page.on("console", note_line)
        self.page.on("pageerror", lambda error: self.faults.append(f"script: {error}"))
        self.page.set_default_timeout(PATIENCE_MS)


@pytest.fixture(scope="session")
def browser():
    """Return the session's browser. Without Chromium the tests are skipped; in CI they fail."""
    if CHROMIUM is None:
        skip_without("Chromium is missing: apt-get install chromium")
    browser = Browser()
    yield browser
    browser.thread.submit(browser.stop).result(30)
    browser.thread.shutdown()


@pytest.fixture
def open_tab(browser):
    """Open a tab: `async with open_tab(url, …) as tab`. Other keywords are those of Playwright's contexts.

    `expected`: HTTP errors that the test provokes.
    """

    @asynccontextmanager
    async def open_tab(origin, *, expected=(), width=1280, height=900, **options):
        def make():
            browser.start()
            context = browser.chromium.new_context(viewport={"width": width, "height": height}, **options)
            look = options.get("color_scheme", "light")
            tab = Tab(browser, context, context.new_page(), origin, expected=set(expected), look=look)
            tab.watch()
            return tab

        tab = await browser.do(make)
        try:
            yield tab
        finally:
            with trio.CancelScope(shield=True):
                await browser.do(tab.context.close)
        assert not tab.faults

    return open_tab
