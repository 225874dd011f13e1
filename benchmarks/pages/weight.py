"""Size of a page: bytes of its HTML, of scripts and styles over the wire, its statements, and its first paint."""

from __future__ import annotations

import re
import shutil
import statistics
import time
from pathlib import Path
from typing import Any, Final

import psycopg

from benchmarks.pages.site import addresses, connected, fill, get, service
from benchmarks.peers.progress import say
from benchmarks.scheduling.databases import migrated
from benchmarks.scheduling.reached import Reached
from dataloader.store.embedded.postgres import EmbeddedPostgres
from dataloader.web.pages.assets import ASSETS

ENDED: Final = 20_000
PAINTS: Final = 5
_STATEMENT: Final = re.compile(r"LOG:  (?:statement|execute [^:]*): (.*(?:\n\t.*)*)")
_AS_A_BROWSER: Final = {"Accept-Encoding": "gzip", "Sec-Fetch-Site": "same-origin"}
_OURS: Final = re.compile(
    r"BEGIN|COMMIT|ROLLBACK|SET |RESET |FETCH|DISCARD|SELECT pg_advisory_unlock_all|CLOSE", re.IGNORECASE
)


def measure(server: EmbeddedPostgres, folder: Path) -> list[Reached]:
    """Measure everything, on a database of twenty thousand ended jobs."""
    dsn = migrated(server, "weight")
    fill(dsn, ENDED)
    lines = [
        Reached("scripts over the wire, kB", _kilobytes(".js"), most=20),
        Reached("style sheet over the wire, kB", _kilobytes(".css"), most=14),
    ]
    with service(server, "weight", folder) as fleet:
        fleet.wait()
        url = str(fleet.services[0].url)
        pages = addresses(dsn)
        lines += _sizes(url, pages)
        lines += _paints(url, pages)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("ALTER DATABASE weight SET log_statement = 'all'")
    with service(server, "weight", folder) as fleet:
        fleet.wait()
        lines += _counts(server, str(fleet.services[0].url), pages)
    return lines


def _kilobytes(suffix: str) -> float:
    return sum(len(asset.zipped) for name, asset in ASSETS.items() if name.endswith(suffix)) / 1_000


def _sizes(url: str, pages: dict[str, str]) -> list[Reached]:
    connection, sizes = connected(url), {}
    for name, path in pages.items():
        status, body, _ = get(connection, path, _AS_A_BROWSER)
        if status != 200:
            raise SystemExit(f"{path} was answered {status}:\n{body.decode()[:2000]}")
        sizes[name] = len(body) / 1_000
    largest = max(sizes, key=lambda name: sizes[name])
    files = _kilobytes(".js") + _kilobytes(".css")
    whole = sizes[largest] + files
    return [Reached("the largest page over the wire with its files, kB", whole, most=60, note=largest)]


def _paints(url: str, pages: dict[str, str]) -> list[Reached]:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - needs Chromium

    cold: dict[str, float] = {}
    warm: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        for name, path in pages.items():
            say(f"paints of {path}")
            first, again = [], []
            for _ in range(PAINTS):
                context = browser.new_context()
                page = context.new_page()
                first.append(_painted(page, url + path))
                again.append(_painted(page, url + path))
                context.close()
            cold[name], warm[name] = statistics.median(first), statistics.median(again)
        browser.close()
    worst = max(cold, key=lambda name: cold[name])
    worst_warm = max(warm, key=lambda name: warm[name])
    return [
        Reached("first paint, cold, ms: the slowest page's median", cold[worst], most=300, note=worst),
        Reached("first paint, warm, ms: the slowest page's median", warm[worst_warm], most=100, note=worst_warm),
    ]


def _painted(page: Any, address: str) -> float:
    page.goto(address)
    script = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
    for _ in range(200):
        if took := float(page.evaluate(script)):
            return took
        time.sleep(0.01)
    raise SystemExit(f"{address} was not painted")


def _counts(server: EmbeddedPostgres, url: str, pages: dict[str, str]) -> list[Reached]:
    """Count the statements of a page, and of its live part; an idle process's own statements are the same noise."""
    connection = connected(url)
    of_page: dict[str, int] = {}
    of_part: dict[str, int] = {}
    for name, path in pages.items():
        get(connection, path)  # sessions open, plans are cached
        of_page[name] = min(_counted(server, connection, path) for _ in range(3))
        _, body, _ = get(connection, path)
        if live := re.search(rb'data-part="(\w+)" data-live', body):
            part = f"{path}{'&' if '?' in path else '?'}part={live[1].decode()}"
            of_part[name] = min(_counted(server, connection, part) for _ in range(3))
    most, most_part = max(of_page, key=lambda name: of_page[name]), max(of_part, key=lambda name: of_part[name])
    return [
        Reached("statements of a page, at most", of_page[most], most=4, note=most),
        Reached("statements of a live part, at most", of_part[most_part], most=2, note=most_part),
    ]


def _counted(server: EmbeddedPostgres, connection: Any, path: str) -> int:
    before = len(_statements(server))
    get(connection, path)
    time.sleep(0.05)
    return sum(not _OURS.match(said) for said in _statements(server)[before:])


def _statements(server: EmbeddedPostgres) -> list[str]:
    return _STATEMENT.findall(server.log_path.read_text(errors="replace"))
