"""The documentation as a site: `just site` builds it from docs/, offline, into build/site.

Pages outside of docs/ (README, CHANGELOG, CONTRIBUTING, SECURITY, those of benchmarks/) have stubs in docs/ and are
read from there. Every warning is an error: a broken link or anchor fails the build. Neither the
build nor the pages need other hosts. `llms.txt` lists all pages, with their sources, for programs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING

from docutils import nodes

if TYPE_CHECKING:
    from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
BESIDE = {
    "index": "README.md",
    "changelog": "CHANGELOG.md",
    "contributing": "CONTRIBUTING.md",
    "benchmarks": "benchmarks/README.md",
    "benchmark-results": "benchmarks/results.md",
    "benchmark-decisions": "benchmarks/decisions.md",
    "security-policy": "SECURITY.md",
}

project = "dataloader"
author = "The dataloader authors"
copyright = author  # noqa: A001 - Sphinx's name
release = version_of("dataloader-supervisor")
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["site/**"]
highlight_language = "none"
smartquotes = False  # JSON in a sentence is copied as it is

html_theme = "furo"
html_title = "dataloader"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = True
html_theme_options = {"top_of_page_buttons": []}
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_exclude = ".linenos, .gp, .go"

myst_heading_anchors = 4
myst_enable_extensions = ["tasklist"]
myst_enable_checkboxes = True


def read(_app: Sphinx, docname: str, source: list[str]) -> None:
    """Take a page that stands beside docs/ from there, and lead links to those pages to their place in the site."""
    text = source[0]
    if docname in BESIDE:
        stub, text = text, (DOCS.parent / BESIDE[docname]).read_text()
        folder = Path(BESIDE[docname]).parent
        if folder.name:
            text = re.sub(r"(?<=\]\()(?!https?:|#)([^)]+)", lambda link: os.path.normpath(folder / link[1]), text)
        text = re.sub(r"(?<=\]\()docs/", "/", text)
        text = re.sub(r"(?<=\]\()examples/(?=\))", "/recipes/index.md", text)
        text = re.sub(r"(?<=\]\()(?!https?:|#|/)", "/../", text)
        text += stub[stub.index("\n```{toctree}") :] if "```{toctree}" in stub else ""
    for name, file in BESIDE.items():
        text = re.sub(rf"(?<=\]\()(?:\.\./|/\.\./)+{file}", f"/{name}.md", text)
    source[0] = text.replace("```sql\n", "```postgres\n")  # which knows the bodies of DO


def read_again(*_about: object) -> list[str]:
    """Sphinx looks at the times of the stubs alone: the pages that stand beside docs/ are read in each build."""
    return [*BESIDE]


def tell_programs(app: Sphinx, failed: Exception | None) -> None:
    """Write `llms.txt`, each page with its first sentence, and `llms-full.txt`, which has all of them."""
    if failed is not None:
        return
    titles, out = app.env.titles, Path(app.outdir)
    for docname, file in BESIDE.items():
        (out / "_sources" / f"{docname}.md.txt").write_text((DOCS.parent / file).read_text())
    lines, whole = [f"# {project}", "", f"> {_first_sentence(app, 'index')}", "", "## Pages", ""], []
    for docname in _in_order(app, "index"):
        source = f"_sources/{docname}.md.txt"
        lines.append(f"- [{titles[docname].astext()}]({source}): {_first_sentence(app, docname)}")
        whole.append((out / source).read_text().strip())
    (out / "llms.txt").write_text("\n".join(lines) + "\n")
    (out / "llms-full.txt").write_text("\n\n---\n\n".join(whole) + "\n")


def _in_order(app: Sphinx, docname: str) -> Iterator[str]:
    yield docname
    for below in app.env.toctree_includes.get(docname, ()):
        yield from _in_order(app, below)


def _first_sentence(app: Sphinx, docname: str) -> str:
    paragraph = next(app.env.get_doctree(docname).findall(nodes.paragraph))
    return re.match(r".*?[.](?= |$)|.*", paragraph.astext().replace("\n", " "))[0].rstrip(":")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", read)
    app.connect("env-get-outdated", read_again)
    app.connect("build-finished", tell_programs)
