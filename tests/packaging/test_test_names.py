"""Names of tests: at most 80 characters, so that a list shows them whole, and unique in their file."""

import ast
import re
from collections import Counter
from pathlib import Path

from tests_of import functions_of

TESTS = Path(__file__).parents[1]
MOST = 80


def wrong_names(source: str) -> list[str]:
    """Return the names of test functions that are too long, and those that a file has twice."""
    if not _wrong(Counter(re.findall(r"\bdef (test_\w+)", source))):
        return []  # nearly always: parsing all files takes a second
    return _wrong(Counter(test.name for test in functions_of(ast.parse(source))))


def _wrong(names: Counter[str]) -> list[str]:
    return [name for name, number in names.items() if len(name) > MOST or number > 1]


def test_each_test_name_is_unique_in_its_file_and_has_at_most_80_characters() -> None:
    wrong = {path: names for path in TESTS.rglob("test_*.py") if (names := wrong_names(path.read_text()))}
    assert not wrong, f"longer than {MOST} characters, or twice in the file: {wrong}"


def test_a_test_name_that_is_too_long_or_repeated_is_found() -> None:
    longest = "test_" + 75 * "a"
    source = (
        f"def {longest}(): ...\nasync def {longest}a(): ...\n"
        "def test_b(): ...\nasync def test_b(): ...\n"
        "class TestIt:\n    def test_c(self): ...\n    def test_c(self): ...\n"
        "def helper():\n    def test_d(): ...\n"
    )
    assert wrong_names(source) == [f"{longest}a", "test_b", "test_c"]
