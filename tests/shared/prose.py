"""Checks the language of the product, for `./run lint`: docstrings of functions, some phrases, and lines of Markdown.

    python tests/shared/prose.py

* The docstring of a function begins with a verb in the imperative. That of a property may be a noun phrase.
* Phrases with a double meaning, such as "at once", are refused in code and on pages.
* A line of prose in Markdown has at most 120 characters. Tables, code and the addresses of links do not count.

It reads texts and syntax trees only, and takes a few seconds.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tests_of import FACE, LAYERS

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = (*LAYERS, FACE, "deploy", "examples")
SUFFIXES: Final = frozenset({".html", ".js", ".json", ".py", ".sh", ".sql", ".yaml"})
PAGES: Final = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs")
LANDED: Final = re.compile(r"store/migrations/\d{4}_\w+\.sql")
"""Migrations, which never change once they have landed."""
GENERATED: Final = "<!-- Generated from"
UNREVISED: Final = frozenset[str]()
"""Pages that are not checked until they are revised."""
WIDTH: Final = 120
OTHER: Final = re.compile(r"\s*(?:[|<].*|`[^`]+`\W*)")
"""Lines of tables, of HTML, and of one piece of code."""

PHRASES: Final = MappingProxyType(
    {
        r"at\s+once": "write `immediately` or `concurrently`",
        r"so\s+many": "name the number and its unit",
        r"(?:is|are)\s+told": "write `receives`, `is notified` or `reports`",
        r"of\s+(?:its|their)\s+own\b(?!\s+\w+)": "write `own`, `separate` or `dedicated`",
        r"of\s+(?:its|their)\s+own\s+(?:and|as|at|by|for|if|in|is|of|on|or|that|to|when|which|with)": (
            "write `own`, `separate` or `dedicated`"
        ),
    }
)
"""Refused phrases, as patterns, each with advice."""
CLAUSES: Final = """
A After All An And Any Anything As At Because Before Between But By Each Either Every Everything For From How If In
Inside It Its Like Many More Most Neither No None Nothing Of On One Only Or Other Others Outside Same Several Some
Somebody Such That The Their These They This Those To Two What When Where Whether Which While Who Whoever Whom Whose
Why With Within Without
"""
"""Words that begin a clause or a noun phrase."""
WORDS: Final = """
Additional Column False First Greatest Last Maximum Minimum Newest Number Oldest Reason Row Second True Value
"""
"""Nouns and adjectives that began docstrings."""
NO_VERBS: Final = frozenset(f"{CLAUSES} {WORDS}".split())
VERBS: Final = frozenset({"Embed", "Feed", "Need", "Seed", "Bring", "Ping"})
"""Verbs that end like another form of a verb."""

NOUNS: Final = frozenset({"property", "cached_property", "fixture"})
"""Decorators of functions that stand for a value, whose docstrings may be noun phrases."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_command(docstring: str) -> bool:
    """Return whether a docstring begins with a verb in the imperative, as far as the form of the word shows it."""
    word = docstring.split(maxsplit=1)[0].rstrip(".,:;")
    if word in VERBS:
        return True
    if word in NO_VERBS or not re.fullmatch(r"[A-Z][a-z]+", word):
        return False
    return not re.search(r"(?<!s)s$|[^e]ed$|ing$", word)


def functions_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the docstring of each function, except properties and fixtures."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, Function) and (docstring := ast.get_docstring(node)):
            decorators = {ast.unparse(one).partition("(")[0].rpartition(".")[2] for one in node.decorator_list}
            if not decorators & NOUNS:
                yield node.lineno, docstring


def faults_of_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield the faulty docstrings of Python source, each with its line."""
    for line, docstring in functions_in(text):
        if not is_command(docstring):
            words = " ".join(docstring.split()[:4])
            yield line, f"docstring `{words} …`: begin it with a verb, such as Return, Raise or Add"


def faults_of_phrases(text: str) -> Iterator[tuple[int, str]]:
    """Yield the refused phrases of a text, each with its line."""
    for pattern, advice in PHRASES.items():
        for found in re.finditer(rf"\b{pattern}\b", text, re.IGNORECASE):
            phrase = " ".join(found[0].split())
            yield text.count("\n", 0, found.start()) + 1, f"`{phrase}`: {advice}"


def faults_of_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the long lines of prose of a page."""
    if GENERATED in text:
        return
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not OTHER.fullmatch(line):
            shown = re.sub(r"\]\([^)]*\)|^\[[^]]+\]: .*", "]", line)
            if len(shown) > WIDTH:
                yield number, f"{len(shown)} characters; prose has at most {WIDTH} a line"


def files_of(root: Path, folders: Iterable[str]) -> Iterator[Path]:
    """Yield the files of folders, in order, without those behind links."""
    for folder in folders:
        path = root / folder
        if path.is_file():
            yield path
        for found in sorted(path.rglob("*")) if path.is_dir() else ():
            if found.is_file() and not any(part.is_symlink() for part in (found, *found.relative_to(root).parents)):
                yield found


def faults_in(root: Path) -> Iterator[str]:
    """Yield the faults of the code and the pages below a folder, as `path:line: fault`."""
    for path in files_of(root, FOLDERS):
        name = path.relative_to(root).as_posix()
        if path.suffix in SUFFIXES and not LANDED.fullmatch(name):
            text = path.read_text("utf-8")
            faults = [*faults_of_phrases(text), *(faults_of_code(text) if path.suffix == ".py" else ())]
            yield from (f"{name}:{line}: {fault}" for line, fault in sorted(faults))
    for path in files_of(root, PAGES):
        name = path.relative_to(root).as_posix()
        if path.suffix == ".md" and name not in UNREVISED:
            text = path.read_text("utf-8")
            faults = [*faults_of_phrases(text), *faults_of_lines(text)]
            yield from (f"{name}:{line}: {fault}" for line, fault in sorted(faults))


def main() -> int:
    """Print the faults; return 1 if there are any."""
    faults = list(faults_in(ROOT))
    sys.stdout.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
