"""The documentation as a site: it builds without a warning and requests nothing from other hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytestmark = [pytest.mark.full, pytest.mark.long]

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the site, built like `just site`."""
    recipe = re.search(r"^site: .*\n +\{\{ bin \}\}/sphinx-build (.*)$", (ROOT / "justfile").read_text(), re.MULTILINE)[
        1
    ]
    out = tmp_path_factory.mktemp("site")
    places = {"build/site": str(out / "html"), "build/site-trees": str(out / "trees")}
    command = [sys.executable, "-m", "sphinx", *(places.get(option, option) for option in recipe.split())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return out / "html"


class _Resources(HTMLParser):
    """Resources that a page loads when it is shown."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        if tag in {"script", "img", "iframe", "source", "video"}:
            self.addresses.append(found.get("src") or "")
        if tag == "link" and found.get("rel") not in {"search", "index", "next", "prev", "canonical"}:
            self.addresses.append(found["href"])


def test_the_site_builds_without_a_warning_and_asks_nothing_of_others(site):
    pages = {path.relative_to(site).with_suffix("").as_posix(): path.read_text() for path in site.rglob("*.html")}
    written = {path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")}
    assert pages.keys() == written | {"genindex", "search", "py-modindex"} & pages.keys()
    for name, text in pages.items():
        resources = _Resources()
        resources.feed(text)
        assert [one for one in resources.addresses if re.match(r"(https?:)?//", one)] == [], name
    for path in site.rglob("*.css"):
        assert not re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", path.read_text()), path
    assert (site / "searchindex.js").stat().st_size > 100_000
    listed = re.findall(r"\]\(_sources/(\S+)\.md\.txt\): \S", (site / "llms.txt").read_text())
    assert sorted(listed) == sorted(written)
    whole = (site / "llms-full.txt").read_text()
    assert "# Writing tasks" in whole
    assert "## [Unreleased]" in whole
