"""Programs of the pages that need only Python and a database run as they are shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str, section: str = "") -> list[str]:
    """Return the blocks of Python of a page, or of one of its sections."""
    text = (DOCS / page).read_text()
    if section:
        text = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", ["limits.md", "scheduling.md", "process-isolation.md"])
def test_the_first_program_of_a_page_declares_its_tasks(page):
    module: dict = {}
    exec(compile(programs(page)[0], page, "exec"), module)
    assert module["tasks"]


@pytest.mark.slow
async def test_the_tests_of_the_page_on_processes_pass():
    module: dict = {}
    exec(compile(programs("processes.md")[0], "processes.md", "exec"), module)
    [tests] = programs("processes.md", "Testing")
    exec(compile(tests, "processes.md", "exec"), module)
    shown = [value for name, value in module.items() if name.startswith("test_")]
    for test in shown:
        await test()
    assert len(shown) == 2
