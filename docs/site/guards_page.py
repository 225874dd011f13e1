"""Generator of docs/guards.md from the guards in tests/shared/broken.py: `just reference` writes the page."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "guards.md"
HEAD: Final = """\
# Guards

<!-- Generated from tests/shared/broken.py by `just reference`. Do not edit it. -->

A guard is a part of the protocol that prevents a fault, such as a fence, a lock, a check or a deadline. For each guard,
a test fails when the guard is removed: see [how it is verified](verified.md#guards).

| guard | what it ensures | the test that fails without it |
| --- | --- | --- |
"""


def page() -> str:
    """Return the text of the page."""
    sys.path.insert(0, str(ROOT / "tests" / "shared"))
    guards = import_module("tests_of").Index(ROOT).guards
    return HEAD + "".join(f"| {guard.name} | {guard.does} | `{guard.test}` |\n" for guard in guards)


PAGES: Final = {PAGE: page}

if __name__ == "__main__":
    PAGE.write_text(page())
